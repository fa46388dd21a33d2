"""Which of Keras' own functions is among the callers: `clone_model`, `load_model`."""

import inspect
from collections.abc import Container
from types import CodeType
from typing import Any

from sok_lite.bridge.tf_private import callers

_clone_codes: set[CodeType] = set()
_load_codes: set[CodeType] = set()


def know_functions(models: Any) -> None:
    """Has the functions of a Keras known.

    Args:
      models: its module of that name.
    """
    _clone_codes.add(inspect.unwrap(models.clone_model).__code__)
    _load_codes.add(inspect.unwrap(models.load_model).__code__)


def is_cloning() -> bool:
    """Whether `clone_model` is among the callers."""
    return caller_among(_clone_codes) is not None


def is_loading() -> bool:
    """Whether `load_model` is among the callers."""
    return caller_among(_load_codes) is not None


def caller_among(codes: Container[CodeType]) -> Any:
    """Returns the frame of a caller that is one of some functions, by their code; or None."""
    return next((frame for frame in callers() if frame.f_code in codes), None)
