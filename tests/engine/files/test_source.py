"""Tables of checkpoints are read and written as streams of columns, without tables."""

import os

import numpy as np
import pytest

from scripts.bench.common.row_steps import ensure_state
from sok_lite.backend import get_backend
from sok_lite.comm import run_ranks
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine.dtypes import row_dtype
from sok_lite.engine.files import manifest
from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.load import load
from sok_lite.engine.files.manifest import StateFacts
from sok_lite.engine.files.source import Source, checkpoint_sources, columns_of
from sok_lite.engine.files.source_writer import write_checkpoint
from sok_lite.engine.owner import HASH, MOD, FunctionOfKeys, OneRank
from tests.support.filled_tables import KINDS, filled, held, rows_of, some_keys
from tests.support.helpers import new_table

ONE = SingleCommunicator()
CPU = get_backend("cpu")


def whole(source, column):
    pieces = list(source.read(column))
    return np.concatenate(pieces) if pieces else np.empty(0)


class Arrays(Source):
    """A source of arrays, in pieces of some rows."""

    def __init__(self, name, keys, rows, dtype="float32", piece=7):
        self.name, self.dim, self.dtype = name, rows.shape[1], dtype
        self.key_type, self.num_keys = str(keys.dtype), keys.size
        self.arrays, self.piece = {"keys": keys, "values": rows}, piece

    def read(self, column):
        array = self.arrays[column]
        for first in range(0, self.num_keys, self.piece):
            yield array[first : first + self.piece]


@pytest.mark.parametrize(("kind", "n"), [("hbm", 0), ("kLru", 1), *((kind, 33) for kind in KINDS)])
def test_a_table_is_read_as_it_was_dumped_and_written_as_it_was_read(tmp_path, kind, n):
    table, oracle = filled(CPU, n, **KINDS[kind])
    table.lookup(some_keys(n, seed=3))
    dump(tmp_path / "a", [table], ONE, {"step": 3}, chunk_bytes=100)
    (source,) = checkpoint_sources(tmp_path / "a")
    facts = (source.name, source.dim, source.dtype, source.key_type, source.num_keys)
    assert facts == (table.name, 3, "float32", "int64", table.size)
    keys = whole(source, "keys")
    rows, states = whole(source, "values"), whole(source, "states.0.m")
    read = dict(zip(keys.tolist(), zip(rows.tolist(), states.tolist(), strict=True), strict=True))
    for key, (row, state) in oracle.items():
        assert np.float32(read[key][0]).tobytes() == row
        assert np.float32(read[key][1]).tobytes() == state
    for ranks, name in ((3, "b"), (1, "c")):
        sources = checkpoint_sources(tmp_path / chr(ord(name) - 1))
        write_checkpoint(tmp_path / name, sources, ranks, {"step": 4}, chunk_bytes=64)
    other, again = new_table(CPU, 3, **KINDS[kind]), new_table(CPU, 3, **KINDS[kind])
    load(tmp_path / "a", [other], ONE)
    assert load(tmp_path / "c", [again], ONE) == {"step": 4}
    assert held(again) == held(other)
    dump(tmp_path / "d", [other], ONE)
    dump(tmp_path / "e", [again], ONE)
    (one,), (two,) = checkpoint_sources(tmp_path / "d"), checkpoint_sources(tmp_path / "e")
    assert one.about._replace(options={}) == two.about._replace(options={})
    for names in (["keys", *one.columns], ["sighted_keys", "sightings", "sighting_stamps"]):
        lists = [[whole(source, name).tolist() for name in names] for source in (one, two)]
        first, second = (sorted(zip(*each, strict=True)) for each in lists)
        assert first == second


@pytest.mark.cases("rule")
@pytest.mark.parametrize(
    ("key_type", "rule"),
    [
        *(("int64", MOD), ("int32", MOD), ("uint64", MOD), ("int32", HASH), ("uint64", OneRank(1))),
        ("int64", FunctionOfKeys("f", lambda keys, size: keys % size)),
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_every_rank_gets_the_keys_that_it_owns(tmp_path, key_type, rule):
    keys, rows = some_keys(100, key_type), rows_of(100, 3)

    def write(comm):
        table = new_table(CPU, 3, key_type=key_type, owner=rule)
        kept = table.key_dtype.to_int64(np, keys)
        mine = rule.owners(kept, comm.size, table.key_dtype) == comm.rank
        table.insert_or_assign(keys[mine], rows[mine])
        dump(tmp_path / "a", [table], comm)

    def read(comm):
        table = new_table(CPU, 3, key_type=key_type, owner=rule)
        load(tmp_path / "b", [table], comm)
        engine_keys, values = table.export()
        kept = table.key_dtype.to_int64(np, engine_keys)
        assert (rule.owners(kept, comm.size, table.key_dtype) == comm.rank).all()
        return dict(zip(engine_keys.tolist(), values.tolist(), strict=True))

    run_ranks(2, write)
    write_checkpoint(tmp_path / "b", checkpoint_sources(tmp_path / "a"), 3)
    found = manifest.read(tmp_path / "b").tables["table"]
    expected = "key mod ranks" if rule.name.startswith("function") else rule.name
    assert found.owner == expected
    parts = run_ranks(3, read)
    assert sum(map(len, parts)) == 100
    joined = {key: row for part in parts for key, row in part.items()}
    assert joined == dict(zip(keys.tolist(), rows.tolist(), strict=True))


def test_one_rank_owns_all_where_there_is_such_a_rank(tmp_path):
    dump(tmp_path / "a", [new_table(CPU, 3, owner=OneRank(0))], ONE)
    (source,) = checkpoint_sources(tmp_path / "a")
    source.about = source.about._replace(owner="rank 2")
    for ranks, owner in ((3, "rank 2"), (2, "key mod ranks")):
        write_checkpoint(tmp_path / "b", [source], ranks)
        assert manifest.read(tmp_path / "b").tables["table"].owner == owner


@pytest.mark.parametrize(
    ("n", "dtype"),
    [
        *((0, "float32"), (1, "bfloat16"), (6, "float64")),
        *((7, "int8"), (8, "float32"), (50, "bfloat16")),
    ],
)
def test_foreign_rows_become_a_checkpoint(tmp_path, dtype, n):
    keys, rows = some_keys(n), rows_of(n, 5, dtype)
    sources = [Arrays("a/b", keys, rows, dtype), Arrays("a_b", keys[::-1], rows[::-1], dtype)]
    write_checkpoint(tmp_path, sources, 2, chunk_bytes=50)
    expected = {key: row.tobytes() for key, row in zip(keys.tolist(), rows, strict=True)}
    for name in ("a/b", "a_b"):
        table = new_table(CPU, 5, name=name, dtype=dtype)
        load(tmp_path, [table], ONE)
        found, values = table.export()
        got = zip(found.tolist(), np.asarray(values, row_dtype(dtype).storage), strict=True)
        assert {key: row.tobytes() for key, row in got} == expected


def test_states_of_ranks_are_joined_and_those_that_a_rank_lacks_begin(tmp_path):
    keys = np.arange(8)

    def write(comm):
        table = new_table(CPU, 3)
        mine = keys[keys % 2 == comm.rank]
        table.insert_or_assign(mine, np.zeros((4, 3), np.float32))
        if comm.rank == 1:
            ensure_state(table.store, "m", 0.25)
            table.assign_state("m", mine, np.full((4, 3), 9, np.float32))
        dump(tmp_path / "a", [table], comm)

    run_ranks(2, write)
    (source,) = checkpoint_sources(tmp_path / "a")
    assert source.states == (StateFacts("states.0.m", "m", 3, 0.25, None),)
    expected = np.where(whole(source, "keys") % 2, 9, 0.25)
    np.testing.assert_array_equal(whole(source, "states.0.m"), np.stack([expected] * 3, 1))
    found = source.find([2, 3, 8], ["states.0.m"])
    assert {key: each["states.0.m"].tolist() for key, each in found.items()} == {
        2: [0.25] * 3,
        3: [9.0] * 3,
    }
    assert [column.name for column in columns_of(source)][:2] == ["keys", "values"]


class Failing(Arrays):
    def read(self, column):
        pieces = super().read(column)
        yield next(pieces)
        if column == "values":
            raise OSError("gone")
        yield from pieces


class Short(Arrays):
    def read(self, column):
        pieces = list(super().read(column))
        yield from pieces[:-1] if column == "values" else pieces


class Long(Arrays):
    def read(self, column):
        yield from super().read(column)
        if column == "values":
            yield np.zeros((1, 3), np.float32)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (Failing, "gone"),
        (Short, "'values' of table 'x' must .*: no more"),
        (Long, r"'values' of table 'x' must .*\(0, 3\) .*: float32 of shape \(1, 3\)"),
    ],
)
def test_a_source_that_fails_leaves_what_was_there(tmp_path, kind, error):
    bad = kind("x", some_keys(20), rows_of(20, 3))
    with pytest.raises((OSError, ValueError), match=error):
        write_checkpoint(tmp_path / "new", [bad], 2)
    assert not (tmp_path / "new").exists()
    table, oracle = filled(CPU, 33)
    dump(tmp_path / "old", [table], ONE)
    before = sorted(os.listdir(tmp_path / "old"))
    with pytest.raises((OSError, ValueError), match=error):
        write_checkpoint(tmp_path / "old", [bad], 2)
    assert sorted(os.listdir(tmp_path / "old")) == before
    load(tmp_path / "old", [table], ONE)
    assert held(table) == oracle


def test_a_wrong_use_is_refused(tmp_path):
    source = Arrays("x", some_keys(3), rows_of(3, 2))
    with pytest.raises(ValueError, match="different names. Received: 'x', 'x'"):
        write_checkpoint(tmp_path / "a", [source, source])
    with pytest.raises(ValueError, match=r"at least 1 rank. Received: ranks=0"):
        write_checkpoint(tmp_path / "a", [source], 0)
    (tmp_path / "manifest.json").write_text("mine")
    with pytest.raises(FileExistsError, match="no manifest of a checkpoint"):
        write_checkpoint(tmp_path, [source])
    with pytest.raises(FileNotFoundError, match="There is no folder"):
        checkpoint_sources(tmp_path / "a")
    assert os.listdir(tmp_path) == ["manifest.json"]
