"""Histograms with fixed edges, which can be summed over ranks and compared between reports."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
# Seconds. Times are known to about a second, and to 1/128 of their age. Every second edge alone
# reads well too.
AGES = (
    *(1.0, 2.0, 5.0, 10.0, 30.0),
    *(float(_MINUTE * count) for count in (1, 2, 5, 10, 30)),
    *(float(_HOUR * count) for count in (1, 2, 6, 12)),
    *(float(_DAY * count) for count in (1, 3, 7, 14, 30, 90, 180, 365)),
)
# Ten per power of ten, by factors of about 1.26: rows of a new table differ by less than a power of
# ten.
_DIGITS = ("1", "1.25", "1.6", "2", "2.5", "3.2", "4", "5", "6.3", "8")
NORMS = tuple(float(f"{digits}e{power}") for power in range(-6, 6) for digits in _DIGITS)
# Displayed ranges: wider histograms merge neighbors.
_MOST_SHOWN = 15
_TOGETHER = (1, 2, 3, 5, 10, 20, 50, 100)


class Histogram(NamedTuple):
    """How many keys have a number in each range.

    Attributes:
      unit: of the edges: "s", or "" for none.
      edges: ascending.
      counts: keys below the first edge, between edges (lower inclusive), and from the last one on:
        one more than edges.
      others: keys outside of all ranges, by reason, such as "zero".
    """

    unit: str
    edges: tuple[float, ...]
    counts: tuple[int, ...]
    others: dict[str, int]

    @property
    def num_keys(self) -> int:
        return sum(self.counts) + sum(self.others.values())

    def shown(self) -> list[tuple[str, int]]:
        """Returns (range in words, keys) from the first to the last range with keys, at most 15."""
        for step in _TOGETHER:
            edges, counts = self._with_every(step)
            used = [i for i, count in enumerate(counts) if count]
            if not used or used[-1] - used[0] < _MOST_SHOWN:
                break
        texts = [_age(edge) if self.unit == "s" else f"{edge:g}" for edge in edges]
        ranges = [
            f"below {texts[0]}",
            *(f"{low} to {high}" for low, high in pairwise(texts)),
            f"from {texts[-1]} on",
        ]
        span = slice(used[0], used[-1] + 1) if used else slice(0)
        some = [(name, count) for name, count in self.others.items() if count]
        return some + list(zip(ranges[span], counts[span], strict=True))

    def _with_every(self, step: int) -> tuple[tuple[float, ...], list[int]]:
        """Keeps every `step`-th edge, from the first on."""
        starts = range(1, len(self.counts), step)
        sums = [sum(self.counts[start : start + step]) for start in starts]
        return self.edges[::step], [self.counts[0], *sums]

    def as_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {**self._asdict(), "edges": list(self.edges), "counts": list(self.counts)}

    @classmethod
    def of_dict(cls, given: dict[str, Any]) -> "Histogram":
        """Inverts `as_dict`."""
        edges, counts = tuple(given["edges"]), tuple(given["counts"])
        return cls(given["unit"], edges, counts, dict(given["others"]))

    @classmethod
    def sum_of(cls, parts: "Sequence[Histogram]") -> "Histogram":
        """Sums at least one histogram, all with the same edges."""
        counts = tuple(map(sum, zip(*(part.counts for part in parts), strict=True)))
        names = dict.fromkeys(name for part in parts for name in part.others)
        others = {name: sum(part.others.get(name, 0) for part in parts) for name in names}
        return parts[0]._replace(counts=counts, others=others)


class Counting:
    """A histogram being filled; `others`: reasons for keys outside of all ranges."""

    def __init__(self, unit: str, edges: Sequence[float], others: Sequence[str]) -> None:
        self._unit, self._edges = unit, np.array(edges, np.float64)
        self._counts = np.zeros(len(edges) + 1, np.int64)
        self._others = dict.fromkeys(others, 0)

    def add(self, numbers: np.ndarray, **others: np.ndarray) -> None:
        """Counts numbers (n,) float64; where one of `others` (n,) bool is set, by its name."""
        has_place = np.ones(numbers.shape, bool)
        for name, are_such in others.items():
            self._others[name] += int(np.count_nonzero(are_such))
            has_place &= ~are_such
        at = np.searchsorted(self._edges, numbers[has_place], side="right")
        self._counts += np.bincount(at, minlength=self._counts.size)

    def histogram(self) -> Histogram:
        edges, counts = tuple(self._edges.tolist()), tuple(self._counts.tolist())
        return Histogram(self._unit, edges, counts, self._others)


class CountingNorms(Counting):
    """Counts L2 norms of rows."""

    def __init__(self) -> None:
        super().__init__("", NORMS, ("zero", "not_finite"))

    def add_norms(self, norms: np.ndarray) -> None:
        """Counts norms (n,) float64."""
        self.add(norms, zero=norms == 0, not_finite=~np.isfinite(norms))


class CountingAges(Counting):
    """Counts the ages of keys: from when each was last seen to the table's last lookup."""

    def __init__(self, last: float) -> None:
        super().__init__("s", AGES, ("never_seen",))
        self._last = last

    def add_times(self, times: np.ndarray) -> None:
        """Counts times (n,) float64, in seconds since 1970; 0: never seen."""
        self.add(np.maximum(self._last - times, 0.0), never_seen=times == 0)


def _age(seconds: float) -> str:
    for size, unit in ((_DAY, "d"), (_HOUR, "h"), (_MINUTE, "min")):
        if seconds >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds:g} s"
