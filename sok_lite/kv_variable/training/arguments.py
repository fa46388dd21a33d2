"""Arguments that the optimizers have in common, checked."""

import numbers
from typing import Any


def checked_strength(optimizer: Any, name: str, value: Any) -> float:
    """Returns a number that is finite and not negative.

    Raises:
      TypeError, ValueError: it is none.
    """
    what = f"`{name}` of {type(optimizer).__name__}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{what} must be a number. Received: {value!r}.")
    if not 0 <= float(value) < float("inf"):
        raise ValueError(f"{what} must be finite and >= 0. Received: {value!r}.")
    return float(value)


def check_version(optimizer: Any, version: Any, known: tuple[int, ...]) -> None:
    """Raises ValueError for a version that TFPlus does not have."""
    if isinstance(version, bool) or version not in known:
        raise ValueError(
            f"`version` of {type(optimizer).__name__} must be one of {known}. "
            f"Received: version={version!r}."
        )
