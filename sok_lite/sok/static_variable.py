"""`sok.Variable`: a table with a fixed number of rows, spread over the ranks or on one of them."""

import itertools
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Backend
from sok_lite.bridge.checks import without_keras
from sok_lite.bridge.static_variable import StaticVariable
from sok_lite.bridge.variable import table_for_variable
from sok_lite.engine.dtypes import is_integer
from sok_lite.engine.owner import MOD, OneRank
from sok_lite.engine.static_table import StaticTable
from sok_lite.sok.arguments import checked_mode, checked_row_dtype, dtype_name
from sok_lite.sok.communication import communicator

__all__ = ["DistributedVariable", "LocalizedVariable", "Variable"]

_serial = itertools.count()


class FixedVariable(StaticVariable):
    """The base of `DistributedVariable` and `LocalizedVariable`.

    It is a tf.Variable of this rank's rows: its dense value, assignments, optimizers and
    checkpoints are those of these rows. `sok.lookup_sparse` and `sok.all2all_dense_embedding` reach
    the rows of all ranks. Every rank must make it, alike, after `sok.init`.

    Args:
      initial_value: (rows, dimension) of all ranks together: a tensor, an array, lists of numbers,
        or a function that gives one of these; a single row may be (dimension,). None: `initializer`
        gives it.
      trainable: whether gradient tapes watch it; None: they do.
      name: in TensorFlow; None: "sok_static_Variable_<n>".
      dtype: of the rows, tf.float32, tf.float16 or tf.bfloat16, to which values are cast; None: as
        they are.
      shape: (rows, dimension) of all ranks together, for `initializer`.
      initializer: called as `initializer(shape=, dtype=)` for this rank's rows alone, as in SOK:
        one with a seed gives the same to every rank.
      collections, validate_shape, caching_device, constraint, synchronization, aggregation: as of
        tf.Variable.
      variable_def, import_scope, distribute_strategy: must be None.

    Raises:
      RuntimeError: `sok.init` has not connected the ranks, there is no such rank, or
        `initial_value` is neither a matrix nor a row.
      TypeError, ValueError: a dtype, shape or initializer that does not fit.
      NotImplementedError: an argument that must be None.
    """

    instead_of_copy = "Make a new sok.Variable of the rows of all ranks."

    def __init__(
        self,
        initial_value: Any = None,
        trainable: bool | None = None,
        collections: Any = None,
        validate_shape: bool = True,
        caching_device: Any = None,
        name: str | None = None,
        dtype: Any = None,
        variable_def: Any = None,
        import_scope: Any = None,
        constraint: Any = None,
        distribute_strategy: Any = None,
        synchronization: Any = None,
        aggregation: Any = None,
        shape: Any = None,
        initializer: Any = None,
        *,
        owner_rank: int = -1,
    ) -> None:
        for argument in ("variable_def", "import_scope", "distribute_strategy"):
            if locals()[argument] is not None:
                raise NotImplementedError(
                    f"{self.kind} takes no `{argument}`. Received: {locals()[argument]!r}. Leave "
                    "it out; start one process per GPU with horovodrun."
                )
        comm = communicator()
        if owner_rank >= comm.size:
            raise RuntimeError(
                f"There are only {comm.size} GPU(s), cannot put embedding table on "
                f"{owner_rank}th(zero-indexed) GPU."
            )
        if name is None:
            name = f"sok_static_Variable_{next(_serial)}"
        with tf.init_scope():
            value, (num_rows, dim), dtype = _checked_value(initial_value, dtype, shape, initializer)

        def make(backend: Backend) -> StaticTable:
            owner = MOD if owner_rank < 0 else OneRank(owner_rank)
            return StaticTable(backend, num_rows, dim, dtype=dtype, name=name, owner=owner)

        table = table_for_variable(self.kind, make)
        local_rows = table.num_rows_of(comm.rank, comm.size)

        def rows() -> tf.Tensor:
            if value is None:
                own = initializer(shape=[local_rows, dim], dtype=tf.as_dtype(dtype))
            elif owner_rank < 0:
                own = value[comm.rank :: comm.size]
            else:
                own = value[:local_rows]
            return tf.cast(own, dtype)

        self._rank, self._num_ranks = comm.rank, comm.size
        super().__init__(
            table,
            rows,
            name=name,
            trainable=True if trainable is None else trainable,
            collections=collections,
            validate_shape=validate_shape,
            caching_device=caching_device,
            constraint=constraint,
            synchronization=synchronization,
            aggregation=aggregation,
        )

    @property
    def global_shape(self) -> tuple[int, int]:
        """(rows, dimension) of all ranks together; `shape` is that of this rank's rows."""
        return self._table.num_rows, self._table.dim

    @property
    def global_gpu_id(self) -> int:
        """Number of this rank."""
        return self._rank

    @property
    def num_gpus(self) -> int:
        """Number of ranks."""
        return self._num_ranks

    @property
    def target_gpu(self) -> int:
        """The rank that has all rows, or -1 where they are spread over all ranks."""
        return self.owner_rank

    def key_map(self, indices: Any) -> Any:
        """Returns where rows lie in the dense value of the rank that has them.

        Args:
          indices: integers, the numbers of rows as lookups take them.
        """
        return indices // self._table.stride(self._num_ranks)


class DistributedVariable(FixedVariable):
    """Rows that are spread over the ranks: rank r has the rows r, r + ranks, r + 2 * ranks, ...

    Arguments and errors are those of `FixedVariable`.
    """

    kind = "sok.DistributedVariable"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, owner_rank=-1)


class LocalizedVariable(FixedVariable):
    """Rows that are all on one rank; the others hold a variable of shape [0, dimension].

    Args:
      target_gpu: number of the rank that has the rows.
      The others, and errors: those of `FixedVariable`.
    """

    kind = "sok.LocalizedVariable"

    def __init__(self, *args: Any, target_gpu: int = 0, **kwargs: Any) -> None:
        if not is_integer(target_gpu) or target_gpu < 0:
            raise ValueError(
                "`target_gpu` must be the number of a rank, from 0 on. "
                f"Received: target_gpu={target_gpu!r}."
            )
        super().__init__(*args, **kwargs, owner_rank=int(target_gpu))


def Variable(*args: Any, mode: str | None = None, **kwargs: Any) -> FixedVariable:
    """Makes a table with a fixed number of rows. Every rank must call it, after `sok.init`.

    Args:
      mode: None or "distributed": a DistributedVariable. "localized:<rank>": a LocalizedVariable.
      *args, **kwargs: of those.

    Raises:
      RuntimeError: another mode, or as `FixedVariable` says.
      TypeError, ValueError, NotImplementedError: as `FixedVariable` says.
    """
    try:
        rank = checked_mode(mode)
    except ValueError as error:
        raise RuntimeError(f"Not supported mode: {mode}. {error}") from error
    if rank < 0:
        return DistributedVariable(*args, **kwargs)
    return LocalizedVariable(*args, **kwargs, target_gpu=rank)


def _checked_value(
    initial_value: Any, dtype: Any, shape: Any, initializer: Any
) -> tuple[Any, tuple[int, int], str]:
    """Returns the value of all ranks, or None, and its shape and dtype."""
    value = None
    if initial_value is not None:
        value = _matrix(initial_value() if callable(initial_value) else initial_value)
        if shape is not None and not value.shape.is_compatible_with(shape):
            raise ValueError(
                f"`initial_value` must have the shape of `shape`, {shape}. "
                f"Received: shape {value.shape}."
            )
        shape = value.shape
        dtype = value.dtype if dtype is None else dtype
    elif shape is None or not callable(initializer):
        raise ValueError(
            "A static variable takes `initial_value`, or `shape` and `initializer`, a function of "
            f"shape= and dtype=. Received: shape={shape!r}, initializer={initializer!r}."
        )
    sizes = tf.TensorShape(shape).as_list()
    if len(sizes) != 2 or None in sizes or sizes[0] < 1 or sizes[1] < 1:
        raise ValueError(
            "`shape` must be (rows, dimension) of all ranks together, both at least 1. "
            f"Received: shape={shape!r}."
        )
    try:
        rows = checked_row_dtype(dtype)
    except ValueError as error:
        raise TypeError(
            "The rows of a static variable are tf.float32, tf.float16 or tf.bfloat16. Received: "
            f"{dtype_name(dtype, 'float32', 'dtype')}. Give dtype=tf.float32 to have them cast."
        ) from error
    return value, (sizes[0], sizes[1]), rows.name


def _matrix(value: Any) -> tf.Tensor:
    """Returns rows as a matrix; Python's numbers are float32, a single row is a matrix of one.

    Raises:
      RuntimeError: it has neither one nor two dimensions, or no row.
    """
    value = without_keras(value)
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise TypeError(
            f"`initial_value` must be a dense matrix. Received: a {type(value).__name__}."
        )
    if isinstance(value, (list, tuple)) and np.asarray(value).dtype.kind in "if":
        value = np.asarray(value, np.float32)
    value = tf.convert_to_tensor(value)
    if value.shape.rank == 1:
        value = value[tf.newaxis]
    if value.shape.rank != 2 or 0 in value.shape:
        raise RuntimeError(
            f"initial_value shape is {value.shape} please input a one-dimension(dimension shape "
            "must > 0) or a matrix (rows, dimension)."
        )
    return value
