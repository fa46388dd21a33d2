"""What tables hold, chosen from and put together on the host, beside dicts that do the same."""

import contextlib
import itertools
import json
import logging
from functools import partial
from typing import NamedTuple

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from scripts.bench.common.row_steps import ensure_state
from sok_lite.backend import get_backend
from sok_lite.engine.optimizer_states import State
from sok_lite.engine.owner import HASH, MOD
from sok_lite.engine.table import content as content_module
from sok_lite.engine.table.content import (
    Content,
    concatenate,
    in_order,
    join_states,
    owned_by,
    owns,
    select,
    take,
)
from sok_lite.engine.table.named_arrays import from_named_arrays, named_arrays
from sok_lite.engine.table.restore import restore
from tests.support.filled_tables import KINDS, rows_of, some_keys
from tests.support.helpers import new_table
from tests.support.table_state import State as TableState

CPU, DIM = get_backend("cpu"), 3
# Name, elements, initial value of what an optimizer may keep.
M, V = ("m", DIM, 0.0), ("v", 1, 0.5)


def content_of(keys, number, states=(), columns=("stamps", "scores"), pending=(), key_type="int64"):
    """A part whose every number tells the key and the part it is of."""
    keys, pending = np.sort(np.array(keys, key_type)), np.sort(np.array(pending, np.int64))

    def numbered(of, dim, dtype=np.float32):
        whole = np.arange(dim) + 100 * number + 1000 * of.astype(np.int64)[:, None]
        return whole.astype(dtype)

    dtypes = {"stamps": np.uint32, "scores": np.uint64, "slots": np.int64}
    return Content(
        keys,
        numbered(keys, DIM),
        [
            State(name, dim, initial, numbered(keys, dim), group)
            for group, (name, dim, initial) in states
        ],
        {name: numbered(keys, 1, dtypes[name])[:, 0] for name in columns},
        pending,
        {name: numbered(pending, 1, np.uint32)[:, 0] for name in ("sightings", "sighting_stamps")},
        {"num_lookups": 10 + number, "segment": 8, "num_slots": 64},
    )


def as_dicts(content):
    """{key: (row, {state: row}, {column: number})}, and the same of keys that were seen."""
    keys, values = content.keys.tolist(), content.values
    its = [(s, s.rows) for s in content.states]
    states = [
        {(s.group, s.name, s.dim, s.initial): rows[i].tolist() for s, rows in its}
        for i in range(len(keys))
    ]
    columns = [{n: c[i] for n, c in content.columns.items()} for i in range(len(keys))]
    held = dict(zip(keys, zip(values.tolist(), states, columns, strict=True), strict=True))
    places = enumerate(content.pending_keys.tolist())
    pending = {key: {n: c[i] for n, c in content.pending.items()} for i, key in places}
    assert list(held) == sorted(held) and list(pending) == sorted(pending)
    return held, pending


REPEATED = "What was saved of a table has {:,} keys more than once: of each the last one counts."


@contextlib.contextmanager
def said():
    """What the logger has said; pytest's own fixture is not for hypothesis."""
    texts, log = [], logging.getLogger("sok_lite")
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    log.addHandler(handler)
    try:
        yield texts
    finally:
        log.removeHandler(handler)


some = st.lists(st.integers(0, 12), unique=True, max_size=8)
part = st.tuples(some, st.booleans(), st.booleans(), some)


@given(st.lists(part, min_size=1, max_size=4))
def test_parts_together_are_a_dict_of_all_their_keys(parts):
    contents = [
        content_of(keys, number, [(1, M), (1, V)] if has_states else [], names, pending)
        for number, (keys, has_states, has_scores, pending) in enumerate(parts)
        for names in [["stamps", "scores", "slots"] if has_scores else ["stamps"]]
    ]
    with said() as texts:
        whole = concatenate(contents, "a table", last_counts=True)
    held, pending = as_dicts(whole)
    all_states = {(1, *state): [state[2]] * state[1] for state in (M, V)}
    has_states = any(states for _, states, *_ in parts)
    has_scores = all(has for keys, _, has, _ in parts if keys)
    expected, expected_pending = {}, {}
    for each in contents:
        its_held, its_pending = as_dicts(each)
        for key, (row, states, columns) in its_held.items():
            states = {**all_states, **states} if has_states else {}
            is_kept = {"stamps": True, "scores": has_scores, "slots": len(parts) == 1}
            columns = {name: column for name, column in columns.items() if is_kept[name]}
            expected[key] = (row, states, columns)
        expected_pending |= its_pending
    assert held == expected
    assert pending == expected_pending
    num_repeated = sum(len(keys) for keys, *_ in parts) - len(expected)
    assert texts == [REPEATED.format(num_repeated)] * (num_repeated > 0)
    if len(parts) > 1:
        assert whole.facts == {"num_lookups": 9 + len(parts)}


def test_a_key_of_two_parts_is_refused_where_none_counts():
    parts = [content_of([1, 2, 5], 0), content_of([], 1), content_of([2, 5, 7], 2)]
    with pytest.raises(ValueError, match=r"of table 't' is corrupt: its parts have 2 keys in comm"):
        concatenate(parts, "table 't'")
    whole = concatenate([parts[0], parts[1]], "table 't'")
    assert as_dicts(whole) == as_dicts(parts[0])


def test_states_are_one_where_those_of_their_optimizer_are():
    """Numbers of optimizers are those of their part; free states are one by their name alone."""
    free = (None, ("w", 1, 2.0))
    first = content_of([1], 0, [(1, M), (2, M), (2, V), free])
    second = content_of([2], 1, [(1, M), (1, V), (2, M)])
    states = concatenate([first, second], "a table").states
    assert [(s.group, s.name) for s in states] == [(None, "w"), (1, "m"), (2, "m"), (2, "v")]
    of_keys = {(s.group, s.name): s.rows[:, 0].tolist() for s in states}
    assert of_keys[None, "w"] == [1000, 2.0]
    assert of_keys[1, "m"] == of_keys[2, "m"] == of_keys[2, "v"] == [1000, 2100]


@given(some, some, st.integers(1, 4))
def test_the_keys_of_all_ranks_are_all_keys(keys, pending, size):
    whole = content_of(keys, 3, [(1, M)], ["stamps", "slots"], pending, key_type="uint64")

    def are_own(of, rank):
        assert of.dtype == np.uint64
        return of % np.uint64(size) == rank

    held, seen = {}, {}
    for rank in range(size):
        part = owned_by(whole, partial(are_own, rank=rank))
        if len(part.keys) < len(whole.keys):
            assert "slots" not in part.columns and "num_slots" not in part.facts
            assert part.facts["num_lookups"] == 13
        its_held, its_seen = as_dicts(part._replace(columns={}))
        assert not its_held.keys() & held.keys()
        assert all(key % size == rank for key in (*its_held, *its_seen))
        held |= its_held
        seen |= its_seen
    assert (held, seen) == as_dicts(whole._replace(columns={}))


@pytest.mark.parametrize("owner", [MOD, HASH])
@pytest.mark.parametrize("key_type", ["int64", "int32", "uint64"])
def test_every_key_is_of_one_rank(owner, key_type):
    table, keys = new_table(CPU, DIM, key_type=key_type, owner=owner), some_keys(60, key_type)
    expected = owner.owners(table.key_dtype.to_int64(np, keys), 3, table.key_dtype)
    for rank in range(3):
        np.testing.assert_array_equal(owns(table, rank, 3)(keys), expected == rank)
    assert owns(table, 0, 1)(keys).all()


@given(st.permutations(range(7)))
def test_keys_come_in_order_and_keep_their_slots(order):
    whole = content_of(range(7), 1, [(1, V)], ["stamps", "slots"], range(7))
    mixed = select(whole, np.array(order), np.array(order[::-1]))
    assert mixed.facts == whole.facts
    assert as_dicts(in_order(mixed)) == as_dicts(whole)
    assert in_order(whole) is whole


@given(some, some, st.booleans())
def test_named_arrays_say_all(keys, pending, is_hybrid):
    names = ["stamps", "scores", "slots"] if is_hybrid and keys else ["stamps"]
    content = content_of(keys, 2, [(None, V), (2, M)], names, pending)
    arrays = named_arrays(content)
    assert json.loads(arrays["facts"]) == content.facts
    for text in ("facts", "state_columns"):
        arrays[text] = arrays[text].encode()
    again = from_named_arrays(arrays, "a table")
    assert as_dicts(again) == as_dicts(content) and again.facts == content.facts
    assert {n: c.dtype for n, c in again.columns.items()} == {
        n: c.dtype for n, c in content.columns.items()
    }
    assert all(column.dtype == np.uint32 for column in again.pending.values())


@pytest.mark.cases("name")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("stamps", "3 stamps for 4 keys"),
        ("values", "3 values for 4 keys"),
        ("states", "3 rows of state 'm' for 4 keys"),
        ("scores", "3 scores for 4 keys"),
        ("slots", "3 slots for 4 keys"),
        ("sightings", "1 sightings for 2 keys"),
    ],
)
def test_arrays_of_other_lengths_are_corrupt(name, reason):
    arrays = named_arrays(content_of(range(4), 0, [(1, M)], ["stamps", "scores", "slots"], [8, 9]))
    with pytest.raises(ValueError, match=f"^What was saved of table 't' is corrupt: {reason}"):
        from_named_arrays({**arrays, name: arrays[name][:-1]}, "table 't'")


@pytest.mark.parametrize("key_type", ["int64", "int32", "uint64"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_table_goes_on_from_what_was_taken(backend, monkeypatch, kind, key_type):
    monkeypatch.setattr(content_module, "_CHUNK_BYTES", 100)  # on a GPU, rows come in pieces
    keys, rows = some_keys(45, key_type), rows_of(45, DIM)
    table = new_table(backend, DIM, key_type=key_type, **KINDS[kind])
    table.insert_or_assign(backend.from_host(keys[:40]), backend.from_host(rows[:40]))
    table.find_or_insert(backend.from_host(keys[30:]))
    ensure_state(table.store, "m", 0.25)
    ensure_state(table.store, "w", 0.5, 1)
    some_states = rows_of(20, DIM + 1, seed=1)
    table.assign_state("m", keys[:20], backend.from_host(some_states[:, 1:].copy()))
    table.assign_state("w", keys[:20], backend.from_host(some_states[:, :1].copy()))
    other = new_table(backend, DIM, key_type=key_type, **KINDS[kind])
    other.find_or_insert(backend.from_host(keys[:1]))
    content = take(table)
    assert all(type(array) is np.ndarray for array in (content.keys, content.values))
    arrays = named_arrays(content)
    # TensorFlow takes these over: there is no second copy.
    for rows in (arrays["values"], arrays["states"]):
        assert rows.ctypes.data % 64 == 0 and rows.flags.c_contiguous
    assert np.shares_memory(arrays["states"], content.states[1].rows)
    before, spans = TableState.of(table), table.clock.spans
    table.clear()  # nothing is a view of it
    restore(other, from_named_arrays(arrays, "a table"))
    after = TableState.of(other)
    assert other.clock.spans == spans
    assert (after.rows, after.seen, after.pending) == (before.rows, before.seen, before.pending)
    assert (after.now, after.epoch) == (before.now, before.epoch)


# -------------------------------------------------------------------- which states are one


class Kind(NamedTuple):
    name: str
    group: int | None
    dim: int = 2
    initial: float = 0.0


def joined(*parts):
    """[(names and parts of a group's states)], as texts such as "m01 v1"; the last is the free one.

    Args:
      parts: texts such as "m v/m/a?": groups of states, "?" after those that belong to none.
    """
    lists = [
        [
            Kind(name.rstrip("?"), None if "?" in name else number)
            for number, group in enumerate(part.split("/"), start=1)
            for name in group.split()
        ]
        for part in parts
    ]
    found = join_states(lists)
    for state in found:
        assert all(lists[i][place].name == state.name for i, place in state.places.items())
    found.sort(key=lambda state: state.group or 99)
    return [
        " ".join(state.name + "".join(map(str, state.places)) for state in states)
        + ("?" if number is None else "")
        for number, states in itertools.groupby(found, lambda state: state.group)
    ]


@pytest.mark.parametrize(
    "parts, expected",
    [
        (["m v", "m v"], ["m01 v01"]),
        (["m v", "v m"], ["m01 v01"]),
        (["m", ""], ["m0"]),
        (["", "m"], ["m1"]),
        (["m/m", "m/m"], ["m01", "m01"]),
        (["m/m", "m"], ["m01", "m0"]),
        (["m/m v", "m v/m"], ["m01", "m01 v01"]),
        (["m/m v", "m v"], ["m0", "m01 v01"]),
        (["m", "m v"], ["m01 v1"]),
        (["m v", "m"], ["m01 v0"]),
        (["m", "m v/a"], ["m01 v1", "a1"]),
        (["m v", "a"], ["m0 v0", "a1"]),
        (["m", "m v", "m"], ["m012 v1"]),
        (["m?", "m"], ["m10"]),
        (["m", "m?"], ["m01"]),
        (["m? v?", "m/v"], ["m10", "v10"]),
        (["m?", "m?"], ["m01?"]),
        (["m m?", "m"], ["m01", "m0?"]),
        (["m? a?", "m v"], ["m10 v1", "a0?"]),
    ],
)
def test_states_are_one_by_what_their_groups_have(parts, expected):
    assert joined(*parts) == expected


def test_states_of_other_lengths_or_beginnings_are_others():
    kinds = [{}, {"dim": 3}, {"initial": 1.0}]
    parts = [[Kind("m", 1, **kind)] for kind in kinds]
    assert [state.places for state in join_states(parts)] == [{0: 0}, {1: 0}, {2: 0}]
