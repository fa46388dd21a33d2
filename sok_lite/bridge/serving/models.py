"""The kinds of exported models: a function, a tf.Module, or a Keras model."""

import gc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from sok_lite.bridge.keras.called import first_call_specs
from sok_lite.bridge.serving.signature import Signature, checked_signature, names_by_place
from sok_lite.bridge.tf_private import (
    CHILDREN,
    FUNCTION_CACHE,
    INPUTS_OF_MODELS,
    UnknownArgument,
)


def function_of(model_or_fn: Any, signature: Any) -> tuple[Callable[..., Any], Signature]:
    """Returns the served function and its arguments; raises TypeError or ValueError."""
    if not callable(model_or_fn):
        raise TypeError(
            "`model_or_fn` must be a function, a tf.Module with __call__, or a model of Keras. "
            f"Received: {type(model_or_fn).__name__}."
        )
    if _is_keras_model(model_or_fn):
        model = model_or_fn

        def predict(*args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs, training=False)

        if signature is None:
            return predict, _signature_of_model(model, "signature")
        return predict, checked_signature(model.call, signature)
    function = model_or_fn.__call__ if isinstance(model_or_fn, tf.Module) else model_or_fn
    chosen = getattr(function, "input_signature", None) if signature is None else signature
    if chosen is None:
        raise ValueError(
            "`signature` must say what the function takes, such as [tf.TensorSpec([None], "
            "tf.int64)]. Received: None, and a function without an input_signature."
        )
    return function, checked_signature(function, chosen)


def functions_of(model: Any, signatures: Any) -> dict[str, tuple[Callable[..., Any], Signature]]:
    """Returns the signatures of a Keras model, from those of `tf.saved_model.save`.

    None (the model is served), a tf.function with an input_signature, a concrete function of a
    tf.function, or a dict of these by name. Raises TypeError for others, ValueError if the model's
    inputs are unknown, or the tf.function of a concrete function is gone.
    """
    if signatures is None:
        function, _ = function_of(model, [])
        return {"serving_default": (function, _signature_of_model(model, "signatures"))}
    named = signatures if isinstance(signatures, Mapping) else {"serving_default": signatures}
    return {name: _to_retrace(name, function) for name, function in named.items()}


def _to_retrace(name: str, function: Any) -> tuple[Callable[..., Any], Signature]:
    """Returns the function of a signature, to be traced again for saving."""
    if isinstance(function, tf.types.experimental.ConcreteFunction):
        whole = _function_with(function)
        if whole is None:
            raise ValueError(
                "A concrete function is traced anew where it is saved, and the tf.function that it "
                f"is of is gone. Received: {name}={function!r}. Keep that, or give it itself, with "
                "an input_signature."
            )
        return _of_tensors(name, whole, *_arguments_of(function))
    if getattr(function, "input_signature", None) is None:
        raise TypeError(
            "A signature must be a tf.function with an input_signature, or a concrete function: "
            f"it is traced anew where it is saved. Received: {name}={function!r}."
        )
    return function_of(function, None)


def _arguments_of(concrete: Any) -> tuple[list[Any], dict[str, Any]]:
    """Returns the arguments of a concrete function, positional and by name: specs and values.

    Its `structured_input_signature` lacks objects other than tensors; its type has them.
    """
    args, kwargs = concrete.structured_input_signature
    parameters = concrete.function_type.parameters

    def known(argument: Any, parameter: Any) -> Any:
        is_known = not isinstance(argument, UnknownArgument)
        return argument if is_known else parameter.type_constraint.placeholder_value(None)

    in_order = list(parameters.values())[: len(args)]
    in_order += [None] * (len(args) - len(in_order))  # `*args` are one parameter
    by_place = [known(*each) for each in zip(args, in_order, strict=True)]
    return by_place, {name: known(each, parameters.get(name)) for name, each in kwargs.items()}


def _of_tensors(
    name: str, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[..., Any], Signature]:
    """Returns a function of the tensor arguments only, and its signature.

    The arguments are specs, structures of specs, or Python values, such as the model or a flag,
    with which the function is always called. Raises TypeError if one mixes them.
    """
    names = names_by_place(function, len(args))
    places = [i for i, each in enumerate(args) if _has_specs(name, names[i], each)]
    taken = {key: each for key, each in kwargs.items() if _has_specs(name, key, each)}
    signature = Signature(
        tuple(_without_places(args[i]) for i in places),
        {key: _without_places(each) for key, each in taken.items()},
        [names[i] for i in places],
    )
    if len(places) + len(taken) == len(args) + len(kwargs):
        return function, signature

    def of_tensors(*tensors: Any, **named: Any) -> Any:
        by_place = list(args)
        for i, tensor in zip(places, tensors, strict=True):
            by_place[i] = tensor
        return function(*by_place, **{**kwargs, **named})

    return of_tensors, signature


def _has_specs(name: str, argument_name: str, argument: Any) -> bool:
    """Whether an argument of a signature's function consists of specs; TypeError if in part."""
    are_specs = [isinstance(each, tf.TypeSpec) for each in tf.nest.flatten(argument)]
    if any(are_specs) and not all(are_specs):
        raise TypeError(
            "An argument of a signature's function must be tensors, or a value of Python. "
            f"Received: {name}, whose {argument_name!r} has both: {argument!r}."
        )
    return any(are_specs)


def _without_places(argument: Any) -> Any:
    """Returns the specs of a structure without the names that TensorFlow derives from positions."""

    def nameless(spec: Any) -> Any:
        is_plain = isinstance(spec, tf.TensorSpec)
        return tf.TensorSpec(spec.shape, spec.dtype) if is_plain else spec

    return tf.nest.map_structure(nameless, argument) if tf.nest.is_nested(argument) else argument


def _function_with(concrete: Any) -> Any:
    """Returns the tf.function of a concrete one, whose graph uses live tables; None if gone."""
    kind = tf.types.experimental.PolymorphicFunction
    functions = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    for each in functions:
        if any(made is concrete for made in getattr(each, FUNCTION_CACHE).values()):
            return each
    return None


def resources_in(root: Any) -> list[Any]:
    """Returns what TensorFlow saves with a function, such as lookup tables.

    They have a resource and are not variables. They are found among a model's tracked objects, the
    object of a method, and a function's closure and globals.
    """
    return [each for each in _reachable(root) if hasattr(type(each), "resource_handle")]


def _reachable(root: Any) -> Iterator[Any]:
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        children = None if inspect.isclass(each) else getattr(each, CHILDREN, None)
        if children is not None:
            yield each
            if not isinstance(each, tf.Variable):
                waiting += children().values()
        if not inspect.isclass(each) and not inspect.ismodule(each):
            waiting += _references_of(each)


def _references_of(function: Any) -> list[Any]:
    """Returns the objects that a function belongs to or refers to."""
    if inspect.ismethod(function):
        # The object of a tf.function's method is a stand-in with the real one as `target`.
        owner = function.__self__
        return [function.__func__, owner, getattr(owner, "target", None)]
    if inspect.isfunction(function):
        outside = inspect.getclosurevars(function)
        named = [*outside.nonlocals.values(), *outside.globals.values()]
        return [*named, getattr(function, "__wrapped__", None)]
    if isinstance(function, partial):
        return [function.func, *function.args, *function.keywords.values()]
    if isinstance(function, tf.types.experimental.PolymorphicFunction):
        return [function.python_function]
    return []


def _is_keras_model(model: Any) -> bool:
    return any(
        base.__name__ == "Model" and base.__module__.partition(".")[0] in ("keras", "tf_keras")
        for base in type(model).__mro__
    )


def _signature_of_model(model: Any, argument: str) -> Signature:
    """Returns the declared inputs of a model, or those of its first call.

    `argument` is named in the error if neither is known.
    """
    structures = (getattr(model, name, None) for name in INPUTS_OF_MODELS.values())
    inputs = next((each for each in structures if each is not None), None)
    if inputs is None:
        inputs = getattr(model, "inputs", None)
        inputs = inputs[0] if isinstance(inputs, (list, tuple)) and len(inputs) == 1 else inputs
    if inputs is None:
        called = first_call_specs(model)
        if called is None:
            raise ValueError(
                f"The model {model.name!r} does not say what it takes: it has no `inputs`, and was "
                f"not called with tensors yet. Call it on a batch, or give `{argument}`, with "
                "specs such as tf.TensorSpec([None, 3], tf.int64)."
            )
        return Signature(*called, names_by_place(model.call, len(called[0])))
    specs = tf.nest.map_structure(_spec_of, inputs)
    return Signature((specs,), {}, ["inputs"])


def _spec_of(tensor: Any) -> Any:
    """Returns the spec of an input of a model."""
    dtype = tf.as_dtype(tensor.dtype)
    if getattr(tensor, "sparse", False):
        return tf.SparseTensorSpec(tensor.shape, dtype)
    spec = getattr(tensor, "type_spec", None)  # of tf_keras
    if isinstance(spec, (tf.RaggedTensorSpec, tf.SparseTensorSpec)):
        return spec
    if getattr(tensor, "ragged", False):
        return tf.RaggedTensorSpec(tensor.shape, dtype)
    return tf.TensorSpec(tensor.shape, dtype, tensor.name)
