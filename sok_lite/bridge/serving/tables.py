"""The tables of an exported model: what the live ones hold now, in variables of TensorFlow."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.inference import MissingKeyPolicy
from sok_lite.bridge.joined import as_int64
from sok_lite.bridge.serving.index import KeyIndex
from sok_lite.bridge.serving.rows import ServedRows
from sok_lite.bridge.serving.together import Ranks
from sok_lite.engine.table import EmbeddingTable

# Takes a name and an array, and gives a variable of TensorFlow.
MakeVariable = Callable[[str, np.ndarray], Any]


class _Served(NamedTuple):
    """One table. Behind the rows of its keys are that of a missing key, and one of zeros.

    Attributes:
      live: the engine's table: as long as it is here no other has its id.
      keys: where the row of each is.
      rows: all of them.
    """

    live: Any
    keys: KeyIndex
    rows: ServedRows


class ServedTables:
    """Copies that lookups read while a model is exported. A table is copied at its first lookup.

    Args:
      make_variable: makes a variable of an array.
      read_variable: gives the dense value of a static variable, as an array.
      cutoff: keys of whose row every |element| is below it are left out; None: none.
      quantize: "float16" or "int8": how rows of floats are made smaller; None: they are not.
      ranks: those that export, alike: every rank makes the same lookups.

    Attributes:
      variables: all that were made.
    """

    def __init__(
        self,
        make_variable: MakeVariable,
        read_variable: Callable[[Any], np.ndarray],
        cutoff: float | None,
        quantize: str | None,
        ranks: Ranks,
    ) -> None:
        self._make_variable, self._read_variable = make_variable, read_variable
        self._cutoff, self._quantize = cutoff, quantize
        self._ranks, self._comm = ranks, ranks.comm
        self._served: dict[tuple[int, bool], _Served] = {}
        self._static: dict[int, tuple[Any, ServedRows]] = {}
        self._nothing: Any = None
        self.variables: list[Any] = []

    @property
    def stand_in(self) -> tf.Tensor:
        """A resource, in place of that of any live table."""
        if self._nothing is None:
            with tf.init_scope():
                self._nothing = self._make_variable("sok_nothing", np.zeros(0, np.float32))
            self.variables.append(self._nothing)
        return self._nothing.handle

    def read(
        self,
        variable: Any,
        keys: tf.Tensor,
        policy: MissingKeyPolicy,
        of_all_ranks: bool = False,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Looks keys up.

        Args:
          variable: the table.
          keys: integers of any shape.
          policy: of the lookup. A key without a row whose initial value is wanted gives it where it
            is the same for all keys, else zeros.
          of_all_ranks: whether it is a lookup in the tables of all ranks, not in this one's.

        Returns:
          (keys.shape + [dimension] rows; bool of the keys' shape, which have a row).

        Raises:
          NotImplementedError: the policy says that keys are inserted.
        """
        if policy.training:
            raise NotImplementedError(
                f"A lookup in {variable.name!r} with training=True inserts keys, which a model for "
                "serving cannot. Leave `training` out, or give False."
            )
        policy = policy._replace(training=False, missing=policy.missing or policy.reading_only)
        _, missing = policy.now()
        served = self._served_table(variable.table, of_all_ranks and self._comm is not None)
        places, is_found = served.keys.find(as_int64(keys))
        # Equal bits are equal keys only where both types have the number.
        if (keys.dtype == tf.uint64) != (variable.key_type == tf.uint64):
            is_found &= as_int64(keys) >= 0
        number = served.keys.size + (missing == "zeros")
        rows = served.rows.gather(tf.where(is_found, places, tf.constant(number, places.dtype)))
        return tf.ensure_shape(rows, keys.shape.concatenate([variable.dimension])), is_found

    def read_static(self, variable: Any, numbers: tf.Tensor) -> tf.Tensor:
        """Returns rows of a static table by number, (n, dimension)."""
        if id(variable) not in self._static:
            with tf.init_scope():
                rows = self._rows_of_static(variable)
                served = ServedRows(variable.name, rows, self._quantize, self._maker_of_table())
            self._static[id(variable)] = variable, served
            self.variables += served.variables
        return self._static[id(variable)][1].gather(numbers)

    def _served_table(self, table: Any, of_all_ranks: bool) -> _Served:
        which = id(table), of_all_ranks
        if which not in self._served:
            with tf.init_scope():
                served = self._copy(table, of_all_ranks)
            self._served[which] = served
            self.variables += [*served.keys.variables, *served.rows.variables]
        return self._served[which]

    def _copy(self, table: Any, of_all_ranks: bool) -> _Served:
        keys, rows = on_device(table.backend, _contents, table)
        if of_all_ranks:
            keys, rows = self._gather(table, keys, rows)
        # What any missing key gives; a random row is another for each key.
        constant = table.initializer.constant_row(table.dim)
        zeros = (0,) * table.dim
        missing = [zeros if constant is None else constant, zeros]
        is_integer = table.row_dtype.is_integer
        last = np.array(missing, table.row_dtype.storage if is_integer else np.float64)
        last = table.row_dtype.to_storage(np, last)
        if self._cutoff is not None:
            _check_missing(table, last, self._cutoff)
            is_small = table.row_dtype.is_below(np, rows, self._cutoff).all(axis=1)
            keys, rows = keys[~is_small], rows[~is_small]
        make = self._maker_of_table()
        index = KeyIndex(keys, make)
        rows = np.concatenate([rows[index.order], last])
        if table.row_dtype.name == "bfloat16":
            rows = rows.view(tf.bfloat16.as_numpy_dtype)
        return _Served(table, index, ServedRows(table.name, rows, self._quantize, make))

    def _maker_of_table(self) -> MakeVariable:
        """Returns what makes the variables of one more table."""
        prefix = f"sok_table_{len(self._served) + len(self._static)}"
        return lambda name, array: self._make_variable(f"{prefix}_{name}", array)

    # ---------------------------------------------------------------- several ranks

    def _gather(
        self, table: Any, keys: np.ndarray, rows: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the keys and rows of all ranks, each from its owner, on rank 0."""
        assert self._comm is not None
        owners = table.owner.owners(keys, self._comm.size, table.key_dtype)
        is_own = owners == self._comm.rank
        return self._ranks.to_first(keys[is_own]), self._ranks.to_first(rows[is_own])

    def _rows_of_static(self, variable: Any) -> np.ndarray:
        rows = self._read_variable(variable)
        if self._comm is None:
            return rows
        all_rows = np.zeros((variable.table.num_rows, variable.dimension), rows.dtype)
        received = self._ranks.to_first(rows.view(np.uint16) if rows.dtype.itemsize == 2 else rows)
        if self._comm.rank > 0:
            return rows
        first = 0
        for rank in range(self._comm.size):
            count = variable.table.num_rows_of(rank, self._comm.size)
            stride = variable.table.stride(self._comm.size)
            start = rank if stride > 1 else 0
            part = received[first : first + count].view(rows.dtype)
            all_rows[start : start + stride * count : stride] = part
            first += count
        return all_rows


def _contents(table: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the keys of a table, (n,) int64, and their rows as they are stored, on the host."""
    keys, rows = table.export()
    keys = table.backend.to_host(keys)
    rows = table.backend.to_host(rows)
    is_unsigned = keys.dtype == np.uint64
    return keys.view(np.int64) if is_unsigned else keys.astype(np.int64), rows


def _check_missing(table: EmbeddingTable, missing: np.ndarray, cutoff: float) -> None:
    if not table.row_dtype.is_below(np, missing, cutoff).all():
        raise ValueError(
            "`cutoff` leaves out keys, which then give what missing keys give: of "
            f"{table.name!r} that is its initial value, which is not below the cutoff. "
            f"Received: cutoff={cutoff}. Leave it out."
        )
