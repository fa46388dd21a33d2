"""Files of tensors in the format of safetensors, written and read in pieces.

Eight bytes, little-endian, are the length of the header, which is JSON: dtype, shape and byte range
of each tensor. The tensors follow, without a gap. Any reader of safetensors opens such a file.

It has no checksum: the manifest has the CRC-32 of each chunk, stretches of equal length from the
first byte of the file on, and a reader checks each chunk that it reads from.
"""

import copy
import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import IO, Any, NamedTuple

import numpy as np

from sok_lite.engine.files.disk import explain_full_disk, open_file
from sok_lite.engine.files.progress import Progress
from sok_lite.engine.json_text import parsed

# The limit of safetensors' own readers.
MAX_HEADER_BYTES = 100_000_000

LENGTH_BYTES = 8
# NumPy dtypes by their safetensors name. NumPy has no bfloat16: rows of it are its bits.
_DTYPES = {
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "F16": "float16",
    "BF16": "uint16",
    "I8": "int8",
    "U8": "uint8",  # of texts
}

# The length of a chunk. A few of them are in memory at a time.
CHUNK_BYTES = 8 << 20
# The longest that a reader accepts: it holds a whole chunk.
MAX_CHUNK_BYTES = 64 << 20


class Tensor(NamedTuple):
    """A tensor in the header of a file; its dtype is a name of safetensors, such as "F32"."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def storage(self) -> np.dtype:
        """The NumPy dtype, little-endian; of BF16 uint16."""
        return np.dtype(_DTYPES[self.dtype]).newbyteorder("<")

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.storage.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension."""
        return math.prod(self.shape[1:]) * self.storage.itemsize


def dtype_of(name: str) -> str:
    """Returns the safetensors name of a dtype of keys or rows, such as "BF16" of "bfloat16"."""
    if name == "bfloat16":
        return "BF16"
    return next(short for short, dtype in _DTYPES.items() if dtype == name)


def _header_of(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> bytes:
    """Returns the bytes of a file before its first tensor."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.num_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # The tensors begin at a multiple of 8, so that a reader may map them.
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _parse_header(text: bytes) -> list[tuple[int, int, Tensor]]:
    """Returns the tensors of a header in file order: bytes [begin, end) after it, and the tensor.

    Raises:
      AttributeError, KeyError, TypeError, ValueError: it is no such header.
    """
    header = parsed(text, object_pairs_hook=distinct)
    header.pop("__metadata__", None)
    found = []
    for name, facts in header.items():
        begin, end = facts["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (begin, end, *facts["shape"])):
            raise ValueError(f"tensor {name!r} has numbers that are none")
        if facts["dtype"] not in _DTYPES:
            raise ValueError(f"tensor {name!r} has dtype {facts['dtype']!r}")
        found.append((begin, end, Tensor(name, facts["dtype"], tuple(facts["shape"]))))
    return sorted(found)


def distinct(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of JSON; raises ValueError if a name occurs twice."""
    found: dict[str, Any] = {}
    for name, value in members:
        if name in found:
            raise ValueError(f"{name!r} is there twice")
        found[name] = value
    return found


class Written(NamedTuple):
    """Size and checksums of a file, as in the manifest.

    Attributes:
      chunk_bytes: the length of a chunk; the last one may be shorter.
      crcs: the CRC-32 of each chunk.
    """

    num_bytes: int
    chunk_bytes: int
    crcs: tuple[int, ...]


# Of a file that does not exist yet.
NOT_WRITTEN = Written(0, 1, ())


class ShardWriter:
    """Writes a new file, tensor after tensor. Call `close` at the end, also after a failure.

    Args:
      path: of the file, which must not exist.
      tensors: all of them, in the order of the calls of `write`.
      metadata: of the header; "table" is the name of the table.
      chunk_bytes: the length of a chunk, which has one checksum.
      progress: counts the bytes of the tensors.

    Raises:
      OSError: the file cannot be made or written.
    """

    def __init__(
        self,
        path: str,
        tensors: Sequence[Tensor],
        metadata: Mapping[str, str],
        chunk_bytes: int,
        progress: Progress | None = None,
    ) -> None:
        self._path, self._chunk_bytes = path, chunk_bytes
        self._progress = progress or Progress()
        self._num_bytes, self._crcs = 0, list[int]()
        header = _header_of(tensors, metadata)
        self._total = len(header) + sum(tensor.num_bytes for tensor in tensors)
        what = f"a file of table {metadata['table']!r}" if "table" in metadata else "a file"
        self._naming = partial(explain_full_disk, path, what, self._total, self._progress.total)
        with self._naming():
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            self._write(memoryview(header))
        except BaseException:
            self.close()
            raise

    def write(self, array: np.ndarray) -> None:
        """Writes the next elements, in the dtype of their tensor."""
        if array.size:
            self._write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            self._progress.add(array.nbytes)

    def _write(self, data: memoryview) -> None:
        while data:
            in_chunk = self._num_bytes % self._chunk_bytes
            part = data[: self._chunk_bytes - in_chunk]
            with self._naming():
                written = os.write(self._file, part)
            self._crcs.append(zlib.crc32(part[:written], self._crcs.pop() if in_chunk else 0))
            self._num_bytes += written
            data = data[written:]

    def finish(self) -> Written:
        """Syncs the file to disk; returns its size and checksums."""
        if self._num_bytes != self._total:
            raise RuntimeError(
                f"{self._path} was to have {self._total:,} bytes. Received: {self._num_bytes:,}. "
                "A table has changed while it was written."
            )
        with self._naming():
            os.fsync(self._file)
        return Written(self._num_bytes, self._chunk_bytes, tuple(self._crcs))

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            number, self._file = self._file, -1
            os.close(number)


class ShardReader:
    """Reads a file of `ShardWriter`. It trusts nothing: header, sizes and chunks are checked.

    Args:
      path: of the file.
      written: its size and checksums, from the manifest.
      table: name of its table, for errors.
      progress: counts the bytes of each chunk, once.

    Attributes:
      tensors: by name.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file differs from the manifest, or has another format.
    """

    def __init__(
        self, path: str, written: Written, table: str, progress: Progress | None = None
    ) -> None:
        self._path, self._written, self._table = path, written, table
        self._progress, self._counted = progress or Progress(), set[int]()
        self._number, self._chunk = -1, b""  # of the chunk that was read last
        num_chunks = -(-written.num_bytes // written.chunk_bytes)
        if len(written.crcs) != num_chunks:
            raise self.corrupt(f"{num_chunks:,} chunks have {len(written.crcs):,} checksums")
        with open_file(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != written.num_bytes:
                raise self.corrupt(
                    f"it has {num_bytes:,} bytes and not {written.num_bytes:,}, so that chunk "
                    f"{min(num_bytes, written.num_bytes) // written.chunk_bytes} of {num_chunks} "
                    "is the first that is wrong"
                )
            self._offsets, self.tensors = self._read_header(file)

    def _read_header(self, file: IO[bytes]) -> tuple[dict[str, int], dict[str, Tensor]]:
        """Returns, by name, the bytes at which tensors begin, and the tensors."""
        size = self._written.num_bytes
        if size < LENGTH_BYTES:
            raise self.corrupt("it is too short for a header")
        length = int.from_bytes(self._read(file, 0, LENGTH_BYTES), "little")
        if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
            raise self.corrupt(f"a header of {length:,} bytes is longer than the file, or allowed")
        data_begin = LENGTH_BYTES + length
        try:
            placed = _parse_header(self._read(file, LENGTH_BYTES, data_begin))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self.corrupt(f"its header is none of safetensors: {error}") from error
        last_end = 0
        for begin, end, tensor in placed:
            if begin != last_end or end - begin != tensor.num_bytes:
                raise self.corrupt(f"tensor {tensor.name!r} is not where its shape says")
            last_end = end
        if last_end != size - data_begin:
            raise self.corrupt(
                f"its tensors have {last_end:,} bytes, and there are {size - data_begin:,}"
            )
        offsets = {tensor.name: data_begin + begin for begin, _, tensor in placed}
        return offsets, {tensor.name: tensor for *_, tensor in placed}

    def clone(self) -> "ShardReader":
        """Returns a reader of the same file, which keeps another chunk in memory."""
        other = copy.copy(self)
        other.free_chunk()
        return other

    def rows(self, name: str, ranges: Iterator[tuple[int, int]]) -> Iterator[np.ndarray]:
        """Yields rows [first, last) of a tensor, range by range."""
        tensor = self.tensors[name]
        begin, width = self._offsets[name], tensor.row_bytes
        with open_file(self._path) as file:
            for first, last in ranges:
                data = self._read(file, begin + first * width, begin + last * width)
                yield np.frombuffer(data, tensor.storage).reshape(last - first, *tensor.shape[1:])

    def _read(self, file: IO[bytes], begin: int, end: int) -> bytes:
        """Returns the bytes [begin, end), after checking their chunks."""
        size = self._written.chunk_bytes
        parts = []
        try:
            for number in range(begin // size, -(-end // size)):
                chunk = self._read_chunk(file, number)
                parts.append(chunk[max(0, begin - number * size) : end - number * size])
            return parts[0] if len(parts) == 1 else b"".join(parts)
        except MemoryError as error:  # Python's own has no text
            raise MemoryError(
                f"No memory for {end - begin:,} bytes of {self._path}, a file of table "
                f"{self._table!r}."
            ) from error

    def _read_chunk(self, file: IO[bytes], number: int) -> bytes:
        if number != self._number:
            file.seek(number * self._written.chunk_bytes)
            chunk = file.read(self._length_of(number))
            self.check_chunk(number, chunk)
            self._number, self._chunk = number, chunk
            if number not in self._counted:
                self._counted.add(number)
                self._progress.add(len(chunk))
        return self._chunk

    def _length_of(self, number: int) -> int:
        size = self._written.chunk_bytes
        return min(size, self._written.num_bytes - number * size)

    def check_chunk(self, number: int, chunk: bytes | memoryview) -> None:
        """Raises ValueError if a chunk differs from its checksum."""
        crcs, length = self._written.crcs, self._length_of(number)
        if len(chunk) != length or zlib.crc32(chunk) != crcs[number]:
            raise self.corrupt(
                f"chunk {number} of {len(crcs)}, {length:,} bytes from "
                f"{number * self._written.chunk_bytes:,} on, is not what was written"
            )

    def free_chunk(self) -> None:
        """Frees the memory of the chunk that was read last."""
        self._number, self._chunk = -1, b""

    def offset_of(self, name: str) -> int:
        """Returns the byte of the file at which a tensor begins."""
        return self._offsets[name]

    def expect(self, tensor: Tensor) -> None:
        """Raises ValueError if the file has no such tensor."""
        found = self.tensors.get(tensor.name)
        if found != tensor:
            raise self.corrupt(f"expected {_text(tensor)}, and it has {_text(found)}")

    def corrupt(self, reason: str) -> ValueError:
        """Returns the error of a corrupt file."""
        return ValueError(
            f"{self._path}, a file of table {self._table!r}, is corrupt: {reason}. Nothing was "
            "loaded. Take another checkpoint."
        )


def _text(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tensor.name!r} {tensor.dtype} {list(tensor.shape)}"
