"""`sok-lite reshard`: rewrites a checkpoint for another number of ranks."""

import argparse

from sok_lite.cli.arguments import add_force, rank_count, readable
from sok_lite.cli.destination import checkpoint_at
from sok_lite.cli.errors import FINE
from sok_lite.cli.importers import format_module
from sok_lite.cli.progress import with_progress
from sok_lite.cli.reading import OWN, open_sources, own_extra
from sok_lite.engine.files.source_writer import write_checkpoint

HELP = "rewrite a checkpoint for another number of ranks, so that each reads one file"
EXAMPLES = "sok-lite reshard runs/model runs/model-8 --ranks 8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", type=readable, help="checkpoint folder, or its address"
    )
    parser.add_argument(
        "to",
        metavar="TO",
        type=readable,
        help="new checkpoint, or its address; with --force it may be PATH",
    )
    parser.add_argument(
        "--ranks", type=rank_count, required=True, metavar="N", help="number of ranks"
    )
    add_force(parser, "the checkpoint at TO if there is one")


def run(args: argparse.Namespace) -> int:
    with checkpoint_at(args.to, format_module(OWN), args.force, args.path) as to:
        sources = open_sources(args.path, OWN)
        with with_progress(sources, "reshard", args.progress) as shown:
            write_checkpoint(to, shown, args.ranks, own_extra(args.path, to))
    return FINE
