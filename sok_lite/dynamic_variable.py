"""`sok.DynamicVariable`: a table that TensorFlow takes for a variable of shape [None, dimension].

The rows live in the engine's table, not in TensorFlow. The resource variable underneath holds an
empty [0, dimension] tensor; its handle is what gradient tapes and `tf.gradients` know the table by.
Whatever TensorFlow would do with that empty tensor instead of the rows is overridden, or raises.
"""

import itertools
import weakref
from collections.abc import Iterable, Sequence
from functools import cache, partial
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from sok_lite import keras_guard
from sok_lite.backend import get_backend
from sok_lite.communication import num_ranks
from sok_lite.engine.dtypes import KeyDtype, RowDtype, key_dtype, row_dtype
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.table import EmbeddingTable, make_table
from sok_lite.gpu import share_gpu
from sok_lite.host_call import host_call, make_turn, on_device
from sok_lite.local_lookup import checked_keys, local_lookup, refuse_partitions
from sok_lite.refusals import RefusesDense
from sok_lite.row_gradient import size_tensor, slices_only
from sok_lite.row_writes import WritesRows, checked_rows, write_rows
from sok_lite.table_checkpoint import restore_tensors, saved_dtypes, saved_tensors
from sok_lite.table_methods import TableMethods, checked_scores
from sok_lite.table_summary import summary, table_facts
from sok_lite.tensor import empty, to_tensor
from sok_lite.variable_arguments import checked_dimension, checked_mode, checked_options, dtype_name
from sok_lite.variable_spec import DynamicVariableSpec, alive

__all__ = ["DynamicVariable", "assign", "export", "filter_variables"]

_serial = itertools.count()
# Stands in what TensorFlow says of a place where it wants a dense value.
_NO_VALUE = "sok_DynamicVariable_has_no_dense_value"


@cache
def _not_a_tensor() -> tf.Tensor:
    """Returns the handle of a variable that no operator on numbers can read."""
    handle = resource_variable_ops.UninitializedVariable(
        name=_NO_VALUE, shape=[], dtype=tf.string
    ).handle
    tf.raw_ops.AssignVariableOp(resource=handle, value=tf.constant("known by key only"))
    return handle


class DynamicVariable(
    RefusesDense, TableMethods, WritesRows, resource_variable_ops.ResourceVariable
):
    """A trainable table that has a row for every key it was ever asked for.

    A lookup of a key that has no row gives it one, whose first value is a function of the seed,
    the variable's name and the key alone. Every value of the key type is a key.

    In a job of several ranks each rank holds the part of the keys it owns; what is said here is
    about this rank's part. Only `sok.lookup_sparse` reaches the other ranks.

    Args:
      dimension: length of a row.
      initializer: first value of a row: "random" (also None and ""; uniform from -0.05 to 0.05 for
        "hbm", normal with mean 0 and deviation 1 for "hybrid", as in SOK), "normal", "uniform",
        "ones", "zeros", a number or its string such as "13", or a Keras or tf.initializers object.
      var_type: "hbm" (also None): all rows in GPU memory, or in RAM without a GPU, growing without
        bound. "hybrid": up to `max_capacity` keys, then the key of the lowest score goes; rows in
        two tiers of memory.
      name: in TensorFlow. It also seeds the rows.
      constraint: must be None.
      trainable: whether gradient tapes watch it.
      key_type: tf.int64 (also None), tf.int32 or tf.uint64.
      dtype: of the rows: tf.float32 (also None), tf.float16 or tf.bfloat16.
      mode: None, "distributed" or "localized:<rank>" as in SOK.
      **kwargs: `seed` (an integer, 0 by default), `init_capacity` (keys to make room for at
        once), `row_shape` (the (fan_in, fan_out) that a Glorot, He, Lecun or VarianceScaling
        initializer is to count with: a table has none), and the options of a "hybrid" table: see
        `sok_lite.engine.table.hkv_options.HkvOptions`. "hbm" ignores those of them that SOK has.

    Raises:
      TypeError: unknown keyword, or an argument of a wrong type.
      ValueError: an argument out of range, an option that only "hybrid" has, or a variable made
        inside a tf.function.
      NotImplementedError: a constraint, or a tf.distribute strategy.
    """

    _handle: Any  # TensorFlow's own name for the resource
    # TensorFlow would take the arguments by place for those of tf.Variable.
    _variable_call: Any = None

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
        keras_guard.refuse_clone()
        var_type = "hbm" if var_type is None else var_type
        options = checked_options(var_type, kwargs)
        dimension = checked_dimension(dimension)
        target_rank = checked_mode(mode)
        keys: KeyDtype = key_dtype(dtype_name(key_type, "int64", "key_type"))
        rows: RowDtype = row_dtype(dtype_name(dtype, "float32", "dtype"))
        if constraint is not None:
            raise NotImplementedError(
                "DynamicVariable has no constraints: an update touches single rows. "
                f"Received: constraint={constraint!r}. Leave it out and clip what you look up."
            )
        if tf.inside_function():
            raise ValueError(
                "A DynamicVariable must be made outside of a tf.function, once, and used inside."
            )
        if tf.distribute.has_strategy() and tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise NotImplementedError(
                "DynamicVariable does not work under a tf.distribute strategy with several "
                "replicas. Start one process per GPU with horovodrun and use sok.init()."
            )
        if name is None:
            name = f"sok_dynamic_Variable_{next(_serial)}"
        backend = get_backend()
        share_gpu(backend)  # before TensorFlow's first operation, if that is to come
        make_turn()
        new_table = partial(
            make_table,
            var_type,
            backend,
            dimension,
            initializer=make_initializer(
                "" if initializer is None else initializer,
                dimension,
                kwargs.get("row_shape"),
                var_type,
            ),
            key_type=keys.name,
            dtype=rows.name,
            name=name,
            seed=int(kwargs.get("seed", 0)),
            **options,
        )
        self._table = on_device(backend, new_table)
        self._dimension = dimension
        self._key_type = tf.as_dtype(keys.name)
        self._initializer_str = initializer if isinstance(initializer, str) else repr(initializer)
        self._mode = mode
        self._target_rank = target_rank
        self._config_dict = dict(kwargs)
        # Not TensorFlow's own alias ids, which start at 0 in every call of a tf.function: a
        # function traced for one table must never be reused for another.
        self._trace_id = (1 << 32) + next(_serial)
        self._init_resource(name, trainable, tf.as_dtype(rows.name))

    def _init_resource(self, name: str, trainable: bool, dtype: tf.DType) -> None:
        """Makes the resource that tapes and graphs know the table by."""
        # The handle's shape is [0, dimension]: of it TensorFlow can make an empty gradient.
        empty_rows = partial(tf.zeros, [0, self._dimension], dtype)
        super().__init__(empty_rows, trainable, name=name, dtype=dtype)
        self._true_handle = self._handle
        if self._in_graph_mode:
            # What session.run(variable) would evaluate; a TF1 Saver names it and raises.
            refusal = tf.debugging.Assert(
                False, [f"{self.name} has no dense value. Run what sok.export(variable) gives."]
            )
            with tf.control_dependencies([refusal]):
                self._graph_element = tf.zeros([0, self._dimension], dtype, name=_NO_VALUE)
        else:
            # TensorFlow's eager operators read what `_handle` names without asking this class, and
            # would take the empty tensor for the rows. They find a text instead, and fail.
            self._handle = _not_a_tensor()

    @property
    def handle(self) -> tf.Tensor:
        """The resource that tapes and graphs know the table by."""
        return self._true_handle

    def gradient_source(self) -> tf.Tensor:
        """Returns a tensor whose gradient is the variable's, and records the access.

        In a graph it is a read of the empty tensor: control flow can take a gradient through a
        read, but not through a resource.
        """
        keras_guard.refuse_own_step(self)
        resource_variable_ops.variable_accessed(self)
        if tf.executing_eagerly():
            return self._true_handle
        source = tf.raw_ops.ReadVariableOp(resource=self._true_handle, dtype=self.dtype)
        return slices_only(self.name, source) if self.trainable else source

    # ---------------------------------------------------------------- facts

    @property
    def table(self) -> EmbeddingTable:
        """The engine's table: this rank's keys, rows and optimizer states."""
        return self._table

    @property
    def shape(self) -> tf.TensorShape:
        """[None, dimension]."""
        return tf.TensorShape([None, self._dimension])

    @property
    def dimension(self) -> int:
        """Length of a row."""
        return self._dimension

    @property
    def key_type(self) -> tf.DType:
        """Type of the keys."""
        return self._key_type

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
        """The keyword options as given."""
        return self._config_dict

    @property
    def initializer_str(self) -> str:
        """The initializer as given."""
        return self._initializer_str

    @property
    def mode(self) -> str | None:
        """The mode as given."""
        return self._mode

    @property
    def num_gpus(self) -> int:
        """Number of ranks. Raises RuntimeError before `sok.init`."""
        return num_ranks()

    @property
    def target_gpu(self) -> int:
        """The rank that holds the whole table, or -1 where it is spread over all ranks."""
        return self._target_rank

    def key_map(self, indices: Any) -> Any:
        """Returns the keys unchanged: a dynamic table stores them as they are."""
        return indices

    @property
    def size(self) -> tf.Tensor:
        """int32 tensor [rows on this rank, dimension]."""
        reference = weakref.ref(self)

        def run() -> Sequence[tf.Tensor]:
            return (size_tensor(alive(reference).table),)

        (size,) = host_call(run, [], [tf.int32], self._table.backend, f"The size of {self.name!r}")
        size.set_shape([2])
        return size

    def get_shape(self) -> tf.TensorShape:
        """Returns [None, dimension]."""
        # The first thing TensorFlow asks of a list of variables in embedding_lookup.
        refuse_partitions(self)
        return self.shape

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        """Returns True: a table is ready when it is made."""
        return tf.constant(True, name=name)

    def __eq__(self, other: object) -> bool:
        """Whether it is the same variable: a table has no elements to compare one by one."""
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        kind = f"shape={self.shape} dtype={self.dtype.name}"
        text = on_device(self._table.backend, summary, self._table)
        return f"<sok.DynamicVariable {self.name!r} {kind} {text}>"

    def _repr_html_(self) -> str:
        facts = on_device(self._table.backend, table_facts, self._table, self.dtype.name)
        cells = "".join(f"<tr><th>{name}</th><td>{text}</td></tr>" for name, text in facts.items())
        return f"<table><caption>sok.DynamicVariable {self.name}</caption>{cells}</table>"

    # ---------------------------------------------------------------- reading

    def sparse_read(
        self,
        indices: Any,
        name: str | None = None,
        training: bool | None = None,
        missing: str | None = None,
    ) -> tf.Tensor:
        """Returns the rows of keys; new keys are inserted.

        `tf.nn.embedding_lookup`, its sparse forms and `tf.gather` come here.

        Args:
          indices: integer keys of any shape.
          training: False: nothing is inserted and no score changes. True: it is, even within
            `sok.inference_mode`. None: as that says.
          missing: what a key gives that has no row: "initial", the value it would start with, or
            "zeros". None: as `sok.inference_mode` says, else "initial".

        Returns:
          indices.shape + [dimension], of the rows' dtype. Its gradient is an IndexedSlices of the
          keys as given, repeated ones included.
        """
        try:
            return local_lookup(self, indices, training, missing)
        except AttributeError as error:
            # tf.gather takes an AttributeError for "no sparse_read" and would read a dense tensor.
            raise RuntimeError(f"The lookup in {self.name!r} failed: {error}") from error

    def export(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns this rank's keys, ascending, and their rows.

        Returns:
          (indices (n,) of the key type, values (n, dimension) of the rows' dtype).
        """
        reference = weakref.ref(self)
        backend = self._table.backend
        dtypes = [self._key_type, self.dtype]

        def run() -> Sequence[tf.Tensor]:
            table = alive(reference).table
            keys, values = table.export(
                out=lambda num_rows: empty((num_rows, table.dim), dtypes[1], backend)
            )
            return to_tensor(keys, dtypes[0], backend), to_tensor(values, dtypes[1], backend)

        indices, values = host_call(run, [], dtypes, backend, f"The export of {self.name!r}")
        indices.set_shape([None])
        values.set_shape([None, self._dimension])
        return indices, values

    # ---------------------------------------------------------------- TensorFlow's checkpoints

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        """Returns what `tf.train.Checkpoint` saves of this rank's part."""
        reference = weakref.ref(self)
        key_type, dtype = self._key_type, self.dtype
        dtypes = saved_dtypes(key_type, dtype)

        def run() -> Sequence[tf.Tensor]:
            tensors = saved_tensors(alive(reference).table, key_type, dtype)
            return [tensors[name] for name in dtypes]

        what = f"Saving {self.name!r}"
        tensors = host_call(run, [], list(dtypes.values()), self._table.backend, what)
        return dict(zip(dtypes, tensors, strict=True))

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        """Makes the table what was saved: other keys are removed."""
        names = list(saved_dtypes(self._key_type, self.dtype))
        missing = set(names) - set(restored_tensors)
        if missing:
            raise ValueError(
                f"The checkpoint has no {', '.join(sorted(missing))} for {self.name!r}: it was not "
                "written from a sok.DynamicVariable of this version."
            )
        keys = checked_keys(self, restored_tensors["keys"])
        checked_rows(self, keys, restored_tensors["values"], "restore")
        reference = weakref.ref(self)
        backend = self._table.backend

        def run(*tensors: tf.Tensor) -> Sequence[tf.Tensor]:
            restore_tensors(alive(reference).table, dict(zip(names, tensors, strict=True)))
            return ()

        inputs = [restored_tensors[name] for name in names]
        done = host_call(run, inputs, [], backend, f"The restore of {self.name!r}")
        return tf.no_op() if tf.executing_eagerly() else done

    # ---------------------------------------------------------------- functions and structures

    @property
    def _type_spec(self) -> DynamicVariableSpec:
        return DynamicVariableSpec.from_value(self)

    def __tf_tracing_type__(self, signature_context: Any) -> DynamicVariableSpec:
        signature_context.add_placeholder(self._trace_id, self)
        return DynamicVariableSpec.from_value(self, alias_id=self._trace_id)

    def assign(self, *args: Any, **kwargs: Any) -> Any:
        """`variable.assign(indices, values)` is `sok.assign`; there is no dense value to assign."""
        if len(args) in (2, 3) and not kwargs:
            return assign(self, *args)
        self._refuse_write("assign")


def export(var: Any) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns this rank's keys, ascending, and their rows. No communication.

    Args:
      var: a DynamicVariable, or a view of an optimizer state of one.

    Returns:
      (indices (n,) of the key type, values (n, dimension) of the rows' dtype).

    Raises:
      TypeError: `var` is no DynamicVariable.
    """
    # A view of a state has the same method; no variable of TensorFlow has.
    if not hasattr(var, "export"):
        _checked_variable(var, "export")
    return var.export()


def assign(var: DynamicVariable, indices: Any, values: Any, scores: Any = None) -> Any:
    """Sets the rows of keys on this rank, inserting keys that are new. No communication.

    Args:
      var: the variable.
      indices: (n,) integers; of a repeated key the last row counts.
      values: (n, dimension).
      scores: (n,) non-negative integers, kept with the keys whatever the strategy; None: as a
        lookup would. A "hybrid" table refuses a new key whose score is below all that it could
        evict.

    Returns:
      The variable in eager mode, the operation in a graph.

    Raises:
      TypeError: `var` is no DynamicVariable, keys are no integers or rows no floats.
      ValueError: shapes do not fit, or a key does not fit the key type. Nothing has changed then.
    """
    var = _checked_variable(var, "assign")
    keys = checked_keys(var, indices)
    rows = checked_rows(var, keys, values, "sok.assign")
    others = [] if scores is None else [checked_scores(var.name, scores)]
    return write_rows(
        var,
        "sok.assign",
        keys,
        rows,
        lambda table, *arrays: table.insert_or_assign(*arrays),
        *others,
    )


def _checked_variable(var: Any, what: str) -> DynamicVariable:
    if not isinstance(var, DynamicVariable):
        raise TypeError(f"sok.{what} takes a sok.DynamicVariable. Received: {type(var).__name__}.")
    return var


def filter_variables(vars: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """Splits variables into (sok's own, others), each in the given order."""
    ours: list[Any] = []
    others: list[Any] = []
    for var in vars:
        (ours if isinstance(var, DynamicVariable) else others).append(var)
    return ours, others
