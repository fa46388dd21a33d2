"""`HkvHashTable`: a bounded table that evicts keys, with two memory tiers."""

import threading
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import tensorflow as tf

from sok_lite.bridge import table_exports, table_ops
from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.table_call import array_call
from sok_lite.dynamic_embedding.tables import HashTable
from sok_lite.engine.dtypes import is_integer
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.directory import LINE
from sok_lite.engine.table.hkv_options import MAX_CAPACITY, STRATEGIES


class HkvEvictStrategy(IntEnum):
    """How a full table evicts keys: the lowest score first.

    The score is the number of the last lookup or write that saw the key (LRU), its frequency (LFU),
    either of them after an epoch (EPOCHLRU, EPOCHLFU), or given by the program (CUSTOMIZED).
    """

    LRU = 0
    LFU = 1
    EPOCHLRU = 2
    EPOCHLFU = 3
    CUSTOMIZED = 4


@unconverted
class HkvHashTable(HashTable):
    """A table that evicts keys beyond `max_capacity`.

    Rows beyond `max_hbm_for_values` lie in host memory. Lookups by the program do not count as
    seen, because they change nothing: writes and training do. Further arguments as for
    `CuckooHashTable`.

    Args:
      init_capacity: initial number of keys. TFRA starts with 1,048,576; this table grows.
      max_capacity: keys before eviction, rounded up to a power of two. The default 2**31 evicts
        none; TFRA's is 1,048,576.
      max_hbm_for_values: bytes of rows in GPU memory.
      config, device, shard_saveable_object_fn, reserved_key_start_bit: not used.
      evict_strategy: a `HkvEvictStrategy`.
      step_per_epoch: writes and training steps per epoch, for EPOCHLRU and EPOCHLFU; 0: one epoch.
      gen_scores_fn: maps keys (n,) to integer scores (n,), for CUSTOMIZED.

    Raises:
      ValueError: an option out of range, or CUSTOMIZED without `gen_scores_fn`.
    """

    kind = "de.HkvHashTable"
    var_type = "hybrid"

    def __init__(
        self,
        key_dtype: Any,
        value_dtype: Any,
        default_value: Any,
        name: str = "HkvHashTable",
        checkpoint: bool = True,
        init_capacity: int = 0,
        max_capacity: int = MAX_CAPACITY,
        max_hbm_for_values: int = 1 << 30,
        config: Any = None,
        device: str = "",
        shard_saveable_object_fn: Callable[..., Any] | None = None,
        evict_strategy: HkvEvictStrategy = HkvEvictStrategy.LRU,
        step_per_epoch: int = 0,
        gen_scores_fn: Callable[[tf.Tensor], Any] | None = None,
        reserved_key_start_bit: int = 0,
    ) -> None:
        strategy = HkvEvictStrategy(evict_strategy)
        if strategy is HkvEvictStrategy.CUSTOMIZED and gen_scores_fn is None:
            raise ValueError(
                "HkvEvictStrategy.CUSTOMIZED needs `gen_scores_fn`, which gives the scores of "
                "keys. Received: gen_scores_fn=None."
            )
        if not is_integer(step_per_epoch) or step_per_epoch < 0:
            raise ValueError(
                "`step_per_epoch` must be an integer from 0 on. "
                f"Received: step_per_epoch={step_per_epoch!r}."
            )
        most = _capacity(max_capacity)
        options = {
            "init_capacity": min(_capacity(init_capacity), most) if init_capacity else None,
            "max_capacity": most,
            "max_hbm_for_vectors": max_hbm_for_values / 2**30,
            "evict_strategy": STRATEGIES[strategy],  # in the same order
        }
        self._gen_scores = gen_scores_fn if strategy is HkvEvictStrategy.CUSTOMIZED else None
        is_by_epoch = strategy in (HkvEvictStrategy.EPOCHLRU, HkvEvictStrategy.EPOCHLFU)
        self._step_per_epoch = step_per_epoch if is_by_epoch else 0
        self._steps, self._counting = 0, threading.Lock()
        super().__init__(key_dtype, value_dtype, default_value, name, checkpoint, options)
        # Lookups of this API do not mark a key as seen; training does.
        self.table.sees_updates = True

    def insert(self, keys: Any, values: Any, name: str | None = None) -> Any:
        """As `HashTable.insert`; also counts a step of the epoch."""
        done = super().insert(keys, values)
        if not self._step_per_epoch:
            return done
        with tf.control_dependencies([] if done is None else [done]):
            return self._count_step()

    def _accumulate_rows(self, keys: tf.Tensor, exists: Any, *values: tf.Tensor) -> Any:
        done = super()._accumulate_rows(keys, exists, *values)
        with tf.control_dependencies([] if done is None else [done]):
            after = self.after_update(tf.reshape(keys, [-1]))
        return done if after is None else after

    def after_update(self, keys: tf.Tensor) -> Any:
        """Sets scores of trained keys (n,), and counts a step; returns the operation, if any."""
        done = None
        if self._gen_scores is not None:
            done = table_ops.assign_scores(self, keys, self._gen_scores(self.original_keys(keys)))
        return self._count_step() if self._step_per_epoch else done

    def export_keys_and_scores(
        self, split_size: int, name: str | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns all keys (n,) and scores (n,) int64, reading `split_size` (>= 1) at a time."""
        keys, _, scores = self.export_with_scores(split_size)
        return keys, scores

    def export_with_scores(
        self, split_size: int, name: str | None = None
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Returns all keys (n,), rows (n, dim) and scores (n,) int64, `split_size` at a time."""
        if not is_integer(split_size) or split_size < 1:
            raise ValueError(
                f"`split_size` must be an integer above 0. Received: split_size={split_size!r}."
            )
        keys, values = table_exports.export(self)
        scores = tf.cast(table_ops.scores(self, keys), tf.int64)
        return self.original_keys(keys), values, scores

    def scores_of(self, keys: tf.Tensor) -> tf.Tensor | None:
        return None if self._gen_scores is None else self._gen_scores(self.original_keys(keys))

    def _count_step(self) -> Any:
        def count(table: EmbeddingTable) -> None:
            with self._counting:
                self._steps += 1
                if self._steps % self._step_per_epoch == 0:
                    table.epoch += 1  # type: ignore[misc]

        return array_call(self, f"A step of the epoch of {self.name!r}", count)


def _capacity(count: int) -> int:
    """Rounds up to a power of two that the table supports."""
    if not is_integer(count) or count < 0:
        raise ValueError(f"A capacity must be an integer from 0 on. Received: {count!r}.")
    return min(MAX_CAPACITY, max(LINE, 1 << max(0, int(count) - 1).bit_length()))
