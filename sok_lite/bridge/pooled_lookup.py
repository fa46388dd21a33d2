"""What the operation of a pooled lookup and that of its gradient run: arrays in, arrays out."""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array, Backend
from sok_lite.backend.ragged import Shape
from sok_lite.bridge.collective_order import CollectiveCall, numbered
from sok_lite.bridge.inference import MissingKeyPolicy, pipeline_of_trace
from sok_lite.bridge.lookup_arguments import TableSpec, tag_of
from sok_lite.bridge.lookup_gradient import OF_CONTEXT, note_gradient
from sok_lite.bridge.lookup_inputs import BatchOfInputs
from sok_lite.bridge.native_lookup import are_native, part_of
from sok_lite.bridge.operation import OfGradient, Outputs
from sok_lite.bridge.tf_private import could_possibly_record
from sok_lite.bridge.type_spec import live_tables
from sok_lite.comm import Communicator
from sok_lite.engine import lookup
from sok_lite.engine.agreement import agree
from sok_lite.engine.failure import failure_known_to_all, shared_failure
from sok_lite.engine.lookup import BackwardContext
from sok_lite.engine.pooling import COMBINERS
from sok_lite.engine.table.counters import Count
from sok_lite.engine.work_counters import GRADIENTS, LOOKUPS
from sok_lite.native.plans import LookupPlan, Rows


class PooledLookup:
    """One call of `lookup_sparse`: what its operation and that of its gradient run.

    It is for tables that grow; `static_lookup` is for others. It holds no tensor and keeps no table
    alive.

    Args:
      comm: the ranks.
      tables: what is known of the tables.
      policy: for keys without a row.
      what: names the call in errors.

    Attributes:
      backend: of all tables.
      collective: the ranks, as they make the call.
      dtypes: of the outputs of its operation.
    """

    def __init__(
        self, comm: Communicator, tables: Sequence[TableSpec], policy: MissingKeyPolicy, what: str
    ) -> None:
        self._comm, self._tables, self._what = comm, tables, what
        self._policy, self._pipeline = policy, pipeline_of_trace()
        self._references = [table.variable for table in tables]
        self.backend: Backend = self._live_tables()[0].backend
        self.collective = CollectiveCall(comm, numbered(what))
        self._tag = tag_of(what, tables)
        self._combiners = [table.combiner for table in tables]
        self._batches = BatchOfInputs(tables, self.backend)
        self._are_float32 = {table.dtype for table in tables} == {tf.float32}
        weighted = [table.dtype for table in tables if table.has_weights]
        self._num_weighted = len(weighted)
        self.dtypes = [*[tf.float32] * len(tables), *OF_CONTEXT, *weighted]
        self._types = [tf.float32] * len(tables) + [table.key_type for table in tables]
        self._types += [tf.float32] * self._num_weighted

    @property
    def gradient(self) -> OfGradient:
        """What the gradient of the operation runs. It has this object, which must not have it: only
        the garbage collector would free them."""
        how = (self._types, self.backend, GRADIENTS, self.collective, self.plan)
        return OfGradient(self._what, self.backward, *how)

    @cached_property
    def plan(self) -> LookupPlan | None:
        """By which native code may look up, and take the gradient; None: Python does it always, as
        there may be other ranks, or tables that native code cannot look up in."""
        tables = self._live_tables()
        if not self._comm.is_alone or not are_native(tables):
            return None
        parts = [
            part_of(
                table,
                spec.key_type,
                COMBINERS[spec.combiner],
                _rows_of(spec.width, spec.is_ragged),
                spec.width or 0,
                _rows_of_weights(spec),
            )
            for table, spec in zip(tables, self._tables, strict=True)
        ]
        policy = self._policy.planned(self._pipeline)
        return LookupPlan(self.backend, True, LOOKUPS, GRADIENTS, policy, tuple(parts))

    def forward(self, outputs: Outputs, arrays: list[Array]) -> None:
        """Looks up, or goes on where native code has begun to.

        Args:
          outputs: pooled rows of each table, `OF_CONTEXT`, the rows of each weighted table's items;
            told: the numbers of the context.
          arrays: what `inputs_of` gave; on the host what follows.
        """
        backend, comm, count = self.backend, self._comm, len(self._tables)
        with shared_failure(comm):
            tables = self._live_tables()
        agree(comm, self._tag, tables, self._combiners)
        with shared_failure(comm):
            begun = outputs.begun((len(set(map(id, tables))), len(Count)))
            insert, missing = self._policy.now(self._tables, self._pipeline)
            insert |= begun is not None  # what holds has been asked before
            ratios = [t.filter_ratio if self._policy.has_filter else 1.0 for t in tables]
            given = self._batches.given(arrays)
            # All whose size is known, before kernels run: TensorFlow's memory waits for these.
            pairs = zip(given, self._tables, strict=True)
            groups: list[tuple[int, Sequence[Shape]]] = [
                (0, [(its.num_rows, table.dim) for its, table in pairs])
            ]
            if comm.size == 1:
                num_keys = sum([its.keys.size for its in given])
                of_context = [_shape_of_words(num_keys), (0,), (0,), (0,)]
                groups.append((count, of_context))
            outputs.allocate(*groups)
            batch = self._batches.make(tables, given)._replace(
                inserts=[insert] * count, missing=[missing] * count, filter_ratios=ratios
            )

        def new_rows(shape: Shape) -> Array:
            if comm.size == 1:
                rows = outputs.several(count, of_context)[0]
            else:
                rows = outputs.empty(count, _shape_of_words(shape[0]))
            return rows.view(np.uint32)[: shape[0]]

        allocate = partial(outputs.several, 0)
        counters = None if begun is None else begun[0]
        _, context = lookup.forward(backend, comm, batch, self._tag, allocate, new_rows, counters)
        with failure_known_to_all(comm):
            if comm.size > 1:
                keys, *others = context.arrays()
                outputs.give(count + 1, keys)
                for number, array in enumerate(others, count + 2):
                    _give_words(outputs, number, array)
            self._give_sources(outputs, count + len(OF_CONTEXT), context.sources)
            outputs.tell(0, context.numbers())

    def backward(self, outputs: Outputs, arrays: list[Array]) -> None:
        """Takes the gradient.

        Args:
          outputs: of each table the gradients of its rows, then the keys of each, then gradients of
            the weights of each that has any.
          arrays: gradients of the pooled rows, what `forward` took, and what it gave beside these
            rows; on the host what follows: numbers that `forward` took, and those that it told.
        """
        backend, comm, count = self.backend, self._comm, len(self._tables)
        with failure_known_to_all(comm):
            *arrays, numbers = arrays
            grads, arrays = arrays[:count], arrays[count:]
            batch = self._batches.make(self._live_tables(), self._batches.given(arrays))
            end = len(arrays) - self._batches.num_numbers
            weighted = iter(arrays[end - self._num_weighted : end])
            sources = [None if each is None else next(weighted) for each in batch.weights]
            end -= self._num_weighted
            rows, keys, *others = arrays[end - len(OF_CONTEXT) : end]
            of_32_bits = (each.view(np.int32) for each in others)
            told = (numbers, rows.view(np.uint32), (keys, *of_32_bits))
            context = BackwardContext.restore(backend, comm, batch, *told, sources)

            def allocate(sizes: Sequence[int]) -> tuple[Sequence[Array], Sequence[Array]]:
                shapes = [(size, t.dim) for size, t in zip(sizes, self._tables, strict=True)]
                of_keys = list(zip(sizes))
                outputs.allocate((0, shapes), (count, of_keys))
                return outputs.several(0, shapes), outputs.several(count, of_keys)

            found = lookup.backward(backend, grads, context, allocate)
            self._give_sources(outputs, 2 * count, found.weight_grads)

    def pooled(self, outputs: list[tf.Tensor], batches: Sequence[int | None]) -> list[tf.Tensor]:
        """Returns the pooled rows of each table, in its dtype.

        Args:
          outputs: of the operation.
          batches: static numbers of rows.
        """
        rows = outputs[: len(self._tables)]
        if tf.executing_eagerly():
            if could_possibly_record():
                note_gradient(outputs, self.gradient)
        else:
            for table, output, batch in zip(self._tables, rows, batches, strict=True):
                output.set_shape([batch, table.dim])
        if self._are_float32:
            return rows
        pairs = zip(self._tables, rows, strict=True)
        return [each if t.dtype is tf.float32 else tf.cast(each, t.dtype) for t, each in pairs]

    def _live_tables(self) -> list[Any]:
        """Returns the engine's tables."""
        return live_tables(self._references)

    def _give_sources(self, outputs: Outputs, first: int, sources: Sequence[Array | None]) -> None:
        """Gives the rows of weighted items, from an output on."""
        for number, rows in enumerate([each for each in sources if each is not None], first):
            outputs.give(number, rows)


def _rows_of(width: int | None, is_ragged: bool) -> Rows:
    if width is not None:
        return Rows.EVEN
    return Rows.RAGGED if is_ragged else Rows.SPARSE


def _rows_of_weights(spec: TableSpec) -> Rows:
    if not spec.has_weights:
        return Rows.NONE
    if spec.weights_are_ragged is None:
        return Rows.AS_KEYS
    return _rows_of(None, spec.weights_are_ragged)


def _shape_of_words(count: int) -> Shape:
    """Returns the shape of an output of int64 that has so many numbers of 32 bits."""
    return (-(-count // 2),)


def _give_words(outputs: Outputs, number: int, array: Array) -> None:
    """Copies numbers of 32 bits to an output of int64."""
    outputs.empty(number, _shape_of_words(array.size)).view(array.dtype)[: array.size] = array
