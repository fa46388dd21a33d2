"""The header of a rank's part in a collective, sent before its rows.

Every transport first exchanges the headers of all ranks, so that every rank detects different
calls or row formats before it uses a row.
"""

import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

# Collective number, row bytes, dtype and call name; then the number of rows of this part, and the
# rank's notes, which may differ between ranks.
_CALL = struct.Struct("<qq8s64s")
_ROWS = struct.Struct("<iI")
HEADER_BYTES = _CALL.size + _ROWS.size
LONGEST_CALL = 64

# Call names of a rank whose program has ended, and of one that broke off inside a collective.
FAREWELL = "the end of its program"
BROKEN_OFF = "a call that broke off"
# Prefixes of calls that programs without tables may make on rank 0 only.
_SAVE, _LOAD = "a save by ", "a load by "


def save_by(name: str) -> str:
    """Returns the name of the first call of a save, such as "model.save()"."""
    return f"{_SAVE}{name}"[:LONGEST_CALL]


def load_by(name: str) -> str:
    """Returns the name of the first call of a load, such as "sok.load()"."""
    return f"{_LOAD}{name}"[:LONGEST_CALL]


# Notes: the rank was told to terminate; a save is due; a background save is running.
ENDS, DUE, BUSY = 1, 2, 4


class Notes:
    """Flags that ranks share in the header of every collective.

    After the next collective all ranks have the same flags, without further communication.

    Attributes:
      mine: flags of this rank, except `ENDS`.
      ends: whether this rank has `ENDS`; separate, because a signal may set it at any time.
      of_all: the flags of all ranks in the last collective, or-ed.
    """

    def __init__(self) -> None:
        self.mine, self.ends, self.of_all = 0, False, 0

    def sent(self) -> int:
        """Returns the flags of this rank to send."""
        return self.mine | (ENDS if self.ends else 0)


class Header(NamedTuple):
    """One rank's part in one collective."""

    turn: int  # number of the collective, counted by each rank itself
    call: str  # "allreduce sum of 12", "return_rows of lookup 7"
    dtype: str  # of the rows, as `np.dtype.str`
    row_bytes: int  # of one row
    notes: int = 0

    def pack(self, num_rows: Iterable[int]) -> list[bytes]:
        """Returns the headers of parts with these numbers of rows, HEADER_BYTES bytes each."""
        call = _CALL.pack(self.turn, self.row_bytes, self.dtype.encode(), self.call.encode())
        return [call + _ROWS.pack(n, self.notes) for n in num_rows]

    def __str__(self) -> str:
        return f"{self.call} (collective {self.turn}, {self.dtype} rows of {self.row_bytes} bytes)"


def num_rows_of(packed: bytes) -> int:
    """Returns the number of rows in a packed header."""
    return int(_ROWS.unpack_from(packed, _CALL.size)[0])


def notes_of(packed: Iterable[bytes]) -> int:
    """Returns the notes of all ranks in packed headers."""
    found = 0
    for header in packed:
        found |= _ROWS.unpack_from(header, _CALL.size)[1]
    return found


def turn_of(packed: bytes) -> int:
    """Returns the collective's number in a packed header."""
    return int(_CALL.unpack_from(packed)[0])


def disagreement(rank: int, mine: Header, others: Mapping[int, bytes]) -> str | None:
    """Returns the error text for packed headers of different collectives, or None.

    If one rank finds a difference, all do: two headers that differ cannot both equal a third.
    """
    (packed,) = mine.pack([0])
    for peer, other in others.items():
        if other[: _CALL.size] == packed[: _CALL.size]:
            continue
        theirs = _unpack(other)
        same = advice({rank: mine.call, peer: theirs.call})
        if theirs.call == FAREWELL:
            return f"Rank {peer} has ended, while rank {rank} is in {mine}. {same}"
        if mine.call == FAREWELL:
            return f"Rank {rank} has ended, while rank {peer} is in {theirs}. {same}"
        return (
            f"Ranks make different calls: rank {rank} is in {mine}, rank {peer} in {theirs}. {same}"
        )
    return None


def advice(calls: Mapping[int, str]) -> str:
    """Returns what to do if ranks are in different calls, by rank."""
    for start, does in ((_SAVE, "saves"), (_LOAD, "loads")):
        doing = sorted(rank for rank, call in calls.items() if call.startswith(start))
        others = sorted(calls.keys() - set(doing))
        if doing and others:
            name = calls[doing[0]].removeprefix(start).split(" ")[0]
            return (
                f"Rank {doing[0]} {does}, and rank {others[0]} does not: every rank has to call "
                f"{name}, or have the callback that does, for each has rows of its own."
            )
    return "All ranks must make the same calls in the same order."


def _unpack(packed: bytes) -> Header:
    turn, row_bytes, *texts = _CALL.unpack_from(packed)
    dtype, call = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
    return Header(turn, call, dtype, row_bytes)
