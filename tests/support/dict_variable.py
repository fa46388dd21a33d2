"""Drawn calls of a `Variable`, and a Python dict that is its oracle."""

import numpy as np
import tensorflow as tf


def as_keys(numbers, dtype):
    """Returns keys of a dtype, one for each number; texts differ in what stands at their ends."""
    numbers = np.asarray(numbers)
    if dtype != tf.string:
        return numbers.astype(dtype.as_numpy_dtype)
    texts = [b"-" * (n < 0) + b"\0" * abs(n) for n in numbers.ravel().tolist()]
    return np.array(texts, object).reshape(numbers.shape)


def check_as_a_dict(mode, variable, default, seed=1, turns=1):
    """Calls every method of a new variable as drawn, and compares it with a dict.

    In a graph each call makes it longer, and takes its time: then `turns` are few.
    """
    rng = np.random.default_rng(seed)
    dim, dtype, held = variable.dim, variable.value_dtype.as_numpy_dtype, {}

    def keys(*shape):
        return as_keys(rng.integers(-7, 7, shape), variable.key_dtype)

    def rows(*shape):
        return rng.integers(-5, 6, (*shape, dim)).astype(dtype)

    def pairs(keys, rows):
        return zip(np.ravel(keys).tolist(), rows.reshape(-1, dim), strict=True)

    def expected(keys):
        found = [held.get(key, np.full(dim, default, dtype)) for key in np.ravel(keys).tolist()]
        return np.array(found, dtype).reshape(*np.shape(keys), dim)

    def check():
        found, values = mode.run(variable.export)
        assert sorted(found.tolist()) == sorted(held)
        assert mode.run(variable.size) == len(found) == len(values)
        parts = [mode.run(lambda i=i: variable.size(i)) for i in range(variable.shard_num)]
        assert sum(parts) == len(found)
        np.testing.assert_array_equal(values, expected(found))
        for shape in [(3, 5), (), (2, 0)][:turns]:
            asked = keys(*shape)
            found = mode.run(variable.lookup, asked)
            assert found.dtype == dtype
            np.testing.assert_array_equal(found, expected(asked))
            if shape:
                again, exists = mode.run(lambda k: variable.lookup(k, return_exists=True), asked)
                np.testing.assert_array_equal(again, found)
                flat = [key in held for key in np.ravel(asked).tolist()]
                np.testing.assert_array_equal(exists, np.reshape(flat, shape))

    for shape in [(9,), (2, 3), (), (0,), (1, 0)][:turns]:
        given = keys(*shape), rows(*shape)
        mode.run(variable.upsert, *given)
        held.update(pairs(*given))
        # `exists` has one flag for each key, in any shape.
        asked, old, new, flags = keys(4, 3), rows(4, 3), rows(4, 3), rng.integers(0, 2, 12) > 0
        mode.run(variable.accum, asked, old, new, flags)
        before = set(held)
        moved = zip(pairs(asked, new), old.reshape(-1, dim), flags, strict=True)
        for (key, row), less, flag in moved:
            if flag and key in before:
                held[key] = held[key] + (row - less)
            elif not flag and key not in before:
                held.setdefault(key, row)
        gone = keys(*shape)
        mode.run(variable.remove, gone)
        for key in np.ravel(gone).tolist():
            held.pop(key, None)
        check()
    mode.run(variable.clear)
    held.clear()
    check()
