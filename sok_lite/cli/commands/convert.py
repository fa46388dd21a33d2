"""`sok-lite convert`: converts tables between formats."""

import argparse
import inspect
import sys
from collections.abc import Iterator
from contextlib import closing
from types import ModuleType
from typing import Any

import numpy as np

from sok_lite.cli.arguments import (
    add_force,
    add_from_format,
    add_option,
    add_tables,
    readable,
)
from sok_lite.cli.buckets import Buckets, firsts
from sok_lite.cli.destination import check_destination, checkpoint_at, in_place_of
from sok_lite.cli.errors import FINE, WrongUse
from sok_lite.cli.importers import format_module, format_of_ending, names_with
from sok_lite.cli.options import options_for
from sok_lite.cli.progress import show_written, with_progress
from sok_lite.cli.reading import OWN, chosen, format_of, open_sources
from sok_lite.engine.dtypes import key_dtype
from sok_lite.engine.files.source import Source
from sok_lite.engine.files.store import is_in_store
from sok_lite.reports.text import counted, listed

HELP = "convert tables from one file format to another"
EXAMPLES = (
    "sok-lite convert rows.npz runs/rows --to-option ranks=2\n"
    "sok-lite convert runs/model rows.csv --table user"
)

_RECORD = np.dtype([("key", np.int64)])
_NUM_EXAMPLES = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="FROM", type=readable, help="file, folder or address to read"
    )
    parser.add_argument(
        "to",
        metavar="TO",
        type=readable,
        help="file or folder to write; of a checkpoint also its address",
    )
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
    if to_format == OWN:
        with checkpoint_at(args.to, module, args.force, args.path) as to:
            return _convert(args, to, (from_format, to_format), module, options)
    if is_in_store(args.to):
        raise WrongUse(
            f"{args.to} must be on this machine for format {to_format!r}: only checkpoints are "
            "written to addresses"
        )
    check_destination(args.to, module, args.force, args.path)
    return _convert(args, args.to, (from_format, to_format), module, options)


def _convert(
    args: argparse.Namespace,
    to: str,
    formats: tuple[str, str],
    module: ModuleType,
    options: dict[str, Any],
) -> int:
    from_format, to_format = formats
    sources = chosen(open_sources(args.path, from_format, args.from_option), args.table, args.path)
    # A checkpoint's keys are distinct: `verify` checks that.
    notes = [_count_repeats(each, to_format) if from_format != OWN else "" for each in sources]
    with (
        with_progress(sources, "convert", args.progress) as shown,
        in_place_of(to, module, sources) as path,
    ):
        module.write(path, shown, **options)
    for source, note in zip(sources, notes, strict=True):
        has_texts = getattr(module, "HOLDS_TEXTS", False)
        left_out = _left_out(source, has_texts) if to_format != OWN else ()
        said = [f"left out {each}, which format {to_format} has no place for" for each in left_out]
        said += [note] * bool(note)
        if to_format == OWN and source.dtype == "float64":
            said.append(_float64_advice(from_format))
        for each in said:
            print(f"sok-lite convert: table {source.name!r}: {each}", file=sys.stderr)
    show_written(args.to, sources, args.progress)
    return FINE


def _float64_advice(from_format: str) -> str:
    """Returns the advice for float64 rows, as NumPy and pandas make them; tables have float32."""
    casts = "dtype" in inspect.signature(format_module(from_format).sources).parameters
    option = ". `--from-option dtype=float32` writes them as such" if casts else ""
    return f"the rows are float64: a table of float32 loads them with cast=True{option}"


def _count_repeats(source: Source, to_format: str) -> str:
    """Returns how many keys repeat; "" for none."""
    kind, dtype, num_repeated, examples = key_dtype(source.key_type), _RECORD, 0, list[str]()
    with closing(Buckets([dtype], [source.num_keys])) as buckets:
        for piece in source.read("keys"):
            records = np.empty(piece.size, dtype)
            records["key"] = kind.to_int64(np, piece)
            buckets.add(0, records)
        for (records,) in buckets:
            keys = records["key"]
            again = np.unique(keys[~firsts(keys)])
            num_repeated += again.size
            some = kind.from_int64(np, again[: _NUM_EXAMPLES - len(examples)])
            examples += map(str, some.tolist())
    if not num_repeated:
        return ""
    counts = "; a load takes the first row of each" if to_format == OWN else ""
    what = counted(num_repeated, "key comes", "keys come")
    return f"{what} more than once{counts}: {listed(examples, num_repeated)}"


def _left_out(source: Source, has_texts: bool) -> Iterator[str]:
    """Yields what the new format cannot hold."""
    if source.about.num_pending:
        yield f"{counted(source.about.num_pending, 'key')} without a row"
    texts = {} if has_texts else source.texts()
    if texts:
        yield f"the texts of {counted(len(texts), 'key')}"
