"""Arguments of kernels as words of 8 bytes.

A step over many tables passes thousands of arguments: those of all parts of a launch are made
column by column, in few calls of Python for each.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from ctypes import addressof
from typing import Any

import numpy as np

from sok_lite.backend.base import ARGUMENT_DTYPES

# Returns the address of each array, 0 for None. Raises TypeError for one that is not of the dtype
# (None: any), or has gaps; the text gives it a name.
Addresses = Callable[[Sequence[Any], np.dtype | None, str], list[int]]

# What is raised where something is no number, or too large.
_UNFIT = (OverflowError, TypeError, struct.error)


class _Types(dict[int, Any]):
    """The ctypes types of arrays of n int64, by n: ctypes makes a new one unless it is kept."""

    _MOST = 1 << 12

    def __missing__(self, count: int) -> Any:
        if len(self) >= self._MOST:
            self.clear()
        made = self[count] = ctypes.c_int64 * count
        return made


# Words for a launch are memory of ctypes: whoever has it needs no call to pass its address.
WORDS = _Types()

# Takes memory of any length, which must be writable and have no gaps.
_over = (ctypes.c_char * 0).from_buffer
_UNUSUAL = (TypeError, ValueError, BufferError)


def address_of(array: Any) -> int:
    """Returns the address of an array's data: NumPy's own attribute takes thrice as long."""
    try:
        return addressof(_over(array))
    except _UNUSUAL:  # such as one that is read-only
        return int(array.ctypes.data)


def addresses_of(arrays: Sequence[Any], dtype: np.dtype | None, what: str) -> list[int]:
    """Returns the address of each NumPy array, as `Addresses` says."""
    try:
        found = list(map(addressof, map(_over, arrays)))
        if {array.dtype for array in arrays} == {dtype}:
            return found
    except (AttributeError, *_UNUSUAL):
        pass
    return [0 if array is None else _checked_address(array, dtype, what) for array in arrays]


def _checked_address(array: Any, dtype: np.dtype | None, what: str) -> int:
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{what} must be a NumPy array of {dtype}. Received: {type(array).__name__}."
        )
    check_array(array, dtype, what)
    return address_of(array)


def check_array(array: Any, dtype: np.dtype | None, what: str) -> None:
    """Raises TypeError if an array is not of a dtype (None: any), or has gaps."""
    if array.dtype != (dtype or array.dtype) or not array.flags.c_contiguous:
        raise TypeError(
            f"{what} must be a C-contiguous array of {dtype or array.dtype}. "
            f"Received: {array.dtype}, strides {array.strides}."
        )


def pack_parts(
    kernel: str,
    signature: str,
    parts: Sequence[Sequence[Any]],
    addresses: Addresses,
    memory: Any,
    first: int = 0,
) -> None:
    """Writes the arguments of parts as words, those of a part side by side.

    Args:
      kernel: the kernel's name, for messages.
      signature: a letter for each argument, as kernels/parts.cuh has them; "?": an array of any
        type.
      parts: the arguments of each part.
      addresses: of arrays of the backend.
      memory: words to write into, a buffer.
      first: the first word to write.

    Raises:
      TypeError: arguments of a part do not fit the signature.
    """
    num_arguments = len(signature)
    for count in {*map(len, parts)} - {num_arguments}:
        raise TypeError(f"{kernel} takes {num_arguments} arguments. Received: {count}.")
    words = [0] * (len(parts) * num_arguments)
    for i, (letter, column) in enumerate(zip(signature, zip(*parts, strict=True), strict=True)):
        its: Sequence[int] = column
        if letter == ".":
            its = _bits_of(column, f"Argument {i} of {kernel}")
        elif letter != "#":
            # What all tables have together is one array.
            is_one = column[0] is column[-1] and len(set(map(id, column))) == 1
            dtype, what = ARGUMENT_DTYPES.get(letter), f"Argument {i} of {kernel}"
            its = addresses(column[:1] if is_one else column, dtype, what)
            if is_one:
                its = its * len(column)
        words[i::num_arguments] = its
    try:
        struct.pack_into(f"{len(words)}q", memory, 8 * first, *words)
    except _UNFIT:
        _refuse("q", words, lambda i: f"Argument {i % num_arguments} of {kernel}")
        raise


def _bits_of(numbers: Sequence[Any], what: str) -> Sequence[int]:
    """Returns the bits of floats of 32 bits."""
    try:
        return struct.unpack(f"{len(numbers)}I", struct.pack(f"{len(numbers)}f", *numbers))
    except _UNFIT:
        _refuse("f", numbers, lambda _: what)
        raise


def _refuse(kind: str, numbers: Sequence[Any], what: Callable[[int], str]) -> None:
    """Raises TypeError for the first of some numbers that cannot be packed."""
    wanted = {"q": "an int of 64 bits", "f": "a float of 32 bits"}[kind]
    for i, number in enumerate(numbers):
        try:
            struct.pack(kind, number)
        except _UNFIT:
            raise TypeError(f"{what(i)} must be {wanted}. Received: {number!r}.") from None
