"""Lookups in the files of increments and of static tables, against a dict of what was written."""

import shutil

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.comm import run_ranks
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine.files import manifest
from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.readonly import open_readonly
from tests.engine.files.test_readonly import as_given, flip
from tests.support.filled_tables import rows_of, some_keys
from tests.support.helpers import new_table
from tests.support.static_parts import everything, part_of

ONE = SingleCommunicator()
CPU = get_backend("cpu")
DIM = 5


def in_parts(path, ranks=1, key_type="int64", dtype="float32", n=61):
    """A whole dump and three increments; returns all keys that were ever there, and {key: row}."""
    keys = some_keys(n, key_type)

    def program(comm):
        table = new_table(CPU, DIM, name="t", key_type=key_type, dtype=dtype)
        mine = keys[table.owner.owners(table.key_dtype.to_int64(np, keys), comm.size) == comm.rank]
        rows = {}

        def give(some, seed):
            given = rows_of(some.size, DIM, dtype, seed=seed)
            table.insert_or_assign(some, given)
            rows.update(zip(some.tolist(), as_given(given, dtype), strict=True))

        def erase(some):
            table.erase(some)
            for key in some.tolist():
                del rows[key]

        def write():
            table.lookup([])
            dump(path, [table], comm, chunk_bytes=16, incremental=True)

        give(mine[3:], 0)
        write()
        give(mine[5:9], 1)
        erase(mine[9:12])
        write()
        if comm.rank == 0:
            give(mine[:3], 2)  # other ranks have an increment without rows
            give(mine[10:11], 3)  # which was erased
            erase(mine[8:9])
        write()
        give(mine[6:7], 4)
        write()
        return rows

    rows = {key: row for each in run_ranks(ranks, program) for key, row in each.items()}
    assert all(len(shard.before) == 3 for shard in manifest.read(path).tables["t"].shards)
    return keys, rows


def assert_finds(table, keys, rows):
    found, is_there = table.find(keys, default=3)
    assert len(table) == len(rows) and is_there.tolist() == [key in rows for key in keys.tolist()]
    assert sorted(table.keys().tolist()) == sorted(rows)
    missing = np.full(table.dim, 3, table.dtype)
    expected = [rows.get(key, missing) for key in keys.tolist()]
    np.testing.assert_array_equal(found, expected)


def test_increments_that_are_removed_stay_open(tmp_path):
    keys, rows = in_parts(tmp_path, ranks=2)
    table = open_readonly(tmp_path, check_rows=True)["t"]
    shutil.rmtree(tmp_path)
    assert_finds(table, keys, rows)


def test_a_corrupt_file_of_any_age_is_told(tmp_path):
    keys, rows = in_parts(tmp_path)
    (shard,) = manifest.read(tmp_path).tables["t"].shards
    for part in shard.chain:
        path = tmp_path / part.file
        content = path.read_bytes()
        begin = 8 + int.from_bytes(content[:8], "little")  # of the keys
        message = f"{path}, a file of table 't', is corrupt: chunk"
        flip(path, begin + 16)  # in a chunk without a byte of the header
        with pytest.raises(ValueError, match=message):
            open_readonly(tmp_path)["t"].prepare()
        path.write_bytes(content)
        for row in range(part.num_rows):
            flip(path, begin + 8 * part.rows + 4 * DIM * row + 16)
        if part.num_rows:
            with pytest.raises(ValueError, match=message):
                open_readonly(tmp_path, check_rows=True)["t"].lookup(keys)
        path.write_bytes(content)
    assert_finds(open_readonly(tmp_path)["t"], keys, rows)


def test_a_key_without_a_row_is_told(tmp_path):
    keys, _ = in_parts(tmp_path)
    found = manifest.read(tmp_path)
    (shard,) = found.tables["t"].shards
    # The file that has the rows of four keys is left out; that of another is in the last one too.
    cut = shard._replace(before=shard.before[:2])
    tables = {"t": found.tables["t"]._replace(shards=(cut,))}
    manifest.publish(tmp_path, manifest.as_text(found._replace(tables=tables)))
    table = open_readonly(tmp_path)["t"]
    for _ in range(2):
        with pytest.raises(ValueError, match="'t', is corrupt: 3 of its keys have no row there"):
            table.lookup(keys[:1])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_static_table_has_its_row_numbers_as_keys(tmp_path, ranks):
    columns = everything(11)

    def program(comm):
        table = new_table(CPU, DIM, name="t")
        part = part_of(CPU, comm, columns)
        for _ in range(2):  # whole each time, beside an increment
            dump(tmp_path, [table, part], comm, incremental=True)

    run_ranks(ranks, program)
    tables = open_readonly(tmp_path)
    assert_finds(tables["s"], np.arange(-1, 13), dict(enumerate(columns["value"])))
    assert len(tables["t"]) == 0 and 0 not in tables["t"]
