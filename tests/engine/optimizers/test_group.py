"""Rules that set whole rows to 0: what they are without penalties, and what the penalties do."""

import dataclasses

import numpy as np
import pytest

from scripts.bench.common.row_steps import apply_rule
from sok_lite.backend.cpu import CpuBackend
from sok_lite.engine.optimizers import (
    Adam,
    Ftrl,
    GroupAdam,
    GroupAMSGrad,
    GroupLamb,
    GroupMomentum,
    Momentum,
    SparseGroupFtrl,
)
from tests.engine.optimizers.helpers import new_table, read
from tests.support import reference_updates
from tests.support.helpers import sized

GROUP_RULES = [GroupAdam, GroupAMSGrad, GroupMomentum, SparseGroupFtrl, GroupLamb]
# Each with the rule that it is without penalties.
WITHOUT_PENALTIES = [
    (GroupAdam(), Adam(), "adam"),
    (GroupAdam(epsilon=1e-3, weight_decay=0.3), Adam(epsilon=1e-3, weight_decay=0.3), "adam"),
    (GroupAMSGrad(), Adam(amsgrad=True), "adam"),
    (GroupMomentum(), Momentum(), "momentum"),
    (GroupMomentum(nesterov=True), Momentum(nesterov=True), "momentum"),
    (SparseGroupFtrl(), Ftrl(), "ftrl"),
    (SparseGroupFtrl(l1=0.05, l2=0.1, beta=0.1), Ftrl(l1=0.05, l2=0.1, beta=0.1), "ftrl"),
    (SparseGroupFtrl(learning_rate_power=-0.7), Ftrl(learning_rate_power=-0.7), "ftrl"),
]


def late_rows(num_steps, dim, seed=0):
    """Rows (16, dim) and, for each step, the numbers of some and their gradients.

    Rows come first at any step. The first gradient of rows 4 to 7 is 0, that of rows 8 to 11 has
    zeros in it, and those of rows 12 to 15 are tiny.
    """
    rng = np.random.default_rng(seed)
    first_step = rng.integers(0, num_steps // 2, 16)
    first_step[0] = 0
    steps = []
    for step in range(num_steps):
        touched = np.flatnonzero((first_step <= step) & (rng.random(16) < 0.7))
        touched = np.union1d(touched, np.flatnonzero(first_step == step))
        grads = rng.normal(0, 1, (16, dim)).astype(np.float32)
        begins = (first_step == step)[:, None]
        rows = np.arange(16)[:, None]
        grads[np.broadcast_to(begins & (rows >= 4) & (rows < 8), grads.shape)] = 0
        grads[(rng.random(grads.shape) < 0.5) & begins & (rows >= 8) & (rows < 12)] = 0
        grads[12:] *= 1e-6
        steps.append((touched, grads[touched]))
    return rng.normal(0, 0.5, (16, dim)).astype(np.float32), steps


def rates(num_steps):
    return 0.02 * 0.97 ** np.arange(num_steps)


def run_kernel(backend, rule, start, steps, dtype="float32"):
    table, rows = new_table(backend, start, dtype)
    for i, (rate, (touched, grads)) in enumerate(zip(rates(len(steps)), steps, strict=True)):
        numbers = backend.from_host(rows[touched])
        apply_rule(table, rule, numbers, backend.from_host(grads), rate, i + 1)
    return table, rows


def run_twin(name, rule, start, steps):
    update = getattr(reference_updates, name)
    w = start.astype(np.float64)
    states = {name: np.full(w.shape, initial) for name, initial in rule.states.items()}
    for i, (rate, (touched, grads)) in enumerate(zip(rates(len(steps)), steps, strict=True)):
        part = {name: state[touched] for name, state in states.items()}
        w_part = w[touched]
        hyper = dataclasses.asdict(rule)
        if name == "lamb_by_row":
            hyper = {k: v for k, v in hyper.items() if not k.startswith("l")}
        update(w_part, part, grads.astype(np.float64), rate, i + 1, **hyper)
        w[touched] = w_part
        for name_, state in part.items():
            states[name_][touched] = state
    return w, states


@pytest.mark.parametrize("dim", [1, 3, 31, 64, 100])
@pytest.mark.parametrize("group, plain, name", WITHOUT_PENALTIES, ids=repr)
def test_without_penalties_it_is_the_plain_rule_whenever_a_row_comes_first(
    backend, group, plain, name, dim
):
    num_steps = sized(backend, 50, 8)
    start, steps = late_rows(num_steps, dim)
    table, rows = run_kernel(backend, group, start, steps)
    plain_table, plain_rows = run_kernel(backend, plain, start, steps)
    # z is a sum of 50 terms of up to a row's size; each is rounded to float32.
    actual, expected = read(table, rows), read(plain_table, plain_rows)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)
    assert np.abs(expected - start).max() > 0.01


@pytest.mark.parametrize("group, plain, name", WITHOUT_PENALTIES, ids=repr)
def test_without_penalties_the_twins_are_equal_too(group, plain, name):
    start, steps = late_rows(50, 7)
    actual, _ = run_twin(type(group).__name__.lower(), group, start, steps)
    expected, _ = run_twin(name, plain, start, steps)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("rule", [GroupLamb(), GroupLamb(weight_decay=0.2, beta_2=0.9)], ids=repr)
def test_without_penalties_group_lamb_is_lamb_of_each_row(backend, rule):
    start, steps = late_rows(sized(backend, 50, 8), 31)
    table, rows = run_kernel(backend, rule, start, steps)
    expected, _ = run_twin("lamb_by_row", rule, start, steps)
    # 1 - 0.999 in float32 as in Adam.
    np.testing.assert_allclose(read(table, rows), expected, rtol=2e-5, atol=5e-6)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "rule",
    [
        GroupAdam(),
        GroupAMSGrad(),
        GroupMomentum(),
        SparseGroupFtrl(initial_accumulator=0),
        GroupLamb(),
    ],
    ids=repr,
)
def test_a_first_gradient_of_zero_leaves_the_row(backend, rule, dtype):
    start = np.random.default_rng(0).normal(0, 1, (9, 33)).astype(np.float32)
    table, rows = new_table(backend, start, dtype)
    before = read(table, rows)
    grads = backend.from_host(np.zeros_like(start))
    for step in (7, 8, 9):
        apply_rule(table, rule, backend.from_host(rows), grads, 0.1, step)
    np.testing.assert_allclose(read(table, rows), before, rtol=1e-6)


def noisy_steps(num_rows, dim, num_steps, seed=3):
    """Gradients that pull one half of the rows one way, and the other half nowhere."""
    rng = np.random.default_rng(seed)
    pull = rng.normal(0, 1, (num_rows, dim)) * (np.arange(num_rows) % 2 == 0)[:, None]
    everything = np.arange(num_rows)
    return [
        (everything, (pull + rng.normal(0, 1, pull.shape)).astype(np.float32))
        for _ in range(num_steps)
    ]


@pytest.mark.parametrize(
    "rule, strong, strong_simulated",
    [
        (GroupAdam, 0.8, 0.5),
        (GroupAMSGrad, 0.8, 0.5),
        (GroupMomentum, 64.0, 32.0),
        (SparseGroupFtrl, 8.0, 8.0),
        (GroupLamb, 0.8, 0.5),
    ],
)
@pytest.mark.parametrize("dim", [3, 31])
def test_the_penalty_on_norms_sets_the_rows_to_zero_that_the_twin_has_at_zero(
    backend, rule, strong, strong_simulated, dim
):
    strong = sized(backend, strong, strong_simulated)  # fewer steps of which the sums are smaller
    num_rows, num_steps = sized(backend, 100, 20), sized(backend, 20, 8)
    start = np.random.default_rng(1).normal(0, 0.1, (num_rows, dim)).astype(np.float32)
    steps = noisy_steps(num_rows, dim, num_steps)
    shares = []
    for l21 in (0.01, strong, 1e4):
        table, rows = run_kernel(backend, rule(l21=l21), start, steps)
        expected, _ = run_twin(rule.__name__.lower(), rule(l21=l21), start, steps)
        is_zero = (read(table, rows) == 0).all(axis=1)
        np.testing.assert_array_equal(is_zero, (expected == 0).all(axis=1))
        shares.append(is_zero.mean())
        if l21 == strong:  # those that nothing pulls go first
            assert is_zero[1::2].mean() > is_zero[::2].mean()
    assert shares[0] == 0 and 0 < shares[1] < 1 and shares[2] == 1


@pytest.mark.parametrize("rule", GROUP_RULES)
@pytest.mark.parametrize("dim", [1, 3, 31, 64, 100])
def test_a_row_at_zero_comes_back_from_zero_with_its_states(backend, rule, dim):
    strength = {SparseGroupFtrl: 1.2, GroupMomentum: 1.2}.get(rule, 0.8)
    rule = rule(l21=strength)
    start = np.random.default_rng(1).normal(0, 1e-3, (5, dim)).astype(np.float32)
    direction = np.where(np.random.default_rng(2).random((5, dim)) < 0.5, -1, 1)
    grads = direction.astype(np.float32)
    everything = np.arange(5)
    steps = [(everything, grads)]
    table, rows = run_kernel(backend, rule, start, steps)
    assert (read(table, rows) == 0).all()
    states = {name: read(table, rows, name) for name in rule.states}
    assert all((state != 0).all() for state in states.values())  # kept, z as well
    steps *= 12
    table, rows = run_kernel(backend, rule, start, steps)
    expected, expected_states = run_twin(type(rule).__name__.lower(), rule, start, steps)
    assert (np.sign(read(table, rows)) == -direction).all()
    np.testing.assert_allclose(read(table, rows), expected, rtol=2e-4, atol=1e-6)
    for name, state in expected_states.items():
        np.testing.assert_allclose(read(table, rows, name), state, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("rule", GROUP_RULES)
def test_the_penalty_on_elements_sets_single_ones_to_zero(backend, rule):
    rule = rule(l1=3.0 if rule in (GroupMomentum, SparseGroupFtrl) else 0.1)
    start = np.zeros((20, 31), np.float32)
    steps = noisy_steps(20, 31, 6)
    table, rows = run_kernel(backend, rule, start, steps)
    expected, _ = run_twin(type(rule).__name__.lower(), rule, start, steps)
    is_zero = read(table, rows) == 0
    np.testing.assert_array_equal(is_zero, expected == 0)
    assert 0.05 < is_zero.mean() < 0.95


@pytest.mark.parametrize("rule", GROUP_RULES)
def test_a_gradient_that_is_not_finite_stays_in_its_row(backend, rule):
    start = np.ones((4, 5), np.float32)
    table, rows = new_table(backend, start)
    grads = np.ones((4, 5), np.float32)
    grads[1, 2] = np.nan
    count = apply_rule(
        table, rule(l21=0.1), backend.from_host(rows), backend.from_host(grads), 0.1, 1
    )
    assert int(count) == 1
    after = read(table, rows)
    assert np.isnan(after[1, 2]) and np.isfinite(after[[0, 2, 3]]).all()


@pytest.mark.parametrize("rule", GROUP_RULES)
def test_norms_far_below_and_above_one_are_neither_zero_nor_infinite(backend, rule):
    """Squares of 1e-25 and 1e25 are no float32."""
    for size in (1e-25, 1e25):
        start = np.full((3, 7), size, np.float32)
        table, rows = new_table(backend, start)
        grads = backend.from_host(np.zeros_like(start))
        options = {"initial_accumulator": 0} if rule is SparseGroupFtrl else {"epsilon": 1.0}
        if rule is GroupMomentum:
            options = {}
        apply_rule(table, rule(l21=1e-35, **options), backend.from_host(rows), grads, 0.1, 1)
        np.testing.assert_allclose(read(table, rows), start, rtol=1e-5)


@pytest.mark.parametrize("rule", GROUP_RULES)
def test_the_step_does_not_depend_on_the_number_of_threads(rule):
    start, steps = late_rows(5, 33)
    results = []
    for num_threads in (1, 2, 5):
        threaded = CpuBackend(num_threads=num_threads)
        threaded.grain = 1
        table, rows = run_kernel(threaded, rule(l21=0.01), start, steps)
        results.append([read(table, rows, name) for name in ("value", *rule().states)])
    for others in results[1:]:
        for first, other in zip(results[0], others, strict=True):
            np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize("rule", GROUP_RULES)
def test_rows_at_zero_come_back_where_the_rate_that_penalties_are_multiplied_by_falls(
    backend, rule
):
    """All but SparseGroupFtrl, whose penalties are as strong at any rate."""
    strength = 20.0 if rule in (GroupMomentum, SparseGroupFtrl) else 0.8
    table, rows = new_table(backend, np.zeros((4, 3), np.float32))
    counts = []
    for step, rate in enumerate([0.1] * 5 + [1e-4] * 5, start=1):
        grads = backend.from_host(np.ones((4, 3), np.float32))
        apply_rule(table, rule(l21=strength), backend.from_host(rows), grads, rate, step)
        counts.append(int((read(table, rows) == 0).all(axis=1).sum()))
    assert counts[4] == 4
    assert counts[-1] == (4 if rule is SparseGroupFtrl else 0)


def test_penalties_and_settings_out_of_range_are_refused():
    for rule in GROUP_RULES:
        if rule is not SparseGroupFtrl:  # which has no step at all then
            rule().scalars(-0.1, 1)
            with pytest.raises(ValueError, match="must be >= 0. Received: learning_rate=-0.1"):
                rule(l1=0.1).scalars(-0.1, 1)
        for name in ("l1", "l2", "l21"):
            with pytest.raises(ValueError, match=f"`{name}` of {rule.__name__} must be >= 0"):
                rule(**{name: -0.1})
    for rule in (GroupAdam, GroupAMSGrad, GroupLamb):
        with pytest.raises(ValueError, match="`beta_1`"):
            rule(beta_1=1.0)
        with pytest.raises(ValueError, match="`epsilon`"):
            rule(epsilon=0.0)
    with pytest.raises(ValueError, match=r"`momentum` of GroupMomentum must be in \[0, 1\]"):
        GroupMomentum(momentum=1.1)
