"""Exempts code from AutoGraph, which takes seconds to rewrite what a tf.function calls."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

Class = TypeVar("Class", bound=type)

Function = TypeVar("Function", bound=Callable[..., Any])


def unconverted_function(function: Function) -> Function:
    """Exempts a function from AutoGraph and keeps its type, unlike TensorFlow's decorator."""
    unconverted = tf.autograph.experimental.do_not_convert(function)

    # `wraps` copies the attribute that marks a function as exempt.
    @functools.wraps(unconverted)
    def call(*args: Any, **kwargs: Any) -> Any:
        # Eager mode converts nothing, and the context that `unconverted` enters would turn Ctrl-C
        # into an AssertionError of TensorFlow's.
        return function(*args, **kwargs) if tf.executing_eagerly() else unconverted(*args, **kwargs)

    return call  # type: ignore[return-value]


def unconverted(cls: Class) -> Class:
    """Exempts all methods of a class from AutoGraph, except inherited ones."""
    for name, value in list(vars(cls).items()):
        if inspect.isfunction(value) and not name.startswith("__"):
            setattr(cls, name, unconverted_function(value))
    return cls
