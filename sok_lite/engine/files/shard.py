"""A file of tensors in the format of safetensors, written and read in pieces.

Eight bytes, little-endian, are the length of the header, which is JSON: dtype, shape and byte range
of each tensor. The tensors follow, without a gap. Any reader of safetensors opens such a file.

It has no checksum: the manifest has the CRC-32 of each chunk, stretches of equal length from the
first byte of the file on, and a reader checks a chunk whenever it reads a part of it.
"""

import copy
import errno
import json
import math
import os
import stat
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import IO, Any, NamedTuple

import numpy as np

from sok_lite.engine.files.full_disk import naming_file
from sok_lite.engine.files.progress import Progress
from sok_lite.engine.json_text import parsed

# The most that readers of safetensors take.
MAX_HEADER_BYTES = 100_000_000

LENGTH_BYTES = 8
# Names of dtypes in a header; rows of bfloat16 are kept as the bits, which NumPy has no dtype for.
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

# The length of a chunk. So much is in memory at a time, or a few times as much.
CHUNK_BYTES = 8 << 20
# The longest that a reader takes: it holds a whole chunk.
MAX_CHUNK_BYTES = 64 << 20


class Tensor(NamedTuple):
    """A tensor of a file.

    Attributes:
      name: in the header.
      dtype: a name of safetensors, such as "F32".
      shape: its shape.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def storage(self) -> np.dtype:
        """The dtype of its elements, little-endian; of BF16 uint16."""
        return np.dtype(_DTYPES[self.dtype]).newbyteorder("<")

    @property
    def num_bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.storage.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes of one entry of the first dimension."""
        return math.prod(self.shape[1:]) * self.storage.itemsize


def dtype_of(name: str) -> str:
    """Returns safetensors' name of a dtype of keys or rows, such as "BF16" of "bfloat16"."""
    if name == "bfloat16":
        return "BF16"
    return next(short for short, dtype in _DTYPES.items() if dtype == name)


def _header_of(tensors: Sequence[Tensor], about: Mapping[str, str]) -> bytes:
    """Returns the bytes of a file up to its first tensor.

    Args:
      tensors: all of them, in the order in which they will come.
      about: further texts.
    """
    described: dict[str, Any] = {"__metadata__": dict(about)}
    begin = 0
    for tensor in tensors:
        end = begin + tensor.num_bytes
        described[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(described, separators=(",", ":")).encode()
    # The tensors begin at a multiple of 8, so that a reader may map them.
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _placed_tensors(header: bytes) -> list[tuple[int, int, Tensor]]:
    """Returns the tensors of a header, by where they are: bytes [first, last) behind it, and each.

    Raises:
      AttributeError, KeyError, TypeError, ValueError: it is no such header.
    """
    described = parsed(header, object_pairs_hook=distinct)
    described.pop("__metadata__", None)
    return sorted(_placed(name, facts) for name, facts in described.items())


def _placed(name: str, facts: Any) -> tuple[int, int, Tensor]:
    """Returns the byte range of a tensor, [begin, end), and the tensor."""
    first, last = facts["data_offsets"]
    numbers = [first, last, *facts["shape"]]
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"tensor {name!r} has numbers that are none")
    if facts["dtype"] not in _DTYPES:
        raise ValueError(f"tensor {name!r} has dtype {facts['dtype']!r}")
    return first, last, Tensor(name, facts["dtype"], tuple(facts["shape"]))


def distinct(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of JSON, or raises ValueError if a name occurs twice."""
    found: dict[str, Any] = {}
    for name, value in members:
        if name in found:
            raise ValueError(f"{name!r} is there twice")
        found[name] = value
    return found


class Written(NamedTuple):
    """Size and checksums of a file, as in the manifest.

    Attributes:
      num_bytes: its size.
      chunk_bytes: the length of a chunk; the last one may be shorter.
      crcs: the CRC-32 of each chunk.
    """

    num_bytes: int
    chunk_bytes: int
    crcs: tuple[int, ...]


# Of a file that is not there yet.
NOT_WRITTEN = Written(0, 1, ())


class ShardWriter:
    """Writes a new file, tensor after tensor. Leave it by `close`, also after a failure.

    Args:
      path: of the file, which must not be there.
      tensors: all of them, in the order in which they will come.
      about: further texts of the header; "table" is the name of the table.
      chunk_bytes: the length of a chunk, which has one checksum; the last one may be shorter.
      progress: told of every byte of the tensors.

    Raises:
      OSError: the file cannot be made or written.
    """

    def __init__(
        self,
        path: str,
        tensors: Sequence[Tensor],
        about: Mapping[str, str],
        chunk_bytes: int,
        progress: Progress | None = None,
    ) -> None:
        self._path, self._chunk_bytes = path, chunk_bytes
        self._progress = progress or Progress()
        self._num_bytes, self._crcs = 0, list[int]()
        head = _header_of(tensors, about)
        self._total = len(head) + sum(tensor.num_bytes for tensor in tensors)
        of_table = f"a file of table {about['table']!r}" if "table" in about else "a file"
        self._naming = partial(naming_file, path, of_table, self._total, self._progress.total)
        with self._naming():
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            self._write(memoryview(head))
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
            begun = self._num_bytes % self._chunk_bytes
            part = data[: self._chunk_bytes - begun]
            with self._naming():
                written = os.write(self._file, part)
            crc = zlib.crc32(part[:written], self._crcs.pop() if begun else 0)
            self._crcs.append(crc)
            self._num_bytes += written
            data = data[written:]

    def finish(self) -> Written:
        """Syncs the file to disk; returns its size and checksums, for the manifest."""
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
    """Reads a file of `ShardWriter`, or one that claims to be: header and sizes are all checked.

    Args:
      path: of the file.
      written: its size and checksums, from the manifest.
      table: name of its table, for errors.
      progress: told of every chunk when it is read for the first time.

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
        self._progress, self._seen = progress or Progress(), set[int]()
        self._number, self._chunk = -1, b""  # of the chunk that was read last, and it
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
            self._begin, self.tensors = self._described(file)

    def _described(self, file: Any) -> tuple[int, dict[str, Tensor]]:
        """Returns the byte at which the tensors begin, and the tensors."""
        size = self._written.num_bytes
        if size < LENGTH_BYTES:
            raise self.corrupt("it is too short for a header")
        length = int.from_bytes(self._read(file, 0, LENGTH_BYTES), "little")
        if length > min(MAX_HEADER_BYTES, size - LENGTH_BYTES):
            raise self.corrupt(f"a header of {length:,} bytes is longer than the file, or allowed")
        begin = LENGTH_BYTES + length
        try:
            placed = _placed_tensors(self._read(file, LENGTH_BYTES, begin))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self.corrupt(f"its header is none of safetensors: {error}") from error
        end = 0
        for first, last, tensor in placed:
            if first != end or last - first != tensor.num_bytes:
                raise self.corrupt(f"tensor {tensor.name!r} is not where its shape says")
            end = last
        if end != size - begin:
            raise self.corrupt(f"its tensors have {end:,} bytes, and there are {size - begin:,}")
        self._first = {tensor.name: begin + first for first, _, tensor in placed}
        return begin, {tensor.name: tensor for *_, tensor in placed}

    def apart(self) -> "ShardReader":
        """Returns a reader of the same file that has its own chunk in memory."""
        other = copy.copy(self)
        other.forget()
        return other

    def rows(self, name: str, ranges: Iterator[tuple[int, int]]) -> Iterator[np.ndarray]:
        """Yields rows of a tensor, range by range.

        Args:
          name: of the tensor.
          ranges: [first, last) of each.
        """
        tensor = self.tensors[name]
        begin, width = self._first[name], tensor.row_bytes
        with open_file(self._path) as file:
            for first, last in ranges:
                data = self._read(file, begin + first * width, begin + last * width)
                yield np.frombuffer(data, tensor.storage).reshape(last - first, *tensor.shape[1:])

    def _read(self, file: Any, begin: int, end: int) -> bytes:
        """Returns the bytes [begin, end), after checking their chunks."""
        size = self._written.chunk_bytes
        parts = []
        try:
            for number in range(begin // size, -(-end // size)):
                chunk = self._checked(file, number)
                parts.append(chunk[max(0, begin - number * size) : end - number * size])
            return parts[0] if len(parts) == 1 else b"".join(parts)
        except MemoryError as error:  # Python's own says nothing
            raise MemoryError(
                f"No memory for {end - begin:,} bytes of {self._path}, a file of table "
                f"{self._table!r}."
            ) from error

    def _checked(self, file: Any, number: int) -> bytes:
        if number != self._number:
            size, total = self._written.chunk_bytes, self._written.num_bytes
            expected = min(size, total - number * size)
            file.seek(number * size)
            chunk = file.read(expected)
            self.check(number, chunk)
            self._number, self._chunk = number, chunk
            if number not in self._seen:
                self._seen.add(number)
                self._progress.add(expected)
        return self._chunk

    def check(self, number: int, chunk: bytes | memoryview) -> None:
        """Raises ValueError if the bytes of a chunk do not have its checksum."""
        size, total = self._written.chunk_bytes, self._written.num_bytes
        expected = min(size, total - number * size)
        if len(chunk) != expected or zlib.crc32(chunk) != self._written.crcs[number]:
            raise self.corrupt(
                f"chunk {number} of {len(self._written.crcs)}, {expected:,} bytes from "
                f"{number * size:,} on, is not what was written"
            )

    def forget(self) -> None:
        """Frees the memory of the chunk that was read last."""
        self._number, self._chunk = -1, b""

    def place(self, name: str) -> int:
        """Returns the byte of the file at which a tensor begins."""
        return self._first[name]

    def expect(self, tensor: Tensor) -> None:
        """Raises ValueError if the file has no such tensor."""
        if self.tensors.get(tensor.name) != tensor:
            raise self.corrupt(
                f"expected {_text(tensor)}, and it has {_text(self.tensors.get(tensor.name))}"
            )

    def corrupt(self, reason: str) -> ValueError:
        """Returns a ValueError that the file is corrupt, with table, file and reason."""
        return ValueError(
            f"{self._path}, a file of table {self._table!r}, is corrupt: {reason}. Nothing was "
            "loaded. Take another checkpoint."
        )


def open_file(path: str | os.PathLike[str]) -> IO[bytes]:
    """Opens a file to be read: never a pipe, which may block its reader forever, or a device.

    Raises:
      OSError: it cannot be opened, or is no regular file.
    """
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(number).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "Not a regular file", os.fspath(path))
        return os.fdopen(number, "rb")
    except BaseException:
        os.close(number)
        raise


def read_whole(path: str | os.PathLike[str], most: int) -> bytes:
    """Returns the bytes of a file that somebody may have put there, if it is not too large.

    Args:
      most: bytes that no true one has.

    Raises:
      OSError: it cannot be opened, or is no regular file. ValueError: it has more bytes.
    """
    with open_file(path) as file:
        return whole_of(file, path, most)


def whole_of(file: IO[bytes], path: str | os.PathLike[str], most: int) -> bytes:
    """Does what `read_whole` does with a file that is open."""
    size = os.fstat(file.fileno()).st_size
    if size > most:
        raise ValueError(
            f"{os.fspath(path)} must have at most {most:,} bytes. Received: {size:,}. It is "
            "another file, or corrupt: take another copy."
        )
    try:
        return file.read()
    except MemoryError as error:  # Python's own says nothing
        raise MemoryError(f"No memory for {size:,} bytes of {os.fspath(path)}.") from error


def read_arrays(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """Returns the arrays of an .npz file by name, all in memory.

    Raises:
      OSError: it cannot be opened, or is no regular file. ValueError: it is corrupt. MemoryError:
        there is no memory for them.
    """
    with open_file(path) as opened:
        try:
            with np.load(opened, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        except MemoryError:
            raise
        except Exception as error:  # zipfile, zlib and NumPy have errors of many kinds
            raise ValueError(
                f"{os.fspath(path)!r} is corrupt: {error}. Take another copy of it."
            ) from error


def _text(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"{tensor.name!r} {tensor.dtype} {list(tensor.shape)}"
