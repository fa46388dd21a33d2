"""A lookup in the tables of all ranks, and its gradient, as TensorFlow sees them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from sok_lite.bridge.graph_gradient import custom_gradient
from sok_lite.bridge.host_call import from_function, host_call, on_device, refuse_replicas
from sok_lite.bridge.joined import cut, cut_rows, from_int64, join, joined_rows, shapes_of
from sok_lite.bridge.lookup_arguments import Argument, Facts, checked_arguments, joined_inputs
from sok_lite.bridge.lookup_host import AT_HAND, LookupHost, Treatment
from sok_lite.bridge.row_gradient import derived_once, row_gradient
from sok_lite.bridge.serving.mode import looked_up
from sok_lite.bridge.serving.pooled import combined, tensors_of
from sok_lite.bridge.static_lookup import read_asked
from sok_lite.bridge.tf_private import could_possibly_record
from sok_lite.bridge.type_spec import alive
from sok_lite.comm import Communicator


def look_up(comm: Communicator, arguments: list[Argument], treatment: Treatment) -> list[tf.Tensor]:
    """Looks keys up in the tables of all ranks, and combines them row by row.

    Every rank must call it. In a graph the whole call is one host call forward, two where it has
    static tables, and one backward.

    Args:
      arguments: of each table, at least one.

    Returns:
      For each table (batch, dimension) of its rows' dtype, with gradients of the tables and of the
      weights.
    """
    tables = [argument.facts for argument in arguments]
    names = ", ".join(repr(table.name) for table in tables)

    def live(*_: tf.Tensor) -> list[tf.Tensor]:
        return _looked_up(comm, arguments, treatment)

    def plain(served: Any, *tensors: tf.Tensor) -> list[tf.Tensor]:
        return combined(served, tables, treatment, is_spread, *tensors)

    is_spread = comm.size > 1
    inputs = tensors_of(arguments)
    return list(looked_up(f"lookup_sparse in {names}", live, plain, inputs))


def _looked_up(
    comm: Communicator, arguments: list[Argument], treatment: Treatment
) -> list[tf.Tensor]:
    """Does what `look_up` does, by the host."""
    tables = [argument.facts for argument in arguments]
    all_weights = [a.weights for a in arguments if a.weights is not None]
    inputs, batches = joined_inputs(arguments)
    read = read_asked(comm, arguments, inputs)
    host = LookupHost(comm, tables, treatment, bool(read.sent))
    refuse_replicas(host.what)
    num_tables = len(tables)
    static = [i for i, table in enumerate(tables) if table.is_static]

    @custom_gradient
    def run(*sources_and_weights: tf.Tensor) -> Any:
        weights = list(sources_and_weights[num_tables:])
        rows = {i: sources_and_weights[i] for i in static}
        joined_weights = [join(weights)] if weights else []
        tensors = [*inputs, *joined_weights, *read.sent, *read.numbers, *rows.values()]
        backward: Callable[..., Any]
        if tf.executing_eagerly():
            joined, trail = on_device(host.backend, host.forward, *tensors)
            backward, context = partial(host.backward, trail), []
        else:
            joined, packed = host_call(
                *(host.forward_packed, tensors, [tf.float32, tf.int64]),
                *(host.backend, host.what, host.together),
            )
            packed.set_shape([None])
            # An eager one would belong to no graph.
            at_hand = [tf.convert_to_tensor(tensor) for tensor in tensors[AT_HAND]]
            backward, context = host.unpacking(host.backward), [packed, *at_hand]
        outputs = cut_rows(joined, batches, [table.dim for table in tables])
        if not tf.executing_eagerly():
            for table, output in zip(tables, outputs, strict=True):
                output.set_shape([table.batch, table.dim])

        def grad(*out_grads: tf.Tensor) -> Any:
            dense = [tf.cast(tf.convert_to_tensor(grads), tf.float32) for grads in out_grads]
            keys, gradients = _gradients(host, backward, context, dense, weights)
            if not tf.executing_eagerly() or could_possibly_record():
                gradients = _derived_once(host, gradients, [*dense, *weights], rows)
            row_grads, weight_grads = gradients[:num_tables], gradients[num_tables:]
            for weight, weight_grad in zip(weights, weight_grads, strict=True):
                weight_grad.set_shape(weight.shape)
            by_tables = []
            for table, its_keys, its_rows in zip(tables, keys, row_grads, strict=True):
                # Of a static table they are of the rows that were read, in the order of those.
                by_tables.append(
                    tf.cast(its_rows, table.dtype)
                    if table.is_static
                    else row_gradient(table.name, its_keys, its_rows, table.dim, distinct=True)
                )
            return (*by_tables, *weight_grads)

        return tuple(outputs), grad

    rows = iter(read.rows)
    sources = [
        next(rows) if table.is_static else alive(table.variable).gradient_source()
        for table in tables
    ]
    outputs = run(*sources, *all_weights)
    return [
        output if table.dtype is tf.float32 else tf.cast(output, table.dtype)
        for output, table in zip(outputs, tables, strict=True)
    ]


def look_up_each(
    comm: Communicator, variable: Any, ids: tf.Tensor, treatment: Treatment
) -> tf.Tensor:
    """Returns the rows of keys in the tables of all ranks. Every rank must call it.

    Args:
      variable: of a table.
      ids: integers of any shape.

    Returns:
      ids.shape + [dimension] of the rows' dtype, with a gradient of the variable.
    """
    arguments = checked_arguments([variable], [tf.reshape(ids, [-1])], None, "sum", comm.size)
    rows = look_up(comm, arguments, treatment)[0]
    result = tf.reshape(rows, tf.concat([tf.shape(ids), [variable.dimension]], 0))
    return tf.ensure_shape(result, ids.shape.concatenate([variable.dimension]))


def _derived_once(
    host: LookupHost,
    gradients: Sequence[tf.Tensor],
    made_of: Sequence[tf.Tensor],
    rows: Mapping[int, tf.Tensor],
) -> list[tf.Tensor]:
    """Returns gradients such that their derivative raises; see `derived_once`.

    Args:
      made_of: what is known where the gradient is taken. Those by weights are made of the rows of
        their tables as well.
      rows: by number of each static table, the rows that were read of it.
    """
    inputs, zeros_of = list(made_of), {}
    for i, table in enumerate(host.tables):
        if table.has_weights and i in rows:
            inputs.append(rows[i])
        elif table.has_weights:
            zeros_of[len(inputs)] = partial(_gradient_of_no_rows, table)
            inputs.append(_source(table))
    return derived_once(host.what, gradients, inputs, zeros_of)


def _source(table: Facts) -> Any:
    """Returns what gradient tapes know the rows of a table by."""
    variable = alive(table.variable)
    if tf.executing_eagerly():
        return variable.gradient_source()
    return from_function(variable.gradient_source)


def _gradient_of_no_rows(table: Facts) -> Any:
    keys, rows = tf.zeros([0], table.key_type), tf.zeros([0, table.dim])
    return row_gradient(table.name, keys, rows, table.dim)


def _gradients(
    host: LookupHost,
    backward: Callable[..., list[Any]],
    context: list[tf.Tensor],
    out_grads: Sequence[tf.Tensor],
    weights: Sequence[tf.Tensor],
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Calls the way back of a lookup, now or in the graph.

    Args:
      backward: `LookupHost.backward` of its trail, or of `context`.
      context: in a graph the packed trail and what `AT_HAND` names; empty in eager mode.
      out_grads: (batch, dim) float32 of each table.

    Returns:
      (the keys of all tables, their row gradients and then the weights' gradients).
    """
    tables, inputs = host.tables, joined_rows(out_grads, host.backend)
    dtypes = [tf.int64, tf.int64, tf.float32]
    if weights:
        inputs, dtypes = [*inputs, join(weights)], [*dtypes, tf.float32]
    lengths, *joined = host_call(
        *(backward, [*context, *inputs], dtypes),
        *(host.backend, f"The gradient of {host.what}", host.together),
    )
    if not tf.executing_eagerly():
        lengths.set_shape([len(tables)])
    keys = [
        from_int64(part, table.key_type)
        for part, table in zip(cut(joined[0], lengths, len(tables)), tables, strict=True)
    ]
    for each in keys:
        each.set_shape([None])
    row_grads = cut_rows(joined[1], lengths, [table.dim for table in tables])
    weight_grads = cut(joined[2], shapes_of(weights), len(weights)) if weights else []
    return keys, [*row_grads, *weight_grads]
