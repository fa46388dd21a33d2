"""Attributes that have another name now. The old one works for one version and warns."""

import warnings
from typing import Any


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
