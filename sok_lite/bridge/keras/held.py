"""The tables in a Keras model, and the optimizers that train them.

Works with Keras 3, tf_keras, both or neither; imports none.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

PACKAGES = ("keras", "tf_keras")
CONTAINERS = (dict, list, tuple, set, frozenset)

# Attribute in the dict of an optimizer that is built for tables: weak references to its variables.
BUILT_FOR = "_sok_lite_built_for"

# The layer class of each guarded Keras, also the base of its models.
_layers: tuple[type, ...] = ()
# Classes of optimizers that train tables.
trainers: set[type] = set()


def register_layers(cls: type) -> None:
    """Adds a Keras' layer class to those that are searched for tables."""
    global _layers
    _layers = (*_layers, cls)


def is_layer(value: Any) -> bool:
    """Whether an object is a layer or model of a guarded Keras."""
    return isinstance(value, _layers)


def trains_tables(optimizer: Any) -> bool:
    """Whether an optimizer trains tables."""
    return not trainers.isdisjoint(type(optimizer).__mro__)


def is_horovods(cls: type) -> bool:
    """Whether a class of optimizers or callbacks is Horovod's."""
    return any(base.__module__.split(".")[0] == "horovod" for base in cls.__mro__)


def may_hold(value: Any) -> bool:
    """Whether an object is a table, or holds objects and is not a plain container."""
    marks = ("left_out_by", "tables_held")
    return isinstance(value, (tf.Module, *_layers)) or any(hasattr(type(value), m) for m in marks)


def tables_in(root: Any, by_each: bool = False) -> Iterator[tuple[Any, Any]]:
    """Yields (innermost layer, table) for each table that an object holds.

    `by_each`: a table in several layers comes with each of them.
    """
    for layer, table in _search(root, lambda value: hasattr(type(value), "left_out_by"), by_each):
        if package_of(layer) in {*table.left_out_by, None}:
            yield layer, table


def kept_tables(root: Any) -> list[Any]:
    """Returns the tables that an object holds and that their layers keep, each once."""
    found = {id(table): table for _, table in tables_in(root) if is_kept(table)}
    return list(found.values())


def is_kept(table: Any) -> bool:
    """Whether the layer of a table keeps it among its weights."""
    return getattr(type(table), "tracked_as_weight", False)


def optimizers_in(model: Any) -> list[Any]:
    """Returns the optimizers in a model, its layers and its inner models."""
    return [optimizer for _, optimizer in _search(model, trains_tables)]


def variables_of(optimizer: Any) -> list[Any]:
    """Returns the variables of an optimizer; also Nadam's product, which Keras 3 may not list."""
    variables = getattr(optimizer, "variables", [])
    found = list(variables() if callable(variables) else variables)
    within = getattr(getattr(optimizer, "inner_optimizer", None), "__dict__", {})
    for value in list(within.values()):
        is_variable = hasattr(value, "assign") and hasattr(value, "shape")
        if is_variable and not any(value is other for other in found):
            found.append(value)
    return found


def layers_in(model: Any) -> list[Any]:
    """Returns the layers and models that a model holds."""
    found: list[Any] = []

    def is_noted(value: Any) -> bool:
        if is_layer(value) and value is not model:
            found.append(value)
        return False  # search it too

    for _ in _search(model, is_noted):
        pass
    return found


def _search(
    root: Any, is_sought: Callable[[Any], bool], by_each: bool = False
) -> Iterator[tuple[Any, Any]]:
    """Yields (innermost layer, object) for each match in an object, or the object itself.

    Searches layers, tf.Modules, lists, tuples, sets, dicts, and `tables_held` of other objects.
    """
    seen: set[Any] = set()
    stack = [(root, root)]
    while stack:
        layer, value = stack.pop()
        place = (id(layer), id(value)) if by_each else id(value)
        if place in seen:
            continue
        seen.add(place)
        if is_sought(value):
            yield layer, value
        else:
            inner = value if is_layer(value) else layer
            stack.extend((inner, item) for item in _items(value))


def _items(value: Any) -> list[Any]:
    if hasattr(type(value), "tables_held"):
        return list(value.tables_held)
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, CONTAINERS):
        return list(value)
    if isinstance(value, (tf.Module, *_layers)):
        return list(vars(value).values())
    return []


def package_of(layer: Any) -> str | None:
    """Returns the name of a layer's Keras; None if it has none."""
    modules = (base.__module__.split(".")[0] for base in type(layer).__mro__)
    return next((module for module in modules if module in PACKAGES), None)


def saves_itself(layer: Any) -> bool:
    """Whether a layer defines by its own code what is saved."""
    method = getattr(type(layer), "save_own_variables", None)
    module = getattr(method, "__module__", None) or ""
    return method is not None and module.split(".")[0] not in PACKAGES


def names_of(tables: Sequence[Any]) -> str:
    """Returns the names of tables, for errors."""
    return ", ".join(sorted({repr(table.name) for table in tables}))
