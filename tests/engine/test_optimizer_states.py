"""Several optimizers on one table: each has its states, and leaves none behind."""

import dataclasses
import gc

import numpy as np
import pytest

from scripts.bench.common.row_steps import ensure_state
from sok_lite.backend import get_backend
from sok_lite.engine import optimizer_states
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.optimizer_states import (
    acquire_states,
    drop_state,
    drop_states,
    is_used,
    named_states,
    num_bytes_of,
    rename_state,
    settle_states,
)
from sok_lite.engine.optimizers import SGD, Adagrad, Adam, Ftrl, Momentum, RMSprop
from sok_lite.engine.rows.column import StateOwner
from sok_lite.engine.rows.store import RowStore
from sok_lite.engine.table.content import take
from sok_lite.engine.table.restore import restore
from sok_lite.engine.update import make_states
from tests.support import reference_updates
from tests.support.helpers import new_table, update_of
from tests.support.steps import apply_updates

DIM = 3
TIERS = {"var_type": "hybrid", "max_capacity": 1024, "max_hbm_for_vectors": 8 * DIM * 4 / 2**30}


class Optimizer:
    """Whose states are whose, and their reference in NumPy float64.

    Attributes:
      rule: of its steps.
    """

    def __init__(self, rule, num_keys):
        self.rule, self.step = rule, 0
        self.states = {k: np.full((num_keys, DIM), v) for k, v in rule.states.items()}

    def refer(self, rows, grads):
        """Takes a step of the reference."""
        self.step += 1
        update = getattr(reference_updates, type(self.rule).__name__.lower())
        hyper = dataclasses.asdict(self.rule)
        update(rows, self.states, grads.astype(np.float64), 0.1, self.step, **hyper)


def take_step(table, optimizer, keys, grads):
    update = update_of(table, optimizer.rule, keys, grads, optimizer=optimizer)
    apply_updates([update], 0.1, optimizer.step)


def rows_of(table, keys):
    return table.backend.to_host(table.lookup(keys).values)


def states_of(table, optimizer):
    """The states of an optimizer by name, of all keys in ascending order."""
    for owner, columns in table.store.state_groups.items():
        if owner is not None and owner.optimizer is optimizer:
            host = table.backend.to_host
            return {name: host(table.export(c.name)[1]) for name, c in columns.items()}
    return {}


def some_grads(steps, n, seed=0):
    return np.random.default_rng(seed).normal(size=(steps, n, DIM)).astype(np.float32)


RULES = {
    "Adagrad and Ftrl": [Adagrad(), Ftrl()],
    "two Adams": [Adam(), Adam()],
    "Adam and SGD": [Adam(), SGD()],
    "two momenta": [Momentum(), Momentum(momentum=0.5)],
    "other initial values": [Adagrad(), Adagrad(initial_accumulator=0.5)],
    "three": [Momentum(), RMSprop(momentum=0.5), Adagrad()],
}


@pytest.mark.pairs
@pytest.mark.parametrize("in_turn", [True, False], ids=["in turn", "one after the other"])
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("options", [{}, TIERS], ids=["hbm", "hybrid in two tiers"])
def test_each_optimizer_has_its_own_states(backend, options, rules, in_turn):
    table, keys = new_table(backend, DIM, **options), np.arange(33)
    expected = rows_of(table, keys).astype(np.float64)
    optimizers = [Optimizer(rule, keys.size) for rule in rules]
    order = optimizers * 3 if in_turn else [each for each in optimizers for _ in range(3)]
    for optimizer, grads in zip(order, some_grads(len(order), keys.size), strict=True):
        optimizer.refer(expected, grads)
        take_step(table, optimizer, keys, grads)
    table.lookup(np.arange(100, 900))  # it grows
    np.testing.assert_allclose(rows_of(table, keys), expected, rtol=2e-5, atol=2e-5)
    for optimizer in optimizers:
        states = states_of(table, optimizer)
        assert states.keys() == optimizer.states.keys()
        for name, state in states.items():
            of_keys, of_others = state[: keys.size], state[keys.size :]
            np.testing.assert_allclose(of_keys, optimizer.states[name], rtol=2e-5, atol=2e-5)
            assert (of_others == np.float32(optimizer.rule.states[name])).all()


@pytest.mark.parametrize("options", [{}, TIERS], ids=["hbm", "hybrid in two tiers"])
@pytest.mark.parametrize("in_a_cycle", [False, True], ids=["plain", "in a cycle"])
def test_states_of_an_optimizer_that_is_gone_give_their_memory_back(backend, options, in_a_cycle):
    table, keys = new_table(backend, DIM, **options), np.arange(100)
    table.lookup(keys)
    used, set_aside = table.store.used_bytes, table.store.num_bytes
    gc.disable()  # what is in a cycle is then there until somebody asks
    try:
        for _ in range(4):
            optimizer = Optimizer(Adam(), keys.size)
            optimizer.step = 1
            if in_a_cycle:
                optimizer.itself = optimizer
            take_step(table, optimizer, keys, np.ones((100, DIM)))
            assert (states_of(table, optimizer)["m"] == np.float32(0.1)).all()
            assert (table.store.used_bytes, table.store.num_bytes) == (3 * used, 3 * set_aside)
            assert table.statistics().near_bytes + table.statistics().far_bytes == 3 * used
    finally:
        gc.enable()
    del optimizer
    gc.collect()
    apply_updates([update_of(table, SGD(), [1], [[0, 0, 0]])], 0.1, 1)
    assert (table.store.used_bytes, table.store.state_names) == (used, [])


def adagrads(count, num_keys):
    """Optimizers that are to take their first step."""
    made = [Optimizer(Adagrad(), num_keys) for _ in range(count)]
    for optimizer in made:
        optimizer.step = 1
    return made


def saved_of_two(table, keys):
    """A snapshot with the accumulators of two optimizers, these, and the two of each."""
    table.lookup(keys)
    optimizers = adagrads(2, keys.size)
    for number, optimizer in enumerate(optimizers):
        take_step(table, optimizer, keys, np.full((keys.size, DIM), 1.0 + number))
    saved = [states_of(table, each)["accumulator"] for each in optimizers]
    assert (saved[0] != saved[1]).all()
    return take(table), optimizers, saved


@pytest.mark.parametrize("options", [{}, TIERS], ids=["hbm", "hybrid in two tiers"])
def test_a_restore_gives_copies_to_optimizers_that_are_more_than_were_saved(backend, options):
    table, keys = new_table(backend, DIM, **options), np.arange(40)
    snapshot, old, saved = saved_of_two(table, keys)
    new, other = adagrads(2, keys.size), Optimizer(Momentum(), keys.size)
    other.step = 1
    for optimizer in (*new, other):
        take_step(table, optimizer, keys, np.full((keys.size, DIM), 5.0))
    restore(table, snapshot)
    for optimizers in (old, new):
        for optimizer, expected in zip(optimizers, saved, strict=True):
            np.testing.assert_array_equal(states_of(table, optimizer)["accumulator"], expected)
    assert (states_of(table, other)["momentum"] == 0).all()
    take_step(table, new[0], keys, np.ones((keys.size, DIM)))
    np.testing.assert_array_equal(states_of(table, old[0])["accumulator"], saved[0])


@pytest.mark.parametrize("options", [{}, TIERS], ids=["hbm", "hybrid in two tiers"])
@pytest.mark.parametrize("is_held", [True, False], ids=["held", "gone"])
def test_new_optimizers_have_copies_while_the_old_ones_take_no_step(
    backend, options, is_held, monkeypatch
):
    monkeypatch.setattr(optimizer_states, "_PIECE", 16)
    table, keys = new_table(backend, DIM, **options), np.arange(40)
    snapshot, old, saved = saved_of_two(table, keys)
    restore(table, snapshot)
    if not is_held:
        old.clear()
    nothing = np.zeros((keys.size, DIM))
    new = adagrads(3, keys.size)
    for optimizer in new:
        take_step(table, optimizer, keys, nothing)
    anew = np.full_like(saved[0], 0.1)
    for optimizer, expected in zip(new, [*saved, anew], strict=True):
        np.testing.assert_array_equal(states_of(table, optimizer)["accumulator"], expected)
    for optimizer, expected in zip(old, saved, strict=False):
        np.testing.assert_array_equal(states_of(table, optimizer)["accumulator"], expected)
        take_step(table, optimizer, keys, nothing)
    assert len(table.store.state_names) == (5 if is_held else 3)


@pytest.mark.parametrize("since", ["settled", "settled, the old ones gone", "the old ones went on"])
def test_a_new_optimizer_gets_no_copies_where_states_have_found_their_optimizers(backend, since):
    table, keys = new_table(backend, DIM), np.arange(40)
    snapshot, old, saved = saved_of_two(table, keys)
    if "gone" in since:
        old.clear()
        gc.collect()
    restore(table, snapshot)
    if "settled" in since:
        settle_states(table)
    for optimizer, expected in zip(old, saved, strict=False):
        if "went on" in since:
            take_step(table, optimizer, keys, np.zeros((keys.size, DIM)))
        np.testing.assert_array_equal(states_of(table, optimizer)["accumulator"], expected)
    (new,) = adagrads(1, keys.size)
    take_step(table, new, keys, np.zeros((keys.size, DIM)))
    assert (states_of(table, new)["accumulator"] == np.float32(0.1)).all()


def test_a_copy_that_fails_leaves_nothing_behind(backend, monkeypatch):
    table, keys = new_table(backend, DIM), np.arange(40)
    snapshot, old, saved = saved_of_two(table, keys)
    restore(table, snapshot)
    (new,) = adagrads(1, keys.size)

    def fails(*_):
        raise MemoryError("no more")

    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="no more"):
        patch.setattr(table.store, "read", fails)
        take_step(table, new, keys, np.zeros((keys.size, DIM)))
    assert states_of(table, new) == {}
    take_step(table, new, keys, np.zeros((keys.size, DIM)))
    np.testing.assert_array_equal(states_of(table, new)["accumulator"], saved[0])
    assert len(table.store.state_names) == 3
    assert len(old) == 2


def test_a_rule_that_comes_to_need_one_more_state_keeps_the_others(backend):
    table, keys = new_table(backend, DIM), np.arange(5)
    expected = rows_of(table, keys).astype(np.float64)
    optimizer = Optimizer(RMSprop(), 5)
    optimizer.states["momentum"] = np.zeros((5, DIM))
    for rule, grads in zip(
        [RMSprop(), RMSprop(momentum=0.5), RMSprop()], some_grads(3, 5), strict=True
    ):
        optimizer.rule = rule
        optimizer.refer(expected, grads)
        take_step(table, optimizer, keys, grads)
    np.testing.assert_allclose(rows_of(table, keys), expected, rtol=2e-5, atol=2e-5)
    assert states_of(table, optimizer).keys() == {"rms", "momentum"}


def test_states_that_are_added_together_have_columns_of_their_own():
    store = RowStore(get_backend("cpu"), 2, row_dtype("float32"))
    store.add_states({"m": (2, 0.0)}, StateOwner())
    columns = store.add_states({"m": (2, 1.0), "m (2)": (2, 2.0)}, StateOwner())
    assert [column.state for column in columns] == ["m", "m (2)"]
    assert len({"m", *(column.name for column in columns)}) == 3
    rows = store.allocate(3)
    for column, expected in zip(columns, (1, 2), strict=True):
        assert (store.read(rows, column=column.name) == expected).all()


def test_a_far_file_gives_its_space_back(tmp_path):
    path = tmp_path / "rows"
    store = RowStore(get_backend("cpu"), 64, row_dtype("float32"), near_rows=64, far_path=str(path))
    rows = store.allocate(64 + (1 << 14))
    store.write(rows, np.ones((rows.size, 64), np.float32))
    before = path.stat().st_blocks
    columns = store.add_states({"m": (64, 0.5), "v": (64, 0.0)}, StateOwner())
    assert path.stat().st_blocks >= 2.9 * before
    drop_states(store, columns)
    assert path.stat().st_blocks <= 1.1 * before
    assert (store.read(rows) == 1).all()
    more = store.allocate(1 << 14)
    assert (store.read(more) == 0).all() and (store.read(rows) == 1).all()


# ---- by name

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
    names = [state.rows.name for state in named_states(table)]
    return {name: to_host(table.read_state(name, KEYS)).tolist() for name in names}


def listed(table):
    """Of each state its unique name, that in its optimizer, group, dim, initial value; memory, and
    whether it is used."""
    return [
        (s.rows.name, s.name, s.group, s.dim, s.initial, num_bytes_of(table, s.rows.name))
        + (is_used(table, s.rows.name),)
        for s in named_states(table)
    ]


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
    assert listed(table) == expected
    del optimizers[1]
    assert [name for name, *_ in listed(table)] == ["old", "m", "v", "accumulator"]
    assert not any(used for *_, used in listed(freed(backend, table)))


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
    assert all(used for *_, used in listed(table))


def test_a_name_that_another_group_has_gets_a_number(backend):
    source, _optimizers = trained(backend, Momentum(), Adam())
    table = freed(backend, source)
    before = all_states(table)
    assert rename_state(table, "momentum", "m") == "m (2)"
    assert [each[:3] for each in listed(table)] == [("m (2)", "m", 1), ("m", "m", 2), ("v", "v", 2)]
    assert all_states(table) == {"m (2)": before["momentum"], "m": before["m"], "v": before["v"]}


def test_what_cannot_be_renamed_is_refused(backend):
    table, _optimizers = trained(backend, Adam())
    with pytest.raises(ValueError, match=r"'m' of table .* an optimizer uses it"):
        rename_state(table, "m", "n")
    table = freed(backend, table)
    before = listed(table)
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
    assert listed(table) == before


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


# ---- by key


@pytest.mark.parametrize("options", [{}, TIERS], ids=["hbm", "hybrid in two tiers"])
def test_a_state_of_a_key_without_a_row_is_refused(backend, options):
    table, rows = new_table(backend, DIM, **options), backend.from_host(np.arange(40))
    table.find_or_insert(rows)
    make_states([table], [{"accumulator": (DIM, 0.25)}], None)
    keys = backend.from_host(np.array([1, 50, 51, 50]))
    ones = backend.from_host(np.ones((4, DIM), np.float32))
    with pytest.raises(ValueError, match="cannot be set for 2 of 3 keys"):
        table.assign_state("accumulator", keys, ones)
    with pytest.raises(ValueError, match=r"shape \(4, 3\).*Received: shape \(4, 2\)"):
        table.assign_state("accumulator", keys, ones[:, :2])
    read = backend.to_host(table.read_state("accumulator", rows))
    np.testing.assert_array_equal(read, np.full((40, DIM), 0.25))


def test_states_of_several_tables_are_made_for_each_optimizer(backend):
    tables = [new_table(backend, DIM, name=name) for name in "ab"]
    owner, other = adagrads(2, 0)
    kinds = [{"m": (DIM, 0.0), "v": (DIM, 0.0)}] * 2
    make_states(tables[1:], kinds[1:], owner)
    make_states(tables, kinds, other)
    its = ["m (2)", "v (2)"]
    assert [table.store.state_names for table in tables] == [["m", "v"], ["m", "v", *its]]
    make_states(tables, kinds, owner)
    assert [table.store.state_names for table in tables] == [["m", "v", *its]] * 2
