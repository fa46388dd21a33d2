"""By which way arrays of GPUs travel: what was asked for, and what all ranks can do."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sok_lite.backend import Backend
from sok_lite.backend.nccl import load_nccl, nccl_unavailable
from sok_lite.comm.carrier import Carrier
from sok_lite.comm.mpi_carrier import MpiCarrier, cuda_unaware
from sok_lite.comm.nccl import NcclCarrier
from sok_lite.comm.protocol import Communicator, CommunicatorError, RanksDifferError

TRANSPORTS = ("auto", "nccl", "mpi", "horovod", "host")
TRANSPORT_VARIABLE = "SOK_LITE_GPU_TRANSPORT"


class Way(NamedTuple):
    """A way for arrays of a GPU.

    Attributes:
      unavailable: communicator -> why this rank cannot go it, or None; calls no collective.
      make: makes the carrier; every rank must call it.
    """

    unavailable: Callable[[Communicator], str | None]
    make: Callable[[Communicator, Backend], Carrier]


def checked_transport(transport: str | None) -> str:
    """Returns the transport that was asked for, by name or by SOK_LITE_GPU_TRANSPORT.

    Raises:
      ValueError: it is none.
    """
    source = "gpu_transport"
    if transport is None:
        source, transport = TRANSPORT_VARIABLE, os.environ.get(TRANSPORT_VARIABLE, "").strip()
    transport = transport or "auto"
    if transport not in TRANSPORTS:
        raise ValueError(
            f"{source} must be one of {', '.join(map(repr, TRANSPORTS))}. Received: {transport!r}."
        )
    return transport


def choose_carrier(
    comm: Communicator,
    backend: Backend,
    transport: str,
    more: Mapping[str, Way] | None = None,
) -> str:
    """Sets the carrier of a communicator of several ranks. Every rank must call it.

    Args:
      comm: the ranks.
      backend: of this rank's tables.
      transport: of `TRANSPORTS`, equal on all ranks. "auto" is NCCL where every rank has a GPU of
        its own and CuPy has NCCL, else the host.
      more: ways that this module does not know, by name.

    Returns:
      What carries arrays, for people.

    Raises:
      ValueError: ranks ask for different transports; on all ranks.
      CommunicatorError: a rank cannot go the way that was asked for, or not with the others; on
        all ranks.
    """
    ways = {
        "nccl": Way(lambda _: nccl_unavailable(), _nccl),
        "mpi": Way(cuda_unaware, MpiCarrier),
        **(more or {}),
    }
    comm.carrier = None
    name = "nccl" if transport == "auto" else transport
    reason = None if name == "host" else _obstacle(comm, backend, name, ways)
    if name != "host" and reason is None:
        backend.load_kernels()  # before the ranks meet at the cards
    cards = _cards(comm, {"transport": transport, "reason": reason, "gpu": _gpu(backend)})
    asked = [card["transport"] for card in cards]
    if len(set(asked)) > 1:
        raise RanksDifferError(f"gpu_transport must be the same on all ranks. Received: {asked}.")
    if transport == "host":
        return "the host's memory"
    reasons = [f"rank {r}: {card['reason']}" for r, card in enumerate(cards) if card["reason"]]
    if name == "nccl" and not reasons:
        reasons = _shared_gpus([card["gpu"] for card in cards])
    if reasons and transport == "auto":
        return f"the host's memory ({reasons[0]})"
    if reasons:
        raise CommunicatorError(
            f"gpu_transport={transport!r} is not possible: {reasons[0]}. Use 'auto' or 'host'."
        )
    if transport != "auto":
        comm.carrier = ways[name].make(comm, backend)
        return comm.carrier.what
    carrier, reason = None, None
    try:
        carrier = ways[name].make(comm, backend)
    except CommunicatorError as error:
        reason = str(error)
    # It may have come to a rank when another had connected already.
    for card in _cards(comm, {"reason": reason}):
        if card["reason"]:
            if carrier is not None:
                carrier.leave()
            return f"the host's memory ({card['reason']})"
    assert carrier is not None
    comm.carrier = carrier
    return carrier.what


def _obstacle(
    comm: Communicator, backend: Backend, name: str, ways: Mapping[str, Way]
) -> str | None:
    if backend.name == "cpu":
        return "its tables are not on a GPU"
    if name not in ways:
        return f"nobody here knows {name!r}"
    return ways[name].unavailable(comm)


def _nccl(comm: Communicator, backend: Backend) -> Carrier:
    return NcclCarrier(comm, backend, backend.xp.cuda, load_nccl())


def _gpu(backend: Backend) -> str:
    """Returns what tells the GPU of this rank from that of any other; "" on a CPU."""
    if backend.name == "cpu":
        return ""
    bus = backend.xp.cuda.runtime.deviceGetPCIBusId(backend.device_id)
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{machine} {bus}"


def _shared_gpus(gpus: list[str]) -> list[str]:
    for rank, gpu in enumerate(gpus):
        first = gpus.index(gpu)
        if first != rank:
            return [f"ranks {first} and {rank} share a GPU, which NCCL does not allow"]
    return []


def _cards(comm: Communicator, card: dict[str, str | None]) -> list[dict[str, str]]:
    rows = np.frombuffer(json.dumps(card).encode(), np.uint8)
    gathered = comm.allgatherv(rows, call="gpu_transport")
    return [json.loads(part.tobytes()) for part in gathered.by_rank()]
