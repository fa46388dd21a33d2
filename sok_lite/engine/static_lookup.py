"""Looks up rows of static tables, which callers store, on the ranks that own them.

`ask` sends row numbers to their owners. The caller there reads the rows at the returned positions,
`exchange.return_rows` sends them to the ranks that asked, and `send_grads` the gradients back.
"""

from functools import partial
from typing import NamedTuple, cast

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.ragged import repeat_values, split, split_offsets
from sok_lite.comm import Communicator
from sok_lite.comm.gpu_transport import Check
from sok_lite.engine.batch import Batch
from sok_lite.engine.exchange import AllToAllPlan, dispatch_keys
from sok_lite.engine.failure import failure_known_to_all, shared_failure
from sok_lite.engine.pooling import wrong_splits
from sok_lite.engine.static_table import StaticTable


class Asked(NamedTuple):
    """The rows that ranks have asked each other for.

    Attributes:
      places: for each table, (m,) integers, positions on this rank of the rows that others want;
        they may repeat.
      numbers: for each table, (its keys,) integers, the position of each key's row among those that
        return.
      plan: of the exchange, by which the rows return.
    """

    places: list[Array]
    numbers: list[Array]
    plan: AllToAllPlan


def ask(backend: Backend, comm: Communicator, batch: Batch, tag: int) -> Asked:
    """Sends the row numbers of a batch to the ranks that own the rows. Every rank must call it.

    Args:
      batch: of static tables.
      tag: number of the call; all ranks raise if it is not equal on them.

    Raises:
      ValueError: a table has no such row, or row splits do not fit. The other ranks raise a
        CommunicatorError with the reason.
    """
    tables, sizes = cast(list[StaticTable], batch.tables), batch.layout.sizes
    with shared_failure(comm):
        count = wrong_splits(backend, batch.splits_per_feature(), sizes)
        num_rows = backend.from_host(np.array([table.num_rows for table in tables], np.int64))
        table_of_key = repeat_values(backend, np.arange(len(tables)), sizes)
        is_outside = batch.keys >= backend.xp.take(num_rows, table_of_key)
        count += (is_outside | (batch.keys < 0)).sum()
    sent = dispatch_keys(backend, comm, batch, tag, Check(count, partial(check, batch)))
    with failure_known_to_all(comm):
        num_received = sent.plan.num_received
        strides = np.array([table.stride(comm.size) for table in tables], np.int64)
        places = sent.received // repeat_values(backend, strides, num_received)
        first = split_offsets(sent.plan.num_sent)[:-1]
        numbers = sent.inverse - repeat_values(backend, first, sizes)
        return Asked(split(places, num_received), split(numbers, sizes), sent.plan)


def check(batch: Batch) -> None:
    """Raises ValueError if row splits or row numbers do not fit. On a GPU it waits."""
    batch.check_splits()
    for table, keys in zip(batch.tables, split(batch.keys, batch.layout.sizes), strict=True):
        cast(StaticTable, table).check_rows(keys)
