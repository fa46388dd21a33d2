"""The transport from GPU to GPU by NCCL, on a stream of its own.

A communicator brings the ranks together and is used again when something has failed. Messages of
NCCL stay on the device: no byte of them goes through the host.

 counts   a block of control to each rank, with the counts of keys; the host reads all of them once
 keys     follow, and the host does not wait: `check` raises later if they were incomplete
 rows     of known counts, each with a block of control, which the host reads when all has arrived

A rank waits only for its own stream. If a rank cannot go on, `sok_lite.comm.alarm` tells the
others, which then abort NCCL: every wait ends, and messages that were being sent are never used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.comm.alarm import Alarm
from sok_lite.comm.gpu_transport import (
    CALL,
    FAILED,
    NUM_WORDS,
    TURN,
    Check,
    Counts,
    GpuTransport,
)
from sok_lite.comm.nccl_link import NUM_ID_BYTES, Message, NcclLink
from sok_lite.comm.protocol import Communicator, CommunicatorError
from sok_lite.comm.rows import Gathered

# Counts of so many tables are in a block of control at first; it grows with what ranks look up.
_FIRST_TABLES = 32
# How long the names of calls may take to arrive after control.
_ANNOUNCED_S = 5.0
# How long after a failure of NCCL the reason for it may come.
_HEARD_S = 1.0


class NcclTransport(GpuTransport):
    """One rank of an NCCL communicator, beside a communicator that brought the ranks together."""

    name = "nccl"
    what = "NCCL, from GPU to GPU"

    def __init__(self, comm: Communicator, backend: Backend, cuda: Any, nccl: Any) -> None:
        """Connects the GPUs of all ranks. Every rank must call it.

        Args:
          comm: the ranks.
          backend: of the arrays to send; each rank has a GPU of its own.
          cuda: `cupy.cuda`, or a stand-in with its streams and events.
          nccl: `cupy.cuda.nccl`, or a stand-in.

        Raises:
          CommunicatorError: NCCL cannot connect the ranks, or they cannot reach each other by TCP;
            on all ranks.
        """
        super().__init__(comm, backend)
        self._link = NcclLink(comm, backend, cuda, nccl)
        self._num_tables = _FIRST_TABLES  # capacity of a block; equal on all ranks
        # Collectives whose keys nobody has waited for, and those whose keys did not come whole.
        self._pending: set[int] = set()
        self._lost: set[int] = set()
        # Whether the others wait for keys of this rank, which has told them how many.
        self._owes_keys = False
        comm._together(self._connect, "connect by NCCL")

    def counts(
        self, call: str, offsets: Array, num_tables: int, tag: int, check: Check | None
    ) -> Counts:
        self._check_arrays(offsets)
        count = self._backend.xp.zeros(1, np.int64) if check is None else check.count
        counts, failure = self._comm._together(
            self._counts, call, offsets, num_tables, tag, count, check
        )
        if failure is not None:
            raise failure
        assert counts is not None
        return counts

    def keys(self, message: Array, send_splits: np.ndarray, recv_splits: np.ndarray) -> Array:
        self._check_arrays(message)
        return self._comm._together(self._keys, "keys", message, send_splits, recv_splits)

    def rows(
        self, call: str, message: Array, send_splits: np.ndarray, recv_splits: np.ndarray
    ) -> Array:
        self._check_arrays(message)
        return self._comm._together(self._rows, call, message, send_splits, recv_splits)

    def refuse(self, call: str, reason: str) -> None:
        self._comm._together(self._refuse, call, reason)

    def fail(self, call: str) -> None:
        self._comm._together(self._fail, call)

    def check(self, turn: int) -> None:
        if self._alarm.reason is not None:
            self._comm._together(self._alarmed, "check of keys")
        if turn in self._lost:
            raise CommunicatorError(
                "The keys of this lookup were on their way when a rank failed. Look them up again."
            )

    def leave(self) -> None:
        self._settle()
        if self._pending and self._alarm.reason is None:
            self._link.stream.synchronize()  # others may still be getting them
        self._alarm.close()
        self._link.abort()

    # ---- collectives, one at a time -------------------------------------------------------------

    def _counts(
        self,
        call: str,
        offsets: Array,
        num_tables: int,
        tag: int,
        count: Array,
        check: Check | None,
    ) -> tuple[Counts | None, Exception | None]:
        """Does what `counts` does; gives a failure of this rank's own, for the caller to raise."""
        xp, size = self._backend.xp, self._comm.size
        with self._taking_part(call):
            words = self._words(call, num_tables, tag)
            while True:
                capacity = self._num_tables
                blocks = xp.empty((size, NUM_WORDS + capacity), np.int64)
                blocks[:, :NUM_WORDS] = self._backend.from_host(words)
                blocks[:, FAILED] = count
                if num_tables <= capacity:
                    by_rank = (offsets[1:] - offsets[:-1]).reshape(size, num_tables)
                    blocks[:, NUM_WORDS : NUM_WORDS + num_tables] = by_rank
                came = self._link.blocks_of_all(blocks)
                mine = xp.concatenate([count, offsets, came.reshape(-1)])
                told = self._backend.to_host(mine)  # one wait
                self._arrived()
                ends, theirs = told[1 : 1 + len(offsets)], told[1 + len(offsets) :]
                theirs = theirs.reshape(size, NUM_WORDS + capacity)
                self._check_calls(call, theirs)
                if theirs[:, FAILED].any():
                    return None, self._reasons(call, check if told[0] else None)
                self._check_tables(theirs, num_tables, tag)
                if num_tables <= capacity:
                    sent = np.diff(ends).reshape(size, num_tables)
                    received = theirs[:, NUM_WORDS : NUM_WORDS + num_tables].copy()
                    self._owes_keys = True
                    return Counts(sent, received), None
                # Every rank is here, with as many tables: all have larger blocks from now on.
                self._num_tables = 1 << (num_tables - 1).bit_length()

    def _refuse(self, call: str, reason: str) -> None:
        with self._taking_part(call):
            words = self._words(call, failed=1)
            blocks = np.zeros((self._comm.size, NUM_WORDS + self._num_tables), np.int64)
            blocks[:, :NUM_WORDS] = words
            came = self._link.blocks_of_all(self._backend.from_host(blocks))
            theirs = self._backend.to_host(came)
            self._arrived()
            self._check_calls(call, theirs)
            self._raise_reasons(call, reason)

    def _keys(
        self, call: str, message: Array, send_splits: np.ndarray, recv_splits: np.ndarray
    ) -> Array:
        xp = self._backend.xp
        with self._watching():
            # Zeros: what a dead rank has not sent is read before anybody knows, and then forgotten.
            received = xp.zeros((int(recv_splits.sum()), message.shape[1]), np.int64)
            self._link.travel([Message.of(message, received, send_splits, recv_splits)])
            self._pending.add(self._comm.turn)
            self._owes_keys = False
        return received

    def _rows(
        self, call: str, message: Array, send_splits: np.ndarray, recv_splits: np.ndarray
    ) -> Array:
        xp, size = self._backend.xp, self._comm.size
        with self._taking_part(call):
            received = xp.empty((int(recv_splits.sum()), message.shape[1]), np.int64)
            words = np.tile(self._words(call), (size, 1))
            mine = self._backend.from_host(words)
            came = xp.empty((size, NUM_WORDS), np.int64)
            one_each = np.ones(size, np.int64)
            self._link.travel(
                [
                    Message.of(mine, came, one_each, one_each),
                    Message.of(message, received, send_splits, recv_splits),
                ]
            )
            theirs = self._backend.to_host(came)  # one wait, for all of the group
            self._arrived()
            self._check_calls(call, theirs)
        return received

    def _settle(self) -> None:
        """Lets the others go on that wait for keys which do not come any more."""
        if self._owes_keys and self._alarm.reason is None:
            self._alarm.ring(f"Rank {self._comm.rank} broke off before it sent its keys.")

    def _fail(self, call: str) -> None:
        self._owes_keys = False
        self._alarm.fail(call)
        self._go_on()

    def _alarmed(self, call: str) -> NoReturn:
        """Raises what an alarm says; meets the others first, where all may go on after it."""
        reason = self._alarm.reason or "A rank has failed."
        if self._alarm.is_final:
            self._comm._fail(reason)
        self._go_on()
        raise CommunicatorError(reason)

    # ---- control --------------------------------------------------------------------------------

    def _check_calls(self, call: str, theirs: np.ndarray) -> None:
        """Raises, on every rank, where one is in another call; `theirs`: (size, words)."""
        mine = self._words(call)
        if (theirs[:, [TURN, CALL]] == mine[[TURN, CALL]]).all():
            return
        # Whoever has another beside it in the ring learns which call that is in, and tells all.
        if not self._alarm.wait(_ANNOUNCED_S):
            self._alarm.ring(
                f"Ranks make different calls: rank {self._comm.rank} is in {call}, another is not.",
            )
        raise _AlarmError

    def _reasons(self, call: str, check: Check | None) -> Exception:
        """Tells the others why this rank has no keys, or returns why another has none."""
        mine: Exception | None = None
        if check is not None:
            try:
                check.refuse()
            except Exception as error:
                mine = error
        text = None if mine is None else f"{type(mine).__name__}: {mine}"
        try:
            self._raise_reasons(call, text)
        except CommunicatorError as error:
            return mine or error

    def _gathered(self, call: str, rows: np.ndarray) -> Gathered:
        return self._comm._allgatherv(call, rows)  # in a collective already

    # ---- NCCL -----------------------------------------------------------------------------------

    def _connect(self, call: str) -> None:
        self._alarm = self._link.alarm = Alarm(self._comm, self._link.abort, self._error)
        try:
            self._open()
        except CommunicatorError:
            self._alarm.close()
            raise

    def _open(self) -> None:
        """Makes the NCCL communicator. Every rank must call it, in a collective."""
        ids = [self._link.new_id()] if self._comm.rank == 0 else []
        mine = np.stack(ids) if ids else np.zeros((0, NUM_ID_BYTES), np.uint8)
        (packed,) = self._gathered("NCCL id", mine).rows
        self._link.open(packed)

    def _error(self) -> str | None:
        """Returns what NCCL has met with while nobody asked."""
        if not self._pending and not self._is_waiting:
            return None
        return self._link.error()

    # ---- alarms ---------------------------------------------------------------------------------

    _is_waiting = False

    @contextmanager
    def _taking_part(self, call: str) -> Iterator[None]:
        """Takes the next turn; where an alarm rings meanwhile, no turn was taken."""
        self._settle()
        before = self._comm.turn
        self._comm.turn += 1
        self._alarm.begin(call)
        self._is_waiting = True
        try:
            with self._watching(before):
                yield
        finally:
            self._is_waiting = False
            self._alarm.end()

    @contextmanager
    def _watching(self, turn: int | None = None) -> Iterator[None]:
        """Puts what NCCL and the GPU say in our words, and raises what an alarm says."""
        self._backend.activate()
        failure: Exception | None = None
        try:
            yield
        except (CommunicatorError, _AlarmError) as error:
            failure = error
        except BaseException as error:
            if not self._follows(error):
                text = f"Rank {self._comm.rank} failed: {type(error).__name__}: {error}"
                self._alarm.ring(text)
            if not isinstance(error, Exception):
                raise
            failure = error
        if self._alarm.reason is not None:
            if turn is not None:
                self._comm.turn = turn
            try:
                self._alarmed("")
            except CommunicatorError as error:
                raise error from failure
        if failure is not None:
            raise failure

    def _follows(self, error: BaseException) -> bool:
        """Returns whether an error is what is left to say of a failure that ranks know, or soon do.

        NCCL fails in the call that an abort ends, and where another rank has aborted.
        """
        if not self._link.is_own(error):
            return False
        return self._alarm.wait(_HEARD_S)

    def _arrived(self) -> None:
        """Raises what an alarm says; else all that was sent before has arrived."""
        if self._alarm.reason is not None:
            raise _AlarmError
        self._pending.clear()

    def _go_on(self) -> None:
        """Meets the others after an alarm, and connects anew. Every rank must call it."""
        reason = (self._alarm.reason or "")[:64]
        self._owes_keys = False
        self._lost |= self._pending
        self._pending.clear()
        try:
            self._comm._barrier(reason.encode("ascii", "replace").decode())
            self._alarm.quiet()
            self._open()
        except CommunicatorError as error:
            self._alarm.ring(str(error))
            raise


class _AlarmError(Exception):
    """An alarm rings."""
