"""Runs every CPU kernel on several threads at once. test_sanitizers.py runs it under them.

Usage: python -m tests.sanitizers.job engine|faulty_count|faulty_end|faulty_shift
"""

import sys
import threading

import numpy as np

from sok_lite.backend.cpu import CpuBackend
from sok_lite.engine.combine import combine, combine_grad, segment_sum
from sok_lite.engine.initializer import make_initializer
from sok_lite.engine.table import make_table
from sok_lite.engine.unique import unique
from sok_lite.engine.update_rules import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Momentum,
    RMSprop,
    apply_rule,
)

THREADS = 4


def new_backend():
    backend = CpuBackend(num_threads=THREADS)
    backend.grain = 1
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
            for rule in (SGD(), Momentum(), Adagrad(), Adam(), AdamW(), RMSprop(), Ftrl()):
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

    # Several Python threads on one table, launching through one pool.
    table = make_table("hbm", backend, 4, initializer=make_initializer("random", 4))

    def work(seed):
        own = np.random.default_rng(seed)
        for _ in range(5):
            table.lookup(own.integers(0, 2000, 1000))
            table.erase(own.integers(0, 2000, 50))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def faulty(kernel):
    n = {"faulty_count": 100_000, "faulty_end": 100, "faulty_shift": 2}[kernel]
    new_backend().launch(kernel, n, np.zeros(n, np.int64), n)


if __name__ == "__main__":
    job = sys.argv[1]
    if job == "engine":
        engine()
    else:
        faulty(job)
    print("done")
