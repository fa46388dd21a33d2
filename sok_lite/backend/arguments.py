"""Arguments of kernels as words of 8 bytes.

A step over many tables passes thousands of arguments: what is done here for each of them is done as
seldom and as fast as Python can.
"""

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sok_lite.backend.base import ARGUMENT_DTYPES, Part, Words

# How a number is packed, by its letter in a signature. The others are arrays.
_NUMBERS = {"#": "q", ".": "f4x"}
# What is raised where one is none of these, or too large.
_UNFIT = (OverflowError, TypeError, struct.error)

# Of kernels/cpu_arguments.cpp, without its last two arguments.
ArrayReader = Callable[[Any, int, int, Any, int], int]


def array_reader(library: Path) -> ArrayReader:
    """Returns the library's function that reads where arrays lie."""
    # It keeps Python's lock, which others may be long in giving back.
    read = ctypes.PyDLL(str(library)).sok_read_arrays
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    read.argtypes = [pointer, number, number, pointer, number, pointer, pointer]
    read.restype = number
    # Where objects look different, no array is of the type that it reads.
    array = np.arange(3)
    word, dtype = (ctypes.c_uint64 * 1)(id(array)), (ctypes.c_uint64 * 1)(id(array.dtype))
    understood = read(word, 0, 1, dtype, 1, id(np.ndarray), id(None)) == 1
    understood = understood and word[0] == array.ctypes.data
    array_type = id(np.ndarray) if understood else 0
    return lambda *args: read(*args, array_type, id(None))


# Where an object of NumPy's has the address of its data, as kernels/cpu_arguments.cpp knows too.
_DATA = 16
_word_at = ctypes.c_uint64.from_address
_example = np.arange(3)
_is_data_there = _word_at(id(_example) + _DATA).value == _example.ctypes.data


def address_of(array: np.ndarray) -> int:
    """Returns where an array's data lies: NumPy takes five times as long to tell it."""
    if _is_data_there and type(array) is np.ndarray:
        return _word_at(id(array) + _DATA).value
    return int(array.ctypes.data)


def checked_address(what: str, array: Any, dtype: np.dtype) -> int:
    """Returns where an array's data lies. Raises TypeError where it is not as kernels need it."""
    if not isinstance(array, np.ndarray):
        raise TypeError(
            f"{what} must be a NumPy array of {dtype}. Received: {type(array).__name__}."
        )
    if array.dtype != dtype or not array.flags.c_contiguous:
        raise TypeError(
            f"{what} must be a C-contiguous array of {dtype}. "
            f"Received: {array.dtype}, strides {array.strides}."
        )
    return int(array.ctypes.data)


def write_columns(table: np.ndarray, columns: Sequence[Words]) -> None:
    """Writes columns of words side by side; see `Backend.joined_columns`.

    Args:
      table: (num_parts, num_arguments) int64, to write into.

    Raises:
      TypeError: they are fewer than the arguments.
      IndexError, ValueError: they are more.
    """
    end = 0
    for column in columns:
        if isinstance(column, int) or column.ndim == 1:
            table[:, end] = column
            end += 1
        else:
            first, end = end, end + column.shape[1]
            table[:, first:end] = column
    if end != table.shape[1]:
        raise TypeError(f"The kernel takes {table.shape[1]} arguments. Received: {end}.")


class ArgumentPacker:
    """Packs the arguments of a kernel of the CPU.

    Attributes:
      signature: a letter for each argument, as kernels/parts.cuh has them.
      num_arguments: of a part.
    """

    def __init__(self, kernel: str, signature: str, read_arrays: ArrayReader) -> None:
        """Args:
        kernel: its name, for messages.
        signature: a letter for each argument, as kernels/parts.cuh has them.
        read_arrays: see `array_reader`.
        """
        self.num_arguments = len(signature)
        self._kernel = kernel
        self.signature = signature
        self._read_arrays = read_arrays
        self._arrays = [i for i, letter in enumerate(signature) if letter not in _NUMBERS]
        # An array as the address of its object, at first.
        self._format = struct.Struct("".join(_NUMBERS.get(each, "Q") for each in signature))
        self._dtypes = (ctypes.c_uint64 * len(signature))()
        for i in self._arrays:
            self._dtypes[i] = id(ARGUMENT_DTYPES[signature[i]])

    def pack(self, parts: Sequence[Part], words: Any, first: int) -> None:
        """Writes the arguments of parts.

        Args:
          parts: of a launch.
          words: (n,) int64.
          first: the first word to write. A part has `num_arguments` words.

        Raises:
          TypeError: as of `Backend.joined`.
        """
        num_arguments, arrays, pack_into = self.num_arguments, self._arrays, self._format.pack_into
        start, step = 8 * first, 8 * num_arguments
        for part in parts:
            values = list(part.arguments)
            if len(values) != num_arguments:
                raise TypeError(
                    f"{self._kernel} takes {num_arguments} arguments. Received: {len(values)}."
                )
            for i in arrays:
                values[i] = id(values[i])
            try:
                pack_into(words, start, *values)
            except _UNFIT:
                self._refuse_number(part)
                raise
            start += step
        num_words = len(parts) * num_arguments
        place = address_of(words) + 8 * first
        read = partial(self._read_arrays, place)
        i = read(0, num_words, self._dtypes, num_arguments)
        while i < num_words:  # an array of an unusual kind, or a wrong one
            part, argument = parts[i // num_arguments], i % num_arguments
            what, dtype = f"Argument {argument} of {self._kernel}", self.signature[argument]
            array = part.arguments[argument]
            words[first + i] = checked_address(what, array, ARGUMENT_DTYPES[dtype])
            i = read(i + 1, num_words, self._dtypes, num_arguments)

    def _refuse_number(self, part: Part) -> None:
        for i, (value, letter) in enumerate(zip(part.arguments, self.signature, strict=True)):
            if letter in _NUMBERS:
                try:
                    struct.pack(_NUMBERS[letter], value)
                except _UNFIT:
                    wanted = {"#": "an int of 64 bits", ".": "a float of 32 bits"}[letter]
                    raise TypeError(
                        f"Argument {i} of {self._kernel} must be {wanted}. Received: {value!r}."
                    ) from None
