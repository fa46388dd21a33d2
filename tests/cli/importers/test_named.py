"""Files whose columns have names: npz, safetensors, Parquet."""

import importlib
import json
import os
import re
import zipfile

import numpy as np
import pytest

from sok_lite.cli import named
from sok_lite.cli.errors import WrongUse
from sok_lite.engine.files.manifest import StateFacts
from tests.cli.helpers import run
from tests.cli.importers.arrays import CASES, a_table, content, whole
from tests.conftest import QUICK

FORMATS = ("npz", "safetensors", "parquet")


@pytest.fixture(params=FORMATS)
def module(request):
    if request.param == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    return importlib.import_module(f"sok_lite.cli.importers.{request.param}")


def one(module, path, **options):
    (source,) = module.sources(str(path), **options)
    return source


def with_columns(module, path, keys=None, values=None, **columns):
    """A file of somebody else, that says nothing of its columns but their names."""
    keys = np.arange(3) if keys is None else keys
    values = np.ones((3, 2), np.float32) if values is None else values
    arrays = {"keys": keys, "values": values} | columns
    arrays = {name: array for name, array in arrays.items() if array is not ...}
    if module.__name__.endswith("npz"):
        with open(path, "wb") as file:
            np.savez(file, **arrays)
    elif module.__name__.endswith("parquet"):
        import pyarrow
        import pyarrow.parquet

        lists = {n: a.tolist() if a.ndim == 2 else a for n, a in arrays.items()}
        types = {n: pyarrow.from_numpy_dtype(a.dtype) for n, a in arrays.items()}
        table = {
            n: pyarrow.array(lists[n], pyarrow.list_(types[n]) if a.ndim == 2 else types[n])
            for n, a in arrays.items()
        }
        pyarrow.parquet.write_table(pyarrow.table(table), path)
    else:
        names = {"int64": "I64", "float32": "F32", "float64": "F64", "uint16": "U16"}
        names |= {"int32": "I32", "float16": "F16", "uint64": "U64", "uint32": "U32"}
        header, begin = {}, 0
        for name, array in arrays.items():
            header[name] = {
                "dtype": names[str(array.dtype)],
                "shape": array.shape,
                "data_offsets": [begin, begin + array.nbytes],
            }
            begin += array.nbytes
        text = json.dumps(header).encode()
        data = b"".join(array.tobytes() for array in arrays.values())
        path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_what_is_written_is_read(module, tmp_path):
    for i, (n, (key_type, dtype)) in enumerate(CASES):
        path, source = tmp_path / f"f{i}", a_table(n, key_type, dtype, name="ä/b c")
        module.write(str(path), [source])
        assert module.detect(str(path))
        again = one(module, path)
        assert content(again) == content(source)
        assert again.about.facts["num_lookups"] == 2**32 - 1


def test_pieces_of_any_length(module, tmp_path, monkeypatch):
    source = a_table(20, dtype="float64")
    module.write(str(tmp_path / "f"), [source])
    for piece in (1, 2, 6, 7, 8, 100):
        monkeypatch.setattr("sok_lite.cli.file_source.CHUNK_BYTES", piece * 8 * 3)
        again = one(module, tmp_path / "f")
        lengths = [len(rows) for rows in again.read("values")]
        assert max(lengths) == min(piece, 20)
        for column in again.columns:
            assert [len(p) for p in again.read(column)] == lengths
        assert content(again) == content(source)


def test_columns_have_other_names_and_types(module, tmp_path):
    columns = {
        "id": np.array([3, 1, 2], np.int32),
        "row": np.arange(6, dtype=np.float64).reshape(3, 2),
        "adam_m": np.full((3, 2), 0.5, np.float16),
        "freq": np.array([7, 0, 9], np.int64),
    }
    path = with_columns(module, tmp_path / "f", ..., ..., **columns)
    source = one(
        module,
        path,
        columns="keys=id,values=row,m=adam_m,scores=freq",
        name="user",
        dtype="bfloat16",
        key_type="uint64",
        initial="m=0.25",
    )
    assert source.states == (StateFacts("states.0.m", "m", 2, 0.25, None),)
    assert (source.name, source.dtype, source.key_type) == ("user", "bfloat16", "uint64")
    assert whole(source, "keys").tolist() == [3, 1, 2]
    assert whole(source, "values").tolist() == [[0, 0x3F80], [0x4000, 0x4040], [0x4080, 0x40A0]]
    assert whole(source, "states.0.m").tolist() == [[0.5, 0.5]] * 3
    assert whole(source, "scores").tolist() == [7, 0, 9]
    assert one(module, with_columns(module, tmp_path / "user.of.x")).name == "user.of"


def test_what_does_not_fit_is_refused(module, tmp_path):
    for columns, options, error in [
        ({"keys": ...}, {}, "f has no column of keys"),
        (
            {"values": ...},
            {},
            "f has no column of values. It has: 'keys'. Rows are an? .*, and none",
        ),
        (
            {"keys": ..., "values": ..., "item_id": np.arange(3), "vec": np.ones((3, 2))},
            *({}, "It has: 'item_id', 'vec'.*-option columns=keys=item_id,values=vec`"),
        ),
        ({"keys": np.arange(4)}, {}, r"'keys' must have shape \(3,\).*Received: \(4,\)"),
        ({"keys": np.ones(3)}, {}, "f: column 'keys' must be of integers. Received: float64"),
        ({"values": np.ones(3)}, {}, r"f: the values must have shape \(n, dim\). Received: \(3,\)"),
        ({"values": np.ones((3, 2), np.uint16)}, {}, 'values are uint16.*dtype="bfloat16"'),
        ({"scores": np.ones((3, 2))}, {}, r"'scores' must have shape \(3,\)"),
        ({"scores": np.ones(3)}, {}, "'scores' must be of integers"),
        ({}, {"dtype": "float8"}, "dtype must be one of"),
        ({}, {"key_type": "int16"}, "key_type must be one of"),
        ({}, {"columns": "keys=id"}, "f has no column 'id'; it has: 'keys', 'values'"),
        ({}, {"columns": "keys"}, "columns='keys' must be names and names"),
        ({}, {"columns": "m=keys"}, r"state 'm' must have shape \(n, dim\)"),
        ({}, {"initial": "m=1"}, "names 'm'; the states that are there are: none"),
        ({}, {"initial": "m"}, "must be names of states with numbers"),
    ]:
        is_uneven = (
            len(columns.get("keys", (0, 1, 2)) if columns.get("keys") is not ... else "abc") != 3
        )
        if is_uneven and module.__name__.endswith("parquet"):
            continue  # columns of Parquet always have the same number of lines
        path = with_columns(module, tmp_path / "f", **columns)
        with pytest.raises((ValueError, WrongUse), match=error):
            one(module, path, **options)


def test_numbers_that_do_not_fit_are_named(module, tmp_path):
    for columns, options, read, error in [
        ({"keys": np.array([1, 2**31, 2])}, {"key_type": "int32"}, "keys", "2147483648"),
        ({"keys": np.array([1, -1, 2])}, {"key_type": "uint64"}, "keys", "Received: -1"),
        ({"scores": np.array([1, -7, 2])}, {}, "scores", "Received: -7"),
        ({}, {"dtype": "int64"}, "values", "values must be int64"),
        ({"values": np.full((3, 2), 300)}, {"dtype": "int8"}, "values", "300"),
    ]:
        source = one(module, with_columns(module, tmp_path / "f", **columns), **options)
        with pytest.raises(ValueError, match=f"f, column '{read}': .*{error}"):
            whole(source, read)


def test_one_table_a_file_which_stays(module, tmp_path):
    with pytest.raises(WrongUse, match="one table, and there are 2"):
        module.write(str(tmp_path / "f"), [a_table(1), a_table(2)])
    assert not os.path.exists(tmp_path / "f")
    (tmp_path / "f").write_text("old")
    with pytest.raises(FileExistsError):
        module.write(str(tmp_path / "f"), [a_table(1)])
    assert (tmp_path / "f").read_text() == "old"


def read_all(module, path):
    """Everything that can be read of a file, or the error."""
    try:
        source = one(module, path)
        return content(source), source.about.facts
    except (ValueError, WrongUse) as error:
        assert str(path) in str(error)
        return None


def test_a_cut_file_is_refused(module, tmp_path):
    module.write(str(tmp_path / "f"), [a_table(9)])
    data = (tmp_path / "f").read_bytes()
    for length in {*range(0, len(data), 23), *range(20), *range(len(data) - 20, len(data))}:
        (tmp_path / "f").write_bytes(data[:length])
        assert read_all(module, tmp_path / "f") is None, length
        module.detect(str(tmp_path / "f"))  # says anything, and raises nothing


def test_a_file_that_is_none(module, tmp_path):
    assert not module.detect(str(tmp_path)) and not module.detect(str(tmp_path / "none"))
    for data in (b"", b"PAR1", b"PK\3\4 and so on", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0[]"):
        (tmp_path / "f").write_bytes(data)
        assert read_all(module, tmp_path / "f") is None
    with pytest.raises(FileNotFoundError):
        one(module, tmp_path / "none")
    with pytest.raises(IsADirectoryError):
        one(module, tmp_path)


@pytest.mark.parametrize("compress", [{}, {"compress": True}], ids=str)
def test_every_byte_that_flips(module, tmp_path, compress):
    """Never another error than that the file is corrupt. npz and Parquet have checksums of their
    data; a file of safetensors has none, and its numbers change."""
    name = module.__name__.rpartition(".")[2]
    if compress and name != "npz":
        pytest.skip("only npz has two ways")
    module.write(str(tmp_path / "f"), [a_table(3, dim=1)], **compress)
    data = bytearray((tmp_path / "f").read_bytes())
    good = read_all(module, tmp_path / "f")
    for at in range(0, len(data), 23 if QUICK else 7):
        data[at] ^= 0xFF
        (tmp_path / "f").write_bytes(data)
        data[at] ^= 0xFF
        found = read_all(module, tmp_path / "f")
        is_same = found is None or list(found[0][0].values()) == list(good[0][0].values())
        assert is_same or name == "safetensors"


def test_what_a_file_says_of_its_table_is_not_believed():
    for about, error in [
        ("[1]", "no JSON object"),
        ("{", "no JSON object"),
        ('{"num_lookups": -1}', "a num_lookups that is none"),
        ('{"num_lookups": 4294967296}', "a num_lookups that is none"),
        ('{"epoch": true}', "a epoch that is none"),
        ('{"table": 1}', "a table that is none"),
        ('{"states": {}}', "a states that is none"),
        ('{"columns": ["slots"]}', "it has no 'slots'"),
        ('{"columns": [{}]}', "it has no '{}'"),
        ('{"states": [1, 1, 1, 1]}', "a state is missing"),
        ('{"states": [1]}', "does not fit"),
        ('{"states": [{"name": "v", "initial": 0, "group": 1}]}', "names state 'v' where 'm' is"),
        ('{"states": [{"name": "m", "initial": "x", "group": 1}]}', "does not fit"),
        ('{"states": [{"name": "m", "initial": 0, "group": 0}]}', "group 0"),
        ('{"states": [{"name": "m", "initial": 0}]}', "does not fit"),
        ("[" * 100000, "no JSON object"),
    ]:
        source = a_table(3)
        found = {
            name: named.Stored(str(array.dtype), array.shape, lambda _, array=array: iter([array]))
            for name, array in source.arrays.items()
        }
        with pytest.raises(ValueError, match=f"x is corrupt, or another kind of file: .*{error}"):
            named.named_source("x", found, about)


def test_no_key_was_seen_after_the_last_lookup(module, tmp_path):
    path = with_columns(module, tmp_path / "f", stamps=np.array([1, 70, 5], np.uint32))
    assert one(module, path).about.facts == {"num_lookups": 70}


def check_refused(module, path, error):
    """The command line says so in one line, too."""
    with pytest.raises(ValueError, match=error):
        one(module, path)
    name = module.__name__.rpartition(".")[2]
    status, out, err = run("inspect", path, "--from-format", name)
    assert (status, out, err.count("\n")) == (3, "", 1)
    assert re.search(error, err) and "--debug" not in err


def test_arrays_without_numbers_are_refused_and_not_left_out(tmp_path):
    for columns, error in [
        (
            {"keys": np.zeros(3, [("a", "i8")])},
            r"f: column 'keys' must be of integers.*\('a', '<i8'",
        ),
        ({"keys": np.array(["1", "2"])}, "'keys' must be of integers.*: <U1. Of texts sok.hash_st"),
        ({"values": np.zeros((3, 2), [("a", "f4")])}, r"f: the values are \[\('a', '<f4'\)\]"),
        ({"values": np.full((3, 2), {}, object)}, "f: the values are object"),
        ({"states.0.m": np.full((3, 2), {}, object)}, "'states.0.m' must be of numbers.*: object"),
        ({"states.0.m": np.zeros((3, 2), [("a", "f4")])}, "'states.0.m' must be of numbers"),
        ({"states.0.m": np.ones((3, 2, 1))}, r"state 'm' must have shape \(n, dim\)"),
        ({"scores": np.full(3, {}, object)}, "'scores' must be of integers.*: object"),
        ({"stamps": np.array([1, np.inf, 2])}, "'stamps' must be of integers.*: float64"),
        ({"stamps": np.zeros(3, [("a", "u4")])}, "'stamps' must be of integers"),
    ]:
        module = importlib.import_module("sok_lite.cli.importers.npz")
        check_refused(module, with_columns(module, tmp_path / "f", **columns), error)


def test_an_array_that_is_there_twice(tmp_path):
    module = importlib.import_module("sok_lite.cli.importers.npz")
    path = with_columns(module, tmp_path / "f")
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate name"):
        archive.writestr("keys.npy", archive.read("keys.npy"))
    check_refused(module, path, "'keys.npy' is in it twice")


def test_a_header_of_an_array_that_no_parser_takes(tmp_path):
    for text in ["{'descr': ('<f4', (", "{[]: 1}", "(" * 9000, "{'descr': '(2,', 'shape': (), %s}"]:
        module = importlib.import_module("sok_lite.cli.importers.npz")
        path = with_columns(module, tmp_path / "f")
        header = (text.replace("%s", "'fortran_order': False") + "\n").encode()
        with zipfile.ZipFile(path, "a") as archive:
            member = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header
            archive.writestr("x.npy", member)
        check_refused(module, path, "f is corrupt.*the header of 'x.npy' is none")


KEYS = {"dtype": "I64", "shape": [3], "data_offsets": [0, 24]}
ROWS = {"dtype": "F32", "shape": [3, 2], "data_offsets": [24, 48]}
STATE = {"dtype": "F32", "shape": [3, 2], "data_offsets": [48, 72]}


def test_tensors_that_overlap_or_are_none(tmp_path):
    for tensors, num_bytes, error in [
        ([("keys", KEYS), ("values", ROWS | {"data_offsets": [0, 24]})], 24, "'values' does not"),
        ([("keys", KEYS), ("values", ROWS | {"data_offsets": [32, 56]})], 56, "'values' does not"),
        ([("values", ROWS), ("keys", KEYS), ("x", STATE | {"data_offsets": [40, 64]})], 64, "'x'"),
        ([("keys", KEYS), ("values", ROWS), ("values", STATE)], 72, "'values' is there twice"),
        (
            [("keys", KEYS), ("values", ROWS), ("states.0.m", STATE | {"dtype": "F8_E4M3"})],
            *(72, "'states.0.m' must be of numbers. Received: F8_E4M3"),
        ),
        (
            [("keys", KEYS), ("values", ROWS), ("states.0.m", STATE | {"shape": [3, 2, 1]})],
            *(72, r"state 'm' must have shape \(n, dim\)"),
        ),
        ([("keys", KEYS), ("values", ROWS | {"dtype": "BOOL"})], 48, "the values are BOOL"),
    ]:
        module = importlib.import_module("sok_lite.cli.importers.safetensors")
        text = ", ".join(f"{json.dumps(name)}: {json.dumps(facts)}" for name, facts in tensors)
        header = f"{{{text}}}".encode()
        data = len(header).to_bytes(8, "little") + header + bytes(num_bytes)
        (tmp_path / "f").write_bytes(data)
        check_refused(module, tmp_path / "f", error)


def test_bytes_of_safetensors_that_are_not_its_tensors(tmp_path):
    module = importlib.import_module("sok_lite.cli.importers.safetensors")
    data = with_columns(module, tmp_path / "f").read_bytes()
    for bad, text in (
        (data + b"\0", "its tensors have 48 bytes, and there are 49"),
        (data.replace(b"[3]", b"[9]"), "tensor 'keys' is not where its shape says"),
        ((2**62).to_bytes(8, "little") + b"{}", "longer than the file, or allowed"),
    ):
        (tmp_path / "f").write_bytes(bad)
        with pytest.raises(ValueError, match=text):
            one(module, tmp_path / "f")


def test_arrays_by_columns_are_refused(tmp_path):
    module = importlib.import_module("sok_lite.cli.importers.npz")
    path = with_columns(module, tmp_path / "f", values=np.ones((2, 3), np.float32).T)
    with pytest.raises(ValueError, match=r"values.npy' is stored column by column.*contiguous"):
        one(module, path)
    one(module, with_columns(module, tmp_path / "g", values=np.ones((1, 3), np.float32).T))


def test_arrays_of_objects_and_of_other_byte_orders(tmp_path):
    """Objects are pickles: nobody unpickles them."""
    module = importlib.import_module("sok_lite.cli.importers.npz")
    rows = np.arange(6, dtype=">f4").reshape(3, 2)
    objects = np.array([{}] * 3)
    path = with_columns(module, tmp_path / "f", np.arange(3, dtype=">i8"), rows, o=objects)
    source = one(module, path)
    assert (source.key_type, source.dtype) == ("int64", "float32")
    assert whole(source, "keys").tolist() == [0, 1, 2]
    assert whole(source, "values").tolist() == rows.tolist()
    with pytest.raises(ValueError, match="'scores' must be of integers. Received: object"):
        one(module, path, columns="scores=o")


def test_lists_that_are_no_rows(tmp_path):
    for lists, error in [
        ([[1.0, 2.0], [3.0], [4.0, 5.0]], "has lists of 2 and of 1 elements"),
        ([[1.0, 2.0], None, [4.0, 5.0]], "has values that are missing"),
        ([[1.0, 2.0], [3.0, None], [4.0, 5.0]], "has values that are missing"),
    ]:
        pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
        parquet = importlib.import_module("pyarrow.parquet")
        module = importlib.import_module("sok_lite.cli.importers.parquet")
        parquet.write_table(pyarrow.table({"key": [1, 2, 3], "value": lists}), tmp_path / "f")
        source = one(module, tmp_path / "f")
        with pytest.raises(ValueError, match=f"f is corrupt.*column 'value' {error}"):
            whole(source, "values")


def test_lines_of_parquet(tmp_path):
    """Numbered columns in any order, keys with holes, and lists in a file without lines."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = importlib.import_module("pyarrow.parquet")
    module = importlib.import_module("sok_lite.cli.importers.parquet")
    columns = {f"value_{i}": [i, i + 0.5] for i in range(11)}
    table = pyarrow.table({"key": [1, 2]} | dict(reversed(columns.items())))
    parquet.write_table(table, tmp_path / "f", row_group_size=1)
    expected = np.array(list(columns.values())).T
    np.testing.assert_array_equal(whole(one(module, tmp_path / "f"), "values"), expected)
    parquet.write_table(table.append_column("x", [[1, None]]), tmp_path / "g")
    source = one(module, tmp_path / "g", columns="keys=x")
    with pytest.raises(ValueError, match="column 'x' has values that are missing"):
        whole(source, "keys")
    kinds = {"key": pyarrow.int64(), "value": pyarrow.list_(pyarrow.float32())}
    parquet.write_table(
        pyarrow.table({n: pyarrow.array([], k) for n, k in kinds.items()}), tmp_path / "h"
    )
    with pytest.raises(ValueError, match="no column of values"):
        one(module, tmp_path / "h")
    assert one(module, tmp_path / "h", dim=5).dim == 5


def test_names_of_parquet(tmp_path):
    """Columns of texts are named, and numbered ones of any name are rows."""
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = importlib.import_module("pyarrow.parquet")
    module = importlib.import_module("sok_lite.cli.importers.parquet")
    texts, rows = ["a", "b"], [[1.0, 2.0], [3.0, 4.0]]
    parquet.write_table(pyarrow.table({"key": texts, "value": rows}), tmp_path / "f")
    check_refused(module, tmp_path / "f", "'key' must be of integers. Received: string. Of texts")
    with pytest.raises(WrongUse, match="no column 'id'; it has: 'key', 'value'$"):
        one(module, tmp_path / "f", columns="keys=id")
    wide = {"e1": [2.0, 4.0], "user_id": [5, 6], "e0": [1.0, 3.0]}
    parquet.write_table(pyarrow.table(wide), tmp_path / "g")
    names = r"It has: 'user_id', 'e' \(e0 to e1\)\..*`--from-option columns=keys=user_id,values=e`"
    check_refused(module, tmp_path / "g", names)
    source = one(module, tmp_path / "g", columns="keys=user_id,values=e")
    assert whole(source, "values").tolist() == rows and whole(source, "keys").tolist() == [5, 6]
    parquet.write_table(pyarrow.table({"key": texts, "a": [1.0, 2.0]}), tmp_path / "h")
    error = "no column of values. It has: 'key', 'a'. Rows are a column of lists of numbers .*, and"
    check_refused(module, tmp_path / "h", error)


def test_others_open_what_is_written_and_write_what_is_opened(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    module = importlib.import_module("sok_lite.cli.importers.safetensors")
    for n in (0, 9):
        source, path = a_table(n, "uint64", "float16"), tmp_path / f"{n}"
        module.write(str(path), [source])
        held = numpy.load_file(path)
        assert held.keys() == source.arrays.keys()
        for column, array in source.arrays.items():
            np.testing.assert_array_equal(held[column], array, strict=True)
        numpy.save_file({"keys": np.arange(n), "values": np.ones((n, 2))}, tmp_path / "g")
        assert whole(one(module, tmp_path / "g"), "values").tolist() == [[1.0, 1.0]] * n
