"""`sok.lookup_sparse`: every rank asks for keys of any rank, for all tables of a call together."""

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf

from sok_lite.backend import Backend
from sok_lite.comm import Communicator
from sok_lite.communication import communicator
from sok_lite.dynamic_variable import DynamicVariable
from sok_lite.engine import step, trips
from sok_lite.engine.agreement import check_equal_on_all_ranks
from sok_lite.engine.failure import failure_known_to_all, shared_failure
from sok_lite.engine.table import HkvTable
from sok_lite.host_call import graph_of_function, host_call, on_device, refuse_replicas
from sok_lite.inference import checked_missing, checked_training, reading
from sok_lite.local_lookup import local_lookup_and_evict
from sok_lite.lookup_arguments import Argument, Facts, checked_arguments, row_splits
from sok_lite.lookup_gradient import Items, with_gradients
from sok_lite.row_gradient import row_gradient, size_tensor
from sok_lite.tensor import empty, to_array, to_tensor
from sok_lite.variable_spec import alive

__all__ = ["lookup_sparse", "sparse_read_and_evict"]


@tf.autograph.experimental.do_not_convert
def lookup_sparse(
    params: Any,
    sp_ids: Any,
    sp_weights: Any = None,
    combiners: Any = None,
    use_low_frequency_filter: bool = False,
    *,
    training: bool | None = None,
    missing: str | None = None,
) -> Any:
    """Looks keys up in tables that are spread over all ranks, and combines them row by row.

    Every rank must call it, with the same tables in the same order; batches may differ in size.
    Keys that no rank has seen are inserted. In a graph the whole call is one host call forward and
    one backward. In a TF1 graph, where nothing orders two such calls, make one per step.

    Args:
      params: a DynamicVariable or a list; one may come several times.
      sp_ids: for each a RaggedTensor or SparseTensor (in row-major order) of keys, (batch, None).
      sp_weights: None, or for each None or the weights of the keys, ragged or sparse with rows of
        the same lengths.
      combiners: for each "sum", "mean" or "sqrtn" (or one for all); None: "mean". As in
        `tf.nn.embedding_lookup_sparse`: weighted sum, divided by 1, by the sum of the weights or by
        the root of the sum of their squares. An empty row, or a divisor of 0, gives zeros.
      use_low_frequency_filter: a key without a row gets one with the chance `filter_ratio` of its
        table, drawn anew at each lookup; else it gives zeros and still counts in a mean. For
        "hybrid" tables only.
      training: False: nothing is inserted and no score changes. True: it is, even within
        `sok.inference_mode`. None: as that says. It counts on the rank that owns a key.
      missing: what a key gives that has no row: "initial", the value it would start with, or
        "zeros". None: as `sok.inference_mode` says, else "zeros" with the filter and "initial"
        without.

    Returns:
      (batch, dimension) of the variable's dtype; a list of them where `sp_ids` is a list or tuple.
      The gradient of a variable is an IndexedSlices of distinct keys that this rank owns, with
      float32 rows summed over all ranks: neither averaged nor to be sent through Horovod again.
      Weights have gradients too.

    Raises:
      RuntimeError: `sok.init` was not called.
      TypeError, ValueError: arguments that do not fit.
      NotImplementedError: a tf.Variable, the filter for an "hbm" table, or a localized table with
        several ranks.
    """
    treatment = Treatment(
        checked_training(training), checked_missing(missing), bool(use_low_frequency_filter)
    )
    comm = communicator()
    arguments = checked_arguments(params, sp_ids, sp_weights, combiners, comm.size)
    if use_low_frequency_filter:
        _check_filter(arguments)
    outputs = _lookup(comm, arguments, treatment) if arguments else []
    is_list = isinstance(sp_ids, (list, tuple)) or isinstance(sp_weights, tuple)
    return outputs if is_list else outputs[0]


@tf.autograph.experimental.do_not_convert
def sparse_read_and_evict(
    var: DynamicVariable, indices: Any
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Does what `tf.nn.embedding_lookup` does and returns also what was evicted for new keys.

    It looks into the table of this rank only. An "hbm" table evicts nothing, and so does a lookup
    within `sok.inference_mode`.

    Args:
      var: the variable.
      indices: integer keys of any shape.

    Returns:
      (embedding: indices.shape + [dimension] of the rows' dtype, the only one with a gradient;
      evicted_keys: (m,) of the key type, in no order; evicted_values: (m, dimension), their rows).

    Raises:
      TypeError: `var` is no DynamicVariable, or keys are no integers.
      ValueError: a key does not fit the key type.
    """
    if not isinstance(var, DynamicVariable):
        raise TypeError(
            "sok.sparse_read_and_evict takes a sok.DynamicVariable. "
            f"Received: {type(var).__name__}."
        )
    return local_lookup_and_evict(var, indices)


def _check_filter(arguments: list[Argument]) -> None:
    for facts, _, _ in arguments:
        if not isinstance(alive(facts.variable).table, HkvTable):
            raise NotImplementedError(
                "`use_low_frequency_filter` needs tables of var_type 'hybrid'; "
                f"{facts.name!r} is 'hbm', which keeps every key. Leave it out."
            )


class Treatment(NamedTuple):
    """How a call treats keys without a row: the arguments as given.

    Attributes:
      training, missing: see `inference.reading`.
      has_filter: whether new keys are drawn.
    """

    training: bool | None
    missing: str | None
    has_filter: bool


def _lookup(comm: Communicator, arguments: list[Argument], treatment: Treatment) -> list[tf.Tensor]:
    tables = [argument.facts for argument in arguments]
    inputs = [tensor for argument in arguments for tensor in argument.inputs]
    all_weights = [a.weights for a in arguments if a.weights is not None]
    host = _Host(comm, tables, treatment)
    refuse_replicas(host.what)
    num_tables = len(tables)

    @tf.custom_gradient
    def run(*sources_and_weights: tf.Tensor) -> Any:
        weights = list(sources_and_weights[num_tables:])
        if tf.executing_eagerly():
            outputs, trail = on_device(host.backend, host.forward, *inputs, *weights)
            way = _Way(host, trail)
        else:
            dtypes = [tf.float32] * num_tables + [tf.int64]
            *outputs, packed = host_call(
                host.forward_packed, [*inputs, *weights], dtypes, host.backend, host.what
            )
            packed.set_shape([None])
            way = _Way(host, None, [packed])
        for table, output in zip(tables, outputs, strict=True):
            output.set_shape([table.batch, table.dim])

        def grad(*out_grads: tf.Tensor) -> Any:
            dense = [tf.cast(tf.convert_to_tensor(grads), tf.float32) for grads in out_grads]
            keys, row_grads, sizes, weight_grads = way.backward(dense, weights)
            for weight, weight_grad in zip(weights, weight_grads, strict=True):
                weight_grad.set_shape(weight.shape)
            back = way.carrying([*way.carried, *keys, *sizes])
            gradients = with_gradients(back, dense, weights, [*row_grads, *weight_grads])
            slices = [back.gradient(i, rows) for i, rows in enumerate(gradients[:num_tables])]
            return (*slices, *gradients[num_tables:])

        return tuple(outputs), grad

    variables = [alive(table.variable) for table in tables]
    outputs = run(*(variable.gradient_source() for variable in variables), *all_weights)
    return [
        output if table.dtype == tf.float32 else tf.cast(output, table.dtype)
        for output, table in zip(outputs, tables, strict=True)
    ]


class _Host:
    """The host half of one call of `lookup_sparse`: eager tensors in, eager tensors out.

    Attributes:
      what: names the call in errors.
      backend: of all its tables.
      tables: what is known of them.
    """

    def __init__(self, comm: Communicator, tables: list[Facts], treatment: Treatment) -> None:
        self.what = f"lookup_sparse in {', '.join(repr(table.name) for table in tables)}"
        self.backend: Backend = alive(tables[0].variable).table.backend
        self._comm = comm
        self.tables = tables
        self._treatment = treatment
        formats = [(t.dim, t.key_type.name, t.dtype.name, t.combiner) for t in tables]
        # Equal on all ranks for one call, and telling it from most others.
        self._tag = zlib.crc32(f"{self.what} {formats}".encode())
        self._new_rows = partial(empty, dtype=tf.float32, backend=self.backend)
        self._new_trail = partial(empty, dtype=tf.int64, backend=self.backend)

    def forward(self, *tensors: tf.Tensor) -> tuple[list[tf.Tensor], step.Trail]:
        """Takes the inputs of all tables, then the weights; returns outputs and trail."""
        tables = [alive(facts.variable).table for facts in self.tables]
        step.agree(self._comm, self._tag, tables, [facts.combiner for facts in self.tables])
        with shared_failure(self._comm):
            parts = self._parts(tensors)
        outputs, trail = step.forward(self.backend, self._comm, parts, self._tag, self._new_rows)
        return [to_tensor(output, tf.float32, self.backend) for output in outputs], trail

    def forward_packed(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Returns outputs and, as one more tensor, the packed trail."""
        outputs, trail = self.forward(*tensors)
        packed = step.pack(self.backend, trail, self._new_trail)
        return [*outputs, to_tensor(packed, tf.int64, self.backend)]

    def backward(self, trail: step.Trail, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Takes the outputs' gradients, then the weights; returns keys, row gradients and size of
        each table, then the weights' gradients."""
        num_tables = len(self.tables)
        out_grads = [to_array(tensor, self.backend) for tensor in tensors[:num_tables]]
        weights = iter(tensors[num_tables:])
        parts = []
        for facts in self.tables:
            weight = to_array(next(weights), self.backend) if facts.has_weights else None
            parts.append((alive(facts.variable).table, weight, facts.combiner))
        with failure_known_to_all(self._comm):
            gradients = step.backward(self.backend, parts, out_grads, trail, self._new_rows)
        results, weight_grads = [], []
        for facts, (table, _, _), gradient in zip(self.tables, parts, gradients, strict=True):
            results += [
                to_tensor(gradient.keys, facts.key_type, self.backend),
                to_tensor(gradient.row_grads, tf.float32, self.backend),
                size_tensor(table),
            ]
            if gradient.weight_grads is not None:
                weight_grads.append(to_tensor(gradient.weight_grads, tf.float32, self.backend))
        return results + weight_grads

    def spread(self, trail: step.Trail, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """See `trips.spread`."""
        weighted = {facts.name: facts.has_weights for facts in self.tables}
        what = f"A second derivative of {self.what}"
        check_equal_on_all_ranks(self._comm, {"which tables have weights": weighted}, what)
        return self._travelled(trips.spread, trail, tensors)

    def collect(self, trail: step.Trail, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """See `trips.collect`."""
        return self._travelled(trips.collect, trail, tensors)

    def items(self, trail: step.Trail) -> list[tf.Tensor]:
        """Returns what makes the `Items` of each table; no rows where there are no weights."""
        results = []
        for facts, part in zip(self.tables, trail.tables, strict=True):
            batch_rows = trips.item_rows(self.backend, part.row_splits)
            inverse = part.inverse.astype(batch_rows.dtype)
            results += [to_tensor(array, tf.int64, self.backend) for array in (inverse, batch_rows)]
            if part.source is not None:
                results.append(to_tensor(part.source, facts.dtype, self.backend))
        return results

    def unpacking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of the packed trail that calls one of the trail."""

        def run(packed: tf.Tensor, *tensors: tf.Tensor) -> Any:
            array = to_array(packed, self.backend)
            trail = step.unpack(self.backend, self._comm, array, len(self.tables))
            return function(trail, *tensors)

        return run

    def _travelled(
        self, trip: Callable[..., Any], trail: step.Trail, tensors: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        rows = [to_array(tensor, self.backend) for tensor in tensors]
        with failure_known_to_all(self._comm):
            results = trip(self.backend, trail, rows)
        return [to_tensor(array, tf.float32, self.backend) for array in results]

    def _parts(self, tensors: Sequence[tf.Tensor]) -> list[step.Part]:
        stream = iter(tensors)
        inputs = [[next(stream) for _ in range(facts.num_inputs)] for facts in self.tables]
        training, missing, has_filter = self._treatment
        insert, missing = reading(training, missing, "zeros" if has_filter else "initial")
        parts = []
        for i, (facts, (keys, *rows)) in enumerate(zip(self.tables, inputs, strict=True)):
            splits = row_splits(facts.is_ragged, rows[0], rows[1], self.backend)
            weights = to_array(next(stream), self.backend) if facts.has_weights else None
            if facts.weights_are_ragged is not None:
                theirs = row_splits(facts.weights_are_ragged, rows[2], rows[3], self.backend)
                if splits.shape != theirs.shape or bool((splits != theirs).any()):
                    raise ValueError(
                        f"The rows of sp_weights[{i}] must be as long as those of sp_ids[{i}]. "
                        "Received: rows of other lengths."
                    )
            table = alive(facts.variable).table
            ratio = 1.0
            if has_filter and isinstance(table, HkvTable):
                ratio = table.options.filter_ratio
            items = to_array(keys, self.backend)
            parts.append(
                step.Part(table, items, splits, weights, facts.combiner, insert, missing, ratio)
            )
        return parts


class _Way:
    """The way of the keys of one call: what its gradients call the host by; see `Trips`.

    Args:
      host: of the call.
      trail: what the forward left; None in a graph.
      carried: in a graph the packed trail first. Then, where the way back is known, the keys of
        each table and the size of each.
    """

    def __init__(
        self, host: _Host, trail: step.Trail | None, carried: Sequence[tf.Tensor] = ()
    ) -> None:
        self._host, self._trail = host, trail
        self.tables, self.carried = host.tables, list(carried)

    def carrying(self, carried: Sequence[tf.Tensor]) -> "_Way":
        return _Way(self._host, self._trail, carried)

    def backward(
        self, out_grads: Sequence[tf.Tensor], weights: Sequence[tf.Tensor]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        """Returns keys, row gradients and sizes of all tables, then the weights' gradients."""
        dtypes = [dtype for t in self.tables for dtype in (t.key_type, tf.float32, tf.int32)]
        dtypes += [tf.float32] * len(weights)
        results = self._call(self._host.backward, [*out_grads, *weights], dtypes)
        end = 3 * len(self.tables)
        keys, row_grads, sizes = (results[k:end:3] for k in range(3))
        for i, table in enumerate(self.tables):
            keys[i].set_shape([None])
            row_grads[i].set_shape([None, table.dim])
            sizes[i].set_shape([2])
        return keys, row_grads, sizes, results[end:]

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
        variable = alive(self.tables[table].variable)
        if tf.executing_eagerly():
            return variable.gradient_source()
        with graph_of_function().as_default():
            return variable.gradient_source()

    def gradient(self, table: int, rows: tf.Tensor) -> Any:
        keys_and_sizes = self.carried[-2 * len(self.tables) :]
        keys, size = keys_and_sizes[table], keys_and_sizes[len(self.tables) + table]
        # A copy: the size may belong to another graph.
        return row_gradient(self.tables[table].name, keys, rows, tf.identity(size))

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
            function, inputs = self._host.unpacking(function), [self.carried[0], *inputs]
        else:
            function = partial(function, self._trail)
        what = f"The gradient of {self._host.what}"
        return host_call(function, inputs, dtypes, self._host.backend, what)
