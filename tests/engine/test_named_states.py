"""Optimizer states by name: listed, renamed, dropped, and taken over afterwards."""

import numpy as np
import pytest

from scripts.bench.common.row_steps import ensure_state
from sok_lite.engine.named_states import drop_state, named_states, rename_state
from sok_lite.engine.optimizer_states import acquire_states
from sok_lite.engine.optimizers import Adagrad, Adam, Momentum
from sok_lite.engine.table.content import take
from sok_lite.engine.table.restore import restore
from tests.engine.test_optimizer_states import DIM, TIERS, Optimizer, some_grads, take_step
from tests.support.helpers import new_table

KEYS = np.array([3, -7, 2**62])


def trained(backend, *rules, **options):
    """A table of three keys, and an optimizer of each rule that took a step."""
    table = new_table(backend, DIM, **options)
    table.find_or_insert(KEYS)
    optimizers = [Optimizer(rule, len(KEYS)) for rule in rules]
    for i, optimizer in enumerate(optimizers):
        optimizer.step = 1
        take_step(table, optimizer, KEYS, some_grads(1, len(KEYS), i)[0])
    return table, optimizers


def freed(backend, table):
    """A table that holds the same, whose states are nobody's."""
    other = new_table(backend, DIM)
    restore(other, take(table))
    return other


def all_states(table):
    """{name: states of KEYS}"""
    to_host = table.backend.to_host
    return {s.name: to_host(table.read_state(s.name, KEYS)).tolist() for s in named_states(table)}


@pytest.mark.parametrize("options", [{}, TIERS], ids=["hbm", "hybrid in two tiers"])
def test_all_states_are_listed(backend, options):
    table, optimizers = trained(backend, Adam(), Adam(), Adagrad(), **options)
    ensure_state(table.store, "old", 0.25, 1)
    initial = Adagrad().initial_accumulator
    expected = [
        ("old", "old", None, 1, 0.25, 4 * 3, False),
        ("m", "m", 1, DIM, 0.0, 4 * 3 * DIM, True),
        ("v", "v", 1, DIM, 0.0, 4 * 3 * DIM, True),
        ("m (2)", "m", 2, DIM, 0.0, 4 * 3 * DIM, True),
        ("v (2)", "v", 2, DIM, 0.0, 4 * 3 * DIM, True),
        ("accumulator", "accumulator", 3, DIM, initial, 4 * 3 * DIM, True),
    ]
    assert [tuple(state) for state in named_states(table)] == expected
    del optimizers[1]
    assert [state.name for state in named_states(table)] == ["old", "m", "v", "accumulator"]
    assert not any(state.is_used for state in named_states(freed(backend, table)))


def test_renamed_states_go_on_with_another_optimizer(backend):
    trained_table, _optimizers = trained(backend, Adam())
    table = freed(backend, trained_table)
    before = all_states(table)
    assert np.count_nonzero(list(before.values())) > 0
    # Each other's names, by way of a third.
    assert rename_state(table, "m", "x") == "x"
    assert rename_state(table, "v", "m") == "m"
    assert rename_state(table, "x", "v") == "v"
    assert all_states(table) == {"v": before["m"], "m": before["v"]}
    new = Optimizer(Adam(), len(KEYS))
    (states,) = acquire_states([table], [{"m": (DIM, 0.0), "v": (DIM, 0.0)}], [new])
    to_host = backend.to_host
    taken = {n: to_host(table.read_state(c.name, KEYS)).tolist() for n, c in states.items()}
    assert taken == {"v": before["m"], "m": before["v"]}
    assert all(state.is_used for state in named_states(table))


def test_a_name_that_another_group_has_gets_a_number(backend):
    source, _optimizers = trained(backend, Momentum(), Adam())
    table = freed(backend, source)
    before = all_states(table)
    assert rename_state(table, "momentum", "m") == "m (2)"
    assert [(s.name, s.kind, s.group) for s in named_states(table)] == [
        *[("m (2)", "m", 1), ("m", "m", 2), ("v", "v", 2)]
    ]
    assert all_states(table) == {
        "m (2)": before["momentum"],
        "m": before["m"],
        "v": before["v"],
    }


def test_what_cannot_be_renamed_is_refused(backend):
    table, _optimizers = trained(backend, Adam())
    with pytest.raises(ValueError, match=r"'m' of table .* an optimizer uses it"):
        rename_state(table, "m", "n")
    table = freed(backend, table)
    before = named_states(table)
    for name, kind, said in (
        ("m", "v", "called 'v' already"),
        ("m", "m", "another name"),
        ("m", "", "another name"),
        ("value", "m", r"no optimizer state 'value'\. It has: 'm', 'v'"),
        ("w", "m", "no optimizer state 'w'"),
    ):
        with pytest.raises(ValueError, match=said):
            rename_state(table, name, kind)
    with pytest.raises(ValueError, match="no optimizer state 'value'"):
        drop_state(table, "value")
    assert named_states(table) == before


@pytest.mark.parametrize("options", [{}, TIERS], ids=["hbm", "hybrid in two tiers"])
def test_a_dropped_state_begins_anew(backend, options):
    table, (adam, other) = trained(backend, Adam(), Momentum(), **options)
    before, num_bytes = all_states(table), table.store.row_bytes
    rows = backend.to_host(table.lookup(KEYS).values).tolist()
    drop_state(table, "v")
    assert table.store.row_bytes == num_bytes - 4 * DIM
    assert all_states(table) == {name: before[name] for name in ("m", "momentum")}
    assert backend.to_host(table.lookup(KEYS).values).tolist() == rows
    grads = some_grads(1, len(KEYS), 5)[0]
    adam.step = 2
    take_step(table, adam, KEYS, grads)
    after = all_states(table)
    np.testing.assert_allclose(after["v"], 0.001 * grads.astype(np.float64) ** 2, rtol=1e-4)
    np.testing.assert_allclose(after["m"], 0.9 * np.array(before["m"]) + 0.1 * grads, rtol=1e-5)
    assert after["momentum"] == before["momentum"]
    drop_state(table, "momentum")
    other.step = 2
    take_step(table, other, KEYS, grads)
    momentum = all_states(table)["momentum"]
    np.testing.assert_allclose(np.abs(momentum), np.abs(0.1 * grads), rtol=1e-5)
