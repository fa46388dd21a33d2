"""Optimizers as they come train tables: rows end where a dense variable of the same rows does."""

import copy
import gc
import itertools
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from sok_lite.bridge.optimizers.patched import patch_optimizers
from tests.bridge.test_every_optimizer import NOT_WHEN_TRACED
from tests.support.modes import MODES
from tests.support.optimizer_cases import CASES
from tests.support.patched_rows import DIM, KEYS, StockRows, filled, rows_of, starts

v1 = tf.compat.v1
tf_keras = pytest.importorskip("tf_keras")

pytestmark = pytest.mark.usefixtures("initialised")

patch_optimizers()

NUM_STEPS = 11
ONES = tf.IndexedSlices(tf.ones([len(KEYS), DIM]), tf.constant(KEYS))
OWN = {"GroupAdam", "GroupAMSGrad", "GroupLamb", "GroupMomentum"}
OWN |= {"RowWiseAdagrad", "SparseGroupFtrl"}
# The first case of each optimizer: with its defaults, mostly.
OPTIMIZERS = list(
    {(case.family, case.name): case for case in reversed(CASES) if case.name not in OWN}.values()
)
IN_GRAPHS = ("tf.compat.v1.train", "tf_keras.optimizers.legacy")


def loss_of(found, weights, dense):
    """A loss in which the dense variable has to do with every row."""
    return tf.reduce_sum(tf.sin(found) * weights * (1.0 + dense))


def dense_rows(numbers, variable):
    # No gather: Keras 3 does not sum the gradients of repeated numbers.
    return tf.matmul(tf.one_hot(numbers, len(KEYS)), variable)


def training(here, make, is_dense=False, num_parts=1):
    """Returns what takes a step of one table and a dense variable, and what gives their values.

    Args:
      here: an open mode.
      make: makes the optimizer; gives it and what its apply_gradients takes besides.
      is_dense: whether the rows are a dense variable.
      num_parts: how many variables there are of the one table.
    """
    dense = tf.Variable(np.full(DIM, 0.3, np.float32), name="dense")
    if is_dense:
        rows = [tf.Variable(starts(), name="rows")]
    else:
        first = filled()
        rows = [first, *(StockRows(f"part_{i}", first.table) for i in range(1, num_parts))]
    made = make()

    def loss(numbers, weights):
        if is_dense:
            return loss_of(dense_rows(numbers, rows[0]), weights, dense)
        keys, losses = tf.gather(tf.constant(KEYS), numbers), []
        for i, part in enumerate(rows):
            mine = tf.equal(keys % num_parts, i)
            found = tf.nn.embedding_lookup(part, tf.boolean_mask(keys, mine))
            losses.append(loss_of(found, tf.boolean_mask(weights, mine), dense))
        return tf.add_n(losses)

    def step(numbers, weights):
        variables = [*rows, dense]
        with tf.GradientTape() as tape:
            total = loss(numbers, weights)
        if here.is_graph:
            gradients = tf.gradients(total, variables)
        else:
            gradients = tape.gradient(total, variables)
        pairs = zip(gradients, variables, strict=True)  # an iterator, as programs give
        taken = made.optimizer.apply_gradients(pairs, **made.arguments)
        return taken if here.is_graph else None

    def values():
        found = here.run(lambda: tf.identity(rows[0])) if is_dense else rows_of(rows[0])
        return found, here.run(lambda: tf.identity(dense))

    numbers = np.concatenate([np.arange(len(KEYS)), [3, 0, 3, 6, 2]])
    weights = np.random.default_rng(2).normal(size=(len(numbers), DIM)).astype(np.float32)
    return here.step(step, numbers, weights), values


def trained(mode, make, **options):
    with MODES[mode]() as here:
        take, values = training(here, make, **options)
        for _ in range(NUM_STEPS):
            take()
        return values()


def assert_alike(actual, expected):
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-5)


def _ways():
    """Each optimizer in one mode in turn that has it; all modes of some."""
    turns = itertools.cycle(MODES)
    for case in OPTIMIZERS:
        modes = [mode for mode in MODES if mode != "graph" or case.family in IN_GRAPHS]
        if (case.family, case.name) in NOT_WHEN_TRACED:
            modes.remove("tf.function")
        is_one = case.name in ("Adam", "AdamOptimizer", "FtrlOptimizer")
        chosen = modes if is_one else [next(turn for turn in turns if turn in modes)]
        for mode in chosen:
            yield pytest.param(case, mode, id=f"{case.family} {case.name} {mode}")


@pytest.mark.parametrize(("case", "mode"), list(_ways()))
def test_rows_and_the_dense_variable_end_where_they_do_without_a_table(case, mode):
    expected = trained(mode, case.make, is_dense=True)
    actual = trained(mode, case.make)
    assert np.abs(expected[0] - starts()).max() > 1e-3  # they did move
    assert_alike(actual, expected)


V1 = {case.name: case for case in OPTIMIZERS if case.family == "tf.compat.v1.train"}
ONE_OF_EACH_FAMILY = [
    V1["AdamOptimizer"],
    next(case for case in OPTIMIZERS if case.family == "Keras 3" and case.name == "Adam"),
    next(case for case in OPTIMIZERS if case.family == "tf_keras" and case.name == "Ftrl"),
    next(case for case in OPTIMIZERS if "legacy" in case.family and case.name == "Nadam"),
]


@pytest.mark.parametrize("case", ONE_OF_EACH_FAMILY, ids=str)
def test_parts_of_one_table_are_trained_as_one(case):
    mode = "graph" if case.family in IN_GRAPHS else "tf.function"
    expected = trained(mode, case.make)
    actual = trained(mode, case.make, num_parts=3)
    # The gradient of the dense variable is summed in another order.
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5, atol=1e-6)


def test_two_graphs_have_each_its_optimizer():
    expected, made = trained("graph", V1["AdamOptimizer"].make), []
    with MODES["graph"]() as one, MODES["graph"]() as other:
        for here in (one, other):
            with here.session.graph.as_default():
                made.append((here, *training(here, V1["AdamOptimizer"].make)))
        for _ in range(NUM_STEPS):
            for _, take, _ in made:
                take()
        for here, _, values in made:
            with here.session.graph.as_default():
                np.testing.assert_array_equal(values()[0], expected[0])
                assert len(v1.global_variables("sok_iterations")) == 1


# ---- what else the optimizers of TF1 do ----------------------------------------------------------


@pytest.fixture
def session():
    with tf.Graph().as_default(), v1.Session() as session:
        yield session


def minimized(optimizer, rows, dense, **options):
    """Returns the operation of a loss over all keys."""
    found = tf.nn.embedding_lookup(rows, KEYS) if isinstance(rows, StockRows) else tf.identity(rows)
    return optimizer.minimize(loss_of(found, 1.0, dense), **options)


def dense_variable():
    return tf.Variable(np.full(DIM, 0.3, np.float32), name="dense")


@pytest.mark.parametrize("with_list", [False, True])
def test_minimize_counts_the_global_step_and_has_its_name(session, with_list):
    rows, other, dense = filled(), StockRows("other"), dense_variable()
    unused = tf.Variable([1.0], name="unused")  # without a gradient, as the other table
    step = v1.train.get_or_create_global_step()
    optimizer = v1.train.AdamOptimizer(0.1, use_locking=with_list)
    options = {"var_list": [dense, rows]} if with_list else {}
    train = minimized(optimizer, rows, dense, global_step=step, name="train_it", **options)
    assert train.name == "train_it"
    assert v1.get_collection(v1.GraphKeys.TRAIN_OP) == [train]
    session.run(v1.global_variables_initializer())
    for _ in range(3):
        session.run("train_it")
    assert session.run(step) == 3 and session.run(unused) == [1.0] and other.table.size == 0
    assert optimizer.get_slot_names() == ["m", "v"]
    m = session.run(tf.nn.embedding_lookup(optimizer.get_slot(rows, "m"), KEYS))
    assert np.abs(m).max() > 0
    alone = tf.reduce_sum(tf.nn.embedding_lookup(rows, KEYS))
    train = v1.train.GradientDescentOptimizer(0.25).minimize(alone, step)
    assert train.name == "GradientDescent"
    before = rows_of(rows)
    session.run(train)
    np.testing.assert_allclose(rows_of(rows), before - 0.25, rtol=1e-6)
    assert session.run(step) == 4


def test_an_optimizer_and_its_states_go_when_the_program_drops_them():
    class FallbackStep(v1.train.AdamOptimizer):
        def _resource_apply_dense(self, grad, var):
            return super()._resource_apply_dense(grad * 2.0, var)

    for make in (
        v1.train.AdamOptimizer,
        FallbackStep,
        keras.optimizers.Adam,
        tf_keras.optimizers.Adam,
    ):
        rows, optimizer = filled(), make(0.1)
        optimizer.apply_gradients([(ONES, rows)])
        reference = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert reference() is None, make


@pytest.mark.cases("make")
@pytest.mark.parametrize(
    "make",
    [
        lambda: v1.train.AdamOptimizer(0.1),
        lambda: tf_keras.optimizers.legacy.Adam(0.1),
        lambda: tf_keras.optimizers.Adam(0.1),
        lambda: keras.optimizers.Adam(0.1),
    ],
)
def test_no_gradient_at_all_is_a_value_error_and_one_that_is_no_slices_a_type_error(make):
    rows, dense, optimizer = filled(), dense_variable(), make()
    for pairs in ([(None, rows), (None, dense)], [(None, rows)]):
        with pytest.raises(ValueError):
            optimizer.apply_gradients(pairs)
    with pytest.raises(TypeError, match="must be a tf.IndexedSlices"):
        optimizer.apply_gradients([(tf.ones([2, DIM]), rows)])
    optimizer.apply_gradients([(None, rows), (tf.ones(DIM), dense)])
    np.testing.assert_array_equal(rows_of(rows), starts())
    assert np.all(dense.numpy() < 0.3)


def test_a_table_that_does_not_ask_is_not_trained():
    class NotAsking(StockRows):
        trained_by_patched = False

    rows = NotAsking()
    slices = tf.IndexedSlices(ONES.values, ONES.indices, [len(KEYS), DIM])
    with pytest.raises((NotImplementedError, TypeError, ValueError, tf.errors.OpError)):
        v1.train.GradientDescentOptimizer(0.1).apply_gradients([(slices, rows)])
    assert rows.table.size == 0


def test_an_optimizer_whose_step_means_nothing_for_rows_is_refused():
    rows = filled()
    told = f"Adafactor of Keras 3 cannot update rows of table {rows.table.name!r}: .* Use Adam"
    with pytest.raises(NotImplementedError, match=told):
        keras.optimizers.Adafactor(0.1).apply_gradients([(ONES, rows)])


def test_an_average_of_a_table_is_refused(session):
    rows = filled()
    with pytest.raises((NotImplementedError, ValueError)):
        v1.train.ExponentialMovingAverage(0.9).apply([rows])


def test_a_subclass_that_changes_gradients_changes_those_of_tables_and_does_it_once():
    class Halved(v1.train.GradientDescentOptimizer):
        def apply_gradients(self, grads_and_vars, *args, **kwargs):
            halves = [
                (tf.IndexedSlices(g.values / 2, g.indices), v)
                if isinstance(g, tf.IndexedSlices)
                else (g / 2, v)
                for g, v in grads_and_vars
            ]
            return super().apply_gradients(halves, *args, **kwargs)

    rows, dense = filled(), dense_variable()
    Halved(0.5).apply_gradients([(ONES, rows), (tf.ones(DIM), dense)])
    np.testing.assert_allclose(rows_of(rows), starts() - 0.25, rtol=1e-6)
    np.testing.assert_allclose(dense.numpy(), 0.3 - 0.25, rtol=1e-6)


def test_a_copy_of_an_optimizer_takes_steps_of_its_own():
    rows = filled()
    first = v1.train.MomentumOptimizer(0.5, 0.9)
    first.apply_gradients([(ONES, rows)])
    second = copy.copy(first)
    second.apply_gradients([(ONES, rows)])  # without the first one's momentum
    np.testing.assert_allclose(rows_of(rows), starts() - 1.0, rtol=1e-5, atol=1e-6)


def test_replicas_in_step(session, tmp_path):
    rows, dense = filled(), dense_variable()
    step = v1.train.get_or_create_global_step()
    optimizer = v1.train.SyncReplicasOptimizer(
        v1.train.GradientDescentOptimizer(0.25), replicas_to_aggregate=1, total_num_replicas=1
    )
    found = tf.nn.embedding_lookup(rows, np.concatenate([KEYS, KEYS]))
    pairs = optimizer.compute_gradients(tf.reduce_sum(found) + tf.reduce_sum(dense))
    train = optimizer.apply_gradients(pairs, global_step=step)
    hook = optimizer.make_session_run_hook(is_chief=True, num_tokens=0)
    # The thread that hands out steps waits for a gradient that never comes, and is left behind.
    waits = {"stop_grace_period_secs": 1}
    with v1.train.MonitoredTrainingSession(hooks=[hook], **waits) as monitored:
        for _ in range(2):
            monitored.run(train)
        assert monitored.run(step) == 2
        np.testing.assert_allclose(monitored.run(dense), np.full(DIM, 0.3 - 0.5), rtol=1e-5)
    np.testing.assert_allclose(rows_of(rows), starts() - 1.0, rtol=1e-5, atol=1e-6)


# ---- checkpoints ---------------------------------------------------------------------------------


# ---- Keras ---------------------------------------------------------------------------------------


def test_keras_3_makes_no_dense_states_for_a_table():
    optimizer = keras.optimizers.Adam(0.1)
    optimizer.build([filled(), dense_variable()])
    # Its counter and rate, and two states of the dense variable.
    assert len(optimizer.variables) == 4


def test_loss_scales_unscale_and_skip():
    k3 = keras.optimizers
    for scaled, factor in (
        (k3.LossScaleOptimizer(k3.SGD(0.5), initial_scale=4.0), 4.0),
        # Those of tf_keras have had the loss scaled and its gradient unscaled.
        *(
            (tf_keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=4.0), 1.0)
            for inner in (tf_keras.optimizers.SGD(0.5), tf_keras.optimizers.legacy.SGD(0.5))
        ),
    ):
        rows, dense = filled(), dense_variable()
        for times in (factor, np.inf):
            of_rows = tf.IndexedSlices(ONES.values * times, ONES.indices)
            scaled.apply_gradients([(of_rows, rows), (tf.fill([DIM], factor), dense)])
        np.testing.assert_allclose(rows_of(rows), starts() - 0.5, rtol=1e-6)
        np.testing.assert_allclose(dense.numpy(), 0.3 - 0.5, rtol=1e-6)


def test_options_of_the_dense_step_reach_it():
    rows, dense = filled(), dense_variable()
    pairs = [(ONES, rows), (tf.ones(DIM), dense)]
    tf_keras.optimizers.legacy.SGD(0.5).apply_gradients(
        pairs, experimental_aggregate_gradients=False
    )
    tf_keras.optimizers.SGD(0.5).apply_gradients(pairs, skip_gradients_aggregation=True)
    np.testing.assert_allclose(rows_of(rows), starts() - 1.0, rtol=1e-5, atol=1e-6)
    with pytest.raises(TypeError):
        tf_keras.optimizers.legacy.SGD(0.5).apply_gradients(pairs, not_an_option=1)
