"""`TableVariable`: a table that TensorFlow treats as a variable of shape [None, dimension].

The rows are in the engine's table, not in TensorFlow. The resource variable underneath holds an
empty [0, dimension] tensor; gradient tapes and `tf.gradients` identify the table by its handle.
Whatever TensorFlow would do with the empty tensor instead of the rows is overridden or raises.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from html import escape
from typing import Any, TypeVar

import tensorflow as tf

from sok_lite.backend import Backend, get_backend
from sok_lite.bridge import checkpoint, meta_graph, tf_lookups, tf_private
from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.checks import refuse_partitions
from sok_lite.bridge.cluster import refuse_clusters
from sok_lite.bridge.gpu import device_name, share_gpu
from sok_lite.bridge.host_call import make_turn, on_device
from sok_lite.bridge.inference import MissingKeyPolicy
from sok_lite.bridge.keras import guard, held
from sok_lite.bridge.local_lookup import local_lookup
from sok_lite.bridge.operation import NAME_OF_HANDLE
from sok_lite.bridge.refusals import RefusesDense, is_called_from
from sok_lite.bridge.row_gradient import row_gradient
from sok_lite.bridge.serving.mode import stand_in
from sok_lite.bridge.type_spec import OfTable
from sok_lite.engine.table import EmbeddingTable
from sok_lite.native.gpu import prepare

# Attribute of handles: a weak reference to the variable.
_VARIABLE = "_sok_lite_variable"
# Appears in TensorFlow's errors where it needs a dense value.
_NO_VALUE = "this_table_has_no_dense_value"
_NOT_DENSE = (
    "(this is a table, which has no dense value: look rows up by their keys, with "
    "tf.nn.embedding_lookup, sok_lite.lookup_sparse or the layer that holds it)"
)
# In eager mode. Ends like a name that gets no scope.
_NAME_OF_HANDLES = "sok_table/"


@cache
def _not_a_tensor() -> tf.Tensor:
    """Returns a handle of no variable: "Could not find variable" precedes its name in errors."""
    return tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name=_NOT_DENSE)


Table = TypeVar("Table")


def table_for_variable(
    kind: str,
    make: Callable[[Backend], Table],
    can_be_cloned: bool = False,
    is_shared: bool = False,
) -> Table:
    """Creates the engine's table of a variable, if TensorFlow can have one here.

    In the first trace of a tf.function a table is created outside of it, like a tf.Variable, so
    that a layer may create it in its `build`.

    Args:
      kind: the class name that a program uses, for errors.
      can_be_cloned: whether Keras may create it, empty, when it clones a model.
      is_shared: whether its rows are in a server that all processes share.

    Raises:
      ValueError: a later trace of a tf.function creates another one.
      NotImplementedError: under a tf.distribute strategy with several replicas, or in a cluster of
        TensorFlow's own.
    """
    if can_be_cloned:
        guard.watch()
    else:
        guard.refuse_clone()
    if tf.distribute.has_strategy() and tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise NotImplementedError(
            f"{kind} does not work under a tf.distribute strategy with several replicas. Start "
            "one process per GPU with horovodrun and use sok_lite.init()."
        )
    if not is_shared:
        refuse_clusters()
    backend = get_backend()
    share_gpu(backend)  # before TensorFlow's first operation, if that is still to come
    if backend.name != "cpu":
        prepare(backend)  # before the table has a lock
    if tf.inside_function():
        _announce(kind)
    make_turn()
    with tf.init_scope():
        return on_device(backend, make, backend)


def _announce(kind: str) -> None:
    """Reports the creation of a variable to the tf.function being traced.

    The function then acts as for a tf.Variable: it is traced a second time before it runs, and
    raises ValueError if this or a later trace creates another one. So a function that would create
    a table in each trace fails in its first call.
    """
    try:
        with tf.init_scope():
            tf.Variable(0, trainable=False, name="sok_table_is_made")
    except ValueError as error:
        raise ValueError(
            f"A {kind} is made each time that a tf.function is traced. Make it outside of a "
            "tf.function, or once: in the `build` of a layer, or behind `if self.table is None:`."
        ) from error


def variable_of(handle: Any) -> "TableVariable | None":
    """Returns the variable with a handle; None if it is no table's."""
    reference = getattr(handle, _VARIABLE, None)
    return None if reference is None else reference()


def variable_of_layer(value: Any) -> Any:
    """Returns the variable of a `sok_lite.keras.Table`, a layer; other values unchanged."""
    variable = getattr(value, "variable", None)
    is_weight = isinstance(variable, TableVariable) and variable.tracked_as_weight
    return variable if is_weight else value


@unconverted
class TableVariable(RefusesDense, OfTable, tf_private.ResourceVariable):
    """A variable whose rows are found by key; base of the variables of all APIs.

    With several ranks each holds the keys that it owns; all descriptions here are about this rank's
    part.

    Args:
      table: from `table_for_variable`.
      name: in TensorFlow.
      trainable: whether gradient tapes watch it.
    """

    kind = "table"
    instead_of_value = "Use tf.nn.embedding_lookup(variable, keys) for some rows."
    instead_of_write = "Write rows by their keys."
    instead_of_copy = "Make a new variable, and give it the rows."
    instead_of_save = (
        "Save the dense part of the model alone; for serving, use sok_lite.export_serving."
    )
    instead_of_custom_step = "Write the model's `train_step`, or a loop, with tf.GradientTape."
    instead_of_partitions = "Look each up by itself."

    # In TF1, used by initializers and savers. Only global variables need initialization by the
    # program.
    collections: tuple[str, ...] = (tf.compat.v1.GraphKeys.GLOBAL_VARIABLES,)
    # Whether unwrapped optimizers train it; see bridge/optimizers/patched.py.
    trained_by_patched = False
    # Advice if a program must declare the optimizers that train it and did not declare this one;
    # None: no need to declare any.
    instead_of_this_optimizer: str | None = None
    # The optimizer that trains it instead of the one that gets its gradient; None: that one.
    own_optimizer: Any = None
    # Whether its step is for the mean of all ranks' losses.
    averages_over_ranks = False
    # Whether the layer that lists it among its weights saves it and returns it as a weight.
    tracked_as_weight = False
    # Whether checkpoints include its rows.
    is_in_checkpoints = True
    regularizer = None  # Keras 3 reads it from each weight
    # Implements `tf.nn.safe_embedding_lookup_sparse`; None: TensorFlow does.
    safe_lookup: Callable[..., Any] | None = staticmethod(tf_lookups.safe_embedding_lookup_sparse)

    _handle: Any  # TensorFlow's own name for the resource
    # TensorFlow would bind positional arguments as tf.Variable's.
    _variable_call: Any = None

    def __init__(self, table: EmbeddingTable, *, name: str, trainable: bool) -> None:
        self._table = table
        self._key_type = tf.as_dtype(table.key_dtype.name)
        with tf.init_scope():  # outside of a tf.function, as `table_for_variable`
            self._init_resource(name, trainable, tf.as_dtype(table.row_dtype.name))

    def _init_resource(self, name: str, trainable: bool, dtype: tf.DType) -> None:
        """Creates the resource by which tapes and graphs identify the table."""
        # The handle's shape is [0, dimension], for an empty gradient.
        empty_rows = partial(tf.zeros, [0, self.dimension], dtype)
        # In eager mode TensorFlow makes a kernel per new name, which takes longer than all the rest
        # and is never dropped. So all handles share one name there.
        is_eager = tf.executing_eagerly()
        shown_name = _NAME_OF_HANDLES if is_eager else name
        # TensorFlow runs an operation on the device of its resource.
        backend = self._table.backend
        place = None if backend.name == "cpu" else device_name(backend)
        with tf.device(place or "CPU:0"):
            super().__init__(
                *(empty_rows, trainable),
                name=shown_name,
                dtype=dtype,
                collections=list(self.collections),
            )
        if is_eager:
            with tf.name_scope(name) as scope:
                self._handle_name = f"{scope.removesuffix('/')}:0"
        self._true_handle = self._handle
        setattr(self._true_handle, _VARIABLE, weakref.ref(self))
        setattr(self._true_handle, NAME_OF_HANDLE, self.name)
        if self._in_graph_mode:
            self._graph_element = self._element_of_graph()
            meta_graph.add_to_graph(self)
        else:
            # TensorFlow's eager operators read the variable of `_handle` without asking this class,
            # and would use the empty tensor. With this handle they fail.
            self._handle = self._refusing_handle = _not_a_tensor()

    def _element_of_graph(self) -> tf.Tensor:
        """Returns what session.run(variable) evaluates; it raises."""
        refusal = tf.debugging.Assert(
            False, [f"{self.name} has no dense value. {self.instead_of_value}"]
        )
        with tf.control_dependencies([refusal]):
            return tf.zeros([0, self.dimension], self.dtype, name=_NO_VALUE)

    @property
    def handle(self) -> tf.Tensor:
        """The resource by which tapes and graphs identify the table."""
        return stand_in(self._true_handle)

    @property
    def resources(self) -> list["TableVariable"]:
        """The variables whose resources stand for its rows on tapes and in graphs: itself."""
        return [self]

    @property
    def handles(self) -> list[tf.Tensor]:
        """The resources by which TensorFlow orders operations on its table."""
        return [self.handle]

    def is_trained_by(self, optimizer: Any) -> bool:
        """Whether an optimizer's step with the variable's gradient would update its rows."""
        return self.trained_by_patched and held.trains_tables(optimizer)

    @property
    def trained_as(self) -> "TableVariable":
        """The variable whose rows a step updates: itself, or the one that it stands for."""
        return self

    def after_step(self, keys: tf.Tensor) -> list[Any]:
        """Called with the keys of a step, to be overridden; returns operations of the step."""
        return []

    def ready_inputs(self) -> Sequence[tf.Tensor]:
        """Returns inputs for a call of the table that fail if the variable is not ready."""
        return ()

    # ---------------------------------------------------------------- facts

    @property
    def table(self) -> EmbeddingTable:
        """The engine's table: this rank's keys, rows and optimizer states."""
        return self._table

    @property
    def shape(self) -> tf.TensorShape:
        """[None, dimension]."""
        return tf.TensorShape([None, self.dimension])

    @property
    def key_type(self) -> tf.DType:
        """Type of the keys."""
        return self._key_type

    @property
    def path(self) -> str:
        """The name, as Keras 3 requests it of a weight."""
        return self.name.removesuffix(":0")

    def get_shape(self) -> tf.TensorShape:
        """Returns [None, dimension]."""
        # The first request of TensorFlow to a list of variables in embedding_lookup.
        refuse_partitions(self)
        return self.shape

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        """Returns True: a table is ready when it is created."""
        return tf.constant(True, name=name)

    def __eq__(self, other: object) -> bool:
        """Whether it is the same variable: a table has no elements to compare."""
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        facts = f"shape={self.shape} dtype={self.dtype.name}"
        text = on_device(self._table.backend, self._table.summary)
        return f"<{self.kind} {self.name!r} {facts} {text}>"

    def _repr_html_(self) -> str:
        facts = on_device(self._table.backend, self._table.facts, self.dtype.name)
        return facts_html(f"{self.kind} {self.name}", facts)

    # ---------------------------------------------------------------- reading

    def sparse_read(
        self,
        indices: Any,
        name: str | None = None,
        training: bool | None = None,
        missing: str | None = None,
    ) -> tf.Tensor:
        """Returns the rows of keys; new keys are inserted.

        `tf.nn.embedding_lookup`, its sparse forms and `tf.gather` call it.

        Args:
          indices: integer keys of any shape.
          training: True: insert new keys, even within `inference_mode`. False: insert nothing and
            change no score. None: as `inference_mode` decides.
          missing: what a key without a row returns: "initial", its initial value, or "zeros". None:
            as `inference_mode` decides, else "initial".

        Returns:
          indices.shape + [dimension], of the rows' dtype. Its gradient is an IndexedSlices of the
          keys as passed, including repeated ones.
        """
        try:
            return local_lookup(self, indices, MissingKeyPolicy(training, missing))
        except AttributeError as error:
            # tf.gather takes an AttributeError for a missing sparse_read and would read a dense
            # tensor.
            raise RuntimeError(f"The lookup in {self.name!r} failed: {error}") from error

    # ---------------------------------------------------------------- TensorFlow's checkpoints

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        """Returns what `tf.train.Checkpoint` saves of this rank's part."""
        return checkpoint.serialized(self)

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        """Replaces the content of the table by saved tensors."""
        return checkpoint.restored(self, restored_tensors)


tf_lookups.answer(
    "safe_embedding_lookup_sparse", TableVariable, lambda variable: variable.safe_lookup
)


@tf.experimental.dispatch_for_api(tf.compat.v1.zeros_like, {"tensor": TableVariable})
def _zeros_like(tensor: Any, dtype: Any = None, name: Any = None, optimize: bool = True) -> Any:
    """Makes a tape's gradient for `unconnected_gradients="zero"`: zeros without rows."""
    if not is_called_from(tf_private.DEFAULT_GRADIENT):
        return NotImplemented
    nothing = tf.zeros([0, tensor.dimension])
    return row_gradient(
        tensor.name, tf.zeros([0], tensor.key_type), nothing, tensor.dimension, distinct=True
    )


def facts_html(caption: str, facts: dict[str, str]) -> str:
    """Returns facts as an HTML table."""
    cells = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in facts.items()
    )
    return f"<table><caption>{escape(caption)}</caption>{cells}</table>"
