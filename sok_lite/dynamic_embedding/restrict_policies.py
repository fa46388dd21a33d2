"""Restrict policies: keep the keys trained last, or most often."""

from typing import Any

import tensorflow as tf

from sok_lite.bridge.autograph import unconverted
from sok_lite.engine.dtypes import check_integer


@unconverted
class RestrictPolicy:
    """Base class: records a status of trained keys, and chooses the keys to keep. Methods return
    None in eager mode, the operation in a graph.

    Attributes:
      var: the variable.
      status: a `Variable` of the same keys, int32 values and dim 1.
    """

    suffix = "status"

    def __init__(self, var: Any) -> None:
        if not getattr(var, "is_dynamic_embedding", False):
            raise TypeError(f"`var` must be a de.Variable. Received: {type(var).__name__}.")
        self.var = var
        self._status = type(var)(
            key_dtype=var.key_dtype,
            value_dtype=tf.int32,
            dim=1,
            devices=var.devices,
            partitioner=var.partition_fn,
            name=f"{var.name}/{self.suffix}",
            initializer=0,
            trainable=False,
            checkpoint=var.checkpoint,
            init_size=var.init_size,
            kv_creator=var.kv_creator,
        )

    @property
    def status(self) -> Any:
        """The variable with the status of each key."""
        return self._status

    def apply_update(self, ids: Any) -> Any:
        """Records that keys (n,), which may repeat, were trained."""
        raise NotImplementedError("A RestrictPolicy of one's own defines apply_update().")

    def apply_restriction(self, num_reserved: int, **kwargs: Any) -> Any:
        """Removes all recorded keys but `num_reserved`; keys of a table that evicts need no record.

        Args:
          num_reserved: keys to keep, of the highest status; on a tie the first in
            `status.export()`.
          **kwargs: `trigger`: does nothing up to this number of keys; default `num_reserved`.

        Raises:
          TypeError: a number is no integer. ValueError: it is negative.
        """
        trigger = kwargs.pop("trigger", num_reserved)
        if kwargs:
            raise TypeError(f"restrict() got unexpected arguments {sorted(kwargs)}.")
        for name, number in (("num_reserved", num_reserved), ("trigger", trigger)):
            check_integer(name, number)
            if number < 0:
                raise ValueError(f"`{name}` must not be negative. Received: {name}={number}.")
        if tf.executing_eagerly():
            if int(self.var.size()) > trigger:
                self._remove_all_but(num_reserved)
            return None
        return tf.cond(
            self.var.size() > trigger,
            lambda: tf.group(self._remove_all_but(num_reserved)),
            tf.no_op,
        )

    def _remove_all_but(self, num_reserved: int) -> Any:
        keys, status = self._known()
        _, exists = self.var.lookup(keys, return_exists=True)
        most = tf.minimum(tf.size(keys), num_reserved)
        # Highest first, stable: the rest is removed. Keys that the variable lost otherwise, as by
        # eviction, come last.
        lowest = tf.constant(tf.int64.min, tf.int64)
        order = tf.argsort(
            tf.where(exists, status, lowest),
            direction="DESCENDING",
            stable=True,
        )
        most = tf.minimum(most, tf.math.count_nonzero(exists, dtype=tf.int32))
        done = self.var.remove(tf.gather(keys, order[most:]))  # with their status
        return [] if done is None else [done]

    def _known(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the keys (n,) to choose from, and their status, int64."""
        keys, status = self._status.export()
        status = tf.cast(status[:, 0], tf.int64)
        if self.var.rows.var_type != "hybrid":
            return keys, status
        # The status evicts too, other keys than the variable: those come after all with a status.
        own = self.var.export()[0]
        without = tf.boolean_mask(own, ~self._status.lookup(own, return_exists=True)[1])
        lowest = tf.fill([tf.size(without)], tf.constant(tf.int64.min + 1, tf.int64))
        return tf.concat([keys, without], 0), tf.concat([status, lowest], 0)


@unconverted
class TimestampRestrictPolicy(RestrictPolicy):
    """Keeps the keys trained last. The status is the time in seconds since 1970."""

    suffix = "timestamp"

    def apply_update(self, ids: Any) -> Any:
        """Records the time for keys (n,)."""
        now = tf.cast(tf.timestamp(), tf.int32)
        return self._status.upsert(ids, tf.fill([tf.size(ids), 1], now))


@unconverted
class FrequencyRestrictPolicy(RestrictPolicy):
    """Keeps the keys trained most often. The status counts steps with the key."""

    suffix = "frequency"

    def apply_update(self, ids: Any) -> Any:
        """Counts a step for each distinct key of (n,)."""
        distinct, _ = tf.unique(tf.reshape(ids, [-1]))
        nothing = tf.zeros([tf.size(distinct), 1], tf.int32)
        is_there = tf.ones([tf.size(distinct)], tf.bool)
        # First 0 for new keys, then +1 for all: no count of another thread is lost.
        begun = self._status.accum(distinct, nothing, nothing, ~is_there)
        with tf.control_dependencies([] if begun is None else [begun]):
            return self._status.accum(distinct, nothing, nothing + 1, is_there)
