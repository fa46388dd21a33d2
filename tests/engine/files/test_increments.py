"""A dump and the increments that follow it come back as exactly the table that was dumped."""

import tempfile
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scripts.bench.common.row_steps import ensure_state
from sok_lite.backend import get_backend
from sok_lite.comm import run_ranks
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine.files import manifest
from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.load import load
from sok_lite.engine.optimizer_states import named_states, rename_state
from sok_lite.engine.optimizers import Adagrad, Momentum
from sok_lite.engine.table import content
from sok_lite.engine.table.content import take
from sok_lite.engine.table.record import LAST_LOOKUP_NUMBER
from sok_lite.engine.table.restore import restore
from tests.conftest import QUICK
from tests.support.helpers import new_table, sized, update_of
from tests.support.steps import apply_updates

ONE = SingleCommunicator()
I64 = np.iinfo(np.int64)
HYBRID = {
    "var_type": "hybrid",
    "init_capacity": 16,
    "max_capacity": 64,
    "max_bucket_size": 16,
    "on_refused": "ignore",
}
KINDS = {
    "hbm": {},
    "kLru": HYBRID | {"evict_strategy": "kLru"},
    "sightings": HYBRID | {"evict_strategy": "kLfu", "enter_threshold": 2},
    "kEpochLru": HYBRID | {"evict_strategy": "kEpochLru"},
    "tiers": HYBRID | {"evict_strategy": "kCustomized", "max_hbm_for_vectors": 8 * 12 / 2**30},
}


class Optimizer:
    """What states belong to."""


def contents(table):
    """All that a checkpoint keeps of a table, but for which of its slots are where in memory."""
    saved = take(table)
    pending = [saved.pending_keys.tolist(), *(each.tolist() for each in saved.pending.values())]
    named = [(s.name, s.dim, s.initial, s.group, s.rows.tolist()) for s in saved.states]
    kept = [saved.keys.tolist(), {name: each.tolist() for name, each in saved.columns.items()}]
    return kept, pending, saved.facts, saved.values.tolist(), named


def loaded(path, kind, backend=None, **options):
    table = new_table(backend or get_backend("cpu"), 3, **(KINDS[kind] | options))
    load(path, [table], ONE)
    return table


def dumped_in_full(path):
    """Whether a checkpoint has no increments."""
    found = manifest.read(str(path))
    return not any(shard.before for facts in found.tables.values() for shard in facts.shards)


def num_rows(path, name="table"):
    """The rows of each file of the only part of a table, oldest first."""
    (shard,) = manifest.read(str(path)).tables[name].shards
    return [part.num_rows for part in shard.chain]


# -------------------------------------------------------------------- any sequence of calls


@contextmanager
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class Changes:
    """Changes a table in all ways: by CHANGES, with keys and a small number."""

    def __init__(self, table):
        self.table, self.optimizers, self.num_halvings = table, {}, 0
        table.clock.prepare_restart(1000)()  # so that no stamp is halved to 0, which means none
        table.lookup(np.arange(-20, 20))

    def rows(self, keys):
        rng = np.random.default_rng(len(keys) + self.table.num_lookups)
        return rng.standard_normal((len(keys), 3)).astype(np.float32)

    def scores(self, keys, n):
        return np.full(len(keys), self.table.num_lookups * n // 9, np.uint64)

    def accum_or_assign(self, keys, n):
        keys = np.unique(keys)
        self.table.accum_or_assign(keys, self.rows(keys), self.table.contains(keys))

    def assign_state(self, keys, n):
        keys = keys[self.table.contains(keys)]
        ensure_state(self.table.store, "free", 0.5, 1)
        self.table.assign_state("free", keys, self.rows(keys)[:, :1])

    def update(self, keys, n):
        rule = [Momentum(momentum=0.5), Adagrad(), Momentum(momentum=0.5)][n % 3]
        keys = np.unique(keys)
        grads = self.rows(keys)
        optimizer = self.optimizers.setdefault(n % 3, Optimizer())
        apply_updates([update_of(self.table, rule, keys, grads, optimizer=optimizer)], 0.1, 1)

    def rename_a_state(self, keys, n):
        states, new = named_states(self.table), f"{n}{len(keys)}"
        names = [state.rows.name for state in states if not state.rows.is_used]
        taken = {text for state in states for text in (state.rows.name, state.name)}
        if names and new not in taken:  # it would be refused
            rename_state(self.table, names[n % len(names)], new)

    def set_epoch(self, keys, n):
        if hasattr(self.table, "options"):
            self.table.epoch += 1

    def halve_the_numbers_of_lookups(self, keys, n):
        if n == 0 and self.num_halvings < 5:
            self.table.clock.now = LAST_LOOKUP_NUMBER
            self.table.find_or_insert([])
            self.num_halvings += 1

    def restore(self, keys, n):
        if n % 3 == 0:
            taken = take(self.table)
            self.table.insert_or_assign(keys, self.rows(keys))
            restore(self.table, taken)


CHANGES = {name: change for name, change in vars(Changes).items() if name[0] != "_"}
del CHANGES["rows"], CHANGES["scores"]
CHANGES |= {
    "look_up": lambda c, keys, n: c.table.lookup(keys),
    "look_up_many": lambda c, keys, n: c.table.lookup(np.arange(30 * n - 100, 45 * n - 50)),
    "read": lambda c, keys, n: c.table.lookup(keys, insert=False),
    "assign": lambda c, keys, n: c.table.assign(keys, c.rows(keys)),
    "accumulate": lambda c, keys, n: c.table.accumulate(keys, c.rows(keys)),
    "insert_or_assign": lambda c, keys, n: c.table.insert_or_assign(keys, c.rows(keys)),
    "insert_scored": lambda c, k, n: c.table.insert_or_assign(k, c.rows(k), c.scores(k, n)),
    "assign_scores": lambda c, keys, n: c.table.assign_scores(keys, c.scores(keys, n)),
    "drop_an_optimizer": lambda c, keys, n: c.optimizers.pop(n % 3, None),
    "erase": lambda c, keys, n: c.table.erase(keys),
    "expire": lambda c, keys, n: c.table.expire(num_lookups=n),
    "clear": lambda c, keys, n: n % 3 or c.table.clear(),
    "reserve": lambda c, keys, n: c.table.reserve(40 * n),
}


OFTEN = ("look_up", "look_up_many", "update", "update", "update", "erase", "assign", "accumulate")
KEYS = st.lists(st.sampled_from([*range(-30, 50), I64.max, I64.min, I64.max - 1]), max_size=20)
CHANGE = st.tuples(st.sampled_from([*CHANGES, *OFTEN]), KEYS, st.integers(0, 9))
# Some changes, a dump, and whether a new process goes on from it.
ROUND = st.tuples(
    st.lists(CHANGE, min_size=1, max_size=4),
    st.sampled_from([("a", True), ("a", True), ("a", True), ("a", False), ("b", True)]),
    st.sampled_from([False, False, False, True]),
)


# An optimizer begins with a copy of what a restore gave another: no increment has its rows.
COPIED_STATES = [
    *[([("look_up", [], 0)], ("a", True), False)] * 3,
    ([("update", [-30], 2), ("look_up", [], 0), ("restore", [], 0)], ("a", True), False),
    ([("update", [], 0)], ("a", True), False),
]


@settings(max_examples=8 if QUICK else 40)
@given(rounds=st.lists(ROUND, min_size=5, max_size=8))
@example(rounds=COPIED_STATES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_dumped_in_parts_comes_back_whole(kind, rounds):
    changes = Changes(new_table(get_backend("cpu"), 3, **KINDS[kind]))
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for some, (name, incremental), restarts in rounds:
            for what, keys, n in some:
                CHANGES[what](changes, np.array(keys, np.int64), n)
            path, table = Path(folder) / name, changes.table
            dump(path, [table], ONE, chunk_bytes=200, incremental=incremental)
            other = loaded(path, kind)
            assert contents(other) == contents(table)
            if restarts:
                changes.table, changes.optimizers = other, {}


# -------------------------------------------------------------------- what an increment has


@pytest.mark.parametrize("kind", KINDS)
def test_an_increment_has_the_rows_that_have_changed(backend, tmp_path, kind):
    table, n = new_table(backend, 3, **KINDS[kind]), sized(backend, 33, 9)
    for _ in range(2):  # of two sightings one is not enough where they count
        table.insert_or_assign(np.arange(n), rows_of(n))
    dump(tmp_path, [table], ONE, chunk_bytes=100, incremental=True)  # the first has everything
    assert num_rows(tmp_path) == [n]
    table.lookup([])  # nothing after it is of the lookup before
    dump(tmp_path, [table], ONE, incremental=True)  # which counts as well
    table.lookup([])
    dump(tmp_path, [table], ONE, incremental=True)
    table.assign([1, 5, -7], rows_of(3))
    table.erase([2, 3])
    dump(tmp_path, [table], ONE, {"step": 7}, chunk_bytes=100, incremental=True)
    assert num_rows(tmp_path) == [n, n, 0, 2]
    before, other = contents(table), new_table(backend, 3, **KINDS[kind])
    assert load(tmp_path, [other], ONE) == {"step": 7}
    assert contents(other) == before
    assert len(list(tmp_path.glob("data-*"))) == 4
    dump(tmp_path, [table], ONE)  # and this makes one of all
    assert num_rows(tmp_path) == [n - 2]
    assert len(list(tmp_path.glob("data-*"))) == 1
    assert contents(loaded(tmp_path, kind, backend)) == before


def rows_of(n, seed=0):
    return np.random.default_rng(seed).standard_normal((n, 3)).astype(np.float32)


@pytest.mark.parametrize("changes_row", [True, False])
def test_a_state_that_was_renamed_goes_on(tmp_path, changes_row):
    table = new_table(get_backend("cpu"), 3)
    table.lookup(np.arange(9))
    ensure_state(table.store, "free", 0.5, 1)
    table.assign_state("free", [1, 2], np.array([[1], [2]], np.float32))
    dump(tmp_path, [table], ONE)
    table.lookup([])
    rename_state(table, "free", "m")
    if changes_row:
        table.assign_state("m", [2], np.array([[3]], np.float32))
    for n in (2, 3):
        with no_warning():
            dump(tmp_path, [table], ONE, incremental=True)
        assert len(num_rows(tmp_path)) == n
        assert contents(loaded(tmp_path, "hbm")) == contents(table)


def test_progress_counts_the_files_of_before(tmp_path):
    table = new_table(get_backend("cpu"), 3)
    table.lookup(np.arange(100))
    dump(tmp_path, [table], ONE, chunk_bytes=64)
    table.lookup([])
    table.lookup(np.arange(90))  # so of the file before some chunks are not read
    dump(tmp_path, [table], ONE, chunk_bytes=64, incremental=True)
    reports = []
    load(
        tmp_path, [new_table(get_backend("cpu"), 3)], ONE, report=lambda *each: reports.append(each)
    )
    done, totals = zip(*reports, strict=True)
    size = sum(file.stat().st_size for file in tmp_path.glob("data-*/*"))
    assert set(totals) == {size} == {done[-1]} and list(done) == sorted(done)


@pytest.mark.parametrize("ranks", [1, 3])
def test_another_number_of_ranks_reads_increments_and_merges_them(tmp_path, ranks):
    keys, rows = np.arange(-20, 21), rows_of(41)

    def write(comm):
        table, optimizer = new_table(get_backend("cpu"), 3), Optimizer()
        mine = keys[keys % comm.size == comm.rank]
        table.insert_or_assign(mine, rows[mine])
        dump(tmp_path, [table], comm, incremental=True)
        table.lookup([])
        if comm.rank == 1:
            table.erase([1, 3])
            table.insert_or_assign([5], rows_of(1, 9))
        dump(tmp_path, [table], comm, incremental=True)
        table.insert_or_assign([3, 7] if comm.rank == 1 else [], rows_of(2 * comm.rank, 8))
        if comm.rank == 0:
            update = update_of(table, Adagrad(), [4], np.zeros((1, 3)), optimizer=optimizer)
            apply_updates([update], 0.1, 1)
        dump(tmp_path, [table], comm, incremental=True)

    def read(comm, mode):
        table = new_table(get_backend("cpu"), 3)
        table.insert_or_assign([100 * comm.size + comm.rank, comm.rank], np.ones((2, 3)))
        load(tmp_path, [table], comm, mode)
        found, values = table.export()
        assert (found % comm.size == comm.rank).all()
        return dict(zip(found.tolist(), values.tolist(), strict=True))

    run_ranks(2, write)
    expected = dict(zip(keys.tolist(), rows[keys].tolist(), strict=True))
    del expected[1]
    expected[5] = rows_of(1, 9)[0].tolist()
    expected |= dict(zip([3, 7], rows_of(2, 8).tolist(), strict=True))
    for mode in ("replace", "merge"):
        parts = run_ranks(ranks, lambda comm: read(comm, mode))  # noqa: B023
        found = {key: row for part in parts for key, row in part.items()}
        own = {100 * ranks + rank: [1.0] * 3 for rank in range(ranks)}
        own |= {rank: [1.0] * 3 for rank in range(ranks) if rank == 1}  # it was erased
        assert found == (expected if mode == "replace" else own | expected)


# -------------------------------------------------------------------- all anew, and why


def changed(tmp_path, **options):
    """A table that was dumped, and has changed since."""
    table = new_table(get_backend("cpu"), 3, **options)
    table.lookup(np.arange(9))
    dump(tmp_path, [table], ONE)
    table.lookup([3])
    return table


def halve(table, path):
    table.clock.now = LAST_LOOKUP_NUMBER
    table.lookup([])


def rewrite(pattern, change):
    def change_file(table, path):
        (file,) = path.glob(pattern)
        data = change(file.read_bytes())
        file.unlink()
        if data is not None:
            file.write_bytes(data)

    return change_file


# What happens before an increment; what returns a table has that one dumped.
REASONS = {
    "another process wrote it": lambda table, path: changed(path.parent / "other"),
    "cannot tell": lambda table, path: dump(path, [loaded(path, "hbm")], ONE, incremental=True),
    "was restored": lambda table, path: restore(table, take(table)),
    "the table was restored": lambda table, path: load(path, [table], ONE, mode="merge") and None,
    "counted anew": halve,
    "given scores": lambda table, path: table.assign_scores([3], [1]) and None,
    "is missing": rewrite("data-*/*", lambda data: None),
    "the length": rewrite("data-*/*", lambda data: data[:-1]),
    "is corrupt": rewrite("manifest.json", lambda data: data.replace(b"9", b"8")),
    "was another one": lambda table, path: changed(path.parent / "other", dtype="float16"),
    "of other tables: 'table'": lambda table, path: changed(path.parent / "other", name="b"),
}


@pytest.mark.parametrize("reason", REASONS)
def test_what_cannot_be_continued_is_dumped_anew(tmp_path, reason):
    path = tmp_path / "c"
    table = changed(path)
    table = REASONS[reason](table, path) or table
    with pytest.warns(RuntimeWarning, match=f"All is dumped into .*{reason}"):
        dump(path, [table], ONE, incremental=True)
    assert dumped_in_full(path)
    other = new_table(get_backend("cpu"), 3, name=table.name, dtype=table.row_dtype.name)
    load(path, [other], ONE)
    assert contents(other) == contents(table)
    with no_warning():
        dump(path, [table], ONE, incremental=True)
    assert not dumped_in_full(path)


def test_scores_that_decay_go_on_in_increments(backend, tmp_path):
    table = new_table(backend, 3, "hybrid", evict_strategy="kLfu")
    for _ in range(4):
        table.lookup(np.arange(9))
    dump(tmp_path, [table], ONE)
    table.decay_scores(0.5)
    with no_warning():
        dump(tmp_path, [table], ONE, incremental=True)
    assert not dumped_in_full(tmp_path)
    other = new_table(backend, 3, "hybrid", evict_strategy="kLfu")
    load(tmp_path, [other], ONE)
    assert contents(other) == contents(table)
    assert backend.to_host(other.scores(np.arange(9))).tolist() == [2] * 9


def test_dumps_elsewhere_do_not_matter(tmp_path):
    table = changed(tmp_path / "a")
    dump(tmp_path / "b", [table], ONE)
    table.lookup([])
    dump(tmp_path / "b", [table], ONE, incremental=True)
    table.insert_or_assign([4], rows_of(1))
    with no_warning():
        for name in "ab":
            dump(tmp_path / name, [table], ONE, incremental=True)
    assert num_rows(tmp_path / "a") == [9, 9] and num_rows(tmp_path / "b") == [9, 1, 1]
    for name in "ab":
        assert contents(loaded(tmp_path / name, "hbm")) == contents(table)


def test_ranks_dump_anew_together(tmp_path):
    def program(comm):
        table = new_table(get_backend("cpu"), 3)
        table.lookup(np.arange(comm.rank, 9, comm.size))
        dump(tmp_path / "c", [table], comm)
        if comm.rank == 1:
            table.assign_scores([1], [0])
        dump(tmp_path / "c", [table], comm, incremental=True)
        dump(tmp_path / "c", [table], comm, incremental=True)

    with pytest.warns(RuntimeWarning, match="given scores") as warned:
        run_ranks(2, program)
    assert len(warned) == 1
    shards = manifest.read(str(tmp_path / "c")).tables["table"].shards
    assert [len(shard.chain) for shard in shards] == [2, 2]
    table = new_table(get_backend("cpu"), 3)
    with pytest.warns(RuntimeWarning, match="2 ranks wrote the checkpoint, not 1"):
        load(tmp_path / "c", [table], ONE)
        dump(tmp_path / "c", [table], ONE, incremental=True)


def test_a_repeated_key_in_a_file_that_is_continued_moves_no_other_row(tmp_path, monkeypatch):
    """Only files of other programs have one. The part of rank 1 comes after it."""
    of_table = content.pieces

    def repeating(table, num_slots):
        for piece in of_table(table, num_slots):
            yield piece._replace(keys=np.where(piece.keys == 8, 6, piece.keys))

    def program(comm):
        table = new_table(get_backend("cpu"), 3)
        table.lookup(np.arange(comm.rank, 10, 2))
        table.lookup([])
        monkeypatch.setattr(content, "pieces", repeating)
        dump(tmp_path / "c", [table], comm)
        monkeypatch.setattr(content, "pieces", of_table)
        table.lookup([])
        if comm.rank == 0:
            table.erase([8])
            table.insert_or_assign([0], np.full((1, 3), 50, np.float32))
        dump(tmp_path / "c", [table], comm, incremental=True)

    run_ranks(2, program)
    assert not dumped_in_full(tmp_path / "c")
    keys, rows = loaded(tmp_path / "c", "hbm").export()
    assert keys.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 9]
    found = dict(zip(keys.tolist(), rows.tolist(), strict=True))
    assert found.pop(6)[0] in (6, 8)
    assert found == {key: [50.0 if key == 0 else key] * 3 for key in found}
