"""Update rules against their plain NumPy twins in tests/support/reference_updates.py."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from scripts.bench.common.row_steps import apply_rule, count_nonfinite
from sok_lite.backend.sources import kernel_files
from sok_lite.engine import optimizers
from sok_lite.engine.dtypes import bfloat16_to_float32, float32_to_bfloat16
from sok_lite.engine.optimizers import (
    SGD,
    Adadelta,
    Adagrad,
    AdagradDA,
    Adam,
    Adamax,
    AdamW,
    Ftrl,
    GroupAdam,
    Lion,
    Momentum,
    Nadam,
    ProximalAdagrad,
    ProximalSGD,
    RMSprop,
    UpdateRule,
)
from sok_lite.engine.rows.store import NO_ROW
from tests.engine.optimizers.helpers import VARIANTS, new_table, read
from tests.support import reference_updates

LEARNING_RATES = [0.1, 0.1, 0.03, 0.2, 0.01]


def train(backend, rule, dim, num_rows, num_touched, dtype="float32", seed=0):
    """Runs kernel and twin over the same steps: (table, rows, twin's rows, twin's states)."""
    rng = np.random.default_rng(seed)
    start = rng.normal(0, 0.5, (num_rows, dim)).astype(np.float32)
    table, rows = new_table(backend, start, dtype)
    w = read(table, rows).astype(np.float64)
    states = {
        name: np.full((num_rows, size), initial)
        for name, (size, initial) in rule.kinds(dim).items()
    }
    update = getattr(reference_updates, type(rule).__name__.lower())
    for step, learning_rate in enumerate(LEARNING_RATES, start=1):
        touched = rng.choice(num_rows, num_touched, replace=False)
        grads = rng.normal(0, 1, (num_touched, dim)).astype(np.float32)
        # Some rows come late, with a first gradient that is 0, has zeros in it, or is tiny.
        grads[:4] = 0
        grads[4:8][rng.random((4, dim)) < 0.5] = 0
        grads[8:12] *= 1e-6
        numbers = backend.from_host(rows[touched])
        apply_rule(table, rule, numbers, backend.from_host(grads), learning_rate, step)
        part = {name: state[touched] for name, state in states.items()}
        w_part = w[touched]
        update(
            w_part, part, grads.astype(np.float64), learning_rate, step, **dataclasses.asdict(rule)
        )
        w[touched] = w_part
        for name, state in part.items():
            states[name][touched] = state
    return table, rows, w, states


@pytest.mark.parametrize("dim", [1, 4, 31, 100])
@pytest.mark.parametrize("rule", VARIANTS, ids=repr)
def test_rows_and_states_follow_the_twin(backend, rule, dim):
    table, rows, w, states = train(backend, rule, dim, num_rows=50, num_touched=33)
    # float32 against float64: 1 - 0.999 alone has a relative error of 5e-5 in float32, and it
    # scales Adam's steps, which add up to 0.4 here; every other sum is far closer.
    np.testing.assert_allclose(read(table, rows), w, rtol=2e-5, atol=5e-5)
    for name, state in states.items():
        np.testing.assert_allclose(read(table, rows, name), state, rtol=2e-5, atol=4e-5)


@pytest.mark.parametrize("dim", [4, 33])  # whole words of 16 bytes go through another loop
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("rule", VARIANTS, ids=repr)
def test_rows_of_other_formats_take_the_float32_step_rounded_once(backend, rule, dtype, dim):
    rng = np.random.default_rng(2)
    other, rows = new_table(backend, rng.normal(size=(40, dim)).astype(np.float32), dtype)
    exact, _ = new_table(backend, read(other, rows))
    numbers = backend.from_host(rows)
    for step in (1, 2, 3):
        grads = backend.from_host(rng.normal(size=(40, dim)).astype(np.float32))
        for table in (exact, other):
            apply_rule(table, rule, numbers, grads, 0.1, step)
        expected = read(exact, rows)
        if dtype == "float16":
            with np.errstate(over="ignore"):
                expected = expected.astype(np.float16).astype(np.float32)
        elif dtype == "bfloat16":
            expected = bfloat16_to_float32(np, float32_to_bfloat16(np, expected))
        np.testing.assert_array_equal(read(other, rows), expected)
        for name in rule.states:
            np.testing.assert_array_equal(read(other, rows, name), read(exact, rows, name))
        exact.store.write(numbers, backend.from_host(expected))


RULES = sorted({type(rule) for rule in VARIANTS}, key=lambda rule: rule.__name__)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_zero_gradient_gives_no_nan_and_moves_what_a_rule_calls_lazy(backend, rule):
    moves = False
    for variant in (each for each in VARIANTS if type(each) is rule):
        variant = dataclasses.replace(variant, weight_decay=0.0)
        table, rows = new_table(backend, np.ones((2, 3), np.float32))
        for step in range(1, 4):  # the first row has a gradient in two steps, the second has none
            grads = np.array([[step < 3], [0.0]], np.float32).repeat(3, 1)
            before = [read(table, rows), *(read(table, rows, s) for s in table.store.state_names)]
            apply_rule(table, variant, backend.from_host(rows), backend.from_host(grads), 0.1, step)
        after = [read(table, rows), *(read(table, rows, s) for s in table.store.state_names)]
        moves |= not all(map(np.array_equal, before, after)) or (after[0][1] != 1).any()
        assert np.isfinite(after[0]).all()
    assert moves == (rule.lazy != "nothing")


def test_centered_rmsprop_survives_a_variance_rounded_below_zero(backend):
    # A constant gradient has variance 0; in float32 rms - mean_grad^2 comes out at -1e-3 or so.
    table, rows = new_table(backend, np.zeros((64, 3), np.float32))
    grads = np.linspace(50, 150, 192, dtype=np.float32).reshape(64, 3)
    rule = RMSprop(centered=True, rho=0.5)
    for step in range(1, 60):
        apply_rule(table, rule, backend.from_host(rows), backend.from_host(grads), 1e-6, step)
    variance = read(table, rows, "rms") - read(table, rows, "mean_grad") ** 2
    assert (variance < -1e-7).any()
    assert np.isfinite(read(table, rows)).all()


@pytest.mark.parametrize("bad_value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dim", [1, 31, 64])
def test_nonfinite_gradients_are_counted_but_not_of_absent_rows_which_are_skipped(
    backend, bad_value, dim
):
    rng = np.random.default_rng(0)
    grads = rng.normal(size=(1000, dim)).astype(np.float32)
    grads[0, 0] = np.finfo(np.float32).max  # the largest number is finite
    bad_rows = rng.choice(1000, 33, replace=False)
    grads[bad_rows, rng.integers(0, dim, 33)] = bad_value
    grads[bad_rows[:5]] = bad_value  # many in a row count once
    table, rows = new_table(backend, np.zeros((1000, dim), np.float32))
    device_grads = backend.from_host(grads)
    assert int(count_nonfinite(backend, device_grads)) == 33
    present = np.ones(1000, bool)
    present[bad_rows[:3]] = present[900:] = False
    numbers = backend.from_host(np.where(present, rows, np.uint32(NO_ROW)))
    count = (~np.isfinite(grads[present]).all(axis=1)).sum()
    assert int(count_nonfinite(backend, device_grads, numbers)) == count
    assert int(apply_rule(table, SGD(), numbers, device_grads, 0.5, 1)) == count
    expected = np.where(present[:, None], grads * np.float32(-0.5), 0)
    np.testing.assert_array_equal(read(table, rows), expected)


def test_every_rule_has_its_file_its_kernels_and_its_variants_here():
    rules = {getattr(optimizers, name) for name in optimizers.__all__} - {UpdateRule}
    assert {type(rule) for rule in VARIANTS} == rules
    folder = Path(optimizers.__file__).parent
    kernels = {path.stem for path in kernel_files() if path.parent.name == "update"}
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "group", "rule"}
    assert files == {rule.__module__.rpartition(".")[2] for rule in rules}
    assert files <= kernels


@pytest.mark.parametrize(
    "rule, options, message",
    [
        (
            Momentum,
            {"momentum": 1.5},
            r"`momentum` of Momentum must be in \[0, 1\]. Received: momentum=1.5",
        ),
        (Momentum, {"nesterov": 1}, "`nesterov` of Momentum must be True or False"),
        (Adam, {"beta_1": 1.0}, r"`beta_1` of Adam must be in \[0, 1\)"),
        (Adam, {"beta_2": -0.1}, "beta_2"),
        (Adam, {"epsilon": 0.0}, "epsilon"),
        (Adam, {"epsilon": float("nan")}, "`epsilon` of Adam must be finite"),
        (Adam, {"has_m": False}, "`beta_1` of Adam must be 0 where rows have no `m`"),
        (AdamW, {"weight_decay": -1.0}, "weight_decay"),
        (Adagrad, {"initial_accumulator": -0.1}, "initial_accumulator"),
        (Adagrad, {"epsilon": 0.0, "initial_accumulator": 0.0}, "> 0 where epsilon is 0"),
        (Adagrad, {"initial_accumulator": 1e39}, "`accumulator` of Adagrad must begin.*: 1e.39"),
        (Ftrl, {"initial_accumulator": 1e300}, "`accumulator` of Ftrl must begin.* fits float32"),
        (RMSprop, {"rho": 1.1}, "rho"),
        (RMSprop, {"momentum": -0.1}, "momentum"),
        (Ftrl, {"learning_rate_power": 0.5}, "learning_rate_power"),
        (Ftrl, {"l1": -1.0}, "l1"),
        (Ftrl, {"l2_shrinkage": -1.0}, "l2_shrinkage"),
        (Adamax, {"beta_2": 1.0}, "beta_2"),
        (Adamax, {"epsilon": 0.0}, "epsilon"),
        (Adadelta, {"rho": 1.5}, "rho"),
        (Adadelta, {"epsilon": 0.0}, "epsilon"),
        (Nadam, {"beta_1": 1.0}, "beta_1"),
        (Nadam, {"schedule_decay": -1.0}, "schedule_decay"),
        (Lion, {"beta_1": 1.5}, "beta_1"),
        (ProximalSGD, {"l1": -1.0}, "l1"),
        (ProximalAdagrad, {"l2": -1.0}, "l2"),
        (ProximalAdagrad, {"initial_accumulator": 0.0}, "initial_accumulator"),
        (AdagradDA, {"global_step": 0.0}, "global_step"),
        (AdagradDA, {"global_step": 10**400}, "finite"),
        (AdagradDA, {"weight_decay": 0.1}, "0: a step does not read the row"),
    ],
)
def test_hyper_parameters_out_of_range_are_refused(rule, options, message):
    with pytest.raises(ValueError, match=message):
        rule(**options)


@pytest.mark.parametrize("value", ["0.9", None, True, [0.9]])
def test_hyper_parameters_must_be_numbers(value):
    with pytest.raises(TypeError, match="`beta_1` of Adam must be a number"):
        Adam(beta_1=value)


def test_bad_arguments_are_refused_before_anything_changes(backend):
    table, rows = new_table(backend, np.ones((2, 3), np.float32))
    numbers = backend.from_host(rows)
    grads = backend.from_host(np.ones((2, 3), np.float32))
    most = 1 - 1e-9  # in float32 it is 1, and 1 - beta_1^t is 0
    for error, arguments, message in [
        (TypeError, ("adam", numbers, grads, 0.1, 1), "such as SGD[(][)]. Received: str"),
        (ValueError, (SGD(), numbers, grads, float("nan"), 1), "`learning_rate` must be finite"),
        (ValueError, (SGD(), numbers, grads, 0.1, 0), "`step` must be >= 1"),
        (ValueError, (Ftrl(), numbers, grads, 0.0, 1), "Start a warm-up above 0"),
        (ValueError, (SGD(), numbers, grads, 1e39, 1), "must fit float32. .* learning_rate=1e.39"),
        (ValueError, (Adam(), numbers, grads, 1e39, 1), "must fit float32. .* learning_rate=1e.39"),
        (ValueError, (Adam(beta_1=most), numbers, grads, 0.1, 1), r"fit float32. .*\(inf,"),
        (ValueError, (GroupAdam(beta_1=most), numbers, grads, 0.0, 1), r"float32. .*\(nan,"),
    ]:
        with pytest.raises(error, match=message):
            apply_rule(table, *arguments)
    np.testing.assert_array_equal(read(table, rows), np.ones((2, 3)))
    assert table.store.state_names == []
