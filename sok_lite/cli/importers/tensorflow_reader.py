"""Reads TensorFlow's checkpoints for importers; imports TensorFlow on first use."""

import os
from typing import Any


def prefix_of(path: str | os.PathLike[str]) -> str:
    """Returns the prefix of a checkpoint's files, given that or its .index file."""
    return os.fspath(path).removesuffix(".index")


def looks_like_one(path: str | os.PathLike[str]) -> bool:
    """Whether the file names look like a TensorFlow checkpoint."""
    return os.path.isfile(f"{prefix_of(path)}.index")


def open_checkpoint(path: str | os.PathLike[str]) -> Any:
    """Returns TensorFlow's reader. FileNotFoundError: no checkpoint. ValueError: it is corrupt."""
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ImportError(
            "TensorFlow's checkpoints are read by TensorFlow, which is not installed. "
            "`pip install sok_lite[cpu]` installs it."
        ) from error
    prefix = prefix_of(path)
    if not os.path.exists(f"{prefix}.index"):
        raise FileNotFoundError(
            f"There is no checkpoint {prefix!r}: no file {prefix + '.index'!r}. Give the path that "
            "its files begin with, or that of its .index."
        )
    try:
        return tf.train.load_checkpoint(prefix)
    except Exception as error:  # TensorFlow raises many types
        raise ValueError(f"{prefix} is corrupt: {error}. Take another checkpoint.") from error


def tensor(reader: Any, name: str) -> Any:
    """Returns a tensor: an array, or the bytes of a string. ValueError: it is corrupt."""
    try:
        return reader.get_tensor(name)
    except Exception as error:  # TensorFlow raises many types
        raise ValueError(
            f"Tensor {name!r} is corrupt: {error}. Take another checkpoint."
        ) from error
