"""The host half of `lookup_sparse` in tables that grow."""

from collections.abc import Sequence

import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge.inference import MissingKeyPolicy, pipeline_of_trace, reading, refuse_to_insert
from sok_lite.bridge.joined import ResultBuffer
from sok_lite.bridge.lookup_arguments import TableSpec
from sok_lite.bridge.pooled_host import BackwardParts, PooledHost
from sok_lite.bridge.tensor import to_tensor
from sok_lite.comm import Communicator
from sok_lite.engine import lookup
from sok_lite.engine.agreement import agree
from sok_lite.engine.backward_context import BackwardContext, pack, unpack
from sok_lite.engine.batch import Batch
from sok_lite.engine.failure import failure_known_to_all, shared_failure
from sok_lite.engine.table import EmbeddingTable


class LookupHost(PooledHost):
    """The host half of one call; `backward` gives the keys, int64, of all tables joined, as well.

    Args:
      policy: for keys without a row.
    """

    more_dtypes = (tf.int64,)

    def __init__(
        self, comm: Communicator, tables: list[TableSpec], policy: MissingKeyPolicy, what: str
    ) -> None:
        super().__init__(comm, tables, what)
        self._policy = policy
        self._tag_of_call = self._tag(tables)
        self._pipeline = pipeline_of_trace()

    def _forward(self, buffer: ResultBuffer, *tensors: tf.Tensor) -> BackwardContext:
        with shared_failure(self.comm):
            tables = self._live_tables()
        agree(self.comm, self._tag_of_call, tables, self._combiners)
        with shared_failure(self.comm):
            batch = self._batch(tables, tensors)
        return lookup.forward(self.backend, self.comm, batch, self._tag_of_call, buffer)[1]

    def _batch(self, tables: list[EmbeddingTable], tensors: Sequence[tf.Tensor]) -> Batch:
        training, missing, has_filter, reading_only = self._policy
        usually = "zeros" if has_filter else "initial"
        insert, missing = reading(training, missing, usually, reading_only)
        if insert and self._pipeline:
            refuse_to_insert(self._pipeline, ", ".join(spec.name for spec in self.tables))
        items, n = self._items(tensors), len(tables)
        return Batch(
            tables,
            self._layout_of(tables, items),
            keys=items.keys,
            row_splits=items.row_splits,
            weights=items.weights,
            inserts=[insert] * n,
            missing=[missing] * n,
            filter_ratios=[table.filter_ratio if has_filter else 1.0 for table in tables],
        )

    def _backward(
        self,
        parts: BackwardParts,
        out_grads: Sequence[Array],
        context: BackwardContext,
        buffer: ResultBuffer,
    ) -> tuple[list[int], Sequence[Array | None], list[tf.Tensor]]:
        with failure_known_to_all(self.comm):
            found = lookup.backward(self.backend, parts, out_grads, context, buffer)
        keys = to_tensor(found.keys.whole, tf.int64, self.backend)
        return found.sizes, found.weight_grads, [keys]

    def _packed(self, context: BackwardContext, at_hand: Sequence[Array]) -> Array:
        return pack(self.backend, context, self._new_words, at_hand, self._has_splits)

    def _unpacked(self, packed: Array, at_hand: Sequence[Array]) -> BackwardContext:
        num_parts = len(self.tables)
        return unpack(self.backend, self.comm, packed, num_parts, at_hand, self._splits_of)
