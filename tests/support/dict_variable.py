"""What a `Variable` is to do, in a Python dict: the oracle of its tests, and drawn calls of it."""

import numpy as np
import tensorflow as tf


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


def as_keys(numbers, dtype):
    """Returns keys of a dtype, one for each number; texts differ in what stands at their ends."""
    numbers = np.asarray(numbers)
    if dtype != tf.string:
        return numbers.astype(dtype.as_numpy_dtype)
    texts = [b"-" * (n < 0) + b"\0" * abs(n) for n in numbers.ravel().tolist()]
    return np.array(texts, object).reshape(numbers.shape)


def check_as_a_dict(mode, variable, default, seed=1, turns=1):
    """Calls every method of a new variable as drawn, and compares it with a dict.

    Args:
      mode: of tests/support/modes.py; in a graph each call makes it longer, and takes its time.
      variable: whose initializer is `default`.
    """
    rng = np.random.default_rng(seed)
    oracle = DictVariable(variable.dim, default, variable.value_dtype.as_numpy_dtype)

    def keys(*shape):
        return as_keys(rng.integers(-7, 7, shape), variable.key_dtype)

    def rows(*shape):
        return rng.integers(-5, 6, (*shape, variable.dim)).astype(oracle.dtype)

    def check():
        found, values = mode.run(variable.export)
        assert sorted(found.tolist()) == sorted(oracle.rows)
        assert mode.run(variable.size) == len(found) == len(values)
        parts = [mode.run(lambda i=i: variable.size(i)) for i in range(variable.shard_num)]
        assert sum(parts) == len(found)
        np.testing.assert_array_equal(values, oracle.lookup(found))
        for shape in [(3, 5), (), (2, 0)][:turns]:
            asked = keys(*shape)
            found = mode.run(variable.lookup, asked)
            assert found.dtype == oracle.dtype
            np.testing.assert_array_equal(found, oracle.lookup(asked))
            if shape:
                again, exists = mode.run(lambda k: variable.lookup(k, return_exists=True), asked)
                np.testing.assert_array_equal(again, found)
                np.testing.assert_array_equal(exists, oracle.exists(asked))

    for shape in [(9,), (2, 3), (), (0,), (1, 0)][:turns]:
        given = keys(*shape), rows(*shape)
        mode.run(variable.upsert, *given)
        oracle.upsert(*given)
        # `exists` has one flag for each key, in any shape.
        given = keys(4, 3), rows(4, 3), rows(4, 3), rng.integers(0, 2, 12).astype(bool)
        mode.run(variable.accum, *given)
        oracle.accum(*given)
        gone = keys(*shape)
        mode.run(variable.remove, gone)
        oracle.remove(gone)
        check()
    mode.run(variable.clear)
    oracle.rows.clear()
    check()
