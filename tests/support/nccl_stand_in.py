"""What stands where `cupy.cuda` stands in sok_lite/comm/nccl.py, for ranks that are threads.

A stream is a thread that comes late, by chance. Sends and receives of a group are matched in pairs;
one that has no match, or another length, waits for ever, as on a GPU, and is noted. What has come
is poison until its event has been waited for, by the stream of the computations or by the host.
What is sent must stay as it was until it is gone.

Arrays are NumPy's, or those of the simulated GPU: addresses are all that is known of either.
"""

import ctypes
import queue
import threading
import time
import types
from collections.abc import Callable

import numpy as np

from sok_lite.backend import Backend, get_backend
from sok_lite.comm import Communicator, run_ranks
from sok_lite.comm.nccl import NcclTransport
from tests.support.simt import streams

POISON = 0xA5
_LATEST_S = 0.002
_INT8 = 0
_UNIQUE_ID_BYTES = 128
_MOST_BYTES = 1 << 24  # of a message whose content is compared


class NcclError(RuntimeError):
    """What CuPy raises where NCCL fails."""


class World:
    """All ranks, and what NCCL would do between them.

    Attributes:
      size: number of ranks.
      mistakes: what a test must not see: what was changed while it was sent, and such.
      unmatched: pairs of a send and a receive that do not fit; NCCL would hang there.
      gpu_of: rank -> its GPU.
      num_groups: groups that were issued, of all ranks.
      refuses_rank: rank whose GPU cannot be connected, or None.
      connect_s: seconds that ranks need to connect.
    """

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size = size
        self.mistakes: list[str] = []
        self.unmatched: list[str] = []
        self.gpu_of = list(range(size))
        self.num_groups = 0
        self.refuses_rank: int | None = None
        self.connect_s = 0.0
        self._random = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self.sessions: dict[bytes, _Session] = {}

    def gpu_transport(self, comm: Communicator, backend: Backend) -> NcclTransport:
        """Returns the transport of a rank. Every rank must call it."""
        cuda = _Cuda(self, comm.rank)
        return NcclTransport(comm, backend, cuda, cuda.nccl)

    def delay(self) -> None:
        with self._lock:
            seconds = self._random.random() * _LATEST_S
        threading.Event().wait(seconds)

    def session(self, unique: bytes) -> "_Session":
        with self._lock:
            return self.sessions.setdefault(unique, _Session(self))

    def new_id(self) -> bytes:
        with self._lock:
            return self._random.bytes(_UNIQUE_ID_BYTES)


class _Session:
    """An NCCL communicator, of all its ranks."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.changed = threading.Condition()
        self.here: set[int] = set()
        self.aborted: set[int] = set()
        self.sends: dict[tuple[int, int], list[_Part]] = {}
        self.receives: dict[tuple[int, int], list[_Part]] = {}

    def join(self, rank: int) -> None:
        with self.changed:
            if any(self.world.gpu_of[r] == self.world.gpu_of[rank] for r in self.here):
                raise NcclError("NCCL_ERROR_INVALID_USAGE: Duplicate GPU detected")
            self.here.add(rank)
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(self.here) == self.world.size)

    def abort(self, rank: int) -> None:
        with self.changed:
            self.aborted.add(rank)
            self.changed.notify_all()

    def post(self, part: "_Part") -> None:
        """Puts a part of a group where its counterpart finds it; matches what fits."""
        with self.changed:
            mine, theirs = self.sends, self.receives
            if part.is_receive:
                mine, theirs = theirs, mine
            mine.setdefault(part.pair, []).append(part)
            waiting = theirs.get(part.pair, [])
            if waiting and len(mine[part.pair]) == 1:
                self._match(part.pair)

    def _match(self, pair: tuple[int, int]) -> None:
        sends, receives = self.sends.get(pair, []), self.receives.get(pair, [])
        while sends and receives:
            send, receive = sends[0], receives[0]
            if (send.num_bytes, send.dtype) != (receive.num_bytes, receive.dtype):
                self.world.unmatched.append(
                    f"rank {pair[0]} sends {send.num_bytes} bytes to rank {pair[1]}, which "
                    f"receives {receive.num_bytes}"
                )
                return
            if send.num_bytes <= _MOST_BYTES:
                receive.content = send.view().copy()
            receive.is_done = True
            del sends[0], receives[0]
        self.changed.notify_all()


class _Part:
    """A send or a receive."""

    def __init__(
        self, is_receive: bool, ptr: int, num_bytes: int, dtype: int, pair: tuple[int, int]
    ) -> None:
        self.is_receive, self.ptr, self.num_bytes = is_receive, ptr, num_bytes
        self.dtype, self.pair = dtype, pair
        self.content: np.ndarray | None = None
        self.before: np.ndarray | None = None
        self.is_done = False

    def view(self) -> np.ndarray:
        """The bytes themselves."""
        cells = (ctypes.c_uint8 * self.num_bytes).from_address(self.ptr)
        return np.frombuffer(cells, np.uint8)

    def note(self) -> None:
        if self.num_bytes <= _MOST_BYTES:
            self.before = self.view().copy()


class Event:
    """An event, as CuPy's class of that name."""

    def __init__(self, disable_timing: bool = False) -> None:
        self._reached = threading.Event()
        self._reached.set()
        self._arrivals: list[Callable[[], None]] = []
        self.flush: Callable[[], None] | None = None

    def record(self, stream: "Stream | _Compute | None" = None) -> None:
        assert stream is not None, "not in the stand-in"
        stream.record(self)

    def synchronize(self) -> None:
        self._reached.wait()
        for arrive in self._arrivals:
            arrive()
        self._arrivals = []


class _Compute:
    """The stream of computations: that of the simulated GPU, or the host itself."""

    ptr = 1

    def record(self, event: Event) -> None:
        event._reached, event._arrivals = threading.Event(), []
        event._reached.set()
        event.flush = streams.run

    def wait_event(self, event: Event) -> None:
        event.synchronize()


class Stream:
    """A stream: a thread that does one thing after another, late."""

    ptr = 2

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._arrivals: list[Callable[[], None]] = []
        threading.Thread(target=self._run, name=f"stream-{rank}", daemon=True).start()

    def wait_event(self, event: Event) -> None:
        reached, flush = event._reached, event.flush

        def wait() -> None:
            reached.wait()
            if flush is not None:
                flush()

        self._work.put(wait)

    def record(self, event: Event) -> Event:
        event._reached = threading.Event()
        event._arrivals, event.flush = self._arrivals, None
        self._arrivals = []
        self._work.put(event._reached.set)
        return event

    def synchronize(self) -> None:
        self.record(event := Event())
        event.synchronize()

    def put(self, session: _Session, parts: list[_Part]) -> None:
        self._arrivals.append(lambda: self._arrive(parts))
        self._work.put(lambda: self._travel(session, parts))

    def _run(self) -> None:
        while True:
            work = self._work.get()
            self._world.delay()
            work()

    def _travel(self, session: _Session, parts: list[_Part]) -> None:
        for part in parts:
            part.note()
            if part.is_receive and part.num_bytes <= _MOST_BYTES:
                part.view()[:] = POISON
        for part in parts:
            session.post(part)
        receives = [part for part in parts if part.is_receive]
        sends = [part for part in parts if not part.is_receive]

        def is_over() -> bool:
            waiting = {id(p) for of_pair in session.sends.values() for p in of_pair}
            done = all(p.is_done for p in receives) and not any(id(p) in waiting for p in sends)
            return done or self._rank in session.aborted

        with session.changed:
            session.changed.wait_for(is_over)
            for part in parts:  # an aborted one is taken back
                for places in (session.sends, session.receives):
                    if part in places.get(part.pair, []):
                        places[part.pair].remove(part)
        self._world.delay()
        for part in sends:
            if part.before is not None and not np.array_equal(part.before, part.view()):
                self._world.mistakes.append(f"rank {self._rank} wrote what was being sent")

    def _arrive(self, parts: list[_Part]) -> None:
        for part in parts:
            if not part.is_receive or part.before is None:
                continue
            if part.content is not None:
                part.view()[:] = part.content
            else:  # it never came whole
                part.view()[:] = part.before


class _Cuda:
    """What is `cupy.cuda` on one rank."""

    Event = Event

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank
        self._compute = _Compute()
        self._stream: Stream | None = None
        self._group: list[tuple[_Session, _Part]] | None = None
        self.nccl = types.SimpleNamespace(
            NCCL_INT8=_INT8,
            NcclError=NcclError,
            NcclCommunicator=lambda size, unique, rank: _Communicator(self, size, unique, rank),
            get_unique_id=world.new_id,
            groupStart=self._start,
            groupEnd=self._end,
        )

    def Stream(self, non_blocking: bool = False) -> Stream:
        assert non_blocking, "the null stream would wait for it, and it for the null stream"
        self._stream = Stream(self._world, self._rank)
        return self._stream

    def get_current_stream(self) -> _Compute:
        return self._compute

    def _start(self) -> None:
        assert self._group is None, "not in the stand-in"
        self._group = []

    def _end(self) -> None:
        group, self._group = self._group, None
        assert group is not None and self._stream is not None
        self._world.num_groups += 1
        if group:
            self._stream.put(group[0][0], [part for _, part in group])

    def issue(self, session: _Session, part: _Part, stream: int) -> None:
        assert self._group is not None, "sends and receives that wait for each other"
        assert stream == Stream.ptr
        if self._rank in session.aborted:
            raise NcclError("NCCL_ERROR_INVALID_ARGUMENT: invalid argument")
        self._group.append((session, part))


class _Communicator:
    """NCCL's communicator of one rank, as CuPy has it."""

    def __init__(self, cuda: _Cuda, size: int, unique: bytes, rank: int) -> None:
        assert isinstance(unique, bytes) and len(unique) == _UNIQUE_ID_BYTES
        if cuda._world.refuses_rank == rank:
            raise NcclError("NCCL_ERROR_SYSTEM_ERROR: unhandled system error")
        self._cuda, self._rank = cuda, rank
        self._session = cuda._world.session(unique)
        self.failure: Exception | None = None
        assert size == cuda._world.size and rank == cuda._rank
        self._session.join(rank)
        time.sleep(cuda._world.connect_s)

    def send(self, ptr: int, count: int, dtype: int, peer: int, stream: int) -> None:
        part = _Part(False, ptr, count, dtype, (self._rank, peer))
        self._cuda.issue(self._session, part, stream)

    def recv(self, ptr: int, count: int, dtype: int, peer: int, stream: int) -> None:
        part = _Part(True, ptr, count, dtype, (peer, self._rank))
        self._cuda.issue(self._session, part, stream)

    def abort(self) -> None:
        self._session.abort(self._rank)

    def check_async_error(self) -> None:
        if self._rank in self._session.aborted:
            raise NcclError("NCCL_ERROR_INVALID_ARGUMENT: invalid argument")
        if self.failure is not None:
            raise self.failure


def run_ranks_by_nccl(size, fn, backend=None, world=None, timeout=60.0):
    """Does what `run_ranks` does; arrays of the backend travel by NCCL's stand-in."""
    world = world or World(size)
    backend = backend or get_backend("cpu")

    def program(comm):
        comm.gpu_transport = world.gpu_transport(comm, backend)
        try:
            result = fn(comm)
        except BaseException:
            die(comm)
            raise
        comm.gpu_transport.leave()
        return result

    results = run_ranks(size, program, timeout)
    assert not world.mistakes, world.mistakes
    return results


def die(comm):
    """Does what the end of a rank's process does: its sockets close, and it says nothing."""
    comm.gpu_transport._alarm.cut()
