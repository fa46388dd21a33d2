"""Partitioners: which shard of a variable owns a key."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.dynamic_embedding.arguments import PartitionError
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.owner import MOD, AlsoLocal, FunctionOfKeys, OwnerRule

Partitioner = Callable[[tf.Tensor, int], tf.Tensor]


def default_partition_fn(keys: tf.Tensor, shard_num: int) -> tf.Tensor:
    """Returns key mod shards, or TensorFlow's hash bucket of a string key; (n,) int32.

    It is the same in every build of TensorFlow, never negative, and also assigns keys to ranks.

    Args:
      keys: (n,) of any key dtype.
      shard_num: number of shards.
    """
    if keys.dtype == tf.string:
        return tf.cast(tf.strings.to_hash_bucket_fast(keys, shard_num), tf.int32)
    if shard_num <= 1:
        return tf.zeros_like(keys, tf.int32)
    return tf.cast(tf.math.floormod(keys, tf.cast(shard_num, keys.dtype)), tf.int32)


def partition_keys(partitioner: Partitioner, keys: tf.Tensor, shard_num: int) -> tf.Tensor:
    """Returns the checked shard of each key (n,), int32.

    PartitionError: not an int32 tensor of the keys' shape, or a number out of range; in a graph
    TensorFlow's InvalidArgumentError for the latter.
    """
    shards = tf.convert_to_tensor(partitioner(keys, shard_num))
    if shards.dtype != tf.int32 or not shards.shape.is_compatible_with(keys.shape):
        raise PartitionError(
            f"The partitioner must give int32 of shape {keys.shape}, the shard of each key. "
            f"Received: {shards.dtype.name} of shape {shards.shape}. Cast it to tf.int32."
        )
    if partitioner is default_partition_fn:
        return shards
    if tf.executing_eagerly():
        numbers = shards.numpy()
        wrong = numbers[(numbers < 0) | (numbers >= shard_num)]
        if wrong.size:
            raise PartitionError(
                f"The partitioner must give numbers in [0, {shard_num}). Received: {wrong[0]}."
            )
        return shards
    text = f"The partitioner must give numbers in [0, {shard_num})."
    check = tf.debugging.Assert(tf.reduce_all((shards >= 0) & (shards < shard_num)), [text, shards])
    with tf.control_dependencies([check]):
        return tf.identity(shards)


def owner_rule(partitioner: Partitioner, key_dtype: KeyDtype) -> OwnerRule:
    """Returns the rule for owner ranks of a table that ranks look up together.

    A rank may hold other keys too: tables are rank-local until they are looked up together.
    """
    if partitioner is default_partition_fn:
        return AlsoLocal(MOD)

    def owners(keys: Any, ranks: int) -> np.ndarray:
        on_host = keys.get() if hasattr(keys, "get") else keys
        with tf.device("CPU:0"):
            return partition_keys(partitioner, tf.constant(on_host), ranks).numpy()

    name = getattr(partitioner, "__qualname__", type(partitioner).__qualname__)
    return AlsoLocal(FunctionOfKeys(f"{getattr(partitioner, '__module__', '')}.{name}", owners))
