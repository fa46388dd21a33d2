"""The first half of a lookup over several ranks: the keys of a batch travel to their owners.

It reads nothing of a table and changes nothing. A lookup with static tables does it by itself, for
TensorFlow has to read their rows before the other half.
"""

from typing import NamedTuple

from sok_lite.backend import Array, Backend
from sok_lite.comm import Communicator
from sok_lite.engine.batch import Batch
from sok_lite.engine.exchange import Check, Route, send_keys
from sok_lite.engine.failure import shared_failure
from sok_lite.engine.packed import Empty, pack_arrays, unpack_arrays
from sok_lite.engine.pooling import wrong_splits
from sok_lite.engine.segments import dedup


class SentKeys(NamedTuple):
    """Keys that have travelled.

    Attributes:
      route: how.
      inverse: (items,) int32, which of the distinct keys that this rank sent each item of its batch
        asks for, numbered over all parts.
      received: (m,) int64, the keys that this rank is asked, part by part; they may repeat.
    """

    route: Route
    inverse: Array
    received: Array


def send(backend: Backend, comm: Communicator, batch: Batch, tag: int) -> SentKeys:
    """Sends the keys of a batch to their owners. Every rank must call it.

    Args:
      tag: says which call this is; another one on another rank raises.

    Raises:
      ValueError: row splits do not fit, or a static table has no such row. The other ranks raise a
        CommunicatorError with the reason.
    """
    with shared_failure(comm):
        wrong = batch.outside(wrong_splits(backend, batch.splits_of_parts(), batch.sizes))
        distinct = dedup(backend, batch.keys, batch.layout.begin)
    received, route = send_keys(
        backend,
        comm,
        distinct.keys,
        distinct.sizes,
        [table.key_dtype for table in batch.tables],
        [table.owner for table in batch.tables],
        tag=tag,
        check=Check(wrong, batch.check),
    )
    return SentKeys(route, distinct.inverse, received)


def pack_sent(backend: Backend, sent: SentKeys, empty: Empty | None = None) -> Array:
    """Returns sent keys as one int64 array; see `pack_arrays`."""
    route, arrays = sent.route, [sent.route.order, sent.inverse, sent.received]
    return pack_arrays(backend, route.comm.size, route.numbers, arrays, empty)


def unpack_sent(backend: Backend, comm: Communicator, packed: Array, num_parts: int) -> SentKeys:
    """Returns what `pack_sent` packed; its arrays are views of `packed`.

    Raises:
      ValueError: another version wrote it, or another number of ranks.
    """
    count = Route.num_numbers(comm.size, num_parts)
    numbers, (order, *arrays) = unpack_arrays(backend, comm.size, packed, count, 3)
    return SentKeys(Route.of(backend, comm, numbers, order), *arrays)
