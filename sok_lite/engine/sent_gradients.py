"""Gradients on their way to the owners of their keys: as float32, or as bfloat16 with feedback.

Feedback: what rounding takes from the gradient of a key stays on the rank that sends it, and is
added to the next gradient of that key. So the sum of all that was sent is the sum of all gradients,
but for what is left now, which is at most half a unit in the last place of what was sent last.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.backend.base import Part, joined_launches
from sok_lite.backend.publish import publish, setting
from sok_lite.engine.exchange import send_grads
from sok_lite.engine.initializer import Initializer
from sok_lite.engine.segments import cut, unique
from sok_lite.engine.static_table import AnyTable
from sok_lite.engine.table import EmbeddingTable, make_table
from sok_lite.engine.table.exclusive import alone, holding
from sok_lite.engine.table.lookups import look_up_request, request_of
from sok_lite.engine.table.new_keys import Asked, Output
from sok_lite.engine.trail import Trail


class _Rounded(NamedTuple):
    """A table whose gradients are rounded in a call.

    Attributes:
      parts: the numbers of its parts in the call.
      residuals: of the table.
      keys: (u,) int64, the distinct keys of its parts.
      numbers: of each part (n,) int32, which of them its gradients have; None: they are in order.
    """

    parts: list[int]
    residuals: EmbeddingTable
    keys: Array
    numbers: list[Array | None]


def send_sums(
    backend: Backend, tables: Sequence[AnyTable], trail: Trail, sums: Sequence[Array]
) -> list[Array]:
    """Sends the gradients of a lookup to the owners of their keys. Every rank must call it.

    A call that raises has left residuals as they were.

    Args:
      tables: of each part.
      trail: of the lookup.
      sums: of each part (u, dim) float32, one row per key that this rank asked for.

    Returns:
      Of each part (m, dim) float32, one row per key that this rank was asked; not summed.

    Raises:
      MemoryError: no memory for residuals of new keys. Before anything is sent.
      CommunicatorError: see `send_grads`.
    """
    rounded = _rounded(backend, tables, trail)
    if not rounded:
        return send_grads(trail.route, sums)
    residuals = [each.residuals for each in rounded]
    return holding(residuals, lambda: _send(backend, rounded, trail, sums))


def _rounded(backend: Backend, tables: Sequence[AnyTable], trail: Trail) -> list[_Rounded]:
    """Returns what is to be rounded."""
    parts_of: dict[int, list[int]] = {}
    for i, table in enumerate(tables):
        if table.rounds_gradients:
            parts_of.setdefault(id(table), []).append(i)
    if not parts_of:
        return []
    keys = cut(trail.sent_keys, trail.route.num_sent)
    rounded = []
    for parts in parts_of.values():
        residuals = _residuals_of(cast(EmbeddingTable, tables[parts[0]]))
        if len(parts) == 1:
            rounded.append(_Rounded(parts, residuals, keys[parts[0]], [None]))
            continue
        distinct, inverse = unique(backend, backend.xp.concatenate([keys[i] for i in parts]))
        numbers = cut(inverse, [len(keys[i]) for i in parts])
        rounded.append(_Rounded(parts, residuals, distinct, numbers))
    return rounded


def _residuals_of(table: EmbeddingTable) -> EmbeddingTable:
    """Returns what rounding has left of the gradients of a table's keys, by key."""

    def made() -> EmbeddingTable:
        if table.residuals is None:
            residuals = make_table(
                table.var_type,
                table.backend,
                table.dim,
                initializer=Initializer("constant", 0.0),
                key_type=table.key_dtype.name,
                name=f"{table.name}/residuals",
                **table.options_of_residuals(),
            )
            publish(setting(table, residuals=residuals))
        return table.residuals

    return alone(table, made)


def _send(
    backend: Backend, rounded: Sequence[_Rounded], trail: Trail, sums: Sequence[Array]
) -> list[Array]:
    left, rows = _read(backend, rounded)
    sent, widened, widening = list(sums), {}, []
    # A key that several parts have is rounded for one after the other.
    num_turns = max(len(each.parts) for each in rounded)
    turns: list[list[tuple[Backend, str, Part]]] = [[] for _ in range(num_turns)]
    for each, rest in zip(rounded, left, strict=True):
        for turn, i, number in zip(turns, each.parts, each.numbers, strict=False):
            n, dim = sums[i].shape
            sent[i] = backend.xp.empty((n, dim), np.uint16)
            how = (sums[i], dim, number, rest, sent[i], n)
            turn.append((backend, "sent_gradients_round", Part(n, how)))
            widened[i] = backend.xp.empty((int(trail.route.num_received[i]), dim), np.float32)
    publish([action for turn in turns for action in joined_launches(turn)])
    writing = [
        [each.residuals.store.writing(its_rows, rest)]
        for each, its_rows, rest in zip(rounded, rows, left, strict=True)
    ]
    received = send_grads(trail.route, sent)
    for i, grads in widened.items():
        part = Part(grads.size, (received[i], grads, grads.size))
        widening.append((backend, "sent_gradients_widen", part))
        received[i] = grads
    publish(joined_launches(widening), *writing)
    return received


def _read(backend: Backend, rounded: Sequence[_Rounded]) -> tuple[list[Array], list[Array]]:
    """Returns of each table (u, dim) float32, the residuals of its keys, and their row numbers."""
    sizes = [int(each.keys.size) for each in rounded]
    left = [each.residuals.store.output(n) for each, n in zip(rounded, sizes, strict=True)]
    keys = backend.xp.concatenate([each.keys for each in rounded])
    rows = backend.xp.empty(keys.size, np.uint32)
    asked = [
        Asked(each.residuals, n, [Output(out, 0, n)], unique_keys=True)
        for each, n, out in zip(rounded, sizes, left, strict=True)
    ]
    look_up_request(backend, keys, rows, request_of(asked))
    return left, cut(rows, sizes)
