"""The arguments of `lookup_sparse`, checked and taken apart into tensors and plain facts."""

import weakref
from typing import Any, NamedTuple

import tensorflow as tf

from sok_lite.backend import Array, Backend
from sok_lite.dynamic_variable import DynamicVariable
from sok_lite.engine.combine import normalise_combiner
from sok_lite.engine.step import row_splits_of
from sok_lite.local_lookup import checked_keys
from sok_lite.tensor import to_array


class Rows(NamedTuple):
    """Where the rows of a batch begin and end, as tensors.

    Attributes:
      is_ragged: whether `numbers` are row splits.
      numbers: (batch + 1,) row splits, or (n,) row number of each item; int64.
      batch: scalar, number of rows; splits know it themselves.
    """

    is_ragged: bool
    numbers: tf.Tensor
    batch: tf.Tensor


class Facts(NamedTuple):
    """What the host call of a graph needs to know of a table.

    Holds no tensor: TensorFlow keeps host calls for ever, and a tensor would keep its graph.

    Attributes:
      variable: a reference to it; see `variable_spec.alive`.
      name, dim, key_type, dtype: of the variable.
      combiner: "sum", "mean" or "sqrtn".
      has_weights: whether keys have weights.
      is_ragged: whether the keys' rows are given by splits.
      weights_are_ragged: the same for the weights; None: their rows are the keys'.
      batch: static number of rows, or None.
    """

    variable: "weakref.ref[DynamicVariable]"
    name: str
    dim: int
    key_type: tf.DType
    dtype: tf.DType
    combiner: str
    has_weights: bool
    is_ragged: bool
    weights_are_ragged: bool | None
    batch: int | None

    @property
    def num_inputs(self) -> int:
        """Tensors that the host call takes for this table, the weights not counted."""
        return 3 if self.weights_are_ragged is None else 5


class Argument(NamedTuple):
    """One table's arguments.

    Attributes:
      facts: what is known without the batch.
      inputs: keys, numbers and batch of the keys' rows, and those of the weights' rows if these are
        others.
      weights: (n,) float32, or None.
    """

    facts: Facts
    inputs: list[tf.Tensor]
    weights: tf.Tensor | None


def checked_arguments(
    params: Any, sp_ids: Any, sp_weights: Any, combiners: Any, num_ranks: int
) -> list[Argument]:
    """Returns the arguments table by table, or raises before anything has happened."""
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
            f"{lengths[3]} combiners."
        )
    for param in params:
        _check_variable(param, num_ranks)
    return [
        _argument(i, *arguments)
        for i, arguments in enumerate(zip(params, ids, weights, combiners, strict=True))
    ]


def row_splits(is_ragged: bool, numbers: tf.Tensor, batch: tf.Tensor, backend: Backend) -> Array:
    """Returns row splits, (batch + 1,) int64, from the eager tensors of a `Rows`."""
    array = to_array(numbers, backend)
    return array if is_ragged else row_splits_of(backend, array, int(batch))


def _as_list(argument: Any) -> list[Any]:
    return list(argument) if isinstance(argument, (list, tuple)) else [argument]


def _check_variable(param: Any, num_ranks: int) -> None:
    if not isinstance(param, DynamicVariable):
        raise NotImplementedError(
            f"{type(param).__name__} is not supported in lookup: `params` must be "
            "sok.DynamicVariable. Use tf.nn.embedding_lookup_sparse for others."
        )
    if param.target_gpu >= num_ranks:
        raise RuntimeError(
            f"There are only {num_ranks} GPU(s), cannot put embedding table on "
            f"{param.target_gpu}th(zero-indexed) GPU."
        )
    if param.target_gpu >= 0 and num_ranks > 1:
        raise NotImplementedError(
            f"{param.name!r} has mode={param.mode!r}. Tables on one rank of several are not "
            "available in this version. Leave `mode` out to spread it over all ranks."
        )


def _argument(
    number: int, variable: DynamicVariable, ids: Any, weights: Any, combiner: Any
) -> Argument:
    values, rows, batch = _taken_apart(f"sp_ids[{number}]", ids)
    keys = checked_keys(variable, values)
    inputs = [keys, rows.numbers, rows.batch]
    weight_values, weights_are_ragged = None, None
    if weights is not None:
        weight_values, weight_rows = _checked_weights(number, weights, keys)
        if weight_rows.numbers is not rows.numbers:
            weights_are_ragged = weight_rows.is_ragged
            inputs += [weight_rows.numbers, weight_rows.batch]
    facts = Facts(
        weakref.ref(variable),
        variable.name,
        variable.dimension,
        variable.key_type,
        variable.dtype,
        normalise_combiner(combiner),
        weights is not None,
        rows.is_ragged,
        weights_are_ragged,
        batch,
    )
    return Argument(facts, inputs, weight_values)


def _checked_weights(number: int, weights: Any, keys: tf.Tensor) -> tuple[tf.Tensor, Rows]:
    values, rows, _ = _taken_apart(f"sp_weights[{number}]", weights)
    if not (values.dtype.is_floating or values.dtype.is_integer):
        raise TypeError(f"sp_weights[{number}] must be float32. Received: {values.dtype.name}.")
    if not values.shape.is_compatible_with(keys.shape):
        raise ValueError(
            f"sp_weights[{number}] must have one weight for each key of sp_ids[{number}]. "
            f"Received: {values.shape} weights and {keys.shape} keys."
        )
    return tf.cast(values, tf.float32), rows


def _taken_apart(name: str, argument: Any) -> tuple[tf.Tensor, Rows, int | None]:
    """Returns the values, the rows and the static batch size of a ragged or sparse matrix."""
    if isinstance(argument, tf.RaggedTensor):
        values, splits = argument.values, argument.row_splits
        if isinstance(values, tf.RaggedTensor) or values.shape.rank not in (1, None):
            raise ValueError(
                f"{name} must have rank 2 with one ragged dimension. "
                f"Received: a RaggedTensor of shape {argument.shape}."
            )
        numbers = splits if splits.dtype == tf.int64 else tf.cast(splits, tf.int64)
        length = None if splits.shape.rank is None else splits.shape[0]
        rows = Rows(True, numbers, tf.constant(0, tf.int64))
        return values, rows, None if length is None else length - 1
    if isinstance(argument, tf.SparseTensor):
        if argument.shape.rank not in (2, None):
            raise ValueError(
                f"{name} must have rank 2. Received: a SparseTensor of shape {argument.shape}."
            )
        batch = None if argument.shape.rank is None else argument.shape[0]
        rows = Rows(False, argument.indices[:, 0], argument.dense_shape[0])
        return argument.values, rows, batch
    raise TypeError(
        f"{name} must be a tf.RaggedTensor or tf.SparseTensor of rank 2. "
        f"Received: {type(argument).__name__}. tf.RaggedTensor.from_tensor makes one of a tensor."
    )
