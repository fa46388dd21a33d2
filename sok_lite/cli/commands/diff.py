"""`sok-lite diff`: what differs between two checkpoints."""

import argparse
from collections.abc import Iterator

from sok_lite.cli.arguments import add_tables, local
from sok_lite.cli.compared import Difference, difference
from sok_lite.cli.errors import FINDINGS, FINE, WrongUse
from sok_lite.cli.progress import watched
from sok_lite.cli.reading import chosen, open_sources
from sok_lite.cli.wrapped import PendingKeys, WithColumns
from sok_lite.engine.files.source import PENDING_COLUMNS, Source
from sok_lite.engine.table.joined import joined_states
from sok_lite.reports.text import counted, listed

HELP = "compare two checkpoints: tables, keys, rows and optimizer states"
EXAMPLES = "sok-lite diff runs/model runs/later --tolerance 1e-6"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "first", metavar="A", type=local, help="a checkpoint, or a file of another format"
    )
    parser.add_argument("second", metavar="B", type=local, help="another one")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="X",
        help="elements that differ by X or less are equal (default: 0)",
    )
    add_tables(parser)
    parser.add_argument(
        "--all",
        action="store_true",
        help="compare stamps, scores, and keys that were seen and have no row as well",
    )


def run(args: argparse.Namespace) -> int:
    if not args.tolerance >= 0:
        raise WrongUse(f"--tolerance must be a number from 0 on, and is {args.tolerance}")
    sides = [
        [
            source if args.all else WithColumns(source, [state.tensor for state in source.states])
            for source in chosen(open_sources(path), args.table, path)
        ]
        for path in (args.first, args.second)
    ]
    with watched([*sides[0], *sides[1]], "diff", args.progress) as sources:
        first = {source.name: source for source in sources[: len(sides[0])]}
        second = {source.name: source for source in sources[len(sides[0]) :]}
        count = 0
        for name in {**first, **second}:
            if name not in first or name not in second:
                print(f"table {name!r}: only in {args.first if name in first else args.second}")
                count += 1
                continue
            for finding in _findings(args, (first[name], second[name])):
                print(f"table {name!r}: {finding}")
                count += 1
    if count:
        return FINDINGS
    print(f"{args.first} and {args.second} have the same")
    return FINE


def _findings(args: argparse.Namespace, sources: tuple[Source, Source]) -> Iterator[str]:
    first, second = sources
    for what in ("key_type", "dim", "dtype"):
        mine, theirs = getattr(first, what), getattr(second, what)
        if mine != theirs:
            yield f"{what} {mine} and {theirs}"
    if first.key_type != second.key_type:
        return
    # The keys alone where rows of different lengths cannot be compared.
    column = "values" if first.dim == second.dim else "keys"
    compared = difference(sources, (column, column), args.tolerance)
    yield from _of_keys(args, compared)
    if column == "values" and compared.differing:
        yield _of_rows("rows", compared)
    for state in joined_states([source.states for source in sources]):
        if len(state.tensors) < 2:
            only = args.first if 0 in state.tensors else args.second
            yield f"state {state.name!r}: only in {only}"
            continue
        compared = difference(sources, (state.tensors[0], state.tensors[1]), args.tolerance)
        if compared.differing:
            yield _of_rows(f"rows of state {state.name!r}", compared)
    for name in [*dict.fromkeys([*first.columns, *second.columns])]:
        if name not in first.columns or name not in second.columns:
            yield f"{name}: only in {args.first if name in first.columns else args.second}"
            continue
        compared = difference(sources, (name, name), args.tolerance)
        if compared.differing:
            yield _of_rows(name, compared)
    if first.about.num_pending or second.about.num_pending:
        seen = PendingKeys(first), PendingKeys(second)
        for name in PENDING_COLUMNS[1:]:
            compared = difference(seen, (name, name), args.tolerance)
            if name == PENDING_COLUMNS[1]:
                yield from _of_keys(args, compared, " without a row")
            if compared.differing:
                yield _of_rows(name, compared)


def _of_keys(args: argparse.Namespace, compared: Difference, which: str = "") -> Iterator[str]:
    paths, examples = (args.first, args.second), compared.examples[:2]
    for path, count, keys in zip(paths, compared.only, examples, strict=True):
        if count:
            yield f"{counted(count, 'key')}{which} only in {path}: {listed(keys, count)}"


def _of_rows(what: str, compared: Difference) -> str:
    keys = listed(compared.examples[2], compared.differing)
    return (
        f"{what} of {compared.differing:,} of {counted(compared.both, 'key')} differ, by up to "
        f"{compared.largest:g}: {keys}"
    )
