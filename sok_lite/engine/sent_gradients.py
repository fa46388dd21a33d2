"""Sends gradients to the owners of their keys, as float32 or rounded to bfloat16."""

from collections.abc import Sequence

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import Work
from sok_lite.engine.batch import ShardedTable
from sok_lite.engine.exchange import send_grads
from sok_lite.engine.route import Route


def send_sums(
    backend: Backend, tables: Sequence[ShardedTable], route: Route, sums: Sequence[Array]
) -> list[Array]:
    """Sends the gradients of a lookup to the owners of their keys. Every rank must call it.

    Those of a table that `rounds_gradients` are sent as bfloat16, each rounded to nearest even,
    also to this rank itself: so a gradient is the same whichever rank owns its key.

    Args:
      tables: of each part.
      route: of the keys of the lookup.
      sums: of each part (u, dim) float32, one row per key that this rank sent.

    Returns:
      Of each part (m, dim) float32, one row per key that this rank received; not summed over ranks.

    Raises:
      CommunicatorError: a rank has died, or is in another exchange or lookup, or has gradients of
        other formats; on every rank.
    """
    rounded = [i for i, table in enumerate(tables) if table.rounds_gradients]
    sent = list(sums)
    for i in rounded:
        sent[i] = backend.xp.empty(sums[i].shape, np.uint16)
    _convert(backend, "sent_gradients_round", [(sums[i], sent[i]) for i in rounded])
    received = send_grads(route, sent)
    arrived = list(received)
    for i in rounded:
        arrived[i] = backend.xp.empty(received[i].shape, np.float32)
    _convert(backend, "sent_gradients_widen", [(received[i], arrived[i]) for i in rounded])
    return arrived


def _convert(backend: Backend, kernel: str, arrays: Sequence[tuple[Array, Array]]) -> None:
    """Writes the elements of arrays into others, all in one launch."""
    parts = [Work(source.size, (source, out, source.size)) for source, out in arrays]
    backend.launch_parts(kernel, parts)
