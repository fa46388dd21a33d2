"""Fuses the lookups of a functional model's layers: one host call, one exchange.

Keras calls the layers of a model one by one, and each would look up by itself. The graph of a
functional model shows which layers receive model inputs unchanged: these are looked up together
when the model is called, and each layer takes its rows when its turn comes. A layer whose ids other
layers make, or that is called more than once or with further arguments, looks up by itself; so do
models and layer classes of the program's own. Which layers share depends on the model alone, so all
ranks do the same.
"""

import operator
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from sok_lite.bridge import tf_private
from sok_lite.bridge.keras import hooks
from sok_lite.keras.features import Feature, rows_of

# A call of a layer in the model graph: weak references to the symbolic inputs.
_Inputs: TypeAlias = Sequence[weakref.ref[Any]]
# By layer id: the ids and the rows of each feature.
_Prepared: TypeAlias = dict[int, tuple[Sequence[Any], Sequence[Any]]]

# The calls of each layer; None: with more than ids. Keras has no public name for that.
_places: "weakref.WeakKeyDictionary[Any, list[_Inputs | None]]" = weakref.WeakKeyDictionary()
# Layer classes that only look up what they are called with; no subclasses.
plain: set[type] = set()
_calling = threading.local()


def look_up_together(name: str, package: Any) -> None:
    """Fuses the lookups of the functional models of a Keras."""
    # Their class has no public name.
    functional = tf_private.private(tf_private.FUNCTIONAL_MODELS[name], "Functional")
    hooks.around(functional, "call", _call_with_lookups)


def are_symbolic(inputs: Any) -> bool:
    """Whether inputs are symbolic: a model is being built, and no layer is called with ids."""
    values = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    first = next(iter(values), None) if isinstance(values, (list, tuple)) else values
    return hasattr(first, "_keras_history")


def note_call(layer: Any, inputs: Sequence[Any], is_plain: bool) -> None:
    """Records a call of a layer with symbolic inputs; `is_plain`: and no other argument."""
    if all(hasattr(each, "_keras_history") for each in inputs):
        place = [weakref.ref(each) for each in inputs] if is_plain else None
        _places.setdefault(layer, []).append(place)


def prepared_rows(layer: Any, ids: Sequence[Any]) -> Sequence[Any] | None:
    """Returns the rows of a layer's features that were looked up for this call, or None.

    Args:
      ids: of each feature, the very objects that were looked up.
    """
    every: _Prepared = getattr(_calling, "prepared", {})
    if id(layer) not in every or not all(map(operator.is_, ids, every[id(layer)][0])):
        return None
    return every.pop(id(layer))[1]


# ---- around a method of models -------------------------------------------------------------------


def _call_with_lookups(call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    shared = _fused_layers(self) if _places else []
    if len(shared) < 2 or not (args or "inputs" in kwargs):
        return call(self, *args, **kwargs)
    inputs = args[0] if args else kwargs.pop("inputs")
    training = args[1] if len(args) > 1 else kwargs.get("training")
    inputs, values = _convert_inputs(self, inputs)
    outer = getattr(_calling, "prepared", {})
    _calling.prepared = _look_up(shared, values, training)
    try:
        return call(self, inputs, *args[1:], **kwargs)
    finally:
        _calling.prepared = outer


def _fused_layers(model: Any) -> list[tuple[Any, _Inputs]]:
    """Returns the layers that receive model inputs unchanged, with those inputs."""
    inputs = {id(each) for each in model.inputs}
    found = []
    for layer in model.layers:
        if type(layer) in plain and len(_places.get(layer, ())) == 1:
            (place,) = _places[layer]
            if place is not None and all(id(each()) in inputs for each in place):
                found.append((layer, place))
    return found


def _look_up(
    shared: Sequence[tuple[Any, _Inputs]], values: Mapping[int, Any], training: Any
) -> _Prepared:
    """Looks up for layers, if there are at least two; values are by id of the symbolic input."""
    chosen: list[tuple[Any, list[Any]]] = []
    for layer, place in shared:
        ids = [values.get(id(each())) for each in place]
        if not any(each is None for each in ids):
            chosen.append((layer, ids))
    if len(chosen) < 2:
        return {}
    features: list[Feature] = [each for layer, _ in chosen for each in layer.features_of()]
    flat = [each for _, ids in chosen for each in ids]
    rows = iter(rows_of(features, flat, [None] * len(flat), training))
    return {id(layer): (ids, [next(rows) for _ in ids]) for layer, ids in chosen}


def _convert_inputs(model: Any, inputs: Any) -> tuple[Any, dict[int, Any]]:
    """Returns inputs in the form that Keras passes to layers, and values by symbolic input.

    An input whose conversion by Keras is unknown stays as it is and is not among the values.
    """
    names, values = model.input, {}

    def convert(name: Any, value: Any) -> Any:
        converted = _convert_input(name, value) if hasattr(name, "dtype") else None
        if converted is None:
            return value
        values[id(name)] = converted
        return converted

    if isinstance(names, Mapping) and isinstance(inputs, Mapping):
        known = {key: convert(names[key], inputs[key]) for key in inputs if key in names}
        return {**inputs, **known}, values
    if isinstance(names, (list, tuple)) and isinstance(inputs, (list, tuple)):
        if len(names) == len(inputs):
            return [convert(*each) for each in zip(names, inputs, strict=True)], values
    elif not isinstance(names, (Mapping, list, tuple)):
        return convert(names, inputs), values
    return inputs, values


def _convert_input(name: Any, value: Any) -> Any:
    """Returns a value as Keras passes it to a layer, or None if unknown.

    A functional model casts to the dtype of its input, and adds or drops a last dimension of 1.
    """
    wanted = tf.as_dtype(name.dtype)
    if isinstance(value, tf.RaggedTensor):
        return value if value.dtype == wanted and not getattr(name, "sparse", False) else None
    if not isinstance(value, tf.Tensor) or value.shape.rank is None:
        return None  # Keras may make sparse tensors dense
    if value.dtype != wanted:
        if tf.string in (value.dtype, wanted):
            return None
        value = tf.cast(value, wanted)
    rank, last = len(name.shape), name.shape[-1] if len(name.shape) else None
    if value.shape.rank == rank + 1 and value.shape[-1] == 1:
        return tf.squeeze(value, -1)
    if value.shape.rank == rank - 1 and last == 1:
        return tf.expand_dims(value, -1)
    return value if value.shape.rank == rank else None
