"""How much a training step gives each rank to do, by calculation: keys, rows and bytes.

Bytes of given counts are exact, those that `sok_lite/engine/message.py` makes. Counts are expected
values where ids are drawn from a Zipf distribution, every table alike.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_LINE = 16  # rows of a table begin at such a byte of a message
_HEAD = 1 << 18  # keys that are counted one by one; rarer ones are taken together
_BIN = 1.01  # from one group of rarer keys to the next


# ----------------------------------------------------------------- bytes of given counts


def key_bytes(counts: np.ndarray) -> np.ndarray:
    """Returns the bytes of keys for each rank, (size,) int64.

    Args:
      counts: (size, num_tables) integers, keys of each table for each rank.
    """
    return 8 * (counts.sum(axis=1) + 2 + counts.shape[1])


def row_bytes(counts: np.ndarray, row_sizes: np.ndarray) -> np.ndarray:
    """Returns the bytes of rows or gradients for each rank, (size,) int64.

    Args:
      counts: as of `key_bytes`, of rows.
      row_sizes: (num_tables,) bytes of a row.
    """
    return (_LINE * -(-counts * row_sizes // _LINE)).sum(axis=1)


# ----------------------------------------------------------------- which keys are asked for


class Zipf:
    """Keys of which the k-th most frequent, from 1 on, comes with a chance in proportion to k^-s.

    Attributes:
      chances: (bins,) float64, of each key of a bin.
      numbers: (bins,) float64, keys of each bin; the first bins have one each.
    """

    def __init__(self, num_keys: float, exponent: float) -> None:
        head = min(int(num_keys), _HEAD)
        chances, numbers = np.arange(1, head + 1) ** -float(exponent), np.ones(head)
        if num_keys > head:
            bins = math.ceil(math.log(num_keys / head) / math.log(_BIN))
            # A key k has the place from k - 1/2 to k + 1/2.
            edges = np.geomspace(head + 0.5, num_keys + 0.5, bins + 1)
            rest = np.diff(_integral(edges, exponent))
            numbers = np.concatenate([numbers, np.diff(edges)])
            chances = np.concatenate([chances, rest / np.diff(edges)])
        self.chances = chances / (chances * numbers).sum()
        self.numbers = numbers

    def asked(self, draws: float) -> np.ndarray:
        """Returns the chance, (bins,), that a key is among so many draws."""
        return -np.expm1(draws * np.log1p(-np.minimum(self.chances, 1 - 1e-16)))


def _integral(x: np.ndarray, exponent: float) -> np.ndarray:
    return np.log(x) if exponent == 1 else x ** (1 - exponent) / (1 - exponent)


# ----------------------------------------------------------------- work of a rank


@dataclass(frozen=True)
class Job:
    """What is trained. All tables are alike.

    Attributes:
      tables, keys: how many tables, and how many keys all of them have together.
      dim: elements of a row.
      row_itemsize, grad_itemsize: bytes of an element where rows are stored and travel, and where
        gradients travel.
      states: arrays of float32 beside a row; Adam has 2.
      batch: rows of a batch, of one rank.
      ids: of a row of the batch and a table.
      exponent: of Zipf's distribution.
      owner: "hash", or "mod" of ids that are numbered by how frequent they are, from 0 on.
      dense: parameters of the dense model.
    """

    tables: int = 26
    keys: float = 1e11
    dim: int = 64
    row_itemsize: int = 4
    grad_itemsize: int = 4
    states: int = 2
    batch: int = 8192
    ids: float = 1.0
    exponent: float = 1.05
    owner: str = "hash"
    dense: float = 2.4e6  # those of MLPerf's DLRM

    @property
    def row_size(self) -> int:
        """Bytes of a row."""
        return self.dim * self.row_itemsize

    @property
    def grad_size(self) -> int:
        """Bytes of a gradient on its way."""
        return self.dim * self.grad_itemsize


@dataclass(frozen=True)
class Work:
    """What a step gives each of `ranks` ranks to do, of all tables together, as expected.

    Attributes:
      job, ranks: of which.
    """

    job: Job
    ranks: int

    @cached_property
    def _zipf(self) -> Zipf:
        return Zipf(self.job.keys / self.job.tables, self.job.exponent)

    @cached_property
    def _asked(self) -> np.ndarray:
        return self._zipf.asked(self.job.batch * self.job.ids)

    @property
    def items(self) -> float:
        """Ids of a rank's batch."""
        return self.job.tables * self.job.batch * self.job.ids

    @cached_property
    def distinct(self) -> float:
        """Keys that a rank sends, each once a table, some to itself; as many come to a rank."""
        return self.job.tables * float(self._zipf.numbers @ self._asked)

    @cached_property
    def owned(self) -> float:
        """Distinct keys among those that come to a rank: the rows that it updates."""
        return self.job.tables * float(self._zipf.numbers @ self._by_anyone) / self.ranks

    @property
    def _by_anyone(self) -> np.ndarray:
        return -np.expm1(self.ranks * np.log1p(-np.minimum(self._asked, 1 - 1e-16)))

    @cached_property
    def busiest(self) -> float:
        """Keys that come to the busiest rank, divided by `distinct`."""
        if self.ranks == 1:
            return 1.0
        numbers, asked, tables = self._zipf.numbers, self._asked, self.job.tables
        if self.job.owner == "mod":
            # The same ranks own the frequent keys of all tables.
            ones = int((numbers == 1).sum())
            of_rank = np.arange(ones) % self.ranks
            extra = np.bincount(of_rank, self.ranks * asked[:ones], self.ranks)
            rest = float(numbers[ones:] @ asked[ones:])
            return float(tables * (extra.max() + rest) / self.distinct)
        # A key falls to a rank with chance 1/ranks, and then each rank asks for it with its own.
        squares = (asked * (1 - asked) + self.ranks * asked**2) - asked**2
        deviation = math.sqrt(tables * float(numbers @ squares))
        return 1 + _largest_of(self.ranks) * deviation / self.distinct

    def far_share(self, near_rows: float) -> float:
        """Returns which share of `owned` is not among the most frequent `near_rows` of the job."""
        ends = np.cumsum(self._zipf.numbers)
        before = ends - self._zipf.numbers
        near = np.clip((near_rows / self.job.tables - before) / self._zipf.numbers, 0, 1)
        weights = self._zipf.numbers * self._by_anyone
        return float(weights @ (1 - near) / weights.sum())

    # ---- bytes that the busiest rank sends to others or gets from them, whichever is more

    @property
    def _to_others(self) -> float:
        return (self.ranks - 1) / self.ranks

    @property
    def key_trip(self) -> float:
        """Bytes of keys; the headers are among them."""
        keys = 8 * self.distinct * self.busiest * self._to_others
        return keys + 8 * (self.ranks - 1) * (2 + self.job.tables)

    @property
    def row_trip(self) -> float:
        """Bytes of rows."""
        return self._trip(self.job.row_size)

    @property
    def grad_trip(self) -> float:
        """Bytes of gradients."""
        return self._trip(self.job.grad_size)

    def _trip(self, size: int) -> float:
        rows = self.distinct * self.busiest * self._to_others
        sections = min(rows, self.job.tables * (self.ranks - 1))
        return rows * size + (_LINE / 2 * sections if size % _LINE else 0)


def _largest_of(count: int) -> float:
    """Returns the expected largest of so many normal deviates."""
    x = np.linspace(-9, 9, 3601)
    below = np.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in x]) ** count
    step = x[1] - x[0]
    return float(((1 - below)[x >= 0].sum() - below[x < 0].sum()) * step)
