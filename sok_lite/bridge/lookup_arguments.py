"""Checks the arguments of `lookup_sparse` and converts them to tensors and plain values."""

import functools
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from sok_lite.bridge.checks import checked_keys, integer_keys
from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.keras import held
from sok_lite.bridge.static_variable import StaticVariable
from sok_lite.bridge.tf_private import DTYPE_OF_EAGER, SHAPE_OF_EAGER, EagerTensor
from sok_lite.bridge.type_spec import OfTable
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.batch import check_pooled
from sok_lite.engine.pooling import normalise_combiner

_MATRICES = (tf.RaggedTensor, tf.SparseTensor)


class RowBounds(NamedTuple):
    """The rows of a batch, as tensors.

    Attributes:
      places: (batch + 1,) row splits, or (n, 2) indices of a sparse matrix; None if all rows have
        one known length: a graph would recompute the splits in every run.
      batch: (1,) int64, rows of a sparse matrix; None with splits.
      width: that length; None for ragged and sparse ones.
    """

    places: tf.Tensor | None
    batch: tf.Tensor | None = None
    width: int | None = None

    @property
    def is_ragged(self) -> bool:
        return self.batch is None and self.width is None


@dataclass(eq=False, slots=True)
class TableSpec:
    """Facts about a table that the call of an operation needs.

    Holds no tensor and no variable: a graph keeps the calls of its operations and must not keep
    tables alive. Equal by identity: similar calls share one object.

    Attributes:
      number: position of the table in the call.
      variable: weak reference, see `type_spec.alive`.
      owner: name of the rule that maps keys to owner ranks.
      num_rows: rows of a static table on all ranks, which TensorFlow keeps; else None.
      is_ragged: whether row splits delimit the rows of keys.
      width: keys per row, if fixed; else None.
      weights_are_ragged: `is_ragged` of the weights; None: their rows are those of the keys.
      ids_fit: whether the key type holds every id of the ids' dtype.
    """

    number: int
    variable: "weakref.ref[TableVariable | StaticVariable]"
    name: str
    dim: int
    key_type: tf.DType
    dtype: tf.DType
    owner: str
    num_rows: int | None
    combiner: str
    has_weights: bool
    is_ragged: bool
    width: int | None
    weights_are_ragged: bool | None
    ids_fit: bool

    @property
    def is_static(self) -> bool:
        return self.num_rows is not None


def tag_of(what: str, tables: Sequence[TableSpec]) -> int:
    """Returns a number that is equal on all ranks for one call, and tells it from most."""
    formats = [
        (t.dim, t.key_type.name, t.dtype.name, t.owner, t.num_rows, t.combiner) for t in tables
    ]
    return zlib.crc32(f"{what} {formats}".encode())


class Argument(NamedTuple):
    """One table's arguments.

    Attributes:
      keys: (n,) integers; dense ids keep their shape: flattening takes longer in eager mode than
        the lookup.
      weights: (n,) float32, or None.
      weight_rows: rows of the weights if they differ from the keys'; else None.
      batch: static number of rows, or None.
    """

    spec: TableSpec
    keys: tf.Tensor
    rows: RowBounds
    weights: tf.Tensor | None
    weight_rows: RowBounds | None
    batch: int | None


def checked_arguments(
    params: Any, sp_ids: Any, sp_weights: Any, combiners: Any, num_ranks: int
) -> list[Argument]:
    """Returns the arguments of each table, or raises before anything changes."""
    params, ids = _as_list(params), _as_list(sp_ids)
    weights = [None] * len(params) if sp_weights is None else _as_list(sp_weights)
    if combiners is None:
        combiners = "mean"
    combiners = [combiners] * len(params) if isinstance(combiners, str) else _as_list(combiners)
    lengths = [len(params), len(ids), len(weights), len(combiners)]
    if len(set(lengths)) > 1:
        raise ValueError(
            "`params`, `sp_ids`, `sp_weights` and `combiners` must be equally long. Received: "
            f"{lengths[0]} params, {lengths[1]} sp_ids, {lengths[2]} sp_weights, "
            f"{lengths[3]} combiners. A list or tuple has an entry for each table: give the ids "
            "of one table as an array or a tensor."
        )
    if sp_weights is None:
        known = _known_arguments(params, ids, combiners, num_ranks)
        if known is not None:
            return known
    for param in params:
        _check_variable(param, num_ranks)
    arguments = [
        _argument(i, *each)
        for i, each in enumerate(zip(params, ids, weights, combiners, strict=True))
    ]
    for each, param, its, combiner in zip(arguments, params, ids, combiners, strict=True):
        is_dense = each.rows.width is not None and each.weights is None
        if is_dense and type(its) is EagerTensor and type(combiner) is str:
            _, known_by = _known_by(each.spec.number, param, its, combiner, num_ranks)
            param.kept.keep(known_by, (each.spec, each.rows))
    return arguments


def _known_arguments(
    params: list[Any], ids: list[Any], combiners: list[Any], num_ranks: int
) -> list[Argument] | None:
    """Returns the arguments if all are eager tensors like ones checked before; else None.

    The checks take ten times as long.
    """
    arguments = []
    for i, (variable, its, combiner) in enumerate(zip(params, ids, combiners, strict=True)):
        are_plain = type(its) is EagerTensor and type(combiner) is str
        if not are_plain or not isinstance(variable, OfTable):
            return None
        shape, known_by = _known_by(i, variable, its, combiner, num_ranks)
        known = variable.kept.get(known_by)
        if known is None:
            return None
        spec, rows = known
        arguments.append(Argument(spec, its, rows, None, None, shape[0]))
    return arguments


_shape_of, _dtype_of = (getattr(EagerTensor, name) for name in (SHAPE_OF_EAGER, DTYPE_OF_EAGER))


def _known_by(
    number: int, variable: Any, ids: tf.Tensor, combiner: str, num_ranks: int
) -> tuple[tuple[int, ...], Any]:
    """Returns the shape of dense ids, and the key of their check: all but the number of rows."""
    shape = _shape_of(ids)
    of_row = shape[1:] if shape else None  # None for a scalar, () for a vector
    return shape, (number, combiner, num_ranks, variable.trainable, _dtype_of(ids), of_row)


def _as_list(argument: Any) -> list[Any]:
    return list(argument) if isinstance(argument, (list, tuple)) else [argument]


def _check_variable(param: Any, num_ranks: int) -> None:
    if not isinstance(param, (TableVariable, StaticVariable)):
        instead = "Use tf.nn.embedding_lookup_sparse for others."
        if held.is_layer(param) and next(held.tables_in(param), None) is not None:
            instead = (
                f"{param.name!r} is a layer, which looks keys up where it is called: "
                'sok_lite.keras.Embedding(table, combiner="mean")(ids) combines the rows of '
                "ragged, sparse or dense ids; table(ids) gives a row for each."
            )
        raise NotImplementedError(
            f"{type(param).__name__} is not supported in lookup: `params` must be "
            f"variables of tables. {instead}"
        )
    if param.table.all_ranks_refusal is not None:
        raise NotImplementedError(param.table.all_ranks_refusal)
    if param.owner_rank >= num_ranks:
        raise RuntimeError(
            f"There are only {num_ranks} GPU(s), cannot put embedding table on "
            f"{param.owner_rank}th(zero-indexed) GPU."
        )


def _argument(
    number: int, variable: TableVariable | StaticVariable, ids: Any, weights: Any, combiner: Any
) -> Argument:
    if not isinstance(ids, _MATRICES):
        expected = "ragged, sparse or dense: int64 or int32"
        ids = integer_keys(ids, f"sp_ids[{number}]", expected, variable.key_type)
    values, rows, batch = _split_matrix(f"sp_ids[{number}]", ids)
    keys = checked_keys(variable, values)
    check_pooled(variable.table)
    weight_values, weight_rows = None, None
    if weights is not None:
        if not isinstance(weights, _MATRICES):
            weights = tf.convert_to_tensor(weights)
        weight_values, weight_rows = _checked_weights(number, weights, keys)
        if _are_alike(ids, weights, rows, weight_rows):
            weight_rows = None
        elif weight_rows.width is not None:
            weight_rows = RowBounds(_splits_of_dense(weights))
    how = (
        normalise_combiner(combiner),
        weights is not None,
        rows.is_ragged,
        rows.width,
        None if weight_rows is None else weight_rows.is_ragged,
        _holds_all(variable.key_type, keys.dtype),
    )
    # As in `_known_by`, the key has `trainable` too.
    known_by = (number, variable.trainable, *how)
    spec = variable.kept.get_or_make(known_by, lambda: _spec(number, variable, *how))
    return Argument(spec, keys, rows, weight_values, weight_rows, batch)


def _spec(number: int, variable: TableVariable | StaticVariable, *how: Any) -> TableSpec:
    return TableSpec(
        number,
        weakref.ref(variable),
        variable.name,
        variable.dimension,
        variable.key_type,
        variable.dtype,
        variable.table.owner.name,
        variable.table.size if variable.table.is_static else None,
        *how,
    )


@functools.cache
def _holds_all(key_type: tf.DType, dtype: tf.DType) -> bool:
    """Whether a key type holds every id of a dtype. TensorFlow needs 20 microseconds for limits."""
    return bool(key_type.min <= dtype.min and dtype.max <= key_type.max)


def _checked_weights(number: int, weights: Any, keys: tf.Tensor) -> tuple[tf.Tensor, RowBounds]:
    values, rows, _ = _split_matrix(f"sp_weights[{number}]", weights)
    if not (values.dtype.is_floating or values.dtype.is_integer):
        raise TypeError(
            f"sp_weights[{number}] must be float32, or cast to it. Received: {values.dtype.name}."
        )
    differ = len({values.shape.num_elements(), keys.shape.num_elements()} - {None}) > 1
    if differ and other_ranks() is None:  # else the operation raises, and tells the other ranks
        raise ValueError(
            f"sp_weights[{number}] must have one weight for each key of sp_ids[{number}]. "
            f"Received: {values.shape} weights and {keys.shape} keys."
        )
    flat = values if values.shape.rank == 1 else tf.reshape(values, [-1])
    return tf.cast(flat, tf.float32), rows


def _are_alike(ids: Any, weights: Any, rows: RowBounds, weight_rows: RowBounds) -> bool:
    """Whether rows of weights are known to equal those of ids, without a check at run time."""
    if rows.width is not None:  # as many weights as ids: as many rows
        return rows.width == weight_rows.width
    if isinstance(ids, _MATRICES) or isinstance(weights, _MATRICES):
        return rows.places is weight_rows.places
    return ids.shape.is_fully_defined() and ids.shape == weights.shape


def _split_matrix(name: str, argument: Any) -> tuple[tf.Tensor, RowBounds, int | None]:
    """Returns the values, the rows and the static batch size of a matrix of any kind."""
    if isinstance(argument, tf.RaggedTensor):
        values, splits = argument.values, argument.row_splits
        if isinstance(values, tf.RaggedTensor) or values.shape.rank not in (1, None):
            raise ValueError(
                f"{name} must have rank 2 with one ragged dimension. Received: a RaggedTensor of "
                f"shape {argument.shape}. Join its outer dimensions by merge_dims(0, -2)."
            )
        (length,) = splits.shape.with_rank(1).as_list()
        values = tf.ensure_shape(values, [None]) if values.shape.rank is None else values
        return values, RowBounds(splits, None), None if length is None else length - 1
    if isinstance(argument, tf.SparseTensor):
        if argument.shape.rank not in (2, None):
            raise ValueError(
                f"{name} must have rank 2. Received: a SparseTensor of shape {argument.shape}. Use "
                "tf.sparse.reshape."
            )
        batch, _ = argument.shape.with_rank(2).as_list()
        with tf.device("CPU:0"):  # where operations read it
            num_rows = argument.dense_shape[:1]
        return argument.values, RowBounds(argument.indices, num_rows), batch
    if argument.shape.rank not in (1, 2):
        raise ValueError(
            f"{name} must be a ragged, sparse or dense tensor of shape (batch, k), or (batch,) "
            f"with one to a row. Received: shape {argument.shape}. Use tf.reshape, or "
            "tf.ensure_shape where the shape is unknown. A list has an entry for each table: pass "
            "the ids of a single table as an array."
        )
    batch, width = (argument.shape.as_list() + [1])[:2]
    # Without any ids, the number of rows would be unknown.
    rows = RowBounds(None, width=width) if width else RowBounds(_splits_of_dense(argument))
    return argument, rows, batch


def _splits_of_dense(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the row splits of a dense (batch, k) or (batch,) tensor."""
    sizes = tf.shape(tensor, tf.int64)
    splits = tf.range(sizes[0] + 1)
    return splits if tensor.shape.rank == 1 else splits * sizes[1]
