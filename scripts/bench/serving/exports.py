"""Measures exported models: bytes on disk, seconds to write and load, and lookups per second.

One table of `--keys` random keys, rows of `--dim`; batches of `--batch` keys, of which one in ten
has no row. Each case ends with one line `RESULT {json}`. Cases: `live`, the lookup of the table
itself, in a tf.function; what `sok_lite.export_serving` writes, as it is (`plain`) and quantised
(`float16`, `int8`); and what else TensorFlow could find rows by, not exported: `StaticHashTable`,
`MutableHashTable` and `searchsorted`, each with a gather.

Example:
  .venv/bin/python -m scripts.bench serving exports
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import sok_lite as sok
from scripts.bench.common.measuring import result

EXPORTS = {"plain": None, "float16": "float16", "int8": "int8"}


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--batch", type=int, default=65_536)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    # A tenth too many: some repeat.
    drawn = np.unique(random.integers(-(2**63), 2**63 - 1, options.keys + options.keys // 10))
    keys = random.permutation(drawn)[: options.keys]
    rows = random.normal(size=(len(keys), options.dim)).astype(np.float32)
    asked = random.choice(keys, options.batch)
    asked[::10] = random.integers(-(2**63), 2**63 - 1, len(asked[::10]))
    batch = tf.constant(asked)

    sok.init("single")
    table = sok.DynamicVariable(options.dim, initializer="0", init_capacity=options.keys)
    sok.assign(table, keys, rows)
    live = tf.function(lambda ids: table.sparse_read(ids, training=False))
    expected = live(batch).numpy()
    cases: dict[str, Any] = {"live": live}
    facts: dict[str, dict[str, float]] = {}
    signature = [tf.TensorSpec([None], tf.int64)]
    for case, quantize in EXPORTS.items():
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            sok.export_serving(live, folder, signature, quantize=quantize)
            written = time.perf_counter()
            loaded = tf.saved_model.load(folder)
            facts[case] = {"write_s": written - start, "load_s": time.perf_counter() - written}
            files = Path(folder).rglob("*.*")
            facts[case]["bytes"] = sum(each.stat().st_size for each in files)
            cases[case] = loaded
    cases |= others(keys, rows)
    times: dict[str, list[float]] = {case: [] for case in cases}
    for number in range(options.rounds + 2):
        for case, function in cases.items():  # in turns: other work on the machine meets all
            start = time.perf_counter()
            found = function(batch).numpy()
            times[case].append(time.perf_counter() - start)
            if number == 0:
                near = 0.03 if EXPORTS.get(case) else 0.0
                np.testing.assert_allclose(found, expected, rtol=0, atol=near)
    for case in cases:
        seconds = statistics.median(times[case][2:])
        rate = options.batch / seconds
        own = {"batch": options.batch, **facts.get(case, {})}
        result(case=case, ms=seconds * 1e3, lookups_per_s=rate, **own)


def others(keys: np.ndarray, rows: np.ndarray) -> dict[str, Callable[..., Any]]:
    """Returns lookups with what TensorFlow has for it; a missing key gives the last row."""
    count = len(keys)
    order = np.argsort(keys)
    all_rows = tf.Variable(np.concatenate([rows[order], np.zeros_like(rows[:1])]))
    ascending, numbers = tf.Variable(keys[order]), np.arange(count)
    initializer = tf.lookup.KeyValueTensorInitializer(keys[order], numbers)
    static = tf.lookup.StaticHashTable(initializer, count)
    mutable = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, count)
    mutable.insert(keys[order], numbers)

    def searched(ids: tf.Tensor) -> tf.Tensor:
        places = tf.minimum(tf.searchsorted(ascending, ids), count - 1)
        is_found = tf.gather(ascending, places) == ids
        return tf.gather(all_rows, tf.where(is_found, places, count))

    return {
        "StaticHashTable": tf.function(lambda ids: tf.gather(all_rows, static.lookup(ids))),
        "MutableHashTable": tf.function(lambda ids: tf.gather(all_rows, mutable.lookup(ids))),
        "searchsorted": tf.function(searched),
    }
