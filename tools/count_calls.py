"""Counts what Python does in a lookup and in a training step, by the number of tables.

Every call of a function of Python or C counts as one. No clock is read, so no noise moves the
counts; but they hold for one pair of Python and TensorFlow, which each line names. A call that does
more or less by where its memory happens to lie counts as one. What is counted:

  lookup, step         in a `tf.function`: within the calls from the graph into Python; a step is a
                       lookup, its gradient and Adam
  eager step           all calls of the same step in eager mode, TensorFlow's own among them
  eager step, dense    the same on dense variables of all rows: what TensorFlow asks of anybody

One line `RESULT {json}` for each, with the counts by tables and what each further table adds.

Examples:
  python -m tools.count_calls
  python -m tools.count_calls --tables 1 26 --works lookup step
"""

import argparse
import gc
import platform
import sys
import time
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

import sok_lite as sok
from scripts.bench.common.measuring import result
from sok_lite.bridge import host_call, tensor
from sok_lite.engine.table import clock

WORKS = ("lookup", "step", "eager step", "eager step, dense")
NUM_KEYS = 100
# TensorFlow takes over memory that begins at a multiple of 64 bytes, and copies any other.
BY_MEMORY = {tensor.to_tensor.__code__}


class Counted:
    """Counts calls of Python and C while `within` runs a function.

    Meanwhile the clock of tables stands still, since they do more when a new second has begun, and
    no garbage is collected, whose finalizers would count.

    Attributes:
      calls: so far.
    """

    def __init__(self) -> None:
        self.calls = 0
        self._as_one: FrameType | None = None  # a call that counts as one

    def within(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Calls a function, and counts what it calls."""
        now = time.time()
        with mock.patch.object(clock, "time", SimpleNamespace(time=lambda: now)):
            gc.disable()
            sys.setprofile(self._note)
            try:
                return function(*args, **options)
            finally:
                sys.setprofile(None)
                gc.enable()

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if self._as_one is not None:
            if event == "return" and frame is self._as_one:
                self._as_one = None
        elif event in ("call", "c_call") and argument is not sys.setprofile:
            self.calls += 1
            if event == "call" and frame.f_code in BY_MEMORY:
                self._as_one = frame


def make_step(work: str, num_tables: int, args: argparse.Namespace) -> Callable[[], Any]:
    """Returns a step on tables, or dense variables, that have all keys."""
    rng = np.random.default_rng(0)
    ids = [tf.constant(rng.integers(0, NUM_KEYS, args.ids)) for _ in range(num_tables)]
    is_dense = work.endswith("dense")
    optimizer = keras.optimizers.Adam()
    tables: list[Any]
    if is_dense:
        tables = [tf.Variable(tf.zeros([NUM_KEYS, args.dim])) for _ in range(num_tables)]
    else:
        tables = [sok.DynamicVariable(args.dim, name=f"t{i}") for i in range(num_tables)]
        for table in tables:
            sok.assign(table, np.arange(NUM_KEYS), np.zeros((NUM_KEYS, args.dim), np.float32))
        optimizer = sok.OptimizerWrapper(optimizer)

    def look_up() -> list[tf.Tensor]:
        if is_dense:
            pairs = zip(tables, ids, strict=True)
            return [tf.nn.embedding_lookup(table, each) for table, each in pairs]
        return sok.lookup_sparse(tables, ids, combiners="sum")

    def step() -> None:
        with tf.GradientTape() as tape:
            losses = [tf.reduce_sum(rows) for rows in look_up()]
            loss = tf.add_n(losses)
        gradients = tape.gradient(loss, tables)
        optimizer.apply_gradients(zip(gradients, tables, strict=True))

    called = look_up if work == "lookup" else step
    return called if work.startswith("eager") else tf.function(called)


def count(work: str, num_tables: int, args: argparse.Namespace) -> int:
    """Returns the calls of one step."""
    step, counted = make_step(work, num_tables, args), Counted()
    for _ in range(3):  # traced, states made, layouts known
        step()
    if work.startswith("eager"):
        counted.within(step)
        return counted.calls
    on_device = host_call.on_device

    def counting(*arguments: Any, **options: Any) -> Any:
        return counted.within(on_device, *arguments, **options)

    host_call.on_device = counting
    try:
        step()
    finally:
        host_call.on_device = on_device
    return counted.calls


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", type=int, nargs="+", default=[1, 26, 100])
    parser.add_argument("--works", nargs="+", choices=WORKS, default=WORKS)
    parser.add_argument("--ids", type=int, default=64, help="of each table (%(default)s)")
    parser.add_argument("--dim", type=int, default=4)
    args = parser.parse_args()
    for work in args.works:
        calls = {tables: count(work, tables, args) for tables in args.tables}
        fewest, most = min(calls), max(calls)
        each = (calls[most] - calls[fewest]) / max(1, most - fewest)
        result(
            work=work,
            python=platform.python_version(),
            tensorflow=tf.__version__,
            **{f"tables_{tables}": number for tables, number in calls.items()},
            each_table=round(each, 1),
        )


if __name__ == "__main__":
    main()
