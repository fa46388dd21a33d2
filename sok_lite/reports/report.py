"""Reports: the content of tables, what has happened to their keys, and how ranks share them."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sok_lite.engine.files.beside import write_file
from sok_lite.engine.json_text import parsed
from sok_lite.reports.histogram import Histogram
from sok_lite.reports.html import report_html, report_page
from sok_lite.reports.text import report_text

# Counters of a table that a report sums, as in `Statistics` without "_total".
COUNTERS = ("found", "missed", "inserted", "evicted", "erased", "refused", "not_admitted")


class TableReport(NamedTuple):
    """The report of one table: of a rank, or of all ranks together. None: not known.

    Attributes:
      name, dim, dtype, key_type, var_type: of the table.
      keys: number of keys with a row.
      pending: number of keys that were seen, but not often enough to have a row; 0: there are none.
      capacity: slots of the index.
      counts: by name of COUNTERS, since the table was made, cleared or wholly loaded.
      near_seen, seen: number of recent accesses, by lookups, of keys whose row is in the fast tier
        now, and of all keys; older lookups count less. None: the table has one tier.
      memory: bytes by part: "index", and rows and optimizer states by tier, such as "rows near",
        "states far" and "rows file". Of a checkpoint: bytes by column.
      reserved_bytes: allocated for rows and states, those in use included.
      ages: how long before the last lookup of the table its keys were last seen.
      norms: lengths (L2 norms) of the rows.
      keys_of_ranks, bytes_of_ranks: of each rank, in its order.
    """

    name: str
    dim: int
    dtype: str
    key_type: str
    var_type: str
    keys: int
    pending: int
    capacity: int | None
    counts: dict[str, int] | None
    near_seen: int | None
    seen: int | None
    memory: dict[str, int] | None
    reserved_bytes: int | None
    ages: Histogram | None
    norms: Histogram | None
    keys_of_ranks: tuple[int, ...]
    bytes_of_ranks: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all parts."""
        return sum((self.memory or {}).values())

    @property
    def hit_rate(self) -> float | None:
        """The share of the looked up keys that had a row; None: there was no lookup.

        Compare it between jobs of equally many ranks: repeated keys of a call count on one rank
        alone, see `Statistics.found_total`.
        """
        counts = self.counts or {}
        return _share(counts.get("found"), counts.get("found", 0) + counts.get("missed", 0))

    @property
    def near_share(self) -> float | None:
        """The share of recent accesses to keys whose row is in the fast tier now."""
        return _share(self.near_seen, self.seen)

    @property
    def balance(self) -> float | None:
        """Keys of the rank with most keys, over the mean of all ranks; None: there is one rank."""
        if len(self.keys_of_ranks) < 2:
            return None
        mean = sum(self.keys_of_ranks) / len(self.keys_of_ranks)
        return _share(max(self.keys_of_ranks), mean)

    def as_dict(self) -> dict[str, Any]:
        """Returns the numbers and what follows from them: values that JSON knows."""
        found = {
            name: value.as_dict() if isinstance(value, Histogram) else value
            for name, value in self._asdict().items()
        }
        found |= {name: list(found[name]) for name in ("keys_of_ranks", "bytes_of_ranks")}
        names = ("num_bytes", "hit_rate", "near_share", "balance")
        return found | {name: getattr(self, name) for name in names}

    @classmethod
    def of_dict(cls, given: dict[str, Any]) -> "TableReport":
        """Returns the report of which `as_dict` gave this."""
        fields = {name: given[name] for name in cls._fields}
        for name in ("ages", "norms"):
            if fields[name] is not None:
                fields[name] = Histogram.of_dict(fields[name])
        for name in ("keys_of_ranks", "bytes_of_ranks"):
            fields[name] = tuple(fields[name])
        return cls(**fields)

    @classmethod
    def sum_of(cls, parts: "Sequence[TableReport]") -> "TableReport":
        """Returns the report of all ranks, of that of each, in their order."""
        first, *others = parts
        if not others or first.var_type == "remote":  # whose rows are of all ranks
            return first
        return first._replace(
            keys=sum(part.keys for part in parts),
            pending=sum(part.pending for part in parts),
            capacity=_sum([part.capacity for part in parts]),
            counts=_sum_by_name([part.counts for part in parts]),
            near_seen=_sum([part.near_seen for part in parts]),
            seen=_sum([part.seen for part in parts]),
            memory=_sum_by_name([part.memory for part in parts]),
            reserved_bytes=_sum([part.reserved_bytes for part in parts]),
            ages=_sum_of_histograms([part.ages for part in parts]),
            norms=_sum_of_histograms([part.norms for part in parts]),
            keys_of_ranks=tuple(part.keys for part in parts),
            bytes_of_ranks=tuple(part.num_bytes for part in parts),
        )


@dataclass(frozen=True, repr=False)
class Report:
    """A report of tables: text in a terminal, HTML in a notebook, numbers for programs.

    It contains no keys.

    Attributes:
      tables: of each its TableReport, of all ranks together.
      ranks: number of ranks that have the tables.
      time: when it was made, in seconds since 1970.
      source: the path of a checkpoint; "": of tables that are in memory.
    """

    tables: tuple[TableReport, ...]
    ranks: int
    time: float
    source: str = ""

    def __getitem__(self, name: str) -> TableReport:
        """Returns the report of a table.

        Raises:
          KeyError: there is no such table.
        """
        for table in self.tables:
            if table.name == name:
                return table
        names = ", ".join(repr(table.name) for table in self.tables)
        raise KeyError(f"There is no table {name!r} in the report. It has: {names}.")

    def as_dict(self) -> dict[str, Any]:
        """Returns all numbers: dicts, lists, texts and numbers, as JSON knows them."""
        tables = [table.as_dict() for table in self.tables]
        return {"source": self.source, "time": self.time, "ranks": self.ranks, "tables": tables}

    def to_json(self) -> str:
        """Returns the numbers of `as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Report":
        """Returns the report of which `to_json` gave this, or `sok-lite report --json`.

        So today's report can be compared with those of before; plots take it as well.

        Raises:
          ValueError: it is no such text, or lacks a number that reports of this version have.
        """
        try:
            given = parsed(text)
            tables = tuple(TableReport.of_dict(table) for table in given["tables"])
            return cls(tables, int(given["ranks"]), float(given["time"]), str(given["source"]))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ValueError(
                "This is no report as `to_json` gives it, or one of another version of sok_lite "
                f"({type(error).__name__}: {error}). Received: {text!s:.60}."
            ) from error

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Writes a page of HTML into a file, which needs no other file and no script.

        With several ranks the report is the same on each: have one of them write it.

        Args:
          path: of the file; one that is there is replaced.

        Raises:
          ValueError: the path is no local one. OSError: it cannot be written.
        """
        write_file(path, report_page(self).encode())

    def __str__(self) -> str:
        return report_text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return report_html(self)


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _sum(numbers: Sequence[int | None]) -> int | None:
    return None if None in numbers else sum(number or 0 for number in numbers)


def _sum_by_name(parts: Sequence[dict[str, int] | None]) -> dict[str, int] | None:
    known = [part for part in parts if part is not None]
    names = dict.fromkeys(name for part in known for name in part)
    return {name: sum(part.get(name, 0) for part in known) for name in names} if known else None


def _sum_of_histograms(parts: Sequence[Histogram | None]) -> Histogram | None:
    known = [part for part in parts if part is not None]
    return Histogram.sum_of(known) if known else None
