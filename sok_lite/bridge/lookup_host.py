"""The host half of `lookup_sparse`: eager tensors of all tables in, eager tensors out.

Here the joined tensors become what the engine takes, and its results lie in joined memory.
"""

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.backend import Backend
from sok_lite.bridge.inference import pipeline_of_trace, reading, refuse_to_insert
from sok_lite.bridge.joined import ResultRoom, joined_tensor, rows_of
from sok_lite.bridge.lookup_arguments import DenseSplits, Facts, items_of
from sok_lite.bridge.tensor import empty, to_array, to_tensor
from sok_lite.bridge.turns import Together, numbered
from sok_lite.bridge.type_spec import alive
from sok_lite.comm import Communicator
from sok_lite.engine import lookup
from sok_lite.engine.agreement import agree
from sok_lite.engine.batch import Batch
from sok_lite.engine.failure import failure_known_to_all, shared_failure
from sok_lite.engine.layout import Layout
from sok_lite.engine.segments import cut
from sok_lite.engine.sent_keys import SentKeys, pack_sent, unpack_sent
from sok_lite.engine.static_lookup import locate
from sok_lite.engine.static_table import AnyTable, GivenRows
from sok_lite.engine.trail import Trail, pack, unpack

# Which of the tensors of `items_of` the way back is given again, keys and row splits: a graph holds
# them anyway, and the packed trail has no copy.
AT_HAND = slice(1, 3)


class Treatment(NamedTuple):
    """How a call treats keys without a row: the arguments as given.

    Attributes:
      training, missing: see `inference.reading`.
      has_filter: whether new keys are drawn.
      reading_only: see `inference.reading`.
    """

    training: bool | None
    missing: str | None
    has_filter: bool
    reading_only: str | None = None


class LookupHost:
    """The host half of one call of `lookup_sparse`: eager tensors in, eager tensors out.

    Attributes:
      together: the ranks that make the call.
      what: names the call in errors.
      backend: of all its tables.
      tables: what is known of them.
    """

    def __init__(
        self,
        comm: Communicator,
        tables: list[Facts],
        treatment: Treatment,
        are_keys_sent: bool = False,
    ) -> None:
        self.what = f"lookup_sparse in {', '.join(repr(table.name) for table in tables)}"
        self.backend: Backend = alive(tables[0].variable).table.backend
        self._comm = comm
        self.together = Together(comm, numbered(self.what))
        self.tables = tables
        self._treatment = treatment
        self._are_keys_sent = are_keys_sent
        formats = [
            (t.dim, t.key_type.name, t.dtype.name, t.owner, t.num_rows, t.combiner) for t in tables
        ]
        # Equal on all ranks for one call, and telling it from most others.
        self._tag = zlib.crc32(f"{self.what} {formats}".encode())
        self._combiners = [table.combiner for table in tables]
        self._layout: Layout | None = None  # of the last batch: most have the same
        # Where all ids are dense, no trail has their row splits.
        self._are_all_dense = all(table.width is not None for table in tables)
        self._dense_splits = DenseSplits(tables, self.backend)
        self._num_static = sum(table.is_static for table in tables)
        self._new_trail = partial(empty, dtype=tf.int64, backend=self.backend)
        self._pipeline = pipeline_of_trace()

    def locate(self, *tensors: tf.Tensor) -> list[Any]:
        """Takes what `items_of` does, and sends the keys where there are several ranks.

        Returns:
          Of all static tables one after the other: array (num_static,) int64, how many distinct
          rows this rank is asked for; int64, where they lie; int32, which of its table's rows each
          key has. On several ranks then what `forward` takes of the keys that have been sent.
        """
        backend, comm = self.backend, self._comm
        tag = zlib.crc32(f"locate {self._tag}".encode())
        batch = self._checked_batch(tag, tensors)
        asked, sent = locate(backend, comm, batch, tag)
        with failure_known_to_all(comm):
            packed = []
            if sent is not None:
                array = pack_sent(backend, sent, self._new_trail)
                packed = [to_tensor(array, tf.int64, backend)]
            return [
                np.array([len(each.places) for each in asked], np.int64),
                joined_tensor([each.places for each in asked], tf.int64, backend),
                joined_tensor([each.number for each in asked], tf.int32, backend),
                *packed,
            ]

    def forward(self, *tensors: tf.Tensor) -> tuple[tf.Tensor, Trail]:
        """Looks up.

        Args:
          tensors: what `items_of` takes; where there are static tables, what `Read` of
            bridge/static_lookup.py says of them.

        Returns:
          (what `cut_rows` takes apart, the trail).
        """
        backend, comm, tag = self.backend, self._comm, self._tag
        num_given = self._num_static + bool(self._num_static)
        end = len(tensors) - num_given
        (items, sent), given = self._taken_apart(tensors[:end]), tensors[end:]
        batch = self._checked_batch(tag, items)
        if given:
            with failure_known_to_all(comm):
                sizes = batch.sizes if sent is None else sent.route.num_received.tolist()
                batch = batch._replace(given=self._given(sizes, *given))
        room = ResultRoom(backend)
        outputs, trail = lookup.forward_batch(backend, comm, batch, tag, room, sent)
        return to_tensor(outputs.whole, tf.float32, backend), trail

    def _taken_apart(
        self, tensors: Sequence[tf.Tensor]
    ) -> tuple[Sequence[tf.Tensor], SentKeys | None]:
        """Returns what `items_of` takes, and the keys that were sent."""
        if not self._are_keys_sent:
            return tensors, None
        *tensors, packed = tensors
        with failure_known_to_all(self._comm):
            array = to_array(packed, self.backend)
            return tensors, unpack_sent(self.backend, self._comm, array, len(self.tables))

    def _given(
        self, sizes: Sequence[int], numbers: tf.Tensor, *rows: tf.Tensor
    ) -> list[GivenRows | None]:
        """Returns the rows of each table that is static, None for any other.

        Args:
          sizes: of each table, how many keys this rank is asked.
          numbers, rows: as of `Read`.
        """
        of_static = [n for n, facts in zip(sizes, self.tables, strict=True) if facts.is_static]
        pieces = cut(to_array(numbers, self.backend), of_static)
        arrays = [to_array(each, self.backend) for each in rows]
        given = iter(map(GivenRows, arrays, pieces))
        return [next(given) if facts.is_static else None for facts in self.tables]

    def forward_packed(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Returns the outputs and the packed trail."""
        outputs, trail = self.forward(*tensors)
        at_hand = [to_array(tensor, self.backend) for tensor in tensors[AT_HAND]]
        if self._are_all_dense:
            trail = trail._replace(row_splits=None)
        packed = pack(self.backend, trail, self._new_trail, at_hand)
        return [outputs, to_tensor(packed, tf.int64, self.backend)]

    def backward(self, trail: Trail, *tensors: tf.Tensor) -> list[Any]:
        """Takes the outputs' gradients as `joined_rows` gives them, then the joined weights.

        Returns:
          [array (num_tables,) int64, number of keys of each; then of all tables joined: int64 keys,
          row gradients for `cut_rows`, weight gradients if there are weights].
        """
        of_weights = [
            int(n)
            for facts, n in zip(self.tables, trail.num_items, strict=True)
            if facts.has_weights
        ]
        *grads, joined_weights = tensors if of_weights else (*tensors, None)
        batches = trail.batch_sizes.tolist()
        shapes = [(n, facts.dim) for facts, n in zip(self.tables, batches, strict=True)]
        out_grads = rows_of(grads, shapes, self.backend)
        weights = iter(
            cut(to_array(joined_weights, self.backend), of_weights) if of_weights else ()
        )
        parts = []
        for facts in self.tables:
            weight = next(weights) if facts.has_weights else None
            parts.append((alive(facts.variable).table, weight, facts.combiner))
        room = ResultRoom(self.backend)
        with failure_known_to_all(self._comm):
            gradients = lookup.backward(self.backend, parts, out_grads, trail, room)
        results = [
            np.array([len(gradient.keys) for gradient in gradients], np.int64),
            joined_tensor([gradient.keys for gradient in gradients], tf.int64, self.backend),
            to_tensor(room.whole, tf.float32, self.backend),
        ]
        if of_weights:
            weight_grads = [g.weight_grads for g in gradients if g.weight_grads is not None]
            results.append(joined_tensor(weight_grads, tf.float32, self.backend))
        return results

    def unpacking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function of the packed trail, and of `AT_HAND`, that calls one of the trail."""

        def run(packed: tf.Tensor, *tensors: tf.Tensor) -> Any:
            count = AT_HAND.stop - AT_HAND.start
            array, *at_hand = [to_array(each, self.backend) for each in (packed, *tensors[:count])]
            trail = unpack(self.backend, self._comm, array, len(self.tables), at_hand)
            if self._are_all_dense:
                splits, _ = self._dense_splits(trail.num_items.tolist())
                trail = trail._replace(row_splits=splits)
            return function(trail, *tensors[count:])

        return run

    def _checked_batch(self, tag: int, tensors: Sequence[tf.Tensor]) -> Batch:
        # Where the keys are sent, the others wait for rows already.
        known = failure_known_to_all if self._are_keys_sent else shared_failure
        with known(self._comm):
            tables = [alive(facts.variable).table for facts in self.tables]
        agree(self._comm, tag, tables, self._combiners)
        with known(self._comm):
            return self._batch(tables, tensors)

    def _batch(self, tables: list[AnyTable], tensors: Sequence[tf.Tensor]) -> Batch:
        training, missing, has_filter, reading_only = self._treatment
        usually = "zeros" if has_filter else "initial"
        insert, missing = reading(training, missing, usually, reading_only)
        growing = [facts.name for facts in self.tables if not facts.is_static]
        if insert and self._pipeline and growing:
            refuse_to_insert(self._pipeline, ", ".join(growing))
        items = items_of(self.tables, tensors, self.backend, self._dense_splits)
        layout = self._layout
        if layout is None or not layout.is_of(items.sizes, items.num_rows):
            layout = Layout(tables, self._combiners, items.sizes, items.num_rows)
            self._layout = layout
        return Batch(
            tables,
            [insert] * len(tables),
            [missing] * len(tables),
            [table.filter_ratio if has_filter else 1.0 for table in tables],
            layout=layout,
            keys=items.keys,
            row_splits=items.row_splits,
            weights=items.weights,
            given=[None] * len(tables),
        )
