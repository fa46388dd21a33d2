"""What the operation of a pooled lookup and that of its gradient run: arrays in, arrays out."""

import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array, Backend
from sok_lite.bridge.collective_order import CollectiveCall, numbered
from sok_lite.bridge.inference import MissingKeyPolicy, pipeline_of_trace
from sok_lite.bridge.lookup_arguments import TableSpec
from sok_lite.bridge.lookup_inputs import BatchOfInputs, Given
from sok_lite.bridge.operation import OfGradient, Outputs
from sok_lite.bridge.type_spec import live_tables
from sok_lite.comm import Communicator
from sok_lite.engine import lookup
from sok_lite.engine.agreement import agree
from sok_lite.engine.failure import failure_known_to_all, shared_failure
from sok_lite.engine.lookup import BackwardContext
from sok_lite.engine.pieces import Shape
from sok_lite.engine.work_done import GRADIENTS

# What a lookup leaves for its gradient, before the rows of weighted items: row numbers, keys that
# were received, and the `inverse` and the `order` of several ranks. Numbers of 32 bits are carried
# as the words of int64: of no other integers has a GPU all that loops and branches need.
OF_CONTEXT = (tf.int64,) * 4


class PooledLookup:
    """One call of `lookup_sparse` for tables that grow. Holds no tensor and keeps no table alive.

    Args:
      comm: the ranks.
      tables: what is known of the tables.
      policy: for keys without a row.
      what: names the call in errors.

    Attributes:
      what: as given.
      tables: as given.
      backend: of all tables.
      collective: the ranks, as they make the call.
      gradient: what the gradient of the operation runs.
    """

    def __init__(
        self, comm: Communicator, tables: list[TableSpec], policy: MissingKeyPolicy, what: str
    ) -> None:
        self.what, self.tables, self._comm = what, tables, comm
        self._references = [table.variable for table in tables]
        self.backend: Backend = live_tables(self._references)[0].backend
        self.collective = CollectiveCall(comm, numbered(what))
        self._combiners = [table.combiner for table in tables]
        self._policy, self._pipeline = policy, pipeline_of_trace()
        self._batches = BatchOfInputs(tables, self.backend)
        self._num_context = len(OF_CONTEXT) + sum([table.has_weights for table in tables])
        formats = [(t.dim, t.key_type.name, t.dtype.name, t.owner, t.combiner) for t in tables]
        # Equal on all ranks for one call, and tells it from most others.
        self._tag = zlib.crc32(f"{what} {formats}".encode())

        key_types, weighted = [t.key_type for t in tables], [t for t in tables if t.has_weights]
        types = [*[tf.float32] * len(tables), *key_types, *[tf.float32] * len(weighted)]
        self.gradient = OfGradient(self._backward, types, GRADIENTS)

    def forward(self, outputs: Outputs, arrays: list[Array]) -> None:
        """Looks up.

        Args:
          outputs: pooled rows of each table, `OF_CONTEXT`, the rows of each weighted table's items;
            told: the numbers of the context.
          arrays: what `inputs_of` gave; on the host what follows.
        """
        backend, comm, count = self.backend, self._comm, len(self.tables)
        with shared_failure(comm):
            tables = live_tables(self._references)
        agree(comm, self._tag, tables, self._combiners)
        with shared_failure(comm):
            insert, missing = self._policy.now(self.tables, self._pipeline)
            ratios = [t.filter_ratio if self._policy.has_filter else 1.0 for t in tables]
            given = self._given(arrays, arrays)
            # All that is known of, before kernels run, which TensorFlow's memory would wait for.
            shapes = [(its.num_rows, t.dim) for its, t in zip(given, tables, strict=True)]
            sent = [(0, shapes)]
            if comm.size == 1:
                sent.append((count, [_shape_of_words(sum([its.keys.size for its in given]))]))
            outputs.allocate(*sent)
            batch = self._batches.make(tables, given)._replace(
                inserts=[insert] * count, missing=[missing] * count, filter_ratios=ratios
            )

        def new_rows(shape: Shape) -> Array:
            return _words(outputs, count, shape[0], np.uint32)

        allocate = partial(outputs.several, 0)
        _, context = lookup.forward(backend, comm, batch, self._tag, allocate, new_rows)
        with failure_known_to_all(comm):
            keys, *others = context.others()
            outputs.give(count + 1, keys)
            for number, array in enumerate(others, count + 2):
                _words(outputs, number, array.size, np.int32)[...] = array
            sources = [each for each in context.pooling.sources if each is not None]
            for number, source in enumerate(sources, count + len(OF_CONTEXT)):
                outputs.give(number, source)
            outputs.tell(0, context.numbers())

    def _backward(self, outputs: Outputs, arrays: list[Array]) -> None:
        """Takes the gradient.

        Args:
          outputs: of each table the gradients of its rows, then the keys of each, then gradients of
            the weights of each that has any.
          arrays: gradients of the pooled rows, what `forward` took, and what it gave beside these
            rows; on the host what follows: numbers that `forward` took, and those that it told.
        """
        backend, comm, count = self.backend, self._comm, len(self.tables)
        with failure_known_to_all(comm):
            tables = live_tables(self._references)
            *arrays, numbers = arrays
            grads, inputs = arrays[:count], arrays[count:]
            batch = self._batches.make(tables, self._given(inputs, arrays))
            begin = len(arrays) - self._batches.num_numbers - self._num_context
            of_context = arrays[begin : begin + self._num_context]
            (rows, keys, *others), of_weighted = of_context[:4], iter(of_context[4:])
            sources = [None if each is None else next(of_weighted) for each in batch.weights]
            context = BackwardContext.of(
                *(backend, comm, batch, numbers, rows.view(np.uint32)),
                *((keys, *(each.view(np.int32) for each in others)), sources),
            )
            parts = list(zip(tables, batch.weights, self._combiners, strict=True))

            def allocate(sizes: Sequence[int]) -> tuple[Sequence[Array], Sequence[Array]]:
                shapes = [(size, t.dim) for size, t in zip(sizes, tables, strict=True)]
                of_keys = list(zip(sizes))
                outputs.allocate((0, shapes), (count, of_keys))
                return outputs.several(0, shapes), outputs.several(count, of_keys)

            found = lookup.backward(backend, parts, grads, context, allocate)
            weight_grads = [each for each in found.weight_grads if each is not None]
            for number, each in enumerate(weight_grads, 2 * count):
                outputs.give(number, each)

    def _given(self, inputs: list[Array], all_arrays: list[Array]) -> list[Given]:
        """Returns what is given by inputs that come first in some arrays, and numbers at the end."""
        begin = len(all_arrays) - self._batches.num_numbers
        return self._batches.given(inputs, all_arrays[begin:])


def _shape_of_words(count: int) -> Shape:
    """Returns the shape of an output of int64 that has so many numbers of 32 bits."""
    return (-(-count // 2),)


def _words(outputs: Outputs, number: int, count: int, dtype: type) -> Array:
    """Returns the memory of an output of int64, as so many numbers of 32 bits."""
    return outputs.empty(number, _shape_of_words(count)).view(dtype)[:count]
