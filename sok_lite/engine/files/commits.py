"""Commits of an elastic job: the content to which tables return when ranks have left it.

In memory each part has two copies: on its own rank, and on another rank, of another machine if
there is one. On disk a commit is a checkpoint. The values that go with the tables, equal on all
ranks, are in the memory of every rank.

A commit has two phases, so that a complete one exists whenever ranks die. Each rank stages it,
beside the previous one; when all have, each settles it. So if any rank has settled a commit, all
have staged it, and if none has, all still have the previous one.

Contents of tables travel as one message: the length of a JSON text, the text, which describes the
arrays and has their numbers in place of them, and then the arrays, each at a multiple of 8 bytes.
"""

import itertools
import json
import os
import secrets
import socket
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from sok_lite.comm.protocol import Communicator, allgather_texts, broadcast_bytes
from sok_lite.engine.failure import together
from sok_lite.engine.files import manifest
from sok_lite.engine.files.dump import checked_items, dump
from sok_lite.engine.files.load import load
from sok_lite.engine.foreign_keys import refuse_keys_on_several_ranks
from sok_lite.engine.optimizer_states import drop_orphaned_states
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.content import Content, as_saved, owned_by, owns, take, with_arrays
from sok_lite.engine.table.locking import with_lock, with_locks
from sok_lite.engine.table.restore import Swap, prepare_restore, swap_all

# The name of the commit's number in the `extra` of a checkpoint.
_NUMBER = "commit"

# Messages are rows of 64 bytes, so that their number fits into 31 bits.
_MESSAGE_ROW = np.dtype((np.int64, (8,)))
_ALIGNED = 8


class Commit(NamedTuple):
    """A commit on one rank.

    Attributes:
      number: counts from a random number on in each job, so that a checkpoint of another job in the
        folder is recognized.
      size: number of ranks that made it.
      values: that go with the tables.
      parts: a part of each table by its rank, this rank's own first; {} if the commit is on disk.
    """

    number: int
    size: int
    values: bytes
    parts: dict[int, list[Content]]


class Commits:
    """The commits of some tables on one rank.

    Args:
      tables: with different names, the same on all ranks.
      folder: of commits on disk, which all ranks see; None: they are in memory.
    """

    def __init__(self, tables: Sequence[EmbeddingTable], folder: str | None) -> None:
        self._tables, self._folder = list(tables), folder
        self._settled: Commit | None = None
        self._staged: Commit | None = None

    def make(self, comm: Communicator, values: bytes) -> None:
        """Commits the present content of the tables. Every rank must call it; it returns together.

        Args:
          values: that go with the tables, equal on all ranks.

        Raises:
          TypeError: an item is no table with keys of its own.
          ValueError: a name repeats, or a rank has other tables, or a key has rows on several.
          OSError, MemoryError: a rank cannot store its part. The previous commit is as it was.
          CommunicatorError: a rank has died. The last commit is this one or the previous one.
        """
        newest = max((commit.number for commit in self._commits()), default=0)
        card = [newest, _machine(), secrets.randbits(48)]
        cards = comm.allgatherv(np.array([card], np.int64), call="commit").rows
        number = int(cards[:, 0].max() or cards[0, 2]) + 1
        if self._tables:
            checked_items(self._tables, comm, {"folder": self._folder}, "commit")
        if self._folder is not None:
            self._staged = Commit(number, comm.size, values, {})
            dump(self._folder, self._tables, comm, {_NUMBER: number})
        else:
            refuse_keys_on_several_ranks(self._tables, comm, "A commit")
            parts = self._own_and_copied(comm, backup_ranks(cards[:, 1].tolist()))
            self._staged = Commit(number, comm.size, values, parts)
            comm.barrier("commit")
        self._settled, self._staged = self._staged, None

    def restore(self, comm: Communicator) -> bytes | None:
        """Restores the tables from the last commit. Every rank must call it.

        The ranks may differ from those that made it, also in number. The commit stays until the
        next one.

        Returns:
          The values that went with the tables; None: no rank has a commit, and nothing has changed.

        Raises:
          RuntimeError: a part is lost: the ranks have left that had it in memory, or the folder has
            a checkpoint that is no commit of this job.
          OSError, ValueError, MemoryError: a part cannot be read, or does not fit into memory.
            All ranks raise the same, and no table has changed.
        """
        card = {
            "settled": 0 if self._settled is None else self._settled.number,
            "commits": {c.number: {"size": c.size, "parts": [*c.parts]} for c in self._commits()},
        }
        cards = list(map(json.loads, allgather_texts(comm, json.dumps(card), "restore")))
        if self._folder is None:
            number = max((card["settled"] for card in cards), default=0)
        else:
            number = self._number_on_disk(comm, any(card["commits"] for card in cards))
        having = [rank for rank, card in enumerate(cards) if str(number) in card["commits"]]
        if not having and any(card["settled"] for card in cards):
            raise RuntimeError(
                f"The tables cannot go on from the last commit: {self._folder} must have it. "
                "Received: a checkpoint that is no commit of this job. Let nothing else write "
                "there, also no sok_lite.dump."
            )
        if not having:
            return None
        mine = next((commit for commit in self._commits() if commit.number == number), None)
        values = broadcast_bytes(comm, b"" if mine is None else mine.values, having[0])
        if self._folder is not None:
            load(self._folder, self._tables, comm)
        elif self._tables:
            commits = {rank: cards[rank]["commits"][str(number)] for rank in having}
            size = next(iter(commits.values()))["size"]
            senders = _senders({rank: each["parts"] for rank, each in commits.items()}, size)
            sent = [part for part, sender in enumerate(senders) if sender == comm.rank]
            parts = {} if mine is None else {part: mine.parts[part] for part in sent}

            def restore() -> None:
                swaps = [
                    self._restored(comm, table, {rank: its[i] for rank, its in parts.items()}, size)
                    for i, table in enumerate(self._tables)
                ]
                swap_all(self._tables, swaps)

            with_locks(self._tables, restore)
        self._settled, self._staged = mine, None
        return values

    def _commits(self) -> list[Commit]:
        return [commit for commit in (self._settled, self._staged) if commit is not None]

    def _own_and_copied(
        self, comm: Communicator, targets: Sequence[int | None]
    ) -> dict[int, list[Content]]:
        """Returns the parts that this rank keeps: its own, and copies of others."""
        own = together(comm, lambda: _take_contents(self._tables))
        kept, target = {comm.rank: own}, targets[comm.rank]
        if target is not None:
            received = _exchange(comm, {target: _to_message(dict(enumerate(own)))})
            kept |= {rank: [*_from_message(message).values()] for rank, message in received.items()}
        return kept

    def _number_on_disk(self, comm: Communicator, is_any: bool) -> int:
        """Returns the number of the commit in the folder; 0 if it is not of this job."""

        def read() -> int:
            if comm.rank != 0 or not is_any:
                return 0
            assert self._folder is not None
            return int(manifest.read(self._folder).extra.get(_NUMBER, 0))

        return int(comm.broadcast(np.array([together(comm, read)], np.int64))[0])

    def _restored(
        self, comm: Communicator, table: EmbeddingTable, parts: Mapping[int, Content], size: int
    ) -> Swap:
        """Restores a table beside its old content from parts of a commit of `size` ranks.

        Args:
          parts: those that this rank sends, by their rank in the commit. Each rank takes the keys
            that it owns now.
        """

        def messages() -> dict[int, np.ndarray]:
            if size == comm.size:  # unchanged, with the places in the index
                return {rank: _to_message({rank: part}) for rank, part in parts.items()}
            return {
                rank: _to_message({old: owned_by(part, are_own) for old, part in parts.items()})
                for rank in range(comm.size)
                for are_own in (owns(table, rank, comm.size),)
                if parts
            }

        received = _exchange(comm, together(comm, messages))
        found: dict[int, Content] = {}
        for message in received.values():
            found |= _from_message(message)
        # By rank, whoever sent them: of a key in several parts the first counts.
        ordered = [found[rank] for rank in sorted(found)]
        return together(comm, lambda: prepare_restore(table, as_saved(table, ordered)))


def _take_contents(tables: Sequence[EmbeddingTable]) -> list[Content]:
    """Returns copies of the contents of tables, all locked together."""
    for table in tables:
        with_lock(table, partial(drop_orphaned_states, table))
    return with_locks(tables, lambda: list(map(take, tables)))


def backup_ranks(machines: Sequence[int]) -> list[int | None]:
    """Returns for each rank another one that keeps a copy of its part; None if there is no other.

    If there is another machine it is a rank of the next one, whose ranks share the work; otherwise
    it is the next rank.

    Args:
      machines: number of the machine of each rank.
    """
    size = len(machines)
    chosen: list[int | None] = []
    for rank, machine in enumerate(machines):
        following = [(rank + i) % size for i in range(1, size)]
        others = [other for other in following if machines[other] != machine]
        if others:
            there = [other for other in range(size) if machines[other] == machines[others[0]]]
            chosen.append(there[list(machines[:rank]).count(machine) % len(there)])
        else:
            chosen.append(following[0] if following else None)
    return chosen


def _machine() -> int:
    """Returns a number of the machine that this rank runs on, as the launcher names it."""
    name = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    return zlib.crc32(name.encode())


def _exchange(comm: Communicator, messages: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """Sends a message to some ranks; returns the received ones by rank. Every rank must call it."""
    empty = np.empty(0, _MESSAGE_ROW)
    rows = [messages.get(rank, empty) for rank in range(comm.size)]
    splits = np.array([len(message) for message in rows], np.int64)
    received = comm.alltoallv(np.concatenate(rows), splits, call="parts")
    return {rank: part for rank, part in enumerate(received.by_rank()) if part.size}


def _senders(parts_of: Mapping[int, Sequence[int]], size: int) -> list[int]:
    """Returns for each of `size` parts the rank that sends it: its own rank if that has it.

    Args:
      parts_of: by rank, the parts that it has, its own first.

    Raises:
      RuntimeError: no rank has a part.
    """
    owners = {parts[0]: rank for rank, parts in parts_of.items()}
    keeping = {part: rank for rank, parts in parts_of.items() for part in parts}
    lost = [part for part in range(size) if part not in keeping]
    if lost:
        raise RuntimeError(
            f"The tables cannot go on from the last commit: of {size} ranks the parts of "
            f"{', '.join(map(str, lost))} are lost. In memory each is on two ranks, and both have "
            "left. Give `path`, for commits on disk, which any number of ranks may leave."
        )
    return [owners.get(part, keeping[part]) for part in range(size)]


def _to_message(contents: Mapping[int, Content]) -> np.ndarray:
    """Returns contents by number as a message, (n,) of `_MESSAGE_ROW`."""
    arrays: list[np.ndarray] = []

    def number_of(array: np.ndarray) -> int:
        arrays.append(array)
        return len(arrays) - 1

    numbered = [(n, with_arrays(each, number_of, number_of)) for n, each in contents.items()]
    kinds = [(array.dtype.str, array.shape) for array in arrays]
    text = json.dumps([kinds, numbered]).encode()
    head = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    begins = [0, *itertools.accumulate(_pad(each.nbytes) for each in [head, *arrays])]
    message = np.zeros(-(-begins[-1] // _MESSAGE_ROW.itemsize), _MESSAGE_ROW)
    flat = message.reshape(-1).view(np.uint8)
    for begin, array in zip(begins, [head, *arrays], strict=False):
        flat[begin : begin + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return message


def _from_message(message: np.ndarray) -> dict[int, Content]:
    """Returns the contents of a message by number, as views of it."""
    flat = message.reshape(-1).view(np.uint8)
    end = 8 + int(flat[:8].view("<i8")[0])
    kinds, numbered = json.loads(flat[8:end].tobytes())
    arrays, begin = [], _pad(end)
    for dtype, shape in kinds:
        arrays.append(np.ndarray(shape, dtype, flat, begin))
        begin += _pad(arrays[-1].nbytes)
    array_of = arrays.__getitem__
    return {n: with_arrays(Content(*parts), array_of, array_of) for n, parts in numbered}


def _pad(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED
