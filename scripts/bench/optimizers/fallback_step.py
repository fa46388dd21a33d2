"""Times a step by an update rule beside one that the optimizer takes itself, on copies of the rows.

Adam of each family, and a subclass of it that changes nothing but is not known to: one line
`RESULT {json}` a family and number of tables. A case is `apply_gradients` of --rows rows of each
table, eagerly or in a tf.function. Times are medians of --rounds.

Example:
  python -m scripts.bench optimizers fallback_step --tables 1 8 --rows 8192
"""

import argparse
from typing import Any

import keras
import tensorflow as tf
import tf_keras

import sok_lite as sok
from scripts.bench.common.measuring import num_threads, result, timed
from sok_lite.backend import get_backend

ADAMS: dict[str, type] = {
    "Keras 3": keras.optimizers.Adam,
    "tf_keras": tf_keras.optimizers.Adam,
    "legacy": tf_keras.optimizers.legacy.Adam,
    "TF1": tf.compat.v1.train.AdamOptimizer,
}


def step_of(optimizer: Any, args: argparse.Namespace, num_tables: int) -> Any:
    """Returns a function that takes a step of new tables."""
    keys = tf.range(args.rows, dtype=tf.int64)
    tables = [sok.DynamicVariable(args.dim, name=f"table_{i}") for i in range(num_tables)]
    for table in tables:
        tf.nn.embedding_lookup(table, keys)
    slices = tf.IndexedSlices(tf.random.normal([args.rows, args.dim]), keys)
    wrapper = sok.OptimizerWrapper(optimizer)

    def step() -> None:
        wrapper.apply_gradients([(slices, table) for table in tables])

    return tf.function(step) if args.function else step


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tables", type=int, nargs="+", default=[1, 8], help="in a call")
    parser.add_argument("--rows", type=int, default=8192, help="of each table in a step")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--function", action="store_true", help="in a tf.function")
    args = parser.parse_args()
    backend = get_backend("cpu")
    for family, adam in ADAMS.items():
        subclass = type("OwnAdam", (adam,), {"its_own": True})
        for num_tables in args.tables:
            by_rule, by_itself = (
                timed(backend, step_of(make(0.01), args, num_tables), args.rounds)
                for make in (adam, subclass)
            )
            result(
                family=family,
                tables=num_tables,
                rows=args.rows,
                dim=args.dim,
                threads=num_threads(backend),
                rule_ms=by_rule.host * 1e3,
                own_step_ms=by_itself.host * 1e3,
            )
