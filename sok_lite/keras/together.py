"""Layers of one functional model look their ids up together: one call of the host, one exchange.

Keras calls the layers of a model one after the other, and each would look up by itself. The graph
of a functional model says before which layers get inputs of the model as they are: these are looked
up when the model is called, all at once, and each layer takes its rows when it is called in turn.
A layer whose ids other layers make, that is called in several places, or with arguments of its own,
looks up by itself as before, and so does one of a model that is a class of a program's own.
"""

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sok_lite.bridge.keras import held, hooks
from sok_lite.keras.features import Feature, rows_of

# Public: what makes the functions that a model's `fit`, `evaluate` and `predict` run.
MAKES_FUNCTIONS = ("make_train_function", "make_test_function", "make_predict_function")
CALLS = "call"  # of functional models


class _Place(NamedTuple):
    """Where the graph of a model calls a layer.

    Attributes:
      inputs: weak references to what stands for its ids, of each feature.
      is_plain: whether it is called with nothing but ids.
    """

    inputs: "Sequence[weakref.ref[Any]]"
    is_plain: bool


class _Prepared(NamedTuple):
    """What was looked up for a layer.

    Attributes:
      ids, rows: of each of its features.
    """

    ids: Sequence[Any]
    rows: Sequence[Any]


# Of each layer, where it is called: Keras has no public name for that.
_places: "weakref.WeakKeyDictionary[Any, list[_Place]]" = weakref.WeakKeyDictionary()
_calling = threading.local()


def look_up_together(name: str, package: Any) -> None:
    """Has functional models of a Keras look up together, from the first `fit` or the like on."""
    for method in MAKES_FUNCTIONS:
        hooks.around(package.Model, method, _making)


def note_place(layer: Any, inputs: Sequence[Any], is_plain: bool) -> None:
    """Notes where a layer is called, if inputs of a model stand for ids.

    Args:
      inputs: of each feature.
      is_plain: whether nothing else was given.
    """
    if all(hasattr(each, "_keras_history") for each in inputs):
        place = _Place([weakref.ref(each) for each in inputs], is_plain)
        _places.setdefault(layer, []).append(place)


def prepared_rows(layer: Any, ids: Sequence[Any]) -> Sequence[Any] | None:
    """Returns the rows of each feature of a layer that were looked up for this call; None: none.

    Args:
      ids: of each feature, as Keras gives them.
    """
    prepared = getattr(_calling, "prepared", {}).pop(id(layer), None)
    if prepared is None or not all(map(_are_same, ids, prepared.ids)):
        return None
    rows: Sequence[Any] = prepared.rows
    return rows


def _are_same(ids: Any, prepared: Any) -> bool:
    if ids is prepared:
        return True
    are_dense = isinstance(ids, tf.Tensor) and isinstance(prepared, tf.Tensor)
    return are_dense and ids.dtype == prepared.dtype and _sizes(ids) == _sizes(prepared)


def _sizes(tensor: tf.Tensor) -> Any:
    return None if tensor.shape.rank is None else tensor.shape.as_list()


# ---- around methods of models --------------------------------------------------------------------


def _making(call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    for model in [self, *held.layers_in(self)]:
        owner = hooks.owner_of(type(model), CALLS)
        is_theirs = owner is not None and owner.__module__.split(".")[0] in held.PACKAGES
        if is_theirs and getattr(model, "inputs", None) and len(_shared(model)) > 1:
            hooks.around(type(model), CALLS, _looking_up)
    return call(self, *args, **kwargs)


def _looking_up(call: Any, self: Any, inputs: Any, /, *args: Any, **kwargs: Any) -> Any:
    outer = getattr(_calling, "prepared", {})
    training = args[0] if args else kwargs.get("training")
    _calling.prepared = _prepared(self, inputs, training)
    try:
        return call(self, inputs, *args, **kwargs)
    finally:
        _calling.prepared = outer


def _shared(model: Any) -> list[tuple[Any, _Place]]:
    """Returns the layers of a model that get inputs of the model as they are, and how."""
    inputs = {id(each) for each in model.inputs}
    found = []
    for layer in model.layers:
        (place, *others) = _places.get(layer, [None]) if hasattr(layer, "features_of") else [None]
        if place is None or others or not place.is_plain:
            continue
        if all(id(each()) in inputs for each in place.inputs):
            found.append((layer, place))
    return found


def _prepared(model: Any, inputs: Any, training: Any) -> dict[int, _Prepared]:
    values = _by_input(model, inputs)
    chosen: list[tuple[Any, list[Any]]] = []
    for layer, place in _shared(model) if values else []:
        ids = [values.get(id(each())) for each in place.inputs]
        if not any(each is None for each in ids):
            chosen.append((layer, ids))
    if len(chosen) < 2:
        return {}
    features: list[Feature] = [each for layer, _ in chosen for each in layer.features_of()]
    flat = [each for _, ids in chosen for each in ids]
    rows = iter(rows_of(features, flat, [None] * len(flat), training))
    return {id(layer): _Prepared(ids, [next(rows) for _ in ids]) for layer, ids in chosen}


def _by_input(model: Any, inputs: Any) -> dict[int, Any]:
    """Returns what a model is called with, by the id of the input that it is for."""
    names = model.input
    if isinstance(names, Mapping):
        if not isinstance(inputs, Mapping) or not names.keys() <= inputs.keys():
            return {}
        pairs = [(names[name], inputs[name]) for name in names]
    elif isinstance(names, (list, tuple)):
        if not isinstance(inputs, (list, tuple)) or len(inputs) != len(names):
            return {}
        pairs = list(zip(names, inputs, strict=True))
    else:
        pairs = [(names, inputs)]
    return {id(name): _as_keras_gives(name, value) for name, value in pairs}


def _as_keras_gives(name: Any, value: Any) -> Any:
    """Returns a value as a layer gets it that has an input of a model; None: it is not known how.

    A functional model casts to the dtype of its input, and adds or drops a last dimension of 1.
    """
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        return value
    if not isinstance(value, tf.Tensor) or value.shape.rank is None:
        return None
    wanted = tf.as_dtype(name.dtype)
    if value.dtype != wanted:
        if not (value.dtype.is_integer and wanted.is_integer):
            return None
        value = tf.cast(value, wanted)
    rank, last = len(name.shape), name.shape[-1] if len(name.shape) else None
    if value.shape.rank == rank + 1 and value.shape[-1] == 1:
        return tf.squeeze(value, -1)
    if value.shape.rank == rank - 1 and last == 1:
        return tf.expand_dims(value, -1)
    return value if value.shape.rank == rank else None
