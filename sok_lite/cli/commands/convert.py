"""`sok-lite convert`: tables from one format into another."""

import argparse
import sys
from collections.abc import Iterator

from sok_lite.cli.arguments import add_force, add_from_format, add_option, add_tables, local
from sok_lite.cli.destination import check_destination, in_place_of
from sok_lite.cli.errors import FINE, WrongUse
from sok_lite.cli.importers import format_module, format_of_ending, names_with
from sok_lite.cli.options import options_for
from sok_lite.cli.progress import watched
from sok_lite.cli.reading import OWN, chosen, format_of, open_sources
from sok_lite.engine.files.source import Source
from sok_lite.reports.text import counted

HELP = "convert tables from one file format to another"
EXAMPLES = (
    "sok-lite convert rows.npz runs/rows --to-option ranks=2\n"
    "sok-lite convert runs/model rows.csv --table user"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", metavar="FROM", type=local, help="file or folder to read")
    parser.add_argument("to", metavar="TO", type=local, help="file or folder to write")
    add_from_format(parser, "FROM")
    parser.add_argument(
        "--to-format",
        metavar="FORMAT",
        help=f"format of TO: {', '.join(names_with('write'))} (default: by the ending of TO, "
        f"else {OWN})",
    )
    add_tables(parser)
    add_option(parser, "--to-option", "TO")
    add_force(parser, "TO if it exists")


def run(args: argparse.Namespace) -> int:
    to_format = args.to_format or format_of_ending(args.to) or OWN
    module = format_module(to_format)
    if not hasattr(module, "write"):
        raise WrongUse(
            f"format {to_format!r} cannot be written: take one of {', '.join(names_with('write'))}"
        )
    from_format = format_of(args.path, args.from_format)
    if from_format == to_format == OWN:
        raise WrongUse(
            f"{args.path} is such a checkpoint already: use reshard, or copy the folder. For "
            "another format let TO end in .npz, .parquet, .safetensors or .csv, or give --to-format"
        )
    options = options_for(module.write, args.to_option, to_format)
    check_destination(args.to, module, args.force, args.path)
    sources = chosen(open_sources(args.path, from_format, args.from_option), args.table, args.path)
    with (
        watched(sources, "convert", args.progress) as shown,
        in_place_of(args.to, module, sources) as path,
    ):
        module.write(path, shown, **options)
    for source in sources if to_format != OWN else ():
        has_texts = getattr(module, "HOLDS_TEXTS", False)
        for what in _left_out(source, has_texts):
            print(
                f"sok-lite convert: table {source.name!r}: left out {what}, which format "
                f"{to_format} has no place for",
                file=sys.stderr,
            )
    return FINE


def _left_out(source: Source, has_texts: bool) -> Iterator[str]:
    """Yields what no other format has a place for, or this one has none for."""
    if source.about.num_pending:
        yield f"{counted(source.about.num_pending, 'key')} without a row"
    texts = {} if has_texts else source.texts()
    if texts:
        yield f"the texts of {counted(len(texts), 'key')}"
