"""Reads what other systems' benchmark programs print.

HKV's program prints, for each of its configurations, a line such as
`* dim = 8, capacity = 128 Million-KV, HBM = 4 GB, HMEM = 0 GB` and below it Markdown tables: one
column an operation, one row a load factor (its column is headed by the Greek letter lambda). Its
figures are in units of 2^30 keys a second and its million is 2^20.
"""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

_CONFIGURATION = re.compile(r"\bdim\s*=\s*(\d+)\D+?capacity\s*=\s*(\d+)\s*Million")
_GIGA = (1 << 30) / 1e9


class PeerCase(NamedTuple):
    """One figure of a peer.

    Attributes:
      dim: elements of a row.
      capacity: slots.
      load_factor: of the table.
      op: the operation's name in HKV's words.
      giga_keys_per_second: in 10^9.
    """

    dim: int
    capacity: int
    load_factor: float
    op: str
    giga_keys_per_second: float

    @property
    def key(self) -> tuple[int, int, float, str]:
        return self[:4]


def parse_hkv(text: str) -> list[PeerCase]:
    """Returns the figures in the output of HKV's benchmark.

    Raises:
      ValueError: a table comes before its configuration, or a row does not fit its header.
    """
    cases = []
    configuration: tuple[int, int] | None = None
    header: list[str] = []
    for line in text.splitlines():
        match = _CONFIGURATION.search(line)
        if match:
            configuration = int(match.group(1)), int(match.group(2)) << 20
        if not line.lstrip().startswith("|"):
            header = []
            continue
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if cells[0] == "\u03bb":
            header = cells
        elif header and not set(line) <= set("|-: \t"):
            if configuration is None:
                raise ValueError(f"A table without a configuration: {line!r}.")
            if len(cells) != len(header):
                raise ValueError(f"A row with {len(cells)} cells under {header}: {line!r}.")
            for op, cell in zip(header[1:], cells[1:], strict=True):
                rate = float(cell) * _GIGA
                cases.append(PeerCase(*configuration, float(cells[0]), op, rate))
    return cases


def peer_of(
    figures: Iterable[tuple[Any, ...]], dim: int, capacity: int, load_factor: float, op: str
) -> tuple[Any, ...] | None:
    """Returns which of a peer's keys (dim, capacity, load factor, op) is the same case, or None."""
    wanted = (dim, capacity, round(load_factor, 2), op)
    return next((key for key in figures if (*key[:2], round(key[2], 2), key[3]) == wanted), None)
