"""What a `Variable` is to do, in a Python dict: the oracle of its tests."""

import numpy as np


class DictVariable:
    """Rows by key.

    Attributes:
      rows: key -> row.
    """

    def __init__(self, dim, default=0.0, dtype=np.float32):
        self.dim, self.dtype = dim, dtype
        self.default = np.full(dim, default, dtype)
        self.rows = {}

    def upsert(self, keys, values):
        for key, row in zip(np.ravel(keys).tolist(), self._rows(values), strict=True):
            self.rows[key] = row.copy()

    def accum(self, keys, old, new, exists):
        held = set(self.rows)  # when the call began
        for key, a, b, flag in zip(
            np.ravel(keys).tolist(), self._rows(old), self._rows(new), np.ravel(exists), strict=True
        ):
            if flag and key in held:
                self.rows[key] = self.rows[key] + (b - a)
            elif not flag and key not in held:
                self.rows.setdefault(key, b.copy())

    def lookup(self, keys):
        keys = np.asarray(keys)
        rows = [self.rows.get(key, self.default) for key in np.ravel(keys).tolist()]
        return np.array(rows, self.dtype).reshape(*keys.shape, self.dim)

    def exists(self, keys):
        keys = np.asarray(keys)
        return np.array([key in self.rows for key in np.ravel(keys).tolist()], bool).reshape(
            keys.shape
        )

    def remove(self, keys):
        for key in np.ravel(keys).tolist():
            self.rows.pop(key, None)

    def _rows(self, values):
        return np.asarray(values).astype(self.dtype).reshape(-1, self.dim)
