"""The frames around a call, and warnings of a program's own line."""

import inspect
import warnings
from collections.abc import Iterator
from types import FrameType

# Packages whose frames lie between a program and what warns.
_BETWEEN = {"sok_lite", "tensorflow", "keras", "tf_keras"}


def callers() -> Iterator[FrameType]:
    """Yields the frames of the callers of the calling function, the innermost first."""
    frame = inspect.currentframe()
    for _ in range(2):
        # A frame that has itself in a variable would keep all variables until a garbage collection.
        frame = None if frame is None else frame.f_back
    return _outwards(frame)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns as `warnings.warn` does, of the line of the program that led here."""
    packages = (frame.f_globals.get("__name__", "").split(".")[0] for frame in callers())
    levels = (level for level, package in enumerate(packages, 2) if package not in _BETWEEN)
    warnings.warn(text, category, stacklevel=next(levels, 2))
