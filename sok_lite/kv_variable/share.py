"""Which keys of a table a variable stands for."""

from typing import NamedTuple

from sok_lite.backend import Array


class Share(NamedTuple):
    """Which keys of a table a variable stands for: key mod `count` is `number`."""

    number: int = 0
    count: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether it is all of them."""
        return self.count == 1

    def has(self, keys: Array) -> Array:
        """Returns whether each key (n,) is one of them, (n,) bool."""
        return keys % self.count == self.number


WHOLE = Share()
