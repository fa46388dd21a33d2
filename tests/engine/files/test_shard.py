"""Files of tensors: what any reader of safetensors sees, and what none believes."""

import json
import zlib

import numpy as np
import pytest

from sok_lite.engine.files.shard import MAX_HEADER_BYTES, ShardReader, ShardWriter, Tensor, Written

TENSORS = {
    "I64": np.array([-(2**63), -1, 2**63 - 1], np.int64),
    "U64": np.array([0, 2**64 - 1], np.uint64),
    "F64": np.linspace(0, 1, 33).reshape(11, 3),
    "I32": np.arange(31, dtype=np.int32),
    "U32": np.empty(0, np.uint32),
    "F32": np.arange(34, dtype=np.float32).reshape(17, 2),
    "F16": np.arange(5, dtype=np.float16),
    "I8": np.arange(-3, 4, dtype=np.int8),
}


def written(path, arrays, chunk_bytes, about=None):
    """Writes arrays, by name and dtype, in pieces."""
    tensors = [Tensor(f"t {dtype}", dtype, array.shape) for dtype, array in arrays.items()]
    writer = ShardWriter(path, tensors, about or {}, chunk_bytes)
    for array in arrays.values():
        for piece in np.array_split(array, 3):
            writer.write(piece)
    result = writer.finish()
    writer.close()
    return result


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1 << 20])
def test_what_is_written_is_read(tmp_path, chunk_bytes):
    path = str(tmp_path / "file")
    facts = written(path, TENSORS, chunk_bytes)
    reader = ShardReader(path, facts, "t")
    for dtype, array in TENSORS.items():
        n = len(array)
        ranges = [(0, n // 2), (n // 2, n), (n // 3, n - n // 3), (0, 0)]
        for (i, j), rows in zip(ranges, reader.rows(f"t {dtype}", iter(ranges)), strict=True):
            np.testing.assert_array_equal(rows, array[i:j])


def test_no_memory_for_a_tensor_is_said_with_its_file(tmp_path, monkeypatch):
    """Python's own error has no text."""
    path = str(tmp_path / "file")
    reader = ShardReader(path, written(path, TENSORS, 64), "t")

    def none_left(self, file, number):
        raise MemoryError

    monkeypatch.setattr(ShardReader, "_read_chunk", none_left)
    with pytest.raises(
        MemoryError, match=f"^No memory for 24 bytes of {path}, a file of table 't'"
    ):
        next(reader.rows("t I64", iter([(0, 3)])))


def test_checksums_are_those_of_the_chunks(tmp_path):
    facts = written(tmp_path / "file", TENSORS, 100)
    data = (tmp_path / "file").read_bytes()
    chunks = [data[i : i + 100] for i in range(0, len(data), 100)]
    assert facts == Written(len(data), 100, tuple(map(zlib.crc32, chunks)))


def test_readers_of_safetensors_open_a_file(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    written(tmp_path / "file", TENSORS, 100, {"table": "ä/b"})
    held = numpy.load_file(tmp_path / "file")
    assert held.keys() == {f"t {dtype}" for dtype in TENSORS}
    for dtype, array in TENSORS.items():
        assert held[f"t {dtype}"].dtype == array.dtype
        np.testing.assert_array_equal(held[f"t {dtype}"], array)


def test_a_file_has_exactly_these_bytes(tmp_path):
    arrays = {"I64": np.array([1, -2]), "F32": np.array([[0.5], [-1]], np.float32)}
    written(tmp_path / "file", arrays, 100, {"table": "x"})
    header = (
        b'{"__metadata__":{"table":"x"},'
        b'"t I64":{"dtype":"I64","shape":[2],"data_offsets":[0,16]},'
        b'"t F32":{"dtype":"F32","shape":[2,1],"data_offsets":[16,24]}}'
    )
    length = -(-len(header) // 8) * 8
    assert (tmp_path / "file").read_bytes() == (
        bytes([length, 0, 0, 0, 0, 0, 0, 0])
        + header.ljust(length)
        + bytes([1, 0, 0, 0, 0, 0, 0, 0, 0xFE, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF])
        + bytes([0, 0, 0, 0x3F, 0, 0, 0x80, 0xBF])
    )


def test_a_file_is_written_whole_and_not_over_another(tmp_path):
    writer = ShardWriter(str(tmp_path / "file"), [Tensor("a", "I64", (2,))], {}, 100)
    writer.write(np.zeros(1, np.int64))
    with pytest.raises(RuntimeError, match="has changed"):
        writer.finish()
    writer.close()
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        ShardWriter(str(tmp_path / "file"), [], {}, 100)
    assert (tmp_path / "file").read_bytes() == b"mine"


@pytest.mark.parametrize("chunk_bytes", [7, 64, 1 << 20])
def test_every_flipped_byte_that_is_read_is_noticed(tmp_path, chunk_bytes):
    path = tmp_path / "file"
    facts = written(path, TENSORS, chunk_bytes)
    whole = path.read_bytes()
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1 << i % 8]) + whole[i + 1 :])
        with pytest.raises(ValueError, match=f"chunk {i // chunk_bytes} of") as caught:
            reader = ShardReader(str(path), facts, "users")
            for name, tensor in reader.tensors.items():
                list(reader.rows(name, iter([(0, tensor.shape[0])])))
        assert str(path) in str(caught.value) and "'users'" in str(caught.value)


def test_another_length_is_noticed(tmp_path):
    path = tmp_path / "file"
    facts = written(path, TENSORS, 64)
    whole = path.read_bytes()
    for bad in (whole[:-1], whole[:-8], whole[:-500], whole + b"\0"):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=f"{len(bad):,} bytes and not {len(whole):,}"):
            ShardReader(str(path), facts, "t")
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="checksums"):
        ShardReader(str(path), facts._replace(crcs=facts.crcs[:-1]), "t")


ONE = {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}


def test_a_header_that_lies_is_not_believed(tmp_path):
    for header, reason in [
        ({"a": ONE | {"shape": [2]}}, "not where its shape says"),
        ({"a": ONE | {"shape": [-1]}}, "numbers that are none"),
        ({"a": ONE | {"shape": [1.0]}}, "numbers that are none"),
        ({"a": ONE | {"shape": [True]}}, "numbers that are none"),
        ({"a": ONE | {"shape": [2**62, 2**62]}}, "not where its shape says"),
        ({"a": ONE | {"shape": [2**61, 8]}}, "not where its shape says"),
        ({"a": ONE | {"data_offsets": [0, 2**70]}}, "not where its shape says"),
        ({"a": ONE | {"data_offsets": [8, 16]}}, "not where its shape says"),
        ({"a": ONE | {"data_offsets": [0]}}, "none of safetensors"),
        ({"a": ONE | {"dtype": "F8"}}, "dtype 'F8'"),
        ({"a": ONE, "b": ONE}, "not where its shape says"),
        ({"a": {}}, "none of safetensors"),
        ({"a": 3}, "none of safetensors"),
        ({}, "there are 8"),
        ([], "none of safetensors"),
        (b"{", "none of safetensors"),
        (b'{"a": 1, "a": %s}' % json.dumps(ONE).encode(), "'a' is there twice"),
        (b"\xff\xff", "none of safetensors"),
        (b"[" * 100_000, "none of safetensors"),
    ]:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        data = len(text).to_bytes(8, "little") + text + bytes(8)
        with pytest.raises(ValueError, match=reason):
            read_hostile(tmp_path, data)


def test_a_header_is_there_and_not_longer_than_its_file(tmp_path):
    for length in (17, 2**31, 2**63, 2**64 - 1, MAX_HEADER_BYTES + 1):
        with pytest.raises(ValueError, match="longer than the file"):
            read_hostile(tmp_path, length.to_bytes(8, "little") + bytes(16))
    for size in (0, 1, 7):
        with pytest.raises(ValueError, match="too short"):
            read_hostile(tmp_path, bytes(size))


def read_hostile(folder, data):
    """Reads a file that somebody made with checksums that are right."""
    (folder / "file").write_bytes(data)
    crcs = (zlib.crc32(data),) if data else ()
    return ShardReader(str(folder / "file"), Written(len(data), 1 << 20, crcs), "t")
