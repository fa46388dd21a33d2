"""`get_variable` and layers of Keras: the variable of a name, made where it is new."""

import itertools
import threading
import warnings
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
from sok_lite.dynamic_embedding.variable import Variable, listed, of_graph

# What a variable that exists must have of what is asked for.
_COMPARED = ("key_dtype", "value_dtype", "dim", "devices")
_naming = threading.RLock()
# Of eager mode, since the last session began. Those of a TF1 graph are in its collection.
_latest: dict[str, Variable] = {}


class _Users:
    """The layers that have one variable, and a number by which configs say that it is one."""

    def __init__(self) -> None:
        self.number = next(_numbers)
        self.layers: weakref.WeakSet[Any] = weakref.WeakSet()


# Of layers that a program gives no name.
_DEFAULT_NAMES = ("DynamicEmbeddingLayer", "SlotDynamicEmbeddingLayer")
_numbers = itertools.count(1)
_users: weakref.WeakKeyDictionary[Variable, _Users] = weakref.WeakKeyDictionary()


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
      others: of the `Variable` that is made: types, `dim`, initializer and the like.

    Raises:
      ValueError: the variable exists with another dtype, dim, or number of shards; in a TF1 graph
        also where it exists and the scope does not reuse. A new one is made where it does.

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
    """Returns the variable of a layer of Keras: all layers of one name in a session share it.

    A thread that makes its first layer begins a session of its own. What is made of a config, as
    `load_model` does, shares what was shared by what was saved, and nothing else.

    Args:
      layer: that is to have it.
      name: of the variable.
      **arguments: of the `Variable` that is made, as `get_variable` takes them.

    Raises:
      ValueError: the variable exists with another dtype, dim, or number of shards.
      NotImplementedError: `clone_model` makes the layer, and would copy no row.
    """
    guard.tell(share_in_copies)
    guard.refuse_clone()
    made = made_so_far()
    if made is None and is_loading():
        made = {}  # of a model whose from_config() does not call that of Keras
    if made is None:
        variable = _by_name(name, arguments, joins=False)
        if variable in _users and layer.name in _DEFAULT_NAMES:
            warnings.warn(
                f"Layers of the name {layer.name!r}, the default, share one table, as in TFRA: an "
                "id has the same row in all of them. Give each layer a name of its own, or call "
                "tf.keras.backend.clear_session() before a model is built anew.",
                stacklevel=4,
            )
    elif name in made:
        variable = made[name]
        _check_agrees(variable, arguments)
    else:
        variable = made[name] = Variable(name=name, **arguments)
    _users.setdefault(variable, _Users()).layers.add(layer)
    return variable


def number_of_shared(variable: Variable) -> int | None:
    """Returns a number of a variable that several layers have, the same for each; else None."""
    users = _users.get(variable)
    return users.number if users is not None and len(users.layers) > 1 else None


def _by_name(name: str, arguments: dict[str, Any], joins: bool) -> Variable:
    """Returns the variable of a name within the scope, or makes it.

    Args:
      joins: whether a thread that asks for the first time is of the session that began last, or
        begins one.
    """
    scope = tf.compat.v1.get_variable_scope()
    is_short = arguments["short_file_name"] or not scope.name
    full_name = name if is_short else f"{scope.name}/{name}"
    is_eager = tf.executing_eagerly() or tf.inside_function()
    with _naming:
        names = _names(joins) if is_eager else {}
        found = names.get(full_name) if is_eager else of_graph(full_name)
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
    """Returns the variables of eager mode by name. The caller has the lock.

    Args:
      joins: whether a thread that asks for the first time is of the session that began last, or
        begins one of its own.
    """
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
    """Raises ValueError where a variable is not what a program asks for by its name."""
    keys, values, dim, devices = (arguments[each] for each in _COMPARED)
    has = (found.key_dtype.name, found.value_dtype.name, found.dim, found.shard_num)
    wants = (*(each.name for each in checked_dtypes(keys, values)), dim, len(listed(devices)))
    if has != wants:
        raise ValueError(
            f"Variable {found.name!r} exists with (key_dtype, value_dtype, dim, shards) = {has}. "
            f"Received: {wants}. Give another name, or the same arguments, or begin a new session "
            "by tf.keras.backend.clear_session()."
        )
