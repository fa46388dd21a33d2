"""The oracle: a table in plain Python and NumPy, sharing no code with sok_lite."""

import numpy as np


class DictTable:
    """A table as a dict from Python int to a row. `first_row(key)` gives a new key's row.

    Deltas of float32 are summed as float64, all others in the dtype of the rows.
    """

    def __init__(self, dim, first_row, dtype=np.float32):
        self.dim, self.dtype = dim, np.dtype(dtype)
        self.first_row = first_row
        self.rows = {}

    def find_or_insert(self, keys):
        out = np.empty((len(keys), self.dim), self.dtype)
        for i, key in enumerate(keys):
            key = int(key)
            if key not in self.rows:
                self.rows[key] = np.array(self.first_row(key), self.dtype)
            out[i] = self.rows[key]
        return out

    def contains(self, keys):
        return np.array([int(key) in self.rows for key in keys], bool)

    def insert_or_assign(self, keys, values):
        for key, value in zip(keys, values, strict=True):
            self.rows[int(key)] = np.array(value, self.dtype)

    def assign(self, keys, values):
        for key, value in zip(keys, values, strict=True):
            if int(key) in self.rows:
                self.rows[int(key)] = np.array(value, self.dtype)

    def accumulate(self, keys, deltas, scale=1.0):
        wide = np.dtype(np.float64) if self.dtype == np.float32 else self.dtype
        zeros, scale, total = np.zeros(self.dim, wide), np.array(scale).astype(wide), {}
        for key, delta in zip(keys, deltas, strict=True):
            total[int(key)] = total.get(int(key), zeros) + np.asarray(delta, wide)
        for key, delta in total.items():
            if key in self.rows:
                self.rows[key] = (self.rows[key] + scale * delta).astype(self.dtype)

    def accum_or_assign(self, keys, values, is_found):
        held = [int(key) in self.rows for key in keys]
        add = [i for i, flag in enumerate(is_found) if flag and held[i]]
        put = [i for i, flag in enumerate(is_found) if not flag and not held[i]]
        self.accumulate([keys[i] for i in add], [values[i] for i in add])
        put.reverse()  # of a repeated key the first counts
        self.insert_or_assign([keys[i] for i in put], [values[i] for i in put])

    def erase(self, keys):
        return sum(self.rows.pop(int(key), None) is not None for key in set(map(int, keys)))

    def erase_if(self, predicate):
        """`predicate(key, row)` says whether a key goes."""
        return self.erase([key for key, row in self.rows.items() if predicate(key, row)])

    def export(self):
        keys = sorted(self.rows)
        rows = [self.rows[key] for key in keys]
        return keys, np.array(rows, self.dtype).reshape(len(keys), self.dim)


class ScoredTable(DictTable):
    """A DictTable whose keys have scores. What was evicted or refused it is told by the test. `now`
    is the number of the last lookup."""

    def __init__(self, dim, first_row, strategy, dtype=np.float32):
        super().__init__(dim, first_row, dtype)
        self.strategy = strategy
        self.now = self.epoch = 0
        self.scores = {}

    def score_after(self, key, given=None):
        """The score of a key, held or new, once the lookup `now` has seen it."""
        old = self.scores.get(key, 0)
        most = 2**64 - 1
        if self.strategy == "kLru":
            return self.now
        if self.strategy == "kLfu":
            return min(old + (1 if given is None else given), most)
        if self.strategy == "kEpochLru":
            return self.epoch * 2**32 + self.now
        if self.strategy == "kEpochLfu":
            count = old % 2**32 + (1 if given is None else given)
            return self.epoch * 2**32 + min(count, 2**32 - 1)
        return old if given is None else given

    def age(self, last):
        """Begins a lookup behind the number `last`: all numbers are halved, within scores too."""
        self.now = (last >> 1) + 1
        bits = {"kLru": 64, "kEpochLru": 32}.get(self.strategy, 0)
        for key, score in self.scores.items():
            number = score % 2**bits
            self.scores[key] = score - number + (number >> 1)

    def drop(self, keys):
        """Removes keys that are there with their scores."""
        for key in keys:
            del self.rows[key], self.scores[key]

    def erase(self, keys):
        held = {int(key) for key in keys} & set(self.rows)
        self.drop(held)
        return len(held)


def sum_in_pieces(terms):
    """The float32 sum in pieces of 32, by the words of kernels/pooling.cuh: (n, dim) -> (dim,)."""
    terms = terms.astype(np.float32)
    zeros = np.zeros(terms.shape[1], np.float32)
    pieces = []
    for first in range(0, len(terms), 32):
        piece = zeros.copy()
        for term in terms[first : first + 32]:
            piece += term
        pieces.append(piece)
    if len(pieces) <= 1:
        return pieces[0] if pieces else zeros
    total, lost = zeros, zeros
    for piece in pieces:
        piece = piece + lost
        now = total + piece
        added = now - total
        lost = (total - (now - added)) + (piece - added)
        total = now
    return total + lost


def unique(keys):
    """Distinct keys in order of first occurrence, and the inverse."""
    number = {}
    inverse = [number.setdefault(int(key), len(number)) for key in keys]
    return list(number), inverse


def drawn(keys, ratio, table_seed, lookup):
    """Which keys a lookup draws with chance `ratio`, (n,) bool: a hash of each, as 53 bits."""

    def hashes(numbers):
        for number in numbers:
            h = int(number) % 2**64
            for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
                h = (h ^ h >> 33) * factor % 2**64
            yield h ^ h >> 33

    (salt,) = hashes([table_seed ^ (lookup * 0x9E3779B97F4A7C15 & 0x7FFFFFFFFFFFFFFF)])
    uniform = [bits >> 11 for bits in hashes(h ^ salt for h in hashes(np.asarray(keys).tolist()))]
    return np.array(uniform, np.float64) / 2.0**53 < ratio
