"""Gradients of lookups, registered by operation type.

They use only the operation's inputs, outputs and attributes, so they work in branches, loops,
functions, and tapes around them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from sok_lite.bridge.host_call import refuse_replicas
from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.operation import Facts, OfGradient, gradient_operation, operation
from sok_lite.bridge.refusals import FORWARD_REFUSAL, is_called_from
from sok_lite.bridge.row_gradient import (
    is_out_of_a_loop,
    no_second_derivative,
    row_gradient,
    zero_or_refused,
)
from sok_lite.bridge.tf_private import FORWARDPROP, FuncGraph, could_possibly_record
from sok_lite.native.callbacks import source_of

# The outputs of a pooled lookup for its gradient, before the rows of weighted items: row numbers,
# received keys, and the `inverse` and `order` of several ranks. Numbers of 32 bits are stored as
# words of int64: only for int64 has a GPU all that loops and branches need.
OF_CONTEXT = (tf.int64,) * 4

# Attribute of the last output, an eager tensor, of a pooled lookup or of its gradient.
_GRADIENT = "_sok_lite_gradient"


def note_gradient(outputs: list[tf.Tensor], gradient: OfGradient) -> None:
    """Stores the callback of an eager operation's gradient, for a tape."""
    setattr(outputs[-1], _GRADIENT, gradient)


def _gradient_of_call(op: Any) -> OfGradient | None:
    """Returns the callback noted for an eager lookup, also inside a graph; else None."""
    gradient: OfGradient | None = getattr(op.outputs[-1], _GRADIENT, None)
    return gradient


@tf.RegisterGradient("SokLookup")
@tf.RegisterGradient("SokLookupInOrder")
def _gradient(op: Any, *gradients: Any) -> list[Any]:
    """Returns the gradients of the tables and of the weights."""
    facts, is_pooled = Facts.of(op), op.get_attr("J") > 0
    what = _what(op, facts) if is_pooled else f"a lookup in {facts.names[0]!r}"
    refuse_replicas(f"The gradient of {what}")
    if not tf.executing_eagerly() and is_called_from(FORWARDPROP):
        # It would differentiate the outputs of this gradient, which are keys.
        raise NotImplementedError(FORWARD_REFUSAL)
    if is_pooled:
        return _of_pooled(op, facts, what, *gradients)
    return _of_rows(op, facts, gradients[0])


def _of_rows(op: Any, facts: Facts, gradient: Any) -> list[Any]:
    """Returns the gradient of one table: its keys as passed, and the gradients of their rows."""
    num_handles = op.get_attr("N")
    rows, keys = op.outputs[0], op.inputs[num_handles + 1]
    flat_grads = tf.cast(tf.reshape(gradient, [-1, facts.dims[0]]), tf.float32)
    # A session may need no row for the gradient. The lookup must run all the same: else an update
    # would not find the key.
    is_pruned = not tf.executing_eagerly() and not tf.inside_function()
    with tf.control_dependencies([rows] if is_pruned else []):
        flat_keys = tf.cast(tf.reshape(keys, [-1]), facts.key_types[0])
    slices = _by_handles(facts, 0, flat_keys, flat_grads, distinct=False)
    return [*slices, *[None] * (len(op.inputs) - num_handles)]


@tf.RegisterGradient("SokValue")
def _of_all_rows(op: Any, _: Any, gradient: Any) -> list[Any]:
    """Returns the gradient of all rows of a table, for its own keys."""
    facts = Facts.of(op)
    row_grads = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
    slices = _by_handles(facts, 0, op.outputs[0], row_grads, distinct=False)
    return [*slices, *[None] * (len(op.inputs) - len(slices))]


def _of_pooled(op: Any, facts: Facts, what: str, *gradients: Any) -> list[Any]:
    """Returns the gradients of all tables, whose keys are distinct, and of the weights."""
    count, num_handles = len(facts.dims), op.get_attr("N")
    first, end = num_handles + 1, len(op.inputs) - op.get_attr("K")
    *outputs, told = op.outputs
    num_weighted = len(outputs) - count - len(OF_CONTEXT)
    weights = _weights(op, first, num_weighted)
    types = [tf.float32] * count + facts.key_types + [tf.float32] * num_weighted
    found = _run(
        op,
        num_handles,
        facts,
        what,
        gradients,
        [*op.inputs[first:end], *outputs[count:]],
        [*op.inputs[end:], told],
        types,
    )
    results: list[Any] = [None] * len(op.inputs)
    slices = []
    for i, dim in enumerate(facts.dims):
        rows, keys = found[i], found[count + i]
        if not tf.executing_eagerly():
            rows.set_shape([None, dim])
            keys.set_shape([None])
        slices += _by_handles(facts, i, keys, rows, distinct=True)
    results[:num_handles] = slices
    _set_gradients(results, op, weights, found[2 * count :])
    return results


@tf.RegisterGradient("SokStaticRows")
@tf.RegisterGradient("SokStaticRowsInOrder")
def _of_static(op: Any, *gradients: Any) -> list[Any]:
    """Returns the gradients by the rows that this rank has sent to others."""
    facts = Facts.of(op)
    what = _what(op, facts)
    refuse_replicas(f"The gradient of {what}")
    *rows, order, told = op.inputs[1:]
    types = [tf.float32] * len(rows)
    found = _run(op, 0, facts, what, gradients, [order], [told], types)
    results = [None] * len(op.inputs)
    _set_gradients(results, op, range(1, 1 + len(rows)), found)
    return results


def _what(op: Any, facts: Facts) -> str:
    """Returns the name of a pooled lookup, which is not an attribute of eager operations."""
    gradient = _gradient_of_call(op)
    names = ", ".join(map(repr, facts.names))
    return f"lookup_sparse in {names}" if gradient is None else gradient.what


def _weights(op: Any, first: int, count: int) -> list[int]:
    """Returns the positions of a lookup's weights: `count` float32 inputs from `first` on."""
    places = range(first, len(op.inputs))
    return [i for i in places if op.inputs[i].dtype == tf.float32][:count]


def _set_gradients(
    results: list[Any], op: Any, places: Sequence[int], found: Sequence[tf.Tensor]
) -> None:
    """Sets the gradients of some dense inputs."""
    for place, gradient in zip(places, found, strict=True):
        if not tf.executing_eagerly():
            gradient.set_shape(op.inputs[place].shape)
        results[place] = tf.cast(gradient, op.inputs[place].dtype)


def _run(
    op: Any,
    num_handles: int,
    facts: Facts,
    what: str,
    gradients: Sequence[Any],
    carried: list[tf.Tensor],
    numbers: list[tf.Tensor],
    types: list[tf.DType],
) -> list[tf.Tensor]:
    """Adds the operation of a gradient.

    Args:
      op: the lookup, with `num_handles` table resources.
      gradients: of all its outputs, the pooled rows of each table first.
      carried, numbers: inputs and outputs of the lookup that the gradient uses.
    """
    count, asks = len(facts.dims), f"The gradient of {what}"
    grads = [tf.cast(tf.convert_to_tensor(each), tf.float32) for each in gradients[:count]]
    several = other_ranks() is not None
    name = "sok_lookup_gradient_of_ranks" if several else "sok_lookup_gradient"
    inputs, call = [*grads, *carried], op.inputs[num_handles]
    gradient = _gradient_of_call(op)
    if gradient is None and several and not tf.inside_function():
        # In a TF1 graph a collective has its own place in the order of collectives.
        number = tf.get_static_value(call)
        gradient = None if number is None else source_of(int(number))
    with tf.control_dependencies(_refusals(gradients[count:])):
        if gradient is None:
            return gradient_operation(
                *(name, call, op.outputs[0].device, inputs, types, asks, facts, numbers),
                is_ordered=several,
            )
        found: list[tf.Tensor] = operation(
            *(name, None, gradient.run, inputs, types, gradient.backend, asks, facts),
            work=gradient.work,
            numbers=numbers,
            collective=gradient.collective,
            is_ordered=several,
            plan=gradient.plan,
        )
    if tf.executing_eagerly() and could_possibly_record():
        note_gradient(found, gradient)
    return found


def _by_handles(
    facts: Facts, number: int, keys: tf.Tensor, row_grads: tf.Tensor, distinct: bool
) -> list[Any]:
    """Returns the gradient of each resource of a table.

    For keys (n,) and row_grads (n, dim) float32; `distinct`: no key repeats.
    """
    count, name, dim = facts.handles_of[number], facts.names[number], facts.dims[number]
    if not facts.trainable[number] and not tf.executing_eagerly() and is_out_of_a_loop():
        return [None] * count  # an update would refuse it, and nobody asked for it
    if count == 1:
        return [row_gradient(name, keys, row_grads, dim, distinct)]
    # The parts of one table: TFPlus assigns keys to them by remainder.
    owners = tf.cast(tf.math.floormod(keys, count), tf.int32)
    pieces = (tf.dynamic_partition(each, owners, count) for each in (keys, row_grads))
    pairs = zip(*pieces, strict=True)
    return [row_gradient(name, its_keys, its_rows, dim, distinct) for its_keys, its_rows in pairs]


# ---- updates that take a gradient's inputs -------------------------------------------------------


class WholeGradient(NamedTuple):
    """All that the gradient of a pooled lookup returns, by the operation's inputs.

    Attributes:
      call, source: the number of the lookup's call, and the gradient's callback.
      inputs, numbers: of the gradient's operation.
      order: of the operation's tables, the index of each one's gradient.
    """

    call: int
    source: OfGradient
    inputs: list[tf.Tensor]
    numbers: list[tf.Tensor]
    order: list[int]


def whole_gradient(grads: Sequence[tf.IndexedSlices]) -> WholeGradient | None:
    """Returns what gradients in a function are computed from, so that TensorFlow can prune them.

    None unless they are all outputs of one operation, unchanged and so far used by nobody. Not in
    a TF1 graph, where a session may feed gradients.
    """
    graph, count = tf.compat.v1.get_default_graph(), len(grads)
    given = [_output(each) for each in (*(g.values for g in grads), *(g.indices for g in grads))]
    op = getattr(given[0], "op", None)
    if not isinstance(graph, FuncGraph) or op is None or op.type != "SokLookupGradient":
        return None
    if op.graph is not graph or op.control_inputs or len(op.outputs) != len(given):
        return None
    if any(each is None or each.op is not op for each in given):
        return None
    places = [each.value_index for each in given]
    order = sorted(range(count), key=places.__getitem__)
    if [places[i] for i in (*order, *(count + i for i in order))] != [*range(2 * count)]:
        return None
    number = tf.get_static_value(op.inputs[0])
    source = None if number is None else source_of(int(number))
    if not isinstance(source, OfGradient):
        return None
    inputs, end = op.inputs[1:], -op.get_attr("K")
    return WholeGradient(int(number), source, inputs[:end], inputs[end:], order)


def _output(tensor: Any) -> Any:
    """Returns what `row_gradient` was given for a tensor that nobody uses; None: another tensor."""
    op = getattr(tensor, "op", None)
    if op is None or op.type != "PlaceholderWithDefault" or tensor.consumers():
        return None
    return op.inputs[0]


# ---- second derivatives --------------------------------------------------------------------------


@tf.RegisterGradient("SokLookupGradient")
@tf.RegisterGradient("SokLookupGradientOfRanks")
@tf.RegisterGradient("SokLookupGradientOfRanksInOrder")
def _second(op: Any, *arrived: Any) -> list[Any]:
    """Rejects the derivative of a pooled lookup's gradient, which Python computes.

    A graph raises when it runs, and only for a derivative other than zero: in a function TensorFlow
    differentiates all outputs, needed or not, and passes zeros for the others.
    """
    text = no_second_derivative(_what(op, Facts.of(op)))
    if tf.executing_eagerly():
        raise NotImplementedError(text)
    with tf.control_dependencies([zero_or_refused(text, arrived)]):
        # The derivative by the rows of weighted items, outputs of the lookup, has to reach the
        # lookup's own gradient: `_refusals`.
        return [
            tf.identity(tf.zeros_like(each)) if each.dtype.is_floating else None
            for each in op.inputs
        ]


def _refusals(arrived: Any) -> list[tf.Tensor]:
    """Returns the tensors that may raise among derivatives by rows of weighted items, all zeros."""
    if tf.executing_eagerly():
        return []
    tensors = [each for each in arrived if isinstance(each, tf.Tensor) and hasattr(each, "op")]
    return [each for each in tensors if each.op.type != "ZerosLike"]
