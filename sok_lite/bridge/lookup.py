"""A lookup in the tables of all ranks, and its gradient, as TensorFlow sees them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from sok_lite.bridge.ahead import Prefetched
from sok_lite.bridge.gradient import Items, with_gradients
from sok_lite.bridge.graph_gradient import custom_gradient
from sok_lite.bridge.host_call import from_function, host_call, on_device, refuse_replicas
from sok_lite.bridge.joined import cut, cut_rows, from_int64, join, joined_rows, shapes_of
from sok_lite.bridge.lookup_arguments import Argument, checked_arguments, joined_inputs
from sok_lite.bridge.lookup_host import AT_HAND, LookupHost, Treatment
from sok_lite.bridge.row_gradient import row_gradient
from sok_lite.bridge.serving.mode import looked_up
from sok_lite.bridge.serving.pooled import combined, tensors_of
from sok_lite.bridge.static_lookup import read_asked
from sok_lite.bridge.type_spec import alive
from sok_lite.comm import Communicator
from sok_lite.engine.trail import Trail


def look_up(
    comm: Communicator,
    arguments: list[Argument],
    treatment: Treatment,
    ahead: Prefetched | None = None,
) -> list[tf.Tensor]:
    """Looks keys up in the tables of all ranks, and combines them row by row.

    Every rank must call it. In a graph the whole call is one host call forward, two where it has
    static tables, and one backward.

    Args:
      arguments: of each table, at least one.
      ahead: what the keys were sent by; None: they have not been sent.

    Returns:
      For each table (batch, dimension) of its rows' dtype, with gradients of the tables and of the
      weights.
    """
    tables = [argument.facts for argument in arguments]
    names = ", ".join(repr(table.name) for table in tables)

    def live(*_: tf.Tensor) -> list[tf.Tensor]:
        return _looked_up(comm, arguments, treatment, ahead)

    def plain(served: Any, *tensors: tf.Tensor) -> list[tf.Tensor]:
        return combined(served, tables, treatment, is_spread, *tensors)

    is_spread = comm.size > 1
    inputs = tensors_of(arguments)
    return list(looked_up(f"lookup_sparse in {names}", live, plain, inputs))


def _looked_up(
    comm: Communicator,
    arguments: list[Argument],
    treatment: Treatment,
    ahead: Prefetched | None,
) -> list[tf.Tensor]:
    """Does what `look_up` does, by the host."""
    tables = [argument.facts for argument in arguments]
    all_weights = [a.weights for a in arguments if a.weights is not None]
    sent = [] if ahead is None else [ahead.sent_for(tables)]
    if comm.is_alone:
        sent = []  # nothing was
    inputs, batches = joined_inputs(arguments)
    read = read_asked(comm, arguments, inputs, sent)
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
        if tf.executing_eagerly():
            joined, trail = on_device(host.backend, host.forward, *tensors)
            way = _Way(host, trail, rows)
        else:
            joined, packed = host_call(
                *(host.forward_packed, tensors, [tf.float32, tf.int64]),
                *(host.backend, host.what, host.together),
            )
            packed.set_shape([None])
            # An eager one would belong to no graph.
            at_hand = [tf.convert_to_tensor(tensor) for tensor in tensors[AT_HAND]]
            way = _Way(host, None, rows, [packed, *at_hand])
        outputs = cut_rows(joined, batches, [table.dim for table in tables])
        if not tf.executing_eagerly():
            for table, output in zip(tables, outputs, strict=True):
                output.set_shape([table.batch, table.dim])

        def grad(*out_grads: tf.Tensor) -> Any:
            dense = [tf.cast(tf.convert_to_tensor(grads), tf.float32) for grads in out_grads]
            keys, row_grads, weight_grads = way.backward(dense, weights)
            for weight, weight_grad in zip(weights, weight_grads, strict=True):
                weight_grad.set_shape(weight.shape)
            back = way.carrying([*way.carried, *keys])
            gradients = with_gradients(back, dense, weights, [*row_grads, *weight_grads])
            slices = [back.gradient(i, rows) for i, rows in enumerate(gradients[:num_tables])]
            return (*slices, *gradients[num_tables:])

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


class _Way:
    """The way of the keys of one call: what its gradients call the host by; see `Trips`.

    Args:
      host: of the call.
      trail: what the forward left; None in a graph.
      rows: by number of each static table, the rows that were read of it.
      carried: in a graph first the packed trail and what `AT_HAND` names. Then, where the way back
        is known, the keys of each table.
    """

    def __init__(
        self,
        host: LookupHost,
        trail: Trail | None,
        rows: dict[int, tf.Tensor],
        carried: Sequence[tf.Tensor] = (),
    ) -> None:
        self._host, self._trail, self._rows = host, trail, rows
        self.tables, self.carried = host.tables, list(carried)

    def carrying(self, carried: Sequence[tf.Tensor]) -> "_Way":
        return _Way(self._host, self._trail, self._rows, carried)

    def backward(
        self, out_grads: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        """Returns keys and row gradients of all tables, then the weights' gradients."""
        tensors = joined_rows(out_grads, self._host.backend)
        dtypes = [tf.int64, tf.int64, tf.float32]
        if weights:
            tensors, dtypes = [*tensors, join(weights)], [*dtypes, tf.float32]
        lengths, *joined = self._call(self._host.backward, tensors, dtypes)
        count, dims = len(self.tables), [table.dim for table in self.tables]
        if not tf.executing_eagerly():
            lengths.set_shape([count])
        keys = [
            from_int64(part, table.key_type)
            for part, table in zip(cut(joined[0], lengths, count), self.tables, strict=True)
        ]
        row_grads = cut_rows(joined[1], lengths, dims)
        weight_grads = []
        if weights:
            weight_grads = cut(joined[2], shapes_of(weights), len(weights))
        for each in keys:
            each.set_shape([None])
        return keys, row_grads, weight_grads

    def spread(self, rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self._travelled(self._host.spread, rows)

    def collect(self, rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return self._travelled(self._host.collect, rows)

    def items(self) -> list[Items]:
        dtypes = [
            dtype
            for table in self.tables
            for dtype in [tf.int64, tf.int64] + [table.dtype] * table.has_weights
        ]
        stream = iter(self._call(self._host.items, [], dtypes))
        result = []
        for table in self.tables:
            inverse, batch_rows = next(stream), next(stream)
            inverse.set_shape([None])
            batch_rows.set_shape([None])
            source = tf.cast(next(stream), tf.float32) if table.has_weights else None
            if source is not None:
                source.set_shape([None, table.dim])
            result.append(Items(inverse, batch_rows, source))
        return result

    def source(self, table: int) -> Any:
        if table in self._rows:
            return self._rows[table]
        variable = alive(self.tables[table].variable)
        if tf.executing_eagerly():
            return variable.gradient_source()
        return from_function(variable.gradient_source)

    def gradient(self, table: int, rows: tf.Tensor) -> Any:
        if self.tables[table].is_static:
            # Of the rows that were read, in the order in which they were.
            return tf.cast(rows, self.tables[table].dtype)
        facts, keys = self.tables[table], self.carried[-len(self.tables) :][table]
        return row_gradient(facts.name, keys, rows, facts.dim, distinct=True)

    def _travelled(
        self, function: Callable[..., Any], rows: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        results = self._call(function, rows, [tf.float32] * len(rows))
        for table, result in zip(self.tables, results, strict=True):
            result.set_shape([None, table.dim])
        return results

    def _call(
        self,
        function: Callable[..., Any],
        tensors: Sequence[tf.Tensor],
        dtypes: Sequence[tf.DType],
    ) -> list[tf.Tensor]:
        """Calls one of the host's functions of a trail, now or in the graph."""
        inputs = [*tensors]
        if self._trail is None:
            function, inputs = self._host.unpacking(function), [*self.carried[:3], *inputs]
        else:
            function = partial(function, self._trail)
        what = f"The gradient of {self._host.what}"
        return host_call(function, inputs, dtypes, self._host.backend, what, self._host.together)
