"""The arguments of `lookup_sparse` as inputs of an operation, and as the engine's batch."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array, Backend
from sok_lite.bridge.lookup_arguments import Argument, TableSpec
from sok_lite.bridge.type_spec import alive
from sok_lite.engine.batch import Batch, row_splits_of
from sok_lite.engine.layout import Layout


def inputs_of(arguments: Sequence[Argument]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Returns the tensors that `BatchOfInputs` takes as arrays.

    Returns:
      (of each table its keys, what gives their rows, its weights, and what gives those of the
      weights, as far as there are any; int64 for the host: the rows of each sparse matrix).
    """
    inputs: list[tf.Tensor] = []
    numbers: list[tf.Tensor] = []
    for argument in arguments:
        rows = [argument.rows, argument.weight_rows]
        places = [None if each is None else each.places for each in rows]
        every = [argument.keys, places[0], argument.weights, places[1]]
        inputs += [each for each in every if each is not None]
        numbers += [each.batch for each in rows if each is not None and each.batch is not None]
    return inputs, numbers


class BatchOfInputs:
    """Makes the engine's batch of the inputs of a lookup, each time that it runs.

    Args:
      tables: what is known of them.
      backend: of all of them.

    Attributes:
      num_numbers: of how many tensors the host has numbers.
    """

    def __init__(self, tables: Sequence[TableSpec], backend: Backend) -> None:
        self._tables, self._backend = tables, backend
        self._combiners = [table.combiner for table in tables]
        self._widths = tuple([table.width for table in tables])
        of_rows = [table.is_ragged for table in tables if table.width is None]
        of_rows += [table.weights_are_ragged for table in tables if table.weights_are_ragged is not None]
        self.num_numbers = of_rows.count(False)
        self._layout: Layout | None = None  # of the last batch: most have the same

    def make(
        self, tables: Sequence[Any], arrays: Iterator[Array], numbers: Iterator[np.ndarray]
    ) -> Batch:
        """Returns a batch, yet without a policy for keys that have no row.

        Args:
          tables: the engine's.
          arrays, numbers: what became of the tensors of `inputs_of`; other ones may follow.

        Raises:
          ValueError: row numbers of a sparse matrix fall, or leave it; a key does not fit; weights
            and keys are not equally many, or have other rows.
        """
        backend, xp = self._backend, self._backend.xp
        keys: list[Array] = []
        splits: list[Array] = []  # of ids that are not dense
        weights: list[Array | None] = []
        for spec in self._tables:
            its_keys = next(arrays)
            if not spec.ids_fit:
                alive(spec.variable).table.engine_keys(its_keys)
            keys.append(_as_int64(its_keys))
            if spec.width is None:
                splits.append(_splits_of(backend, spec.is_ragged, arrays, numbers))
            weights.append(None)
            if spec.has_weights:
                weights[-1] = _checked_weights(spec, next(arrays), its_keys.size)
            if spec.weights_are_ragged is not None:
                theirs = _splits_of(backend, spec.weights_are_ragged, arrays, numbers)
                _check_weight_rows(spec, splits[-1], theirs)
        sizes = [each.size for each in keys]
        if splits and len(splits) < len(sizes):
            # Of dense ids between others, one table at a time.
            of_others = iter(splits)
            pairs = zip(sizes, self._widths, strict=True)
            splits = [
                next(of_others) if width is None else _splits_of_dense(backend, ((n, width),))
                for n, width in pairs
            ]
        if splits:
            row_splits = splits[0] if len(splits) == 1 else xp.concatenate(splits)
            num_rows = [each.size - 1 for each in splits]
        else:
            shapes = tuple(zip(sizes, self._widths, strict=True))
            row_splits = _splits_of_dense(backend, shapes)
            num_rows = [n // width for n, width in shapes]
        layout = self._layout
        if layout is None or not layout.is_of(sizes, num_rows):
            layout = self._layout = Layout(tables, self._combiners, sizes, num_rows)
        joined = keys[0] if len(keys) == 1 else xp.concatenate(keys)
        return Batch(tables, layout, joined, row_splits, weights)


def _as_int64(keys: Array) -> Array:
    """Returns keys (n,) as int64; of uint64 the bits."""
    return keys.view(np.int64) if keys.dtype == np.uint64 else keys.astype(np.int64, copy=False)


def _splits_of(
    backend: Backend, is_ragged: bool, arrays: Iterator[Array], numbers: Iterator[np.ndarray]
) -> Array:
    """Returns the row splits, (batch + 1,) int64, of ids or weights that are not dense."""
    places = next(arrays)
    if not is_ragged:
        of_items = backend.xp.ascontiguousarray(places[:, 0])
        return row_splits_of(backend, of_items, int(next(numbers)[0]))
    if not places.size:
        raise ValueError(
            "Row splits must have shape (batch + 1,). Received: row splits of length 0. Those of "
            "no rows are [0]."
        )
    return places.astype(np.int64, copy=False)


# The last ones are kept: most calls of a program have batches of one size, and on a GPU the splits
# of each call would be copied there.
@functools.lru_cache(maxsize=32)
def _splits_of_dense(backend: Backend, shapes: Sequence[tuple[int, int]]) -> Array:
    """Returns the row splits of dense ids, those of each table from 0 on.

    Args:
      shapes: of each table how many ids it has, and how many of them a row.
    """
    # Most tables of a call have ids of one shape.
    made = {
        (n, width): np.arange(n // width + 1, dtype=np.int64) * width for n, width in set(shapes)
    }
    splits = [made[shape] for shape in shapes]
    return backend.from_host(splits[0] if len(splits) == 1 else np.concatenate(splits))


def _checked_weights(spec: TableSpec, weights: Array, num_keys: int) -> Array:
    if weights.size != num_keys:
        raise ValueError(
            f"sp_weights[{spec.number}] must have one weight for each key of "
            f"sp_ids[{spec.number}]. Received: {weights.size} weights and {num_keys} keys."
        )
    return weights


def _check_weight_rows(spec: TableSpec, splits: Array, theirs: Array) -> None:
    """Raises where rows of weights that have their own are not those of the keys."""
    if splits.shape != theirs.shape or bool((splits != theirs).any()):
        raise ValueError(
            f"The rows of sp_weights[{spec.number}] must be as long as those of "
            f"sp_ids[{spec.number}]. Received: rows of other lengths."
        )
