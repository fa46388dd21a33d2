"""`sok-lite merge`: several checkpoints as one."""

import argparse
from contextlib import ExitStack
from typing import Any

from sok_lite.cli.arguments import add_force, local, rank_count
from sok_lite.cli.destination import check_destination
from sok_lite.cli.errors import FINE
from sok_lite.cli.importers import format_module
from sok_lite.cli.merged import MergedSource
from sok_lite.cli.progress import watched
from sok_lite.cli.reading import OWN, open_sources, own_extra, own_ranks
from sok_lite.engine.files.rewriting import write_checkpoint
from sok_lite.engine.files.source import Source

HELP = "write the tables of several checkpoints as one; of equal keys the last one counts"
EXAMPLES = "sok-lite merge runs/users runs/items runs/both"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        type=local,
        help="checkpoints, or files of other formats",
    )
    parser.add_argument("to", metavar="TO", type=local, help="the new checkpoint")
    parser.add_argument(
        "--ranks", type=rank_count, metavar="N", help="of the new one (default: most of any PATH)"
    )
    add_force(parser, "a checkpoint that is at TO")


def run(args: argparse.Namespace) -> int:
    check_destination(args.to, format_module(OWN), args.force, *args.paths)
    ranks = args.ranks or max(map(own_ranks, args.paths))
    extra: dict[str, Any] = {}
    sources: list[Source] = []
    for path in args.paths:
        extra |= own_extra(path, args.to)
        sources += open_sources(path)
    with watched(sources, "merge", args.progress) as shown, ExitStack() as stack:
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
        write_checkpoint(args.to, merged, ranks, extra)
    return FINE
