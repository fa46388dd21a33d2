"""Data of `fit`."""

import tensorflow as tf


def batched(arrays, size):
    """Returns a tf.data.Dataset of batches of so many elements of arrays.

    It is not tuned: the end of an iterator may wait for the thread that does so, half a minute.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return tf.data.Dataset.from_tensor_slices(arrays).batch(size).with_options(options)
