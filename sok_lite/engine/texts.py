"""The texts of keys that are hashes of texts.

The rank that looks up a text stores it; the key's row is most likely on another rank. So a rank
that wants the text of a key asks all ranks. When a checkpoint is written, ranks ask the owners of
keys which keys still have rows, and drop the texts of the others.
"""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend.uninterrupted import uninterrupted
from sok_lite.comm.protocol import Communicator
from sok_lite.engine.failure import together

# New texts that are kept without a look at the table, which may be about to get their keys.
RECENT = 1 << 16
# The most keys that all ranks together ask for in one message.
ASKED_AT_ONCE = 1 << 17
# The most bytes of one message.
MOST_BYTES = (1 << 31) - 1

# Python's int and bytes objects of a key and its text; each is rounded up to 16, by 8 on average.
_BYTES_OF_OBJECTS = sys.getsizeof(1 << 62) + sys.getsizeof(b"") + 16

# An owner's answer to a rank that has the text of a key: the key has no row; another rank writes
# the text to the checkpoint; this rank does.
_GONE, _ELSEWHERE, _YOURS = 0, 1, 2


class KeyTexts(NamedTuple):
    """Keys and their texts, on the host.

    Attributes:
      keys: (t,) int64, distinct.
      ends: (t,) int64, the end of each text in `data`.
      data: (b,) uint8, all texts, one after the other.
    """

    keys: np.ndarray
    ends: np.ndarray
    data: np.ndarray

    @classmethod
    def of(cls, texts: Mapping[int, bytes]) -> "KeyTexts":
        """Makes arrays of texts by key."""
        lengths = np.fromiter(map(len, texts.values()), np.int64, len(texts))
        data = np.frombuffer(b"".join(texts.values()), np.uint8)
        return cls(np.fromiter(texts, np.int64, len(texts)), np.cumsum(lengths), data)

    def as_dict(self) -> dict[int, bytes]:
        """Returns the texts by key."""
        data, ends = self.data.tobytes(), self.ends.tolist()
        starts = [0, *ends[:-1]]
        return {
            key: data[first:end]
            for key, first, end in zip(self.keys.tolist(), starts, ends, strict=False)
        }

    def fault(self) -> str | None:
        """Returns why `ends` is wrong; None: it is not."""
        if (np.diff(self.ends, prepend=np.int64(0)) < 0).any():
            return "the ends of its texts do not rise"
        if (int(self.ends[-1]) if self.ends.size else 0) != self.data.size:
            return "its texts do not end where the last one does"
        return None


class TextStore:
    """The texts of a table's keys on one rank. It drops those of keys without rows after a while.

    While n keys have rows it has at most some 3 n + 2 RECENT texts.

    Args:
      are_held: returns whether each of keys (n,) int64 may have a row, (n,) bool.
    """

    def __init__(self, are_held: Callable[[np.ndarray], np.ndarray]) -> None:
        self._are_held = are_held
        self._recent: dict[int, bytes] = {}
        self._older: dict[int, bytes] = {}
        self._num_held = 0  # of the older ones, at the last look
        self._text_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Number of texts."""
        return len(self._recent) + len(self._older)

    @property
    def num_bytes(self) -> int:
        """Host memory of keys and texts, as far as Python tells."""
        dicts = sys.getsizeof(self._recent) + sys.getsizeof(self._older)
        return dicts + len(self) * _BYTES_OF_OBJECTS + self._text_bytes

    def get(self, key: int) -> bytes | None:
        """Returns the text of a key; None: it is not here."""
        text = self._recent.get(key)
        return self._older.get(key) if text is None else text

    def of(self, keys: Sequence[int]) -> dict[int, bytes]:
        """Returns the texts of keys, by key, without missing ones."""
        return {key: text for key in keys if (text := self.get(key)) is not None}

    def places_of_new(self, keys: np.ndarray) -> np.ndarray:
        """Returns the first positions of keys (n,) int64 without a text, (k,) int64.

        The other texts stay for at least RECENT new ones.
        """
        distinct, first = np.unique(keys, return_index=True)
        with self._lock:
            self._forget_where_many_are_new()
            recent, older = self._recent, self._older
        is_new = [key not in recent and key not in older for key in distinct.tolist()]
        return first[np.array(is_new, bool)]

    def add(
        self, texts: Mapping[int, bytes], check: Callable[[bytes, bytes], None] | None = None
    ) -> None:
        """Adds texts. The first text of a key stays.

        Args:
          check: called, before anything changes, with the old text of a key and a different new
            one.
        """
        with self._lock:
            self._forget_where_many_are_new()  # first: it must not drop what `new` leaves out
            new = {}
            for key, text in texts.items():
                known = self.get(key)
                if known is None:
                    new[key] = text
                elif check is not None and known != text:
                    check(known, text)
            self._recent.update(new)
            self._text_bytes += _size_of(new)

    def _forget_where_many_are_new(self) -> None:
        """Once there are many recent texts, drops older ones without a row; recent ones get old."""
        if len(self._recent) <= max(RECENT, self._num_held):
            return
        keys = np.fromiter(self._older, np.int64, len(self._older))
        held = keys[self._are_held(keys)].tolist()
        self._older = {key: self._older[key] for key in held} | self._recent
        self._recent, self._num_held = {}, len(held)
        self._text_bytes = _size_of(self._older)

    def drop(self, keys: Sequence[int]) -> None:
        """Drops the texts of keys, but recent ones, whose rows may be about to come.

        Recent ones get old, so that the next call drops them.
        """
        with self._lock:
            older = {**self._older, **self._recent}
            for key in keys:
                if key not in self._recent:
                    older.pop(key, None)
            self._older, self._recent = older, {}
            self._text_bytes = _size_of(older)

    def all(self) -> dict[int, bytes]:
        """Returns a copy of all texts, by key, without a lock: the table may be locked."""
        recent = self._recent  # first: recent texts get old
        return {**self._older, **recent}

    def replace(self, texts: dict[int, bytes]) -> None:
        """Replaces all texts."""
        num_bytes = _size_of(texts)
        with uninterrupted():
            self._older, self._recent, self._text_bytes = texts, {}, num_bytes


def _size_of(texts: Mapping[int, bytes]) -> int:
    """Returns the bytes of texts."""
    return sum(map(len, texts.values()))


# ---------------------------------------------------------------- between ranks


def texts_of(store: TextStore, keys: np.ndarray, comm: Communicator) -> dict[int, bytes]:
    """Returns the texts of keys (n,) int64, by key, from all ranks, without missing ones.

    Every rank must call it, with keys of its own. If ranks differ, the text of the lowest counts.

    Raises:
      ValueError: the texts on one rank are longer than a message. All ranks raise it.
    """
    distinct, found = np.unique(keys), dict[int, bytes]()
    at_once = max(1, ASKED_AT_ONCE // comm.size)
    num_rounds = np.array(-(-distinct.size // at_once), np.int64)
    for turn in range(int(comm.allreduce(num_rounds, "max", "texts"))):
        asked = comm.allgatherv(distinct[turn * at_once :][:at_once], call="texts")
        message, splits = together(
            comm, partial(_texts_for_ranks, store, asked.by_rank(), comm.size)
        )
        answers = comm.alltoallv(message, splits, call="texts")
        for message in reversed(answers.by_rank()):
            found |= _from_message(message).as_dict()
    return found


def _texts_for_ranks(
    store: TextStore, asked: Sequence[np.ndarray], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the messages to all ranks, one after the other, and the bytes of each."""
    known = [_as_message(KeyTexts.of(store.of(keys.tolist()))) for keys in asked]
    splits = np.array([message.size for message in known], np.int64)
    # What a rank receives has the same limit, and each rank may send as much.
    if int(splits.sum()) > MOST_BYTES or int(splits.max()) > MOST_BYTES // size:
        raise ValueError(
            f"The texts of {sum(map(len, asked)):,} keys have {int(splits.sum()):,} bytes on one "
            "rank, more than one message may have. Ask for fewer keys at a time."
        )
    return np.concatenate(known), splits


def prune_texts(table: Any, store: TextStore, comm: Communicator) -> KeyTexts:
    """Drops texts of keys without rows; returns those that this rank writes to a checkpoint.

    Every rank must call it; it waits for the device. The text of a key with a row is written by the
    lowest rank that has it.

    Args:
      table: an `EmbeddingTable`, with the keys of this rank.
    """

    def known() -> tuple[dict[int, bytes], np.ndarray, np.ndarray]:
        texts = store.all()
        keys = np.fromiter(texts, np.int64, len(texts))
        return texts, keys, table.owner.owners(keys, comm.size, table.key_dtype)

    texts, keys, owners = together(comm, known)
    order = np.argsort(owners, kind="stable")
    splits = np.bincount(owners, minlength=comm.size)
    asked = comm.alltoallv(keys[order], splits, call="texts")
    answers = together(comm, lambda: _answers_of_owner(table, asked.rows))
    received = np.empty(keys.size, np.uint8)
    received[order] = comm.alltoallv(answers, asked.recv_splits, call="texts").rows
    store.drop(keys[received == _GONE].tolist())
    return KeyTexts.of({key: texts[key] for key in keys[received == _YOURS].tolist()})


def are_held(table: Any, keys: np.ndarray) -> np.ndarray:
    """Returns whether keys (n,) int64 have a row in a table, (n,) bool; both on the host."""
    backend = table.backend
    return np.asarray(backend.to_host(table.contains(backend.from_host(keys))))


def _answers_of_owner(table: Any, keys: np.ndarray) -> np.ndarray:
    """Returns the answers for keys from all ranks, rank after rank, (n,) uint8."""
    answers = np.where(are_held(table, keys), _ELSEWHERE, _GONE).astype(np.uint8)
    is_first = np.zeros(keys.size, bool)
    is_first[np.unique(keys, return_index=True)[1]] = True
    answers[is_first & (answers != _GONE)] = _YOURS
    return answers


def _as_message(texts: KeyTexts) -> np.ndarray:
    """Serializes texts to (k,) uint8."""
    numbers = np.concatenate([np.array([texts.keys.size], np.int64), texts.keys, texts.ends])
    return np.concatenate([numbers.view(np.uint8), texts.data])


def _from_message(message: np.ndarray) -> KeyTexts:
    data = message.tobytes()
    num_keys = int.from_bytes(data[:8], "little")
    keys, ends = np.frombuffer(data, np.int64, 2 * num_keys, 8).reshape(2, num_keys)
    return KeyTexts(keys, ends, np.frombuffer(data, np.uint8, offset=8 + 16 * num_keys))
