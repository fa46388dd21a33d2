"""The header of a file of safetensors: dtype, shape and byte range of each tensor.

Eight bytes, little-endian, are the length of the header, which is JSON; the tensors follow, without
a gap.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

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


def header_of(tensors: Sequence[Tensor], about: Mapping[str, str]) -> bytes:
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


def placed_tensors(header: bytes) -> list[tuple[int, int, Tensor]]:
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
