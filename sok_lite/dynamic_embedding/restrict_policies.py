"""Which keys of a variable stay when it is restricted: those trained last, or most often."""

from typing import Any

import tensorflow as tf

from sok_lite.bridge.autograph import unconverted
from sok_lite.engine.dtypes import is_integer


@unconverted
class RestrictPolicy:
    """What training notes of keys, and which of them a restriction keeps. A base class.

    Args:
      var: the `Variable`.

    Attributes:
      var: the variable.
      status: a `Variable` of the same keys, int32 values and dim 1: what is noted.
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
        """The variable that has what is noted of each key."""
        return self._status

    def apply_update(self, ids: Any) -> Any:
        """Notes that keys were trained.

        Args:
          ids: keys (n,), which may repeat.

        Returns:
          None in eager mode, the operation in a graph.
        """
        raise NotImplementedError("A RestrictPolicy of one's own defines apply_update().")

    def apply_restriction(self, num_reserved: int, **kwargs: Any) -> Any:
        """Removes all but some of the keys that training has noted.

        Args:
          num_reserved: keys to be kept, those of the highest status; of equal ones the lower keys.
          **kwargs: `trigger`: the variable is left alone until it has more keys than that; by
            default `num_reserved`.

        Returns:
          None in eager mode, the operation in a graph.

        Raises:
          TypeError: a number is no integer. ValueError: it is negative.
        """
        trigger = kwargs.pop("trigger", num_reserved)
        if kwargs:
            raise TypeError(f"restrict() got unexpected arguments {sorted(kwargs)}.")
        for name, number in (("num_reserved", num_reserved), ("trigger", trigger)):
            if not is_integer(number):
                raise TypeError(f"`{name}` must be an integer. Received: {name}={number!r}.")
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
        keys, status = self._status.export()
        most = tf.minimum(tf.size(keys), num_reserved)
        # The highest first, and of equal ones the first: the removed are the others.
        order = tf.argsort(-tf.cast(status[:, 0], tf.int64), stable=True)
        removed = tf.gather(keys, order[most:])
        done = [self.var.remove(removed), self._status.remove(removed)]
        return [each for each in done if each is not None]


@unconverted
class TimestampRestrictPolicy(RestrictPolicy):
    """Keeps the keys that were trained last. The status is the time, in seconds since 1970."""

    suffix = "timestamp"

    def apply_update(self, ids: Any) -> Any:
        """Notes the time for keys (n,)."""
        now = tf.cast(tf.timestamp(), tf.int32)
        return self._status.upsert(ids, tf.fill([tf.size(ids), 1], now))


@unconverted
class FrequencyRestrictPolicy(RestrictPolicy):
    """Keeps the keys that were trained most often. The status counts steps that had the key."""

    suffix = "frequency"

    def apply_update(self, ids: Any) -> Any:
        """Counts a step for each of the keys (n,); one that repeats counts once."""
        distinct, _ = tf.unique(tf.reshape(ids, [-1]))
        counts, exists = self._status.lookup(distinct, return_exists=True)
        return self._status.accum(distinct, counts, counts + 1, exists)
