"""The keys of a table that a variable represents."""

from dataclasses import dataclass

from sok_lite.backend import Array
from sok_lite.engine.table import EmbeddingTable


@dataclass(frozen=True)
class Share:
    """The keys of a table that a variable represents: key mod `count` == `number`."""

    number: int = 0
    count: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether it is all keys."""
        return self.count == 1

    def contains(self, keys: Array) -> Array:
        """Returns whether each key (n,) belongs to it, (n,) bool."""
        return keys % self.count == self.number

    def select(self, keys: Array) -> Array:
        """Selects its keys, in order."""
        return keys if self.is_whole else keys[self.contains(keys)]

    def export(self, table: EmbeddingTable, cutoff: float | None) -> tuple[Array, Array]:
        """Returns keys (n,), ascending, and rows (n, dim); skips rows below a cutoff."""
        keys, rows = table.export(cutoff=cutoff)
        if self.is_whole:
            return keys, rows
        mine = self.contains(keys)
        return keys[mine], rows[mine]


WHOLE = Share()
