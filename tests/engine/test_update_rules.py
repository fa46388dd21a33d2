"""Update rules against their plain NumPy twins in tests/reference_updates.py."""

import dataclasses
import types

import numpy as np
import pytest

from sok_lite.backend.cpu import CpuBackend
from sok_lite.engine.dtypes import bfloat16_to_float32, float32_to_bfloat16, row_dtype
from sok_lite.engine.rows.store import ABSENT, RowStore
from sok_lite.engine.update_rules import (
    RULES,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Momentum,
    RMSprop,
    StochasticRounding,
    apply_rule,
    count_nonfinite,
)
from tests import reference_rounding, reference_updates

VARIANTS = [
    SGD(),
    SGD(weight_decay=0.1),
    Momentum(),
    Momentum(nesterov=True),
    Momentum(momentum=0.5, lr_in_state=False),
    Momentum(nesterov=True, lr_in_state=False, weight_decay=0.01),
    Adagrad(),
    Adagrad(epsilon=1e-3, epsilon_inside_root=False, initial_accumulator=0.5),
    Adagrad(epsilon=0.0, weight_decay=0.01),
    Adam(),
    Adam(beta_1=0.5, beta_2=0.9, epsilon=1e-3),
    Adam(amsgrad=True),
    Adam(adaptive_epsilon=True, epsilon=1e-2, weight_decay=0.2),
    Adam(beta_1=0.0),
    AdamW(),
    AdamW(amsgrad=True, weight_decay=0.3),
    RMSprop(),
    RMSprop(momentum=0.9),
    RMSprop(centered=True),
    RMSprop(centered=True, momentum=0.7, rho=0.8, weight_decay=0.1),
    RMSprop(epsilon=1e-3, epsilon_inside_root=False),
    RMSprop(epsilon=1e-3, epsilon_inside_root=False, centered=True),
    RMSprop(epsilon=1e-3, epsilon_inside_root=False, momentum=0.5),
    RMSprop(epsilon=1e-10, initial_rms=1.0, momentum=0.9, centered=True),
    Ftrl(),
    Ftrl(l1=0.05, l2=0.1, l2_shrinkage=0.01, beta=0.2),
    Ftrl(learning_rate_power=-0.7, l1=0.01, weight_decay=0.1),
    Ftrl(learning_rate_power=0.0, initial_accumulator=0.0, l2=1.0),
]

LEARNING_RATES = [0.1, 0.1, 0.03, 0.2, 0.01]


def new_table(backend, values, dtype="float32"):
    """A table of rows without an index, and the numbers of its rows, which span several chunks."""
    store = RowStore(backend, values.shape[1], row_dtype(dtype))
    rows = store.allocate(len(values))
    store.write(rows, store.to_storage(backend.from_host(values)))
    return types.SimpleNamespace(backend=backend, store=store), backend.to_host(rows)


def read(table, rows, column="value"):
    stored = table.store.read(table.backend.from_host(rows), column)
    if column == "value" and table.store.row_dtype.name == "bfloat16":
        stored = bfloat16_to_float32(table.backend.xp, stored)
    return table.backend.to_host(stored).astype(np.float32)


def train(backend, rule, dim, num_rows, num_touched, dtype="float32", seed=0):
    """Runs kernel and twin over the same steps: (table, rows, twin's rows, twin's states)."""
    rng = np.random.default_rng(seed)
    start = rng.normal(0, 0.5, (num_rows, dim)).astype(np.float32)
    table, rows = new_table(backend, start, dtype)
    w = read(table, rows).astype(np.float64)
    states = {name: np.full((num_rows, dim), value) for name, value in rule.states.items()}
    update = getattr(reference_updates, type(rule).__name__.lower())
    for step, learning_rate in enumerate(LEARNING_RATES, start=1):
        touched = rng.choice(num_rows, num_touched, replace=False)
        grads = rng.normal(0, 1, (num_touched, dim)).astype(np.float32)
        apply_rule(
            table,
            rule,
            backend.from_host(rows[touched]),
            backend.from_host(grads),
            learning_rate,
            step,
        )
        part = {name: state[touched] for name, state in states.items()}
        w_part = w[touched]
        update(
            w_part, part, grads.astype(np.float64), learning_rate, step, **dataclasses.asdict(rule)
        )
        w[touched] = w_part
        for name, state in part.items():
            states[name][touched] = state
    return table, rows, w, states


@pytest.mark.parametrize("dim", [1, 3, 4, 31, 64, 100])
@pytest.mark.parametrize("rule", VARIANTS, ids=repr)
def test_rows_and_states_follow_the_twin(backend, rule, dim):
    table, rows, w, states = train(backend, rule, dim, num_rows=50, num_touched=33)
    # float32 against float64: 1 - 0.999 alone has a relative error of 5e-5 in float32, and it
    # scales Adam's steps, which add up to 0.4 here; every other sum is far closer.
    np.testing.assert_allclose(read(table, rows), w, rtol=2e-5, atol=5e-5)
    for name, state in states.items():
        np.testing.assert_allclose(read(table, rows, name), state, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("dtype, tolerance", [("float16", 2e-3), ("bfloat16", 2e-2)])
@pytest.mark.parametrize(
    "rule", [SGD(), Momentum(), Adam(), RMSprop(), Adagrad(), Ftrl()], ids=repr
)
def test_half_precision_rows_keep_float32_states(backend, rule, dtype, tolerance):
    table, rows, w, states = train(backend, rule, 31, num_rows=40, num_touched=40, dtype=dtype)
    # Each step rounds the row to 11 or 8 bits; values are around 1.
    np.testing.assert_allclose(read(table, rows), w, rtol=0, atol=len(LEARNING_RATES) * tolerance)
    for name, state in states.items():
        assert table.store.column(name).dtype == np.float32
        if not isinstance(rule, Ftrl):  # whose states depend on the rounded rows
            np.testing.assert_allclose(read(table, rows, name), state, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_rows_are_the_float32_step_rounded_once(backend, dtype):
    rng = np.random.default_rng(3)
    start = rng.normal(0, 1, (100, 5)).astype(np.float32)
    grads = rng.normal(0, 1, (100, 5)).astype(np.float32)
    table, rows = new_table(backend, start, dtype)
    before = read(table, rows)
    apply_rule(table, SGD(), backend.from_host(rows), backend.from_host(grads), 0.5, 1)
    exact = before - grads * np.float32(0.5)
    if dtype == "float16":
        expected = exact.astype(np.float16).astype(np.float32)
    else:
        expected = bfloat16_to_float32(np, float32_to_bfloat16(np, exact))
    np.testing.assert_array_equal(read(table, rows), expected)


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000, 100_003])
def test_any_number_of_rows(backend, n):
    rng = np.random.default_rng(1)
    start = rng.normal(size=(max(n, 1), 3)).astype(np.float32)
    grads = rng.normal(size=(n, 3)).astype(np.float32)
    table, rows = new_table(backend, start)
    order = rng.permutation(n)
    apply_rule(table, SGD(), backend.from_host(rows[order]), backend.from_host(grads), 0.25, 1)
    expected = start.copy()
    expected[order] -= grads * np.float32(0.25)
    np.testing.assert_array_equal(read(table, rows), expected)


def test_untouched_rows_keep_values_and_states(backend):
    table, rows = new_table(backend, np.ones((1000, 7), np.float32))
    grads = backend.from_host(np.ones((10, 7), np.float32))
    apply_rule(table, Adam(), backend.from_host(rows[:10]), grads, 0.1, 1)
    np.testing.assert_array_equal(read(table, rows[10:]), np.ones((990, 7)))
    for name in ("m", "v"):
        np.testing.assert_array_equal(read(table, rows[10:], name), np.zeros((990, 7)))
        assert (read(table, rows[:10], name) != 0).all()


def test_absent_rows_are_skipped(backend):
    table, rows = new_table(backend, np.zeros((4, 5), np.float32))
    numbers = np.array([rows[0], ABSENT, rows[2], ABSENT], np.uint32)
    grads = np.full((4, 5), np.arange(1, 5)[:, None], np.float32)
    bad = apply_rule(table, SGD(), backend.from_host(numbers), backend.from_host(grads), 1.0, 1)
    np.testing.assert_array_equal(read(table, rows)[:, 0], [-1, 0, -3, 0])
    assert int(bad) == 0


def test_gradients_need_not_be_contiguous(backend):
    table, rows = new_table(backend, np.zeros((9, 6), np.float32))
    wide = np.random.default_rng(0).normal(size=(9, 18)).astype(np.float32)
    apply_rule(table, SGD(), backend.from_host(rows), backend.from_host(wide)[:, 6:12], 1.0, 1)
    np.testing.assert_array_equal(read(table, rows), -wide[:, 6:12])


@pytest.mark.parametrize("rule", VARIANTS, ids=repr)
def test_a_zero_gradient_gives_no_nan(backend, rule):
    table, rows = new_table(backend, np.ones((2, 3), np.float32))
    grads = backend.from_host(np.zeros((2, 3), np.float32))
    for step in (1, 2):
        apply_rule(table, rule, backend.from_host(rows), grads, 0.1, step)
    assert np.isfinite(read(table, rows)).all()


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
def test_rows_with_nonfinite_gradients_are_counted(backend, bad_value, dim):
    rng = np.random.default_rng(0)
    grads = rng.normal(size=(1000, dim)).astype(np.float32)
    grads[0, 0] = np.finfo(np.float32).max  # the largest number is finite
    bad_rows = rng.choice(1000, 33, replace=False)
    grads[bad_rows, rng.integers(0, dim, 33)] = bad_value
    grads[bad_rows[:5]] = bad_value  # many in a row count once
    table, rows = new_table(backend, np.zeros((1000, dim), np.float32))
    device_grads = backend.from_host(grads)
    assert int(count_nonfinite(backend, device_grads)) == 33
    numbers = rows.copy()
    numbers[bad_rows[:3]] = ABSENT
    numbers = backend.from_host(numbers)
    assert int(count_nonfinite(backend, device_grads, numbers)) == 30
    assert int(apply_rule(table, SGD(), numbers, device_grads, 0.1, 1)) == 30


def test_nonfinite_gradients_can_be_an_error_before_anything_changes(backend):
    table, rows = new_table(backend, np.ones((5, 3), np.float32))
    grads = np.ones((5, 3), np.float32)
    grads[4, 2] = np.nan
    with pytest.raises(FloatingPointError, match="1 of 5 gradient rows"):
        apply_rule(
            table, Adam(), backend.from_host(rows), backend.from_host(grads), 0.1, 1, "error"
        )
    np.testing.assert_array_equal(read(table, rows), np.ones((5, 3)))
    assert table.store.state_names == []
    grads[4, 2] = 1
    apply_rule(table, Adam(), backend.from_host(rows), backend.from_host(grads), 0.1, 1, "error")
    assert (read(table, rows) < 1).all()


def test_the_step_repeats_bit_for_bit(backend):
    results = [train(backend, Adam(amsgrad=True), 64, 3000, 2500)[0] for _ in range(2)]
    rows = np.arange(3000, dtype=np.uint32)
    for column in ("value", "m", "v", "vhat"):
        np.testing.assert_array_equal(*(read(table, rows, column) for table in results))


def test_every_rule_names_its_states():
    names = {"m", "v", "vhat", "momentum", "accumulator", "linear", "rms", "mean_grad"}
    for rule in VARIANTS:
        assert set(rule.states) <= names and set(rule.states) <= set(rule.columns)
        assert type(rule).__name__ in RULES
    assert Adagrad(initial_accumulator=0.3).states == {"accumulator": 0.3}
    assert RMSprop(initial_rms=1).states == {"rms": 1.0}


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
        (AdamW, {"weight_decay": -1.0}, "weight_decay"),
        (Adagrad, {"initial_accumulator": -0.1}, "initial_accumulator"),
        (Adagrad, {"epsilon": 0.0, "initial_accumulator": 0.0}, "> 0 where epsilon is 0"),
        (RMSprop, {"rho": 1.1}, "rho"),
        (RMSprop, {"momentum": -0.1}, "momentum"),
        (Ftrl, {"learning_rate_power": 0.5}, "learning_rate_power"),
        (Ftrl, {"l1": -1.0}, "l1"),
        (Ftrl, {"l2_shrinkage": -1.0}, "l2_shrinkage"),
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
    for error, arguments, message in [
        (TypeError, ("adam", numbers, grads, 0.1, 1), "`rule` must be one of Adagrad, Adam"),
        (TypeError, (SGD(), numbers.astype(np.int64), grads, 0.1, 1), "rows int64"),
        (TypeError, (SGD(), numbers, grads.astype(np.float64), 0.1, 1), "grads float64"),
        (ValueError, (SGD(), numbers, grads[:, :2], 0.1, 1), r"`grads` \(u, 3\)"),
        (ValueError, (SGD(), numbers[:1], grads, 0.1, 1), "Received: rows"),
        (ValueError, (SGD(), numbers, grads, float("nan"), 1), "`learning_rate` must be finite"),
        (ValueError, (SGD(), numbers, grads, 0.1, 0), "`step` must be >= 1"),
        (ValueError, (Ftrl(), numbers, grads, 0.0, 1), "Start a warm-up above 0"),
        (ValueError, (SGD(), numbers, grads, 0.1, 1, "ignore"), "'allow' or 'error'"),
    ]:
        with pytest.raises(error, match=message):
            apply_rule(table, *arguments)
    np.testing.assert_array_equal(read(table, rows), np.ones((2, 3)))
    assert table.store.state_names == []


# ---- stochastic rounding: tests/reference_rounding.py is the twin -------------------------------

HALF = ["float16", "bfloat16"]


def some_keys(n, seed=0):
    return np.random.default_rng(seed).integers(-(2**63), 2**63, n, dtype=np.int64)


def rounded_by_the_kernel(backend, x, keys, dtype, seed=5, step=1):
    """Rounds x (n, dim) float32: rows of 0 take a step of exactly x."""
    table, rows = new_table(backend, np.zeros(x.shape, np.float32), dtype)
    rounding = StochasticRounding(backend.from_host(keys), seed)
    grads = backend.from_host(x)
    apply_rule(table, SGD(), backend.from_host(rows), grads, -1.0, step, rounding=rounding)
    return read(table, rows)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("n, dim", [(0, 3), (1, 1), (31, 3), (33, 31), (1000, 64), (40, 1025)])
def test_stochastic_rounding_follows_the_twin(backend, dtype, n, dim):
    # Every float32 there is: normal, subnormal, too large, infinite, NaN.
    x = np.random.default_rng(n).integers(0, 2**32, (n, dim), dtype=np.uint32).view(np.float32)
    # And those where float16 is subnormal, or close to its largest value.
    x[::3] = np.random.default_rng(n).uniform(-(2.0**-13), 2.0**-13, x[::3].shape)
    x[::7] = np.random.default_rng(n).uniform(60000, 66000, x[::7].shape)
    keys = some_keys(n)
    for seed, step in [(0, 1), (-7, 2), (2**63 - 1, 2**32 + 3)]:
        words = reference_rounding.words(keys, dim, seed, step)
        expected = reference_rounding.rounded(x, words, dtype)
        actual = rounded_by_the_kernel(backend, x, keys, dtype, seed, step)
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rule", VARIANTS, ids=repr)
def test_stochastic_rounding_is_of_the_float32_step(backend, rule, dtype):
    n, dim = 40, 33
    rng = np.random.default_rng(2)
    keys = some_keys(n)
    half, rows = new_table(backend, rng.normal(size=(n, dim)).astype(np.float32), dtype)
    exact, _ = new_table(backend, read(half, rows))
    numbers = backend.from_host(rows)
    for step in (1, 2, 3):
        grads = backend.from_host(rng.normal(size=(n, dim)).astype(np.float32))
        apply_rule(exact, rule, numbers, grads, 0.1, step)
        rounding = StochasticRounding(backend.from_host(keys), 9)
        apply_rule(half, rule, numbers, grads, 0.1, step, rounding=rounding)
        words = reference_rounding.words(keys, dim, 9, step)
        expected = reference_rounding.rounded(read(exact, rows), words, dtype)
        np.testing.assert_array_equal(read(half, rows), expected)
        for name in rule.states:
            np.testing.assert_array_equal(read(half, rows, name), read(exact, rows, name))
        exact.store.write(numbers, backend.from_host(expected))


@pytest.mark.parametrize("dtype", HALF)
def test_values_of_the_format_are_kept_whatever_the_bits(backend, dtype):
    every = np.arange(65536, dtype=np.uint16)
    if dtype == "float16":
        x = every.view(np.float16).astype(np.float32)
    else:
        x = bfloat16_to_float32(np, every)
    x = np.ascontiguousarray(x.reshape(1024, 64))
    for step in (1, 2):
        actual = rounded_by_the_kernel(backend, x, some_keys(1024), dtype, step=step)
        np.testing.assert_array_equal(actual, x)


@pytest.mark.parametrize(
    "dtype, largest, ulp", [("float16", 65504.0, 32.0), ("bfloat16", 255 * 2.0**120, 2.0**120)]
)
def test_only_what_nearest_makes_an_infinity_becomes_one(backend, dtype, largest, ulp):
    last = np.float32(largest)
    below, above = last + np.float32(0.49 * ulp), last + np.float32(0.5 * ulp)
    x = np.tile(np.array([last, below, above, -below, -above], np.float32), (1000, 1))
    actual = rounded_by_the_kernel(backend, x, some_keys(1000), dtype)
    expected = np.tile(np.array([last, last, np.inf, -last, -np.inf], np.float32), (1000, 1))
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    "dtype, low, ulp",
    [
        ("bfloat16", 1.0, 2.0**-7),
        ("bfloat16", -3.0, -(2.0**-6)),
        ("bfloat16", 0.0, 2.0**-133),
        ("float16", 1.0, 2.0**-10),
        ("float16", -700.0, -(2.0**-1)),
        ("float16", 0.0, 2.0**-24),
        ("float16", 3 * 2.0**-24, 2.0**-24),
        ("float16", 1023 * 2.0**-24, 2.0**-24),
    ],
)
@pytest.mark.parametrize("share", [0.03125, 0.5, 0.90625])
def test_the_mean_is_the_exact_value(backend, dtype, low, ulp, share):
    n, dim = 20_000, 5
    x = np.full((n, dim), low + share * ulp, np.float32)
    actual = rounded_by_the_kernel(backend, x, some_keys(n), dtype).astype(np.float64)
    went_up = (actual - low) / ulp
    assert set(np.unique(went_up)) == {0.0, 1.0}
    # Five standard errors, of each column and of all: one run in a million fails by chance, and
    # keys and seed are fixed.
    error = np.sqrt(share * (1 - share) / n)
    np.testing.assert_allclose(went_up.mean(axis=0), share, rtol=0, atol=5 * error)
    np.testing.assert_allclose(went_up.mean(), share, rtol=0, atol=5 * error / np.sqrt(dim))


def test_roundings_of_neighbours_are_independent(backend):
    n, dim = 4000, 64
    x = np.full((n, dim), 1 + 2.0**-8, np.float32)  # half way between two bfloat16 numbers

    def went_up(keys, step=1, seed=5):
        return (rounded_by_the_kernel(backend, x, keys, "bfloat16", seed, step) > 1) - 0.5

    keys = np.arange(n, dtype=np.int64)
    one = went_up(keys)
    pairs = {
        "columns": (one[:, 1:], one[:, :-1]),
        "columns a draw apart": (one[:, 4:], one[:, :-4]),
        "keys": (one[1:], one[:-1]),
        "keys and columns": (one[1:, 1:], one[:-1, :-1]),
        "steps": (one, went_up(keys, step=2)),
        "seeds": (one, went_up(keys, seed=6)),
        "high halves of keys": (one, went_up(keys + 2**32)),
    }
    for name, (left, right) in pairs.items():
        # Products are +-1/4: five standard errors of their mean.
        assert abs((left * right).mean()) < 5 * 0.25 / np.sqrt(left.size), name


@pytest.mark.parametrize("dtype", HALF)
def test_random_bits_belong_to_the_key_not_to_the_row(backend, dtype):
    n, dim = 1000, 7
    x = np.random.default_rng(0).normal(size=(n, dim)).astype(np.float32)
    keys = some_keys(n)
    expected = rounded_by_the_kernel(backend, x, keys, dtype)
    order = np.random.default_rng(1).permutation(n)
    np.testing.assert_array_equal(
        rounded_by_the_kernel(backend, x[order], keys[order], dtype), expected[order]
    )
    few = order[:33]
    np.testing.assert_array_equal(
        rounded_by_the_kernel(backend, x[few], keys[few], dtype), expected[few]
    )


def test_random_bits_do_not_depend_on_the_number_of_threads():
    x = np.random.default_rng(0).normal(size=(1000, 33)).astype(np.float32)
    results = []
    for num_threads in (1, 2, 5):
        threaded = CpuBackend(num_threads=num_threads)
        threaded.grain = 1
        results.append(rounded_by_the_kernel(threaded, x, some_keys(1000), "bfloat16"))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


def test_stochastic_rounding_leaves_float32_rows_alone(backend):
    x = np.random.default_rng(0).normal(size=(100, 7)).astype(np.float32)
    np.testing.assert_array_equal(rounded_by_the_kernel(backend, x, some_keys(100), "float32"), x)


def test_absent_rows_are_skipped_where_rounding_is_stochastic(backend):
    table, rows = new_table(backend, np.zeros((3, 5), np.float32), "bfloat16")
    numbers = np.array([rows[0], ABSENT, rows[2]], np.uint32)
    rounding = StochasticRounding(backend.from_host(some_keys(3)), 1)
    grads = backend.from_host(np.ones((3, 5), np.float32))
    apply_rule(table, SGD(), backend.from_host(numbers), grads, 1.0, 1, rounding=rounding)
    np.testing.assert_array_equal(read(table, rows)[:, 0], [-1, 0, -1])


def test_bad_keys_of_a_rounding_are_refused(backend):
    table, rows = new_table(backend, np.ones((2, 3), np.float32), "bfloat16")
    arguments = (SGD(), backend.from_host(rows), backend.from_host(np.ones((2, 3), np.float32)))
    for error, keys, message in [
        (TypeError, np.zeros(2, np.int32), "must be int64. Received: int32"),
        (ValueError, np.zeros(3, np.int64), r"one key for each of 2 rows. Received: \(3,\)"),
    ]:
        rounding = StochasticRounding(backend.from_host(keys), 0)
        with pytest.raises(error, match=message):
            apply_rule(table, *arguments, 0.1, 1, rounding=rounding)
    np.testing.assert_array_equal(read(table, rows), np.ones((2, 3)))
