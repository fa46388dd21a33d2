"""Checkpoints for other ranks, and one of several: real tables load them."""

import gc
import os
import tracemalloc

import numpy as np
import pytest

from sok_lite.comm import run_ranks
from sok_lite.engine.files import manifest
from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.load import load
from sok_lite.engine.files.source import Source, checkpoint_sources
from sok_lite.engine.files.source_writer import write_checkpoint
from sok_lite.engine.owner import MOD, OneRank
from tests.cli.helpers import CPU, NAMES, ONE, dumped, fine, loaded, run
from tests.support.filled_tables import HYBRID, KINDS, filled, held, held_by, rows_of
from tests.support.helpers import new_table
from tests.support.static_parts import assert_equal, everything, part_of


@pytest.mark.parametrize(
    "options",
    [
        {"key_type": "uint64"},
        {"key_type": "int32", "dtype": "bfloat16"},
        HYBRID | {"key_type": "uint64", "dtype": "float64"},
        {"dtype": "int8"},
    ],
    ids=str,
)
def test_from_one_rank_to_three_to_two(tmp_path, options):
    n = {"int8": 0, "bfloat16": 1}.get(options.get("dtype"), 33)
    oracle = dumped(tmp_path / "one", n, extra={"iterations": [7]}, **options)
    fine("reshard", tmp_path / "one", tmp_path / "three", "--ranks", 3)
    fine("reshard", tmp_path / "three", tmp_path / "two", "--ranks", 2)
    for path, ranks in (("three", 3), ("two", 2), ("three", 1)):
        for name in NAMES:
            found = loaded(tmp_path / path, name, ranks, **options)
            assert found == (oracle[name], {"iterations": [7]})
    for path in ("three", "two"):
        fine("verify", tmp_path / path)
        fine("diff", tmp_path / "one", tmp_path / path, "--all")


def test_a_checkpoint_is_resharded_in_its_place_only_when_asked(tmp_path):
    oracle = dumped(tmp_path / "c")
    status, _, err = run("reshard", tmp_path / "c", tmp_path / "c", "--ranks", 2)
    assert status == 2 and "is there already: give another name, or --force" in err
    fine("reshard", tmp_path / "c", tmp_path / "c", "--ranks", 2, "--force")
    assert manifest.read(tmp_path / "c").ranks == 2
    assert len(os.listdir(tmp_path / "c")) == 2
    for name in NAMES:
        assert loaded(tmp_path / "c", name, 2)[0] == oracle[name]


def test_a_wrong_number_of_ranks_is_wrong_use(tmp_path):
    dumped(tmp_path / "c", 1)
    for ranks in ("0", "-1", "two", "1.5"):
        status, _, err = run("reshard", tmp_path / "c", tmp_path / "d", "--ranks", ranks)
        assert status == 2 and "must be a number of ranks, from 1 on" in err
    assert os.listdir(tmp_path) == ["c"]


@pytest.mark.parametrize("small", [False, True], ids=["one bucket", "many buckets"])
def test_of_equal_keys_the_last_one_counts(tmp_path, monkeypatch, small):
    if small:
        monkeypatch.setattr("sok_lite.cli.buckets.BUCKET_BYTES", 64)
    tables = [filled(CPU, n, seed=seed, name="user") for n, seed in ((40, 0), (30, 0), (20, 5))]
    for i, (table, _) in enumerate(tables):
        table.assign(table.export()[0], rows_of(table.size, 3, seed=100 + i))
        dump(tmp_path / str(i), [table], ONE, {"iterations": [i], f"only {i}": i})
    fine("merge", *(tmp_path / str(i) for i in range(3)), tmp_path / "all", "--ranks", 2)
    oracle = {}
    for table, _ in tables:
        oracle |= held(table)
    expected_extra = {"iterations": [2], "only 0": 0, "only 1": 1, "only 2": 2}
    assert loaded(tmp_path / "all", "user", 3) == (oracle, expected_extra)
    assert len(oracle) < 90
    assert fine("verify", tmp_path / "all").count(f"{len(oracle)} keys") == 1


def test_a_key_without_the_state_of_the_other_begins(tmp_path):
    dumped(tmp_path / "a", 8, names=["user"])
    plain = new_table(CPU, 3, name="user")
    plain.insert_or_assign([7, -7], np.zeros((2, 3), np.float32))
    dump(tmp_path / "b", [plain], ONE)
    fine("merge", tmp_path / "a", tmp_path / "b", tmp_path / "c")
    found, _ = loaded(tmp_path / "c", "user")
    first = np.full(3, 0.25, np.float32)
    assert found[7] == found[-7] == held_by(np.array([7]), np.zeros((1, 3), np.float32), [first])[7]
    assert len(found) == 10


def test_a_key_that_was_seen_in_one_and_has_a_row_in_another_has_the_row(tmp_path):
    options = KINDS["sightings"]
    seen, kept = new_table(CPU, 3, **options), new_table(CPU, 3, **options)
    seen.lookup([1, 2, 3])
    kept.insert_or_assign([2], np.ones((1, 3), np.float32))
    kept.lookup([3])
    dump(tmp_path / "seen", [seen], ONE)
    dump(tmp_path / "kept", [kept], ONE)
    for order in (("seen", "kept"), ("kept", "seen")):
        to = tmp_path / "-".join(order)
        fine("merge", *(tmp_path / name for name in order), to, "--ranks", 2)
        table = new_table(CPU, 3, **options)
        load(to, [table], ONE)
        assert table.export()[0].tolist() == [2]
        (source,) = checkpoint_sources(to)
        pending = np.concatenate(list(source.read("sighted_keys")))
        assert sorted(pending.tolist()) == [1, 3]


def test_scores_stay_where_all_are_of_one_strategy(tmp_path):
    for name, kind, keys in (("a", "kLfu", [1, 2]), ("b", "kLfu", [2, 3]), ("c", "kEpochLfu", [3])):
        table = new_table(CPU, 3, name="user", **HYBRID, evict_strategy=kind)
        table.insert_or_assign(np.array(keys), np.ones((len(keys), 3), np.float32))
        dump(tmp_path / name, [table], ONE)
    for paths, columns in (("ab", ("stamps", "scores")), ("abc", ("stamps",)), ("ca", ("stamps",))):
        fine("merge", *(tmp_path / path for path in paths), tmp_path / f"m{paths}")
        (source,) = checkpoint_sources(tmp_path / f"m{paths}")
        assert source.columns == columns
        table = new_table(CPU, 3, name="user", **HYBRID, evict_strategy="kLfu")
        load(tmp_path / f"m{paths}", [table], ONE)
        assert table.size == source.num_keys


def test_tables_of_different_names_are_joined_and_those_not_alike_are_not(tmp_path):
    users = dumped(tmp_path / "a", 10, names=["user"])
    items = dumped(tmp_path / "b", 5, names=["item", "us/er"])
    fine("reshard", tmp_path / "b", tmp_path / "b2", "--ranks", 2)
    fine("merge", tmp_path / "a", tmp_path / "b2", tmp_path / "b2", "--force")  # one of its own
    assert manifest.read(tmp_path / "b2").ranks == 2
    for name, rows in (users | items).items():
        assert loaded(tmp_path / "b2", name, 2)[0] == rows
    dumped(tmp_path / "c", 3, names=["user"], dtype="float64")
    status, _, err = run("merge", tmp_path / "a", tmp_path / "c", tmp_path / "d")
    kinds = "int64 keys, rows of 3 float32, and int64 keys, rows of 3 float64"
    assert status == 2 and f"'user' cannot be merged: {kinds}" in err
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("owner", [MOD, OneRank(1)], ids=lambda owner: owner.name)
def test_static_tables_are_resharded(tmp_path, owner):
    columns = everything(11)

    def write(comm):
        dump(tmp_path / "two", [part_of(CPU, comm, columns, owner)], comm, {"step": 1})

    def read(comm):
        expected = part_of(CPU, comm, columns, owner)
        part = part_of(CPU, comm, everything(11, seed=1), owner)
        assert load(tmp_path / "three", [part], comm) == {"step": 1}
        assert_equal(part, expected)

    run_ranks(2, write)
    fine("reshard", tmp_path / "two", tmp_path / "three", "--ranks", 3)
    run_ranks(3, read)
    assert "static, owner of a key: " + owner.name in fine("inspect", tmp_path / "three")
    fine("verify", tmp_path / "three")
    fine("diff", tmp_path / "two", tmp_path / "three", "--all")


class Counting(Source):
    """Rows of a number of keys from some key on."""

    name, dim, dtype, key_type = "x", 16, "float32", "int64"

    def __init__(self, num_keys, first=0):
        self.num_keys, self._first = num_keys, first

    def read(self, column):
        for i in range(0, self.num_keys, 500):
            keys = np.arange(i, min(i + 500, self.num_keys)) + self._first
            yield keys if column == "keys" else np.repeat(keys[:, None], 16, 1).astype(np.float32)


@pytest.mark.parametrize(
    "command", ["reshard a c --ranks 3", "merge a b c", "diff a b", "verify a"]
)
def test_memory_does_not_grow_with_the_table(tmp_path, monkeypatch, command):
    monkeypatch.setattr("sok_lite.engine.files.saved_file.CHUNK_BYTES", 10_000)
    monkeypatch.setattr("sok_lite.cli.commands.verify.CHUNK_BYTES", 10_000)
    monkeypatch.setattr("sok_lite.cli.buckets.BUCKET_BYTES", 100_000)
    peaks = []
    for n in (2000, 20_000, 40_000):
        folder = tmp_path / str(n)
        folder.mkdir()
        monkeypatch.chdir(folder)
        for name, first in (("a", 0), ("b", n // 2)):
            write_checkpoint(name, [Counting(n, first)], 2, chunk_bytes=10_000)
        gc.collect()
        tracemalloc.start()
        status, _, err = run(*command.split())
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert (status, err) == (int(command.startswith("diff")), "")
    # What does grow: of a file of 3 MB the checksums, and their text in the manifest.
    assert peaks[2] < peaks[1] + 200_000 < 2_000_000, peaks
