"""`sok-lite export`: writes one table as a file for other programs."""

import argparse

from sok_lite.cli.arguments import add_force, add_path, local
from sok_lite.cli.destination import check_destination, in_place_of
from sok_lite.cli.errors import FINE, WrongUse
from sok_lite.cli.importers import format_module, format_of_ending
from sok_lite.cli.progress import show_written, with_progress
from sok_lite.cli.reading import chosen, open_sources
from sok_lite.cli.wrapped import WithColumns

FORMATS = ("npz", "parquet", "csv")
HELP = "export one table to an npz, Parquet or CSV file"
EXAMPLES = (
    "sok-lite export runs/model --table user --to user.parquet\n"
    "sok-lite export runs/model --table user --to user.npz --columns states.0.m"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_path(parser)
    parser.add_argument(
        "--table", metavar="NAME", help="table to export; needed if there are several"
    )
    parser.add_argument(
        "--format", choices=FORMATS, help="file format (default: by the ending of FILE)"
    )
    parser.add_argument("--to", required=True, metavar="FILE", type=local, help="file to write")
    parser.add_argument(
        "--columns",
        default="",
        metavar="A,B",
        help="columns to write beside keys, texts and rows, such as stamps,states.0.m; or all",
    )
    add_force(parser, "FILE if it exists")


def run(args: argparse.Namespace) -> int:
    form = args.format or format_of_ending(args.to)
    if form not in FORMATS:
        raise WrongUse(
            f"{args.to} does not say a format: give --format {', '.join(FORMATS)}, or let FILE end "
            "in one of those"
        )
    module = format_module(form)
    check_destination(args.to, module, args.force, args.path)
    sources = chosen(open_sources(args.path), [args.table] if args.table else [], args.path)
    if len(sources) != 1:
        names = ", ".join(repr(source.name) for source in sources)
        raise WrongUse(f"{args.path} has {len(sources)} tables: say which, --table: {names}")
    if args.columns != "all":
        columns = [name for name in args.columns.split(",") if name]
        sources = [WithColumns(sources[0], columns)]
    with (
        with_progress(sources, "export", args.progress) as shown,
        in_place_of(args.to, module, sources) as path,
    ):
        module.write(path, shown)
    show_written(args.to, sources, args.progress)
    return FINE
