"""Sends the keys of a batch to their owners; no table is read or changed."""

from typing import NamedTuple

from sok_lite.backend import Array, Backend
from sok_lite.comm import Communicator
from sok_lite.comm.gpu_transport import Check
from sok_lite.engine.batch import Batch
from sok_lite.engine.dedup import dedup
from sok_lite.engine.exchange import send_keys
from sok_lite.engine.failure import shared_failure
from sok_lite.engine.pooling import wrong_splits
from sok_lite.engine.route import Route


class SentKeys(NamedTuple):
    """Keys that were sent to their owners.

    Attributes:
      route: how they were sent; rows and gradients follow it.
      inverse: (items,) int32, the number of the key of each item among the distinct keys that this
        rank sent, numbered over all parts.
      received: (m,) int64, the keys that this rank received, part by part; they may repeat.
    """

    route: Route
    inverse: Array
    received: Array


def send(
    backend: Backend, comm: Communicator, batch: Batch, tag: int, check: Check | None = None
) -> SentKeys:
    """Sends the keys of a batch to their owners. Every rank must call it.

    Args:
      tag: number of the call, equal on all ranks; if another rank has another one, all raise.
      check: tells whether the keys may be sent; None: they may if the row splits fit.

    Raises:
      ValueError: row splits do not fit; or whatever the check raises. The other ranks raise a
        CommunicatorError with the reason.
    """
    with shared_failure(comm):
        if check is None:
            count = wrong_splits(backend, batch.splits_of_parts(), batch.layout.sizes)
            check = Check(count, batch.check_splits)
        distinct = dedup(backend, batch.keys, batch.layout.begin)
    received, route = send_keys(
        backend,
        comm,
        distinct.keys,
        distinct.sizes,
        [table.key_dtype for table in batch.tables],
        [table.owner for table in batch.tables],
        tag=tag,
        check=check,
    )
    return SentKeys(route, distinct.inverse, received)
