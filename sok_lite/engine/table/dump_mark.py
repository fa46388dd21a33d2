"""Which checkpoint files have all rows of a table up to some lookup, for incremental dumps.

A table has one mark for each folder: the file that it was last written to, or loaded from, and the
last lookup by then. It drops all marks when it can no longer tell what has changed since: when it
is restored, when the numbers of lookups are halved, and when keys are said to have been seen
earlier than they were.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from sok_lite.engine.rows.column import Column

_MAX_MARKS = 16  # the newest are kept


class DumpMark(NamedTuple):
    """A file that, with those it continues, has all rows up to a lookup.

    Attributes:
      folder: of the checkpoint.
      file: in that folder; the name is unique among dumps and ranks.
      number: of the last lookup by then.
      states: weak references to the states in the file, in its order.
    """

    folder: str
    file: str
    number: int
    states: tuple[weakref.ref[Column], ...]


def find_mark(table: Any, file: str) -> DumpMark | None:
    """Returns a table's mark of a file; None: there is none, the file may be another process'."""
    return next((mark for mark in table.dumps if mark.file == file), None)


def remember(
    table: Any, folder: str, file: str, columns: Sequence[Column], continued: str | None = None
) -> None:
    """Marks that a file has the present content of a table, which the caller has locked.

    It does not matter if no manifest will ever name the file: then nobody asks for its mark.

    Args:
      columns: the states in the file, in its order.
      continued: the file that it continues, whose mark stays: this file may never be finished.
    """
    states = tuple(weakref.ref(column) for column in columns)
    new = DumpMark(folder, file, table.num_lookups, states)
    kept = [mark for mark in table.dumps if mark.folder != folder or mark.file == continued]
    table.dumps = (new, *kept)[:_MAX_MARKS]


def forget(table: Any) -> None:
    """Drops all marks."""
    table.dumps = ()
