"""The files of keys and values: their bytes, what is refused, and what a failed write leaves."""

import json
import os
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sok_lite.engine.files.key_value_files import (
    make_layout,
    open_shards,
    write_shard,
)
from sok_lite.engine.files.key_value_names import ShardPlace, find_shards

LAYOUT = make_layout("user/emb", "int64", "float32", 2)
BASE = "user_emb_mht_1of1_rank0_size1"
KEY_DTYPES = ["int64", "int32"]
VALUE_DTYPES = ["float32", "float16", "bfloat16", "float64", "int8", "int32", "int64"]


def rows_of(keys, layout):
    """Rows that tell their key, in the type of the files."""
    columns = np.asarray(keys, np.int64)[:, None] % 50 + np.arange(layout.dim)
    if layout.value_dtype == "bfloat16":
        return (columns.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return columns.astype(layout.value_dtype)


def write(folder, keys, layout=LAYOUT, place=None, **options):
    keys = np.asarray(keys, layout.key_dtype)
    pieces = [(keys, rows_of(keys, layout))]
    return write_shard(str(folder), layout, place or ShardPlace(), pieces, **options)


def opened(folder, layout=LAYOUT, size=None):
    """The shards that are found in a folder."""
    bases = find_shards(str(folder), layout.name, size)
    return open_shards(str(folder), layout, file_name_list=bases)


def read(folder, layout=LAYOUT, buffer_size=1000, size=None, file_name_list=None):
    """All keys and rows, each shard's behind the other's."""
    if file_name_list is None:
        shards = opened(folder, layout, size)
    else:
        shards = open_shards(str(folder), layout, file_name_list=file_name_list)
    pieces = [piece for shard in shards for piece in shard.pieces(buffer_size)]
    keys = [np.empty(0, layout.key_dtype), *(keys for keys, _ in pieces)]
    rows = [np.empty((0, layout.dim), layout.value_storage), *(rows for _, rows in pieces)]
    return np.concatenate(keys), np.concatenate(rows)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_bytes_of_a_shard(tmp_path):
    pieces = [(np.int64([1, -2]), np.float32([[1.5, -0.25], [0, 2]]))]
    assert write_shard(str(tmp_path), LAYOUT, ShardPlace(2, 3, 1, 4), pieces) == 2
    base = "user_emb_mht_2of3_rank1_size4"
    keys = bytes.fromhex("0100000000000000 feffffffffffffff")
    values = bytes.fromhex("0000c03f 000080be 00000000 00000040")
    found = contents(tmp_path)
    assert found.keys() == {f"{base}-keys", f"{base}-values", f"{base}-meta.json"}
    assert found[f"{base}-keys"] == keys
    assert found[f"{base}-values"] == values
    assert json.loads(found[f"{base}-meta.json"]) == {
        "format": "sok_lite keys and values",
        "version": 1,
        "name": "user/emb",
        "key_dtype": "int64",
        "value_dtype": "float32",
        "dim": 2,
        "count": 2,
        "index": 2,
        "num_shards": 3,
        "rank": 1,
        "size": 4,
        "keys_crc32": zlib.crc32(keys),
        "values_crc32": zlib.crc32(values),
    }


@given(data=st.data())
def test_what_was_written_is_read(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("files")
    dtypes = st.sampled_from(KEY_DTYPES), st.sampled_from(VALUE_DTYPES)
    layout = make_layout(
        "a/b.c", data.draw(dtypes[0]), data.draw(dtypes[1]), data.draw(st.integers(1, 5))
    )
    size, num_shards = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    ends = np.iinfo(layout.key_dtype)
    keys_of_a_shard = st.lists(st.integers(ends.min, ends.max), max_size=40)
    expected = []
    for rank in range(size):
        for index in range(1, num_shards + 1):
            keys = data.draw(keys_of_a_shard)
            expected += keys
            cut = data.draw(st.integers(0, len(keys)))
            pieces = [
                (np.array(part, layout.key_dtype), rows_of(part, layout))
                for part in (keys[:cut], keys[cut:])
            ]
            place = ShardPlace(index, num_shards, rank, size)
            buffer_size = data.draw(st.integers(1, 50))
            count = write_shard(str(folder), layout, place, pieces, buffer_size=buffer_size)
            assert count == len(keys)
    keys, rows = read(folder, layout, buffer_size=data.draw(st.integers(1, 50)))
    np.testing.assert_array_equal(keys, np.array(expected, layout.key_dtype))
    np.testing.assert_array_equal(rows, rows_of(expected, layout))


def test_pieces_have_at_most_the_asked_number_of_keys(tmp_path):
    write(tmp_path, range(10))
    (shard,) = opened(tmp_path)
    assert shard.count == 10
    assert [len(keys) for keys, _ in shard.pieces(4)] == [4, 4, 2]
    for call in (lambda: list(shard.pieces(0)), lambda: write(tmp_path, [1], buffer_size=0)):
        with pytest.raises(ValueError, match="buffer_size must be at least 1"):
            call()


# ------------------------------------------------------------------------------ writing behind


@pytest.mark.parametrize("with_meta", [True, False])
def test_appended_keys_come_last(tmp_path, with_meta):
    assert write(tmp_path, [1, 2]) == 2
    if not with_meta:
        (tmp_path / f"{BASE}-meta.json").unlink()
    assert write(tmp_path, [3], append_to_file=True) == 3
    assert write(tmp_path, [], append_to_file=True) == 3
    keys, rows = read(tmp_path)
    np.testing.assert_array_equal(keys, [1, 2, 3])
    np.testing.assert_array_equal(rows, rows_of([1, 2, 3], LAYOUT))
    assert json.loads((tmp_path / f"{BASE}-meta.json").read_text())["count"] == 3


@pytest.mark.parametrize("append", [False, True])
def test_a_write_that_fails_leaves_the_files_as_they_were(tmp_path, append, monkeypatch):
    write(tmp_path, [1, 2])
    before, calls = contents(tmp_path), []

    def pieces(error):
        yield np.int64([3]), np.float32([[3, 3]])
        raise error

    for error in (RuntimeError("the table is gone"), KeyboardInterrupt("interrupted")):
        with pytest.raises(type(error), match=str(error)):
            write_shard(str(tmp_path), LAYOUT, ShardPlace(), pieces(error), append_to_file=append)
        assert contents(tmp_path) == before

    def fsync(number):
        calls.append(number)
        if len(calls) == 3:  # that of the -meta.json
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="No space"):
        write(tmp_path, [3, 4], append_to_file=append)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("num_renamed", [1, 2])
def test_a_process_killed_between_two_names_leaves_what_is_refused(tmp_path, num_renamed):
    old, new = tmp_path / "old", tmp_path / "new"
    write(old, [1, 2])
    write(new, [3, 4])
    for ending in ["keys", "values"][:num_renamed]:
        os.replace(new / f"{BASE}-{ending}", old / f"{BASE}-{ending}")
    with pytest.raises(ValueError, match="corrupt"):
        read(old)


# --------------------------------------------------------------------------------- refused


@pytest.mark.parametrize("ending", ["keys", "values"])
def test_a_changed_byte_is_found_before_anything_is_read(tmp_path, ending):
    write(tmp_path, [1, 2], place=ShardPlace(rank=0, size=2))
    write(tmp_path, [3, 4], place=ShardPlace(rank=1, size=2))
    path = tmp_path / f"user_emb_mht_1of1_rank1_size2-{ending}"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"rank1_size2-{ending}' is corrupt"):
        opened(tmp_path)


def test_a_file_cut_after_the_check_is_refused(tmp_path):
    write(tmp_path, [1, 2])
    (shard,) = opened(tmp_path)
    os.truncate(tmp_path / f"{BASE}-values", 8)
    with pytest.raises(ValueError, match="cut while they were read"):
        list(shard.pieces())


@pytest.mark.cases("text")
@pytest.mark.parametrize("with_meta", [True, False])
@pytest.mark.parametrize(
    ("cuts", "text"),
    [
        ({"keys": 12}, r"-keys' does not hold whole keys of int64: it has 12 bytes"),
        ({"values": 13}, r"-values' does not hold whole rows of 2 elements of float32"),
        ({"keys": 8}, "1 keys of int64 but 2 rows"),
        ({"values": 8}, "2 keys of int64 but 1 rows"),
        ({"keys": 8, "values": 8}, "1 keys where its -meta.json says 2"),
    ],
)
def test_a_file_that_was_cut_is_refused(tmp_path, with_meta, cuts, text):
    write(tmp_path, [1, 2])
    for ending, num_bytes in cuts.items():
        os.truncate(tmp_path / f"{BASE}-{ending}", num_bytes)
    if not with_meta:
        (tmp_path / f"{BASE}-meta.json").unlink()
    if not with_meta and len(cuts) == 2:
        return np.testing.assert_array_equal(read(tmp_path)[0], [1])
    with pytest.raises(ValueError, match=text):
        read(tmp_path)


def test_files_of_another_form_are_refused(tmp_path):
    write(tmp_path / "new" / "folder", [1, 2], append_to_file=True)
    for change, text in (
        ({"key_dtype": "int32"}, "key_dtype is 'int64'. Expected key_dtype='int32'"),
        ({"value_dtype": "int32"}, "value_dtype is 'float32'"),
        ({"dim": 1}, "dim is 2. Expected dim=1"),
        ({"name": "user_emb"}, "name is 'user/emb'. Expected name='user_emb'"),
    ):
        with pytest.raises(ValueError, match=text):
            read(tmp_path / "new" / "folder", LAYOUT._replace(**change))
    with pytest.raises(ValueError, match=r"dim is 2\. Expected dim=3"):
        write(tmp_path / "new" / "folder", [3], LAYOUT._replace(dim=3), append_to_file=True)
    write(tmp_path / "new" / "folder", [3])  # over it
    np.testing.assert_array_equal(read(tmp_path / "new" / "folder")[0], [3])
    for form, text in (
        (("string", "float32", 2), "hold keys of int64, int32, .*Received: 'string'"),
        (("int64", "string", 2), "hold values of float32, .*Received: 'string'"),
        (("int64", "float32", 0), "at least one element"),
    ):
        with pytest.raises(ValueError, match=text):
            make_layout("v", *form)


def test_a_third_file_of_another_format_is_refused(tmp_path):
    write(tmp_path, [1])
    path = tmp_path / f"{BASE}-meta.json"
    later = json.dumps({**json.loads(path.read_text()), "version": 2})
    other = '{"format": "sok_lite keys and values", "version": 2}'
    for text in ("{", "[]", "{}", other, later, "[" * 100_000, " " * (2 << 20)):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"-meta.json'? is (corrupt|of another format)"):
            read(tmp_path)


@pytest.mark.parametrize("append", [False, True])
def test_files_of_another_variable_are_not_written_over(tmp_path, append):
    write(tmp_path, [1])
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"holds variable 'user/emb', and variable 'user_emb'"):
        write(tmp_path, [2], LAYOUT._replace(name="user_emb"), append_to_file=append)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("ending", ["keys", "values"])
def test_a_missing_file_is_named(tmp_path, ending):
    write(tmp_path, [1])
    (tmp_path / f"{BASE}-{ending}").unlink()
    with pytest.raises(FileNotFoundError, match=f"{BASE}-{ending}"):
        read(tmp_path)


@pytest.mark.parametrize(
    "piece",
    [
        (np.int32([1]), np.ones((1, 2), np.float32)),
        (np.int64([[1]]), np.ones((1, 2), np.float32)),
        (np.int64([1]), np.ones((1, 2), np.float64)),
        (np.int64([1]), np.ones((1, 3), np.float32)),
        (np.int64([1]), np.ones((2, 2), np.float32)),
        (np.int64([1]), np.ones(2, np.float32)),
    ],
)
def test_a_piece_of_another_form_is_refused(tmp_path, piece):
    with pytest.raises(ValueError, match=r"keys \(m,\) of int64 and rows \(m, 2\) of float32"):
        write_shard(str(tmp_path), LAYOUT, ShardPlace(), [piece])
    assert contents(tmp_path) == {}


# ----------------------------------------------------------------------------- which files


def touch(folder, *names):
    for name in names:
        (folder / f"{name}-keys").touch()
        (folder / f"{name}-values").touch()


def test_shards_come_by_rank_and_index_as_numbers(tmp_path):
    expected = [ShardPlace(index, 2, rank, 11).base("v") for rank in range(11) for index in (1, 2)]
    touch(tmp_path, *expected)
    touch(tmp_path, "v2_mht_1of1_rank0_size3", "v_m_mht_1of1_rank0_size2", "v_mht_1of2")
    touch(tmp_path, "v_mht_1of1_rank0_size3_old")
    assert find_shards(str(tmp_path), "v") == expected


def test_of_several_groups_one_must_be_named(tmp_path):
    touch(tmp_path, *(ShardPlace(rank=rank, size=2).base("v") for rank in range(2)))
    touch(tmp_path, ShardPlace().base("v"))
    described = "size 1 with 1 shard of 1 of its ranks, size 2 with 2 shards of 2 of its ranks"
    with pytest.raises(ValueError, match=f"several groups .*: {described}"):
        find_shards(str(tmp_path), "v")
    assert find_shards(str(tmp_path), "v", size=1) == ["v_mht_1of1_rank0_size1"]
    assert len(find_shards(str(tmp_path), "v", size=2)) == 2
    with pytest.raises(FileNotFoundError, match=f"from 3 processes. It has {described}"):
        find_shards(str(tmp_path), "v", size=3)


@pytest.mark.cases("names")
@pytest.mark.parametrize(
    ("names", "error", "text"),
    [
        (["1of1_rank1_size2"], FileNotFoundError, "lacks 1 of the 2 .*v_mht_1of1_rank0_size2-keys"),
        (["1of2_rank0_size1"], FileNotFoundError, "lacks 1 of the 2 .*v_mht_2of2_rank0_size1-keys"),
        (["1of1_rank0_size1", "1of2_rank0_size1"], ValueError, "rank 0 of 1 from two saves"),
        (["1of1_rank0_size1", "1of1_rank1_size1"], ValueError, "of no shard that there can be"),
        (["1of1_rank0_size1", "2of1_rank0_size1"], ValueError, "of no shard that there can be"),
    ],
)
def test_files_that_are_not_those_of_one_save_are_named(tmp_path, names, error, text):
    touch(tmp_path, *(f"v_mht_{name}" for name in names))
    with pytest.raises(error, match=text):
        find_shards(str(tmp_path), "v")


def test_a_variable_without_files_is_named(tmp_path):
    touch(tmp_path, "w_mht_1of1_rank0_size1")
    with pytest.raises(FileNotFoundError, match="no files of variable 'a/b'.*a_b_mht_1of1_rank0"):
        find_shards(str(tmp_path), "a/b")
    with pytest.raises(FileNotFoundError, match="no folder"):
        find_shards(str(tmp_path / "none"), "a/b")


def test_named_files_are_read_in_the_order_they_are_named(tmp_path):
    write(tmp_path, [1], file_name="one")
    write(tmp_path, [2], file_name="two")
    np.testing.assert_array_equal(read(tmp_path, file_name_list=["two", "one"])[0], [2, 1])
    with pytest.raises(FileNotFoundError, match="three-keys"):
        read(tmp_path, file_name_list=["one", "three"])


@pytest.mark.parametrize("place", [(0, 1, 0, 1), (2, 1, 0, 1), (1, 1, 1, 1), (1, 1, -1, 1)])
def test_a_shard_that_cannot_be_has_no_name(place):
    with pytest.raises(ValueError, match="an index from 1 to num_shards"):
        ShardPlace(*place).base("v")
