"""Errors that are of both kinds that programs expect: the documented one and TensorFlow's."""

import tensorflow as tf


class DtypeError(TypeError, ValueError):
    """A dtype does not fit: a TypeError by TFRA's documents, a ValueError by what TFRA raises."""


class ShapeError(tf.errors.InvalidArgumentError, ValueError):
    """Shapes do not fit: what TFRA raises is TensorFlow's InvalidArgumentError."""

    def __init__(self, message: str) -> None:
        super().__init__(None, None, message)


class PartitionError(tf.errors.InvalidArgumentError, ValueError):
    """A partitioner gives no number of a shard."""

    def __init__(self, message: str) -> None:
        super().__init__(None, None, message)
