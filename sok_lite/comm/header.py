"""What a rank says of its part in a collective before it sends rows: its header.

Every transport gives every rank the headers of all others first. Ranks that are in different calls,
or send rows of different formats, are found there, on every rank, before a row is used.
"""

import struct
from collections.abc import Mapping
from typing import NamedTuple

# Number of the collective, bytes of a row, number of rows of this part, dtype, name of the call.
_FORMAT = struct.Struct("<qqq8s64s")
HEADER_BYTES = _FORMAT.size
LONGEST_CALL = 64

# The call of a rank whose program has ended, and of one that left a collective in the middle.
FAREWELL = "the end of its program"
BROKEN_OFF = "a call that broke off"


class Header(NamedTuple):
    """One rank's part in one collective.

    Attributes:
      turn: number of the collective, counted by each rank for itself.
      call: what the caller calls it: "allreduce sum of 12", "return_rows of lookup 7".
      dtype: of the rows, as `np.dtype.str`.
      row_bytes: of one row.
    """

    turn: int
    call: str
    dtype: str
    row_bytes: int

    def pack(self, num_rows: int) -> bytes:
        """Returns the header as HEADER_BYTES bytes, for a part of `num_rows` rows."""
        return _FORMAT.pack(
            self.turn, self.row_bytes, num_rows, self.dtype.encode(), self.call.encode()
        )

    def __str__(self) -> str:
        return f"{self.call} (collective {self.turn}, {self.dtype} rows of {self.row_bytes} bytes)"


def unpack_header(packed: bytes) -> tuple[Header, int]:
    """Returns (header, number of rows) of what `Header.pack` wrote."""
    turn, row_bytes, num_rows, dtype, call = _FORMAT.unpack(packed)
    name, kind = (text.rstrip(b"\0").decode(errors="replace") for text in (call, dtype))
    return Header(turn, name, kind, row_bytes), num_rows


def disagreement(rank: int, mine: Header, others: Mapping[int, Header]) -> str | None:
    """Returns why these headers cannot be of one collective, for people, or None if they can.

    If one rank finds a reason every rank does: two headers that differ cannot both equal a third.
    """
    for peer, theirs in others.items():
        if theirs == mine:
            continue
        same = "All ranks must make the same calls in the same order."
        if theirs.call == FAREWELL:
            return f"Rank {peer} has ended, while rank {rank} is in {mine}. {same}"
        if mine.call == FAREWELL:
            return f"Rank {rank} has ended, while rank {peer} is in {theirs}. {same}"
        return (
            f"Ranks make different calls: rank {rank} is in {mine}, rank {peer} in {theirs}. {same}"
        )
    return None
