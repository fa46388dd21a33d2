"""Attributes that have another name now, which warn, or are gone, which say why: for a version."""

import warnings
from typing import Any, NoReturn


def renamed(old: str, new: str) -> Any:
    """Returns a property that gives what `new` gives, with a DeprecationWarning that names it."""

    def get(self: Any) -> Any:
        warnings.warn(
            f"`{type(self).__name__}.{old}` is called `{new}` now. The old name will go in the "
            "next version.",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(self, new)

    return property(get, doc=f"The old name of `{new}`.")


def removed(why: str) -> Any:
    """Returns a property that raises AttributeError, which says why there is no such thing."""

    def get(self: Any) -> NoReturn:
        raise AttributeError(f"`{type(self).__name__}` has it no more: {why}.")

    return property(get, doc=f"Gone: {why}.")
