"""Every optimizer that has a rule, 50 steps: rows of tables against the framework's own optimizer
where all of them are touched, against float64 where only some are."""

import functools
import itertools

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge.optimizers.settings import family_of, settings_of
from tests.support.optimizer_cases import CASES

NUM_STEPS = 50
KEYS = np.array([5, -7, 2**40, 0, -(2**62), 11, 6])
DIMS = (4, 3)  # rows of whole words of 16 bytes and others go through different loops


def starts():
    """The first rows of the two tables."""
    rng = np.random.default_rng(1)
    return [rng.normal(0, 0.5, (len(KEYS), dim)).astype(np.float32) for dim in DIMS]


def steps():
    """(gradient of all rows, numbers of the touched rows, their gradient) of each step."""
    rng = np.random.default_rng(2)
    for _ in range(NUM_STEPS):
        touched = rng.permutation(len(KEYS))[: rng.integers(0, len(KEYS))]
        dense = rng.normal(size=(len(KEYS), DIMS[0])).astype(np.float32)
        yield dense, touched, rng.normal(size=(len(touched), DIMS[1])).astype(np.float32)


# Those that do something else when they are traced. Nadam counts in Python how often it has
# multiplied its momenta, and divides by 0 in its first step; the momenta of ScheduleFreeAdamW begin
# at 0, not where the variables do.
NOT_WHEN_TRACED = {("tf_keras", "Nadam"), ("Keras 3", "ScheduleFreeAdamW")}


@functools.cache
def dense_rows(case):
    """The rows after all steps of the framework's own optimizer on a dense variable."""
    made, variable = case.make(), tf.Variable(starts()[0])

    def step(grads):
        made.optimizer.apply_gradients([(grads, variable)], **made.arguments)

    if (case.family, case.name) not in NOT_WHEN_TRACED:
        step = tf.function(step)
    for grads, _, _ in steps():
        step(tf.constant(grads))
    return variable.numpy()


@functools.cache
def twin_rows(case):
    """The rows after all steps of the twin, in float64: (all touched, some touched)."""
    dense, lazy = (case.new_twin(start) for start in starts())
    for grads, touched, some in steps():
        dense.step(np.arange(len(KEYS)), grads)
        lazy.step(touched, some)
    return dense.rows, lazy.rows


def table_rows(case, is_traced):
    """The same of OptimizerWrapper on two tables in one call."""
    tables = [sok.DynamicVariable(dim, name=f"rows_{dim}") for dim in DIMS]
    for table, start in zip(tables, starts(), strict=True):
        sok.assign(table, KEYS, start)
    made = case.make()
    ours = sok.OptimizerWrapper(made.optimizer)

    def step(grads, keys, some):
        # The same gradient in two halves: repeated keys are summed.
        halves = tf.IndexedSlices(tf.concat([some / 2, some / 2], 0), tf.concat([keys, keys], 0))
        gradients = [tf.IndexedSlices(grads, tf.constant(KEYS)), halves]
        ours.apply_gradients(zip(gradients, tables, strict=True), **made.arguments)

    if is_traced:
        step = tf.function(step, reduce_retracing=True)
    for grads, touched, some in steps():
        step(tf.constant(grads), tf.constant(KEYS[touched]), tf.constant(some))
    assert ours.iterations == NUM_STEPS
    return [tf.nn.embedding_lookup(table, KEYS).numpy() for table in tables]


# Each case in one mode on one backend: tests/engine tests the rules on all of them, and which rule
# an optimizer has depends on neither.
WAYS = [("eager", "cpu"), ("tf.function", "simt"), ("eager", "simt"), ("tf.function", "cpu")]
CASES_AND_WAYS = [
    pytest.param(case, *way, id="-".join((str(case), *way)))
    for case, way in zip(CASES, itertools.cycle(WAYS), strict=False)
]


@pytest.mark.parametrize(("case", "mode", "place"), CASES_AND_WAYS)
def test_rows_end_where_the_optimizer_and_the_twin_put_them(case, mode, place, request):
    expected, lazy = twin_rows(case)
    if case.is_dense_alike:
        expected = dense_rows(case)
    if place == "simt":
        request.getfixturevalue("play")
    all_touched, some_touched = table_rows(case, is_traced=mode == "tf.function")
    np.testing.assert_allclose(all_touched, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(some_touched, lazy, rtol=1e-5, atol=1e-5)


@pytest.mark.cases("case")
@pytest.mark.parametrize("case", [case for case in CASES if case.is_dense_alike], ids=str)
def test_the_twin_is_the_frameworks_optimizer(case):
    # float32 beside float64: 1 - 0.999 has 5 digits there, which Adam's steps have too.
    np.testing.assert_allclose(dense_rows(case), twin_rows(case)[0], rtol=1e-5, atol=1e-5)


def test_tf1_adam_is_followed_over_many_steps():
    """It multiplies its powers step by step: their errors add up, which a power does not have."""
    table, start = sok.DynamicVariable(DIMS[0]), starts()[0]
    sok.assign(table, KEYS, start)
    dense, theirs = tf.Variable(start), tf.compat.v1.train.AdamOptimizer(0.05)
    ours = sok.OptimizerWrapper(tf.compat.v1.train.AdamOptimizer(0.05))
    for seed in range(300):
        grads = np.random.default_rng(seed).normal(size=start.shape).astype(np.float32)
        ours.apply_gradients([(tf.IndexedSlices(grads, tf.constant(KEYS)), table)])
        theirs.apply_gradients([(tf.constant(grads), dense)])
    np.testing.assert_allclose(tf.nn.embedding_lookup(table, KEYS), dense, rtol=2e-6, atol=2e-6)


def test_every_optimizer_with_a_rule_has_a_case():
    from tools.optimizer_table import rows

    expected = {(row.family, row.name, row.rule) for row in rows() if row.rule is not None}
    optimizers = [case.make().optimizer for case in CASES]
    rules = [settings_of(each, family_of(each)).rule for each in optimizers]
    found = {(case.family, case.name, rule) for case, rule in zip(CASES, rules, strict=True)}
    assert found == expected
