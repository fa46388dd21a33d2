"""Which rows of static tables a lookup asks for: before anybody has read them."""

from collections.abc import Sequence
from typing import cast

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm import Communicator
from sok_lite.comm.protocol import split_offsets
from sok_lite.engine.batch import Batch
from sok_lite.engine.failure import failure_known_to_all
from sok_lite.engine.pooling import wrong_splits
from sok_lite.engine.segments import cut, dedup
from sok_lite.engine.sent_keys import SentKeys, send
from sok_lite.engine.static_table import AnyTable, AskedRows, StaticTable


def locate(
    backend: Backend, comm: Communicator, batch: Batch, tag: int
) -> tuple[list[AskedRows], SentKeys | None]:
    """Returns what each static table of a lookup is asked for, in their order.

    Every rank must call it. On one rank it waits for the device twice, else as `send` does and once
    more.

    Args:
      backend: where keys are.
      comm: the ranks.
      batch: of the lookup.
      tag: says which call this is; another one on another rank raises.

    Returns:
      (what is asked, what `send` gave; None on one rank).

    Raises:
      ValueError: a table has no such row, or row splits do not fit. The other ranks raise a
        CommunicatorError with the reason. No rank has changed anything.
    """
    if comm.size == 1:
        wrong = wrong_splits(backend, batch.splits_of_parts(), batch.sizes)
        if int(batch.outside(wrong)[0]):
            batch.check()
        return _located(backend, batch.tables, batch.keys, batch.sizes, 1), None
    sent = send(backend, comm, batch, tag)
    with failure_known_to_all(comm):
        sizes = sent.route.num_received.tolist()
        return _located(backend, batch.tables, sent.received, sizes, comm.size), sent


def _located(
    backend: Backend, tables: Sequence[AnyTable], keys: Array, sizes: Sequence[int], num_ranks: int
) -> list[AskedRows]:
    """Returns what this rank is asked for.

    Args:
      keys: (m,) int64, part by part; they may repeat.
      sizes: keys of each part.
    """
    pieces = cut(keys, sizes)
    static = [i for i, table in enumerate(tables) if table.is_static]
    sizes = [sizes[i] for i in static]
    joined = backend.xp.concatenate([keys[:0], *(pieces[i] for i in static)])
    distinct = dedup(backend, joined, split_offsets(np.array(sizes, np.int64)))
    strides = [cast(StaticTable, tables[i]).stride(num_ranks) for i in static]
    places = distinct.keys // _repeated(backend, np.array(strides, np.int64), distinct.sizes)
    starts = distinct.starts[:-1].astype(np.int32)
    numbers = distinct.inverse - _repeated(backend, starts, sizes)
    asked = zip(cut(places, distinct.sizes), cut(numbers, sizes), strict=True)
    return [AskedRows(*each) for each in asked]


def _repeated(backend: Backend, numbers: np.ndarray, counts: Sequence[int] | np.ndarray) -> Array:
    """Returns a number for each item: the one there is, or as often each as it has items."""
    if len(numbers) == 1:
        return numbers[0]
    return backend.from_host(np.repeat(numbers, counts))
