"""A table is given parts that are read piece by piece, beside dicts that are given the same."""

import tracemalloc

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from sok_lite.backend import get_backend
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine.files import saved_file
from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.load import load
from sok_lite.engine.table import restore as restore_module
from sok_lite.engine.table.content import SavedPart, SavedParts, SavedRows
from sok_lite.engine.table.content import State as OptimizerState
from sok_lite.engine.table.restore import restore
from tests.conftest import QUICK
from tests.support.helpers import new_table
from tests.support.index_entries import entries_of
from tests.support.table_audit import audit
from tests.support.table_state import State

DIM, INT64, ONE = 3, np.iinfo(np.int64), SingleCommunicator()
ROOMY = {"var_type": "hybrid", "init_capacity": 16, "max_capacity": 1024}
NEAR = 8  # rows
TIERS = {"max_hbm_for_vectors": NEAR * 4 * DIM / 2**30}
KINDS = {
    "hbm": {"var_type": "hbm"},
    "kLru in tiers": ROOMY | TIERS,
    "kLfu": ROOMY | {"evict_strategy": "kLfu", "enter_threshold": 2},
    "kLfu in tiers": ROOMY | TIERS | {"evict_strategy": "kLfu"},
}


def numbers_of(keys, number):
    """What tells a key and the file that it is of."""
    return np.array([hash((key, number)) % 50 + 1 for key in keys.tolist()], np.int64)


def rows_of(keys, number):
    return (100 * number + numbers_of(keys, number)[:, None] + np.arange(DIM)).astype(np.float32)


class File(SavedRows):
    """Keys and rows of a number; the state is there or not."""

    def __init__(self, keys, number, step, has_state):
        self.keys, self.number, self.step = np.array(keys, np.int64), number, step
        self.has_state = has_state

    def pieces(self, array, wanted=None):
        pieces = [array[i : i + self.step] for i in range(0, len(array), self.step)]
        return iter(pieces if wanted is None else [pieces[i] for i in wanted])

    def read(self, name, wanted=None):
        if name == "keys":
            return self.pieces(self.keys, wanted)
        if name == 0 and not self.has_state:
            return iter(())
        return self.pieces(rows_of(self.keys, self.number) * (-1 if name == 0 else 1), wanted)


class Made(File, SavedPart):
    """A part whose last keys have their rows in older files."""

    def __init__(self, keys, number, step, has_state, later, older, pending):
        super().__init__(keys, number, step, has_state)
        self.with_rows, self.pending = self.keys, np.array(pending, np.int64)
        self.states = [OptimizerState("m", DIM, 0.5, None, 1)] if has_state else []
        self.columns, self.facts = ("stamps", "scores"), {"num_lookups": 40}
        self.facts |= {"strategy": "kLfu", "epoch": 0}
        self.later, self.older = np.array(later, np.int64), older
        self.num_with_rows = -(-len(keys) // step) if older else None
        self.num_keys = len(keys) + len(later)

    def all_keys(self):
        return np.concatenate([self.keys, self.later])

    def read(self, name, wanted=None):
        if name in ("value", 0):
            return super().read(name, wanted)
        if "sight" in name:
            arrays = {"sighted_keys": self.pending, "sightings": numbers_of(self.pending, 7)}
            array = arrays.get(name, numbers_of(self.pending, 8) % 40)
            return self.pieces(array if name == "sighted_keys" else array.astype(np.uint32))
        dtype = {"keys": np.int64, "stamps": np.uint32, "scores": np.uint64}[name]
        parts = [self.keys, self.later]
        if name != "keys":
            parts = [numbers_of(part, len(name) + self.number) for part in parts]
        return iter([piece.astype(dtype) for part in parts for piece in self.pieces(part)])


def restored(parts, owns):
    """{key: (row, state, stamp, score)} of all that counts; None: a key has no row."""
    result = {}
    for part in parts:
        stamps, scores = (
            numbers_of(part.all_keys(), len(name) + part.number) for name in ("stamps", "scores")
        )
        new = []
        for i, key in enumerate(part.all_keys().tolist()):
            if not owns(np.array([key]))[0] or key in result:
                continue
            new.append(key)
            result[key] = [None, None, min(int(stamps[i]), 40), int(scores[i]), i < part.keys.size]
        for file in (part, *part.older):
            rows = rows_of(file.keys, file.number)
            for key, row in zip(file.keys.tolist(), rows.tolist(), strict=True):
                is_here = key in new and result[key][0] is None
                if is_here and (file is part or not result[key][4]):
                    has_state = file.has_state and part.has_state
                    result[key][:2] = row, [-x for x in row] if has_state else [0.5] * DIM
        if any(result[key][0] is None for key in new):
            return None
    return {key: tuple(whole[:4]) for key, whole in result.items()}


KEYS = st.sampled_from([*range(-20, 30), INT64.max, INT64.min, INT64.max - 1])
FILES = st.lists(st.tuples(st.lists(KEYS, max_size=20, unique=True), st.booleans()), max_size=2)
PART = st.tuples(
    *(st.lists(KEYS, max_size=30), st.lists(KEYS, max_size=6), FILES, st.booleans()),
    st.lists(KEYS, max_size=6),
)


def made_of(drawn, step):
    parts = []
    for number, (keys, later, older, has_state, pending) in enumerate(drawn):
        files = [File(some, 10 + 5 * number + i, step, has) for i, (some, has) in enumerate(older)]
        parts.append(Made(keys, number, step, has_state, later if files else [], files, pending))
    return parts


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15 if QUICK else 100)
@given(st.lists(PART, min_size=1, max_size=3), st.sampled_from([1, 2, 7]), st.booleans())
def test_parts_are_restored_as_into_dicts(kind, drawn, step, is_foreign):
    table = new_table(get_backend("cpu"), DIM, **KINDS[kind])
    table.find_or_insert([1, 2, 100])
    parts = made_of(drawn, step)

    def owns(keys):
        return keys % 3 > 0 if is_foreign else np.ones(keys.size, bool)

    for part in parts:
        part.owns = owns if is_foreign else None
    has_state = any(part.has_state for part in parts)
    expected, before = restored(parts, owns), State.of(table)
    if expected is None:
        with pytest.raises(ValueError, match="of its keys have no row there"):
            restore(table, SavedParts.of(parts))
        assert State.of(table) == before
        return
    restore(table, SavedParts.of(parts))
    audit(table)
    keys, values = table.export()
    numbers, held = table.find(keys).tolist(), entries_of(table)
    assert dict(zip(keys.tolist(), values.tolist(), strict=True)) == {
        key: whole[0] for key, whole in expected.items()
    }
    assert table.store.state_names == ["m"] * has_state
    if has_state:
        states = table.read_state("m", keys).tolist()
        assert dict(zip(keys.tolist(), states, strict=True)) == {
            key: whole[1] for key, whole in expected.items()
        }
    at = 3 if "kLfu" in kind else 2
    scores = {key: whole[at] for key, whole in expected.items()}
    assert dict(zip(held.keys.tolist(), held.scores.tolist(), strict=True)) == scores
    assert held.last_seen.tolist() == [expected[key][2] for key in held.keys.tolist()]
    if "tiers" in kind:
        near = [scores[key] for key, row in zip(keys.tolist(), numbers, strict=True) if row < NEAR]
        assert sorted(near, reverse=True) == sorted(scores.values(), reverse=True)[:NEAR]
    if table.var_type == "hybrid" and table.pending is not None:
        seen = {}
        for part in parts:
            for key, count in zip(part.pending.tolist(), numbers_of(part.pending, 7), strict=True):
                if owns(np.array([key]))[0] and key not in expected:
                    seen.setdefault(key, int(count))
        pending, counts, _ = table.pending.entries()[:3]
        assert dict(zip(pending.tolist(), counts.tolist(), strict=True)) == seen


def test_rows_of_an_older_file_are_not_those_of_another_parts_key(monkeypatch):
    """Key 105 is of the second part, though a file that the first one continues has it as well."""
    monkeypatch.setitem(globals(), "numbers_of", lambda keys, number: keys + 1)
    table, older = new_table(get_backend("cpu"), DIM, **KINDS["kLru in tiers"]), [105, 0]
    # By the order in which it came, 105 has the number of the row that 0 gets for its low score.
    first = Made(range(1, 11), 0, 20, False, [0], [File(older, 9, 1, False)], [])
    second = Made(range(100, 106), 1, 20, False, [], [], [])
    restore(table, SavedParts.of([first, second]))
    rows = table.store.read(table.find([0, 105]))
    assert rows[:, 0].tolist() == [901, 206]


def peak_of(call, table):
    """Bytes a key that a call has beside the table which it fills, at most."""
    tracemalloc.start()
    try:
        call()
        now, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return (peak - now) / table.size


@pytest.mark.parametrize(
    ("how", "most"), [("as it was", 2), ("merged", 6), ("in tiers", 6), ("increments", 4)]
)
def test_a_load_has_few_bytes_a_key_beside_the_table(tmp_path, monkeypatch, how, most):
    n, piece = 100_000, 1 << 13
    monkeypatch.setattr(restore_module, "_ROWS_AT_ONCE", piece // 4)
    monkeypatch.setattr(saved_file, "CHUNK_BYTES", piece)
    monkeypatch.setattr("sok_lite.engine.files.item.CHUNK_BYTES", 4 * piece)
    monkeypatch.setattr(restore_module, "_SLOTS_AT_ONCE", piece // 16)
    monkeypatch.setattr(restore_module, "_RADIX_BITS", 8)
    kind = {}
    if how == "in tiers":
        kind = ROOMY | {"max_capacity": 1 << 19, "max_hbm_for_vectors": 4 * DIM * n / 2**31}
    table, other = (new_table(get_backend("cpu"), DIM, **kind) for _ in range(2))
    keys = np.random.default_rng(0).permutation(n)
    table.insert_or_assign(keys, rows_of(keys, 0))
    for step in (2, 4) if how == "in tiers" else ():  # of the scores in the middle some come near
        table.lookup(np.arange(0, n, step))
    dump(tmp_path, [table], ONE, chunk_bytes=piece)
    table.lookup([])
    if how == "increments":
        table.lookup(np.arange(0, n, 3))
        dump(tmp_path, [table], ONE, chunk_bytes=piece, incremental=True)
    if how == "merged":
        other.find_or_insert(np.arange(n // 2, n + n // 2))
    mode = "merge" if how == "merged" else "replace"
    assert peak_of(lambda: load(tmp_path, [other], ONE, mode), other) < most
    assert other.size == (n if how != "merged" else n + n // 2)
    np.testing.assert_array_equal(other.store.read(other.find(keys)), rows_of(keys, 0))
