"""`sok-lite merge`: merges checkpoints; the last of a repeated key wins."""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from sok_lite.cli.arguments import add_force, rank_count, readable
from sok_lite.cli.buckets import Buckets, firsts
from sok_lite.cli.destination import checkpoint_at
from sok_lite.cli.errors import FINE, WrongUse
from sok_lite.cli.importers import format_module
from sok_lite.cli.progress import with_progress
from sok_lite.cli.reading import OWN, open_sources, own_extra, own_ranks
from sok_lite.engine.dtypes import key_dtype
from sok_lite.engine.files.source import PENDING_COLUMNS, JoinedSource, Source
from sok_lite.engine.files.source_writer import write_checkpoint

HELP = "merge checkpoints into one; if several have a key, the last one wins"
EXAMPLES = "sok-lite merge runs/users runs/items runs/both"

_RECORD = np.dtype([("key", np.int64), ("place", np.int64)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        type=readable,
        help="checkpoint folder or its address, or file in another format",
    )
    parser.add_argument("to", metavar="TO", type=readable, help="new checkpoint, or its address")
    parser.add_argument(
        "--ranks",
        type=rank_count,
        metavar="N",
        help="ranks of the new one (default: the most of any PATH)",
    )
    add_force(parser, "the checkpoint at TO if there is one")


def run(args: argparse.Namespace) -> int:
    with checkpoint_at(args.to, format_module(OWN), args.force, *args.paths) as to:
        return _merge(args, to)


def _merge(args: argparse.Namespace, to: str) -> int:
    ranks = args.ranks or max(map(own_ranks, args.paths))
    extra: dict[str, Any] = {}
    sources: list[Source] = []
    for path in args.paths:
        extra |= own_extra(path, to)
        sources += open_sources(path)
    with with_progress(sources, "merge", args.progress) as shown, ExitStack() as stack:
        by_name: dict[str, list[Source]] = {}
        for source in shown:
            by_name.setdefault(source.name, []).append(source)
        merged: list[Source] = []
        for same in by_name.values():
            if len(same) == 1:
                merged += same
                continue
            one = MergedSource(same)
            stack.callback(one.close)
            merged.append(one)
        write_checkpoint(to, merged, ranks, extra)
    return FINE


class MergedSource(JoinedSource):
    """Several sources of one name as one without repeated keys; later ones win.

    Keep its Buckets open while reading it. WrongUse: they differ in dim, dtype or key type.
    OSError, ValueError: keys cannot be read, or do not fit in temporary files.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        for source in sources:
            _check_alike(source, sources[-1])
        super().__init__(sources)
        num_rows = [source.num_keys for source in sources]
        num_pending = [source.about.num_pending for source in sources]
        total = sum(num_rows) + sum(num_pending)
        self._buckets = Buckets([_RECORD], [total])
        try:
            path = os.path.join(self._buckets.folder, "kept")
            # One byte per key in a mapped file, whose pages the system can evict.
            self._kept = np.memmap(path, bool, "w+", shape=(max(1, total),))
            self._mark(sum(num_rows))
        except BaseException:
            self.close()
            raise
        self._begins = dict(
            zip(("keys", "sighted_keys"), _begins(num_rows, num_pending), strict=True)
        )
        self.num_keys = int(np.count_nonzero(self._kept[: sum(num_rows)]))
        pending = int(np.count_nonzero(self._kept[sum(num_rows) :]))
        self.about = self.about._replace(num_pending=pending)

    def close(self) -> None:
        """Removes the temporary files."""
        self._buckets.close()

    find = Source.find  # of what `read` yields: the last of a key counts

    def _mark(self, num_rows: int) -> None:
        """Marks the last row of each key (places below `num_rows`), else its last pending count."""
        place, kind = 0, key_dtype(self.key_type)
        for column in ("keys", "sighted_keys"):
            for source in self._sources:
                if column == "sighted_keys" and not source.about.num_pending:
                    continue
                for keys in source.read(column):
                    records = np.empty(keys.size, _RECORD)
                    records["key"] = kind.to_int64(np, keys)
                    records["place"] = np.arange(place, place + keys.size)
                    self._buckets.add(0, records)
                    place += keys.size
        for (records,) in self._buckets:
            # A key's pending counts, then its rows, each in file order: the last one wins.
            order = np.lexsort((records["place"], records["place"] < num_rows, records["key"]))
            records = records[order]
            is_last = firsts(records["key"][::-1])[::-1]
            self._kept[records["place"][is_last]] = True

    def read(self, column: str) -> Iterator[np.ndarray]:
        key_column = "sighted_keys" if column in PENDING_COLUMNS else "keys"
        for i, source in enumerate(self._sources):
            if key_column == "sighted_keys" and not source.about.num_pending:
                continue
            place = self._begins[key_column][i]
            for piece in self._read(i, source, column):
                kept = self._kept[place : place + len(piece)]
                place += len(piece)
                yield piece[kept]


def _begins(num_rows: list[int], num_pending: list[int]) -> tuple[list[int], list[int]]:
    """Returns where the rows, and the pending keys, of each source begin."""
    begins = np.cumsum([0, *num_rows, *num_pending]).tolist()
    return begins[: len(num_rows)], begins[len(num_rows) : -1]


def _check_alike(source: Source, last: Source) -> None:
    mine, theirs = (f"{one.key_type} keys, rows of {one.dim} {one.dtype}" for one in (source, last))
    if mine != theirs:
        raise WrongUse(f"tables named {last.name!r} cannot be merged: {mine}, and {theirs}")
