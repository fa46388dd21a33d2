"""Lookups in the files of a checkpoint and its increments, against a dict of what was written."""

import os
import threading
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.comm import run_ranks
from sok_lite.comm.single import SingleCommunicator
from sok_lite.engine.files import manifest
from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.readonly import open_readonly
from sok_lite.engine.owner import MOD, AlsoLocal
from tests.support.filled_tables import rows_of, some_keys
from tests.support.helpers import new_table, run_threads
from tests.support.in_parts import dump_in_parts
from tests.support.own_process import run_program
from tests.support.static_parts import everything, part_of

ONE = SingleCommunicator()
CPU = get_backend("cpu")


def table_of(keys, rows, name="t", **options):
    table = new_table(CPU, rows.shape[1], name=name, **options)
    table.insert_or_assign(keys, rows)
    return table


def as_given(rows, dtype):
    """Rows as lookups give them."""
    if dtype == "bfloat16":
        return rows.view(ml_dtypes.bfloat16).astype(np.float32)
    return rows


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_row_is_found(tmp_path, ranks):
    n, dim = 101, 5
    for dtype, key_type, chunk_bytes in (  # chunks that end within rows, and rows longer than one
        *(("float32", "int64", 7), ("float16", "int32", 64), ("bfloat16", "uint64", 7)),
        *(("float64", "int64", 64), ("int32", "uint64", 64), ("int8", "int32", 7)),
    ):
        keys, rows = some_keys(n, key_type), rows_of(n, dim, dtype)

        def write(comm, key_type=key_type, dtype=dtype, keys=keys, rows=rows, size=chunk_bytes):
            table = new_table(CPU, dim, name="t", dtype=dtype, key_type=key_type)
            engine_keys = table.key_dtype.to_int64(np, keys)
            mine = table.owner.owners(engine_keys, comm.size) == comm.rank
            table.insert_or_assign(keys[mine], rows[mine])
            dump(tmp_path, [table], comm, chunk_bytes=size)

        run_ranks(ranks, write)
        expected = as_given(rows, dtype)
        by_key = dict(zip(keys.tolist(), expected, strict=True))
        others = np.setdiff1d(some_keys(40, key_type, seed=9), keys)
        asked = np.concatenate([keys[::3], others, keys[::7]]).reshape(-1, 1)
        for check_rows in (False, True):
            table = open_readonly(tmp_path, check_rows=check_rows)["t"]
            facts = (len(table), table.dim, table.key_type, table.dtype)
            assert facts == (n, dim, key_type, expected.dtype)
            np.testing.assert_array_equal(table.lookup(keys), expected)
            assert sorted(table.keys().tolist()) == sorted(keys.tolist())
            found, is_there = table.find(asked, default=3)
            assert (found.dtype, found.shape) == (expected.dtype, (*asked.shape, dim))
            missing = np.full(dim, 3, expected.dtype)
            for key, row, is_known in zip(asked[:, 0].tolist(), found[:, 0], is_there, strict=True):
                assert is_known == (key in by_key) == (key in table) == (np.array(key) in table)
                np.testing.assert_array_equal(row, by_key.get(key, missing))
            np.testing.assert_array_equal(table.contains(asked), is_there)


def test_a_key_of_several_ranks_has_the_row_of_the_lowest(tmp_path, caplog):
    def write(comm):
        rows = np.full((2, 2), comm.rank, "f4")
        dump(tmp_path, [table_of([5, 6 + comm.rank], rows, owner=AlsoLocal(MOD))], comm)

    run_ranks(2, write)
    table = open_readonly(tmp_path)["t"]
    caplog.clear()
    assert table.lookup([5, 6, 7, 8], default=9)[:, 0].tolist() == [0, 0, 1, 9]
    (said,) = caplog.records
    assert "table 't' has 1 keys more than once: of each the first one" in said.getMessage()


def test_several_tables_are_a_mapping(tmp_path):
    names = ["user", "item/id", "ü", "empty"]
    tables = [table_of([i, 77], np.full((2, i + 1), i, "f4"), name) for i, name in enumerate(names)]
    tables[3].clear()
    dump(tmp_path, tables, ONE)
    opened = open_readonly(str(tmp_path))
    assert list(opened) == names and len(opened) == 4 and "item/id" in opened
    for i, name in enumerate(names[:3]):
        assert opened[name].lookup(77).tolist() == [i] * (i + 1)
    empty = opened["empty"]
    assert len(empty) == 0 and 3 not in empty and empty.keys().shape == (0,)
    assert empty.lookup([3, 77], default=[1, 2, 3, 4]).tolist() == [[1, 2, 3, 4]] * 2
    assert "'ü' keys=2 dim=3 key_type=int64 dtype=float32" in repr(opened)
    with pytest.raises(KeyError, match="no table 'users'. It has: 'empty', 'item/id', 'user'"):
        opened["users"]
    assert opened.get("users") is None


def test_what_is_asked_may_have_any_shape(tmp_path):
    dump(tmp_path, [table_of(np.arange(4), np.arange(8, dtype="f4").reshape(4, 2))], ONE)
    table = open_readonly(tmp_path)["t"]
    assert table.lookup(3).tolist() == [6, 7]
    assert table.lookup([[0, 9], [2, 2]]).tolist() == [[[0, 1], [0, 0]], [[4, 5], [4, 5]]]
    assert table.lookup(np.empty((0, 3), np.int8)).shape == (0, 3, 2)
    assert table.lookup([]).shape == (0, 2)
    rows = table.lookup([1])
    rows += 1  # a copy
    assert table.lookup([1]).tolist() == [[2, 3]]


def test_what_does_not_fit_is_refused(tmp_path):
    dump(tmp_path, [table_of([1], np.ones((1, 2), "f4"), key_type="int32")], ONE)
    table, texts = open_readonly(tmp_path)["t"], r"texts\. Turn .*sok_lite.hash_strings"
    for ask, error, message in (
        (lambda: table.lookup([1.5]), TypeError, "must be integers that fit int32"),
        (lambda: table.lookup([2**40]), ValueError, "1099511627776"),
        (lambda: table.lookup([1], default=[1, 2, 3]), ValueError, "a number or a row of 2"),
        (lambda: table.lookup([1], default="0"), ValueError, "a number or a row of 2"),
        (lambda: table.lookup(["a"]), TypeError, texts),
        (lambda: table.lookup("a"), TypeError, texts),
        (lambda: table.find([b"a"]), TypeError, texts),
        (lambda: table.contains(np.array(["a"], object)), TypeError, texts),
        (lambda: "1" in table, TypeError, "one key, an integer. Received: '1'.*hash_strings"),
        (lambda: [1] in table, TypeError, "one key, an integer"),
    ):
        with pytest.raises(error, match=message):
            ask()
    assert 2**40 not in table and 1 in table


def test_a_default_has_to_fit_the_rows(tmp_path):
    for dtype, fitting, others in (
        ("int8", [-128], [300, 0.5, [1, 128]]),
        ("float16", [65504, -np.inf], [70000.0]),
        *(("bfloat16", [3.4e38], []), ("float32", [], [1e39]), ("float64", [1e39], [])),
    ):
        stored = np.ones((1, 2), "uint16" if dtype == "bfloat16" else dtype)
        dump(tmp_path, [table_of([1], stored, dtype=dtype)], ONE)
        table = open_readonly(tmp_path)["t"]
        for default in fitting:
            expected = np.full((1, 2), default).astype(table.dtype)
            np.testing.assert_array_equal(table.lookup([7], default=default), expected)
        for default in others:
            with pytest.raises(ValueError, match=f"`default` must fit {dtype}, as the rows"):
                table.lookup([7], default=default)


def test_of_saves_by_steps_the_newest_is_opened(tmp_path):
    following = None
    for steps in (3, 20, 100):
        rows = np.full((1, 2), steps, "f4")
        dump(tmp_path / f"step-{steps:010d}", [table_of([1], rows)], ONE)
        following = following or open_readonly(tmp_path)
        assert following.refresh() == (steps > 3)
        assert following["t"].lookup(1).tolist() == [steps, steps]
    assert open_readonly(tmp_path)["t"].lookup(1).tolist() == [100, 100]
    os.unlink(tmp_path / "step-0000000100" / "manifest.json")
    found = open_readonly(tmp_path)
    assert found["t"].lookup(1).tolist() == [20, 20] and "step-0000000020" in repr(found)


def test_a_checkpoint_that_is_replaced_stays_open(tmp_path):
    dump(tmp_path, [table_of([1, 2], np.ones((2, 2), "f4"))], ONE)
    before = open_readonly(tmp_path)["t"]
    dump(tmp_path, [table_of([1, 2], np.full((2, 2), 2, "f4"))], ONE)
    assert before.lookup([1, 2, 3]).tolist() == [[1, 1], [1, 1], [0, 0]]
    assert open_readonly(tmp_path)["t"].lookup(1).tolist() == [2, 2]
    for folder, _, files in os.walk(tmp_path, topdown=False):
        for file in files:
            os.unlink(os.path.join(folder, file))
    assert before.lookup([2]).tolist() == [[1, 1]]


def test_threads_share_a_table(tmp_path):
    keys, rows = some_keys(5000), rows_of(5000, 3)
    dump(tmp_path, [table_of(keys, rows)], ONE, chunk_bytes=4096)
    table = open_readonly(tmp_path, check_rows=True)["t"]
    start = threading.Barrier(8)

    def ask(seed):
        some = np.random.default_rng(seed).integers(0, 5000, 3000)
        start.wait()
        for part in np.array_split(some, 20):
            np.testing.assert_array_equal(table.lookup(keys[part]), rows[part])

    run_threads(ask, 8)


def flip(path, offset):
    """Changes a byte of a file in place, as a disk would."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))


def test_a_corrupt_file_is_told_when_it_is_used(tmp_path):
    n, chunk = 64, 128
    keys, rows = np.arange(n), rows_of(n, 4)
    dump(tmp_path, [table_of(keys, rows)], ONE, chunk_bytes=chunk)
    (path,) = tmp_path.glob("data-*/*.safetensors")
    content = path.read_bytes()
    order = open_readonly(tmp_path)["t"].keys().tolist()
    keys_begin = content.index(np.array(order).tobytes())
    rows_begin = content.index(rows[order].tobytes())
    for at in range(0, keys_begin, 37):
        flip(path, at)
        with pytest.raises(ValueError, match=f"{path}, a file of table 't', is corrupt"):
            open_readonly(tmp_path)
        flip(path, at)
    for at in range(keys_begin, rows_begin, 37):
        flip(path, at)
        for ask in (lambda t: t.lookup([1]), lambda t: 1 in t, lambda t: t.prepare()):
            with pytest.raises(ValueError, match=f"'t', is corrupt: chunk {at // chunk} of"):
                ask(open_readonly(tmp_path)["t"])
        flip(path, at)
    for at in range(rows_begin + chunk, rows_begin + rows.nbytes, 37):
        flip(path, at)
        table = open_readonly(tmp_path, check_rows=True)["t"]
        key = order[(at - rows_begin) // 16]
        with pytest.raises(ValueError, match=f"'t', is corrupt: chunk {at // chunk} of"):
            table.lookup([key])
        np.testing.assert_array_equal(table.lookup(order[0]), rows[order[0]])
        flip(path, at)
    np.testing.assert_array_equal(open_readonly(tmp_path, check_rows=True)["t"].lookup(keys), rows)
    path.write_bytes(content[:-1])
    with pytest.raises(ValueError, match="it has .* bytes and not"):
        open_readonly(tmp_path)


def assert_finds(table, keys, rows):
    found, is_there = table.find(keys, default=3)
    assert len(table) == len(rows) and is_there.tolist() == [key in rows for key in keys.tolist()]
    assert sorted(table.keys().tolist()) == sorted(rows)
    missing = np.full(table.dim, 3, table.dtype)
    expected = [rows.get(key, missing) for key in keys.tolist()]
    np.testing.assert_array_equal(found, expected)


def test_a_corrupt_file_of_any_age_is_told(tmp_path):
    keys, rows = dump_in_parts(tmp_path, dim=5, name="t")
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
            flip(path, begin + 8 * part.rows + 4 * 5 * row + 16)
        if part.num_rows:
            with pytest.raises(ValueError, match=message):
                open_readonly(tmp_path, check_rows=True)["t"].lookup(keys)
        path.write_bytes(content)
    assert_finds(open_readonly(tmp_path)["t"], keys, rows)


def test_a_key_without_a_row_is_told(tmp_path):
    keys, _ = dump_in_parts(tmp_path, dim=5, name="t")
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
        table = new_table(CPU, 5, name="t")
        part = part_of(CPU, comm, columns)
        for _ in range(2):  # whole each time, beside an increment
            dump(tmp_path, [table, part], comm, incremental=True)

    run_ranks(ranks, program)
    tables = open_readonly(tmp_path)
    assert_finds(tables["s"], np.arange(-1, 13), dict(enumerate(columns["value"])))
    assert len(tables["t"]) == 0 and 0 not in tables["t"]


def test_rows_are_not_loaded(tmp_path):
    n, dim = 100_000, 128
    keys = np.arange(n)
    rows = np.repeat(keys[:, None], dim, 1).astype("f4")
    dump(tmp_path, [table_of(keys, rows)], ONE, chunk_bytes=1 << 16)
    tracemalloc.start()
    try:
        table = open_readonly(tmp_path)["t"]
        asked = keys[::1000]
        np.testing.assert_array_equal(table.lookup(asked)[:, -1], asked)
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 10 * n and most < 50 * n < rows.nbytes / 10


WITHOUT_TENSORFLOW = """
import sys
sys.modules["tensorflow"] = None
import sok_lite as sok
tables = sok.open_readonly(sys.argv[1])
assert "sok_served_age_seconds{" in sok.metrics.prometheus(tables)
print(tables["t"].lookup([2, 9], default=-1).tolist(), sorted(
    name for name in sys.modules if name.startswith("sok_lite.bridge")))
"""


def test_it_needs_no_tensorflow(tmp_path):
    dump(tmp_path, [table_of([2], np.array([[5, 6]], "f4"))], ONE)
    assert run_program(WITHOUT_TENSORFLOW, tmp_path) == "[[5.0, 6.0], [-1.0, -1.0]] []\n"
