"""The oracle: a table in plain Python and NumPy, sharing no code with sok_lite."""

import numpy as np


class DictTable:
    """A table as a dict from Python int to a row. `first_row(key)` gives a new key's row."""

    def __init__(self, dim, first_row):
        self.dim = dim
        self.first_row = first_row
        self.rows = {}

    def find_or_insert(self, keys):
        out = np.empty((len(keys), self.dim), np.float32)
        for i, key in enumerate(keys):
            key = int(key)
            if key not in self.rows:
                self.rows[key] = np.array(self.first_row(key), np.float32)
            out[i] = self.rows[key]
        return out

    def contains(self, keys):
        return np.array([int(key) in self.rows for key in keys], bool)

    def insert_or_assign(self, keys, values):
        for key, value in zip(keys, values, strict=True):
            self.rows[int(key)] = np.array(value, np.float32)

    def assign(self, keys, values):
        for key, value in zip(keys, values, strict=True):
            if int(key) in self.rows:
                self.rows[int(key)] = np.array(value, np.float32)

    def accumulate(self, keys, deltas, scale=1.0):
        total = {}
        for key, delta in zip(keys, deltas, strict=True):
            total[int(key)] = total.get(int(key), 0) + np.asarray(delta, np.float64)
        for key, delta in total.items():
            if key in self.rows:
                self.rows[key] = (self.rows[key] + scale * delta).astype(np.float32)

    def erase(self, keys):
        return sum(self.rows.pop(int(key), None) is not None for key in set(map(int, keys)))

    def export(self):
        keys = sorted(self.rows)
        rows = [self.rows[key] for key in keys]
        return keys, np.array(rows, np.float32).reshape(len(keys), self.dim)


def unique(keys):
    """Distinct keys in order of first occurrence, and the inverse."""
    number = {}
    inverse = [number.setdefault(int(key), len(number)) for key in keys]
    return list(number), inverse
