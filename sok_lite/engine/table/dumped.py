"""Which files have all rows as of some lookup, so that later ones need only what has changed.

A table remembers for each folder the file that it was last written to, or made from, and the number
of the lookup by then. It forgets all of them when it cannot tell any more what has changed since:
when it is restored, when the numbers of lookups are halved, and when somebody says that keys were
seen earlier than they were.
"""

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sok_lite.engine.rows.column import Column

if TYPE_CHECKING:
    from sok_lite.engine.table.parts import TableParts

# Of so many folders, one each, the newest first.
_MOST = 16


class Dumped(NamedTuple):
    """A file that, with those that it continues, has all rows as of some lookup.

    Attributes:
      folder: of the checkpoint.
      file: in that folder. No other dump, and no other rank, has a file of that name.
      number: of the last lookup by then.
      states: weak references to the states that the file has, in its order.
    """

    folder: str
    file: str
    number: int
    states: "tuple[weakref.ref[Column], ...]"


def recalled(table: "TableParts", file: str) -> Dumped | None:
    """Returns what a table remembers of a file; None: nothing, so it may be of another process."""
    return next((dumped for dumped in table.dumps if dumped.file == file), None)


def remember(
    table: "TableParts",
    folder: str,
    file: str,
    columns: Sequence[Column],
    continued: str | None = None,
) -> None:
    """Remembers that a file has what a table holds now. Hold the table.

    Whether a manifest will ever name the file does not matter: nobody asks for it if none does.

    Args:
      columns: the states that the file has, in its order.
      continued: the file that it continues, which is not forgotten: this one may come to nothing.
    """
    states = tuple(weakref.ref(column) for column in columns)
    new = Dumped(folder, file, table.num_lookups, states)
    kept = [old for old in table.dumps if old.folder != folder or old.file == continued]
    table.dumps = (new, *kept)[:_MOST]


def forget(table: "TableParts") -> None:
    """Forgets all of it."""
    table.dumps = ()
