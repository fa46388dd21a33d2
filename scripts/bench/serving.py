"""Measures one request of a server: a batch of one row, one key in each of many tables.

All keys are present, and nothing is inserted. Each case ends with one line `RESULT {json}`. Cases:
`dense`, a `tf.gather` of as many dense variables; `lookup_sparse` in a tf.function of dense ids of
a batch that is known when it is traced (`known`), of any batch (`any`), and of ragged ids
(`ragged`); `engine`, the lookup of each table with NumPy arrays, without TensorFlow.

Example:
  .venv/bin/python -m scripts.bench serving
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import sok_lite as sok
from scripts.bench.common.measuring import result

WARM_UP = 5  # rounds that do not count


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tables", type=int, default=20)
    parser.add_argument("--keys", type=int, default=100_000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    rows = random.normal(size=(options.keys, options.dim)).astype(np.float32)
    sok.init("single")
    tables = [sok.DynamicVariable(options.dim, name=f"{i}") for i in range(options.tables)]
    for table in tables:
        sok.assign(table, np.arange(options.keys), rows)
    asked = random.integers(0, options.keys, (1, options.tables))
    cases = cases_of(tables, rows, asked)
    times: dict[str, list[float]] = {case: [] for case in cases}
    for number in range(WARM_UP + options.rounds):
        for case, call in cases.items():  # in turns: other work on the machine meets all
            start = time.perf_counter()
            found = call()
            times[case].append(time.perf_counter() - start)
            if number == 0:
                np.testing.assert_array_equal(np.concatenate(found), rows[asked[0]])
    dense = statistics.median(times["dense"][WARM_UP:])
    for case in cases:
        seconds = sorted(times[case][WARM_UP:])
        middle = statistics.median(seconds)
        tenth = seconds[len(seconds) // 10]
        result(case=case, ms=middle * 1e3, tenth_ms=tenth * 1e3, times_dense=middle / dense)


def cases_of(tables: list[Any], rows: np.ndarray, asked: np.ndarray) -> dict[str, Callable]:
    """Returns what gives (1, dim) of each table."""
    count, ids = len(tables), tf.constant(asked)
    dense = [tf.Variable(rows) for _ in tables]

    def gathered(ids: tf.Tensor) -> list[tf.Tensor]:
        return [tf.gather(variable, ids[:, i]) for i, variable in enumerate(dense)]

    def looked_up(ids: tf.Tensor) -> list[tf.Tensor]:
        columns = [ids[:, i] for i in range(count)]
        return sok.lookup_sparse(tables, columns, combiners="sum", training=False)

    def ragged(ids: tf.Tensor) -> list[tf.Tensor]:
        columns = [tf.RaggedTensor.from_tensor(ids[:, i : i + 1]) for i in range(count)]
        return sok.lookup_sparse(tables, columns, combiners="sum", training=False)

    def engine() -> list[np.ndarray]:
        return [
            table.table.lookup(asked[:, i], insert=False).values for i, table in enumerate(tables)
        ]

    known, free = [tf.TensorSpec([size, count], tf.int64) for size in (1, None)]
    traced = {
        "dense": tf.function(gathered, input_signature=[free]),
        "known": tf.function(looked_up, input_signature=[known]),
        "any": tf.function(looked_up, input_signature=[free]),
        "ragged": tf.function(ragged, input_signature=[free]),
    }
    calls = {case: (lambda function=function: function(ids)) for case, function in traced.items()}
    return calls | {"engine": engine}
