"""Runs every CPU kernel on several threads at once. test_sanitizers.py runs it under them.

Usage: python -m tests.support.sanitizers.job JOB

Jobs: engine, tables, evictions, pool, operations, native, faulty_count, faulty_end, faulty_shift.
"""

import ctypes
import functools
import gc
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from scripts.bench.common.row_steps import apply_rule
from sok_lite.backend import get_backend
from sok_lite.backend.cpu import CpuBackend
from sok_lite.comm import SingleCommunicator
from sok_lite.comm.threads import run_ranks
from sok_lite.engine import optimizers
from sok_lite.engine.dedup import Missing, dedup, unique
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.message import RowMessage
from sok_lite.engine.pooling import wrong_splits
from sok_lite.engine.segments import Terms, group, segment_sum, segment_sums
from sok_lite.engine.table import make_table
from sok_lite.engine.table.hkv_options import STRATEGIES
from tests.support.eviction_facts import Watched
from tests.support.helpers import first_row, give_room, new_table, run_threads
from tests.support.parts import Part, forward_parts
from tests.support.pooled import combine, combine_grad
from tests.support.reference import DictTable

THREADS = 4
FLOAT, INT64 = 1, 9  # TensorFlow's numbers of types
RULES = [getattr(optimizers, name)() for name in optimizers.__all__ if name != "UpdateRule"]


def new_backend():
    backend = CpuBackend(num_threads=THREADS)
    backend.grain = 1
    # Tasks that each come with a fourth of the items come to different threads.
    backend.pieces = 3
    return backend


def engine():
    backend = new_backend()
    rng = np.random.default_rng(0)
    for dtype in ("float32", "float16", "bfloat16"):
        for initializer in ("random", "normal", "13"):
            table = make_table(
                "hbm", backend, 8, initializer=make_initializer(initializer, 8), dtype=dtype
            )
            for _ in range(3):
                # Many threads meet in one window and on one key.
                keys = rng.integers(0, 3000, 5000)
                table.lookup(keys)
                table.accumulate(keys, np.ones((5000, 8), np.float32))
                table.insert_or_assign(keys[::2] * 7, np.ones((2500, 8), np.float32))
                table.erase(keys[:500])
            table.export()
            rows = backend.xp.unique(table.find_or_insert(np.arange(2000)))
            for rule in RULES:
                fresh = make_table(
                    "hbm", backend, 8, initializer=make_initializer(initializer, 8), dtype=dtype
                )
                rows = fresh.find_or_insert(np.arange(2000))
                apply_rule(fresh, rule, rows, np.ones((2000, 8), np.float32), 0.1, 1)

    keys = rng.integers(0, 100, 4000)
    distinct, inverse = unique(backend, keys)
    splits = np.arange(0, 4001, 8).astype(np.int64)
    weights = rng.random(4000, np.float32)
    source = rng.random((distinct.size, 8), np.float32)
    for combiner in ("sum", "mean", "sqrtn"):
        out = combine(backend, source, inverse, splits, weights, combiner)
        combine_grad(backend, out, inverse, splits, weights, combiner, distinct.size)
    segment_sum(backend, rng.random((4000, 8), np.float32), inverse, distinct.size)

    # Several tables, of which one has a hot key and one no items.
    begin = np.array([0, 4000, 4000, 4030, 7000])
    keys = np.where(rng.random(7000) < 0.5, 7, rng.integers(0, 1000, 7000))
    in_tables = dedup(backend, keys, begin)
    rows = np.where(rng.random(7000) < 0.5, np.uint32(0xFFFFFFFF), np.uint32(3))
    absent = [int((part == 0xFFFFFFFF).sum()) for part in np.split(rows, begin[1:-1])]
    dedup(backend, keys, begin, Missing(rows, absent))
    groups = group(backend, in_tables.inverse, begin, in_tables.starts)
    given = [np.arange(4000, dtype=np.int32)[::-1].copy(), None, None, None]
    sizes = zip(np.diff(begin), (8, 3, 1, 20), strict=True)
    segment_sums(backend, groups, Terms([rng.random(size, np.float32) for size in sizes], given))

    # Rows of words of every width, to three ranks and back.
    counts = np.array([[900, 0, 300], [1, 700, 0], [0, 33, 2000]])
    numbers = np.split(np.arange(counts.sum(), dtype=np.int32), np.cumsum(counts.sum(axis=0))[:-1])
    shares = [
        np.split(rng.permutation(each), np.cumsum(of_ranks)[:-1])
        for each, of_ranks in zip(numbers, counts.T, strict=True)
    ]
    order = np.concatenate([of_ranks[rank] for rank in range(3) for of_ranks in shares])
    given = [
        rng.integers(0, 256, (n, dim)).astype(dtype)
        for n, dim, dtype in zip(counts.sum(axis=0), (3, 5, 7), ("B", "H", "f"), strict=True)
    ]
    for places in (order, None):
        row_bytes = [each.strides[0] for each in given]
        message = RowMessage.layout(backend, counts, row_bytes, places)
        results = [np.zeros_like(each) for each in given]
        message.unpack(message.pack(given), results)
        for result, each in zip(results, given, strict=True):
            np.testing.assert_array_equal(result, each)
    wrong_splits(backend, [splits, np.zeros(1, np.int64)], [4000, 0])


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


def tables():
    """Both tables, with real threads in every launch and several that launch."""
    evictions()
    backend = new_backend()
    rng = np.random.default_rng(1)
    # Erased slots are taken again by several threads while others look for free ones.
    table, oracle = new_table(backend, 2), DictTable(2, first_row(2))
    for _ in range(15):
        keys = rng.integers(0, 600, 300)
        np.testing.assert_array_equal(table.lookup(keys).values, oracle.find_or_insert(keys))
        keys = rng.integers(0, 600, 250)
        assert table.erase(keys) == oracle.erase(keys)
        for each in (table, oracle):
            each.insert_or_assign(keys[:50], np.ones((50, 2), np.float32))
        keys, rows = table.export()
        expected_keys, expected_rows = oracle.export()
        assert keys.tolist() == expected_keys
        np.testing.assert_array_equal(rows, expected_rows)
        assert len(set(table.export_rows()[1].tolist())) == table.size
        table.assign_scores(keys[::2], np.arange(keys[::2].size) % 2)
        table.expire(num_lookups=1 << 20)

    # Several Python threads on one table, launching through one pool.
    for var_type, options in (
        ("hbm", {}),
        ("hybrid", {"max_capacity": 1024, "on_refused": "ignore"}),
    ):
        table = new_table(backend, 2, var_type, **options)
        use_from_threads(table)
        keys, rows = table.export_rows()
        assert keys.size == table.size == len(set(rows.tolist()))
        np.testing.assert_array_equal(table.store.read(rows)[:, 0], keys % 1000)

    pooled(backend)


def pooled(backend):
    """Searches and sums in one launch, for tables of both kinds together, from several threads."""
    small = {"init_capacity": 64, "max_capacity": 64, "max_bucket_size": 4}
    tables = [
        new_table(backend, dim, kind, dtype=dtype, **options)
        for dim, kind, dtype, options in (
            (8, "hbm", "float32", {}),
            (64, "hbm", "float32", {}),  # long rows
            (3, "hbm", "bfloat16", {}),
            (8, "hybrid", "float32", {"max_capacity": 1024, "evict_strategy": "kLfu"}),
            (64, "hybrid", "float16", {"max_capacity": 1024}),
            (8, "hybrid", "float32", {**small, "on_refused": "ignore"}),
        )
    ]
    for table in tables:
        table.lookup(np.arange(200))

    def work(seed):
        rng = np.random.default_rng(seed)
        for turn in range(6):
            parts, expected = [], []
            for number, table in enumerate(tables):
                # Rows of one item each, ragged ones, and none. All formats have such numbers.
                lengths = (np.ones(100), rng.integers(0, 60, 100), np.zeros(0))[turn % 3].astype(
                    int
                )
                keys = rng.integers(0, 250, lengths.sum())
                weights = rng.integers(1, 4, keys.size).astype(np.float32)
                weights = weights if (number + turn) % 2 else None
                splits, combiner = np.cumsum([0, *lengths]), ("sum", "mean", "sqrtn")[number % 3]
                parts.append(Part(table, keys, splits, weights, combiner))
                expected.append(sums_of_keys(keys, lengths, weights, combiner))
            found, _ = forward_parts(backend, SingleCommunicator(), parts)
            for out, each in zip(found, expected, strict=True):
                np.testing.assert_allclose(out, np.tile(each, (out.shape[1], 1)).T, rtol=1e-5)
            tables[turn % 6].erase(rng.integers(0, 250, 20))
        wrong = parts[0]._replace(keys=np.arange(9), row_splits=np.array([0, 12, 9]), weights=None)
        with pytest.raises(ValueError, match="must rise"):
            forward_parts(backend, SingleCommunicator(), [wrong, *parts[1:]])

    run_threads(work, THREADS)


def sums_of_keys(keys, lengths, weights, combiner):
    """Returns what each column of an output is where a key's row is the key."""
    rows = np.repeat(np.arange(lengths.size), lengths)
    weights = np.ones(keys.size) if weights is None else weights.astype(np.float64)
    sums, by, squares = (
        np.bincount(rows, factors, lengths.size)
        for factors in (weights * keys, weights, weights**2)
    )
    divisor = {"sum": 1, "mean": by, "sqrtn": np.sqrt(squares)}[combiner]
    return sums / np.where(by == 0, 1, divisor)


def use_from_threads(table):
    def work(seed):
        own = np.random.default_rng(seed)
        for _ in range(5):
            keys = own.integers(0, 3000, 1000)
            np.testing.assert_array_equal(table.lookup(keys).values[:, 0], keys % 1000)
            table.erase(own.integers(0, 3000, 50))
            table.statistics()

    run_threads(work, THREADS)


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
    """TensorFlow's operations, by the library that OPERATIONS names, from several threads."""
    import tensorflow as tf

    import sok_lite as sok
    from sok_lite.engine.work_counters import UPDATES
    from sok_lite.native import callbacks, library

    library.find_library = lambda: Path(os.environ["OPERATIONS"])
    table = sok.DynamicVariable(4, "ones", name="table")
    trained = [sok.DynamicVariable(dim, name=f"trained of {dim}") for dim in (3, 8)]
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1), stochastic_rounding=True)
    kept = []

    def train(ids):
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse(trained, [ids, ids], combiners=["sum", "mean"])
            loss = tf.add_n([tf.reduce_sum(each**2) for each in rows])
        optimizer.apply_gradients(zip(tape.gradient(loss, trained), trained, strict=True))

    of_any_size = [tf.TensorSpec([None, 1], tf.int64)]
    compiled = tf.function(train, input_signature=of_any_size, autograph=False)

    @tf.function
    def step(ids, times):
        total = tf.zeros([])
        for _ in tf.range(times):
            with tf.GradientTape() as tape:
                total += tf.reduce_sum(tf.nn.embedding_lookup(table, ids) ** 2)
            kept_gradient = tape.gradient(total, table)
            total += tf.reduce_sum(kept_gradient.values)
        return total

    def fail(*_, **__):
        raise ValueError("no")

    def keep(frame):
        kept.extend(frame.inputs(table.table.backend))
        kept.append(frame.output(0, (100, 4), tf.float32.as_datatype_enum, table.table.backend))

    def work(seed):
        rng = np.random.default_rng(seed)
        for turn in range(30):
            ids = tf.constant(rng.integers(0, 500, rng.integers(0, 300)))
            np.testing.assert_array_equal(tf.nn.embedding_lookup(table, ids), 1)
            step(ids, tf.constant(turn % 3))
            (train if turn % 3 else compiled)(ids[:, None])
            with pytest.raises(ValueError, match="no"):
                _run(ids, fail)
            _run(ids, keep)
        del kept[:]
        gc.collect()

    def _run(ids, run):
        handle = table.handle
        call = callbacks.Call(run, True)
        given = {"inputs": [ids], "numbers": [], "Tout": [tf.float32], "J": 0, "names": []}
        given |= {"Tkeys": [tf.int64], "dims": [4], "handles_of": [1], "trainable": [True]}
        try:
            callbacks.operations().module.sok_lookup(handles=[handle], call=call.number, **given)
        except tf.errors.OpError:
            raise callbacks.raised.pop(call.number) from None

    run_threads(work, THREADS)
    work(0)  # alone, so that native code takes steps
    assert UPDATES.native[0] > 0
    run_ranks(2, _in_order)


def _in_order(comm):
    """Operations that wait for their turn, of which some fail and one is let go of."""
    import tensorflow as tf

    from sok_lite.bridge.collective_order import CollectiveOrder
    from sok_lite.native import callbacks

    v1, order, cpu = tf.compat.v1, CollectiveOrder(comm), get_backend("cpu")
    given = {"numbers": [], "Tout": [tf.float32], "J": 0, "Tkeys": [], "handles_of": []}
    given |= {"dims": [], "trainable": [], "names": []}

    def submit(number, frame, running):
        def run():
            total = comm.allreduce(frame.inputs(cpu)[0], "sum", f"call {number}")
            if number == 3:
                raise ValueError("no")
            frame.output(0, total.shape, 1, cpu)[...] = total

        if number != 4:
            order.submit(number, run, running)

    calls = [callbacks.Call(functools.partial(submit, number), False) for number in range(5)]
    with tf.Graph().as_default():
        sums = []
        for number in range(5):
            number = number if comm.rank else 4 - number
            inputs = [tf.fill([100], float(number))]
            make = callbacks.operations().module.sok_collective_in_order
            made = make(call=calls[number].number, inputs=inputs, **given)
            sums.append(tf.reduce_sum(made.outputs[0]) if number < 3 else made.outputs[0])
        good = [each for each in sums if each.shape.rank == 0]
        with v1.Session() as session:
            for _ in range(20):
                assert sorted(session.run(good)) == [0, 200, 400]
                for bad in (each for each in sums if each.shape.rank != 0):
                    with pytest.raises(tf.errors.OpError, match="no|interrupted"):
                        session.run(bad)
    order.close()


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
        *(backend, UPDATES, nonfinite.ctypes.data, 0, rule.native.number),
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
    jobs = {"engine": engine, "tables": tables, "evictions": evictions, "pool": pool}
    jobs |= {"operations": operations, "native": native}
    jobs.get(job, lambda: faulty(job))()
    print("done")
