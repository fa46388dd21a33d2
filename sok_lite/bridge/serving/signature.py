"""Inputs and outputs of a served function, and the named plain tensors of its signature.

TensorFlow Serving and TF1 know tensors only by name. There, a ragged or sparse argument is several
tensors: `<name>_values` and `<name>_row_splits`, or `<name>_indices`, `<name>_values` and
`<name>_dense_shape`.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

_SPECS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)
_NO_WORD = re.compile(r"[^A-Za-z0-9_]+")


class Signature(NamedTuple):
    """The arguments of a function: specs or structures of specs; `names` of positional ones."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    names: list[str]

    def flat(self) -> dict[str, tf.TensorSpec]:
        """Returns the specs of the plain tensors by name; raises ValueError for equal names."""
        parts = plain_parts(self._leaves())
        return {name: tf.TensorSpec(spec.shape, spec.dtype, name) for name, spec in parts.items()}

    def pack(self, tensors: Mapping[str, tf.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments from plain tensors by name."""
        flat = [tensors[name] for name in self.flat()]
        arguments = (self.args, dict(self.kwargs))
        return tf.nest.pack_sequence_as(arguments, flat, expand_composites=True)

    def _leaves(self) -> list[tuple[str, Any]]:
        named = [*zip(self.names, self.args, strict=True)]
        named += [(name, self.kwargs[name]) for name in sorted(self.kwargs)]
        return [leaf for name, argument in named for leaf in named_leaves(name, argument)]


def checked_signature(function: Callable[..., Any], signature: Any) -> Signature:
    """Returns the signature of a function from a program's description.

    A spec, a list of specs or structures of them, by position, or a dict of these by argument.
    Raises TypeError if something in it is not a spec.
    """
    if isinstance(signature, Mapping):
        args, kwargs = (), {name: as_specs(spec) for name, spec in signature.items()}
    else:
        is_list = isinstance(signature, (list, tuple))
        args = tuple(as_specs(each) for each in (signature if is_list else [signature]))
        kwargs = {}
    return Signature(args, kwargs, names_by_place(function, len(args)))


def as_specs(structure: Any) -> Any:
    """Returns a structure of specs, or raises TypeError."""
    for leaf in tf.nest.flatten(structure):
        if not isinstance(leaf, _SPECS):
            raise TypeError(
                "`signature` must be made of tf.TensorSpec, tf.RaggedTensorSpec and "
                f"tf.SparseTensorSpec. Received: {leaf!r}."
            )
    return structure


def named_leaves(name: str, structure: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Returns the leaves of a structure in the order of tf.nest, each with a name.

    Items of a dict are named by keys, with a prefix, items of a list `<name>_0` and so on.
    """
    if isinstance(structure, Mapping):
        named = [(f"{prefix}{key}", structure[key]) for key in sorted(structure)]
    elif isinstance(structure, (list, tuple)):
        named = [(f"{name}_{i}", part) for i, part in enumerate(structure)]
    else:
        own = getattr(structure, "name", None) if isinstance(structure, tf.TensorSpec) else None
        return [(_NO_WORD.sub("_", str(own or name)), structure)]
    return [leaf for each, part in named for leaf in named_leaves(each, part, f"{each}_")]


def plain_parts(leaves: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the plain tensors, or specs, of named ones; ragged and sparse ones have several.

    Raises ValueError for equal names.
    """
    result: dict[str, Any] = {}
    for name, value in leaves:
        for part, plain in parts_of(name, value).items():
            if part in result:
                raise ValueError(
                    f"Two tensors of the signature are named {part!r}. Give each result another "
                    "key, and each TensorSpec a `name` of its own."
                )
            result[part] = plain
    return result


def parts_of(name: str, value: Any) -> dict[str, Any]:
    """Returns the plain tensors, or specs, of one that may be ragged or sparse."""
    flat = tf.nest.flatten(value, expand_composites=True)
    if isinstance(value, (tf.SparseTensor, tf.SparseTensorSpec)):
        endings = ["_indices", "_values", "_dense_shape"]
    elif isinstance(value, (tf.RaggedTensor, tf.RaggedTensorSpec)):
        splits = [f"_row_splits_{i}" for i in range(1, len(flat) - 1)]
        endings = ["_values", "_row_splits", *splits]
    else:
        endings = [""]
    return {name + ending: part for ending, part in zip(endings, flat, strict=True)}


def flat_outputs(outputs: Any) -> dict[str, tf.Tensor]:
    """Returns the outputs of a function as plain tensors by name.

    Raises TypeError for other outputs, ValueError for equal names.
    """
    is_named = isinstance(outputs, Mapping)
    structure = outputs if is_named or isinstance(outputs, (list, tuple)) else [outputs]
    leaves = named_leaves("output", structure)
    for _, leaf in leaves:
        if leaf is None or not (tf.is_tensor(leaf) or tf.nest.is_nested(leaf)):
            raise TypeError(
                "A function for serving must give tensors: one, or a list or dict of them. "
                f"Received: {leaf!r}."
            )
    return {name: tf.identity(tensor) for name, tensor in plain_parts(leaves).items()}


def names_by_place(function: Callable[..., Any], count: int) -> list[str]:
    """Returns the names of the first arguments of a function."""
    try:
        parameters: Sequence[Any] = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):
        parameters = []
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [each.name for each in parameters if each.kind in by_place][:count]
    return names + [f"input_{i}" for i in range(len(names), count)]
