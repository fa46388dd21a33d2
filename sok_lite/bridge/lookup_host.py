"""The host half of `lookup_sparse` in tables that grow."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge.gpu import device_name
from sok_lite.bridge.host_numbers import (
    no_elements,
    num_shapes,
    numbers_of,
    unzigzag,
    with_shapes,
    zigzag,
)
from sok_lite.bridge.inference import MissingKeyPolicy, pipeline_of_trace
from sok_lite.bridge.joined import ResultBuffer
from sok_lite.bridge.lookup_arguments import TableSpec
from sok_lite.bridge.pooled_host import BackwardParts, PooledHost
from sok_lite.bridge.tensor import empty, to_array, to_tensor
from sok_lite.comm import Communicator
from sok_lite.engine import lookup
from sok_lite.engine.agreement import agree
from sok_lite.engine.backward_context import BackwardContext, header_size, pack, unpack
from sok_lite.engine.failure import failure_known_to_all, shared_failure
from sok_lite.engine.packed import Empty, Packing, Unpacking


class LookupHost(PooledHost):
    """The host half of one call; `backward` gives the keys, int64, of all tables joined, as well.

    Args:
      policy: for keys without a row.
    """

    more_dtypes = (tf.int64,)

    def __init__(
        self, comm: Communicator, tables: list[TableSpec], policy: MissingKeyPolicy, what: str
    ) -> None:
        super().__init__(comm, tables, what)
        # What a GPU would have to be waited for: row numbers would be copied when the host has read
        # the counters, and the header read back. Of several ranks it is too long for shapes.
        self._is_on_gpu = self.backend.name != "cpu"
        is_apart = self._is_on_gpu and comm.size == 1
        self._num_headers = num_shapes(header_size(len(tables))) if is_apart else 0
        if self._is_on_gpu:
            self.context_dtypes = [tf.int64, tf.uint32, *[tf.int64] * self._num_headers]
        self._policy = policy
        self._tag_of_call = self._tag(tables)
        self._pipeline = pipeline_of_trace()

    def _forward(
        self, buffer: ResultBuffer, in_graph: bool, *tensors: tf.Tensor
    ) -> BackwardContext:
        with shared_failure(self.comm):
            tables = self._live_tables()
        agree(self.comm, self._tag_of_call, tables, self._combiners)
        with shared_failure(self.comm):
            insert, missing = self._policy.now(self.tables, self._pipeline)
            has_filter, n = self._policy.has_filter, len(tables)
            batch = self._batch(
                tables,
                tensors,
                inserts=[insert] * n,
                missing=[missing] * n,
                filter_ratios=[table.filter_ratio if has_filter else 1.0 for table in tables],
            )
        new_rows: Empty | None = None
        if in_graph and self._is_on_gpu:
            new_rows = partial(empty, dtype=tf.uint32, backend=self.backend)
        where = (buffer, new_rows)
        return lookup.forward(self.backend, self.comm, batch, self._tag_of_call, *where)[1]

    def _backward(
        self,
        parts: BackwardParts,
        out_grads: Sequence[Array],
        context: BackwardContext,
        buffer: ResultBuffer,
    ) -> tuple[list[int], Sequence[Array | None], list[tf.Tensor]]:
        with failure_known_to_all(self.comm):
            found = lookup.backward(self.backend, parts, out_grads, context, buffer)
        keys = to_tensor(found.keys.whole, tf.int64, self.backend)
        return found.sizes, found.weight_grads, [keys]

    def _pack(self, context: BackwardContext, packing: Packing) -> list[tf.Tensor]:
        backend, headers = self.backend, [np.empty(0, np.int64)]
        if not self._is_on_gpu:
            return [to_tensor(pack(backend, context, packing), tf.int64, backend)]
        packing = packing._replace(at_hand=[*packing.at_hand, context.rows])
        # In an elastic job there may be more ranks by now.
        if self._num_headers > 0 and self.comm.size == 1:
            packing = packing._replace(keep_header=headers.append)
        array = pack(backend, context, packing)
        place = device_name(backend)
        return [
            to_tensor(array, tf.int64, backend) if array.size else no_elements(place),
            to_tensor(context.rows, tf.uint32, backend),
            *with_shapes(zigzag(headers[-1]), self._num_headers, place),
        ]

    def _unpack(self, packed: Sequence[tf.Tensor], unpacking: Unpacking) -> BackwardContext:
        backend, num_parts = self.backend, len(self.tables)
        array, *rows = [to_array(each, backend) for each in packed[:2]]
        header = unzigzag(numbers_of(packed[2:])) if self._num_headers else None
        if header is not None and not header.size:
            header = None  # the array has it
        if rows or header is not None:
            unpacking = unpacking._replace(at_hand=[*unpacking.at_hand, *rows], header=header)
        return unpack(backend, self.comm, array, num_parts, unpacking)
