"""SOK's dumps: what is read and written, byte by byte, and what SOK's own load makes of it."""

import os
import struct

import numpy as np
import pytest

from sok_lite.cli.errors import WrongUse
from sok_lite.cli.importers.sok import Places, detect, sources, write, write_sorted
from sok_lite.engine.files.manifest import StateFacts
from sok_lite.engine.files.source import TableInfo
from tests.cli.importers.arrays import CASES, Arrays, a_table, content, whole
from tests.support.own_process import run_program

NUMBERS = {
    name: i for i, name in enumerate("int32 int64 uint32 uint64 float16 float32 float64".split())
}
ADAM = [StateFacts(f"states.{i}.{s}", s, 2, 0.0, 1) for i, s in enumerate("mv")]

TWICE = [state._replace(group=2, tensor=f"{state.tensor}2") for state in ADAM]


def header(kind, dtype, state="", name=""):
    """As SOK writes it: text to the right, numbers big-endian."""
    numbers = [number.to_bytes(4, "big") for number in (kind, NUMBERS[dtype])]
    return name.encode().rjust(256) + numbers[0] + state.encode().rjust(32) + numbers[1]


def sok_file(folder, name, kind, array, state="", title=""):
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(header(kind, str(array.dtype), state, title) + array.tobytes())


def sok_dump(folder, keys, rows, name="t_0", **states):
    sok_file(folder, f"{name}-key", 0, keys)
    sok_file(folder, f"{name}-weight", 1, rows)
    for state, array in states.items():
        sok_file(folder, f"{name}-{state.replace('__', '-')}", 2, array, state.split("__")[1])


def loaded_by_sok(folder, name, ranks, rank, dim, *states):
    """What SOK's load gives a rank: every file as a whole, and of it the rows with key % ranks ==
    rank, in the order of the files."""

    def numbers(end):
        data = (folder / f"{name}-{end}").read_bytes()
        (dtype,) = struct.unpack(">I", data[292:296])
        assert len(data) >= 296
        return np.frombuffer(data[296:], list(NUMBERS)[dtype])

    keys = numbers("key")
    is_own = keys % ranks == rank
    return keys[is_own], *(numbers(e).reshape(-1, dim)[is_own] for e in ("weight", *states))


def test_the_bytes_of_a_dump(tmp_path):
    """A table "a/b" of two keys, 3 and 1, and the state of a momentum."""
    arrays = {
        "keys": np.array([3, 1], np.int64),
        "values": np.array([[0.5, -1.0], [2.0, 0.0]], np.float32),
        "states.0.momentum": np.array([[1.0, 1.0], [-0.5, 0.0]], np.float32),
    }
    states = [StateFacts("states.0.momentum", "momentum", 2, 0.0, 1)]
    write(str(tmp_path / "d"), [Arrays("a/b", arrays, "int64", "float32", states)])
    files = {name: (tmp_path / "d" / name).read_bytes() for name in os.listdir(tmp_path / "d")}
    name, blank = b" " * 253 + b"a/b", b" " * 32
    assert files == {
        "a_b_0-key": name
        + b"\0\0\0\0"
        + blank
        + b"\0\0\0\1"
        + bytes.fromhex("0100000000000000 0300000000000000"),
        "a_b_0-weight": name
        + b"\0\0\0\1"
        + blank
        + b"\0\0\0\5"
        + bytes.fromhex("00000040 00000000 0000003f 000080bf"),
        "a_b_0-SGD-momentum": name
        + b"\0\0\0\2"
        + b" " * 24
        + b"momentum"
        + b"\0\0\0\5"
        + bytes.fromhex("000000bf 00000000 0000803f 0000803f"),
    }
    assert {len(data) for data in files.values()} == {296 + 16}


def test_a_dump_of_sok_is_read(tmp_path):
    """Two ranks of a dynamic table: each sorted, one behind the other, and without a name."""
    keys = np.array([0, 4, 2**40, 1, 7], np.int64)
    rows = np.arange(10, dtype=np.float32).reshape(5, 2)
    states = {"Adam__m": rows + 100, "Adam__v": rows + 200}
    sok_dump(tmp_path / "d", keys, rows, **states)
    assert detect(str(tmp_path / "d"))
    (source,) = sources(str(tmp_path / "d"))
    assert (source.name, source.dim, source.dtype, source.key_type) == ("t", 2, "float32", "int64")
    np.testing.assert_array_equal(whole(source, "keys"), keys)
    np.testing.assert_array_equal(whole(source, "values"), rows)
    np.testing.assert_array_equal(whole(source, "states.0.m"), rows + 100)
    np.testing.assert_array_equal(whole(source, "states.1.v"), rows + 200)
    assert source.states == tuple(ADAM)


def test_states_have_our_names_and_go_back(tmp_path):
    keys, rows = np.arange(3), np.ones((3, 2), np.float32)
    for kind, states, read in (
        ("Adam", ["m", "v", "vhat"], [("m", 0), ("v", 0), ("vhat", 0)]),
        ("Adagrad", ["accumulator"], [("accumulator", 0.1)]),
        ("Ftrl", ["accumulator", "linear"], [("accumulator", 0.1), ("linear", 0)]),
        ("Adadelta", ["accum_grad", "accum_var"], [("accumulator", 0), ("delta_accumulator", 0)]),
        ("SGD", ["momentum"], [("momentum", 0)]),
    ):
        one, other = tmp_path / kind, tmp_path / f"{kind} again"
        sok_dump(one, keys, rows, **{f"{kind}__{s}": rows * i for i, s in enumerate(states)})
        (source,) = sources(str(one))
        assert [(state.name, state.initial) for state in source.states] == read
        assert {state.group for state in source.states} == {1}
        (given,) = sources(str(one), initial=f"{read[0][0]}=0.25")
        assert given.states[0].initial == 0.25
        write(str(other), [source])
        names = {"t_0-key", "t_0-weight", *(f"t_0-{kind}-{state}" for state in states)}
        assert {path.name for path in other.iterdir()} == names
        for name in names:
            assert (other / name).read_bytes()[256:] == (one / name).read_bytes()[256:]


def test_states_of_two_optimizers_keep_apart(tmp_path):
    rows = np.ones((3, 2), np.float32)
    states = {"Adagrad__accumulator": rows, "Ftrl__accumulator": rows * 2, "Ftrl__linear": rows * 3}
    sok_dump(tmp_path / "d", np.arange(3), rows, **states)
    (source,) = sources(str(tmp_path / "d"))
    assert [(s.name, s.group) for s in source.states] == [
        ("accumulator", 1),
        ("accumulator", 2),
        ("linear", 2),
    ]
    write(str(tmp_path / "e"), [source])
    (again,) = sources(str(tmp_path / "e"))
    assert content(again) == content(source)


def test_what_is_written_is_read(tmp_path):
    for n, (key_type, dtype) in CASES:
        if dtype in ("bfloat16", "int8"):
            continue  # which it has no place for
        path, source = tmp_path / f"{n} {dtype}", a_table(n, key_type, dtype, states=False)
        write(str(path), [source], ranks=4)
        (again,) = sources(str(path), dim=3)
        assert content(again) == content(source)
        assert (whole(again, "keys")[1:] > whole(again, "keys")[:-1]).all()
        if n == 0:
            with pytest.raises(WrongUse, match="give dim="):
                sources(str(path))


@pytest.mark.parametrize("key_type", ["int64", "int32", "uint64"])
def test_sok_gives_every_rank_its_keys_with_their_rows(tmp_path, key_type):
    for ranks in (1, 2, 3, 4, 7):
        path, least = tmp_path / str(ranks), None if ranks & (ranks - 1) == 0 else 0
        arrays = a_table(50, key_type, dim=2, states=False, least=least).arrays
        arrays["states.0.m"], arrays["states.1.v"] = arrays["values"] + 1, arrays["values"] + 2
        write(str(path), [Arrays("t", arrays, key_type, "float32", ADAM)], ranks=ranks)
        expected = dict(zip(arrays["keys"].tolist(), arrays["values"].tolist(), strict=True))
        num_keys = 0
        for rank in range(ranks):
            keys, rows, m, v = loaded_by_sok(path, "t_0", ranks, rank, 2, "Adam-m", "Adam-v")
            assert {key % ranks for key in keys.tolist()} <= {rank}
            assert rows.tolist() == [expected[key] for key in keys.tolist()]
            np.testing.assert_array_equal(m, rows + 1)
            np.testing.assert_array_equal(v, rows + 2)
            num_keys += len(keys)
        assert num_keys == 50


def test_a_static_table_of_any_number_of_ranks_is_in_order_on_any_other(tmp_path):
    """SOK's own dump is not: it loads rows by their order in the file, where 2 ranks wrote the even
    keys before the odd ones."""
    for before in (1, 2, 4):
        keys = np.concatenate([np.arange(rank, 24, before) for rank in range(before)])
        path, to = tmp_path / f"of {before}", tmp_path / f"ours of {before}"
        sok_dump(path, keys, (keys * 10.0).astype(np.float32).reshape(-1, 1))
        write(str(to), sources(str(path)))
        for ranks in (1, 2, 3, 5):
            for rank in range(ranks):
                _, found = loaded_by_sok(to, "t_0", ranks, rank, 1)
                assert found[:, 0].tolist() == [10.0 * key for key in range(rank, 24, ranks)]


def test_names_of_tables(tmp_path):
    """Ours are in the headers; those of SOK are the files' without TensorFlow's ":0"."""
    names = ["user", "a/b", "x:0", "ä-ö", "n" * 200]
    write(str(tmp_path / "d"), [a_table(2, name=name, states=False) for name in names], ranks=1)
    assert sorted(os.listdir(tmp_path / "d"))[0] == "a_b_0-key"
    assert {source.name for source in sources(str(tmp_path / "d"))} == set(names)
    folder, one = tmp_path / "e", np.ones((1, 1), np.float32)
    for name in ("user_0", "item_0"):
        sok_dump(folder, np.array([1]), one, name)
    assert [source.name for source in sources(str(folder))] == ["item", "user"]
    (source,) = sources(str(folder), table="user_0", name="other")
    assert source.name == "other"
    sok_dump(folder, np.array([1]), one, "user")
    assert [source.name for source in sources(str(folder))] == ["item_0", "user", "user_0"]
    with pytest.raises(WrongUse, match="no table 'x'; it has: 'item_0', 'user', 'user_0'"):
        sources(str(folder), table="x")
    with pytest.raises(WrongUse, match="there are 3: give table="):
        sources(str(folder), name="x")
    sok_dump(tmp_path / "f", np.array([1]), one, "user_0")
    sok_file(tmp_path / "f", "user_0-key", 0, np.array([1]), title="not/user")
    assert [source.name for source in sources(str(tmp_path / "f"))] == ["user"]


def test_keys_and_rows_are_cast(tmp_path):
    rows = np.array([[1.0], [2.5]])
    sok_dump(tmp_path / "d", np.array([1, 2], np.uint32), rows)
    (source,) = sources(str(tmp_path / "d"))
    assert (source.key_type, source.dtype) == ("int64", "float64")
    (source,) = sources(str(tmp_path / "d"), key_type="int32", dtype="bfloat16")
    assert whole(source, "keys").tolist() == [1, 2]
    assert whole(source, "values").tolist() == [[0x3F80], [0x4020]]
    write(str(tmp_path / "e"), [source], dtype="float16", key_type="uint64")
    (again,) = sources(str(tmp_path / "e"))
    assert (again.key_type, again.dtype) == ("uint64", "float16")
    assert whole(again, "values").tolist() == [[1.0], [2.5]]
    sok_dump(tmp_path / "f", np.array([2**31], np.int64), rows[:1])
    (source,) = sources(str(tmp_path / "f"), key_type="int32")
    with pytest.raises(ValueError, match=r"f/t_0-key, column 'keys': .*int32.*2147483648"):
        whole(source, "keys")


def test_states_have_the_dtype_of_the_rows(tmp_path):
    """SOK's check of sizes takes the rows' element for that of the states."""
    source = a_table(5, dtype="float64", least=0, states=False)
    source.arrays["states.0.m"] = source.arrays["states.1.v"] = np.ones((5, 3), np.float32)
    source.states = tuple(state._replace(dim=3) for state in ADAM)
    write(str(tmp_path / "d"), [source])
    assert (tmp_path / "d" / "t_0-Adam-m").read_bytes()[292:] == b"\0\0\0\6" + np.ones(15).tobytes()
    (again,) = sources(str(tmp_path / "d"))
    assert content(again) == content(source)


def changed(arrays, **facts):
    source = a_table(2, states=False, least=0, dim=2)
    source.arrays |= arrays
    for name, value in facts.items():
        setattr(source, name, value)
    return source


def test_what_sok_has_no_place_for_is_refused(tmp_path):
    for number, (source, error) in enumerate(
        [
            (changed({}, dtype="bfloat16"), "no rows of bfloat16.*dtype=float32"),
            (changed({"keys": np.array([-5, 7])}), "has key -5.*power of two.*ranks="),
            (changed({"keys": np.array([2**63 - 1, 7])}), "cannot hold key 9223372036854775807"),
            (
                changed({"keys": np.array([-2, 7])}, about=TableInfo(var_type="hybrid")),
                "cannot hold key -2",
            ),
            (
                changed(
                    {"keys": np.array([2**64 - 2, 7], np.uint64)},
                    key_type="uint64",
                ),
                "cannot hold key 18446744073709551614",
            ),
            (
                changed({}, states=[StateFacts("states.0.rms", "rms", 2, 0.0, 1)]),
                "no optimizer with the states rms.*states=no",
            ),
            (
                changed({}, states=[s._replace(dim=1) for s in ADAM]),
                "as long as rows.*states=no",
            ),
            (changed({}, states=ADAM, dtype="int32"), "no states of rows of int32.*states=no"),
            (changed({}, states=[*ADAM, *TWICE]), "two optimizers.*states=no"),
        ]
    ):
        with pytest.raises(WrongUse, match=error):
            write(str(tmp_path / f"{number}"), [source], ranks=3)


def test_tables_whose_files_have_one_name_are_refused(tmp_path):
    tables = [a_table(1, name=name, states=False) for name in ("a/b", "a_b")]
    with pytest.raises(WrongUse, match="'a/b' and 'a_b' would have one name, a_b_0-key"):
        write(str(tmp_path / "d"), tables)
    assert not os.path.exists(tmp_path / "d")


def test_states_without_the_keys_that_were_never_trained(tmp_path):
    rows = np.ones((4, 2), np.float32)
    sok_dump(tmp_path / "d", np.arange(4), rows, Adam__m=rows[:3], Adam__v=rows[:3])
    with pytest.raises(ValueError, match="t_0-Adam-m.*never trained.*states=no"):
        sources(str(tmp_path / "d"))
    (source,) = sources(str(tmp_path / "d"), states=False)
    assert source.states == ()


def test_a_file_that_is_not_whole_is_named(tmp_path):
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    sok_dump(tmp_path / "d", np.arange(3), rows, Adam__m=rows)
    for file in ("t_0-key", "t_0-weight", "t_0-Adam-m"):
        path = tmp_path / "d" / file
        data = path.read_bytes()
        for length in range(len(data)):
            path.write_bytes(data[:length])
            with pytest.raises((ValueError, WrongUse), match=r"/d/t_0-\w+"):
                sources(str(tmp_path / "d"), dim=2)
        changes = {0: "no UTF-8", 256: "kind", 259: "kind", 260: "state|UTF-8", 292: "dtype"}
        bad = {error: data[:at] + b"\xff" + data[at + 1 :] for at, error in changes.items()}
        for error, wrong in (bad | {"behind its header are": data + b"\0"}).items():
            path.write_bytes(wrong)
            with pytest.raises(ValueError, match=rf"/d/{file} is no whole file .*{error}"):
                sources(str(tmp_path / "d"))
        path.unlink()
        if file != "t_0-Adam-m":
            with pytest.raises((ValueError, OSError), match="t_0-weight|ends in -key"):
                sources(str(tmp_path / "d"))
        path.write_bytes(data)
    (source,) = sources(str(tmp_path / "d"))
    os.truncate(tmp_path / "d" / "t_0-weight", 300)
    with pytest.raises(ValueError, match="t_0-weight was cut at byte 300"):
        whole(source, "values")
    sok_dump(tmp_path / "d", np.arange(3), rows)
    sok_file(tmp_path / "d", "t_0-Adam-m", 2, rows, "v")
    with pytest.raises(ValueError, match="t_0-Adam-m.* byte 260 names state 'v', and the file 'm'"):
        sources(str(tmp_path / "d"))
    with pytest.raises(ValueError, match="has key 7 more than once"):
        write(str(tmp_path / "e"), [changed({"keys": np.array([7, 7])})])


def test_what_is_no_dump(tmp_path):
    (tmp_path / "x-key").write_text("not such a file")
    assert not detect(str(tmp_path)) and not detect(str(tmp_path / "x-key"))
    (tmp_path / "x-key").unlink()
    assert not detect(str(tmp_path)) and not detect(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="no file in it ends in -key"):
        sources(str(tmp_path))


def test_a_full_disk_is_an_error_and_no_signal(tmp_path):
    """Memory that stands for a file without room for it would end the process."""
    program = (
        "import resource, sys\n"
        "from sok_lite.cli.importers.sok import write\n"
        "from tests.cli.importers.arrays import a_table\n"
        "table = a_table(1000, least=0, states=False)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))\n"
        "try:\n"
        "    write(sys.argv[1], [table])\n"
        "except OSError as error:\n"
        "    print(error.strerror)\n"
    )
    assert run_program(program, tmp_path / "d") == "File too large\n"


def test_there_is_room_on_the_disk_before_a_row_is_written(tmp_path):
    path, places = str(tmp_path / "f"), Places(np.arange(4096), np.arange(4096))

    def pieces():
        assert os.stat(path).st_blocks * 512 >= 4096 * 8
        yield np.arange(4096)

    write_sorted(path, b"head", pieces(), np.dtype(np.int64), (), places)
    assert (tmp_path / "f").read_bytes() == b"head" + np.arange(4096).tobytes()
