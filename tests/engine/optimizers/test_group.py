"""Rules that set whole rows to 0: what the penalties do.

test_rule.py compares the steps of all of them with their twins, also without penalties.
"""

import dataclasses

import numpy as np
import pytest

from scripts.bench.common.row_steps import apply_rule
from sok_lite.backend.cpu import CpuBackend
from sok_lite.engine.optimizers import (
    GroupAdam,
    GroupAMSGrad,
    GroupLamb,
    GroupMomentum,
    SparseGroupFtrl,
)
from tests.engine.optimizers.helpers import new_table, read
from tests.support import reference_updates
from tests.support.helpers import sized

GROUP_RULES = [GroupAdam, GroupAMSGrad, GroupMomentum, SparseGroupFtrl, GroupLamb]


def rates(num_steps):
    return 0.02 * 0.97 ** np.arange(num_steps)


def run_kernel(backend, rule, start, steps):
    table, rows = new_table(backend, start)
    for i, (rate, (touched, grads)) in enumerate(zip(rates(len(steps)), steps, strict=True)):
        numbers = backend.from_host(rows[touched])
        apply_rule(table, rule, numbers, backend.from_host(grads), rate, i + 1)
    return table, rows


def run_twin(rule, start, steps):
    update = getattr(reference_updates, type(rule).__name__.lower())
    w = start.astype(np.float64)
    states = {name: np.full(w.shape, initial) for name, initial in rule.states.items()}
    for i, (rate, (touched, grads)) in enumerate(zip(rates(len(steps)), steps, strict=True)):
        part = {name: state[touched] for name, state in states.items()}
        w_part = w[touched]
        update(w_part, part, grads.astype(np.float64), rate, i + 1, **dataclasses.asdict(rule))
        w[touched] = w_part
        for state, value in part.items():
            states[state][touched] = value
    return w, states


def noisy_steps(num_rows, dim, num_steps, seed=3):
    """Gradients that pull one half of the rows one way, and the other half nowhere."""
    rng = np.random.default_rng(seed)
    pull = rng.normal(0, 1, (num_rows, dim)) * (np.arange(num_rows) % 2 == 0)[:, None]
    everything = np.arange(num_rows)
    return [
        (everything, (pull + rng.normal(0, 1, pull.shape)).astype(np.float32))
        for _ in range(num_steps)
    ]


@pytest.mark.parametrize("dim", [3, 31])
@pytest.mark.parametrize("rule", GROUP_RULES)
def test_penalties_set_the_rows_and_elements_to_zero_that_the_twin_has_at_zero(backend, rule, dim):
    # On a simulated GPU fewer steps, whose sums are smaller.
    usual, simulated = {GroupMomentum: (64.0, 32.0), SparseGroupFtrl: (8.0, 8.0)}.get(
        rule, (0.8, 0.5)
    )
    strong = sized(backend, usual, simulated)
    num_rows, num_steps = sized(backend, 100, 20), sized(backend, 20, 8)
    start = np.random.default_rng(1).normal(0, 0.1, (num_rows, dim)).astype(np.float32)
    steps = noisy_steps(num_rows, dim, num_steps)
    shares = []
    for penalties in ({"l21": 0.01}, {"l21": strong}, {"l21": 1e4}, {"l1": strong / 8}):
        table, rows = run_kernel(backend, rule(**penalties), start, steps)
        expected, _ = run_twin(rule(**penalties), start, steps)
        is_zero = read(table, rows) == 0
        np.testing.assert_array_equal(is_zero, expected == 0)
        shares.append(is_zero.mean() if "l1" in penalties else is_zero.all(axis=1).mean())
        if penalties == {"l21": strong}:  # those that nothing pulls go first
            of_rows = is_zero.all(axis=1)
            assert of_rows[1::2].mean() > of_rows[::2].mean()
    assert shares[0] == 0 and 0 < shares[1] < 1 and shares[2] == 1 and 0 < shares[3] < 1


@pytest.mark.parametrize("rule", GROUP_RULES)
@pytest.mark.parametrize("dim", [1, 31, 64])
def test_a_row_at_zero_comes_back_from_zero_with_its_states(backend, rule, dim):
    strength = {SparseGroupFtrl: 1.2, GroupMomentum: 1.2}.get(rule, 0.8)
    rule = rule(l21=strength)
    start = np.random.default_rng(1).normal(0, 1e-3, (5, dim)).astype(np.float32)
    direction = np.where(np.random.default_rng(2).random((5, dim)) < 0.5, -1, 1)
    steps = [(np.arange(5), direction.astype(np.float32))]
    table, rows = run_kernel(backend, rule, start, steps)
    assert (read(table, rows) == 0).all()
    states = {name: read(table, rows, name) for name in rule.states}
    assert all((state != 0).all() for state in states.values())  # kept, z as well
    steps *= 12
    table, rows = run_kernel(backend, rule, start, steps)
    expected, expected_states = run_twin(rule, start, steps)
    assert (np.sign(read(table, rows)) == -direction).all()
    np.testing.assert_allclose(read(table, rows), expected, rtol=2e-4, atol=1e-6)
    for name, state in expected_states.items():
        np.testing.assert_allclose(read(table, rows, name), state, rtol=2e-4, atol=1e-6)


@pytest.mark.parametrize("rule", GROUP_RULES)
def test_what_is_not_finite_stays_in_its_row_and_norms_may_be_of_any_size(backend, rule):
    table, rows = new_table(backend, np.ones((4, 5), np.float32))
    grads = np.ones((4, 5), np.float32)
    grads[1, 2] = np.nan
    numbers = backend.from_host(rows)
    assert int(apply_rule(table, rule(l21=0.1), numbers, backend.from_host(grads), 0.1, 1)) == 1
    after = read(table, rows)
    assert np.isnan(after[1, 2]) and np.isfinite(after[[0, 2, 3]]).all()
    options = {SparseGroupFtrl: {"initial_accumulator": 0}, GroupMomentum: {}}
    for size in (1e-25, 1e25):  # squares of them are no float32
        start = np.full((3, 7), size, np.float32)
        table, rows = new_table(backend, start)
        grads = backend.from_host(np.zeros_like(start))
        small = rule(l21=1e-35, **options.get(rule, {"epsilon": 1.0}))
        apply_rule(table, small, backend.from_host(rows), grads, 0.1, 1)
        np.testing.assert_allclose(read(table, rows), start, rtol=1e-5)


@pytest.mark.parametrize("rule", GROUP_RULES)
def test_the_step_does_not_depend_on_the_number_of_threads(rule):
    start = np.random.default_rng(1).normal(0, 0.1, (16, 33)).astype(np.float32)
    steps = noisy_steps(16, 33, 5)
    results = []
    for num_threads in (1, 2, 5):
        threaded = CpuBackend(num_threads=num_threads)
        threaded.grain = 1
        table, rows = run_kernel(threaded, rule(l21=0.01), start, steps)
        results.append([read(table, rows, name) for name in ("value", *rule().states)])
    for others in results[1:]:
        for first, other in zip(results[0], others, strict=True):
            np.testing.assert_array_equal(first, other)


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
        for wrong in ({"beta_1": 1.0}, {"epsilon": 0.0}):
            with pytest.raises(ValueError, match=f"`{next(iter(wrong))}`"):
                rule(**wrong)
    with pytest.raises(ValueError, match=r"`momentum` of GroupMomentum must be in \[0, 1\]"):
        GroupMomentum(momentum=1.1)
