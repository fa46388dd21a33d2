"""TFPlus' optimizers: on tables, and on dense variables beside them, against NumPy."""

import inspect

import numpy as np
import pytest
import tensorflow as tf

from sok_lite.bridge.optimizers.patched import patch_optimizers
from sok_lite.kv_variable import training
from tests.support import reference_updates
from tests.support.modes import MODES
from tests.support.patched_rows import DIM, KEYS, filled, rows_of, starts

v1 = tf.compat.v1

pytestmark = pytest.mark.usefixtures("initialised")

patch_optimizers()

REQUIRED = inspect.Parameter.empty
# Of TFPlus' documents and sources: names and defaults, in order.
SIGNATURES = {
    "AdamOptimizer": {
        "learning_rate": 0.001,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-8,
        "use_locking": False,
        "name": "Adam",
        "version": 1,
    },
    "GroupAdamOptimizer": {
        "learning_rate": REQUIRED,
        "initial_accumulator_value": 0.0,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-8,
        "l1_regularization_strength": 0.0,
        "l2_regularization_strength": 0.0,
        "l21_regularization_strength": 0.0,
        "use_locking": False,
        "name": "GroupAdam",
        "accum_name": None,
        "linear_name": None,
        "version": 4,
    },
    "RectifiedAdamOptimizer": {
        "learning_rate": 0.001,
        "beta1": 0.9,
        "beta2": 0.999,
        "epsilon": 1e-7,
        "decay": 0.0,
        "weight_decay": 0.0,
        "amsgrad": False,
        "sma_threshold": 5.0,
        "total_steps": 0,
        "warmup_proportion": 0.1,
        "min_lr": 0.0,
        "use_locking": False,
        "use_nesterov": False,
        "name": "RectifiedAdam",
    },
    "SparseGroupFtrlOptimizer": {
        "learning_rate": REQUIRED,
        "learning_rate_power": -0.5,
        "initial_accumulator_value": 0.1,
        "l1_regularization_strength": 0.0,
        "l2_regularization_strength": 0.0,
        "l21_regularization_strength": 0.0,
        "use_locking": False,
        "name": "SparseGroupFtrl",
        "accum_name": None,
        "linear_name": None,
        "l2_shrinkage_regularization_strength": 0.0,
    },
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_tfplus(name):
    parameters = inspect.signature(getattr(training, name)).parameters
    assert {each.name: each.default for each in parameters.values()} == SIGNATURES[name]
    assert list(parameters) == list(SIGNATURES[name])


def batches(num_steps, seed=4):
    """Yields (numbers of rows, repeated ones too, gradients); rows come first at some step."""
    rng = np.random.default_rng(seed)
    for step in range(num_steps):
        known = min(len(KEYS), 2 + step // 2)
        numbers = rng.integers(0, known, rng.integers(1, 9))
        yield numbers, rng.normal(size=(len(numbers), DIM)).astype(np.float32)


def summed(numbers, grads):
    """Returns each number once, and the sum of its gradients."""
    distinct, inverse = np.unique(numbers, return_inverse=True)
    sums = np.zeros((len(distinct), DIM))
    np.add.at(sums, inverse, grads)
    return distinct, sums


def oracle(name, states, steps, rates=None, **hyper):
    """Rows in float64 after the steps of a twin, each with the gradients of some rows alone."""
    rows = starts().astype(np.float64)
    columns = {state: np.full(rows.shape, initial) for state, initial in states.items()}
    for step, (numbers, grads) in enumerate(steps, start=1):
        touched, sums = summed(numbers, grads)
        part = {state: column[touched] for state, column in columns.items()}
        w = rows[touched]
        rate = 0.1 if rates is None else rates[step - 1]
        getattr(reference_updates, name)(w, part, sums, rate, step, **hyper)
        rows[touched] = w
        for state, column in part.items():
            columns[state][touched] = column
    return rows


def trained(make, steps, mode="eager"):
    """Rows after the steps, and a dense variable that had a gradient of ones in each."""
    with MODES[mode]() as opened:
        rows, dense = filled(), tf.Variable(np.zeros(DIM, np.float32))
        optimizer = make()

        def step(keys, grads):
            slices = tf.IndexedSlices(grads, keys)
            return optimizer.apply_gradients([(slices, rows), (tf.ones(DIM), dense)])

        if mode == "graph":
            feeds = v1.placeholder(tf.int64, [None]), v1.placeholder(tf.float32, [None, DIM])
            train = step(*feeds)
            opened.session.run(v1.global_variables_initializer())
            for numbers, grads in steps:
                values = dict(zip(feeds, (KEYS[numbers], grads), strict=True))
                opened.session.run(train, values)
            return rows_of(rows), opened.session.run(dense)
        for numbers, grads in steps:
            step(tf.constant(KEYS[numbers]), tf.constant(grads))
        return rows_of(rows), dense.numpy()


ADAM = {"m": 0.0, "v": 0.0}
GROUP_ADAM = {"linear": 0.0, **ADAM}
FTRL = {"accumulator": 0.1, "linear": 0.0}


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize("version", [3, 4])
def test_group_adam_without_penalties_is_adam_whenever_a_row_comes_first(mode, version):
    steps = list(batches(30))
    make = lambda: training.GroupAdamOptimizer(0.1, version=version)  # noqa: E731
    rows, dense = trained(make, steps, mode)
    expected = oracle("adam", ADAM, steps, epsilon=1e-8)
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=2e-5)
    plain_rows, plain_dense = trained(lambda: training.AdamOptimizer(0.1, version=2), steps, mode)
    np.testing.assert_allclose(rows, plain_rows, rtol=1e-4, atol=2e-5)
    np.testing.assert_array_equal(dense, plain_dense)


def test_a_zero_gradient_at_first_touch_leaves_the_row_as_it_is():
    steps = [*batches(6), (np.array([6]), np.zeros((1, DIM), np.float32))]
    rows, _ = trained(lambda: training.GroupAdamOptimizer(0.1), steps)
    np.testing.assert_allclose(rows[6], starts()[6], rtol=1e-6)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_sparse_group_ftrl_without_its_penalty_is_ftrl(mode):
    steps = list(batches(30))
    options = {"l1_regularization_strength": 0.01, "l2_shrinkage_regularization_strength": 0.02}
    rows, dense = trained(lambda: training.SparseGroupFtrlOptimizer(0.1, **options), steps, mode)
    plain = trained(lambda: v1.train.FtrlOptimizer(0.1, **options), steps, mode)
    np.testing.assert_allclose(rows, plain[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(dense, plain[1])
    expected = oracle("ftrl", FTRL, steps, l1=0.01, l2_shrinkage=0.02)
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "name", "states", "hyper"),
    [
        (training.GroupAdamOptimizer, "groupadam", GROUP_ADAM, {"epsilon": 1e-8}),
        (training.SparseGroupFtrlOptimizer, "sparsegroupftrl", FTRL, {}),
    ],
)
@pytest.mark.parametrize("l21", [0.05, 0.8, 3.0])
def test_the_penalty_on_norms_sets_the_rows_to_zero_that_the_oracle_has_there(
    make, name, states, hyper, l21
):
    steps = list(batches(12))
    rows, dense = trained(lambda: make(0.1, l21_regularization_strength=l21), steps)
    expected = oracle(name, states, steps, l21=l21, **hyper)
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=2e-5)
    at_zero = ~rows.any(axis=1)
    np.testing.assert_array_equal(at_zero, ~expected.any(axis=1))
    touched = np.unique(np.concatenate([numbers for numbers, _ in steps]))
    assert at_zero[touched].sum() > 0 or l21 < 1
    assert dense.all()  # it has no such penalty


def test_the_penalties_follow_a_learning_rate_that_changes():
    steps = list(batches(4))
    rate = tf.Variable(0.1)
    rows, optimizer = filled(), training.GroupAdamOptimizer(rate, l21_regularization_strength=0.3)
    rates = [0.1, 0.1, 0.02, 0.3]
    for value, (numbers, grads) in zip(rates, steps, strict=True):
        rate.assign(value)
        slices = tf.IndexedSlices(tf.constant(grads), tf.constant(KEYS[numbers]))
        optimizer.apply_gradients([(slices, rows)])
    expected = oracle("groupadam", GROUP_ADAM, steps, rates, l21=0.3, epsilon=1e-8)
    np.testing.assert_allclose(rows_of(rows), expected, rtol=1e-4, atol=2e-5)


RECTIFIED = [
    ({}, {}),
    ({"use_nesterov": True, "weight_decay": 0.05}, {"nesterov": True, "weight_decay": 0.05}),
    (
        {"amsgrad": True, "beta2": 0.9, "sma_threshold": 4.0},
        {"amsgrad": True, "beta_2": 0.9, "sma_threshold": 4.0},
    ),
]


def schedule(num_steps, decay, total, proportion, lowest):
    """The learning rates of the steps of RAdam's warm-up, from 0.1 on."""
    rates = []
    for t in range(1, num_steps + 1):
        rate = 0.1 / (1 + decay * t)
        warmup = total * proportion
        if total and t <= warmup:
            rate = rate * t / warmup
        elif total:
            rate += (lowest - rate) * min(1.0, (t - warmup) / (total - warmup))
        rates.append(rate)
    return rates


@pytest.mark.parametrize("mode", ["eager", "graph"])
@pytest.mark.parametrize(("options", "hyper"), RECTIFIED)
@pytest.mark.parametrize("total_steps", [0, 20])
def test_rectified_adam(options, hyper, total_steps, mode):
    steps = list(batches(25))
    more = {"decay": 0.1, "total_steps": total_steps, "warmup_proportion": 0.3, "min_lr": 0.01}
    rates = schedule(25, 0.1, total_steps, 0.3, 0.01)
    rows, dense = trained(
        lambda: training.RectifiedAdamOptimizer(0.1, **options, **more), steps, mode
    )
    states = {**ADAM, "vhat": 0.0}
    expected = oracle("rectifiedadam", states, steps, rates, **hyper)
    np.testing.assert_allclose(rows, expected, rtol=1e-4, atol=1e-5)
    w = np.zeros(DIM)
    states = {name: np.zeros(DIM) for name in states}
    for step, rate in enumerate(rates, start=1):
        reference_updates.rectifiedadam(w, states, np.ones(DIM), rate, step, **hyper)
    np.testing.assert_allclose(dense, w, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use_resource", [False, True])
@pytest.mark.parametrize(("options", "hyper"), RECTIFIED)
def test_rectified_adam_changes_the_touched_rows_of_a_dense_variable(options, hyper, use_resource):
    steps = list(batches(15))
    with tf.Graph().as_default(), v1.Session() as session:
        rows = v1.get_variable("rows", initializer=starts(), use_resource=use_resource)
        feeds = v1.placeholder(tf.int64, [None]), v1.placeholder(tf.float32, [None, DIM])
        slices = tf.IndexedSlices(feeds[1], feeds[0])
        optimizer = training.RectifiedAdamOptimizer(0.1, use_locking=True, **options)
        train = optimizer.apply_gradients([(slices, rows)])
        session.run(v1.global_variables_initializer())
        for values in steps:
            session.run(train, dict(zip(feeds, values, strict=True)))
        actual = session.run(rows)
    expected = oracle("rectifiedadam", {**ADAM, "vhat": 0.0}, steps, **hyper)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "make",
    [
        lambda: training.GroupAdamOptimizer(0.1, l21_regularization_strength=0.1),
        lambda: training.RectifiedAdamOptimizer(0.1, total_steps=12, amsgrad=True),
        lambda: training.SparseGroupFtrlOptimizer(0.1, l21_regularization_strength=0.1),
    ],
)
def test_training_goes_on_after_a_restore_as_if_there_had_been_none(make, tmp_path):
    steps = list(batches(12))

    def graph(path, taken, restored):
        with tf.Graph().as_default(), v1.Session() as session:
            rows, dense = filled(), tf.Variable(np.zeros(DIM, np.float32))
            feeds = v1.placeholder(tf.int64, [None]), v1.placeholder(tf.float32, [None, DIM])
            pairs = [(tf.IndexedSlices(feeds[1], feeds[0]), rows), (tf.ones(DIM), dense)]
            train = make().apply_gradients(pairs)
            saver = v1.train.Saver()
            if restored:
                saver.restore(session, path)
            else:
                session.run(v1.global_variables_initializer())
            for numbers, grads in taken:
                session.run(train, {feeds[0]: KEYS[numbers], feeds[1]: grads})
            return saver.save(session, path), rows_of(rows), session.run(dense)

    _, *expected = graph(str(tmp_path / "whole"), steps, False)
    path, *_ = graph(str(tmp_path / "half"), steps[:7], False)
    _, *actual = graph(path, steps[7:], True)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: training.GroupAdamOptimizer(0.1, version=1), NotImplementedError, "version=4"),
        (lambda: training.GroupAdamOptimizer(0.1, version=2), NotImplementedError, "version=4"),
        (lambda: training.GroupAdamOptimizer(0.1, version=5), ValueError, "one of"),
        (
            lambda: training.GroupAdamOptimizer(lambda: 0.1, version=3),
            NotImplementedError,
            "learning rate that is a number",
        ),
        (lambda: training.AdamOptimizer(version=3), ValueError, "one of"),
        (
            lambda: training.GroupAdamOptimizer(0.1, l21_regularization_strength=-1.0),
            ValueError,
            "l21_regularization_strength",
        ),
        (
            lambda: training.GroupAdamOptimizer(0.1, l1_regularization_strength="1"),
            TypeError,
            "must be a number",
        ),
        (
            lambda: training.SparseGroupFtrlOptimizer(0.1, l21_regularization_strength=-1.0),
            ValueError,
            "l21_regularization_strength",
        ),
        (lambda: training.RectifiedAdamOptimizer(sma_threshold=3.0), ValueError, ">= 4"),
        (lambda: training.RectifiedAdamOptimizer(warmup_proportion=2), ValueError, r"\[0, 1\]"),
        (lambda: training.RectifiedAdamOptimizer(beta1=1.0), ValueError, "`beta1`.*below 1"),
        (lambda: training.RectifiedAdamOptimizer(beta1=-0.5), ValueError, "`beta1`.*>= 0"),
        (lambda: training.RectifiedAdamOptimizer(beta1="0.9"), TypeError, "`beta1`.*a number"),
        (lambda: training.RectifiedAdamOptimizer(beta2=0.6), ValueError, "`beta2`.*above 0.6"),
        (lambda: training.RectifiedAdamOptimizer(beta2=1.5), ValueError, "`beta2`.*below 1"),
        (lambda: training.RectifiedAdamOptimizer(epsilon=0.0), ValueError, "`epsilon`.*above 0"),
    ],
)
def test_arguments_out_of_range_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_rectified_adam_takes_callables_and_tensors():
    variable = tf.Variable([1.0])
    training.RectifiedAdamOptimizer(
        0.1, beta1=lambda: 0.9, beta2=tf.constant(0.999, tf.float64), epsilon=lambda: 1e-7
    ).apply_gradients([(tf.constant([2.0]), variable)])
    np.testing.assert_allclose(variable, [1 - 0.1 * 2], rtol=1e-6)


def test_rectified_adam_counts_on_where_float32_stops():
    optimizer = training.RectifiedAdamOptimizer(0.1)
    variable = tf.Variable([1.0])
    optimizer.apply_gradients([(tf.constant([2.0]), variable)])
    (step,) = [
        each for each in optimizer.variables() if each.shape.rank == 0 and "step" in each.name
    ]
    step.assign(tf.cast(2**24, step.dtype))
    for count in (1, 2, 3):
        optimizer.apply_gradients([(tf.constant([2.0]), variable)])
        assert int(step) == 2**24 + count


def test_names_of_slots_are_accepted():
    names = {"accum_name": "a", "linear_name": "b"}
    training.GroupAdamOptimizer(0.1, **names)
    steps = list(batches(2))
    trained(lambda: training.SparseGroupFtrlOptimizer(0.1, **names), steps)
