"""A first row that a reader can compute in the head, tables that use it, and what tests need."""

import copy
import operator
import threading
from functools import partial

import numpy as np
import pytest

from sok_lite.backend.base import LaunchArgs, as_words
from sok_lite.backend.gpu_binaries import Nvrtc
from sok_lite.backend.launches import Launch
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table import make_table
from sok_lite.engine.update_rows import Update
from tests.support.simt.backend import is_simulated


class _Calls:
    """A backend whose kernels are functions, their only argument."""

    def packed(self, kernel, parts):
        return [part.arguments for part in parts]


_CALLS = _Calls()


class KeyInitializer:
    """The first row of key k is k mod 1000 in every column."""

    def check(self, row_dtype, dim):
        pass

    def fill_launch(self, backend, store, rows, keys, table_seed, out=None):
        values = store.to_storage(self.values(backend, keys, store.dim, table_seed))
        if out is not None:
            out[...] = values
        return store.write_launch(rows, values)

    def draw_launch(self, backend, row_dtype, out, keys, table_seed, rows=None):
        n, dim = out.shape
        values = row_dtype.to_storage(backend.xp, self.values(backend, keys, dim, table_seed))
        if rows is not None:
            at = backend.xp.flatnonzero(rows == np.uint32(NO_ROW))
            return Launch(_CALLS, "", LaunchArgs(n, partial(operator.setitem, out, at, values[at])))
        (suffix, words), each = as_words(values), backend.xp.arange(n, dtype=np.int32)
        return backend.prepared(f"dense_gather_{suffix}", n, words, dim, each, as_words(out)[1], n)

    def values(self, backend, keys, dim, table_seed):
        values = (backend.to_host(keys) % 1000).astype(np.float32)
        return backend.from_host(np.repeat(values[:, None], dim, axis=1))


def first_row(dim):
    """The same for the oracle."""
    return lambda key: np.full(dim, key % 1000, np.float32)


def give_room(table):
    """Lets the clock of a table begin spans for half an hour, for which native code would need
    Python."""
    clock = table.clock
    clock._set_spans(clock._spans(), more=2000)


def sized(backend, usual, simulated):
    """Returns how large a test is: `usual`, or `simulated` where a GPU is simulated, which takes
    thousands of times as long."""
    return simulated if is_simulated(backend) else usual


def with_segments(backend, num_slots):
    """Returns the backend with other segments of an index, so small that small tables have many."""
    backend = copy.copy(backend)
    backend.segment_slots = num_slots
    return backend


def on(backend, *arrays):
    """Returns arrays of the backend; None stays None."""
    return [None if array is None else backend.from_host(array) for array in arrays]


def new_table(backend, dim=4, var_type="hbm", **options):
    return make_table(var_type, backend, dim, initializer=KeyInitializer(), **options)


def update_of(table, rule, keys, grads, **options):
    """Returns the Update of a table by keys and a gradient that NumPy takes."""
    backend = table.backend
    keys = backend.from_host(np.array(keys))
    grads = backend.from_host(np.array(grads, np.float32).reshape(-1, table.dim))
    return Update(table, rule, keys, grads, **options)


def run_threads(work, count=4):
    """Calls work(number) on `count` threads at once; raises the first failure."""
    failures = []

    def guarded(number):
        try:
            work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def need_nvrtc():
    """Returns NVRTC, which compiles without a GPU, or skips the test where it is not installed."""
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    nvrtc = Nvrtc(cupy.cuda.nvrtc)
    try:
        assert nvrtc.version
    except Exception as error:  # CuPy raises RuntimeError or OSError by the way it was installed
        pytest.skip(f"NVRTC cannot be loaded: {error}")
    return nvrtc


def initial_values(initializer, backend, keys, dim, table_seed):
    """Returns the initial values of keys (n,) int64, (n, dim) float32."""
    out = backend.xp.empty((len(keys), dim), np.float32)
    initializer.draw_launch(backend, row_dtype("float32"), out, keys, table_seed)()
    return out
