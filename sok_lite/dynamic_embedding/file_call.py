"""Calls that read and write files, from eager mode and from graphs."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok_lite.backend import get_backend
from sok_lite.bridge.host_call import host_call
from sok_lite.bridge.type_spec import alive


def file_call(
    holder: Any,
    what: str,
    function: Callable[..., str | None],
    texts: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType] = (),
) -> Any:
    """Calls a function of a holder and of texts; see `host_call`.

    In a graph an error of a file becomes TensorFlow's InvalidArgumentError, with its text.

    Args:
      holder: a graph keeps a weak reference only.
      what: does it, for errors.
      function: takes the holder and bytes.
      texts: scalar string tensors.
      dtypes: [tf.string] where the function gives a text.

    Returns:
      A list of the text; without one None in eager mode and the operation in a graph.
    """
    reference, is_eager = weakref.ref(holder), tf.executing_eagerly()

    def run(*tensors: tf.Tensor) -> Sequence[tf.Tensor]:
        try:
            given = function(alive(reference), *(tensor.numpy() for tensor in tensors))
        except (OSError, RuntimeError) as error:
            if is_eager:
                raise
            raise ValueError(str(error)) from error  # TensorFlow keeps its kind and text
        return () if given is None else (tf.constant(given),)

    done = host_call(run, texts, dtypes, get_backend("cpu"), what)
    return done if dtypes or not is_eager else None
