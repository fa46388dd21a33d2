"""Code that AutoGraph leaves as it is: to rewrite what a tf.function calls takes it seconds."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

Class = TypeVar("Class", bound=type)

Function = TypeVar("Function", bound=Callable[..., Any])


def unconverted_function(function: Function) -> Function:
    """Has AutoGraph leave a function as it is. Its type is kept, which TensorFlow's own loses."""
    unconverted = tf.autograph.experimental.do_not_convert(function)

    # It has the attribute by which AutoGraph knows what it is to leave alone.
    @functools.wraps(unconverted)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Nothing is converted in eager mode. A Ctrl-C within the context that `unconverted` enters
        # would come out of it as an AssertionError of TensorFlow's.
        return function(*args, **kwargs) if tf.executing_eagerly() else unconverted(*args, **kwargs)

    return call  # type: ignore[return-value]


def unconverted(cls: Class) -> Class:
    """Has AutoGraph leave all methods of a class as they are, those of its bases not included."""
    for name, value in list(vars(cls).items()):
        if inspect.isfunction(value) and not name.startswith("__"):
            setattr(cls, name, unconverted_function(value))
    return cls
