"""Which keys of what was saved count, and the row of each: decided once, used for every column."""

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.saved import SavedPart, SavedRows

_log = logging.getLogger("sok_lite")


class Numbers(NamedTuple):
    """The row numbers of a piece's keys: those of an own file take no memory.

    Attributes:
      size: how many keys.
      counts: which of them count, as bits on the host; None: all.
      rows: the row numbers of those, uint32 on the device; a range where they follow each other.
    """

    size: int
    counts: np.ndarray | None
    rows: range | Array

    @staticmethod
    def of(backend: Backend, counts: Array, rows: range | Array) -> "Numbers":
        """Returns those of keys of which some count, (k,) bool."""
        is_all = len(rows) == counts.size
        bits = None if is_all else np.packbits(backend.to_host(counts))
        return Numbers(int(counts.size), bits, rows)

    def as_array(self, backend: Backend) -> Array:
        """Returns the row numbers of all keys, (k,) uint32, NO_ROW where one does not count."""
        xp, rows = backend.xp, self.rows
        if isinstance(rows, range):
            rows = xp.arange(rows.start, rows.stop, dtype=np.uint32)
        if self.counts is None:
            return rows
        numbers = xp.full(self.size, NO_ROW, np.uint32)
        bits = np.unpackbits(self.counts, count=self.size).view(bool)
        numbers[backend.from_host(bits)] = rows
        return numbers


class Chosen(NamedTuple):
    """The keys of a part that count, each with its row number.

    Attributes:
      part: the part.
      numbers: the row numbers of each piece of its keys.
      older: of each of `part.older` the same.
    """

    part: SavedPart
    numbers: list[Numbers]
    older: list[list[Numbers]]

    def rows(self) -> Iterator[tuple[SavedRows, list[Numbers]]]:
        """Yields the part, then its older files, each with the row numbers of its rows."""
        yield self.part, self.numbers[: self.part.num_with_rows]
        yield from zip(self.part.older, self.older, strict=True)


class Chooser:
    """Chooses keys: of one that comes again the first counts.

    Args:
      backend, key_dtype, name: of the table.
      find: returns the row numbers of keys (k,) int64, which may repeat: (k,) uint32, NO_ROW for
        others than those that count.
      insert: gives keys (k,) int64 that count the rows from `first` on. They are distinct and not
        there.
      keeps: says which of some keys (k,) int64 may count, (k,) bool; None: all.

    Attributes:
      num_rows: how many keys count.
      num_repeated: how many have come again that should not.
    """

    def __init__(
        self,
        backend: Backend,
        key_dtype: KeyDtype,
        name: str,
        find: Callable[[Array], Array],
        insert: Callable[[Array, int], None],
        keeps: Callable[[Array], Array] | None = None,
    ) -> None:
        self._backend, self._key_dtype, self._name = backend, key_dtype, name
        self._find, self._insert, self._keeps = find, insert, keeps
        self.num_rows = self.num_repeated = 0

    def keys(self, keys: Array) -> Array:
        """Returns keys of the table's key type as int64 on its device."""
        whose = f"keys of {self._name!r}"
        device = self._backend.from_host(keys)
        return self._key_dtype.to_int64(self._backend.xp, device, whose)

    def choose(self, part: SavedPart) -> Chosen:
        """Inserts the keys of a part that count."""
        return Chosen(part, [self._numbers(part, keys) for keys in part.read("keys")], [])

    def _numbers(self, part: SavedPart, keys: Array) -> Numbers:
        xp, is_own = self._backend.xp, None
        if part.owns is not None:
            is_own = self._backend.from_host(part.owns(self._backend.to_host(keys)))
        keys, first = self.keys(keys), self.num_rows
        counts = are_first(xp, keys) & (self._find(keys) == np.uint32(NO_ROW))
        num_new = int(xp.count_nonzero(counts))
        if num_new < keys.size and not part.may_repeat:
            is_repeat = ~counts if is_own is None else ~counts & is_own
            self.num_repeated += int(xp.count_nonzero(is_repeat))
        for is_wanted in (is_own, None if self._keeps is None else self._keeps(keys)):
            if is_wanted is not None:
                counts &= is_wanted
                num_new = int(xp.count_nonzero(counts))
        self.num_rows += num_new
        self._insert(keys if num_new == keys.size else keys[counts], first)
        return Numbers.of(self._backend, counts, range(first, self.num_rows))

    def choose_older(self, chosen: Chosen) -> None:
        """Chooses the rows of a part that the files it continues have, newest first.

        Raises:
          ValueError: a key has no row.
        """
        xp, part = self._backend.xp, chosen.part
        if part.num_with_rows is None:
            return
        is_left = xp.zeros(self.num_rows, bool)
        for numbers in chosen.numbers[part.num_with_rows :]:
            rows = numbers._replace(counts=None).as_array(self._backend)
            is_left[rows.astype(np.int64)] = True
        for file in part.older:
            chosen.older.append([])
            for keys in file.read("keys"):
                keys = self.keys(keys)
                numbers = self._find(keys)
                is_present = numbers != np.uint32(NO_ROW)
                at = xp.where(is_present, numbers, np.uint32(0)).astype(np.int64)
                is_wanted = is_present & xp.take(is_left, at) if self.num_rows else is_present
                is_wanted &= are_first(xp, keys)
                is_left[at[is_wanted]] = False
                its_numbers = Numbers.of(self._backend, is_wanted, numbers[is_wanted])
                chosen.older[-1].append(its_numbers)
        num_left = int(xp.count_nonzero(is_left))
        if num_left:
            raise part.corrupt(
                f"{num_left:,} of its keys have no row there, nor in the files that it continues"
            )

    def warn(self) -> None:
        """Says how many keys have come again."""
        warn_of_repeated(self._name, self.num_repeated)


def warn_of_repeated(name: str, num_repeated: int) -> None:
    """Says how many keys of a table have come again in what was saved, if any."""
    if num_repeated:
        _log.warning(
            "What was saved of table %r has %s keys more than once: of each the first one counts.",
            *(name, f"{num_repeated:,}"),
        )


def are_first(xp: Any, keys: Array) -> Array:
    """Returns of each key (k,) whether none before is equal."""
    is_first = xp.ones(keys.size, bool)
    # Most are distinct: to sort them alone takes less than half the time.
    ordered = xp.sort(keys)
    if bool((ordered[1:] == ordered[:-1]).any()):
        order = xp.argsort(keys, kind="stable")
        is_first[order[1:]] = keys[order[1:]] != keys[order[:-1]]
    return is_first


def pieces_with(rows: Sequence[Numbers]) -> list[int]:
    """Returns which pieces have keys that count."""
    return [i for i, numbers in enumerate(rows) if len(numbers.rows)]
