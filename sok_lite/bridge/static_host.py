"""The host half of `lookup_sparse` in static tables, whose rows TensorFlow reads."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge.joined import ResultBuffer
from sok_lite.bridge.lookup_arguments import TableSpec
from sok_lite.bridge.pooled_host import BackwardParts, PooledHost
from sok_lite.bridge.tensor import to_array, to_tensor
from sok_lite.bridge.type_spec import live_tables
from sok_lite.comm import Communicator
from sok_lite.engine import static_lookup
from sok_lite.engine.agreement import agree
from sok_lite.engine.failure import failure_known_to_all, shared_failure
from sok_lite.engine.packed import Packing, Unpacking
from sok_lite.engine.static_lookup import StaticContext


class StaticHost(PooledHost):
    """The host half of one call.

    Args:
      tables: the static ones of the call.
      of_call: all tables of the call, which ranks have to agree on before anything is sent.
    """

    def __init__(
        self, comm: Communicator, tables: list[TableSpec], of_call: list[TableSpec], what: str
    ) -> None:
        super().__init__(comm, tables, what)
        self._of_call = of_call
        self._tag_of_call = self._tag(of_call)

    def locate(self, *tensors: tf.Tensor) -> list[Any]:
        """Takes what `items_of` does, and sends the keys where there are several ranks.

        Returns:
          [array (num_tables,) int64, how many distinct rows this rank is asked for; of all tables
          one after the other int64, where they lie, and int32, which of its table's rows each key
          has; on several ranks what `forward` takes of the keys that were sent].
        """
        backend, comm, tag = self.backend, self.comm, self._tag_of_call
        with shared_failure(comm):
            of_call = live_tables([spec.variable for spec in self._of_call])
        agree(comm, tag, of_call, [spec.combiner for spec in self._of_call])
        with shared_failure(comm):
            batch = self._batch(self._live_tables(), tensors)
        located = static_lookup.locate(backend, comm, batch, tag)
        with failure_known_to_all(comm):
            packed = []
            if located.sent is not None:
                array = static_lookup.pack_sent(backend, located.sent, self._new_words)
                packed = [to_tensor(array, tf.int64, backend)]
            return [
                located.num_places,
                to_tensor(located.places, tf.int64, backend),
                to_tensor(located.number, tf.int32, backend),
                *packed,
            ]

    def _forward(self, buffer: ResultBuffer, in_graph: bool, *tensors: tf.Tensor) -> StaticContext:
        """Takes what `items_of` does, what `locate` gave but for the places, and the rows read."""
        backend, comm, num_tables = self.backend, self.comm, len(self.tables)
        with failure_known_to_all(comm):  # the others wait for rows already
            *items, number = tensors[:-num_tables]
            rows = [to_array(each, backend) for each in tensors[-num_tables:]]
            sent = None
            if comm.size > 1:
                *items, packed = items
                array = to_array(packed, backend)
                sent = static_lookup.unpack_sent(backend, comm, array, num_tables)
            batch = self._batch(self._live_tables(), items)
            numbers = to_array(number, backend)
        return static_lookup.forward(backend, comm, batch, numbers, rows, sent, buffer)[1]

    def _backward(
        self,
        parts: BackwardParts,
        out_grads: Sequence[Array],
        context: StaticContext,
        buffer: ResultBuffer,
    ) -> tuple[list[int], list[Array | None], list[tf.Tensor]]:
        with failure_known_to_all(self.comm):
            grads, by_weights = static_lookup.backward(
                self.backend, parts, out_grads, context, buffer
            )
        return [len(each) for each in grads], by_weights, []

    def _pack(self, context: StaticContext, packing: Packing) -> list[tf.Tensor]:
        array = static_lookup.pack(self.backend, context, packing)
        return [to_tensor(array, tf.int64, self.backend)]

    def _unpack(self, packed: Sequence[tf.Tensor], unpacking: Unpacking) -> StaticContext:
        array, num_tables = to_array(packed[0], self.backend), len(self.tables)
        return static_lookup.unpack(self.backend, self.comm, array, num_tables, unpacking)
