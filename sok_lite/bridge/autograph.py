"""Code that AutoGraph leaves as it is: to rewrite what a tf.function calls takes it seconds."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

Class = TypeVar("Class", bound=type)

Function = TypeVar("Function", bound=Callable[..., Any])


def unconverted_function(function: Function) -> Function:
    """Has AutoGraph leave a function as it is. Its type is kept, which TensorFlow's own loses."""
    return tf.autograph.experimental.do_not_convert(function)


def unconverted(cls: Class) -> Class:
    """Has AutoGraph leave all methods of a class as they are, those of its bases not included."""
    for name, value in list(vars(cls).items()):
        if inspect.isfunction(value) and not name.startswith("__"):
            setattr(cls, name, unconverted_function(value))
    return cls
