"""The texts of the keys that a rank has looked up, and what ranks tell each other of them.

A key of a text is its hash. The rank that looks a text up remembers it; the row of the key is on
another rank, most likely. So whoever wants the text of a key asks all ranks, and a rank learns from
the owner of a key whether it is held still: when a checkpoint is written.
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

# New texts that are kept whether the table has their keys or not: they may be about to come.
RECENT = 1 << 16
# Keys whose texts all ranks together ask for at a time, so that messages stay small.
ASKED_AT_ONCE = 1 << 17
# Bytes that a rank may send in one message.
MOST_BYTES = (1 << 31) - 1

# What a text takes beside its bytes and its place in a dict: a key, and the head of an object of
# bytes. Each of the two is rounded up to 16, by 8 in the mean.
_BYTES_OF_OBJECTS = sys.getsizeof(1 << 62) + sys.getsizeof(b"") + 16

# What an owner says of a key to a rank that has its text.
_GONE, _ELSEWHERE, _YOURS = 0, 1, 2


class KeyTexts(NamedTuple):
    """Keys and their texts, on the host.

    Attributes:
      keys: (t,) int64, distinct.
      ends: (t,) int64, where the text of each key ends in `data`, in bytes.
      data: (b,) uint8, all texts, one after the other.
    """

    keys: np.ndarray
    ends: np.ndarray
    data: np.ndarray

    @classmethod
    def of(cls, texts: Mapping[int, bytes]) -> "KeyTexts":
        """Returns texts by key as arrays."""
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
        """Returns why they are not as `KeyTexts` says; None: they are."""
        if (np.diff(self.ends, prepend=np.int64(0)) < 0).any():
            return "the ends of its texts do not rise"
        if (int(self.ends[-1]) if self.ends.size else 0) != self.data.size:
            return "its texts do not end where the last one does"
        return None


class TextStore:
    """The texts of keys of a table on one rank. Those of keys that are not held go after a while.

    Of n keys that are held it has at most some 3 n + 2 RECENT texts, however many keys there were.

    Args:
      are_held: takes keys (n,) int64 and says which of them may have a row, (n,) bool.
    """

    def __init__(self, are_held: Callable[[np.ndarray], np.ndarray]) -> None:
        self._are_held = are_held
        self._recent: dict[int, bytes] = {}
        self._older: dict[int, bytes] = {}
        self._num_held = 0  # of the older ones, when that was last looked at
        self._text_bytes = 0  # of all texts
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Texts that are remembered."""
        return len(self._recent) + len(self._older)

    @property
    def num_bytes(self) -> int:
        """Memory of the host that keys and texts take, as far as Python tells."""
        dicts = sys.getsizeof(self._recent) + sys.getsizeof(self._older)
        return dicts + len(self) * _BYTES_OF_OBJECTS + self._text_bytes

    def get(self, key: int) -> bytes | None:
        """Returns the text of a key; None: it is not remembered."""
        text = self._recent.get(key)
        return self._older.get(key) if text is None else text

    def of(self, keys: Sequence[int]) -> dict[int, bytes]:
        """Returns the texts of some keys, as far as they are remembered."""
        return {key: text for key in keys if (text := self.get(key)) is not None}

    def places_of_new(self, keys: np.ndarray) -> np.ndarray:
        """Returns where keys (n,) int64 come first whose texts are not remembered, (k,) int64.

        Of the others none is forgotten before as many as RECENT new ones have come.
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
        """Remembers texts. Of two texts of one key the first stays.

        Args:
          check: called, before anything changes, with the text that is known of a key and another
            one; None: nobody asks.
        """
        with self._lock:
            self._forget_where_many_are_new()  # first: what is known now is known afterwards
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
        """Drops older texts whose keys the table does not hold; those of late are older then."""
        if len(self._recent) <= max(RECENT, self._num_held):
            return
        keys = np.fromiter(self._older, np.int64, len(self._older))
        held = keys[self._are_held(keys)].tolist()
        self._older = {key: self._older[key] for key in held} | self._recent
        self._recent, self._num_held = {}, len(held)
        self._text_bytes = _size_of(self._older)

    def drop(self, keys: Sequence[int]) -> None:
        """Forgets the texts of some keys, but those of late: their rows may be about to come.

        Those of late are older then, and go another time.
        """
        with self._lock:
            older = {**self._older, **self._recent}
            for key in keys:
                if key not in self._recent:
                    older.pop(key, None)
            self._older, self._recent = older, {}
            self._text_bytes = _size_of(older)

    def all(self) -> dict[int, bytes]:
        """Returns a copy of all texts, by key. It waits for nobody: the table may be locked."""
        recent = self._recent  # first: what is recent is older next
        return {**self._older, **recent}

    def replace(self, texts: dict[int, bytes]) -> None:
        """Remembers these texts and no others."""
        num_bytes = _size_of(texts)
        with uninterrupted():
            self._older, self._recent, self._text_bytes = texts, {}, num_bytes


def _size_of(texts: Mapping[int, bytes]) -> int:
    """Returns the bytes of texts."""
    return sum(map(len, texts.values()))


# ---------------------------------------------------------------- what ranks tell each other


def texts_of(store: TextStore, keys: np.ndarray, comm: Communicator) -> dict[int, bytes]:
    """Returns what any rank knows of keys. Every rank must call it, with keys of its own.

    Args:
      store: the texts of this rank.
      keys: (n,) int64.

    Returns:
      Texts by key; keys whose text no rank knows are left out. Of two ranks with different texts
      the lower one counts.

    Raises:
      ValueError: the texts that a rank knows of so many keys are longer than a message. All ranks
        raise it.
    """
    distinct, found = np.unique(keys), dict[int, bytes]()
    at_once = max(1, ASKED_AT_ONCE // comm.size)
    num_rounds = np.array(-(-distinct.size // at_once), np.int64)
    for turn in range(int(comm.allreduce(num_rounds, "max", "texts"))):
        asked = comm.allgatherv(distinct[turn * at_once :][:at_once], call="texts")
        message, splits = together(comm, partial(_answers, store, asked.by_rank(), comm.size))
        answers = comm.alltoallv(message, splits, call="texts")
        for message in reversed(answers.by_rank()):
            found |= _from_message(message).as_dict()
    return found


def _answers(
    store: TextStore, asked: Sequence[np.ndarray], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the bytes that go to all ranks, and how many to each."""
    known = [_as_message(KeyTexts.of(store.of(keys.tolist()))) for keys in asked]
    splits = np.array([message.size for message in known], np.int64)
    # What a rank receives has a limit too, and each of them may send as much.
    if int(splits.sum()) > MOST_BYTES or int(splits.max()) > MOST_BYTES // size:
        raise ValueError(
            f"The texts of {sum(map(len, asked)):,} keys have {int(splits.sum()):,} bytes on one "
            "rank, more than one message may have. Ask for fewer keys at a time."
        )
    return np.concatenate(known), splits


def settle(table: Any, store: TextStore, comm: Communicator) -> KeyTexts:
    """Forgets texts whose keys no rank holds; returns those that this rank writes to a checkpoint.

    Every rank must call it; it waits for the device. Each text of a key that is held is written by
    one rank, the lowest of those that know it.

    Args:
      table: the engine's, for the keys of this rank and who owns the others.
    """

    def known() -> tuple[dict[int, bytes], np.ndarray, np.ndarray]:
        texts = store.all()
        keys = np.fromiter(texts, np.int64, len(texts))
        return texts, keys, table.owner.owners(keys, comm.size, table.key_dtype)

    texts, keys, owners = together(comm, known)
    order = np.argsort(owners, kind="stable")
    splits = np.bincount(owners, minlength=comm.size)
    asked = comm.alltoallv(keys[order], splits, call="texts")
    answers = together(comm, lambda: _verdicts(table, asked.rows))
    told = comm.alltoallv(answers, asked.recv_splits, call="texts").rows
    said = np.empty(keys.size, np.uint8)
    said[order] = told
    store.drop(keys[said == _GONE].tolist())
    return KeyTexts.of({key: texts[key] for key in keys[said == _YOURS].tolist()})


def are_held(table: Any, keys: np.ndarray) -> np.ndarray:
    """Returns which keys (n,) int64 of the host have a row in a table, (n,) bool of the host."""
    backend = table.backend
    return np.asarray(backend.to_host(table.contains(backend.from_host(keys))))


def _verdicts(table: Any, keys: np.ndarray) -> np.ndarray:
    """Returns what to tell of keys that ranks have sent, rank after rank, (n,) uint8."""
    said = np.where(are_held(table, keys), _ELSEWHERE, _GONE).astype(np.uint8)
    is_first = np.zeros(keys.size, bool)
    is_first[np.unique(keys, return_index=True)[1]] = True
    said[is_first & (said != _GONE)] = _YOURS
    return said


def _as_message(texts: KeyTexts) -> np.ndarray:
    """Returns texts as bytes, (k,) uint8."""
    numbers = np.concatenate([np.array([texts.keys.size], np.int64), texts.keys, texts.ends])
    return np.concatenate([numbers.view(np.uint8), texts.data])


def _from_message(message: np.ndarray) -> KeyTexts:
    data = message.tobytes()
    num_keys = int.from_bytes(data[:8], "little")
    keys, ends = np.frombuffer(data, np.int64, 2 * num_keys, 8).reshape(2, num_keys)
    return KeyTexts(keys, ends, np.frombuffer(data, np.uint8, offset=8 + 16 * num_keys))
