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
from sok_lite.comm import Communicator
from sok_lite.engine import step, trips
from sok_lite.engine.agreement import check_equal_on_all_ranks
from sok_lite.engine.failure import failure_known_to_all, shared_failure
from sok_lite.engine.table import HkvTable
from sok_lite.inference import reading
from sok_lite.joined import joined_tensor, pieces, room_for, rows_of
from sok_lite.lookup_arguments import Facts, items_of
from sok_lite.row_gradient import size_of
from sok_lite.tensor import empty, to_array, to_tensor
from sok_lite.variable_spec import alive


class Treatment(NamedTuple):
    """How a call treats keys without a row: the arguments as given.

    Attributes:
      training, missing: see `inference.reading`.
      has_filter: whether new keys are drawn.
    """

    training: bool | None
    missing: str | None
    has_filter: bool


class LookupHost:
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
        self._new_trail = partial(empty, dtype=tf.int64, backend=self.backend)

    def forward(self, *tensors: tf.Tensor) -> tuple[tf.Tensor, step.Trail]:
        """Takes what `items_of` does; returns what `cut_rows` takes apart, and the trail."""
        tables = [alive(facts.variable).table for facts in self.tables]
        step.agree(self._comm, self._tag, tables, [facts.combiner for facts in self.tables])
        with shared_failure(self._comm):
            parts = self._parts(tensors)
            # The engine refuses splits without a beginning.
            shapes = [(max(0, len(part.row_splits) - 1), part.table.dim) for part in parts]
            outputs, room = room_for(shapes, self.backend)
        _, trail = step.forward(self.backend, self._comm, parts, self._tag, room)
        return to_tensor(outputs, tf.float32, self.backend), trail

    def forward_packed(self, *tensors: tf.Tensor) -> list[tf.Tensor]:
        """Returns the outputs and the packed trail."""
        outputs, trail = self.forward(*tensors)
        packed = step.pack(self.backend, trail, self._new_trail)
        return [outputs, to_tensor(packed, tf.int64, self.backend)]

    def backward(self, trail: step.Trail, *tensors: tf.Tensor) -> list[Any]:
        """Takes the outputs' gradients as `joined_rows` gives them, then the joined weights.

        Returns:
          [array (num_tables,) int64, number of keys of each; (num_tables, 2) int32, `size_of` each;
          then of all tables one after the other: int64 keys, row gradients for `cut_rows`, weight
          gradients if there are weights].
        """
        ways = list(zip(self.tables, trail.tables, strict=True))
        of_weights = [len(way.inverse) for facts, way in ways if facts.has_weights]
        *grads, joined_weights = tensors if of_weights else (*tensors, None)
        shapes = [(len(way.row_splits) - 1, facts.dim) for facts, way in ways]
        out_grads = rows_of(grads, shapes, self.backend)
        weights = iter(
            pieces(to_array(joined_weights, self.backend), of_weights) if of_weights else ()
        )
        parts = []
        for facts in self.tables:
            weight = next(weights) if facts.has_weights else None
            parts.append((alive(facts.variable).table, weight, facts.combiner))
        with failure_known_to_all(self._comm):
            shapes = [(len(way.local_keys), facts.dim) for facts, way in ways]
            row_grads, room = room_for(shapes, self.backend)
            gradients = step.backward(self.backend, parts, out_grads, trail, room)
        results = [
            np.array([len(way.local_keys) for _, way in ways], np.int64),
            tf.constant([size_of(table) for table, _, _ in parts], tf.int32),
            joined_tensor([way.local_keys for _, way in ways], tf.int64, self.backend),
            to_tensor(row_grads, tf.float32, self.backend),
        ]
        if of_weights:
            weight_grads = [g.weight_grads for g in gradients if g.weight_grads is not None]
            results.append(joined_tensor(weight_grads, tf.float32, self.backend))
        return results

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
        training, missing, has_filter = self._treatment
        insert, missing = reading(training, missing, "zeros" if has_filter else "initial")
        parts = []
        for i, items in enumerate(items_of(self.tables, tensors, self.backend)):
            facts, splits, theirs = self.tables[i], items.row_splits, items.weight_splits
            if theirs is not None and (
                splits.shape != theirs.shape or bool((splits != theirs).any())
            ):
                raise ValueError(
                    f"The rows of sp_weights[{i}] must be as long as those of sp_ids[{i}]. "
                    "Received: rows of other lengths."
                )
            table = alive(facts.variable).table
            ratio = 1.0
            if has_filter and isinstance(table, HkvTable):
                ratio = table.options.filter_ratio
            parts.append(
                step.Part(
                    *(table, items.keys, splits, items.weights, facts.combiner),
                    *(insert, missing, ratio),
                )
            )
        return parts
