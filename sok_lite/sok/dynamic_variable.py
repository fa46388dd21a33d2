"""`sok.DynamicVariable`: a table as a TensorFlow variable."""

import itertools
import numbers
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from sok_lite.backend import Backend
from sok_lite.bridge import refusals, table_exports, table_ops, writes
from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.checks import refusing_names
from sok_lite.bridge.variable import TableVariable, table_for_variable
from sok_lite.engine.dtypes import KeyDtype, as_float, key_dtype
from sok_lite.engine.initializer_spec import make_initializer, refusing_sizes, warn_of_fans
from sok_lite.engine.table import EmbeddingTable, make_table
from sok_lite.sok.arguments import (
    checked_dimension,
    checked_gradient_dtype,
    checked_options,
    checked_owner,
    checked_row_dtype,
    dtype_name,
    plain_initializer,
)
from sok_lite.sok.communication import num_ranks

__all__ = ["DynamicVariable"]

_serial = itertools.count()


@unconverted
class DynamicVariable(TableVariable):
    """A trainable table with a row for every key that was ever looked up.

    A lookup inserts missing keys. Their initial row is a function of the seed, the variable's name
    and the key. Every value of the key type is valid.

    In a job of several ranks each rank holds the keys that it owns, and everything here is about
    this rank's part. Only `sok.lookup_sparse` reaches other ranks.

    Args:
      dimension: length of a row.
      initializer: initial value of a row: "random" (also None and ""; uniform from -0.05 to 0.05
        for "hbm", normal with mean 0 and deviation 1 for "hybrid", as in SOK), "normal", "uniform",
        "ones", "zeros", a number or a string of it such as "13", a tensor or tf.Variable that
        repeats one number, a Keras or tf.initializers object, or Keras' name of one, such as
        "glorot_uniform".
      var_type: "hbm" (also None and ""): all rows in GPU memory, or in RAM without a GPU, growing
        without bound. "hybrid": up to `max_capacity` keys, then it evicts the lowest score; rows in
        two memory tiers.
      name: in TensorFlow; also seeds the rows.
      constraint: must be None.
      trainable: whether gradient tapes watch it.
      key_type: tf.int64 (also None), tf.int32 or tf.uint64.
      dtype: of the rows: tf.float32 (also None), tf.float16 or tf.bfloat16.
      mode: None or "distributed": keys are spread over all ranks. "localized:<rank>": that rank has
        all of them.
      **kwargs: these options, and those of a "hybrid" table in
        `sok_lite.engine.table.hkv_options.HkvOptions` ("hbm" ignores those that SOK has).

        * `seed`: an integer, 0 by default.
        * `init_capacity`: keys to reserve memory for.
        * `partitioner`: assigns keys to owner ranks. "mod", the default: key mod ranks. "hash": for
          keys with a pattern that would crowd some ranks. Or a function of keys (n,), NumPy or CuPy
          arrays of the key type, and the number of ranks, that returns n ranks, the same
          everywhere. A checkpoint may be loaded with another one.
        * `gradient_dtype`: dtype of gradients sent between ranks: tf.float32, the default, or
          tf.bfloat16, half the bytes; the same on all ranks. See docs/concepts/ranks.md.
        * `row_shape`: (fan_in, fan_out) for Glorot, He, Lecun and VarianceScaling initializers. By
          default a row counts as Keras counts a vector, (dimension, dimension), with a warning on
          what that changes.

    Raises:
      TypeError: unknown keyword, or an argument of a wrong type.
      ValueError: an argument out of range, an option that only "hybrid" has, or a tf.function that
        would make a variable in each trace; like a tf.Variable, it may be made in the first trace.
      NotImplementedError: a constraint, or a tf.distribute strategy.

    Examples:
      >>> users = sok.DynamicVariable(2, initializer=0.5, name="user")
      >>> tf.nn.embedding_lookup(users, tf.constant([2**40, -3], tf.int64)).numpy().tolist()
      [[0.5, 0.5], [0.5, 0.5]]
      >>> len(users)
      2
    """

    kind = "sok.DynamicVariable"
    instead_of_value = (
        "Use tf.nn.embedding_lookup(variable, keys) for some rows and sok.export(variable) for all."
    )
    instead_of_write = (
        "Use sok.assign(variable, keys, rows), scatter_add, scatter_sub or scatter_update."
    )
    instead_of_copy = "To copy a table, sok.assign what sok.export gives to a new DynamicVariable."
    instead_of_save = (
        "Save the dense part of the model alone, and the table with sok.export; for serving, use "
        "sok.export_serving."
    )
    instead_of_custom_step = (
        "Make the table a sok_lite.keras.Table, which Keras trains. Or write the model's "
        "`train_step`, or a loop of your own, with tf.GradientTape and sok.OptimizerWrapper."
    )
    instead_of_partitions = "Look each up by itself, or all at once with sok.lookup_sparse."

    @refusing_names(
        dim="It is called `dimension` here, as in SOK; `dim` is that of sok_lite.keras.Table.",
        row_dtype="It is called `dtype` here; `row_dtype` is that of sok_lite.keras.Table.",
        keep_texts="A sok_lite.keras.Table with key_type=str keeps texts.",
    )
    @refusing_sizes
    def __init__(
        self,
        dimension: int,
        initializer: Any = None,
        var_type: str | None = None,
        name: str | None = None,
        constraint: Any = None,
        trainable: bool = True,
        key_type: Any = None,
        dtype: Any = None,
        mode: str | None = None,
        **kwargs: Any,
    ) -> None:
        var_type = "hbm" if var_type in (None, "") else var_type
        options = checked_options(var_type, kwargs)
        dimension = checked_dimension(dimension)
        owner = checked_owner(mode, kwargs.get("partitioner"))
        keys: KeyDtype = key_dtype(dtype_name(key_type, "int64", "key_type"))
        rows = checked_row_dtype(dtype)
        rounds_gradients = checked_gradient_dtype(kwargs.get("gradient_dtype"))
        if constraint is not None:
            raise NotImplementedError(
                "DynamicVariable has no constraints: an update touches single rows. "
                f"Received: constraint={constraint!r}. Leave it out and clip what you look up."
            )
        if name is None:
            name = f"sok_dynamic_Variable_{next(_serial)}"

        first_values = plain_initializer(initializer)

        def make(backend: Backend) -> EmbeddingTable:
            return make_table(
                var_type,
                backend,
                dimension,
                initializer=make_initializer(
                    first_values, dimension, kwargs.get("row_shape"), var_type
                ),
                key_type=keys.name,
                dtype=rows.name,
                name=name,
                seed=int(kwargs.get("seed", 0)),
                owner=owner,
                rounds_gradients=rounds_gradients,
                **options,
            )

        # A number as text that preserves all its digits.
        is_number = isinstance(first_values, numbers.Real) or (
            isinstance(first_values, np.ndarray) and first_values.size == 1
        )
        number = as_float(np.asarray(first_values).item()) if is_number else None
        self._initializer_str = repr(number) if is_number else first_values
        self._mode = mode
        self._config_dict = dict(kwargs)
        table = table_for_variable(self.kind, make)
        if kwargs.get("row_shape") is None:
            warn_of_fans(first_values, dimension, name)
        super().__init__(table, name=name, trainable=trainable)

    def _element_of_graph(self) -> tf.Tensor:
        # As in SOK: `session.run(variable)` returns a row of zeros that is not in the table.
        return tf.zeros([1, self.dimension], self.dtype, name="no_row_of_the_table")

    # ---------------------------------------------------------------- facts

    @property
    def handle(self) -> tf.Tensor:
        """The resource by which tapes and graphs identify the table."""
        refusals.refuse_step(self.name, self.kind)
        return super().handle

    @property
    def shape(self) -> tf.TensorShape:
        """[None, dimension]."""
        refusals.refuse_step(self.name, self.kind)
        return super().shape

    @property
    def handle_dtype(self) -> tf.DType:
        """Type of the rows."""
        return self.dtype

    @property
    def backend_type(self) -> str:
        """Kind of table: "hbm" or "hybrid"."""
        return self._table.var_type

    @property
    def config_dict(self) -> dict[str, Any]:
        """The keyword options it was made with."""
        return self._config_dict

    @property
    def initializer_str(self) -> Any:
        """The initializer, to make another variable alike: "" for the default, a string, or an
        object.
        """
        return self._initializer_str

    @property
    def mode(self) -> str | None:
        """The mode it was made with."""
        return self._mode

    @property
    def num_gpus(self) -> int:
        """Number of ranks. RuntimeError: several ranks that are not connected."""
        return num_ranks()

    @property
    def target_gpu(self) -> int:
        """The rank of a localized table, or -1 for a distributed one."""
        return self.owner_rank

    def key_map(self, indices: Any) -> Any:
        """Returns the keys unchanged: a dynamic table stores them as they are."""
        return indices

    @property
    def size(self) -> tf.Tensor:
        """int32 tensor [rows on this rank, dimension]."""
        return table_ops.size(self)

    @property
    def epoch(self) -> int:
        """The epoch for kEpochLru and kEpochLfu: keys of earlier epochs are evicted first.

        Set it when a new epoch begins. NotImplementedError for an "hbm" table.
        """
        return table_ops.epoch(self)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        table_ops.set_epoch(self, epoch)

    # ---------------------------------------------------------------- what tables do

    statistics = table_ops.statistics
    contains = table_ops.contains
    __len__ = table_ops.length
    __contains__ = table_ops.has
    scores = table_ops.scores
    num_zero_rows = table_ops.num_zero_rows
    export = table_exports.export
    export_if = table_exports.export_if
    export_chunks = table_exports.export_chunks
    erase = table_ops.erase
    erase_if = table_ops.erase_if
    erase_below = table_ops.erase_below
    expire = table_ops.expire
    clear = table_ops.clear
    reserve = table_ops.reserve
    assign_scores = table_ops.assign_scores
    decay_scores = table_ops.decay_scores
    scatter_add = writes.scatter_add
    scatter_sub = writes.scatter_sub
    scatter_update = writes.scatter_update

    def __getitem__(self, slice_spec: Any) -> NoReturn:
        self._refuse_dense("__getitem__")

    def to_static(self, indices: Any) -> NoReturn:
        """Raises NotImplementedError: a table has no static mode."""
        raise NotImplementedError(
            "to_static() and to_dynamic() are gone. For rows as a dense variable take "
            "sok.export(variable), and sok.assign(variable, keys, rows) to write them back."
        )

    def to_dynamic(self) -> NoReturn:
        """Raises NotImplementedError: a table has no static mode."""
        self.to_static(None)

    def is_static(self) -> bool:
        """Whether it represents dense rows: always False, for SOK programs that ask."""
        return False

    indices = None  # keys of static rows, for SOK programs that ask

    def assign(self, *args: Any, **kwargs: Any) -> Any:
        """`variable.assign(indices, values)` is `sok.assign`: it has no dense value."""
        if len(args) in (2, 3) and not kwargs:
            return writes.insert_or_assign(self, "sok.assign", *args)
        self._refuse_write("assign")
