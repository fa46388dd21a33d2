"""Arguments of kernels as words of 8 bytes.

A step over many tables passes thousands of arguments: this module does as little as possible for
each of them, in as few calls of Python as possible.
"""

import ctypes
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sok_lite.backend.base import ARGUMENT_DTYPES

# How a number is packed, by its letter in a signature. The others are arrays.
_NUMBERS = {"#": "q", ".": "f4x"}
# What is raised where one is none of these, or too large.
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


class ArrayReader:
    """Reads the addresses of arrays, by kernels/cpu_arguments.cpp.

    Attributes:
      read: takes words, the first to read, their number, dtypes, the number of these, and then
        `kinds`; returns the number of the first word that it cannot read.
      kinds: the addresses of the type of NumPy's arrays, 0 where objects look different and none
        is read, and of None.
      dtypes: of each, the address as words.
    """

    def __init__(self, library: Path) -> None:
        # It keeps Python's lock, which others may be long in giving back.
        self.read = ctypes.PyDLL(str(library)).sok_read_arrays
        pointer, number = ctypes.c_void_p, ctypes.c_int64
        self.read.argtypes = [pointer, number, number, pointer, number, pointer, pointer]
        self.read.restype = number
        self.dtypes = {dtype: WORDS[1](id(dtype)) for dtype in ARGUMENT_DTYPES.values()}
        # Where objects look different, no array is of the type that it reads.
        array = np.arange(3)
        word, dtype = WORDS[1](id(array)), WORDS[1](id(array.dtype))
        understood = self.read(word, 0, 1, dtype, 1, id(np.ndarray), id(None)) == 1
        understood = understood and word[0] == array.ctypes.data
        self.kinds = id(np.ndarray) if understood else 0, id(None)

    def check(self, arrays: Sequence[Any], words: Any, dtype: np.dtype) -> None:
        """Writes the addresses of arrays, some of an unusual kind. Raises TypeError: one is wrong.

        Args:
          words: int64 of ctypes, to write into.
        """
        for i, array in enumerate(arrays):
            words[i] = 0 if array is None else checked_address(f"Array {i}", array, dtype)


# Where an object of NumPy's has the address of its data, as kernels/cpu_arguments.cpp knows too.
_DATA = 16
_word_at = ctypes.c_uint64.from_address
_example = np.arange(3)
_is_data_there = _word_at(id(_example) + _DATA).value == _example.ctypes.data


def address_of(array: np.ndarray) -> int:
    """Returns the address of an array's data: NumPy's own attribute takes five times as long."""
    if _is_data_there and type(array) is np.ndarray:
        return _word_at(id(array) + _DATA).value
    return int(array.ctypes.data)


def checked_address(what: str, array: Any, dtype: np.dtype) -> int:
    """Returns the address of an array's data. Raises TypeError if kernels cannot take the array."""
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


def write_columns(table: np.ndarray, columns: Sequence[Any]) -> None:
    """Writes columns of words side by side.

    Args:
      table: (num_parts, num_arguments) int64, to write into.
      columns: each (num_parts,) int64, the words of one argument; (num_parts, m), of several; or an
        int, the same for all parts.

    Raises:
      TypeError: they are fewer than the arguments.
      IndexError, ValueError: they are more.
    """
    end = 0
    for column in columns:
        if type(column) is int or column.ndim == 1:
            table[:, end] = column
            end += 1
        else:
            first, end = end, end + column.shape[1]
            table[:, first:end] = column
    if end != table.shape[1]:
        raise TypeError(f"The kernel takes {table.shape[1]} arguments. Received: {end}.")


class ArgumentPacker:
    """Packs the arguments of a kernel of the CPU.

    Args:
      kernel: its name, for messages.
      signature: a letter for each argument, as kernels/parts.cuh has them.
      reader: reads the addresses of arrays.

    Attributes:
      signature: as given.
      num_arguments: of a part.
    """

    def __init__(self, kernel: str, signature: str, reader: ArrayReader) -> None:
        self.num_arguments = len(signature)
        self._kernel = kernel
        self.signature = signature
        self._reader = reader
        self._arrays = [i for i, letter in enumerate(signature) if letter not in _NUMBERS]
        # An array as the address of its object, at first.
        self._format = struct.Struct("".join(_NUMBERS.get(each, "Q") for each in signature))
        self._dtypes = (ctypes.c_uint64 * len(signature))()
        for i in self._arrays:
            self._dtypes[i] = id(ARGUMENT_DTYPES[signature[i]])

    def pack(self, parts: Sequence[Sequence[Any]], words: Any, first: int, place: int) -> None:
        """Writes the arguments of parts.

        Args:
          parts: the arguments of each part of a launch.
          words: int64, of ctypes.
          first: the first word to write. A part has `num_arguments` words.
          place: the address of that word.

        Raises:
          TypeError: arguments of a part do not fit the kernel's signature, or an array is not
            contiguous.
        """
        num_arguments, arrays, pack_into = self.num_arguments, self._arrays, self._format.pack_into
        start, step = 8 * first, 8 * num_arguments
        for arguments in parts:
            values, objects = list(arguments), list(map(id, arguments))
            try:
                for i in arrays:
                    values[i] = objects[i]
                pack_into(words, start, *values)
            except (IndexError, *_UNFIT):
                self._refuse_number(arguments)
                raise
            start += step
        num_words = start // 8 - first
        read, kinds = self._reader.read, self._reader.kinds
        i = read(place, 0, num_words, self._dtypes, num_arguments, *kinds)
        while i < num_words:  # an array of an unusual kind, or a wrong one
            number, argument = i // num_arguments, i % num_arguments
            what, dtype = f"Argument {argument} of {self._kernel}", self.signature[argument]
            array = parts[number][argument]
            words[first + i] = checked_address(what, array, ARGUMENT_DTYPES[dtype])
            i = read(place, i + 1, num_words, self._dtypes, num_arguments, *kinds)

    def _refuse_number(self, arguments: Sequence[Any]) -> None:
        if len(arguments) != self.num_arguments:
            raise TypeError(
                f"{self._kernel} takes {self.num_arguments} arguments. Received: {len(arguments)}."
            )
        for i, (value, letter) in enumerate(zip(arguments, self.signature, strict=True)):
            if letter in _NUMBERS:
                try:
                    struct.pack(_NUMBERS[letter], value)
                except _UNFIT:
                    wanted = {"#": "an int of 64 bits", ".": "a float of 32 bits"}[letter]
                    raise TypeError(
                        f"Argument {i} of {self._kernel} must be {wanted}. Received: {value!r}."
                    ) from None
