"""Arguments of `lookup_sparse` as inputs of an operation, and as the engine's batch."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array, Backend
from sok_lite.bridge.lookup_arguments import Argument, RowBounds, TableSpec
from sok_lite.bridge.type_spec import alive
from sok_lite.engine.batch import Batch, BatchLayout, row_splits_of


def inputs_of(arguments: Sequence[Argument]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns the tensors that `BatchOfInputs` takes as arrays.

    (keys, places, weights and places of weights of each table, as far as it has them; int64 for the
    host: the rows of each sparse matrix).
    """
    inputs: list[tf.Tensor] = []
    numbers: list[tf.Tensor] = []
    for _, keys, rows, weights, weight_rows, _ in arguments:
        inputs.append(keys)
        _add(rows, inputs, numbers)
        if weights is not None:
            inputs.append(weights)
        if weight_rows is not None:
            _add(weight_rows, inputs, numbers)
    return inputs, numbers


def _add(rows: RowBounds, inputs: list[tf.Tensor], numbers: list[tf.Tensor]) -> None:
    if rows.places is not None:
        inputs.append(rows.places)
    if rows.batch is not None:
        numbers.append(rows.batch)


class Given(NamedTuple):
    """The arrays of one table; None for what it does not have.

    Attributes:
      keys: (n,) integers.
      places: (batch + 1,) row splits of the keys or, for a sparse matrix, (n, 2) indices.
      weights: (n,) float32.
      num_weight_rows: rows of the weights' matrix, if sparse.
    """

    keys: Array
    places: Array | None
    num_rows: int
    weights: Array | None
    weight_places: Array | None
    num_weight_rows: int


class BatchOfInputs:
    """Converts a lookup's inputs to the engine's batch; `num_numbers` of them are on the host."""

    def __init__(self, tables: Sequence[TableSpec], backend: Backend) -> None:
        self._tables, self._backend = tables, backend
        self._combiners = [table.combiner for table in tables]
        of_rows = [table.is_ragged for table in tables if table.width is None]
        of_weights = [table.weights_are_ragged for table in tables]
        self.num_numbers = [*of_rows, *of_weights].count(False)
        self._layout: BatchLayout | None = None  # of the last batch: most batches share one

    def given(self, arrays: Sequence[Array]) -> list[Given]:
        """Returns the arrays of each table. Reads no element on a GPU.

        Args:
          arrays: of the tensors of `inputs_of`, numbers last; others may be between.

        Raises ValueError for row splits of length 0, and for a negative number of rows.
        """
        on_device, on_host = iter(arrays), iter(arrays[len(arrays) - self.num_numbers :])
        result = []
        for spec in self._tables:
            keys = next(on_device).reshape(-1)
            places, weights, weight_places, num_weight_rows = None, None, None, 0
            if spec.width is not None:
                num_rows = keys.size // spec.width
            else:
                places = next(on_device)
                num_rows = _num_rows(spec.is_ragged, places, on_host)
            if spec.has_weights:
                weights = next(on_device)
            if spec.weights_are_ragged is not None:
                weight_places = next(on_device)
                num_weight_rows = _num_rows(spec.weights_are_ragged, weight_places, on_host)
            of_weights = (weights, weight_places, num_weight_rows)
            result.append(Given(keys, places, num_rows, *of_weights))
        return result

    def make(self, tables: Sequence[Any], given: Sequence[Given]) -> Batch:
        """Returns a batch of the engine's tables, without a policy for keys that have no row.

        Raises ValueError if row numbers of a sparse matrix decrease or are out of range, a key does
        not fit, or numbers or rows of weights and keys differ.
        """
        backend = self._backend
        splits: list[Array | None] = [None] * len(given)  # None for dense ids
        for i, (spec, its) in enumerate(zip(self._tables, given, strict=True)):
            if not spec.ids_fit:
                alive(spec.variable).table.engine_keys(its.keys)
            if its.weights is not None and its.weights.size != its.keys.size:
                raise ValueError(
                    f"sp_weights[{spec.number}] must have one weight for each key of "
                    f"sp_ids[{spec.number}]. "
                    f"Received: {its.weights.size} weights and {its.keys.size} keys."
                )
            if its.places is not None:
                splits[i] = _splits_of(backend, spec.is_ragged, its.places, its.num_rows)
            if its.weight_places is not None:
                of_weights = (
                    bool(spec.weights_are_ragged),
                    its.weight_places,
                    its.num_weight_rows,
                )
                if splits[i] is None:
                    splits[i] = _splits_of_dense(backend, ((its.keys.size, its.num_rows),))
                _check_weight_rows(spec, splits[i], _splits_of(backend, *of_weights))
        sizes, num_rows = [each.keys.size for each in given], [each.num_rows for each in given]
        layout = self._layout
        if layout is None or not layout.is_of(sizes, num_rows):
            layout = self._layout = BatchLayout(tables, self._combiners, sizes, num_rows)
        shapes = tuple(zip(sizes, num_rows, strict=True))
        if all(each is None for each in splits):
            row_splits = _splits_of_dense(backend, shapes)
        else:
            all_splits = [
                _splits_of_dense(backend, (shape,)) if each is None else each
                for each, shape in zip(splits, shapes, strict=True)
            ]
            row_splits = _concatenate(backend, all_splits)
        keys = _concatenate(backend, [_as_int64(each.keys) for each in given])
        return Batch(tables, layout, keys, row_splits, [each.weights for each in given])


def _concatenate(backend: Backend, arrays: Sequence[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else backend.xp.concatenate(arrays)


def _as_int64(keys: Array) -> Array:
    """Returns keys (n,) as int64, a bit cast for uint64."""
    return keys.view(np.int64) if keys.dtype == np.uint64 else keys.astype(np.int64, copy=False)


def _num_rows(is_ragged: bool, places: Array, numbers: Iterator[np.ndarray]) -> int:
    """Returns the number of rows of a ragged matrix or, from `numbers`, of a sparse one."""
    if not is_ragged:
        num_rows = int(next(numbers)[0])
        if num_rows < 0:  # TensorFlow aborts the process on a negative size
            raise ValueError(
                "A SparseTensor must have a dense_shape of 0 or more rows. Received: one of "
                f"{num_rows} rows."
            )
        return num_rows
    if not places.size:
        raise ValueError(
            "Row splits must have shape (batch + 1,). Received: row splits of length 0. Those of "
            "no rows are [0]."
        )
    return int(places.size) - 1


def _splits_of(backend: Backend, is_ragged: bool, places: Array, num_rows: int) -> Array:
    """Returns the row splits, (num_rows + 1,) int64, of ragged or sparse ids or weights."""
    if is_ragged:
        return places.astype(np.int64, copy=False)
    return row_splits_of(backend, backend.xp.ascontiguousarray(places[:, 0]), num_rows)


# Cached: most calls of a program have batches of one size, and on a GPU each call would copy the
# splits there.
@functools.lru_cache(maxsize=32)
def _splits_of_dense(backend: Backend, shapes: Sequence[tuple[int, int]]) -> Array:
    """Returns the row splits of dense ids, by (ids, rows) of each table; each starts at 0."""
    # Most tables of a call have ids of one shape.
    made = {
        (n, rows): np.arange(rows + 1, dtype=np.int64) * (n // (rows or 1))
        for n, rows in set(shapes)
    }
    splits = [made[shape] for shape in shapes]
    return backend.from_host(splits[0] if len(splits) == 1 else np.concatenate(splits))


def _check_weight_rows(spec: TableSpec, splits: Array, theirs: Array) -> None:
    """Raises ValueError if weights have rows of other lengths than the keys."""
    if splits.shape != theirs.shape or bool((splits != theirs).any()):
        raise ValueError(
            f"The rows of sp_weights[{spec.number}] must be as long as those of "
            f"sp_ids[{spec.number}]. Received: rows of other lengths."
        )
