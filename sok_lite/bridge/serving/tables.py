"""The tables of an exported model: what the live ones hold now, in variables of TensorFlow.

Rows are found by arrays alone. Keys are multiplied by an odd number, which no two keys share a
product of, and sorted by it. How large a product is says which bucket it is in, and where in the
sorted ones that begins; a search by halves among the few of the bucket finds the place. These are
gathers and comparisons, which every processor and every format of models has; there is nothing to
fill when a model is loaded, as a hash table has to be.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.backend.aligned import aligned_empty
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.inference import MissingKeyPolicy
from sok_lite.bridge.serving.together import Ranks
from sok_lite.bridge.tensor import as_int64
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.exclusive import alone

# Takes a name and an array, and gives a variable of TensorFlow.
MakeVariable = Callable[[str, np.ndarray], Any]

# The golden ratio as a fraction of 2**64, odd: neighbouring keys get products far apart.
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_LARGEST = np.iinfo(np.int64).max
# Those that a float32 has: TensorFlow Lite neither shifts nor divides int64. Its rounding keeps the
# order of products, so that those of one bucket lie together.
_MOST_BITS = 24

_QUANTIZED = (None, "float16", "int8")
# Scales below this are flushed to 0 by many processors.
_LEAST_SCALE = np.finfo(np.float32).tiny
_STEPS = 127


class _Served(NamedTuple):
    """One table. Behind the rows of its keys are that of a missing key, and one of zeros.

    Attributes:
      live: the engine's table: as long as it is here no other has its id.
      keys: where the row of each is.
      rows: all of them.
    """

    live: Any
    keys: "KeyIndex"
    rows: "ServedRows"


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
        # What any missing key gives; a random row is another for each key.
        constant = table.initializer.constant_row(table.dim)
        zeros = (0,) * table.dim
        missing = [zeros if constant is None else constant, zeros]
        is_integer = table.row_dtype.is_integer
        last = np.array(missing, table.row_dtype.storage if is_integer else np.float64)
        last = table.row_dtype.to_storage(np, last)
        make = self._maker_of_table()
        if of_all_ranks or self._cutoff is not None or not _is_read_once(table):
            index, rows = self._chosen_in_order(table, of_all_ranks, last, make)
        else:
            index, rows = alone(table, partial(_in_order, table, last, make))
        if table.row_dtype.name == "bfloat16":
            rows = rows.view(tf.bfloat16.as_numpy_dtype)
        return _Served(table, index, ServedRows(table.name, rows, self._quantize, make))

    def _chosen_in_order(
        self, table: Any, of_all_ranks: bool, last: np.ndarray, make: MakeVariable
    ) -> tuple["KeyIndex", np.ndarray]:
        """Does what `_in_order` does, of all ranks, without small rows, or of any device."""
        keys, rows = on_device(table.backend, _contents, table)
        if of_all_ranks:
            keys, rows = self._gather(table, keys, rows)
        if self._cutoff is not None:
            _check_missing(table, last, self._cutoff)
            is_small = table.row_dtype.is_below(np, rows, self._cutoff).all(axis=1)
            keys, rows = keys[~is_small], rows[~is_small]
        index = KeyIndex(keys, make)
        made = aligned_empty((len(keys) + len(last), table.dim), rows.dtype)
        np.take(rows, index.order, axis=0, out=made[: len(keys)], mode="clip")
        made[len(keys) :] = last
        return index, made

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
    return _as_int64(table.backend.to_host(keys)), table.backend.to_host(rows)


def _as_int64(keys: np.ndarray) -> np.ndarray:
    return keys.view(np.int64) if keys.dtype == np.uint64 else keys.astype(np.int64)


def _is_read_once(table: Any) -> bool:
    """Whether rows of a table can be read in any order into memory of the host."""
    return table.backend.name == "cpu" and table.var_type != "remote"


def _in_order(
    table: EmbeddingTable, last: np.ndarray, make: MakeVariable
) -> tuple["KeyIndex", np.ndarray]:
    """Returns an index of the keys of a table, and their rows in its order: no row is copied twice.

    Args:
      table: locked.
      last: rows that come behind.
      make: takes a name and an array, and gives a variable of it.
    """
    keys, numbers = table.export_rows()
    index = KeyIndex(_as_int64(keys), make)
    rows = aligned_empty((len(keys) + len(last), table.dim), last.dtype)
    table.store.read(np.ascontiguousarray(numbers[index.order]), "value", rows[: len(keys)])
    rows[len(keys) :] = last
    return index, rows


def _check_missing(table: EmbeddingTable, missing: np.ndarray, cutoff: float) -> None:
    if not table.row_dtype.is_below(np, missing, cutoff).all():
        raise ValueError(
            "`cutoff` leaves out keys, which then give what missing keys give: of "
            f"{table.name!r} that is its initial value, which is not below the cutoff. "
            f"Received: cutoff={cutoff}. Leave it out."
        )


# ---- keys to row numbers, with arrays alone ------------------------------------------------------


class KeyIndex:
    """Finds the place of keys among n.

    Args:
      keys: (n,) int64, distinct.
      make_variable: takes a name and an array, and gives a variable of it.

    Attributes:
      order: (n,) int64: which of `keys` has which place.
      size: n.
      variables: all that it reads.
    """

    def __init__(self, keys: np.ndarray, make_variable: MakeVariable) -> None:
        products = (keys.view(np.uint64) * _FACTOR).view(np.int64)
        self.order = np.argsort(products)
        self.size = len(keys)
        products = products[self.order]
        # About one key in a bucket.
        bits = min(_MOST_BITS, max(1, (self.size - 1).bit_length()))
        self._first, self._scale = 1 << (bits - 1), np.float32(2.0 ** (bits - 64))
        buckets = (products.astype(np.float32) * self._scale).astype(np.int32) + self._first
        counts = np.bincount(buckets, minlength=2 * self._first + 1)
        # Whoever rounds otherwise where the model is served is one bucket off: the search goes from
        # the bucket before to the one behind.
        starts = np.concatenate([[0, 0], np.cumsum(counts)[:-2]])
        most = np.convolve(counts, np.ones(3, np.int64)).max()
        self._num_halvings = int(most).bit_length()
        # A search may look past the last key: no product is above the largest number.
        beyond = np.full(1 << self._num_halvings, _LARGEST, np.int64)
        products = np.concatenate([products, beyond])
        is_small = len(products) <= np.iinfo(np.int32).max
        self._products = make_variable("keys", products)
        self._starts = make_variable("starts", starts.astype(np.int32 if is_small else np.int64))
        self.variables = [self._products, self._starts]

    def find(self, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the place of each key, and whether it has one; the place is any if not.

        Args:
          keys: int64 of any shape.

        Returns:
          (integers of the keys' shape, in [0, n]; bool of the keys' shape).
        """
        products = keys * tf.constant(_FACTOR.view(np.int64), tf.int64)
        buckets = tf.cast(tf.cast(products, tf.float32) * self._scale, tf.int32) + self._first
        places = tf.gather(self._starts, buckets)
        for power in reversed(range(self._num_halvings)):
            step = 1 << power
            is_before = tf.gather(self._products, places + (step - 1)) < products
            places = tf.where(is_before, places + step, places)
        is_found = tf.equal(tf.gather(self._products, places), products) & (places < self.size)
        return places, is_found


# ---- rows: as they are, as halves, or as bytes ---------------------------------------------------


def check_quantize(quantize: Any) -> None:
    """Raises ValueError for another `quantize`."""
    if quantize not in _QUANTIZED:
        raise ValueError(
            f"`quantize` must be None, 'float16' or 'int8'. Received: quantize={quantize!r}."
        )


class ServedRows:
    """Rows that are read by number.

    "float16" rounds rows of float32 and float64 to it: an element is off by at most 2**-11 of its
    size, or by 2**-25 where that is more. "int8" has one scale for each row of floats: an element
    is off by at most 1/254 of the largest of its row, or by 2e-36 where that is more. Then it is
    rounded to the rows' dtype. Integers stay as they are.

    Args:
      name: of the table, for errors.
      rows: (n, dim), of an array type that TensorFlow has.
      quantize: "float16", "int8" or None.
      make_variable: takes a name and an array, and gives a variable of it.

    Raises:
      ValueError: an element does not fit.
    """

    def __init__(
        self, name: str, rows: np.ndarray, quantize: str | None, make_variable: MakeVariable
    ) -> None:
        self._name = name
        self._dtype = tf.as_dtype(rows.dtype)
        self._scales = None
        if quantize == "float16" and self._dtype in (tf.float32, tf.float64):
            rows = self._halves(rows)
        elif quantize == "int8" and self._dtype.is_floating:
            rows, scales = self._bytes(rows)
            self._scales = make_variable("scales", scales)
        self._rows = make_variable("rows", rows)
        self.variables = [self._rows] + ([] if self._scales is None else [self._scales])

    def gather(self, numbers: tf.Tensor) -> tf.Tensor:
        """Returns rows, numbers.shape + [dim], of their dtype before the export."""
        rows = tf.gather(self._rows, numbers)
        if self._scales is None:
            return rows if rows.dtype == self._dtype else tf.cast(rows, self._dtype)
        scales = tf.gather(self._scales, numbers)
        return tf.cast(tf.cast(rows, tf.float32) * scales[..., tf.newaxis], self._dtype)

    def _halves(self, rows: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            halves = rows.astype(np.float16)
        self._check(bool(np.isfinite(halves).all()), rows, float(np.finfo(np.float16).max))
        return halves

    def _bytes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (n, dim) int8 and (n,) float32, whose product the rows are."""
        wide = rows.astype(np.float64 if self._dtype == tf.float64 else np.float32)
        largest = np.abs(wide).max(axis=1, initial=0)
        limit = float(np.finfo(np.float32).max)
        self._check(bool((largest <= limit).all()), wide, limit)
        scales = (largest / _STEPS).astype(np.float32)
        scales = np.where(scales < _LEAST_SCALE, np.float32(0), scales)
        divisors = np.where(scales == 0, np.float32(np.inf), scales)
        return np.rint(wide / divisors[:, None]).astype(np.int8), scales

    def _check(self, fits: bool, rows: np.ndarray, limit: float) -> None:
        if not fits:
            largest = np.abs(rows.astype(np.float64)).max()
            raise ValueError(
                f"Rows of {self._name!r} cannot be quantised: elements must be at most {limit:g} "
                f"in size. Received: {largest:g}. Leave `quantize` out, or try another."
            )
