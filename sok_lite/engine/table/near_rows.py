"""Which keys of what is restored get near rows: those of the highest scores."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from sok_lite.backend import Array, Backend
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.table.choosing import Chosen
from sok_lite.engine.table.saved import SavedPart

_BITS = 16  # of a score that are looked at in one pass

# Gives the scores of the keys of a part, in its pieces, unsigned.
Scores = Callable[[SavedPart], Iterator[Array]]


def near_first(
    backend: Backend, num_near: int, parts: Sequence[Chosen], scores: Scores, bits: int
) -> None:
    """Gives the `num_near` keys of the highest scores the rows below, and the others those above.

    Of keys with equal scores the first come near.

    Args:
      num_near: at least 1.
      parts: whose keys have the rows from 0 on, more than `num_near`.
      bits: of a score.
    """
    xp = backend.xp
    least, num_equal = _least(backend, num_near, parts, scores, bits)
    next_near, next_far = 0, num_near
    for chosen in parts:
        for i, its_scores in enumerate(scores(chosen.part)):
            if len(chosen.numbers[i].rows) == 0:
                continue
            counts = chosen.numbers[i].as_array(backend) != np.uint32(NO_ROW)
            is_near = counts & (its_scores > least)
            equal = xp.flatnonzero(counts & (its_scores == least))[:num_equal]
            num_equal -= int(equal.size)
            is_near[equal] = True
            is_far = counts & ~is_near
            near, far = (int(xp.count_nonzero(each)) for each in (is_near, is_far))
            made = xp.empty(counts.size, np.uint32)
            made[is_near] = xp.arange(next_near, next_near + near, dtype=np.uint32)
            made[is_far] = xp.arange(next_far, next_far + far, dtype=np.uint32)
            next_near, next_far = next_near + near, next_far + far
            chosen.numbers[i] = chosen.numbers[i]._replace(rows=made[counts])


def _least(
    backend: Backend, num_near: int, parts: Sequence[Chosen], scores: Scores, bits: int
) -> tuple[np.unsignedinteger, int]:
    """Returns the lowest score of a near row, and how many with that score are near."""
    found, digits = 0, np.uint64((1 << _BITS) - 1)
    for shift in range(bits - _BITS, -1, -_BITS):
        counts = np.zeros(1 << _BITS, np.int64)
        for chosen in parts:
            for numbers, piece in zip(chosen.numbers, scores(chosen.part), strict=True):
                if len(numbers.rows) == 0:
                    continue
                some = backend.to_host(piece).astype(np.uint64, copy=False)
                if numbers.counts is not None:
                    some = some[backend.to_host(numbers.as_array(backend)) != NO_ROW]
                some = some >> np.uint64(shift)
                some = some[some >> np.uint64(_BITS) == found] & digits
                counts += np.bincount(some.astype(np.int64), minlength=counts.size)
        above = np.cumsum(counts[::-1])[::-1] - counts  # those with higher digits
        digit = int(np.flatnonzero(above < num_near)[0])
        num_near -= int(above[digit])
        found = found << _BITS | digit
    return (np.uint64 if bits == 64 else np.uint32)(found), num_near
