"""Has `tf.train.Checkpoint` find the tables that Keras 3 hides in lists and dicts of its layers."""

from collections.abc import Iterator
from typing import Any

from sok_lite.bridge.keras.held import CONTAINERS, is_layer, may_hold, names_of, tables_in
from sok_lite.bridge.tf_private import CHILDREN, TRACK


def have_all_tracked(method: str, checkpoint: Any, *_: Any, **__: Any) -> None:
    """Has what a checkpoint holds track the tables that Keras 3 hides in its lists and dicts.

    A table then has the name of the attribute and its places in there, joined by "-".

    Raises:
      NotImplementedError: a table that a layer holds would still be missing.
    """
    while hidden := _hidden_in(checkpoint):
        for owner, name, value in hidden:
            getattr(owner, TRACK)(value, name, overwrite=True)
    saved = saved_by(checkpoint)
    layers = [value for value in saved.values() if is_layer(value)]
    missing = [table for _, table in tables_in(layers) if id(table) not in saved]
    if missing:
        raise NotImplementedError(
            f"Checkpoint.{method.lstrip('_')}() would leave the rows of {names_of(missing)} out: "
            "TensorFlow does not find what holds them. Name them beside the model: "
            "tf.train.Checkpoint(model=model, tables=[...])."
        )


def _hidden_in(checkpoint: Any) -> list[tuple[Any, str, Any]]:
    """Returns tables, and layers with tables, that a checkpoint misses: owner, name and value."""
    saved = saved_by(checkpoint)
    return [
        (owner, name, value)
        for owner in saved.values()
        if is_layer(owner)
        for attribute, container in vars(owner).items()
        if isinstance(container, CONTAINERS)
        for name, value in _named(attribute, container)
        if id(value) not in saved and any(True for _ in tables_in(value))
    ]


def saved_by(checkpoint: Any) -> dict[int, Any]:
    """Returns what a checkpoint saves, by id."""
    saved: dict[int, Any] = {}
    stack = [checkpoint]
    while stack:
        value = stack.pop()
        if id(value) not in saved:
            saved[id(value)] = value
            stack += getattr(value, CHILDREN)().values()
    return saved


def _named(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the layers, modules and tables in lists and dicts, each with its place."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _named(f"{name}-{key}", item)
    elif isinstance(value, (list, tuple)):
        for place, item in enumerate(value):
            yield from _named(f"{name}-{place}", item)
    elif isinstance(value, (set, frozenset)):
        ordered = sorted(value, key=lambda item: str(getattr(item, "name", "")))
        yield from _named(name, ordered)
    elif may_hold(value):
        yield name, value
