"""What the operation of a pooled lookup and that of its gradient run: arrays in, arrays out."""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array, Backend
from sok_lite.backend.ragged import Shape
from sok_lite.bridge.collective_order import CollectiveCall, numbered
from sok_lite.bridge.inference import MissingKeyPolicy, pipeline_of_trace
from sok_lite.bridge.lookup_arguments import TableSpec
from sok_lite.bridge.lookup_gradient import OF_CONTEXT, note_gradient
from sok_lite.bridge.lookup_inputs import BatchOfInputs, Given
from sok_lite.bridge.native_lookup import are_native, part_of
from sok_lite.bridge.operation import OfGradient, Outputs
from sok_lite.bridge.tf_private import could_possibly_record
from sok_lite.bridge.type_spec import live_tables
from sok_lite.comm import Communicator
from sok_lite.engine import lookup
from sok_lite.engine.agreement import agree
from sok_lite.engine.batch import Batch
from sok_lite.engine.failure import failure_known_to_all, shared_failure
from sok_lite.engine.lookup import BackwardContext
from sok_lite.engine.pooling import COMBINERS
from sok_lite.engine.table.counters import Count
from sok_lite.engine.work_done import GRADIENTS, LOOKUPS
from sok_lite.native.plans import LookupPlan, Rows


class LookupOfTables(ABC):
    """One call of `lookup_sparse` for tables of one kind. Holds no tensor and keeps no table alive.

    Args:
      comm: the ranks.
      tables: what is known of the tables.
      what: names the call in errors.

    Attributes:
      comm, tables, what: as given.
      combiners: of the tables.
      backend: of all tables.
      collective: the ranks, as they make the call.
      num_weighted: how many tables have weights.
      num_numbers: how many of the inputs are on the host.
      has_keys: whether the gradient of a table has keys.
      plan: by which native code may look up, and take the gradient; None: Python does it always.
    """

    has_keys = True
    plan: LookupPlan | None = None

    def __init__(self, comm: Communicator, tables: Sequence[TableSpec], what: str) -> None:
        self.comm, self.tables, self.what = comm, tables, what
        self._references = [table.variable for table in tables]
        self.backend: Backend = self.live_tables()[0].backend
        self.collective = CollectiveCall(comm, numbered(what))
        self.combiners = [table.combiner for table in tables]
        self._batches = BatchOfInputs(tables, self.backend)
        self.num_numbers = self._batches.num_numbers
        self.num_weighted = sum([table.has_weights for table in tables])
        self._are_float32 = {table.dtype for table in tables} == {tf.float32}
        self._types = [tf.float32] * len(tables) + [t.key_type for t in tables] * self.has_keys
        self._types += [tf.float32] * self.num_weighted

    @property
    def gradient(self) -> OfGradient:
        """What the gradient of the operation runs. It has this object, which must not have it: only
        the garbage collector would free them."""
        how = (self._types, self.backend, GRADIENTS, self.collective, self.plan)
        return OfGradient(self.what, self.backward, *how)

    @abstractmethod
    def forward(self, outputs: Outputs, arrays: list[Array]) -> None:
        """Looks up."""

    @abstractmethod
    def backward(self, outputs: Outputs, arrays: list[Array]) -> None:
        """Takes the gradient."""

    def pooled(self, outputs: list[tf.Tensor], batches: Sequence[int | None]) -> list[tf.Tensor]:
        """Returns the pooled rows of each table, in its dtype.

        Args:
          outputs: of the operation.
          batches: static numbers of rows.
        """
        rows = outputs[: len(self.tables)]
        if tf.executing_eagerly():
            if could_possibly_record():
                note_gradient(outputs, self.gradient)
        else:
            for table, output, batch in zip(self.tables, rows, batches, strict=True):
                output.set_shape([batch, table.dim])
        if self._are_float32:
            return rows
        pairs = zip(self.tables, rows, strict=True)
        return [each if t.dtype is tf.float32 else tf.cast(each, t.dtype) for t, each in pairs]

    def live_tables(self) -> list[Any]:
        """Returns the engine's tables."""
        return live_tables(self._references)

    def tag_of(self, tables: Sequence[TableSpec]) -> int:
        """Returns a number that is equal on all ranks for one call, and tells it from most."""
        formats = [
            (t.dim, t.key_type.name, t.dtype.name, t.owner, t.num_rows, t.combiner) for t in tables
        ]
        return zlib.crc32(f"{self.what} {formats}".encode())

    def given(self, inputs: list[Array], all_arrays: list[Array]) -> list[Given]:
        """Returns what inputs, first in some arrays, and numbers at the end give."""
        begin = len(all_arrays) - self.num_numbers
        return self._batches.given(inputs, all_arrays[begin:])

    def batch(self, inputs: list[Array], all_arrays: list[Array]) -> Batch:
        """Returns the batch of what is given so."""
        return self._batches.make(self.live_tables(), self.given(inputs, all_arrays))

    def shapes_of(self, given: Sequence[Given]) -> list[Shape]:
        """Returns the shape of each table's pooled rows."""
        return [(its.num_rows, t.dim) for its, t in zip(given, self.tables, strict=True)]

    def sources(self, arrays: list[Array], batch: Batch) -> list[Array | None]:
        """Returns the rows of weighted items, which are the last arrays before numbers."""
        end = len(arrays) - self.num_numbers
        rows = iter(arrays[end - self.num_weighted : end])
        return [None if weights is None else next(rows) for weights in batch.weights]

    def give_sources(self, outputs: Outputs, first: int, sources: Sequence[Array | None]) -> None:
        """Gives the rows of weighted items, from an output on."""
        for number, rows in enumerate([each for each in sources if each is not None], first):
            outputs.give(number, rows)

    give_weight_grads = give_sources


class PooledLookup(LookupOfTables):
    """One call for tables that grow: what its operation and that of its gradient run.

    Args:
      policy: for keys without a row.

    Attributes:
      dtypes: of the outputs of its operation.
    """

    def __init__(
        self, comm: Communicator, tables: Sequence[TableSpec], policy: MissingKeyPolicy, what: str
    ) -> None:
        super().__init__(comm, tables, what)
        self._policy, self._pipeline = policy, pipeline_of_trace()
        self._tag = self.tag_of(tables)
        weighted = [table.dtype for table in tables if table.has_weights]
        self.dtypes = [*[tf.float32] * len(tables), *OF_CONTEXT, *weighted]

    @cached_property
    def plan(self) -> LookupPlan | None:  # type: ignore[override]
        """None where there may be other ranks, or tables that native code cannot look up in."""
        tables = self.live_tables()
        if not self.comm.is_alone or not are_native(tables):
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
            for table, spec in zip(tables, self.tables, strict=True)
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
        backend, comm, count = self.backend, self.comm, len(self.tables)
        with shared_failure(comm):
            tables = self.live_tables()
        agree(comm, self._tag, tables, self.combiners)
        with shared_failure(comm):
            begun = outputs.begun((len(set(map(id, tables))), len(Count)))
            insert, missing = self._policy.now(self.tables, self._pipeline)
            insert |= begun is not None  # what holds has been asked before
            ratios = [t.filter_ratio if self._policy.has_filter else 1.0 for t in tables]
            given = self.given(arrays, arrays)
            # All whose size is known, before kernels run: TensorFlow's memory waits for these.
            groups = [(0, self.shapes_of(given))]
            if comm.size == 1:
                num_keys = sum([its.keys.size for its in given])
                of_context = [shape_of_words(num_keys), (0,), (0,), (0,)]
                groups.append((count, of_context))
            outputs.allocate(*groups)
            batch = self._batches.make(tables, given)._replace(
                inserts=[insert] * count, missing=[missing] * count, filter_ratios=ratios
            )

        def new_rows(shape: Shape) -> Array:
            if comm.size == 1:
                rows = outputs.several(count, of_context)[0]
            else:
                rows = outputs.empty(count, shape_of_words(shape[0]))
            return rows.view(np.uint32)[: shape[0]]

        allocate = partial(outputs.several, 0)
        counters = None if begun is None else begun[0]
        _, context = lookup.forward(backend, comm, batch, self._tag, allocate, new_rows, counters)
        with failure_known_to_all(comm):
            if comm.size > 1:
                keys, *others = context.others()
                outputs.give(count + 1, keys)
                for number, array in enumerate(others, count + 2):
                    give_words(outputs, number, array)
            self.give_sources(outputs, count + len(OF_CONTEXT), context.pooling.sources)
            outputs.tell(0, context.numbers())

    def backward(self, outputs: Outputs, arrays: list[Array]) -> None:
        """Takes the gradient.

        Args:
          outputs: of each table the gradients of its rows, then the keys of each, then gradients of
            the weights of each that has any.
          arrays: gradients of the pooled rows, what `forward` took, and what it gave beside these
            rows; on the host what follows: numbers that `forward` took, and those that it told.
        """
        backend, comm, count = self.backend, self.comm, len(self.tables)
        with failure_known_to_all(comm):
            *arrays, numbers = arrays
            grads, inputs = arrays[:count], arrays[count:]
            batch = self.batch(inputs, arrays)
            end = len(arrays) - self.num_numbers - self.num_weighted
            rows, keys, *others = arrays[end - len(OF_CONTEXT) : end]
            of_32_bits = (each.view(np.int32) for each in others)
            told = (numbers, rows.view(np.uint32), (keys, *of_32_bits))
            sources = self.sources(arrays, batch)
            context = BackwardContext.of(backend, comm, batch, *told, sources)
            parts = list(zip(batch.tables, batch.weights, self.combiners, strict=True))

            def allocate(sizes: Sequence[int]) -> tuple[Sequence[Array], Sequence[Array]]:
                shapes = [(size, t.dim) for size, t in zip(sizes, self.tables, strict=True)]
                of_keys = list(zip(sizes))
                outputs.allocate((0, shapes), (count, of_keys))
                return outputs.several(0, shapes), outputs.several(count, of_keys)

            found = lookup.backward(backend, parts, grads, context, allocate)
            self.give_weight_grads(outputs, 2 * count, found.weight_grads)


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


def shape_of_words(count: int) -> Shape:
    """Returns the shape of an output of int64 that has so many numbers of 32 bits."""
    return (-(-count // 2),)


def give_words(outputs: Outputs, number: int, array: Array) -> None:
    """Copies numbers of 32 bits to an output of int64."""
    outputs.empty(number, shape_of_words(array.size)).view(array.dtype)[: array.size] = array
