"""The types of keys and rows, and their storage."""

import math
from typing import Any, NamedTuple, NoReturn

import numpy as np

from sok_lite.backend.base import Array, as_words


class RowDtype(NamedTuple):
    """A row format.

    Rows of all formats are looked up, assigned, added to, removed and saved. Floats are also pooled
    and trained, with float32 arithmetic: a float64 row that is pooled or updated is rounded to
    float32 first, even if its gradient is 0. Integers are neither pooled nor trained.

    Attributes:
      name: "float32", "float16", "bfloat16", "float64", "int32", "int64" or "int8".
      storage: the NumPy dtype of its arrays. bfloat16 is stored as uint16 bits.
      suffix: of the names of its kernels; "" for integers, as no kernel computes with them.
      number: SOK_F32, ... of kernels/rows.cuh, for kernels that take every format; -1 for integers.
    """

    name: str
    storage: np.dtype
    suffix: str
    number: int

    @property
    def is_integer(self) -> bool:
        return self.storage.kind == "i"

    @property
    def is_half(self) -> bool:
        """Whether elements are floats of 16 bits."""
        return self.name in ("float16", "bfloat16")

    @property
    def delta_dtype(self) -> np.dtype:
        """The dtype of deltas that are added to rows, and of their sums."""
        wide = self.is_integer or self.name == "float64"
        return self.storage if wide else np.dtype(np.float32)

    def check_finite(self, numbers: Any, what: str) -> None:
        """Raises ValueError if a finite number of an array-like becomes an infinity in this format
        of floats; `what` names the numbers in errors."""
        values = np.asarray(numbers, np.float64)
        with np.errstate(over="ignore"):
            stored = self.to_storage(np, values)
            finite = np.isfinite(stored if self.name == "float64" else self.to_float32(np, stored))
        if not finite.all():
            raise ValueError(
                f"{what} must be at most {_LARGEST[self.name]:.6g} in size, the largest number of "
                f"{self.name}. Received: {values[~finite][0]:.6g}, which would be an infinity. "
                "Take smaller numbers, or rows of another dtype."
            )

    def require_floats(self, table: str, done: str, instead: str) -> None:
        """Raises TypeError for rows of integers: of table `table`, cannot be `done` ("trained"), do
        `instead`."""
        if self.is_integer:
            raise TypeError(
                f"Rows of {self.name} cannot be {done}. Received: table {table!r}. {instead}"
            )

    def to_storage(self, xp: Any, values: Any) -> Array:
        """Returns an array-like of any shape as a C-contiguous array of this format.

        float32, float16 and float64 rows are taken as any floats, integers as any integers that
        fit. bfloat16 rows are taken as uint16 bits, as an array whose dtype is named bfloat16, or
        as float32, rounded to nearest even.

        Args:
          xp: NumPy or CuPy.

        Raises:
          TypeError: the dtype cannot become this row format.
          ValueError: an integer does not fit; the message names the first.
        """
        values = xp.asarray(values)
        if self.is_integer:
            if values.dtype.kind in "iu":
                _check_fits(xp, values, self.storage, "values", "Make the table of a wider dtype.")
                return xp.ascontiguousarray(values, dtype=self.storage)
        elif self.name != "bfloat16":
            if values.dtype.kind == "f" or values.dtype.name == "bfloat16":
                return xp.ascontiguousarray(values.astype(self.storage, copy=False))
        elif values.dtype == np.uint16:
            return xp.ascontiguousarray(values)
        elif values.dtype.name == "bfloat16":
            return xp.ascontiguousarray(values).view(np.uint16)
        elif values.dtype.kind == "f":
            return float32_to_bfloat16(xp, values.astype(np.float32))
        raise TypeError(
            f"values must be {self.name}, as the table's rows are. "
            f"Received: dtype {values.dtype}. Cast them first."
        )

    def to_float32(self, xp: Any, stored: Array) -> Array:
        """Returns rows of the storage dtype as float32; no copy if they are."""
        if self.name == "bfloat16":
            return bfloat16_to_float32(xp, stored)
        return stored.astype(np.float32, copy=False)

    def is_zero(self, xp: Any, stored: Array) -> Array:
        """Returns `stored == 0`, of elements of the storage dtype."""
        if self.is_integer:
            return stored == 0
        # By bits: CuPy compares numbers below 1.2e-38 as 0 (-ftz=true).
        bits = as_words(stored)[1]
        return bits << bits.dtype.type(1) == 0

    def is_below(self, xp: Any, stored: Array, cutoff: float) -> Array:
        """Returns `abs(stored) < cutoff` of elements of the storage dtype; cutoff is positive."""
        if self.is_integer:
            limits = np.iinfo(self.storage)
            # The absolute value of the least integer overflows.
            most = limits.max + 1 if cutoff > limits.max + 1 else math.ceil(cutoff) - 1
            low, high = max(-most, limits.min), min(most, limits.max)
            return (stored >= self.storage.type(low)) & (stored <= self.storage.type(high))
        if self.name == "float64":
            return abs(stored) < np.float64(cutoff)
        # By bits, as in `is_zero`: larger numbers have larger bits.
        with np.errstate(over="ignore", under="ignore"):
            least = np.float32(cutoff)
        if float(least) < cutoff:
            least = np.nextafter(least, np.float32(np.inf))
        bits = self.to_float32(xp, stored).view(np.uint32) & np.uint32(0x7FFFFFFF)
        return bits < least.view(np.uint32)


_LARGEST = {
    "float32": float(np.finfo(np.float32).max),
    "float16": float(np.finfo(np.float16).max),
    "bfloat16": (2 - 2**-7) * 2.0**127,
    "float64": float(np.finfo(np.float64).max),
}
_ROW_DTYPES = {
    "float32": RowDtype("float32", np.dtype(np.float32), "f32", 0),
    "float16": RowDtype("float16", np.dtype(np.float16), "f16", 1),
    "bfloat16": RowDtype("bfloat16", np.dtype(np.uint16), "bf16", 2),
    "float64": RowDtype("float64", np.dtype(np.float64), "f64", 3),
    "int32": RowDtype("int32", np.dtype(np.int32), "", -1),
    "int64": RowDtype("int64", np.dtype(np.int64), "", -1),
    "int8": RowDtype("int8", np.dtype(np.int8), "", -1),
}


def row_dtype(name: str) -> RowDtype:
    """Returns the row format of a name; ValueError: no such format."""
    if name not in _ROW_DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_ROW_DTYPES)}. Received: {name!r}.")
    return _ROW_DTYPES[name]


class KeyDtype(NamedTuple):
    """A key type. Inside the engine every key is an int64; uint64 keys keep their bits.

    Attributes:
      name: "int64", "int32" or "uint64".
      dtype: of the user's arrays.
      empty_key, reclaim_key: marks of empty and of erased slots, as in SOK's documentation.
    """

    name: str
    dtype: np.dtype
    empty_key: int
    reclaim_key: int

    def to_int64(self, xp: Any, keys: Any, what: str = "keys") -> Array:
        """Returns keys as a C-contiguous int64 array of the same shape.

        Args:
          xp: NumPy or CuPy.
          what: names the keys in errors.

        Raises:
          TypeError: they are not integers.
          ValueError: one of them does not fit the key type; the message names the first.
        """
        if not isinstance(keys, (np.ndarray, xp.ndarray)) or keys.dtype == object:
            keys = array_of_keys(keys, self.dtype, what)
        if keys.dtype.kind not in "iuf" and are_texts(keys):
            raise TypeError(
                f"{what} must be integers that fit {self.name}. Received: texts. {_HASH_TEXTS}"
            )
        keys = xp.asarray(keys)
        if keys.size == 0 and keys.dtype == np.float64:
            keys = keys.astype(self.dtype)  # NumPy's dtype for an empty list
        if keys.dtype.kind not in "iu":
            raise TypeError(
                f"{what} must be integers that fit {self.name}. Received: dtype {keys.dtype}. "
                "Cast them first if they really are keys."
            )
        self.check(xp, keys, what)
        if self.name == "uint64":
            keys = keys.astype(np.uint64, copy=False)
            return xp.ascontiguousarray(keys).view(np.int64).reshape(keys.shape)
        return xp.ascontiguousarray(keys, dtype=np.int64).reshape(keys.shape)

    def check(self, xp: Any, keys: Array, what: str) -> None:
        """Raises ValueError if an integer does not fit; the message names the first."""
        _check_fits(xp, keys, self.dtype, what, _OTHER_KEY_TYPE)

    def from_int64(self, xp: Any, keys: Array) -> Array:
        """Returns engine keys in the user's type."""
        if self.name == "uint64":
            return keys.view(np.uint64)
        return keys.astype(self.dtype, copy=False)


_I64, _U64 = np.iinfo(np.int64), np.iinfo(np.uint64)
_HASH_TEXTS = "Turn them into keys with sok_lite.hash_strings."
_OTHER_KEY_TYPE = "Make the table with a key type that holds such keys."
_KEY_DTYPES = {
    "int64": KeyDtype("int64", np.dtype(np.int64), int(_I64.max), int(_I64.min)),
    "int32": KeyDtype("int32", np.dtype(np.int32), int(_I64.max), int(_I64.min)),
    # The largest two, as int64 bit patterns.
    "uint64": KeyDtype("uint64", np.dtype(np.uint64), -1, -2),
}


def key_dtype(name: str) -> KeyDtype:
    """Returns the key type of a name; ValueError: no such type."""
    if name not in _KEY_DTYPES:
        advice = " sok_lite.hash_strings makes int64 keys of strings." if name == "string" else ""
        raise ValueError(
            f"key_type must be one of {', '.join(_KEY_DTYPES)}. Received: {name!r}.{advice}"
        )
    return _KEY_DTYPES[name]


def _check_fits(xp: Any, numbers: Array, dtype: np.dtype, what: str, advice: str) -> None:
    """Raises ValueError if an integer does not fit an integer dtype."""
    if numbers.dtype == dtype:
        return
    mine, theirs = np.iinfo(dtype), np.iinfo(numbers.dtype)
    bad = xp.zeros(numbers.shape, dtype=bool)
    if theirs.max > mine.max:
        bad |= numbers > numbers.dtype.type(mine.max)
    if theirs.min < mine.min:
        bad |= numbers < numbers.dtype.type(mine.min)
    if bool(bad.any()):
        _refuse(int(numbers[bad].reshape(-1)[0]), dtype, what, advice)


def _refuse(number: int, dtype: np.dtype, what: str, advice: str) -> NoReturn:
    limits = np.iinfo(dtype)
    raise ValueError(
        f"{what} must fit {dtype.name} ({limits.min} to {limits.max}). Received: {number}. {advice}"
    )


def copy_error(what: str, dtype: str, error: MemoryError) -> MemoryError:
    """Returns the error for input `what`, such as "Keys of 't'", that could not be copied as
    `dtype` for lack of memory."""
    return MemoryError(
        f"{what}: no memory for a copy as {dtype}. The table is as it was. Give it fewer at a "
        f"time. ({error})"
    )


def array_of_keys(keys: Any, dtype: Any, what: str) -> np.ndarray:
    """Returns a program's keys as a NumPy array without loss.

    NumPy converts Python integers above int64 to floats, and those of more than 64 bits to objects.
    Here all integers get the dtype; anything else is as NumPy converts it.

    Args:
      keys: an array, or a number or lists of Python.
      dtype: of the table's keys.
      what: names the keys in errors.

    Raises:
      ValueError: an integer of Python does not fit the dtype; the message names the first.
    """
    dtype, array = np.dtype(dtype), np.asarray(keys)
    if array.size == 0 and array.dtype == np.float64:
        return array.astype(dtype)  # NumPy's dtype for an empty list
    is_list = not hasattr(keys, "dtype")
    if not (array.dtype.kind == "O" or (is_list and array.dtype.kind == "f")):
        return array
    objects = np.asarray(keys, object)
    numbers = objects.reshape(-1).tolist()
    if not numbers or not all(map(is_integer, numbers)):
        return array
    limits = np.iinfo(dtype)
    for number in numbers:
        if not limits.min <= number <= limits.max:
            if _I64.min <= number <= _U64.max:
                advice = _OTHER_KEY_TYPE
            else:
                advice = "No key has more than 64 bits: take a hash, as sok_lite.hash_strings does."
            _refuse(number, dtype, what, advice)
    return objects.astype(dtype)


def are_texts(array: Any) -> bool:
    """Whether an array holds texts: by its dtype, or the first of its objects."""
    if array.dtype.kind != "O":
        return array.dtype.kind in "SUT"
    return array.size > 0 and isinstance(array.reshape(-1)[0], (str, bytes))


def key_advice(value: Any, several: str) -> str:
    """Returns the advice for a value that is not one key; `several` is the call for several."""
    if isinstance(value, (str, bytes)):
        return "Ask for the key of a text: sok_lite.hash_strings(text)."
    return f"For several keys use {several}."


def is_integer(value: Any) -> bool:
    """Whether a value is an integer of Python or NumPy, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))


def check_integer(name: str, value: Any, least: int | None = None) -> None:
    """Raises TypeError if an argument is no integer, ValueError if it is below `least`."""
    if not is_integer(value):
        raise TypeError(f"`{name}` must be an integer. Received: {name}={value!r}.")
    if least is not None and value < least:
        raise ValueError(f"`{name}` must be at least {least}. Received: {name}={value}.")


def unwrap_scalar(value: Any) -> Any:
    """Returns the number in an array without dimensions, which NumPy and `hash_strings` may return;
    any other value unchanged."""
    return value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value


def as_float(number: Any) -> float:
    """Returns a real number as a float; too large an integer becomes infinite, for checks of
    limits to refuse."""
    try:
        return float(number)
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def float32_to_bfloat16(xp: Any, values: Array) -> Array:
    """Returns the uint16 bits of float32 values rounded to bfloat16, nearest even."""
    bits = xp.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return xp.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def bfloat16_to_float32(xp: Any, bits: Array) -> Array:
    """Returns float32 values of bfloat16 bits (uint16)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
