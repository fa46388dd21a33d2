"""The types and sizes of a variable's files of keys and values."""

from typing import NamedTuple

import numpy as np

_KEY_DTYPES = {"int64": "<i8", "int32": "<i4"}
_VALUE_DTYPES = {
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float64": "<f8",
    "int8": "<i1",
    "int32": "<i4",
    "int64": "<i8",
}


class Layout(NamedTuple):
    """The content of a variable's files: types and sizes. `make_layout` checks one.

    Attributes:
      name: of the variable.
      key_dtype, value_dtype: names of types.
      dim: elements of a row.
    """

    name: str
    key_dtype: str
    value_dtype: str
    dim: int

    @property
    def key_storage(self) -> np.dtype:
        """NumPy's dtype of the keys in the file."""
        return np.dtype(_KEY_DTYPES[self.key_dtype])

    @property
    def value_storage(self) -> np.dtype:
        """NumPy's dtype of the rows' elements in the file: uint16 for bfloat16."""
        return np.dtype(_VALUE_DTYPES[self.value_dtype])


def make_layout(name: str, key_dtype: str, value_dtype: str, dim: int) -> Layout:
    """Returns the layout of a variable's files.

    Raises:
      ValueError: files of this kind cannot hold such keys or rows.
    """
    for what, dtype, known in (
        ("keys", key_dtype, _KEY_DTYPES),
        ("values", value_dtype, _VALUE_DTYPES),
    ):
        if dtype not in known:
            raise ValueError(
                f"Files of keys and values hold {what} of {', '.join(known)}, of variable "
                f"{name!r} too. Received: {dtype!r}. Save it in TensorFlow's checkpoint instead."
            )
    if dim < 1:
        raise ValueError(f"A row of variable {name!r} has at least one element. Received: {dim}.")
    return Layout(name, key_dtype, value_dtype, int(dim))
