"""The host half of `lookup_sparse`, whoever keeps the rows: eager tensors in, eager tensors out.

Here the joined tensors become what the engine takes, and its results lie in joined memory.
"""

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array, Backend
from sok_lite.bridge.collective_order import CollectiveCall, numbered
from sok_lite.bridge.joined import ResultBuffer, joined_tensor, rows_of
from sok_lite.bridge.lookup_arguments import TableSpec
from sok_lite.bridge.lookup_items import items_of, splits_of_dense
from sok_lite.bridge.tensor import empty, to_array, to_tensor
from sok_lite.bridge.type_spec import live_tables
from sok_lite.comm import Communicator
from sok_lite.engine.batch import Batch
from sok_lite.engine.layout import Layout
from sok_lite.engine.packed import Packing, Unpacking
from sok_lite.engine.segments import cut

# Which of the tensors of `items_of` the way back is given again, keys and row splits: a graph holds
# them anyway, and the packed context has no copy.
AT_HAND = slice(1, 3)

# Of each table: the engine's, its weights, its combiner.
BackwardParts = list[tuple[Any, Array | None, str]]


class PooledHost(ABC):
    """The host half of one call of `lookup_sparse` for tables of one kind.

    What the way back needs, the context, is a NamedTuple of the engine's with a `pooling`.

    Attributes:
      comm: the ranks.
      collective: the same, as they make the call.
      what: names the call in errors.
      backend: of all its tables.
      tables: what is known of them.
      more_dtypes: of what `backward` gives at the end.
      context_dtypes: of the tensors by which a graph carries the context.
    """

    more_dtypes: Sequence[tf.DType] = ()
    context_dtypes: Sequence[tf.DType] = (tf.int64,)

    def __init__(self, comm: Communicator, tables: list[TableSpec], what: str) -> None:
        self.what, self.comm, self.tables = what, comm, tables
        self._references = [table.variable for table in tables]
        self.backend: Backend = self._live_tables()[0].backend
        self.collective = CollectiveCall(comm, numbered(what))
        self._combiners = [table.combiner for table in tables]
        self._layout: Layout | None = None  # of the last batch: most have the same
        # Where all ids are dense, no packed context has their row splits.
        self._has_splits = None in [table.width for table in tables]
        self._new_words = partial(empty, dtype=tf.int64, backend=self.backend)

    # ---------------------------------------------------------------- what a kind of table adds

    @abstractmethod
    def _forward(self, buffer: ResultBuffer, in_graph: bool, *tensors: tf.Tensor) -> Any:
        """Looks up into a buffer; the tensors are those of `forward`.

        Args:
          in_graph: whether a graph is to carry the context.
        """

    @abstractmethod
    def _backward(
        self, parts: BackwardParts, out_grads: Sequence[Array], context: Any, buffer: ResultBuffer
    ) -> tuple[list[int], Sequence[Array | None], list[tf.Tensor]]:
        """Writes row gradients into a buffer.

        Returns:
          (how many of each table; the gradients by weights of each table, or None; `more_dtypes`).
        """

    @abstractmethod
    def _pack(self, context: Any, packing: Packing) -> list[tf.Tensor]:
        """Returns a context as tensors of `context_dtypes`."""

    @abstractmethod
    def _unpack(self, packed: Sequence[tf.Tensor], unpacking: Unpacking) -> Any:
        """Returns the context that `_pack` gave."""

    # ---------------------------------------------------------------- what all do

    def forward(self, *tensors: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Looks up.

        Args:
          tensors: what `items_of` takes, and what this kind of table needs beside it.

        Returns:
          (what `cut_rows` takes apart, what `backward` takes).
        """
        return self._looked_up(False, tensors)

    def forward_packed(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Returns the outputs, and the context as tensors."""
        outputs, context = self._looked_up(True, tensors)
        at_hand = [to_array(tensor, self.backend) for tensor in tensors[AT_HAND]]
        packing = Packing(self._new_words, at_hand, self._has_splits)
        return [outputs, *self._pack(context, packing)]

    def _looked_up(self, in_graph: bool, tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, Any]:
        buffer = ResultBuffer(self.backend)
        context = self._forward(buffer, in_graph, *tensors)
        return to_tensor(buffer.whole, tf.float32, self.backend), context

    def backward(self, context: Any, *tensors: tf.Tensor) -> list[Any]:
        """Takes the outputs' gradients as `joined_rows` gives them, then the joined weights.

        Returns:
          [array (num_tables,) int64, number of rows of each; row gradients for `cut_rows`; the
          weights' gradients joined, if there are weights; `more_dtypes`].
        """
        num_items, batches = context.pooling.numbers.tolist()
        its_items = zip(self.tables, num_items, strict=True)
        of_weights = [n for spec, n in its_items if spec.has_weights]
        *grads, joined_weights = tensors if of_weights else (*tensors, None)
        shapes = [(n, spec.dim) for spec, n in zip(self.tables, batches, strict=True)]
        out_grads = rows_of(grads, shapes, self.backend)
        weights: list[Array | None] = [None] * len(self.tables)
        if of_weights:
            cut_weights = iter(cut(to_array(joined_weights, self.backend), of_weights))
            weights = [next(cut_weights) if each.has_weights else None for each in self.tables]
        parts: BackwardParts = list(zip(self._live_tables(), weights, self._combiners, strict=True))
        buffer = ResultBuffer(self.backend)
        lengths, all_weight_grads, more = self._backward(parts, out_grads, context, buffer)
        results = [np.array(lengths, np.int64), to_tensor(buffer.whole, tf.float32, self.backend)]
        if of_weights:
            weight_grads = [each for each in all_weight_grads if each is not None]
            results.append(joined_tensor(weight_grads, tf.float32, self.backend))
        return [*results, *more]

    def backward_packed(self, *tensors: tf.Tensor) -> list[Any]:
        """Does what `backward` does, with the tensors of the context and of `AT_HAND` for it."""
        begin = len(self.context_dtypes)
        end = begin + AT_HAND.stop - AT_HAND.start
        at_hand = [to_array(each, self.backend) for each in tensors[begin:end]]
        unpacking = Unpacking(at_hand, None if self._has_splits else self._splits_of)
        return self.backward(self._unpack(tensors[:begin], unpacking), *tensors[end:])

    def _tag(self, tables: Sequence[TableSpec]) -> int:
        """Returns a number that is equal on all ranks for one call, and tells it from most."""
        formats = [
            (t.dim, t.key_type.name, t.dtype.name, t.owner, t.num_rows, t.combiner) for t in tables
        ]
        return zlib.crc32(f"{self.what} {formats}".encode())

    def _splits_of(self, sizes: list[int]) -> Array:
        """Returns the row splits that no packed context has, by the items of each table."""
        return splits_of_dense(self.tables, sizes, self.backend)[0]

    def _live_tables(self) -> list[Any]:
        return live_tables(self._references)

    def _batch(self, tables: list[Any], tensors: Sequence[tf.Tensor], **treatment: Any) -> Batch:
        """Returns the batch that tensors are; `treatment` says what becomes of missing keys."""
        *items, sizes, num_rows = items_of(self.tables, tensors, self.backend)
        layout = self._layout
        if layout is None or not layout.is_of(sizes, num_rows):
            layout = self._layout = Layout(tables, self._combiners, sizes, num_rows)
        return Batch(tables, layout, *items, **treatment)
