"""The keys of a table that all ranks ask most: each rank has copies of their rows.

The table of the owner stays the only truth. A copy is a row as it came with some lookup. The owner
keeps which ranks have copies that are no longer the rows: it compares rows with copies of its own
in each lookup, so whatever has changed a row is seen.
"""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm.protocol import split_offsets
from sok_lite.engine.dtypes import KeyDtype, as_words, is_integer
from sok_lite.engine.owner import OwnerRule
from sok_lite.engine.rows.store import ABSENT

# The hot keys are chosen anew every so many lookups, of which every fourth is counted.
WINDOW = 32
COUNTED = 4
# What a key counts each time that a rank asks for it; that halves with each choice.
_ONE = 16


class HotSet(NamedTuple):
    """Hot keys, the same on all ranks and numbered by owner, then by key.

    Attributes:
      keys: (n,) int64, on the host.
      starts: (size + 1,) int64, on the host: where the keys of each owner start.
      ascending: (n,) int64, an array of the backend, the keys.
      numbers: (n,) int32, likewise, the number of each of those.
      checksum: of the keys.
    """

    keys: np.ndarray
    starts: np.ndarray
    ascending: Array
    numbers: Array
    checksum: int

    @classmethod
    def of(cls, backend: Backend, keys: np.ndarray, owners: np.ndarray, size: int) -> "HotSet":
        """Returns the set of distinct keys (n,) int64 with owners (n,) int32 below `size`."""
        keys = keys[np.lexsort((keys, owners))]
        starts = split_offsets(np.bincount(owners, minlength=size))
        order = np.argsort(keys)
        in_backend = (backend.from_host(keys[order]), backend.from_host(order.astype(np.int32)))
        return cls(keys, starts, *in_backend, zlib.crc32(keys.tobytes()))

    def numbers_of(self, backend: Backend, keys: Array) -> Array:
        """Returns the number of each key (n,) int64, (n,) int32; -1 of one that is not hot."""
        xp = backend.xp
        if len(self.keys) == 0:
            return xp.full(keys.size, -1, np.int32)
        at = xp.minimum(xp.searchsorted(self.ascending, keys), len(self.keys) - 1)
        is_hot = xp.take(self.ascending, at) == keys
        return xp.where(is_hot, xp.take(self.numbers, at), np.int32(-1))

    def of_owner(self, rank: int) -> slice:
        """Returns which numbers the keys of a rank have."""
        return slice(int(self.starts[rank]), int(self.starts[rank + 1]))


class _State(NamedTuple):
    """What changes in one piece.

    Attributes:
      hot: the keys.
      copies: (n, dim) storage, of their rows.
      outdated: (size, keys of this rank) bool, on the host: whose copies may not be the rows. Those
        of this rank itself it does not tell: these it compares with.
      turn: how many lookups all ranks have finished.
    """

    hot: HotSet
    copies: Array
    outdated: np.ndarray
    turn: int


class OwnRows(NamedTuple):
    """The rows of the hot keys of this rank, as they are.

    Attributes:
      rows: (m,) uint32, row numbers, or absent.
      generation: of the table by then.
      is_absent: (m,) bool, on the host.
      needed: (size, m) bool, on the host: whether a rank that asks for a key needs its row. Of an
        absent one each does, for what a lookup gives of such a key.
    """

    rows: Array
    generation: int
    is_absent: np.ndarray
    needed: np.ndarray


class HotKeys:
    """The hot keys of a table on one rank, and what is counted to choose them.

    Args:
      backend: of the table.
      limit: how many keys can be hot.
      dim, storage: of the table's rows.

    Attributes:
      limit: as given.
      num_asked: how often this rank has asked for a hot key, each once in a lookup.
      num_refreshed: how many rows it got for them.

    Raises:
      TypeError, ValueError: the limit is no integer above 0.
    """

    def __init__(self, backend: Backend, limit: int, dim: int, storage: np.dtype) -> None:
        if not is_integer(limit):
            raise TypeError(f"`hot_keys` must be an integer. Received: hot_keys={limit!r}.")
        if not 0 < limit < 1 << 30:
            raise ValueError(f"`hot_keys` must be from 0 to 2**30 - 1. Received: hot_keys={limit}.")
        self.limit = int(limit)
        self.num_asked = 0
        self.num_refreshed = 0
        self._backend, self._dim, self._storage = backend, dim, storage
        # The keys of lookups by their turn: one that fails and is made again counts once.
        self._counted: dict[int, np.ndarray] = {}
        # Keys (k,) int64 of earlier lookups, and what they count, (k,) int64; and those of the last
        # proposal, which take their place when the hot keys are chosen.
        self._weights = (np.zeros(0, np.int64), np.zeros(0, np.int64))
        self._proposed = self._weights
        self._met = (1, 0)
        self._state = self._empty(1)

    @property
    def size(self) -> int:
        """Keys that are hot now."""
        return len(self._state.hot.keys)

    @property
    def num_bytes(self) -> int:
        """Memory of the copies and of the keys, also that on the host."""
        return int(self._state.copies.nbytes) + 20 * self.size + self._state.outdated.nbytes

    @property
    def hot(self) -> HotSet:
        """The keys that are hot now."""
        return self._state.hot

    @property
    def copies(self) -> Array:
        """(n, dim) storage, the copies of the rows of the hot keys."""
        return self._state.copies

    @property
    def token(self) -> int:
        """Equal on ranks with the same hot keys that have finished the same lookups."""
        return self._state.hot.checksum << 31 | self._state.turn & 0x7FFFFFFF

    @property
    def is_choosing(self) -> bool:
        """Whether the lookup that begins chooses the hot keys anew."""
        return (self._state.turn + 1) % WINDOW == 0

    def meet(self, rank: int, size: int) -> None:
        """Begins anew where there are other ranks than before, or this is another of them."""
        if self._met != (rank, size):
            self.forget(size)
            self._met = (rank, size)

    def forget(self, size: int) -> None:
        """Lets no key be hot until some are chosen again."""
        self._state = self._empty(size)

    def _empty(self, size: int) -> _State:
        none = np.zeros(0, np.int64)
        copies = self._backend.xp.empty((0, self._dim), self._storage)
        return _State(
            HotSet.of(self._backend, none, none, size), copies, np.zeros((size, 0), bool), 0
        )

    # ---------------------------------------------------------------- copies

    def compared(self, rank: int, rows: Array, values: Array, generation: int) -> OwnRows:
        """Notes which rows of this rank's hot keys have changed, and takes them for its own copies.

        Args:
          rank: this one.
          rows: (m,) uint32, their row numbers, or absent.
          values: (m, dim) storage, their rows.
          generation: of the table.
        """
        xp, state = self._backend.xp, self._state
        copies = state.copies[state.hot.of_owner(rank)]
        is_absent = rows == np.uint32(ABSENT)
        # By their bits: a NaN is itself.
        has_changed = (as_words(values)[1] != as_words(copies)[1]).any(axis=1)
        absent, changed = np.split(
            self._backend.to_host(xp.concatenate([is_absent, has_changed])), 2
        )
        # First what the others have not: whoever is interrupted then finds the change again.
        state.outdated[:, absent | changed] = True
        copies[...] = xp.where(is_absent[:, None], copies, values)
        needed = state.outdated.copy()
        needed[rank] = absent
        return OwnRows(rows, generation, absent, needed)

    def refresh(self, numbers: np.ndarray, rows: Array) -> None:
        """Takes rows (n, dim) storage for copies, of hot keys by number (n,)."""
        if len(numbers):
            self._state.copies[self._backend.from_host(numbers)] = rows

    def finish(
        self,
        rank: int,
        own: OwnRows,
        asked: np.ndarray,
        counts: tuple[int, int],
        chosen: HotSet | None,
    ) -> None:
        """Ends a lookup on this rank: ranks that needed rows have them.

        Args:
          asked: (size, m) bool, for which hot keys of this rank each rank has asked.
          counts: for how many this one has asked, and how many rows it got for them.
          chosen: what is hot from now on; None: what is.
        """
        outdated = self._state.outdated & ~(asked & ~own.is_absent)
        state = self._state._replace(outdated=outdated, turn=self._state.turn + 1)
        self._state = state if chosen is None else self._changed(state, rank, chosen)
        if chosen is not None:
            self._weights, self._counted = self._proposed, {}
        self.num_asked += counts[0]
        self.num_refreshed += counts[1]

    def _changed(self, state: _State, rank: int, hot: HotSet) -> _State:
        """Returns a state with other hot keys. Of those that stay the copies do."""
        order = np.argsort(state.hot.keys)
        _, after, before = np.intersect1d(
            hot.keys, state.hot.keys[order], assume_unique=True, return_indices=True
        )
        before = order[before]
        copies = self._backend.xp.zeros((len(hot.keys), self._dim), self._storage)
        from_host = self._backend.from_host
        copies[from_host(after)] = self._backend.xp.take(state.copies, from_host(before), axis=0)
        now, then = hot.of_owner(rank), state.hot.of_owner(rank)
        outdated = np.ones((len(hot.starts) - 1, now.stop - now.start), bool)
        is_own = (now.start <= after) & (after < now.stop)
        outdated[:, after[is_own] - now.start] = state.outdated[:, before[is_own] - then.start]
        return _State(hot, copies, outdated, state.turn)

    # ---------------------------------------------------------------- choice

    def count(self, keys: Sequence[Array]) -> None:
        """Counts the keys that this rank asks for in a lookup, of some lookups.

        Args:
          keys: of each part (n,) int64, distinct.
        """
        if self._state.turn % COUNTED == 0:
            on_host = [self._backend.to_host(each) for each in keys]
            self._counted[self._state.turn] = np.concatenate(on_host)

    def proposal(self) -> np.ndarray:
        """Returns keys that this rank asks most and what each counts, (up to `limit`, 2) int64.

        Once keys are chosen by it, what is counted counts twice as much as what was before.
        """
        keys, weights = self._weights
        ones = np.concatenate([keys[:0], *self._counted.values()])
        weights = np.concatenate([weights // 2, np.full(len(ones), _ONE)])
        self._proposed = _best(np.concatenate([keys, ones]), weights, self.limit)
        return np.stack(self._proposed, axis=1)

    def choose(
        self, proposals: Sequence[np.ndarray], owner: OwnerRule, kind: KeyDtype, size: int
    ) -> HotSet:
        """Returns the keys that all ranks together ask most. It changes nothing.

        Args:
          proposals: of each rank (n, 2) int64; the same on all ranks.
          owner, kind: of the table, the rule and the key type.
          size: number of ranks.
        """
        proposed, weights = np.concatenate(proposals).T
        keys, weights = _best(proposed, weights, self.limit)
        keys = np.ascontiguousarray(keys[weights > _ONE])  # who asks once may never do so again
        return HotSet.of(self._backend, keys, owner.owners(keys, size, kind), size)


def _best(keys: np.ndarray, weights: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct keys of the largest sums of weights, the largest first, and these sums.
    Of keys with equal sums the lowest come first."""
    keys, inverse = np.unique(keys, return_inverse=True)
    sums = np.zeros(len(keys), np.int64)
    np.add.at(sums, inverse, weights)
    best = np.lexsort((keys, -sums))[:limit]
    return keys[best], sums[best]
