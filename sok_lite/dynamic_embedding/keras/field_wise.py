"""`FieldWiseEmbedding` for either Keras: rows of keys, combined by field."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.keras.called import as_keys
from sok_lite.dynamic_embedding.keras import config as configs
from sok_lite.dynamic_embedding.keras.parts import EmbeddingPart


class FieldWiseEmbeddingPart(EmbeddingPart):
    """Rows of keys, combined by field: ids (batch, n) give (batch, nslots, embedding_size).

    Args:
      embedding_size: elements of a row.
      nslots: number of fields.
      slot_map_fn: takes ids and gives the field of each, of the same shape, in [0, nslots).
      others: of `Embedding`, but `combiner` is "sum", "mean" or "sqrtn". A field without ids is 0.

    Raises:
      ValueError: `slot_map_fn` cannot be called.
      TypeError: `nslots` is no integer.
    """

    _combiners = ("sum", "mean", "sqrtn")

    def __init__(
        self,
        embedding_size: int,
        nslots: int,
        slot_map_fn: Callable[[tf.Tensor], Any] | None = None,
        key_dtype: Any = tf.int64,
        value_dtype: Any = tf.float32,
        combiner: str = "sum",
        initializer: Any = None,
        devices: str | Sequence[str] | None = None,
        name: str = "SlotDynamicEmbeddingLayer",
        with_unique: bool = True,
        short_file_name: bool = False,
        **kwargs: Any,
    ) -> None:
        if not callable(slot_map_fn):
            raise ValueError(
                "`slot_map_fn` must be a function that takes ids and gives the field of each. "
                f"Received: slot_map_fn={slot_map_fn!r}."
            )
        nslots = configs.as_integer("nslots", nslots)
        super().__init__(
            embedding_size,
            key_dtype,
            value_dtype,
            combiner,
            initializer,
            devices,
            name,
            with_unique,
            short_file_name,
            **kwargs,
        )
        self.nslots, self.slot_map_fn = nslots, slot_map_fn
        self._configured.nslots, self._configured.slot_map_fn = nslots, slot_map_fn

    def call(self, ids: Any) -> tf.Tensor:
        """Returns the rows of ids, combined by their fields."""
        if len(ids.shape) > 2:
            raise NotImplementedError(
                "FieldWiseEmbedding takes ids (batch, n) or (n,). Received: ids of rank "
                f"{len(ids.shape)}. Reshape them."
            )
        ids = as_keys(ids, self.key_dtype_name)
        slots = tf.cast(self.slot_map_fn(ids), tf.int64)
        if isinstance(ids, tf.RaggedTensor):
            batch, number = ids.nrows(tf.int64), tf.cast(ids.value_rowids(), tf.int64)
            flat, slots = ids.flat_values, getattr(slots, "flat_values", slots)
        else:
            ids = tf.convert_to_tensor(ids)
            batch = tf.shape(ids, tf.int64)[0] if ids.shape.rank == 2 else tf.ones([], tf.int64)
            flat, slots = tf.reshape(ids, [-1]), tf.reshape(slots, [-1])
            each = tf.size(flat, tf.int64) // tf.maximum(batch, 1)
            number = tf.repeat(tf.range(batch), each)
        slots = _checked_slots(slots, self.nslots)
        rows = self._rows(flat)
        combine = getattr(tf.math, f"unsorted_segment_{self.combiner.replace('sqrtn', 'sqrt_n')}")
        combined = combine(rows, number * self.nslots + slots, batch * self.nslots)
        shape = [self.nslots, self.embedding_size]
        if len(ids.shape) == 1:
            return tf.reshape(combined, shape)
        return tf.reshape(combined, tf.stack([batch, *shape]))

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        """Returns the shape of what ids of a shape give."""
        outer = list(tf.TensorShape(input_shape))
        return tf.TensorShape([*outer[: len(outer) > 1], self.nslots, self.embedding_size])


def _checked_slots(slots: tf.Tensor, nslots: int) -> tf.Tensor:
    text = f"slot_map_fn must give numbers in [0, {nslots})."
    check = tf.debugging.Assert(tf.reduce_all((slots >= 0) & (slots < nslots)), [text, slots])
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(slots)
