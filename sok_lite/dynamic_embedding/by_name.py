"""Variables by name, for `get_variable` and Keras layers: returns the existing one or makes it."""

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.autograph import unconverted_function
from sok_lite.bridge.keras import guard
from sok_lite.bridge.keras.classes import made_so_far, share_in_copies
from sok_lite.bridge.keras.hooks import is_loading
from sok_lite.bridge.tf_private import GLOBAL_GRAPH, default_graphs
from sok_lite.dynamic_embedding.arguments import checked_dtypes
from sok_lite.dynamic_embedding.creators import KVCreator
from sok_lite.dynamic_embedding.partition import Partitioner, default_partition_fn
from sok_lite.dynamic_embedding.restrict_policies import RestrictPolicy
from sok_lite.dynamic_embedding.variable import Variable, device_names, find_in_graph
from sok_lite.engine.callers import warn

# Facts on which an existing variable must agree with a request.
_COMPARED = ("key_dtype", "value_dtype", "dim", "devices")
_naming = threading.RLock()
# Eager mode: the names of the newest session. A TF1 graph has its collection.
_latest: dict[str, Variable] = {}


class _Users:
    """The layers that share a variable, and the number by which configs identify it."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.layers: weakref.WeakSet[Any] = weakref.WeakSet()


# Default names, for layers that the program did not name.
_DEFAULT_NAMES = ("DynamicEmbeddingLayer", "SlotDynamicEmbeddingLayer")
_numbers = itertools.count(1)
_users: weakref.WeakKeyDictionary[Variable, _Users] = weakref.WeakKeyDictionary()


class _Session(threading.local):
    """A thread's eager variables by name, for its default graph, which `clear_session` replaces."""

    graph: "weakref.ref[tf.Graph] | None" = None  # None: the thread asked for no variable yet
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

    In TF1, names belong to the graph, within the open variable scope. In eager mode they belong to
    the session, which keeps the variable until `tf.keras.backend.clear_session()` or
    `tf.compat.v1.reset_default_graph()`: afterwards the name makes a new variable, and the old one
    lives on while the program holds it. A thread joins the newest session with its first call, and
    stays in it when another thread begins a new one.

    Args:
      name: of the variable, within the scope.
      others: arguments of `Variable`: dtypes, `dim`, initializer and so on.

    Raises:
      ValueError: the variable exists with another dtype, dim or number of shards; in a TF1 graph
        also if it exists and the scope does not reuse. Unlike TensorFlow's, a reusing scope makes
        missing variables.

    Examples:
      >>> items = de.get_variable("item", dim=2, initializer=0.0)
      >>> items.upsert(tf.constant([7], tf.int64), tf.constant([[1.0, 2.0]]))
      >>> items.lookup(tf.constant([7, 8], tf.int64)).numpy().tolist()
      [[1.0, 2.0], [0.0, 0.0]]
    """
    arguments = dict(locals())
    return _by_name(arguments.pop("name"), arguments, joins=True)


@unconverted_function
def layer_variable(layer: Any, name: str, **arguments: Any) -> Variable:
    """Returns the variable of a Keras layer: layers of one name in a session share it.

    A thread begins its own session with its first layer. Layers made from a config, as by
    `load_model`, share exactly what was shared when saved. Errors as for `get_variable`.
    NotImplementedError: `clone_model` makes the layer, and would copy no row.
    """
    guard.tell(share_in_copies)
    guard.refuse_clone()
    made = made_so_far()
    if made is None and is_loading():
        made = {}  # a model whose from_config() bypasses Keras'
    if made is None:
        variable = _by_name(name, arguments, joins=False)
        if variable in _users and layer.name in _DEFAULT_NAMES:
            warn(
                f"Layers of the name {layer.name!r}, the default, share one table, as in TFRA: an "
                "id has the same row in all of them. Give each layer a name of its own, or call "
                "tf.keras.backend.clear_session() before a model is built anew.",
            )
    elif name in made:
        variable = made[name]
        _check_agrees(variable, arguments)
    else:
        variable = made[name] = Variable(name=name, **arguments)
    _users.setdefault(variable, _Users()).layers.add(layer)
    return variable


def number_of_shared(variable: Variable) -> int | None:
    """Returns the number that identifies a variable shared by layers, or None."""
    users = _users.get(variable)
    return users.number if users is not None and len(users.layers) > 1 else None


def _by_name(name: str, arguments: dict[str, Any], joins: bool) -> Variable:
    """Returns the variable of a name within the scope, or makes it.

    Args:
      joins: whether a thread's first call joins the newest session, or begins one.
    """
    scope = tf.compat.v1.get_variable_scope()
    is_short = arguments["short_file_name"] or not scope.name
    full_name = name if is_short else f"{scope.name}/{name}"
    is_eager = tf.executing_eagerly() or tf.inside_function()
    with _naming:
        names = _names(joins) if is_eager else {}
        found = names.get(full_name) if is_eager else find_in_graph(full_name)
        if found is not None:
            if not is_eager and scope.reuse is False:
                raise ValueError(
                    f"Variable {full_name} already exists, disallowed. Did you mean to set "
                    "reuse=True or reuse=tf.AUTO_REUSE in VarScope?"
                )
            _check_agrees(found, arguments)
            return found
        made = Variable(name=full_name, **arguments)
        if is_eager:
            names[full_name] = made
        return made


def _names(joins: bool) -> dict[str, Variable]:
    """Returns the eager variables by name; `joins` as for `_by_name`. The caller holds the lock."""
    global _latest
    graph = getattr(default_graphs, GLOBAL_GRAPH)()
    if _session.graph is None:
        is_first = threading.current_thread() is threading.main_thread()
        _session.names = _latest if joins or is_first else {}
    elif _session.graph() is not graph:
        _session.names = _latest = {}
    _session.graph = weakref.ref(graph)
    return _session.names


def _check_agrees(found: Variable, arguments: dict[str, Any]) -> None:
    """Raises ValueError if a variable differs from what was asked for by its name."""
    keys, values, dim, devices = (arguments[each] for each in _COMPARED)
    has = (found.key_dtype.name, found.value_dtype.name, found.dim, found.shard_num)
    wants = (*(each.name for each in checked_dtypes(keys, values)), dim, len(device_names(devices)))
    if has != wants:
        raise ValueError(
            f"Variable {found.name!r} exists with (key_dtype, value_dtype, dim, shards) = {has}. "
            f"Received: {wants}. Give another name, or the same arguments, or begin a new session "
            "by tf.keras.backend.clear_session()."
        )
