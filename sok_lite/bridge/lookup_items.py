"""The items of all tables of a lookup, as arrays, from the tensors that a graph has joined."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.bridge.joined import listed
from sok_lite.bridge.lookup_arguments import TableSpec
from sok_lite.bridge.tensor import to_array
from sok_lite.bridge.type_spec import alive
from sok_lite.engine.batch import row_splits_of
from sok_lite.engine.segments import cut


def splits_of_dense(
    tables: Sequence[TableSpec], sizes: Sequence[int], backend: Backend
) -> tuple[Array, list[int]]:
    """Returns the row splits of dense ids, those of each table from 0 on, and the rows of each.

    Args:
      tables: those with a `width` are meant.
      sizes: how many ids each of these has.
    """
    widths = tuple([spec.width for spec in tables if spec.width is not None])
    return _splits_of_shapes(backend, tuple(zip(sizes, widths, strict=True)))


# The last ones are kept: most calls of a program have batches of one size, and on a GPU the splits
# of each call would be copied there.
@functools.lru_cache(maxsize=32)
def _splits_of_shapes(
    backend: Backend, sizes_and_widths: Sequence[tuple[int, int]]
) -> tuple[Array, list[int]]:
    shapes = [(size // width, width) for size, width in sizes_and_widths]
    # Most tables of a call have ids of one shape.
    made = {(n, width): np.arange(n + 1, dtype=np.int64) * width for n, width in set(shapes)}
    splits = np.concatenate([np.empty(0, np.int64), *(made[shape] for shape in shapes)])
    return backend.from_host(splits), [n for n, _ in shapes]


def items_of(
    tables: Sequence[TableSpec], tensors: Sequence[Any], backend: Backend
) -> tuple[Array, Array, list[Array | None], list[int], list[int]]:
    """Returns the items of the eager tensors of `joined_inputs` and the joined weights.

    Returns:
      (keys (n,) int64 of all tables; row splits (rows + num_tables,) int64 of all; of each table
      the weights (its items,) float32, or None; items of each; rows of each).

    Raises:
      ValueError: row numbers of a sparse matrix fall, or leave it; a key does not fit; weights and
        keys are not equally many, or have other rows.
    """
    lengths, *arrays = tensors
    keys, numbers, *weights = [to_array(tensor, backend) for tensor in arrays]
    stream, n = iter(listed(lengths)), len(tables)
    sizes = list(itertools.islice(stream, n))
    are_ragged = [spec.is_ragged for spec in tables if spec.width is None]
    are_ragged += [f.weights_are_ragged for f in tables if f.weights_are_ragged is not None]
    of_numbers = list(itertools.islice(stream, len(are_ragged)))
    if 0 in [n for n, is_ragged in zip(of_numbers, are_ragged, strict=True) if is_ragged]:
        raise ValueError(
            "Row splits must have shape (batch + 1,). Received: row splits of length 0. Those of "
            "no rows are [0]."
        )
    all_weights: list[Array | None] = [None] * n
    if weights:
        of_weights = [next(stream) if spec.has_weights else 0 for spec in tables]
        all_weights = _weights_of(tables, cut(weights[0], of_weights), sizes)
    if not are_ragged:
        row_splits, num_rows = splits_of_dense(tables, sizes, backend)
    else:
        told = (
            array if is_ragged else row_splits_of(backend, array, next(stream))
            for array, is_ragged in zip(cut(numbers, of_numbers), are_ragged, strict=True)
        )
        of_dense = [n for n, spec in zip(sizes, tables, strict=True) if spec.width is not None]
        dense_splits, dense_rows = splits_of_dense(tables, of_dense, backend)
        dense = iter(cut(dense_splits, [n + 1 for n in dense_rows]))
        splits = [next(told) if spec.width is None else next(dense) for spec in tables]
        _check_weight_rows(tables, splits, list(told))
        num_rows = [len(each) - 1 for each in splits]
        if all(spec.is_ragged for spec in tables):
            row_splits = numbers[: sum(num_rows) + n]  # no copy
        else:
            row_splits = backend.xp.concatenate(splits)
    if False in [spec.ids_fit for spec in tables]:
        _check_keys(tables, cut(keys, sizes))
    return keys, row_splits, all_weights, sizes, num_rows


def _weights_of(
    tables: Sequence[TableSpec], pieces: Sequence[Array], sizes: Sequence[int]
) -> list[Array | None]:
    """Returns the weights of tables that have any, as many as there are keys."""
    for spec, weights, size in zip(tables, pieces, sizes, strict=True):
        if spec.has_weights and len(weights) != size:
            raise ValueError(
                f"sp_weights[{spec.number}] must have one weight for each key of "
                f"sp_ids[{spec.number}]. "
                f"Received: {len(weights)} weights and {size} keys."
            )
    return [
        weights if spec.has_weights else None for spec, weights in zip(tables, pieces, strict=True)
    ]


def _check_weight_rows(
    tables: Sequence[TableSpec], splits: Sequence[Array], of_weights: Sequence[Array]
) -> None:
    """Raises where rows of weights that have their own are not those of the keys."""
    numbers = [i for i, spec in enumerate(tables) if spec.weights_are_ragged is not None]
    for i, theirs in zip(numbers, of_weights, strict=True):
        if splits[i].shape != theirs.shape or bool((splits[i] != theirs).any()):
            number = tables[i].number
            raise ValueError(
                f"The rows of sp_weights[{number}] must be as long as those of sp_ids[{number}]. "
                "Received: rows of other lengths."
            )


def _check_keys(tables: Sequence[TableSpec], keys: Sequence[Array]) -> None:
    """Raises where keys do not fit the key type of their table. On a GPU it waits."""
    for spec, array in zip(tables, keys, strict=True):
        if not spec.ids_fit:
            ids = array.view(np.uint64) if spec.ids_are_uint64 else array
            alive(spec.variable).table.engine_keys(ids)
