"""What ranks tell each other of hot keys: words (int64) that travel with the keys of a lookup.

of all tables   a token, the length of the proposal
of each table   for each part a bit for each hot key of the receiver: the sender asks for it
                a bit for each hot key of the sender: whether the receiver needs its row if it asks
                the proposal: keys, and what they count
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sok_lite.backend import Array
from sok_lite.comm.protocol import split_offsets
from sok_lite.engine.dtypes import KeyDtype
from sok_lite.engine.owner import OwnerRule
from sok_lite.engine.table.hot_keys import HotSet

_BITS = 64
_HEADER = 2


class Said(NamedTuple):
    """What this rank says of the hot keys of a table.

    Attributes:
      hot: the keys.
      token: of `HotKeys`.
      asked: of each part (n,) bool, for which of them it asks.
      needed: (size, m) bool, which rows of its own each rank needs.
      proposal: (k, 2) int64; none where the hot keys stay.
    """

    hot: HotSet
    token: int
    asked: list[np.ndarray]
    needed: np.ndarray
    proposal: np.ndarray


class Told(NamedTuple):
    """What all ranks say to this one of the hot keys of a table.

    Attributes:
      asked: of each part (size, m) bool, for which keys of this rank each rank asks.
      needed: (n,) bool, which rows this rank needs.
      proposals: of each rank (k, 2) int64.
    """

    asked: list[np.ndarray]
    needed: np.ndarray
    proposals: list[np.ndarray]


@dataclass(frozen=True)
class InTurn(OwnerRule):
    """Words for all ranks: the first ones for rank 0, and so on.

    Attributes:
      counts: how many each rank gets.
    """

    counts: tuple[int, ...]

    @property
    def name(self) -> str:
        return "in turn"

    def owners(self, keys: Array, size: int, kind: KeyDtype | str = "int64", xp: Any = np) -> Array:
        return xp.asarray(np.repeat(np.arange(size, dtype=np.int32), self.counts))


def words_for(said: Sequence[Said], rank: int) -> np.ndarray:
    """Returns what this rank says to another, (n,) int64."""
    words = [np.array([x for each in said for x in (each.token, len(each.proposal))], np.int64)]
    for each in said:
        words += [_packed(asked[each.hot.of_owner(rank)]) for asked in each.asked]
        words += [_packed(each.needed[rank]), each.proposal.reshape(-1)]
    return np.concatenate(words)


def told(said: Sequence[Said], words: Sequence[np.ndarray]) -> list[Told] | None:
    """Returns what the ranks say of each table; None where they have not the same hot keys.

    Args:
      said: what this rank says.
      words: what each rank has sent to it.
    """
    headers = [each[: _HEADER * len(said)].reshape(-1, _HEADER) for each in words]
    if any((header[:, 0] != headers[0][:, 0]).any() for header in headers):
        return None
    num_own = [each.needed.shape[1] for each in said]
    results = [
        Told([np.zeros((len(words), m), bool) for _ in each.asked], np.zeros(0, bool), [])
        for each, m in zip(said, num_own, strict=True)
    ]
    needed: list[list[np.ndarray]] = [[] for _ in said]
    for source, its in enumerate(words):
        rest = its[_HEADER * len(said) :]
        for t, each in enumerate(said):
            its_own, num_proposed = np.diff(each.hot.starts)[source], int(headers[source][t, 1])
            sizes = [num_own[t]] * len(each.asked) + [its_own]
            ends = np.cumsum([*(-(-n // _BITS) for n in sizes), 2 * num_proposed])
            *pieces, proposal, rest = np.split(rest, ends)
            *asked, its_needed = map(_unpacked, pieces, sizes)
            for part, bits in enumerate(asked):
                results[t].asked[part][source] = bits
            needed[t].append(its_needed)
            results[t].proposals.append(proposal.reshape(-1, 2))
    return [
        each._replace(needed=np.concatenate(bits))
        for each, bits in zip(results, needed, strict=True)
    ]


def num_of_owners(hot: HotSet, bits: np.ndarray) -> np.ndarray:
    """Returns how many of (n,) bool are true among the keys of each owner, (size,) int64."""
    return np.diff(split_offsets(bits)[hot.starts])


def _packed(bits: np.ndarray) -> np.ndarray:
    """Returns (n,) bool as words."""
    packed = np.zeros(-(-len(bits) // _BITS) * (_BITS // 8), np.uint8)
    its_bytes = np.packbits(bits)
    packed[: len(its_bytes)] = its_bytes
    return packed.view(np.int64)


def _unpacked(words: np.ndarray, count: int) -> np.ndarray:
    """Returns the first bits of words, (count,) bool."""
    return np.unpackbits(words.view(np.uint8), count=count).astype(bool)
