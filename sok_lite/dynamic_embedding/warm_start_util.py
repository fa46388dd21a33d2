"""`warm_start`: loads rows of a TF1 checkpoint into a graph's variables before training."""

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from sok_lite.dynamic_embedding.variable import GraphKeys, Variable
from sok_lite.engine.local_path import plain_path


def warm_start(
    ckpt_to_initialize_from: str | os.PathLike[str],
    vars_to_warm_start: Any = ".*",
    var_name_to_prev_var_name: Mapping[str, str] | None = None,
) -> tf.Operation:
    """Loads rows of a checkpoint into variables of a graph; other keys stay as they are.

    Optimizer states start fresh.

    Args:
      ckpt_to_initialize_from: a checkpoint that `tf.compat.v1.train.Saver` wrote of variables
        without a `FileSystemSaver`, or a folder, for its latest one.
      vars_to_warm_start: a regular expression for the beginning of names, a list of them, or a list
        of variables.
      var_name_to_prev_var_name: saved names of variables that were renamed.

    Returns:
      The operation. Run it after all variables are initialized.

    Raises:
      ValueError: an invalid `vars_to_warm_start`, or the checkpoint has no such rows.
      RuntimeError: not in a TF1 graph.
    """
    if tf.executing_eagerly() or tf.inside_function():
        raise RuntimeError(
            "warm_start() is for graphs of TF1. In eager mode restore a tf.train.Checkpoint, or "
            "upsert what another variable exports."
        )
    path = plain_path(ckpt_to_initialize_from)
    if os.path.isdir(path):
        path = tf.train.latest_checkpoint(path)
    if path is None or not tf.compat.v1.train.checkpoint_exists(path):
        raise ValueError(f"There is no checkpoint at {os.fspath(ckpt_to_initialize_from)!r}.")
    reader = tf.train.load_checkpoint(path)
    names = dict(var_name_to_prev_var_name or {})
    done = [
        _insert_saved(reader, path, variable, names.get(variable.name))
        for variable in _choose_variables(vars_to_warm_start)
    ]
    return tf.group(*done)


class WarmStartHook(tf.compat.v1.train.SessionRunHook):
    """Calls `warm_start` with these arguments, once: a recovered session keeps its state."""

    def __init__(
        self,
        ckpt_to_initialize_from: str | os.PathLike[str],
        vars_to_warm_start: Any = ".*",
        var_name_to_prev_var_name: Mapping[str, str] | None = None,
    ) -> None:
        self._arguments = ckpt_to_initialize_from, vars_to_warm_start, var_name_to_prev_var_name
        self._operation: tf.Operation | None = None

    def begin(self) -> None:
        """Makes the operation."""
        self._operation = warm_start(*self._arguments)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Runs it."""
        if self._operation is not None:
            session.run(self._operation)
            self._operation = None


def _choose_variables(which: Any) -> list[Variable]:
    """Returns the graph's variables that match `vars_to_warm_start`."""
    listed: Sequence[Any] = [which] if isinstance(which, str) else which
    is_list = isinstance(listed, (list, tuple))
    if is_list and all(isinstance(each, Variable) for each in listed):
        return list(listed)
    if not is_list or not all(isinstance(each, str) for each in listed):
        raise ValueError(
            "`vars_to_warm_start` must be a regular expression, a list of them, or a list of "
            f"de.Variables. Received: {which!r}."
        )
    variables = tf.compat.v1.get_collection(GraphKeys.DYNAMIC_EMBEDDING_VARIABLES)
    return [each for each in variables if any(re.match(regex, each.name) for regex in listed)]


def _insert_saved(reader: Any, path: str, variable: Variable, previous: str | None) -> Any:
    """Returns the operation that inserts a variable's saved rows."""
    rows = variable.rows
    name = rows.op.name if previous is None else previous
    key_part = "texts" if variable.key_dtype == tf.string else "keys"
    wanted = {
        f"{name}-{key_part}": (variable.key_dtype, [None]),
        f"{name}-values": (variable.value_dtype, [None, variable.dim]),
    }
    dtypes, shapes = reader.get_variable_to_dtype_map(), reader.get_variable_to_shape_map()
    for tensor, (dtype, shape) in wanted.items():
        if tensor not in dtypes:
            raise ValueError(
                f"The checkpoint {path!r} has no rows for variable {variable.name!r}: there is no "
                f"{tensor!r}. Name what it was called in `var_name_to_prev_var_name`, or leave it "
                "out of `vars_to_warm_start`."
            )
        if dtypes[tensor] != dtype or not tf.TensorShape(shape).is_compatible_with(shapes[tensor]):
            raise ValueError(
                f"The checkpoint {path!r} does not fit variable {variable.name!r}: {tensor!r} must "
                f"be {dtype.name} of shape {shape}. Received: {dtypes[tensor].name} of shape "
                f"{shapes[tensor]}."
            )
    types = [dtype for dtype, _ in wanted.values()]
    keys, values = tf.raw_ops.RestoreV2(
        prefix=path, tensor_names=[*wanted], shape_and_slices=["", ""], dtypes=types
    )
    keys.set_shape([None])
    values.set_shape([None, variable.dim])
    return variable.upsert(keys, values)
