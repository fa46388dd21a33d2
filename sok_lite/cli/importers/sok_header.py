"""The headers of the files of SOK's dumps; sok.py says what is in them."""

import os
import struct
from typing import NamedTuple

import numpy as np

from sok_lite.engine.files.shard import open_file

HEADER = struct.Struct(">256sI32sI")
KEYS, ROWS, STATE = range(3)
_WHAT = {KEYS: "keys", ROWS: "rows", STATE: "an optimizer state"}
DTYPES = ("int32", "int64", "uint32", "uint64", "float16", "float32", "float64")


class File(NamedTuple):
    """A file whose header was read: the name in it, the dtype, and how many numbers it has."""

    path: str
    name: str
    dtype: str
    size: int


def opened(path: str, kind: int, state: str) -> File:
    """Returns what the header of a file says, and how many numbers the file has.

    Args:
      kind: what it must be.
      state: the name that an optimizer state must have.
    """
    with open_file(path) as file:
        head = file.read(HEADER.size)
        size = os.fstat(file.fileno()).st_size
    if len(head) < HEADER.size:
        raise corrupt(path, f"its header has {HEADER.size} bytes, and there are {len(head)}")
    name, stated_kind, stated_state, number = HEADER.unpack(head)
    if stated_kind != kind:
        raise corrupt(
            path, f"byte 256 says kind {stated_kind}, and {_WHAT[kind]} are of kind {kind}"
        )
    if number >= len(DTYPES):
        raise corrupt(path, f"byte 292 says dtype {number}, and the last is {len(DTYPES) - 1}")
    try:
        texts = name.decode().strip(), stated_state.decode().strip()
    except UnicodeDecodeError as error:
        raise corrupt(path, f"a name in its header is no UTF-8 ({error})") from error
    if texts[1] != state:
        raise corrupt(path, f"byte 260 names state {texts[1]!r}, and the file {state!r}")
    dtype = DTYPES[number]
    width = np.dtype(dtype).itemsize
    if (size - HEADER.size) % width:
        raise corrupt(
            path, f"behind its header are {size - HEADER.size:,} bytes, and a {dtype} has {width}"
        )
    return File(path, texts[0], dtype, (size - HEADER.size) // width)


def corrupt(path: str, reason: str) -> ValueError:
    """Returns the error of a file that is not as it should be."""
    return ValueError(f"{path} is no whole file of a dump of SOK: {reason}.")


def header(name: str, kind: int, state: str, dtype: str) -> bytes:
    """Returns the header of a file with the table's name."""
    text = name.encode()
    # A longer name has no place there; SOK does not look at it.
    title = text.rjust(256) if len(text) <= 256 else b" " * 256
    return HEADER.pack(title, kind, state.encode().rjust(32), DTYPES.index(dtype))
