"""Kernel arguments as words of 8 bytes.

A step over many tables passes thousands of arguments. So they are packed column by column: a few
Python calls for one argument of all tables.
"""

import ctypes
import functools
import itertools
import struct
from collections.abc import Callable, Sequence
from ctypes import addressof
from typing import Any

import numpy as np

from sok_lite.backend.base import ARGUMENT_DTYPES

# (arrays, dtype or None for any, kernel, argument number) -> the address of each array, 0 for None.
# TypeError: an array has gaps or another dtype.
Addresses = Callable[[Sequence[Any], np.dtype | None, str, int], list[int]]

# Raised for values that are not numbers, or too large.
_UNFIT = (OverflowError, TypeError, struct.error)


class _WordTypes(dict[int, Any]):
    """ctypes array types of n int64, by n: ctypes would make a new one each time."""

    def __missing__(self, count: int) -> Any:
        if len(self) >= 1 << 12:
            self.clear()
        made = self[count] = ctypes.c_int64 * count
        return made


# Launch words are ctypes memory: passing its address needs no call.
WORDS = _WordTypes()

# Wraps memory of any length, which must be writable and have no gaps.
_wrap = (ctypes.c_char * 0).from_buffer
_CANNOT_WRAP = (TypeError, ValueError, BufferError)


def address_of(array: Any) -> int:
    """Returns the address of an array's data; NumPy's own attribute takes three times as long."""
    try:
        return addressof(_wrap(array))
    except _CANNOT_WRAP:  # such as a read-only one
        return int(array.ctypes.data)


def addresses_of(
    arrays: Sequence[Any], dtype: np.dtype | None, kernel: str, argument: int
) -> list[int]:
    """Implements `Addresses` for NumPy arrays."""
    try:
        found = [
            0 if array is None else addressof(_wrap(array))
            for array in arrays
            if array is None or array.dtype is dtype
        ]
        if len(found) == len(arrays):
            return found
    except (AttributeError, *_CANNOT_WRAP):
        pass
    return [0 if each is None else _checked(each, dtype, kernel, argument) for each in arrays]


def _checked(array: Any, dtype: np.dtype | None, kernel: str, argument: int) -> int:
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"Argument {argument} of {kernel} must be a NumPy array of {dtype}. "
            f"Received: {type(array).__name__}."
        )
    check_array(array, dtype, kernel, argument)
    return address_of(array)


def check_array(array: Any, dtype: np.dtype | None, kernel: str, argument: int) -> None:
    """Raises TypeError if an array is not of a dtype (None: any), or has gaps."""
    if array.dtype != (dtype or array.dtype) or not array.flags.c_contiguous:
        raise TypeError(
            f"Argument {argument} of {kernel} must be a C-contiguous array of "
            f"{dtype or array.dtype}. Received: {array.dtype}, strides {array.strides}."
        )


@functools.cache
def _pointer_arguments(signature: str) -> list[tuple[int, str, np.dtype | None]]:
    """Returns number, letter and dtype of each argument that is not an int."""
    letters = enumerate(signature)
    return [(i, each, ARGUMENT_DTYPES.get(each)) for i, each in letters if each != "#"]


def pack_arguments(
    kernel: str,
    signature: str,
    tables: Sequence[Sequence[Any]],
    addresses: Addresses,
    memory: Any,
    first: int = 0,
) -> None:
    """Writes the arguments for each table as words into `memory`, from its word `first` on.

    A signature has a letter for each argument, as in kernels/parts.cuh; "?": an array of any type.
    TypeError: arguments do not match it.
    """
    num_arguments = len(signature)
    for count in {*map(len, tables)} - {num_arguments}:
        raise TypeError(f"{kernel} takes {num_arguments} arguments. Received: {count}.")
    words = [*itertools.chain.from_iterable(tables)]
    for i, letter, dtype in _pointer_arguments(signature):
        column = words[i::num_arguments]
        if letter == ".":
            words[i::num_arguments] = _bits_of(column, kernel, i)
        elif column[0] is column[-1] and len({*map(id, column)}) == 1:
            # All tables share one array.
            words[i::num_arguments] = addresses(column[:1], dtype, kernel, i) * len(column)
        else:
            words[i::num_arguments] = addresses(column, dtype, kernel, i)
    try:
        struct.pack_into(f"{len(words)}q", memory, 8 * first, *words)
    except _UNFIT:
        for i, word in enumerate(words):
            _refuse_unfit("q", word, kernel, i % num_arguments)
        raise


def _bits_of(numbers: Sequence[Any], kernel: str, argument: int) -> Sequence[int]:
    """Returns the bits of 32-bit floats."""
    try:
        return struct.unpack(f"{len(numbers)}I", struct.pack(f"{len(numbers)}f", *numbers))
    except _UNFIT:
        for number in numbers:
            _refuse_unfit("f", number, kernel, argument)
        raise


def _refuse_unfit(kind: str, number: Any, kernel: str, argument: int) -> None:
    """Raises TypeError for an invalid number."""
    try:
        struct.pack(kind, number)
    except _UNFIT:
        wanted = {"q": "an int of 64 bits", "f": "a float of 32 bits"}[kind]
        raise TypeError(
            f"Argument {argument} of {kernel} must be {wanted}. Received: {number!r}."
        ) from None
