"""Runs every CPU kernel on several threads at once. test_sanitizers.py runs it under them.

Usage: python -m tests.support.sanitizers.job JOB

Jobs: kernels, evictions, pool, operations, native, faulty_count, faulty_end, faulty_shift.
"""

import ctypes
import functools
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.backend.cpu import CpuBackend
from sok_lite.engine import optimizers
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.table import make_table
from sok_lite.engine.table.hkv_options import STRATEGIES
from tests.support.eviction_facts import Watched
from tests.support.helpers import first_row, give_room, new_table, run_threads

THREADS = 4
FLOAT, INT64 = 1, 9  # TensorFlow's numbers of types


def new_backend():
    backend = CpuBackend(num_threads=THREADS)
    backend.grain = 1
    # Tasks that each come with a fourth of the items come to different threads.
    backend.pieces = 3
    return backend


# The tests of the engine that between them run every kernel, and its rules.
TESTS = [
    *("all_tables", "dedup", "det", "exchange", "hkv", "initializer", "lookup", "pooling"),
    *("row_formats", "segments", "tables", "update"),
]


def kernels():
    """The engine's own tests, where a launch of one item has work for several threads."""
    os.environ["SOK_LITE_NUM_THREADS"] = str(THREADS)
    backend = get_backend("cpu")
    backend.grain, backend.pieces = 1, 3
    files = [f"tests/engine/test_{name}.py" for name in TESTS]
    run_tests("-k", "cpu", *files, "tests/engine/optimizers/test_rule.py")
    # Several threads on one table, launching through one pool.
    for kind, options in (("hbm", {}), ("hybrid", {"max_capacity": 1024, "on_refused": "ignore"})):
        table = new_table(new_backend(), 2, kind, **options)
        run_threads(functools.partial(use, table), THREADS)
        keys, rows = table.export_rows()
        assert keys.size == table.size == len(set(rows.tolist()))
        np.testing.assert_array_equal(table.store.read(rows)[:, 0], keys % 1000)


def run_tests(*arguments):
    options = ["-q", "-x", "--color=no", "--quick", "--unchanged", "-p", "no:cacheprovider"]
    assert pytest.main([*options, *arguments]) == 0


def use(table, seed):
    own = np.random.default_rng(seed)
    for _ in range(5):
        keys = own.integers(0, 3000, 1000)
        np.testing.assert_array_equal(table.lookup(keys).values[:, 0], keys % 1000)
        table.erase(own.integers(0, 3000, 50))
        table.statistics()


def evictions():
    """Many threads insert and evict in few buckets; after each call all facts must hold."""
    backend = new_backend()
    rng = np.random.default_rng(0)
    for round_ in range(3):
        for strategy in STRATEGIES:
            # One bucket, several small ones, and one that grows.
            for slots, most, bucket in ((64, 64, 64), (64, 64, 4), (16, 256, 16)):
                options = {"init_capacity": slots, "max_capacity": most, "max_bucket_size": bucket}
                table = new_table(
                    *(backend, 2, "hybrid"),
                    **{**options, "evict_strategy": strategy, "on_refused": "ignore"},
                    # Rows in two tiers every other time.
                    max_hbm_for_vectors=(16 * 8 / 2**30, 1)[round_ % 2],
                )
                watch = Watched(table, first_row(2))
                for n in (40, 200, 100):
                    keys = rng.integers(-3 * most, 3 * most, n).tolist()
                    watch.lookup(keys)
                    watch.set_epoch(watch.oracle.epoch + 1)
                    keys = rng.integers(-3 * most, 3 * most, n).tolist()
                    watch.insert(keys, np.ones((n, 2), np.float32))
                    if strategy == "kCustomized":
                        watch.find_or_insert(keys[::-1], rng.integers(0, 50, n).tolist())
                    flags = watch.oracle.contains(keys)
                    watch.accum_or_assign(keys, np.ones((n, 2), np.float32), flags)
                    watch.erase(rng.choice(keys, 20).tolist())
                    watch.check()


def pool():
    """Short launches one after another, for which workers come late; their memory is soon freed."""

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(400):
            backend = backends[rng.integers(len(backends))]
            n = int(rng.integers(1, 3000))
            index = rng.permutation(n).astype(np.int32)
            x, out = rng.integers(0, 1 << 32, (n, 4), np.uint32), np.zeros((n, 4), np.uint32)
            backend.launch("dense_gather_u32", n, x, 4, index, out, n)
            np.testing.assert_array_equal(out, x[index])
            # Workers look out, or sleep.
            time.sleep(rng.choice([0, 0, 5e-5, 5e-4]))

    backends = [CpuBackend(num_threads=THREADS) for _ in range(3)]
    backends[0].grain, backends[1].grain = 1, 64
    backends[2]._may_spin = True
    work(0)
    run_threads(work, 2)


def operations():
    """Tests of TensorFlow's operations, by the library that OPERATIONS names."""
    from sok_lite.native import library

    library.find_library = lambda: Path(os.environ["OPERATIONS"])
    names = ("native_threads", "native_lookup", "native_update")
    run_tests(*(f"tests/bridge/test_{name}.py" for name in (*names, "collective_order")))


def native():
    """Native calls from several threads, of known keys and, in a table by itself, of new ones, with
    methods of Python's beside, by the library that NATIVE names. Steps add up."""
    from sok_lite.engine.work_counters import GRADIENTS, LOOKUPS, UPDATES
    from sok_lite.native import plans

    library = ctypes.CDLL(os.environ["NATIVE"])
    plans.operations = lambda: SimpleNamespace(library=library)
    backend, dims, num_keys, batch = new_backend(), (3, 8), 200, 40
    kinds = [("hbm", {}), ("hybrid", {"evict_strategy": "kLfu"})]
    tables = [
        make_table(kind, backend, dim, initializer=make_initializer("ones", dim), **options)
        for (kind, options), dim in zip(kinds, dims, strict=True)
    ]
    others = num_keys + np.arange(batch) % 3  # of the second table, that are assigned
    for table in tables:
        table.lookup(np.arange(num_keys))
        table.lookup(others)
        table.store.number_states()
        table.row_cache.make_room(table.backend, batch)
        give_room(table)
    records = [(ctypes.addressof(each.record), each.record.generation) for each in tables]
    rule = optimizers.SGD()
    kernel = backend.kernel("update_sgd_f32")
    parts = [
        plans.Part(*its, INT64, FLOAT, dim, rows=plans.Rows.EVEN, row_length=1)
        for its, dim in zip(records, dims, strict=True)
    ]
    moved = [
        plans.UpdatePart(
            *(*its, table.store.record.states, INT64, dim, True, False, False, 0, *kernel), ()
        )
        for its, table, dim in zip(records, tables, dims, strict=True)
    ]
    policy = plans.Policy(1, -1, 0, 0, 0)
    lookup = plans.LookupPlan(backend, True, LOOKUPS, GRADIENTS, policy, tuple(parts))
    call = plans.PlannedCall(lookup, None, False)
    growing, some, parts_of_growing = [], np.zeros(1, np.int64), []
    for kind, options in kinds:
        table = make_table(kind, backend, 4, initializer=make_initializer("ones", 4), **options)
        table.reserve(20000)
        table.store.reserve(20000)
        table.store.add_states({"accumulator": (4, 0.1)}, None)
        give_room(table)
        first = (backend, table.store, np.zeros(1, np.uint32), some, table.table_seed)
        beginning = plans.Drawing.of(table.initializer.fill_launch(*first), some)
        where = (ctypes.addressof(table.record), table.record.generation)
        form = {"rows": plans.Rows.EVEN, "row_length": 1, "beginning": beginning}
        parts_of_growing.append(plans.Part(*where, INT64, FLOAT, 4, **form))
        growing.append(table)
    # Each table twice, so that two parts have the same new keys.
    inserting = plans.LookupPlan(backend, True, None, None, policy, (*parts_of_growing,) * 2)
    inserting = plans.PlannedCall(inserting, None, False)
    nonfinite = np.zeros(1, np.int64)
    fields = rule.native.values
    update = plans.UpdatePlan(
        *(backend, UPDATES, nonfinite.ctypes.data, 0, 0, rule.native.number),
        *(b"", (-1, -1), fields, fields, tuple(moved)),
    )
    update.note(call.number)
    written = [
        plans.WritePlan(backend, writing, True, False, False, 1.0, part)
        for writing, part in zip((plans.Writing.ADDS, plans.Writing.ASSIGNS), parts, strict=True)
    ]
    adding, assigning = (plans.PlannedCall(each, None, False) for each in written)

    def do(what, arrays, call=call):
        """Returns whether native code has done a call, and its outputs as (address, length)."""
        words = []
        for address, kind, shape in arrays:
            words += [address, kind, len(shape), *shape]
        words = (ctypes.c_int64 * len(words))(*words)
        outputs, memory = (ctypes.c_int64 * 40)(), ctypes.c_void_p()
        number = ctypes.c_int64(call.number)
        is_done = library.sok_calls_do(
            *(ctypes.c_int64(what), number, words, ctypes.c_int64(len(arrays))),
            *(outputs, ctypes.byref(memory)),
        )
        kept.append(memory)
        return bool(is_done), list(zip(outputs[::2], outputs[1::2], strict=True))

    kept, (counts, added) = [], np.zeros((2, THREADS, num_keys), np.int64)
    refused, new_keys = np.zeros(THREADS, np.int64), [set() for _ in range(THREADS)]

    def work(number):
        rng = np.random.default_rng(number)
        grads = [np.ones((batch, dim), np.float32) for dim in dims]
        assigned = np.full((batch, dims[1]), 2, np.float32)
        step = np.array([1.0, 1.0, 1.0]).view(np.int64)
        for turn in range(150):
            keys = rng.integers(0, num_keys, batch)
            its = [(keys.ctypes.data, INT64, (batch,))] * 2
            done, outputs = do(0, its)
            if not done:
                refused[number] += 1
                continue
            rows, told = outputs[2], outputs[6]
            given = [(each.ctypes.data, FLOAT, each.shape) for each in grads]
            rows, told = ((at, INT64, (n,)) for at, n in (rows, told))
            done, outputs = do(1, [*given, *its, rows, *[(0, INT64, (0,))] * 3, told])
            if not done:
                refused[number] += 1
                continue
            sums = [(at, FLOAT, (n, dim)) for (at, n), dim in zip(outputs, dims, strict=False)]
            distinct = [(at, INT64, (n,)) for at, n in outputs[2:4]]
            if turn % 3 == 0:  # the ids of the batch, which repeat, in place of the gradient's keys
                sums, distinct = given, its
            done, _ = do(2, [*distinct, *sums, (step.ctypes.data, INT64, (3,))])
            refused[number] += not done
            np.add.at(counts[number], keys, done)
            done, _ = do(3, [its[0], given[0]], adding)
            refused[number] += not done
            np.add.at(added[number], keys, done)
            new = [(others.ctypes.data, INT64, (batch,))]
            new.append((assigned.ctypes.data, FLOAT, assigned.shape))
            done, _ = do(3, new, assigning)
            refused[number] += not done
            came = rng.integers(0, 100 * (turn + 1), batch)
            done, _ = do(0, [(came.ctypes.data, INT64, (batch,))] * 4, inserting)
            refused[number] += not done
            new_keys[number].update(came.tolist())
            if turn % 10 == number:
                for table in tables:
                    table.lookup(np.arange(number * 50, number * 50 + 20))
                    table.contains(keys)

    run_threads(work, THREADS)
    for memory in kept:
        library.sok_calls_free(memory)
    moved_by = [(added - counts).sum(axis=0), -counts.sum(axis=0)]
    for table, its in zip(tables, moved_by, strict=True):
        rows, *_ = table.lookup(np.arange(num_keys))
        np.testing.assert_array_equal(rows[:, 0], 1 + its)
    np.testing.assert_array_equal(tables[1].lookup(others)[0], 2)
    expected = sorted(set().union(*new_keys))
    for table in growing:
        keys, rows = table.export()[:2]
        np.testing.assert_array_equal(np.sort(keys), expected)
        np.testing.assert_array_equal(rows, 1)
        assert table.size == table.store.num_rows == len(expected)
        states = table.store.read(table.find(keys), "accumulator")
        np.testing.assert_array_equal(states, np.float32(0.1))
    assert LOOKUPS.native[0] > 0 and GRADIENTS.native[0] > 0 and UPDATES.native[0] > 0
    assert not refused.any()


def faulty(kernel):
    n = {"faulty_count": 100_000, "faulty_end": 100, "faulty_shift": 2}[kernel]
    new_backend().launch(kernel, n, np.zeros(n, np.int64), n)


if __name__ == "__main__":
    job = sys.argv[1]
    jobs = {"kernels": kernels, "evictions": evictions, "pool": pool}
    jobs |= {"operations": operations, "native": native}
    jobs.get(job, lambda: faulty(job))()
    print("done")
