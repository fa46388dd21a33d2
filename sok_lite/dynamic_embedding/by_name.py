"""`get_variable`: the variable of a name, made where it is new."""

import threading
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.autograph import unconverted_function
from sok_lite.bridge.tf_private import GLOBAL_GRAPH, default_graphs
from sok_lite.dynamic_embedding.creators import KVCreator
from sok_lite.dynamic_embedding.graph_keys import of_graph
from sok_lite.dynamic_embedding.partition import Partitioner, default_partition_fn
from sok_lite.dynamic_embedding.restrict_policies import RestrictPolicy
from sok_lite.dynamic_embedding.variable import Variable, listed

_naming = threading.RLock()
# Of eager mode, since the last session began. Those of a TF1 graph are in its collection.
_latest: dict[str, Variable] = {}


class _Session(threading.local):
    """The variables that a thread knows by name in eager mode.

    They go with its default graph, which `clear_session` replaces: each thread has one of its own.

    Attributes:
      graph: a weak reference to that; None: the thread has asked for no variable yet.
      names: the variables.
    """

    graph: "weakref.ref[tf.Graph] | None" = None
    names: dict[str, Variable]


_session = _Session()


@unconverted_function
def get_variable(
    name: str,
    key_dtype: Any = tf.int64,
    value_dtype: Any = tf.float32,
    dim: int = 1,
    devices: str | Sequence[str] | None = None,
    partitioner: Partitioner = default_partition_fn,
    shared_name: str | None = "get_variable",
    initializer: Any = None,
    trainable: bool = True,
    checkpoint: bool = True,
    init_size: int = 0,
    kv_creator: KVCreator | None = None,
    restrict_policy: type[RestrictPolicy] | None = None,
    bp_v2: bool = False,
    short_file_name: bool = False,
    row_shape: tuple[int, int] | None = None,
) -> Variable:
    """Returns the variable of a name, or makes it.

    Names are of the graph in TF1, within the variable scope that is open. In eager mode they are of
    the session, which keeps the variable until `tf.keras.backend.clear_session()`, or
    `tf.compat.v1.reset_default_graph()`: from then on the name is that of a new one, and the old
    one lives on with its rows as long as a program holds it. A thread that asks for the first time
    is of the session that began last, and stays in it when another thread begins a new one.

    Args:
      name: of the variable, within the scope.
      others: see `Variable`.

    Raises:
      ValueError: the variable exists with another dtype, dim, or number of shards; in a TF1 graph
        also where it exists and the scope does not reuse. A new one is made where it does.
    """
    scope = tf.compat.v1.get_variable_scope()
    full_name = name if short_file_name or not scope.name else f"{scope.name}/{name}"
    is_eager = tf.executing_eagerly() or tf.inside_function()
    arguments = (key_dtype, value_dtype, dim, devices)
    with _naming:
        names = _names() if is_eager else {}
        found = names.get(full_name) if is_eager else of_graph(full_name)
        if not is_eager:
            _check_reuse(scope, full_name, found)
        if found is not None:
            _check_agrees(found, *arguments)
            return found
        made = Variable(
            *arguments,
            partitioner=partitioner,
            shared_name=shared_name,
            name=full_name,
            initializer=initializer,
            trainable=trainable,
            checkpoint=checkpoint,
            init_size=init_size,
            kv_creator=kv_creator,
            restrict_policy=restrict_policy,
            bp_v2=bp_v2,
            short_file_name=short_file_name,
            row_shape=row_shape,
        )
        if is_eager:
            names[full_name] = made
        return made


def _names() -> dict[str, Variable]:
    """Returns the variables of eager mode by name. The caller has the lock."""
    global _latest
    graph = getattr(default_graphs, GLOBAL_GRAPH)()
    if _session.graph is None:
        _session.names = _latest
    elif _session.graph() is not graph:
        _session.names = _latest = {}
    _session.graph = weakref.ref(graph)
    return _session.names


def _check_reuse(scope: Any, name: str, found: Variable | None) -> None:
    if found is not None and scope.reuse is False:
        raise ValueError(
            f"Variable {name} already exists, disallowed. Did you mean to set reuse=True or "
            "reuse=tf.AUTO_REUSE in VarScope?"
        )


def _check_agrees(found: Variable, keys: Any, values: Any, dim: int, devices: Any) -> None:
    """Raises ValueError where a variable is not what a program asks for by its name."""
    has = (found.key_dtype.name, found.value_dtype.name, found.dim, found.shard_num)
    wants = (tf.as_dtype(keys).name, tf.as_dtype(values).name, dim, len(listed(devices)))
    if has != wants:
        raise ValueError(
            f"Variable {found.name!r} exists with (key_dtype, value_dtype, dim, shards) = {has}. "
            f"Received: {wants}. Give another name, or the same arguments, or begin a new session "
            "by tf.keras.backend.clear_session()."
        )
