"""The tables of an exported model: a copy of the live ones, in variables stored in files.

Rows are found with arrays only. Keys are multiplied by an odd number, which maps distinct keys to
distinct products, and sorted by product. The size of a product determines its bucket, and where
that begins in the sorted order; a binary search among the few keys of the bucket finds the
position. These are gathers and comparisons, which every processor and every model format has;
unlike a hash table, nothing has to be filled when a model is loaded.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.inference import MissingKeyPolicy
from sok_lite.bridge.serving import files
from sok_lite.bridge.serving.files import VariableFiles, WrittenVariable
from sok_lite.bridge.serving.in_order import FACTOR, LARGEST, RowsInOrder
from sok_lite.bridge.serving.together import Ranks
from sok_lite.bridge.tensor import as_int64
from sok_lite.engine.table.locking import with_lock

# Takes a name, a shape and a dtype; returns a TensorFlow variable and its name in a checkpoint.
NewVariable = Callable[[str, Sequence[int], tf.DType], tuple[Any, str]]
# Takes the same; returns a variable whose value is to be written.
MakeVariable = Callable[[str, Sequence[int], tf.DType], Any]

# The precision of float32: TensorFlow Lite neither shifts nor divides int64. Rounding keeps the
# order of products, so those of a bucket stay together.
_MOST_BITS = 24

_QUANTIZED = (None, "float16", "int8")
# Many processors flush scales below this to 0.
_LEAST_SCALE = np.finfo(np.float32).tiny
_STEPS = 127


class _Served(NamedTuple):
    """One table. After the rows of its keys come the row of a missing key and one of zeros: `last`.

    `live`, the engine's table, is kept so that its id stays unique.
    """

    live: Any
    keys: "KeyIndex"
    rows: "ServedRows"
    last: np.ndarray


class ServedTables:
    """Copies of tables that lookups read during an export, made at a table's first lookup.

    Args:
      new_variable: makes the variables, which are never assigned.
      read_variable: returns the value of a static variable, a tensor or an array.
      ranks: those that export; every rank makes the same lookups.
      written: the files for the values; None: this rank writes none.

    Attributes:
      variables: all that were made, by the name passed to `new_variable`.
    """

    def __init__(
        self,
        new_variable: NewVariable,
        read_variable: Callable[[Any], Any],
        cutoff: float | None,
        quantize: str | None,
        ranks: Ranks,
        written: VariableFiles | None,
    ) -> None:
        self._new_variable, self._read_variable = new_variable, read_variable
        self._cutoff, self._quantize = cutoff, quantize
        self._ranks, self._comm, self._written = ranks, ranks.comm, written
        self._served: dict[tuple[int, bool], _Served] = {}
        self._static: dict[int, tuple[Any, ServedRows]] = {}
        self._nothing: Any = None
        self.variables: dict[str, Any] = {}

    @property
    def stand_in(self) -> tf.Tensor:
        """A resource in place of a live table's."""
        if self._nothing is None:
            with tf.init_scope():
                nothing = self._make("sok_nothing", [0], tf.float32)
                nothing.write(np.zeros(0, np.float32))
                self._nothing = nothing.variable
        return self._nothing.handle

    def read(
        self,
        variable: Any,
        keys: tf.Tensor,
        policy: MissingKeyPolicy,
        of_all_ranks: bool = False,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (keys.shape + [dimension] rows, bool of the keys' shape, which have a row).

        A missing key returns its initial value if that is the same for all keys, else zeros. Raises
        NotImplementedError if the policy would insert keys.
        """
        if policy.training:
            raise NotImplementedError(
                f"A lookup in {variable.name!r} with training=True inserts keys, which a model for "
                "serving cannot. Leave `training` out, or give False."
            )
        policy = policy._replace(training=False, missing=policy.missing or policy.reading_only)
        _, missing = policy.now()
        served = self._served_table(variable.table, of_all_ranks and self._comm is not None)
        if self._cutoff is not None and missing != "zeros":
            _check_missing(variable.table, served.last[0], self._cutoff)
        places, is_found = served.keys.find(as_int64(keys))
        # Equal bits are equal keys only if both dtypes have the number.
        if (keys.dtype == tf.uint64) != (variable.key_type == tf.uint64):
            is_found &= as_int64(keys) >= 0
        number = served.keys.size + (missing == "zeros")
        rows = served.rows.gather(tf.where(is_found, places, tf.constant(number, places.dtype)))
        return tf.ensure_shape(rows, keys.shape.concatenate([variable.dimension])), is_found

    def read_static(self, variable: Any, numbers: tf.Tensor) -> tf.Tensor:
        """Returns rows of a static table by number, (n, dimension)."""
        if id(variable) not in self._static:
            with tf.init_scope():
                self._static[id(variable)] = variable, self._copy_static(variable)
        return self._static[id(variable)][1].gather(numbers)

    def _served_table(self, table: Any, of_all_ranks: bool) -> _Served:
        which = id(table), of_all_ranks
        if which not in self._served:
            with tf.init_scope():
                copy = partial(self._copy, table, of_all_ranks)
                self._served[which] = on_device(table.backend, with_lock, table, copy)
        return self._served[which]

    def _copy(self, table: Any, of_all_ranks: bool) -> _Served:
        # The row of any missing key; random rows differ by key.
        constant = table.initializer.constant_row(table.dim)
        zeros = (0,) * table.dim
        missing = [zeros if constant is None else constant, zeros]
        is_integer = table.row_dtype.is_integer
        last = np.array(missing, table.row_dtype.storage if is_integer else np.float64)
        last = table.row_dtype.to_storage(np, last)
        make = self._maker_of_table()
        is_exported = of_all_ranks or self._ranks.is_first
        over = self._ranks if of_all_ranks else None
        source = RowsInOrder(table, over, is_exported, self._cutoff)
        index = KeyIndex(source.num_keys, source.products(), make)
        dtype = tf.as_dtype(table.row_dtype.name)
        num_rows = source.num_keys + len(last)
        rows = ServedRows(table.name, [num_rows, table.dim], dtype, self._quantize, make)
        first = 0
        for products, some in source.pieces():
            index.write(products, first)
            rows.write(some, first)
            first += len(products)
        rows.write(last, source.num_keys)
        return _Served(table, index, rows, last)

    def _copy_static(self, variable: Any) -> "ServedRows":
        table, own = variable.table, self._read_variable(variable)
        size, rank = (1, 0) if self._comm is None else (self._comm.size, self._comm.rank)
        dtype = tf.as_dtype(own.dtype)
        shape = [table.num_rows, variable.dimension]
        rows = ServedRows(variable.name, shape, dtype, self._quantize, self._maker_of_table())
        numbers = [table.row_numbers(each, size) for each in range(size)]
        row_bytes = variable.dimension * dtype.size * table.stride(size)
        for part in files.parts(max(map(len, numbers)), row_bytes):
            received = np.asarray(own[part])
            if self._comm is not None:
                bits = received.view(np.uint16) if dtype.size == 2 else received
                received = self._ranks.to_first(bits).view(received.dtype)
                if rank > 0:
                    continue
            first, some, count = part.start * table.stride(size), np.empty_like(received), 0
            for there in (each[part] for each in numbers):
                here = slice(there.start - first, None, there.step)
                some[here][: len(there)] = received[count : count + len(there)]
                count += len(there)
            rows.write(some, first)
        return rows

    def _maker_of_table(self) -> MakeVariable:
        """Returns a factory for the variables of one more table."""
        prefix = f"sok_table_{len(self._served) + len(self._static)}"
        return lambda name, shape, dtype: self._make(f"{prefix}_{name}", shape, dtype)

    def _make(self, name: str, shape: Sequence[int], dtype: tf.DType) -> WrittenVariable:
        variable, written_name = self._new_variable(name, shape, dtype)
        self.variables[name] = variable
        return WrittenVariable(variable, written_name, self._written)


def _check_missing(table: Any, missing: np.ndarray, cutoff: float) -> None:
    if not table.row_dtype.is_below(np, missing, cutoff).all():
        raise ValueError(
            "`cutoff` leaves out keys, which then give what missing keys give: of "
            f"{table.name!r} that is its initial value, which is not below the cutoff. "
            f"Received: cutoff={cutoff}. Leave it out."
        )


# ---- keys to row numbers, with arrays only -------------------------------------------------------


class KeyIndex:
    """Finds the positions of keys among n keys, ordered by their distinct products."""

    def __init__(
        self, num_keys: int, products: Iterable[np.ndarray], make_variable: MakeVariable
    ) -> None:
        self.size = num_keys
        # About one key per bucket.
        bits = min(_MOST_BITS, max(1, (self.size - 1).bit_length()))
        self._first, self._scale = 1 << (bits - 1), np.float32(2.0 ** (bits - 64))
        is_small = self.size < np.iinfo(np.int32).max // 4
        counts = np.zeros(2 * self._first + 1, np.int32 if is_small else np.int64)
        for piece in products:
            if len(piece):
                buckets = (piece.astype(np.float32) * self._scale).astype(np.int32) + self._first
                found = np.bincount(buckets - buckets[0])
                counts[buckets[0] : buckets[0] + len(found)] += found.astype(counts.dtype)
        # Other rounding on the serving machine shifts a key by one bucket at most: the search
        # covers the buckets before and after.
        most = counts.copy()
        most[1:] += counts[:-1]
        most[:-1] += counts[1:]
        self._num_halvings = int(most.max()).bit_length()
        starts = most
        np.cumsum(counts[:-2], dtype=starts.dtype, out=starts[2:])
        starts[:2] = 0
        # A search may read past the last key: no product is above the largest number.
        beyond = np.full(1 << self._num_halvings, LARGEST, np.int64)
        self._products = make_variable("keys", [num_keys + len(beyond)], tf.int64)
        self._products.write(beyond, num_keys)
        self._starts = make_variable("starts", starts.shape, tf.as_dtype(starts.dtype))
        self._starts.write(starts)

    def write(self, products: np.ndarray, first: int) -> None:
        """Writes the products of keys from position `first` on, equal to those passed before."""
        self._products.write(products, first)

    def find(self, keys: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the position of each key, arbitrary if not found, and whether it is found.

        Integers in [0, n] and bool, of the keys' shape; keys are int64.
        """
        products = keys * tf.constant(FACTOR.view(np.int64), tf.int64)
        buckets = tf.cast(tf.cast(products, tf.float32) * self._scale, tf.int32) + self._first
        held = self._products.variable
        places = tf.gather(self._starts.variable, buckets)
        for power in reversed(range(self._num_halvings)):
            step = 1 << power
            is_before = tf.gather(held, places + (step - 1)) < products
            places = tf.where(is_before, places + step, places)
        is_found = tf.equal(tf.gather(held, places), products) & (places < self.size)
        return places, is_found


# ---- rows: unchanged, as float16, or as int8 -----------------------------------------------------


def check_quantize(quantize: Any) -> None:
    """Raises ValueError for another `quantize`."""
    if quantize not in _QUANTIZED:
        raise ValueError(
            f"`quantize` must be None, 'float16' or 'int8'. Received: quantize={quantize!r}."
        )


class ServedRows:
    """Rows (n, dim) that are read by number.

    "float16" rounds rows of float32 and float64: an element is off by at most 2**-11 of its size,
    or by 2**-25 if that is more. "int8" has one scale per float row: an element is off by at most
    1/254 of the largest in its row, or by 2e-36 if that is more. Then it is rounded to the rows'
    dtype. Integers stay unchanged.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        dtype: tf.DType,
        quantize: str | None,
        make_variable: MakeVariable,
    ) -> None:
        self._name, self._dtype, self._stored = name, dtype, dtype
        self._scales = None
        if quantize == "float16" and dtype in (tf.float32, tf.float64):
            self._stored = tf.float16
        elif quantize == "int8" and dtype.is_floating:
            self._stored = tf.int8
            self._scales = make_variable("scales", shape[:1], tf.float32)
        # A variable of float16 cannot be written in parts (files.py).
        self._is_bits = self._stored == tf.float16
        self._rows = make_variable("rows", shape, tf.int16 if self._is_bits else self._stored)

    def write(self, rows: np.ndarray, first: int) -> None:
        """Writes rows (m, dim), as stored, from number `first`; ValueError if one is too big."""
        if self._dtype == tf.bfloat16:
            rows = rows.view(tf.bfloat16.as_numpy_dtype)
        if self._scales is not None:
            rows, scales = self._bytes(rows)
            self._scales.write(scales, first)
        elif self._stored != self._dtype:
            rows = self._halves(rows)
        self._rows.write(rows.view(np.int16) if self._is_bits else rows, first)

    def gather(self, numbers: tf.Tensor) -> tf.Tensor:
        """Returns rows, numbers.shape + [dim], in their dtype before the export."""
        rows = tf.gather(self._rows.variable, numbers)
        if self._is_bits:
            rows = tf.bitcast(rows, tf.float16)
        if self._scales is None:
            return rows if rows.dtype == self._dtype else tf.cast(rows, self._dtype)
        scales = tf.gather(self._scales.variable, numbers)
        return tf.cast(tf.cast(rows, tf.float32) * scales[..., tf.newaxis], self._dtype)

    def _halves(self, rows: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            halves = rows.astype(np.float16)
        self._check(bool(np.isfinite(halves).all()), rows, float(np.finfo(np.float16).max))
        return halves

    def _bytes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (n, dim) int8 and (n,) float32, whose products approximate the rows."""
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
                f"Rows of {self._name!r} cannot be quantized: elements must be at most {limit:g} "
                f"in size. Received: {largest:g}. Leave `quantize` out, or try another."
            )
