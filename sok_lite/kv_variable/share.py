"""Which keys of a table a variable stands for."""

from dataclasses import dataclass

from sok_lite.backend import Array
from sok_lite.engine.table import EmbeddingTable


@dataclass(frozen=True)
class Share:
    """The keys of a table that a variable stands for: key mod `count` is `number`."""

    number: int = 0
    count: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether it is all of them."""
        return self.count == 1

    def has(self, keys: Array) -> Array:
        """Returns whether each key (n,) is one of them, (n,) bool."""
        return keys % self.count == self.number

    def of(self, keys: Array) -> Array:
        """Returns those of some keys (n,), in their order."""
        return keys if self.is_whole else keys[self.has(keys)]

    def exported(self, table: EmbeddingTable, cutoff: float | None) -> tuple[Array, Array]:
        """Returns keys (n,), ascending, and rows (n, dim); with a cutoff none below it."""
        keys, rows = table.export(cutoff=cutoff)
        if self.is_whole:
            return keys, rows
        mine = self.has(keys)
        return keys[mine], rows[mine]


WHOLE = Share()
