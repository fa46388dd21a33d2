"""Rejects what a dense variable can do and a table cannot; errors name the alternative."""

import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.tf_private import CUSTOM_GRADIENT, META_GRAPH, SAVER
from sok_lite.engine.callers import callers


def is_called_from(module: str) -> bool:
    """Whether a function of a module is among the callers."""
    return any(frame.f_globals.get("__name__") == module for frame in callers())


FORWARD_REFUSAL = (
    "tf.autodiff.ForwardAccumulator does not go through the lookup of a table, its weights, or a "
    "tf.function with a lookup: that is computed outside of TensorFlow. Use tf.GradientTape. Or "
    "look rows up by tf.nn.embedding_lookup, outside of a tf.function, and have it watch what is "
    "computed of them."
)

# Functions of Keras 3, tf_keras, legacy Keras and TF1 optimizers that create the state of a dense
# variable or change its rows.
_STEPS = frozenset(
    {
        *("add_variable_from_reference", "add_slot", "create_zeros_slot"),
        *("create_slot_with_initializer", "_resource_apply_sparse_duplicate_indices"),
    }
)
# Methods of a tf.Variable that read its dense tensor, or write to it.
READS = (
    *("value", "read_value", "_read_variable_op", "numpy", "__array__", "__bool__"),
    *("__int__", "__float__", "__complex__", "eval", "gather_nd", "initialized_value"),
)
WRITES = (
    *("count_up_to", "load", "assign", "assign_add", "assign_sub", "scatter_add", "scatter_sub"),
    *("scatter_update", "scatter_max", "scatter_min", "scatter_mul", "scatter_div"),
    *("batch_scatter_update", "scatter_nd_add", "scatter_nd_sub"),
    *("scatter_nd_update", "scatter_nd_max", "scatter_nd_min", "_strided_slice_assign"),
)


def refuse_step(name: str, kind: str) -> None:
    """Raises if an optimizer calls, in a step that treats the table as dense."""
    # Methods of the variable may be in between.
    if any(frame.f_code.co_name in _STEPS for frame in itertools.islice(callers(), 1, 5)):
        raise NotImplementedError(
            f"The optimizer cannot update {name!r} by itself: it is a {kind}, whose rows are "
            "found by key. Wrap it: sok_lite.OptimizerWrapper(optimizer).apply_gradients(...)."
        )


def _refuse_each(cls: type, names: Iterable[str], refuse: str) -> None:
    """Adds methods to a class that call its method `refuse` with their own names."""
    for name in names:
        method = _refusal_method(name, refuse)
        method.__name__, method.__qualname__ = name, f"{cls.__name__}.{name}"
        setattr(cls, name, method)


def _refusal_method(name: str, refuse: str) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: getattr(self, refuse)(name)


class RefusesCopies:
    """Rejects Python's ways to copy a variable: a copy would have no table."""

    def _refuse_copy(self, method: str) -> NoReturn:
        raise NotImplementedError


_refuse_each(
    RefusesCopies, ("__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__"), "_refuse_copy"
)


class RefusesDense(RefusesCopies):
    """Rejects tf.Variable's methods that would use its empty tensor instead of the rows.

    Otherwise they would silently save, copy or convert a [0, dimension] tensor.

    Attributes:
      kind: the class name that a program uses.
      instead_of_value, instead_of_write, instead_of_copy, instead_of_save: the alternative, a
        sentence in the words of that API.
      instead_of_custom_step: the alternative to Keras' own training step.
      instead_of_partitions: the alternative to a list of variables in `tf.nn.embedding_lookup`.
      instead_of_broadcast: the alternative to broadcasting one rank's variables, such as
        `hvd.broadcast_variables(model.variables)`.
    """

    # The Keras versions whose training and saving skip it.
    left_out_by = frozenset({"keras", "tf_keras"})

    name: str
    kind: str
    instead_of_value: str
    instead_of_write: str
    instead_of_copy: str
    instead_of_save: str
    instead_of_custom_step: str
    instead_of_partitions: str
    instead_of_broadcast = "To give all ranks the weights of one, broadcast the other variables."

    def _refuse(self, method: str, instead: str) -> NoReturn:
        raise NotImplementedError(
            f"{method}() is not supported: {self.name!r} is a {self.kind}, whose rows are found by "
            f"key: it has no dense tensor. {instead}"
        )

    def _refuse_dense(self, method: str) -> NoReturn:
        instead = self.instead_of_value
        if other_ranks() is not None:
            instead += f" Each rank has rows of its own. {self.instead_of_broadcast}"
        self._refuse(method, instead)

    def _refuse_write(self, method: str) -> NoReturn:
        self._refuse(method, self.instead_of_write)

    def _refuse_copy(self, method: str) -> NoReturn:
        self._refuse(method, self.instead_of_copy)

    def read_value_no_copy(self) -> NoReturn:
        self._refuse_saver()
        self._refuse_dense("read_value_no_copy")

    @property
    def _graph_element(self) -> Any:
        self._refuse_saver()
        return self._element

    @_graph_element.setter
    def _graph_element(self, element: Any) -> None:
        self._element = element

    def _refuse_saver(self) -> None:
        """Raises in a TF1 saver, which would save a dense tensor."""
        if is_called_from(SAVER):
            raise NotImplementedError(
                f"A tf.compat.v1.train.Saver cannot save {self.name!r}: it is a {self.kind}, whose "
                "rows are found by key: it has no dense tensor. Save it with "
                "tf.train.Checkpoint(table=variable), in a session with "
                "tf.compat.v1.train.Checkpoint, and give the saver the other variables."
            )

    def _dense_var_to_tensor(self, *args: Any, **kwargs: Any) -> NoReturn:
        if is_called_from(CUSTOM_GRADIENT):
            raise NotImplementedError(
                f"{self.name!r} is looked up in a function that tf.custom_gradient, "
                "tf.recompute_grad or keras.RematScope wraps: they read every variable that the "
                "function uses as a dense tensor, and a table has none. Look the rows up before "
                "you call the function or layer, and pass them to it."
            )
        self._refuse_dense("convert_to_tensor")

    @property
    def initial_value(self) -> NoReturn:
        self._refuse_dense("initial_value")

    def _lazy_read(self, op: Any) -> NoReturn:
        # TensorFlow's functions that write to a variable end here, in a graph before they run.
        name = op.type.removeprefix("Resource")
        self._refuse_write("tf.compat.v1." + re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower())

    def to_proto(self, export_scope: Any = None) -> None:
        """Returns None to a meta graph, which leaves tables out (meta_graph.py)."""
        if not is_called_from(META_GRAPH):
            self._refuse_copy("to_proto")

    def set_shape(self, shape: Any) -> NoReturn:
        self._refuse("set_shape", "Its shape is [None, dimension]: leave the call out.")

    @staticmethod
    def from_proto(variable_def: Any, import_scope: Any = None) -> NoReturn:
        raise NotImplementedError(
            "from_proto() is not supported for the variable of a table. Make a new one."
        )

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse("tf.saved_model.save", self.instead_of_save)

    _write_object_proto = _export_to_saved_model_graph


_refuse_each(RefusesDense, ["_copy_trackable_to_cpu"], "_refuse_copy")
_refuse_each(RefusesDense, READS, "_refuse_dense")
_refuse_each(RefusesDense, WRITES, "_refuse_write")
