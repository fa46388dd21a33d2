"""Tables as files of other formats, and where files are written."""

import contextlib
import errno
import io
import itertools
import os
import sys

import numpy as np
import pytest

from sok_lite.cli.main import main
from sok_lite.engine.files.dump import dump
from sok_lite.engine.files.source import checkpoint_sources
from tests.cli.helpers import CPU, NAMES, ONE, dumped, fine, loaded, run
from tests.conftest import QUICK
from tests.support.failing_calls import FailingCalls
from tests.support.filled_tables import KINDS
from tests.support.helpers import new_table


def bits_to_float(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def expected(path, name, columns):
    """What is to be in a file, by column: the rows of bfloat16 as float32."""
    (source,) = [source for source in checkpoint_sources(path) if source.name == name]
    found = {}
    for column in ("keys", "values", *columns):
        pieces = list(source.read(column))
        found[column] = np.concatenate(pieces) if pieces else None
    if source.dtype == "bfloat16" and found["values"] is not None:
        found["values"] = bits_to_float(found["values"])
    return found


def from_npz(path):
    with np.load(path) as archive:
        return {name: array for name, array in archive.items() if name != "about"}


def from_parquet(path):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(path)
    found = {}
    for name in table.column_names:
        array = table[name].combine_chunks()
        if hasattr(array, "flatten") and hasattr(array.type, "list_size"):
            rows = array.flatten().to_numpy(zero_copy_only=False)
            found[name] = rows.reshape(-1, array.type.list_size)
        else:
            found[name] = array.to_numpy(zero_copy_only=False)
    return {{"key": "keys", "value": "values"}.get(name, name): a for name, a in found.items()}


READERS = {"npz": from_npz, "parquet": from_parquet}


@pytest.mark.parametrize("form", READERS)
def test_a_table_is_exported(tmp_path, monkeypatch, form):
    if form == "parquet":
        pytest.importorskip("pyarrow")
    monkeypatch.setattr("sok_lite.engine.files.saved_file.CHUNK_BYTES", 100)
    for n, key_type, dtype in (
        *((0, "int64", "float32"), (1, "int32", "bfloat16"), (33, "uint64", "float16")),
        *((33, "int64", "float64"), (33, "int64", "int8"), (33, "int32", "bfloat16")),
    ):
        path, to = tmp_path / "c", tmp_path / "file"
        dumped(path, n, key_type=key_type, dtype=dtype)
        arguments = ["export", path, "--table", NAMES[1], "--format", form, "--to", to]
        fine(*arguments, "--columns", "states.0.m,stamps")
        found, oracle = READERS[form](to), expected(path, NAMES[1], ["stamps", "states.0.m"])
        assert found.keys() == oracle.keys()
        for name, array in oracle.items():
            if n:
                np.testing.assert_array_equal(found[name], array, strict=True)
            assert len(found[name]) == n
        assert found["values"].shape == (n, 3) and found["keys"].dtype == key_type
        status, _, err = run(*arguments)
        assert status == 2 and "is there already" in err
        fine(*arguments, "--force")
        assert READERS[form](to).keys() == {"keys", "values"}
        assert sorted(os.listdir(tmp_path)) == ["c", "file"]
        to.unlink()


def test_every_number_comes_back_from_csv(tmp_path):
    for dtype in ("float32", "bfloat16", "float64", "int64"):
        dumped(tmp_path / "c", 33, names=["user"], dtype=dtype, key_type="uint64")
        to = tmp_path / f"{dtype}.csv"
        fine("export", tmp_path / "c", "--format", "csv", "--to", to, "--columns", "all")
        head, *lines = to.read_text().splitlines()
        states = [f"states.0.m_{i}" for i in range(3)]
        assert head.split(",") == ["key", "value_0", "value_1", "value_2", "stamps", *states]
        columns = list(zip(*(line.split(",") for line in lines), strict=True))
        oracle = expected(tmp_path / "c", "user", ["stamps", "states.0.m"])
        assert [int(text) for text in columns[0]] == oracle["keys"].tolist()
        kind = int if dtype == "int64" else float
        read = [[kind(text) for text in column] for column in columns[1:4]]
        np.testing.assert_array_equal(np.array(read, oracle["values"].dtype).T, oracle["values"])
        read = np.array(columns[5:], np.float32).T
        np.testing.assert_array_equal(read, oracle["states.0.m"])


def test_what_is_exported_must_be_there(tmp_path):
    dumped(tmp_path / "c", 3)
    start = ["export", tmp_path / "c", "--format", "npz", "--to", tmp_path / "f"]
    cases = {
        (): "has 2 tables: say which, --table: 'user', 'it/em, ä\\n'",
        ("--table", "x"): "has no table 'x'",
        (
            "--table",
            "user",
            "--columns",
            "v",
        ): "no column 'v'; it has: keys, values, stamps, s",
    }
    for more, text in cases.items():
        status, _, err = run(*start, *more)
        assert status == 2 and text in err
    assert os.listdir(tmp_path) == ["c"]


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    dumped(tmp_path / "c", 3, names=["user"])
    arguments = ["--format", "parquet", "--to", tmp_path / "f"]
    status, _, err = run("export", tmp_path / "c", *arguments)
    assert status == 3 and 'Install it with `pip install "sok_lite[parquet]"`' in err
    assert os.listdir(tmp_path) == ["c"]


def test_a_table_is_converted(tmp_path):
    dumped(tmp_path / "c", 9)
    to = tmp_path / "new" / "rows.csv"
    fine("convert", tmp_path / "c", to, "--table", "user")
    assert to.read_text().startswith("key,value_0,value_1,value_2,stamps,states.0.m_0")
    npz = tmp_path / "new" / "ROWS.NPZ"
    fine("export", tmp_path / "c", "--table", "user", "--to", npz)
    assert len(from_npz(npz)["keys"]) == 9
    status, _, err = run("convert", tmp_path / "c", tmp_path / "two", "--to-format", "csv")
    assert status == 2 and "a CSV file has one table, and there are 2" in err
    assert sorted(os.listdir(tmp_path)) == ["c", "new"]


def test_what_is_there_stays_until_the_new_is_whole(tmp_path):
    dumped(tmp_path / "c", 50, names=["user"])
    (path,) = (tmp_path / "c").rglob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # in the last column, which is read last
    path.write_bytes(data)
    (tmp_path / "f").write_text("old")
    for form in ("npz", "csv", "parquet"):
        arguments = ["--format", form, "--to", tmp_path / "f", "--columns", "all", "--force"]
        status, _, err = run("export", tmp_path / "c", *arguments)
        assert status == 3 and "corrupt" in err
        assert (tmp_path / "f").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["c", "f"]


def test_only_what_a_command_writes_is_replaced(tmp_path):
    dumped(tmp_path / "c", 3, names=["user"])
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").write_text("dear")
    (tmp_path / "file").write_text("x")
    for to in ("home", "file"):
        status, _, err = run("reshard", tmp_path / "c", tmp_path / to, "--ranks", 2, "--force")
        assert status in (2, 3) and to in err
    to = ["--format", "csv", "--to", tmp_path / "home", "--force"]
    status, _, err = run("export", tmp_path / "c", *to)
    assert status == 2 and "is not replaced" in err
    os.mkfifo(tmp_path / "pipe")
    status, _, err = run("export", tmp_path / "c", *to[:3], tmp_path / "pipe", "--force")
    assert status == 2 and "is not replaced" in err
    dumped(tmp_path / "c" / "inner", 3)
    status, _, err = run("reshard", tmp_path / "c/inner", tmp_path / "c", "--ranks", 2, "--force")
    assert status == 2 and "which is read, is in it" in err
    assert (tmp_path / "home" / "letter").read_text() == "dear"
    assert (tmp_path / "file").read_text() == "x"
    (tmp_path / "empty").mkdir()  # may be written to
    fine("reshard", tmp_path / "c/inner", tmp_path / "empty", "--ranks", 2)
    fine("diff", tmp_path / "c/inner", tmp_path / "empty")


def test_any_call_of_the_system_may_fail(tmp_path):
    """The checkpoint that is replaced is the old one or the new one, and no rest stays."""
    old, new = (
        dumped(tmp_path / name, 20, seed, names=["user"])["user"]
        for name, seed in (("old", 1), ("new", 2))
    )
    step, num_failed = 5 if QUICK else 2, 0
    for number in itertools.count(1, step):
        to, code = tmp_path / str(number), (errno.ENOSPC, errno.EIO)[number % 3 % 2]
        fine("merge", tmp_path / "old", to)
        with pytest.MonkeyPatch.context() as patch:
            calls = FailingCalls(patch, number, code)
            status, _, err = run("reshard", tmp_path / "new", to, "--ranks", 2, "--force")
        assert status in (0, 3) and (status == 3) == (os.strerror(code) in err)
        num_failed += status == 3
        found = loaded(to, "user")[0]
        assert found == new if status == 0 else found in (old, new)
        if calls.count < number:
            break
    assert num_failed > 10 // step


def test_a_full_disk_is_told_with_the_table_and_its_bytes(tmp_path):
    dumped(tmp_path / "c", 20, names=["user"])
    (source,) = checkpoint_sources(tmp_path / "c")
    size, to, errors = source.num_keys * (8 + 3 * 4), tmp_path / "u.csv", []
    told = f"{to}: No space left on device: the output of 'user', from {size:,} bytes of keys and"
    for number in range(1, 6):
        with pytest.MonkeyPatch.context() as patch:
            FailingCalls(patch, number, errno.ENOSPC)
            arguments = ("export", tmp_path / "c", "--format", "csv", "--to", to, "--force")
            status, _, err = run(*arguments)
        errors += [err] * (status == 3)
    assert errors and all(told in err and "bytes are free" in err for err in errors), errors


def test_what_a_file_has_is_told_where_a_load_would_not_take_it_as_it_is(tmp_path):
    keys = np.random.default_rng(0).permutation([*range(50), 7, 7, 3])
    np.savez(tmp_path / "user.npz", keys=keys, values=np.ones((53, 2)))
    status, out, err = run("convert", tmp_path / "user.npz", tmp_path / "c")
    repeated, rows = err.splitlines()
    start = "sok-lite convert: table 'user': "
    assert (status, out) == (0, "")
    assert (
        repeated == f"{start}2 keys come more than once; a load takes the first row of each: 3, 7"
    )
    assert rows.startswith(f"{start}the rows are float64: a table of float32 loads them with cast")
    option = "dtype=float32"
    assert option in rows
    np.savez(tmp_path / "user.npz", keys=np.arange(50), values=np.ones((50, 2)))
    fine("convert", tmp_path / "user.npz", tmp_path / "d", "--from-option", option)


def test_what_was_written_is_told_on_a_terminal(tmp_path):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    dumped(tmp_path / "c", 9)
    to = tmp_path / "user.npz"
    for more, expected in ([], f"{to}: 1 table, 9 keys\n"), (["--no-progress"], ""):
        for command in ("convert", "export"):
            with contextlib.redirect_stderr(Terminal()) as shown:
                arguments = [command, tmp_path / "c", "--table", "user", "--force", *more]
                to_option = ["--to"] * (command == "export")
                assert main([*map(str, arguments), *to_option, str(to)]) == 0
            assert shown.getvalue().rpartition("\r")[2].lstrip(" ").endswith(expected)
            assert bool(shown.getvalue()) == bool(expected)


def test_keys_without_a_row_are_not_left_out_without_a_word(tmp_path):
    table = new_table(CPU, 3, name="user", **KINDS["sightings"])
    for keys in ([7, 8, 9], [9]):
        table.lookup(keys)
    dump(tmp_path / "c", [table], ONE)
    status, out, err = run("convert", tmp_path / "c", tmp_path / "c.npz", "--to-format", "npz")
    assert (status, out) == (0, "")
    assert err == (
        "sok-lite convert: table 'user': left out 2 keys without a row, which format npz has no "
        "place for\n"
    )
    fine("convert", tmp_path / "c.npz", tmp_path / "again")
    fine("diff", tmp_path / "c", tmp_path / "again")


@pytest.mark.parametrize("form", ["sok", "tfra", "hkv"])
def test_a_folder_with_something_else_in_it_is_not_replaced(tmp_path, form):
    rows = np.ones((3, 2), np.float32)
    np.savez(tmp_path / "user.npz", keys=[1, 2, 3], values=rows, m=rows, v=rows)
    states = ["--from-option", "columns=m=m,v=v"] if form != "hkv" else []
    to = tmp_path / "to"
    arguments = ["convert", tmp_path / "user.npz", to, "--to-format", form, *states]
    fine(*arguments)
    fine(*arguments, "--force")
    for path in (to / name for name in ("notes.txt", "a-b-c", "dense/weights")):
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
        status, _, err = run(*arguments, "--force")
        assert status == 2 and "is not replaced, since" in err
        assert path.read_text() == "mine"
        path.unlink()
