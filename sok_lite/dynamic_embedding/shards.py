"""One shard of a variable: the keys that its partitioner gives a number."""

from typing import Any

import tensorflow as tf

from sok_lite.bridge.autograph import unconverted
from sok_lite.dynamic_embedding import file_methods


@unconverted
class Shard(tf.__internal__.tracking.Trackable):
    """A view of one shard of a variable. All shards lie in one table.

    A checkpoint or a Saver that is given a shard saves that table: all shards, once.

    Args:
      variable: a `Variable`.
      index: of the shard.
    """

    def __init__(self, variable: Any, index: int) -> None:
        self._variable = variable
        self.index = index
        self.name = f"{variable.name}_{index + 1}of{variable.shard_num}"
        self.key_dtype, self.value_dtype = variable.key_dtype, variable.value_dtype
        self.device = variable.devices[index]
        if variable.checkpoint:
            self._track_trackable(variable.rows, "rows")

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        return self._variable._gather_saveables_for_checkpoint()

    def export(self, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the shard's keys (n,) and their rows (n, dim)."""
        keys, values = self._variable.rows.export()
        is_here = tf.equal(self._variable.shards_of(keys), self.index)
        return tf.boolean_mask(keys, is_here), tf.boolean_mask(values, is_here)

    def size(self, name: str | None = None) -> tf.Tensor:
        """Returns how many keys the shard has, scalar int64. It looks at all keys."""
        return tf.size(self.export()[0], tf.int64)

    def lookup(
        self,
        keys: Any,
        dynamic_default_values: Any = None,
        return_exists: bool = False,
        name: str | None = None,
    ) -> Any:
        """Returns the rows of keys of any shape, keys.shape + [dim]; it changes nothing."""
        return self._variable.rows.lookup(keys, dynamic_default_values, return_exists)

    def insert(self, keys: Any, values: Any, name: str | None = None) -> Any:
        """Sets the rows of keys, inserting new ones. The partitioner says whose they are."""
        return self._variable.upsert(keys, values)

    def accum(self, keys: Any, values_or_deltas: Any, exists: Any, name: str | None = None) -> Any:
        """Adds to the rows of keys that the caller found, and inserts the others."""
        return self._variable.rows.accum(keys, values_or_deltas, exists)

    def clear(self, name: str | None = None) -> Any:
        """Removes the keys of the shard."""
        return self._variable.remove(self.export()[0])

    def remove(self, keys: Any, name: str | None = None) -> Any:
        """Removes keys, with rows and optimizer states; missing ones are left out."""
        return self._variable.remove(keys)

    save_to_file_system = file_methods.save_table
    load_from_file_system = file_methods.load_table

    @property
    def saved_as(self) -> tuple[Any, int | None]:
        """Whose files its methods write and read, and the number of the shard."""
        return self._variable, self.index
