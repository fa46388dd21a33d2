"""Transports that send GPU arrays between ranks without the host, and the choice of one.

The payload (keys, rows and gradients) never passes through the host. Control messages do: which
call this is, how many keys each rank sends to each, and which rank failed.
"""

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm.protocol import (
    Communicator,
    CommunicatorError,
    RanksDifferError,
    allgather_texts,
)

LONGEST_REASON_BYTES = 4096

# Words of a control block: the tag and number of tables of a lookup, and whether the sending rank
# failed and sends no keys.
FAILED = 2
NUM_WORDS = 3

TRANSPORTS = ("auto", "horovod", "host")
TRANSPORT_VARIABLE = "SOK_LITE_GPU_TRANSPORT"


class Check(NamedTuple):
    """A check of this rank's keys on the device, read together with the counts."""

    count: Array  # (1,) int64 of the backend, 0 if the keys may be sent
    refuse: Callable[[], None]  # called if it is not 0; raises the error


class Counts(NamedTuple):
    """Numbers of keys `sent` to and `received` from each rank, (size, num_tables) int64 on the
    host.
    """

    sent: np.ndarray
    received: np.ndarray


class GpuTransport(ABC):
    """Sends arrays of a backend between the ranks of a communicator.

    Control goes through the host, by collectives of that communicator, which compare the calls of
    all ranks; payload does not. `counts`, `rows` and `refuse` are collectives too: every rank must
    call them in the same order. A message is (n, 2) int64, rows for rank 0 first; splits count rows
    and are (size,) integers.

    Attributes:
      name: of the argument `gpu_transport` of `sok.init`.
      what: a description for people.
    """

    name: str
    what: str

    def __init__(self, comm: Communicator, backend: Backend) -> None:
        self._comm, self._backend = comm, backend

    @abstractmethod
    def _send_rows(self, message: Array, send_splits: np.ndarray, recv_splits: np.ndarray) -> Array:
        """Sends a message, (n, 2) int64; returns when all has arrived, raises if a rank dies."""

    def counts(
        self, call: str, offsets: Array, num_tables: int, tag: int, check: Check | None
    ) -> Counts:
        """Tells each rank how many keys it will get. Every rank must call it, or `refuse`.

        The tag must be equal on all ranks. The host waits once for the device. If the check fails,
        this rank raises its error, other ranks a CommunicatorError with the reason.

        Args:
          offsets: (size * num_tables + 1,) int64, the first key of each rank and table.
          check: of this rank's keys; None: no check.

        Raises:
          CommunicatorError: another rank called `refuse`, or this with another tag or number of
            tables; or a rank has died.
        """
        self._check_arrays(offsets)
        size, numbers = self._comm.size, [offsets] if check is None else [offsets, check.count]
        on_host = self._backend.to_host(self._backend.xp.concatenate(numbers))  # one wait
        if check is not None and on_host[-1]:
            try:
                check.refuse()
            except Exception as error:
                with suppress(CommunicatorError):  # this rank's own reason takes precedence
                    self.refuse(call, f"{type(error).__name__}: {error}")
                raise
        sent = np.diff(on_host[: len(offsets)]).reshape(size, num_tables)
        words = np.tile(np.array([tag, num_tables, 0], np.int64), (size, 1))
        theirs = self._exchange(call, np.concatenate([words, sent], axis=1))
        if any(part[FAILED] for part in theirs):
            self._raise_reasons(call, None)
        for rank, part in enumerate(theirs):
            theirs_words = part[:FAILED].tolist()
            if theirs_words != [tag, num_tables]:
                raise CommunicatorError(
                    mismatched_lookup_text(self._comm.rank, num_tables, tag, rank, theirs_words)
                )
        return Counts(sent, np.stack([part[NUM_WORDS:] for part in theirs]))

    def rows(
        self, call: str, message: Array, send_splits: np.ndarray, recv_splits: np.ndarray
    ) -> Array:
        """Sends keys, rows or gradients whose counts all ranks know. Every rank must call it.

        CommunicatorError: a rank has died, or is in another call.
        """
        self._check_arrays(message)
        # Detects a rank that fails before sending: the transport would wait for it forever.
        self._comm.barrier(call)
        return self._comm._run_collective(
            lambda _: self._send_rows(message, send_splits, recv_splits), call
        )

    def refuse(self, call: str, reason: str) -> None:
        """Replaces `counts` on a rank without keys: all ranks raise CommunicatorError."""
        self._exchange(call, np.tile(np.array([0, 0, 1], np.int64), (self._comm.size, 1)))
        self._raise_reasons(call, reason)

    def _exchange(self, call: str, blocks: np.ndarray) -> list[np.ndarray]:
        """Sends a block to each rank; returns the blocks of all ranks, of any lengths."""
        size, width = blocks.shape
        came = self._comm.alltoallv(blocks.reshape(-1), np.full(size, width), call=call)
        return came.by_rank()

    def _check_arrays(self, *arrays: Any) -> None:
        """Raises TypeError if an array is not of the backend, but of NumPy for instance."""
        for array in arrays:
            if not isinstance(array, self._backend.xp.ndarray):
                raise TypeError(
                    f"The {self.name!r} transport takes arrays of the {self._backend.name} backend."
                    f" Received: {type(array).__module__}.{type(array).__name__}. Use the "
                    "communicator's `alltoallv` for arrays of the host."
                )

    def _raise_reasons(self, call: str, mine: str | None) -> NoReturn:
        """Shares this rank's reason, if any; raises the first one. Every rank must call it."""
        text = (mine or "").encode()[:LONGEST_REASON_BYTES]
        rows = np.frombuffer(text, np.uint8).reshape(-1, 1)
        gathered = self._comm.allgatherv(rows, f"why not {call}")
        for rank, reason in enumerate(gathered.by_rank()):
            if reason.size:
                raise CommunicatorError(
                    failed_lookup_text(rank, reason.tobytes().decode(errors="replace"))
                )
        raise CommunicatorError("A rank has failed, and none says why.")


def failed_lookup_text(rank: int, reason: str) -> str:
    """Returns the error text for a rank that could not send its keys."""
    return f"Rank {rank} could not make this lookup. {reason}"


def mismatched_lookup_text(
    rank: int, num_tables: int, tag: int, other: int, words: list[int]
) -> str:
    """Returns the error text for ranks in different lookups; `words`: the other's [tag, tables]."""
    return (
        f"Rank {rank} looks up {num_tables} tables with tag {tag}, rank {other} sent "
        f"[tag, tables] = {words}. All ranks must make the same lookups in the same order."
    )


class TransportKind(NamedTuple):
    """A kind of transport."""

    unavailable: Callable[[Communicator], str | None]  # why not here; calls no collective
    make: Callable[[Communicator, Backend], GpuTransport]  # every rank must call it


def checked_transport(transport: str | None) -> str:
    """Returns the requested transport, by default SOK_LITE_GPU_TRANSPORT. ValueError: unknown."""
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
    """Sets and describes the transport of a communicator of several ranks. Every rank must call it.

    "auto" is the first of `kinds` that all ranks can use, each with its own GPU, else the host.

    Errors are raised on all ranks.

    Raises:
      ValueError: ranks request different transports.
      CommunicatorError: a rank cannot use the requested transport, or not with the others.
    """
    names = {"auto": tuple(kinds), "host": ()}.get(transport, (transport,))
    comm.gpu_transport = None
    obstacles = {name: _obstacle(comm, backend, name, kinds) for name in names}
    if None in obstacles.values():
        backend.load_kernels()  # before the ranks compare cards
    mine = {"transport": transport, "obstacles": obstacles, "gpu": _gpu(backend)}
    cards = _gather_json(comm, mine)
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
    # One rank may see it after another has connected.
    reasons = [card["reason"] for card in _gather_json(comm, {"reason": reason}) if card["reason"]]
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


def _gather_json(comm: Communicator, card: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(text) for text in allgather_texts(comm, json.dumps(card), "gpu_transport")]
