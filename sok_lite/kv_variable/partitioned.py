"""`PartitionedKvVariable`: one table as several TensorFlow variables."""

import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.tf_private import PartitionedVariable
from sok_lite.engine.table import EmbeddingTable
from sok_lite.kv_variable.kv_variable_ops import KvVariable
from sok_lite.kv_variable.kv_variable_options import KvOptions
from sok_lite.kv_variable.saved_table import SavedTable
from sok_lite.kv_variable.share import Share


@unconverted
class PartitionedKvVariable(KvVariable, PartitionedVariable):
    """A KvVariable whose keys are split over several, `<name>/part_0` and so on.

    A graph trains, saves and lists the partitions; a key is in partition key mod their number. All
    share one table, and a lookup is one call. Arguments as for `KvVariable`; `collections` are for
    the partitions.
    """

    kind = "PartitionedKvVariable"
    _distribute_strategy = None  # a property without a setter in TensorFlow's class

    def __init__(
        self,
        table: EmbeddingTable,
        *,
        name: str,
        trainable: bool,
        collections: Sequence[str],
        options: KvOptions,
        num_partitions: int,
    ) -> None:
        saved = SavedTable(table, name, num_partitions)
        self._variable_list = [
            KvVariable(
                table,
                name=f"{name}/part_{number}",
                trainable=trainable,
                collections=collections,
                options=options,
                share=Share(number, num_partitions),
                saved=saved,
            )
            for number in range(num_partitions)
        ]
        self._partitions = [num_partitions, 1]
        self._plain_name = name
        for part in self._variable_list:
            part._whole = weakref.ref(self)
        super().__init__(
            table, name=name, trainable=False, collections=(), options=options, saved=saved
        )

    @property
    def name(self) -> str:  # type: ignore[override]
        """The name, without ":0"."""
        return self._plain_name

    @property
    def trainable(self) -> bool:
        """Whether the partitions are trained."""
        return bool(self._variable_list[0].trainable)

    @property
    def initializer(self) -> Any:
        """The operation of a TF1 graph that initializes all partitions."""
        return tf.group(*(part.initializer for part in self)) if self._in_graph_mode else None

    @property
    def parts(self) -> list[KvVariable]:
        """The partitions."""
        return list(self._variable_list)

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        """Returns whether all partitions are initialized in this session."""
        return tf.reduce_all([part.is_initialized() for part in self], name=name)

    def __iter__(self) -> Iterator[KvVariable]:
        """Yields the partitions."""
        return iter(self._variable_list)

    def __len__(self) -> int:
        return len(self._variable_list)

    def as_tensor(self) -> tf.Tensor:
        """Returns all rows, (n, dim), by ascending key."""
        return self.value()
