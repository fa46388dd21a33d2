"""Tables come back from a checkpoint as they were, on any number of ranks, of any kind."""

import gc
import json
import os
import threading
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from scripts.bench.common.row_steps import ensure_state
from sok_lite.backend import get_backend
from sok_lite.comm import RanksDifferError, run_ranks
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine import hashing
from sok_lite.engine.files import manifest
from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.load import load
from sok_lite.engine.optimizer_states import acquire_states
from sok_lite.engine.owner import HASH, MOD, AlsoLocal, OneRank
from tests.support.filled_tables import (
    KINDS,
    all_of,
    filled,
    held,
    held_by,
    rows_of,
    some_keys,
)
from tests.support.helpers import new_table, sized
from tests.support.table_audit import audit
from tests.support.table_state import State

ONE = SingleCommunicator()


class Optimizer:
    """What states belong to."""


CASES = [
    *((0, "int64", "float32"), (1, "int32", "bfloat16"), (33, "uint64", "float16")),
    *((33, "int64", "float64"), (33, "int32", "int8"), (33, "uint64", "int64")),
    *((33, "int32", "int32"), (1000, "int64", "float32")),
]


def test_ranks_that_see_different_checkpoints_load_none(tmp_path, monkeypatch):
    """Such as folders of one name, of two machines."""
    names = ["a", "b"]
    for name, keys in zip(names, ([1, 2], [3]), strict=True):
        saved = new_table(get_backend("cpu"), 2)
        saved.find_or_insert(keys)
        dump(tmp_path / name, [saved], ONE)
    of_thread = threading.local()
    monkeypatch.setattr(manifest, "newest_at", lambda path: f"{path}/{of_thread.name}")

    def program(comm):
        of_thread.name = names[comm.rank]
        table = new_table(get_backend("cpu"), 2)
        with pytest.raises(RanksDifferError, match="The checkpoint at .* same on all ranks.*files"):
            load(tmp_path, [table], comm)
        return table.size

    assert run_ranks(2, program) == [0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_comes_back_as_it_was(backend, tmp_path, kind):
    for n, key_type, dtype in CASES[: sized(backend, len(CASES), 3)]:
        n, options = sized(backend, n, min(n, 33)), KINDS[kind] | {"key_type": key_type}
        table, oracle = filled(backend, n, dtype, **options)
        keys = np.array(list(oracle), key_type)
        for _ in range(2):
            table.lookup(keys[::2])
        if not dtype.startswith("int"):  # what begins a row is of floats
            table.lookup(some_keys(n, key_type, seed=3))
        other, _ = filled(backend, 5, dtype, seed=9, **options)
        dump(tmp_path / "c", [table], ONE, chunk_bytes=200)
        before = all_of(table)
        load(tmp_path / "c", [other], ONE)
        assert all_of(other) == before == all_of(table)
        assert {key: row for key, row in held(other).items() if key in oracle} == oracle
        limits = np.iinfo(key_type)
        assert n < 33 or {int(limits.min), int(limits.max)} < oracle.keys()


def full_table(backend, **options):
    return new_table(
        backend, 2, var_type="hybrid", init_capacity=16, max_capacity=64, name="golden", **options
    )


def values_of(keys):
    """What each row of the kept checkpoint has: its key decides."""
    return np.stack([keys % 1000, -(keys % 7)], axis=1).astype(np.float32)


def test_a_checkpoint_of_before_there_were_seeds_comes_back(backend):
    """`full_table` was written by the version before: 64 slots, all in use, and no seed."""
    hashing.fix_seed(77)
    try:
        table = full_table(backend, evict_strategy="kLfu")
        load(Path(__file__).parent / "full_table", [table], ONE)
    finally:
        hashing.fix_seed(None)
    audit(table)
    assert (table.size, table.capacity, table.index.seed) == (66, 64, 0)
    keys, values = (backend.to_host(array) for array in table.export())
    np.testing.assert_array_equal(values, values_of(keys))
    table.find_or_insert(keys)
    assert table.statistics().evicted_total == table.statistics().refused_total == 0


def test_processes_of_other_seeds_hand_a_full_table_on(tmp_path):
    seeds = []
    for number in (1234567, 7654321, 1357911):
        hashing.fix_seed(number)
        try:
            table = full_table(get_backend("cpu"), evict_strategy="kLfu")
        finally:
            hashing.fix_seed(None)
        seeds.append(table.index.seed)
        if len(seeds) > 1:
            load(tmp_path, [table], ONE)
            keys = np.arange(5000, 5010) + number % 1000
            table.insert_or_assign(keys, values_of(keys))  # evicts by the seed of the file
        for keys in np.arange(10_000).reshape(-1, 5):
            if table.size < 64:
                table.insert_or_assign(keys, values_of(keys))
        audit(table)
        keys, values = table.export()
        np.testing.assert_array_equal(values, values_of(keys))
        before = table.statistics()
        table.find_or_insert(keys)
        after = table.statistics()
        assert after.evicted_total == before.evicted_total
        assert after.refused_total == before.refused_total
        dump(tmp_path, [table], ONE)
        (facts,) = json.loads((tmp_path / "manifest.json").read_text())["tables"]
        assert {facts["shards"][0]["facts"]["hash_seed"], table.index.seed} == {seeds[0]}
        assert table.size == 64
    assert len(set(seeds)) == 3


def bits_to_float(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def test_float32_comes_from_bfloat16_and_back_when_asked(backend, tmp_path):
    table, _ = filled(backend, 33, "bfloat16")
    dump(tmp_path, [table], ONE)
    wide = new_table(backend, 3)
    with pytest.raises(ValueError, match=r"dtype bfloat16\. Received: .*dtype float32.*cast=True"):
        load(tmp_path, [wide], ONE)
    load(tmp_path, [wide], ONE, cast=True)
    bits, rows = backend.to_host(table.export()[1]), backend.to_host(wide.export()[1])
    np.testing.assert_array_equal(rows, bits_to_float(bits))
    # A quarter of the last place of bfloat16, so that rounding finds the way back.
    wide.assign(wide.export()[0], backend.from_host(rows * np.float32(1 + 2.0**-10)))
    dump(tmp_path, [wide], ONE)
    load(tmp_path, [table], ONE, cast=True)
    np.testing.assert_array_equal(backend.to_host(table.export()[1]), bits)


@pytest.mark.parametrize("mode", ["replace", "merge"])
def test_int64_takes_keys_of_int32_and_not_the_other_way(backend, tmp_path, mode):
    narrow, wide = new_table(backend, 3, key_type="int32"), new_table(backend, 3)
    keys = np.array([5, -7, 2**31 - 1, -(2**31), 0], np.int32)
    rows = np.arange(15, dtype=np.float32).reshape(5, 3)
    narrow.insert_or_assign(backend.from_host(keys), backend.from_host(rows))
    dump(tmp_path, [narrow], ONE)
    load(tmp_path, [wide], ONE, mode=mode)
    audit(wide)
    expected = {int(key): row.tolist() for key, row in zip(keys, rows, strict=True)}
    found = (backend.to_host(each).tolist() for each in wide.export())
    assert dict(zip(*found, strict=True)) == expected
    dump(tmp_path, [wide], ONE)
    with pytest.raises(ValueError, match="key_type int64.*Received: .*key_type int32"):
        load(tmp_path, [narrow], ONE)


def test_several_tables_and_only_some_are_loaded(backend, tmp_path):
    names = ["a/b", "a_b", "a b", "ä" * 200]
    made = [filled(backend, 9 + i, seed=i, name=name) for i, name in enumerate(names)]
    dump(tmp_path, [table for table, _ in made], ONE, extra={"step": [1, "x"]})
    for i in (3, 1):
        other = new_table(backend, 3, name=names[i])
        assert load(tmp_path, [other], ONE) == {"step": [1, "x"]}
        assert held(other) == made[i][1]


def test_states_of_several_optimizers_come_back(backend, tmp_path):
    table, oracle = filled(backend, 9)
    optimizers = [Optimizer() for _ in range(3)]
    kinds = [{"m": (3, 0.0), "v": (1, 0.5)}, {"m": (3, 0.0), "v": (1, 0.5)}, {"acc": (3, 1.0)}]
    keys = np.array(list(oracle))
    for i, (optimizer, kind) in enumerate(zip(optimizers, kinds, strict=True)):
        (states,) = acquire_states([table], [kind], [optimizer])
        for j, (name, column) in enumerate(states.items()):
            values = np.full((len(keys), kind[name][0]), 10 * i + j + 1, np.float32)
            table.assign_state(column.name, keys, backend.from_host(values))
    dump(tmp_path, [table], ONE, chunk_bytes=64)
    other = new_table(backend, 3)
    load(tmp_path, [other], ONE)
    for i, kind in enumerate(kinds):
        new = Optimizer()
        (states,) = acquire_states([other], [kind], [new])
        optimizers.append(new)  # it lives as long as its states
        for j, (name, column) in enumerate(states.items()):
            got = backend.to_host(other.read_state(column.name, keys))
            np.testing.assert_array_equal(got, np.full((9, kind[name][0]), 10 * i + j + 1))


@pytest.mark.parametrize(
    ("ranks", "kind", "rule"),
    [
        *(((1, 2), "hbm", MOD), ((3, 2), "kEpochLfu", MOD), ((2, 1), "kEpochLfu", MOD)),
        *(((2, 2), "kEpochLfu", MOD), ((2, 2), "hbm", HASH), ((3, 2), "hbm", OneRank(1))),
    ],
    ids=str,
)
def test_the_number_of_ranks_and_the_owners_may_change(backend, tmp_path, ranks, kind, rule):
    keys = some_keys(sized(backend, 200, 20))
    rows, states = rows_of(len(keys), 3), rows_of(len(keys), 3, seed=1)

    def write(comm):
        table = new_table(backend, 3, **KINDS[kind])
        mine = table.owner.owners(keys, comm.size) == comm.rank
        table.insert_or_assign(keys[mine], backend.from_host(rows[mine]))
        if comm.rank != 2:  # that rank has no state
            ensure_state(table.store, "m", 0.25)
            table.assign_state("m", keys[mine], backend.from_host(states[mine]))
        dump(tmp_path, [table], comm, {"rank": comm.rank}, chunk_bytes=64)

    def read(comm):
        table = new_table(backend, 3, owner=rule, **KINDS[kind])
        table.find_or_insert([12345])
        assert load(tmp_path, [table], comm) == {"rank": 0}
        engine_keys = backend.to_host(table.export()[0])
        assert (rule.owners(engine_keys, comm.size) == comm.rank).all()
        return table

    run_ranks(ranks[0], write)
    if ranks[0] == 3:
        states[keys % 3 == 2] = 0.25
    assert held(*run_ranks(ranks[1], read)) == held_by(keys, rows, states)


@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_keeps_the_keys_that_were_not_saved(backend, tmp_path, kind):
    saved, oracle = filled(backend, 33, **KINDS[kind])
    saved.lookup(list(oracle)[::2])
    saved.lookup([91, 92])
    dump(tmp_path, [saved], ONE, chunk_bytes=64)
    table, mine = filled(backend, 33, seed=5, **KINDS[kind])
    both, only_mine = oracle.keys() & mine.keys(), mine.keys() - oracle.keys()
    assert both and only_mine and oracle.keys() - mine.keys()
    ensure_state(table.store, "w", 0.5, 1)
    table.assign_state("w", list(mine), np.full((33, 1), 4, np.float32))
    for _ in range(3):
        table.lookup(list(mine)[::3])
    table.lookup([91, 93])
    before, theirs = State.of(table), State.of(saved)
    load(tmp_path, [table], ONE, mode="merge")
    added = {91, 92, 93} if kind != "sightings" else set()
    assert {k: row for k, row in held(table).items() if k not in added} == mine | oracle
    assert held(table).keys() == mine.keys() | oracle.keys() | added
    now = State.of(table)
    assert {k: now.seen[k] for k in only_mine} == {k: before.seen[k] for k in only_mine}
    assert {now.seen[k][0] for k in oracle} == {table.num_lookups} == {before.now}
    if kind == "sightings":  # kLfu: the scores of both tables mean the same
        assert {k: now.seen[k][1] for k in oracle} == {k: theirs.seen[k][1] for k in oracle}
        # A key that both have seen keeps the count that it has here.
        assert now.pending == before.pending | {92: (1, before.now)}
    for keys, state in ((only_mine, 4), (both, 0.5)):
        got = backend.to_host(table.read_state("w", list(keys)))
        np.testing.assert_array_equal(got, np.full((len(keys), 1), state))


def test_a_merge_keeps_states_of_an_optimizer_and_joins_them(backend, tmp_path):
    saved, oracle = filled(backend, 9, dim=1)
    old, new = Optimizer(), Optimizer()
    keys = np.array(list(oracle))
    (states,) = acquire_states([saved], [{"v": (1, 0.0)}], [old])
    saved.assign_state(states["v"].name, keys, np.full((9, 1), 5, np.float32))
    dump(tmp_path, [saved], ONE)
    table = new_table(backend, 1)
    table.find_or_insert([777])
    (states,) = acquire_states([table], [{"v": (1, 0.0)}], [new])
    table.assign_state(states["v"].name, [777], np.full((1, 1), 3, np.float32))
    load(tmp_path, [table], ONE, mode="merge")
    (states,) = acquire_states([table], [{"v": (1, 0.0)}], [new])
    got = backend.to_host(table.read_state(states["v"].name, [777, *keys]))
    np.testing.assert_array_equal(got[:, 0], [3] + [5] * 9)


@pytest.mark.cases("name")
@pytest.mark.parametrize("name", ["keys", "stamps", "scores", "sightings", "value"])
def test_a_merge_keeps_states_of_any_name(tmp_path, name):
    backend = get_backend("cpu")
    saved, _ = filled(backend, 9, dim=2)
    # One of the other has a state more: it is another optimizer.
    acquire_states([saved], [{name: (2, 0.0), "more": (1, 0.0)}], [_other := Optimizer()])
    dump(tmp_path, [saved], ONE)
    table = new_table(backend, 2)
    table.find_or_insert([777])
    (states,) = acquire_states([table], [{name: (2, 0.0)}], [optimizer := Optimizer()])
    table.assign_state(states[name].name, [777], np.full((1, 2), 7, np.float32))
    load(tmp_path, [table], ONE, mode="merge")
    (states,) = acquire_states([table], [{name: (2, 0.0)}], [optimizer])
    got = backend.to_host(table.read_state(states[name].name, [777]))
    np.testing.assert_array_equal(got, [[7, 7]])


# -------------------------------------------------------------------- refusals


@pytest.mark.parametrize("mode", ["replace", "merge"])
def test_a_table_that_does_not_fit_is_one_error(backend, tmp_path, mode):
    fitting, _ = filled(backend, 9, name="first")
    table, _ = filled(backend, 9, name="table")
    dump(tmp_path, [fitting, table], ONE)
    fitting.erase(fitting.export()[0])
    for options, text in (
        *(({"dim": 4}, "Received: "), ({"dtype": "float64"}, "Received: ")),
        *(({"dtype": "int32"}, "Received: "), ({"key_type": "uint64"}, "Received: ")),
        ({"name": "b"}, "has no table 'b'"),
    ):
        other = new_table(backend, **({"dim": 3} | options))
        with pytest.raises(ValueError, match=text):
            load(tmp_path, [fitting, other], ONE, mode)
        assert fitting.size == 0 == other.size


def test_wrong_arguments_are_refused(backend, tmp_path):
    table, _ = filled(backend, 1)
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        load(tmp_path / "none", [table], ONE)
    with pytest.raises(ValueError, match="different names"):
        dump(tmp_path, [table, table], ONE)
    with pytest.raises(TypeError, match="Received: 3"):
        dump(tmp_path, [3], ONE)
    dump(tmp_path, [table], ONE)
    with pytest.raises(ValueError, match="'replace' or 'merge'"):
        load(tmp_path, [table], ONE, mode="add")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "manifest.json").write_text("{}")
    with pytest.raises(FileExistsError, match="folder of its own"):
        dump(tmp_path / "mine", [table], ONE)
    assert os.listdir(tmp_path / "mine") == ["manifest.json"]


def test_ranks_that_want_different_things_all_say_so(backend, tmp_path):
    def program(comm):
        table = new_table(backend, 3 + comm.rank)
        with pytest.raises(ValueError, match="must be the same on all ranks"):
            dump(tmp_path, [table], comm)
        assert os.listdir(tmp_path) == []
        comm.barrier("all have looked")
        (same, own), path = (new_table(backend, 3) for _ in range(2)), tmp_path / str(comm.rank)
        dump(path, [same], ONE)
        with pytest.raises(ValueError, match="A load must be the same on all ranks.*path is"):
            load(path, [own], comm)

    run_ranks(2, program)


# -------------------------------------------------------------------- memory


def test_a_dump_needs_memory_for_a_few_chunks(tmp_path):
    table = new_table(get_backend("cpu"), 64)
    table.find_or_insert(np.arange(100_000))
    chunk = 1 << 20
    dump(tmp_path, [table], ONE, chunk_bytes=chunk)
    gc.collect()
    tracemalloc.start()
    try:
        dump(tmp_path, [table], ONE, chunk_bytes=chunk)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 20 * chunk < 100_000 * 64 * 4
    assert most < 5 * chunk


# -------------------------------------------------------------------- progress


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (2, 1)])
def test_progress_ends_with_all_bytes(tmp_path, ranks):
    backend, keys = get_backend("cpu"), np.arange(100)

    def write(comm, reports):
        tables = [new_table(backend, 3, name=name) for name in "ab"]
        for table in tables:
            mine = keys[keys % comm.size == comm.rank]
            table.insert_or_assign(mine, np.ones((mine.size, 3), np.float32))
        dump(tmp_path, tables, comm, chunk_bytes=64, report=lambda *sizes: reports.append(sizes))

    def read(comm, reports):
        tables = [new_table(backend, 3, name=name) for name in "ab"]
        load(tmp_path, tables, comm, report=lambda *sizes: reports.append(sizes))

    files = []
    for program, count in zip((write, read), ranks, strict=True):
        reports = [[] for _ in range(count)]
        run_ranks(count, lambda comm, use=program, to=reports: use(comm, to[comm.rank]))
        if program is read:
            of_ranks = [f"*-{rank:05d}-of-*" if ranks == (2, 2) else "*.*" for rank in range(count)]
            files = [sum(f.stat().st_size for f in tmp_path.glob(f"*/{g}")) for g in of_ranks]
        else:
            files = [100 // count * 2 * (8 + 12 + 4)] * count
        for rank, of_rank in enumerate(reports):
            done, totals = zip(*of_rank, strict=True)
            assert set(totals) == {files[rank]} == {done[-1]}
            assert list(done) == sorted(done) and len(done) > 1


def test_a_rank_that_reads_its_own_file_says_which_keys_are_of_others(backend, tmp_path, caplog):
    def program(comm):
        for owner in (AlsoLocal(MOD), MOD):  # the first writes what an older version did
            table = new_table(backend, 1, owner=owner)
            if owner == MOD:
                load(tmp_path, [table], comm)
            else:
                table.find_or_insert([4, 7])
                dump(tmp_path, [table], comm)
                caplog.clear()
        return backend.to_host(table.export()[0]).tolist()

    assert run_ranks(2, program) == [[4, 7], [4, 7]]
    said = sorted(record.getMessage().split(":")[0] for record in caplog.records)
    assert [text.split("'")[::2] for text in said] == [
        [f"Rank {rank} has 1 keys of table ", f" that other ranks own, such as key {key} of {of}"]
        for rank, key, of in ((0, 7, "rank 1"), (1, 4, "rank 0"))
    ]


STRATEGIES = ["kLru", "kLfu", "kEpochLru", "kEpochLfu", "kCustomized"]


def full(backend, rank, size, strategy, **more):
    """A full table of 64 slots with keys of a rank, and the score of each."""
    options = {"var_type": "hybrid", "init_capacity": 16, "max_capacity": 64, "name": "full"}
    options |= {"evict_strategy": strategy, "on_refused": "ignore"}
    table, rng = new_table(backend, 3, **options | more), np.random.default_rng(rank)
    for epoch in range(40):
        if "Epoch" in strategy:
            table.epoch = epoch // 8
        keys, given = rng.integers(-150, 150, 6) * size + rank, rng.integers(1, 99, 6, np.uint64)
        table.find_or_insert(keys, scores=None if strategy.endswith("Lru") else given)
    keys = backend.to_host(table.export()[0])
    table.assign(keys, backend.from_host(rows_by_key(keys)))
    ensure_state(table.store, "m", 0.25)
    table.assign_state("m", keys, backend.from_host(-rows_by_key(keys)))
    scores = backend.to_host(table.scores(keys)).tolist()
    return table, dict(zip(keys.tolist(), scores, strict=True))


def rows_by_key(keys):
    return np.stack([keys, keys * 2, keys % 7], axis=1).astype(np.float32)


def assert_keeps_the_highest(table, scores):
    """A table has the rows of the keys of the highest scores, as many as find a slot.

    A key finds none where all slots of its two buckets have keys whose scores are no lower.
    """
    audit(table)
    backend, index = table.backend, table.index
    kept = backend.to_host(table.export()[0])
    assert set(kept.tolist()) <= scores.keys() and 60 <= kept.size <= 64
    assert held(table) == held_by(kept, rows_by_key(kept), -rows_by_key(kept))
    entries = index.entries()
    slots, keys = (backend.to_host(each).tolist() for each in (entries.slots, entries.keys))
    key_in = dict(zip(slots, keys, strict=True))
    left_out = np.array(sorted(scores.keys() - set(kept.tolist())))
    firsts, seconds, _ = map(backend.to_host, index.homes_of(backend.from_host(left_out)))
    for key, *homes in zip(left_out.tolist(), firsts.tolist(), seconds.tolist(), strict=True):
        lowest = min(scores[key_in[home + i]] for home in homes for i in range(index.bucket))
        assert scores[key] <= lowest
    ordered = sorted(scores, key=scores.__getitem__, reverse=True)
    least = scores[ordered[40]]
    assert {key for key in scores if scores[key] > least} <= set(kept.tolist())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fewer_ranks_may_leave_out_the_keys_of_the_lowest_scores(
    backend, tmp_path, caplog, strategy
):
    tiers = {"max_hbm_for_vectors": 8 * 12 / 2**30} if "Lru" in strategy else {}

    def write(comm):
        table, scores = full(backend, comm.rank, comm.size, strategy)
        dump(tmp_path, [table], comm, chunk_bytes=100)
        some = np.array(sorted(scores)[::3])
        if strategy == "kCustomized":  # its rows come from several files
            table.assign(some, backend.from_host(rows_by_key(some)))
            dump(tmp_path, [table], comm, chunk_bytes=100, incremental=True)
        return scores

    scores = {key: score for each in run_ranks(2, write) for key, score in each.items()}
    table, before = full(backend, 5, 7, strategy, **tiers)
    refused = f"{len(scores)} keys that were saved: .*max_capacity=256 or more.*on_full='evict'"
    with pytest.raises(ValueError, match=refused):
        load(tmp_path, [table], ONE)
    assert set(backend.to_host(table.export()[0]).tolist()) == before.keys()
    load(tmp_path, [table], ONE, on_full="evict")
    assert_keeps_the_highest(table, scores)
    keys = backend.to_host(table.export()[0])
    assert dict(zip(keys.tolist(), backend.to_host(table.scores(keys)).tolist(), strict=True)) == {
        key: scores[key] for key in keys.tolist()
    }
    (said,) = [record.getMessage() for record in caplog.records]
    num_left_out = len(scores) - keys.size
    assert said.startswith(f"Table 'full' has left out {num_left_out} of {len(scores)} keys")
    everything = new_table(backend, 3, name="full")  # "hbm": it leaves nothing out
    load(tmp_path, [everything], ONE, on_full="evict")
    assert everything.size == len(scores)
    as_told = new_table(backend, 3, var_type="hybrid", max_capacity=256, name="full")
    load(tmp_path, [as_told], ONE)
    assert as_told.size == len(scores)


def test_a_merge_may_leave_out_keys_too(backend, tmp_path):
    saved, scores = full(backend, 0, 2, "kCustomized")
    dump(tmp_path, [saved], ONE)
    table, own = full(backend, 1, 2, "kCustomized")
    with pytest.raises(ValueError, match="has no room for"):
        load(tmp_path, [table], ONE, mode="merge")
    load(tmp_path, [table], ONE, mode="merge", on_full="evict")
    assert_keeps_the_highest(table, scores | own)


def test_what_a_full_table_does_is_error_or_evict(tmp_path):
    table = new_table(get_backend("cpu"), 3)
    with pytest.raises(ValueError, match="'error' or 'evict'. Received: on_full='drop'"):
        load(tmp_path, [table], ONE, on_full="drop")
