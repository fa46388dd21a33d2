"""One step of an optimizer: all of it or none, and one at a time."""

import contextlib
import copy
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.engine.work_counters import UPDATES
from tests.support.helpers import run_threads
from tests.support.modes import MODES
from tests.support.own_optimizers import OfKeras3
from tests.support.table_state import State
from tests.support.tripwire import CtrlC

k3 = keras.optimizers
v1 = tf.compat.v1.train
KEYS = [5, -7, 2**40]
DIM = 4
REFUSED = (ValueError, TypeError, KeyError, tf.errors.OpError)


def new_table():
    table = sok.DynamicVariable(DIM, initializer="uniform")
    return table, tf.nn.embedding_lookup(table, KEYS).numpy()


def rows_of(table):
    return tf.nn.embedding_lookup(table, KEYS).numpy()


def slices(value=1.0, dim=DIM):
    return tf.IndexedSlices(tf.fill([len(KEYS), dim], value), tf.constant(KEYS, tf.int64))


def unknown_shape(tensor):
    """The same, whose shape shows when a graph runs."""
    return tf.compat.v1.placeholder_with_default(tensor, [None] * tensor.shape.rank)


# What is wrong with a step: its gradients of rows, of other rows and of the dense variable.
ROWS, DENSE = np.ones((3, DIM)), np.ones(2)
FAULTS = {
    "a dense gradient of another shape": (ROWS, ROWS, np.ones(3)),
    "a dense gradient that is checked": (ROWS, ROWS, DENSE * np.nan),
    "rows of another dimension": (ROWS, np.ones((3, DIM + 1)), DENSE),
    "rows with a NaN": (ROWS, ROWS * np.nan, DENSE),
}


@pytest.mark.cases("fault")
@pytest.mark.pairs
@pytest.mark.parametrize("order", [1, -1], ids=["rows first", "dense first"])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("how", MODES)
def test_a_step_of_which_anything_is_refused_leaves_all_as_it_was(how, fault, order):
    """Also where it shows when a graph runs: rows, states, dense variables and counts."""
    with MODES[how]() as here:
        tables = [sok.DynamicVariable(DIM, initializer="ones") for _ in range(2)]
        variable = tf.Variable([1.0, 2.0])
        inner = v1.AdamOptimizer(0.1) if here.is_graph else k3.Adam(0.1)
        ours = sok.OptimizerWrapper(inner, on_nonfinite="error")

        def step(*gradients):
            *rows, dense = [tf.cast(unknown_shape(each), tf.float32) for each in gradients]
            dense = tf.debugging.check_numerics(dense, "NaN")
            keys = tf.constant(KEYS, tf.int64)
            pairs = [(tf.IndexedSlices(each, keys), tables[i]) for i, each in enumerate(rows)]
            taken = ours.apply_gradients([*pairs, (dense, variable)][::order])
            return taken if here.is_graph else None

        def state():
            rows = [State.of(table.table).rows for table in tables]
            return rows, here.run(lambda: [tf.identity(variable), tf.identity(ours.iterations)])

        here.run(step, ROWS, ROWS, DENSE)
        before = state()
        with pytest.raises(REFUSED):
            here.run(step, *FAULTS[fault])
        rows, (dense, count) = state()
        assert rows == before[0] and count == before[1][1] == 1
        np.testing.assert_array_equal(dense, before[1][0])
        here.run(step, ROWS, ROWS, DENSE)
        rows, (dense, count) = state()
        assert count == 2 and all(one != two for one, two in zip(rows, before[0], strict=True))
        assert (dense < before[1][0]).all()


def test_a_setting_that_is_refused_leaves_dense_variables_and_counts(mode):
    (table, before), variable, inner = new_table(), tf.Variable([1.0]), k3.Adam(np.nan)
    ours = sok.OptimizerWrapper(inner)
    step = mode(lambda: ours.apply_gradients([(tf.constant([1.0]), variable), (slices(), table)]))
    with pytest.raises(REFUSED):
        step()
    np.testing.assert_array_equal(rows_of(table), before)
    np.testing.assert_array_equal(variable, [1.0])
    assert int(inner.iterations) == int(ours.iterations) == 0


class Halving(k3.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.5 ** tf.cast(step, tf.float32)

    def get_config(self):
        return {}


@pytest.mark.parametrize("with_dense", [False, True], ids=["rows only", "with dense"])
def test_steps_of_several_threads_count_one_by_one(with_dense, mode):
    num_threads, num_steps = 6, 4
    for _ in range(5):
        table = sok.DynamicVariable(1, initializer="zeros")
        tf.nn.embedding_lookup(table, [1])
        dense, inner = tf.Variable([0.0]), k3.SGD(Halving())
        ours = sok.OptimizerWrapper(inner)
        grad = tf.IndexedSlices(tf.constant([[1.0]]), tf.constant([1], tf.int64))
        if with_dense:
            inner.build([dense])

        @mode
        def step():
            ours.apply_gradients([(grad, table)] + [(tf.constant([1.0]), dense)] * with_dense)  # noqa: B023

        if mode.__name__ == "traced":
            step.get_concrete_function()
        start = threading.Barrier(num_threads)

        def work(number):
            start.wait()  # noqa: B023
            for _ in range(num_steps):
                step()

        run_threads(work, num_threads)
        total = num_threads * num_steps
        # Each learning rate is a bit of its own: the sum has each of them once.
        expected = [[-(2.0 - 0.5 ** (total - 1))]]
        np.testing.assert_array_equal(tf.nn.embedding_lookup(table, [1]), expected)
        assert int(ours.iterations) == total
        if with_dense:
            assert int(inner.iterations) == total
            np.testing.assert_array_equal(dense, expected[0])


def test_a_wrapper_can_be_copied_and_a_failed_step_holds_up_no_other(mode):
    table, before = new_table()
    ours = sok.OptimizerWrapper(k3.SGD(0.5))
    step = mode(lambda grad: ours.apply_gradients([(grad, table)]))
    for _ in range(2):
        with pytest.raises(REFUSED):
            step(slices(dim=DIM + 1))
        step(slices())
    np.testing.assert_array_equal(rows_of(table), before - 1)
    other = copy.deepcopy(ours)
    other.apply_gradients([(slices(), table)])
    assert (int(ours.iterations), int(other.iterations)) == (2, 3)


# ---- what a step raises, and what it leaves


class Stop(Exception):
    pass


ERRORS = [Stop, KeyboardInterrupt, ValueError, StopIteration, MemoryError]


@pytest.mark.cases("kind")
@pytest.mark.parametrize("kind", ERRORS)
def test_what_a_dense_step_raises_comes_out_as_it_is(kind):
    """It runs while the rows are prepared. These and their states are as before, but for room."""
    table, _ = new_table()
    errors = []

    def constraint(value):
        for error in errors:
            raise error from cause
        return value

    dense, cause = tf.Variable([1.0, 2.0], constraint=constraint), OSError("why")
    ours, other = sok.OptimizerWrapper(v1.AdamOptimizer(0.1)), new_table()[0]
    pairs = [(slices(), table), (tf.constant([1.0, 2.0]), dense)]
    ours.apply_gradients(pairs)
    before, count = State.of(table.table), int(ours.iterations)
    errors.append(kind("stopped"))
    pairs += [(slices(), other)]
    with pytest.raises(kind) as raised:
        ours.apply_gradients(pairs)
    assert raised.value is errors[0]
    assert raised.value.__cause__ is cause
    assert State.of(table.table).rows == before.rows
    assert int(ours.iterations) == count
    errors.clear()
    ours.apply_gradients(pairs)
    assert State.of(table.table).rows != before.rows
    assert int(ours.iterations) == count + 1


class Stopping(OfKeras3):
    error = None

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        if Stopping.error is not None:
            raise Stopping.error


@pytest.mark.parametrize(
    ("kind", "in_graph"),
    [
        (Stop, tf.errors.UnknownError),
        (KeyboardInterrupt, tf.errors.CancelledError),
        (ValueError, tf.errors.InvalidArgumentError),
    ],
)
def test_what_a_fallback_step_raises_leaves_rows_and_states(kind, in_graph, mode, monkeypatch):
    """Other keys as well, which are new: they stay, as those of a lookup."""
    table, _ = new_table()
    ours = sok.OptimizerWrapper(Stopping(0.1))

    @mode
    def step():
        ours.apply_gradients([(slices(), table)])

    step()
    before, count = State.of(table.table), int(ours.iterations)
    monkeypatch.setattr(Stopping, "error", kind("stopped"))
    with pytest.raises(in_graph if mode.__name__ == "traced" else kind, match="stopped") as raised:
        step()
    assert mode.__name__ == "traced" or raised.value is Stopping.error
    assert State.of(table.table).rows == before.rows
    assert int(ours.iterations) == count
    monkeypatch.setattr(Stopping, "error", None)
    step()
    assert State.of(table.table).rows != before.rows
    assert int(ours.iterations) == count + 1


def gradient_of(table):
    """Returns a gradient whose keys and rows the table knows."""
    with tf.GradientTape() as tape:
        (rows,) = sok.lookup_sparse([table], [tf.constant(KEYS)[:, None]], combiners=["sum"])
    return tape.gradient(rows, table)


@pytest.mark.parametrize("are_known", [False, True])
def test_an_interrupted_step_is_taken_whole_or_not_at_all(are_known):
    """By Ctrl-C anywhere between the program and the kernels: rows, states and the count agree."""
    if new_table()[0].table.backend.name == "cpu":
        interrupt_steps(are_known, True, 150)
        interrupt_steps(are_known, False, 1000)
    else:
        # The driver of the simulated GPU is of Python, and no instruction of a program. It is slow.
        interrupt_steps(are_known, False, 40)


def interrupt_steps(are_known, is_native, most):
    """Takes steps, by native code where it may, and interrupts each elsewhere: in so many places or
    a few more."""

    def new():
        table = sok.DynamicVariable(DIM, initializer="ones")
        if not is_native:
            table.table.record.allows = 0
        tf.nn.embedding_lookup(table, KEYS)
        ours = sok.OptimizerWrapper(k3.Adam(0.1))
        gradient = gradient_of(table) if are_known else slices()
        return table, ours, lambda: ours.apply_gradients([(gradient, table)])

    twin, _, twin_step = new()
    expected = [State.of(twin.table).rows]
    table, ours, step = new()
    step(), twin_step()
    expected.append(State.of(twin.table).rows)
    counted, before = CtrlC(), UPDATES.native[0]
    counted.run(step)
    assert UPDATES.native[0] - before == is_native
    num_taken, places = 0, range(1, counted.count + 1, max(1, counted.count // most))
    for at in places:
        step()  # native code has a plan again
        before = int(ours.iterations)
        wire = CtrlC(at)
        with contextlib.suppress(KeyboardInterrupt):
            wire.run(step)
            assert wire.place is None  # the step has ended before
        count = int(ours.iterations)
        while len(expected) <= count:
            twin_step()
            expected.append(State.of(twin.table).rows)
        assert State.of(table.table).rows == expected[count], wire.place
        num_taken += count - before
    assert 0 < num_taken < len(places)
