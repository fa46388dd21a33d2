"""TFPlus' optimizers: names, defaults and what their Python adds to the rules.

On tables and dense variables beside them: test_every_optimizer.py and test_patched_optimizers.py.
"""

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

# Of TFPlus' documents and sources: names and defaults, in order.
SIGNATURES = {
    "AdamOptimizer": "learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-08, "
    "use_locking=False, name='Adam', version=1",
    "GroupAdamOptimizer": "learning_rate, initial_accumulator_value=0.0, beta1=0.9, beta2=0.999, "
    "epsilon=1e-08, l1_regularization_strength=0.0, l2_regularization_strength=0.0, "
    "l21_regularization_strength=0.0, use_locking=False, name='GroupAdam', accum_name=None, "
    "linear_name=None, version=4",
    "RectifiedAdamOptimizer": "learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-07, "
    "decay=0.0, weight_decay=0.0, amsgrad=False, sma_threshold=5.0, total_steps=0, "
    "warmup_proportion=0.1, min_lr=0.0, use_locking=False, use_nesterov=False, "
    "name='RectifiedAdam'",
    "SparseGroupFtrlOptimizer": "learning_rate, learning_rate_power=-0.5, "
    "initial_accumulator_value=0.1, l1_regularization_strength=0.0, "
    "l2_regularization_strength=0.0, l21_regularization_strength=0.0, use_locking=False, "
    "name='SparseGroupFtrl', accum_name=None, linear_name=None, "
    "l2_shrinkage_regularization_strength=0.0",
}


def test_signatures_are_those_of_tfplus():
    for name, parameters in SIGNATURES.items():
        found = inspect.signature(getattr(training, name)).parameters.values()
        plain = [each.replace(annotation=each.empty, kind=each.KEYWORD_ONLY) for each in found]
        assert ", ".join(map(str, plain)) == parameters


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


@pytest.mark.pairs
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


def test_arguments_out_of_range_are_refused():
    adam, group_adam = training.AdamOptimizer, training.GroupAdamOptimizer
    ftrl, rectified = training.SparseGroupFtrlOptimizer, training.RectifiedAdamOptimizer
    rate = "learning rate that is a number"
    for cls, arguments, error, message in (
        (group_adam, {"version": 1}, NotImplementedError, "version=4"),
        (group_adam, {"version": 2}, NotImplementedError, "version=4"),
        (group_adam, {"version": 5}, ValueError, "one of"),
        (group_adam, {"learning_rate": lambda: 0.1, "version": 3}, NotImplementedError, rate),
        (group_adam, {"l21_regularization_strength": -1.0}, ValueError, "l21_regularization_stre"),
        (group_adam, {"l1_regularization_strength": "1"}, TypeError, "must be a number"),
        (ftrl, {"l21_regularization_strength": -1.0}, ValueError, "l21_regularization_strength"),
        (adam, {"version": 3}, ValueError, "one of"),
        (rectified, {"sma_threshold": 3.0}, ValueError, ">= 4"),
        (rectified, {"warmup_proportion": 2}, ValueError, r"\[0, 1\]"),
        (rectified, {"beta1": 1.0}, ValueError, "`beta1`.*below 1"),
        (rectified, {"beta1": -0.5}, ValueError, "`beta1`.*>= 0"),
        (rectified, {"beta1": "0.9"}, TypeError, "`beta1`.*a number"),
        (rectified, {"beta2": 0.6}, ValueError, "`beta2`.*above 0.6"),
        (rectified, {"beta2": 1.5}, ValueError, "`beta2`.*below 1"),
        (rectified, {"epsilon": 0.0}, ValueError, "`epsilon`.*above 0"),
    ):
        with pytest.raises(error, match=message):
            cls(**{"learning_rate": 0.1} | arguments)


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


def test_names_of_slots_and_version_3_are_accepted():
    names = {"accum_name": "a", "linear_name": "b", "use_locking": True}
    steps = list(batches(2))
    for cls, options in (
        (training.GroupAdamOptimizer, {"version": 3}),
        (training.SparseGroupFtrlOptimizer, {}),
    ):
        rows, _ = trained(lambda cls=cls, options=options: cls(0.1, **names, **options), steps)
        np.testing.assert_array_equal(rows, trained(lambda cls=cls: cls(0.1), steps)[0])
