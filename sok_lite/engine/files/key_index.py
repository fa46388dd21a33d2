"""A read-only index of keys, or of rows by their keys: two arrays, made by one sort.

Keys lie in buckets by the first bits of their hash, one or two in each. One array has the start of
each bucket, the other the positions of the keys, bucket by bucket. A lookup compares its key with
those of one bucket. Both arrays together take 6 to 8 bytes a key.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sok_lite.engine.hashing import hash_keys, new_seed

# Places are kept as uint32.
MAX_KEYS = 1 << 32
_PLACE_BITS = np.uint64(32)
_TOGETHER = 1 << 15  # keys whose hashes are computed together: they stay in the cache


class KeyIndex(NamedTuple):
    """An index from keys to their positions in an array.

    Attributes:
      starts: (buckets + 1,) the start of each bucket in `places`; buckets are a power of two.
      places: (n,) uint32, positions of the keys, bucket by bucket, ascending in each.
      seed: of the hash (engine/hashing.py), so that nobody can choose keys that collide.
    """

    starts: np.ndarray
    places: np.ndarray
    seed: int

    def find(
        self, keys: np.ndarray, key_at: Callable[[np.ndarray], np.ndarray]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Finds keys.

        Args:
          keys: (m,) int64.
          key_at: positions (k,) -> the keys there, (k,) int64.

        Returns:
          (which of `keys` were found, (k,); their positions, (k,)). Of a key that occurs twice the
          first position.
        """
        buckets = _buckets([keys], self.starts.size - 1, self.seed)
        at, ends = self.starts[buckets].astype(np.int64), self.starts[buckets + 1].astype(np.int64)
        places = np.full(keys.size, -1)
        left = np.flatnonzero(at < ends)
        while left.size:
            candidates = self.places[at[left]]
            is_it = key_at(candidates) == keys[left]
            places[left[is_it]] = candidates[is_it]
            left = left[~is_it]
            at[left] += 1
            left = left[at[left] < ends[left]]
        found = np.flatnonzero(places >= 0)
        return found, places[found]

    def entries(self, buckets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns where all entries of some buckets are in `places`, (k,) int64, and the number of
        the bucket of each among those, (k,) int64."""
        starts = self.starts[buckets].astype(np.int64)
        sizes = self.starts[buckets + 1] - starts
        at = np.repeat(starts - (np.cumsum(sizes) - sizes), sizes)
        return at + np.arange(at.size), np.repeat(np.arange(buckets.size), sizes)


def make_index(keys: np.ndarray | Sequence[np.ndarray]) -> KeyIndex:
    """Returns the index of keys (n,) int64, in one array or in pieces, fewer than `MAX_KEYS`. It
    takes 16 bytes a key."""
    pieces = [keys] if isinstance(keys, np.ndarray) else keys
    num_keys = sum(piece.size for piece in pieces)
    num_buckets, seed = 1 << max(1, num_keys.bit_length() - 1), new_seed()
    # One word of each: bucket and place. Sorting words is much faster than sorting places by them.
    words = _buckets(pieces, num_buckets, seed).view(np.uint64)
    starts = np.zeros(num_buckets + 1, np.int64)
    np.cumsum(np.bincount(words.view(np.int64), minlength=num_buckets), out=starts[1:])
    starts = starts.astype(np.uint32 if num_keys < MAX_KEYS else np.int64)
    words <<= _PLACE_BITS
    words |= np.arange(num_keys, dtype=np.uint64)
    words.sort()
    return KeyIndex(starts, words.astype(np.uint32), seed)


def make_index_of_rows(
    parts: Sequence[tuple[np.ndarray, Sequence[np.ndarray]]],
    key_at: Callable[[np.ndarray], np.ndarray],
) -> KeyIndex | int:
    """Returns the index of the newest rows of keys, or the number of a part that lacks some.

    Most rows of a chain of increments count: so all are indexed, and the few that do not are looked
    for where they must be, in buckets that have more rows than keys. Nothing else is sorted.

    Args:
      parts: keys (n,) int64, distinct, and the keys of rows, (m,) int64 in pieces, the newest row
        of a key first; some may be of other keys. Places count the rows of all parts.
      key_at: places (k,) -> the keys there, (k,) int64.
    """
    index = make_index([piece for _, rows in parts for piece in rows])
    if _has_no_others(index, parts, key_at):
        return index
    starts, num_buckets = index.starts.astype(np.int64), index.starts.size - 1
    buckets = _buckets([keys for keys, _ in parts], num_buckets, index.seed)
    is_mixed = np.diff(starts) != np.bincount(buckets, minlength=num_buckets)
    entries = index.entries(np.flatnonzero(is_mixed))[0]
    places, asked = index.places[entries].astype(np.int64), np.flatnonzero(is_mixed[buckets])
    found, is_gone = key_at(places), np.ones(entries.size, bool)
    key_end = row_end = 0
    for i, (keys, rows) in enumerate(parts):
        key_begin, key_end = key_end, key_end + keys.size
        row_begin, row_end = row_end, row_end + sum(piece.size for piece in rows)
        first, end = np.searchsorted(asked, [key_begin, key_end])
        wanted = np.sort(keys[asked[first:end] - key_begin])
        of_part = np.flatnonzero((places >= row_begin) & (places < row_end))
        # Of equal ones the newest comes first: a bucket has its places in ascending order.
        of_part = of_part[np.argsort(found[of_part], kind="stable")]
        its = found[of_part]
        counts = np.searchsorted(wanted, its) < np.searchsorted(wanted, its, "right")
        counts[1:] &= its[1:] != its[:-1]
        is_gone[of_part] = ~counts
        if not _are_equal(keys, rows, its[~counts]):
            return i
    is_row = np.ones(index.places.size, bool)
    is_row[entries[is_gone]] = False
    if not is_row.any():
        return make_index([])
    # Nothing is moved: in their place is a row that counts, of another key or the same once more.
    index.places[entries[is_gone]] = index.places[is_row.argmax()]
    return index


def _has_no_others(
    index: KeyIndex,
    parts: Sequence[tuple[np.ndarray, Sequence[np.ndarray]]],
    key_at: Callable[[np.ndarray], np.ndarray],
) -> bool:
    """Returns whether all rows are of the keys, as where none was removed; or False: it takes as
    long to find out as to look for the others."""
    row_end = 0
    for keys, rows in parts:
        row_begin, row_end = row_end, row_end + sum(piece.size for piece in rows)
        newer = np.concatenate(rows[:-1]) if rows[1:] else keys[:0]
        if newer.size > (row_end - row_begin) // 16:
            return False
        newer = np.sort(newer)
        newer = newer[np.append(True, newer[1:] != newer[:-1])[: newer.size]]
        entries, which = index.entries(_buckets([newer], index.starts.size - 1, index.seed))
        places = index.places[entries]
        is_of_part = (places >= row_begin) & (places < row_end)
        which = which[is_of_part & (key_at(places) == newer[which])]
        older = np.delete(newer[which], np.flatnonzero(np.diff(which, prepend=-1)))
        if not _are_equal(keys, rows, older):
            return False
    return True


def _are_equal(keys: np.ndarray, rows: Sequence[np.ndarray], less: np.ndarray) -> bool:
    """Returns whether keys are those of rows less some of them, by number and sum: so in an index
    there is no room for a difference but in a bucket that nobody can choose."""
    left = sum(int(piece.sum()) for piece in rows) - int(less.sum()) - int(keys.sum())
    return sum(piece.size for piece in rows) - less.size == keys.size and left % (1 << 64) == 0


def _buckets(pieces: Sequence[np.ndarray], num_buckets: int, seed: int) -> np.ndarray:
    """Returns the bucket of each key of all pieces, (m,) int64."""
    shift = np.uint64(65 - num_buckets.bit_length())
    buckets, begin = np.empty(sum(piece.size for piece in pieces), np.int64), 0
    for piece in pieces:
        for first in range(0, piece.size, _TOGETHER):
            hashes = hash_keys(piece[first : first + _TOGETHER], seed)
            end = begin + hashes.size
            np.right_shift(hashes, shift, out=buckets[begin:end].view(np.uint64))
            begin = end
    return buckets
