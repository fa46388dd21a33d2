"""Chooses the transport of GPU arrays: the requested one, if all ranks can use it."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Backend
from sok_lite.comm.gpu_transport import GpuTransport
from sok_lite.comm.protocol import Communicator, CommunicatorError, RanksDifferError

TRANSPORTS = ("auto", "horovod", "host")
TRANSPORT_VARIABLE = "SOK_LITE_GPU_TRANSPORT"


class TransportKind(NamedTuple):
    """A kind of transport.

    Attributes:
      unavailable: communicator -> why this rank cannot use it, or None; calls no collective.
      make: makes the transport; every rank must call it.
    """

    unavailable: Callable[[Communicator], str | None]
    make: Callable[[Communicator, Backend], GpuTransport]


def checked_transport(transport: str | None) -> str:
    """Returns the name of the requested transport, the argument or SOK_LITE_GPU_TRANSPORT.

    Raises:
      ValueError: there is no such transport.
    """
    source = "gpu_transport"
    if transport is None:
        source, transport = TRANSPORT_VARIABLE, os.environ.get(TRANSPORT_VARIABLE, "").strip()
    transport = transport or "auto"
    if transport in ("mpi", "nccl"):
        raise ValueError(f"{source}={transport!r} is gone. Use 'auto': Horovod's or the host.")
    if transport not in TRANSPORTS:
        raise ValueError(
            f"{source} must be one of {', '.join(map(repr, TRANSPORTS))}. Received: {transport!r}."
        )
    return transport


def choose_transport(
    comm: Communicator,
    backend: Backend,
    transport: str,
    kinds: Mapping[str, TransportKind],
) -> str:
    """Sets the transport of a communicator of several ranks. Every rank must call it.

    Args:
      comm: the ranks.
      backend: of this rank's tables.
      transport: of `TRANSPORTS`, equal on all ranks. "auto" is the first of `kinds` that all ranks
        can use, each with a GPU of its own, else the host.
      kinds: by name.

    Returns:
      A description of the transport, for people.

    Raises:
      ValueError: ranks request different transports; on all ranks.
      CommunicatorError: a rank cannot use the requested transport, or not with the others; on all
        ranks.
    """
    names = {"auto": tuple(kinds), "host": ()}.get(transport, (transport,))
    comm.gpu_transport = None
    obstacles = {name: _obstacle(comm, backend, name, kinds) for name in names}
    if None in obstacles.values():
        backend.load_kernels()  # before the ranks meet at the cards
    mine = {"transport": transport, "obstacles": obstacles, "gpu": _gpu(backend)}
    cards = _cards(comm, mine)
    transports = [card["transport"] for card in cards]
    if len(set(transports)) > 1:
        raise RanksDifferError(
            f"gpu_transport must be the same on all ranks. Received: {transports}."
        )
    reasons: list[str] = []
    for name in names:
        reason = _reason(cards, name)
        if not reason and transport == "auto":
            reason = _connect(comm, backend, kinds[name])
        elif not reason:
            comm.gpu_transport = kinds[name].make(comm, backend)
        if comm.gpu_transport is not None:
            return comm.gpu_transport.what
        reasons.append(reason)
    if transport in ("auto", "host"):
        why = "; ".join(dict.fromkeys(reasons))
        return f"the host's memory ({why})" if why else "the host's memory"
    raise CommunicatorError(
        f"gpu_transport={transport!r} is not possible: {reasons[0]}. Use 'auto' or 'host'."
    )


def _connect(comm: Communicator, backend: Backend, kind: TransportKind) -> str:
    """Sets the transport of a communicator; returns why a rank cannot connect, "" if all can."""
    transport, reason = None, ""
    try:
        transport = kind.make(comm, backend)
    except CommunicatorError as error:
        reason = str(error)
    # It may have come to a rank when another had connected already.
    reasons = [card["reason"] for card in _cards(comm, {"reason": reason}) if card["reason"]]
    if not reasons:
        comm.gpu_transport = transport
        return ""
    return reasons[0]


def _reason(cards: Sequence[dict[str, Any]], name: str) -> str:
    """Returns why the ranks cannot all use a kind of transport, "" if they can."""
    reasons = [(rank, card["obstacles"][name]) for rank, card in enumerate(cards)]
    for rank, reason in reasons:
        if reason:
            return f"rank {rank}: {reason}"
    gpus = [card["gpu"] for card in cards]
    for rank, gpu in enumerate(gpus):
        first = gpus.index(gpu)
        if first != rank:
            return f"ranks {first} and {rank} share a GPU, which NCCL does not allow"
    return ""


def _obstacle(
    comm: Communicator, backend: Backend, name: str, kinds: Mapping[str, TransportKind]
) -> str | None:
    if backend.name == "cpu":
        return "its tables are not on a GPU"
    if name not in kinds:
        return f"nobody here knows {name!r}"
    return kinds[name].unavailable(comm)


def _gpu(backend: Backend) -> str:
    """Returns an identifier of this rank's GPU, unique over all ranks; "" on a CPU."""
    if backend.name == "cpu":
        return ""
    bus = backend.xp.cuda.runtime.deviceGetPCIBusId(backend.device_id)
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{machine} {bus}"


def _cards(comm: Communicator, card: dict[str, Any]) -> list[dict[str, Any]]:
    rows = np.frombuffer(json.dumps(card).encode(), np.uint8)
    gathered = comm.allgatherv(rows, call="gpu_transport")
    return [json.loads(part.tobytes()) for part in gathered.by_rank()]
