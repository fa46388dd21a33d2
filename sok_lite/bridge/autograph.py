"""Code that AutoGraph leaves as it is: to rewrite what a tf.function calls takes it seconds."""

import inspect
from typing import TypeVar

import tensorflow as tf

Class = TypeVar("Class", bound=type)

unconverted_function = tf.autograph.experimental.do_not_convert


def unconverted(cls: Class) -> Class:
    """Has AutoGraph leave all methods of a class as they are, those of its bases not included."""
    for name, value in list(vars(cls).items()):
        if inspect.isfunction(value) and not name.startswith("__"):
            setattr(cls, name, unconverted_function(value))
    return cls
