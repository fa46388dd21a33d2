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


def built_adam(variable):
    inner = k3.Adam(0.1)
    inner.build([variable])
    return inner


BAD_DENSE = {
    "another shape": (lambda: tf.constant([1.0, 2.0, 3.0]), lambda: tf.Variable([1.0, 2.0])),
    "an unknown variable": (lambda: tf.constant([1.0, 2.0]), lambda: None),
    "a dtype": (lambda: tf.constant(["a", "b"]), lambda: tf.Variable([1.0, 2.0])),
    "a NaN": (
        lambda: tf.debugging.check_numerics(tf.constant([1.0, np.nan]) * tf.ones(2), "NaN"),
        lambda: tf.Variable([1.0, 2.0]),
    ),
}


@pytest.mark.parametrize("order", [1, -1], ids=["rows first", "dense first"])
@pytest.mark.parametrize("fault", BAD_DENSE)
def test_a_dense_variable_that_is_refused_leaves_rows_and_counts(fault, order, mode):
    table, before = new_table()
    make_grad, make_variable = BAD_DENSE[fault]
    variable = make_variable()
    inner = k3.Adam(0.1)
    if variable is None:
        variable, inner = tf.Variable([1.0, 2.0]), built_adam(tf.Variable([1.0]))
    ours = sok.OptimizerWrapper(inner)

    @mode
    def step():
        ours.apply_gradients([(slices(), table), (make_grad(), variable)][::order])

    with pytest.raises(REFUSED):
        step()
    np.testing.assert_array_equal(rows_of(table), before)
    np.testing.assert_array_equal(variable, [1.0, 2.0])
    assert int(inner.iterations) == int(ours.iterations) == 0
    # And the next step is the first.
    dense = tf.Variable([1.0])
    again = sok.OptimizerWrapper(k3.SGD(0.5)) if fault == "an unknown variable" else ours
    again.apply_gradients([(slices(), table)] + [(tf.constant([1.0]), dense)] * (again is not ours))
    assert int(again.iterations) == 1


@pytest.mark.parametrize("sparse", [False, True], ids=["dense gradient", "slices"])
def test_a_shape_that_shows_when_a_function_runs_is_seen_before_rows_move(sparse):
    table, before = new_table()
    variable = tf.Variable(tf.ones([2, 2]))
    ours = sok.OptimizerWrapper(k3.Adam(0.1))

    @tf.function(input_signature=[tf.TensorSpec([None, None])])
    def step(grad):
        if sparse:
            grad = tf.IndexedSlices(grad, tf.range(tf.shape(grad)[0]), tf.constant([2, 2]))
        ours.apply_gradients([(slices(), table), (grad, variable)])

    step(tf.zeros([2, 2]))
    after = rows_of(table)
    assert not np.array_equal(after, before)
    for shape in ([2, 3], [2, 1]):
        with pytest.raises(tf.errors.InvalidArgumentError, match="must have"):
            step(tf.ones(shape))
        np.testing.assert_array_equal(rows_of(table), after)
        np.testing.assert_array_equal(variable, tf.ones([2, 2]))
        assert int(ours.iterations) == int(ours.optimizer.iterations) == 1


def test_a_shape_that_shows_in_a_session_is_seen_before_rows_move():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = sok.DynamicVariable(DIM, initializer="ones")
        rows = tf.nn.embedding_lookup(table, KEYS)
        variable = tf.Variable([1.0, 2.0])
        grad = tf.compat.v1.placeholder(tf.float32, [None])
        ours = sok.OptimizerWrapper(v1.AdamOptimizer(0.1))
        train = ours.apply_gradients([(slices(), table), (grad, variable)])
        session.run(tf.compat.v1.global_variables_initializer())
        before = session.run(rows)
        for bad in ([1.0], [1.0, 2.0, 3.0]):
            with pytest.raises(tf.errors.InvalidArgumentError, match="must have shape"):
                session.run(train, {grad: bad})
            np.testing.assert_array_equal(session.run(rows), before)
            np.testing.assert_array_equal(session.run(variable), [1.0, 2.0])
            assert session.run(ours.iterations) == 0
        session.run(train, {grad: [1.0, 1.0]})
        assert session.run(ours.iterations) == 1
        assert not np.array_equal(session.run(rows), before)


@pytest.mark.parametrize("fault", ["dimension", "learning rate"])
def test_a_table_that_is_refused_leaves_dense_variables_and_counts(fault, mode):
    table, before = new_table()
    variable, inner = tf.Variable([1.0]), k3.Adam(np.nan if fault == "learning rate" else 0.1)
    ours, grad = sok.OptimizerWrapper(inner), slices(dim=DIM + (fault == "dimension"))
    step = mode(lambda: ours.apply_gradients([(tf.constant([1.0]), variable), (grad, table)]))
    with pytest.raises(REFUSED):
        step()
    np.testing.assert_array_equal(rows_of(table), before)
    np.testing.assert_array_equal(variable, [1.0])
    assert int(inner.iterations) == int(ours.iterations) == 0


def test_a_table_that_is_refused_in_a_session_leaves_dense_variables():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = sok.DynamicVariable(DIM, initializer="ones")
        rows = tf.nn.embedding_lookup(table, KEYS)
        variable = tf.Variable([1.0])
        first = sok.OptimizerWrapper(v1.AdamOptimizer(0.1))
        other = sok.OptimizerWrapper(v1.AdamOptimizer(0.1), on_nonfinite="error")
        bad = tf.IndexedSlices(slices().values * np.nan, slices().indices)
        steps = [
            ours.apply_gradients([(grad, table), (tf.constant([1.0]), variable)])
            for ours, grad in ((first, slices()), (other, bad))
        ]
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(rows)
        session.run(steps[0])
        before = session.run([rows, variable, first.iterations, other.iterations])
        with pytest.raises(tf.errors.InvalidArgumentError, match="have a NaN"):
            session.run(steps[1])
        after = session.run([rows, variable, first.iterations, other.iterations])
        for old, new in zip(before, after, strict=True):
            np.testing.assert_array_equal(new, old)


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


def test_a_step_that_an_engine_refuses_leaves_rows_and_states(mode):
    """The second table's gradient has a NaN: the first one's rows do not move either."""
    tables = [new_table()[0] for _ in range(2)]
    ours = sok.OptimizerWrapper(k3.Adam(0.1), on_nonfinite="error")
    step = mode(
        lambda value: ours.apply_gradients([(slices(), tables[0]), (slices(value), tables[1])])
    )
    step(tf.constant(1.0))
    before = [State.of(table.table).rows for table in tables]
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="have a NaN"):
        step(tf.constant(np.nan, tf.float32))
    assert [State.of(table.table).rows for table in tables] == before
    assert int(ours.iterations) == 1
    step(tf.constant(1.0))
    assert all(
        State.of(table.table).rows != rows for table, rows in zip(tables, before, strict=True)
    )


def gradient_of(table):
    """Returns a gradient whose keys and rows the table knows."""
    with tf.GradientTape() as tape:
        (rows,) = sok.lookup_sparse([table], [tf.constant(KEYS)[:, None]], combiners=["sum"])
    return tape.gradient(rows, table)


@pytest.mark.parametrize("are_known", [False, True])
def test_an_interrupted_step_is_taken_whole_or_not_at_all(are_known):
    """By Ctrl-C anywhere between the program and the kernels: rows, states and the count agree."""

    def new():
        table = sok.DynamicVariable(DIM, initializer="ones")
        if table.table.backend.name != "cpu":
            # The driver of the simulated GPU is of Python, and no instruction of a program.
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
    assert UPDATES.native[0] - before == (table.table.backend.name == "cpu")
    num_taken = 0
    for at in range(1, counted.count + 1, max(1, counted.count // 150)):
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
    assert 0 < num_taken < 150
