"""`sok-lite diff`: compares two checkpoints: tables, keys, rows and other columns."""

import argparse
from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import numpy as np

from sok_lite.cli.arguments import add_tables, readable
from sok_lite.cli.buckets import Buckets, firsts
from sok_lite.cli.errors import FINDINGS, FINE, WrongUse
from sok_lite.cli.progress import with_progress
from sok_lite.cli.reading import chosen, open_sources
from sok_lite.cli.wrapped import PendingKeys, WithColumns, plain
from sok_lite.engine.dtypes import key_dtype
from sok_lite.engine.files.source import PENDING_COLUMNS, Source, column_of
from sok_lite.engine.table.content import join_states
from sok_lite.reports.text import counted, listed, named

HELP = "compare two checkpoints: tables, keys, rows and optimizer states"
EXAMPLES = "sok-lite diff runs/model runs/later --tolerance 1e-6"

_NUM_EXAMPLES = 5


class Difference(NamedTuple):
    """How a column differs between two tables."""

    only: tuple[int, int]  # number of keys in only one table
    both: int  # number of keys in both
    differing: int  # number of those with different rows
    largest: float  # difference of two elements; NaN if only one is NaN
    examples: tuple[list[int], list[int], list[int]]  # only in either, different rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "first",
        metavar="A",
        type=readable,
        help="checkpoint folder or its address, or file in another format",
    )
    parser.add_argument("second", metavar="B", type=readable, help="what to compare it with")
    parser.add_argument(
        "--tolerance",
        type=float,
        default=0.0,
        metavar="X",
        help="treat elements that differ by at most X as equal (default: 0)",
    )
    add_tables(parser)
    parser.add_argument(
        "--all",
        action="store_true",
        help="also compare stamps (when keys were last seen), scores, and keys without a row yet",
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
    with with_progress([*sides[0], *sides[1]], "diff", args.progress) as sources:
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
    within = f" within {args.tolerance:g}" if args.tolerance else ""
    print(f"{args.first} and {args.second} are equal{within}")
    return FINE


def _findings(args: argparse.Namespace, sources: tuple[Source, Source]) -> Iterator[str]:
    first, second = sources
    for what in ("key_type", "dim", "dtype"):
        mine, theirs = getattr(first, what), getattr(second, what)
        if mine != theirs:
            yield f"{what} {mine} and {theirs}"
    if first.key_type != second.key_type:
        return
    # Only keys if rows of different lengths cannot be compared.
    column = "values" if first.dim == second.dim else "keys"
    compared = difference(sources, (column, column), args.tolerance)
    yield from _key_findings(args, sources, compared)
    if column == "values" and compared.differing:
        yield _row_finding("rows", sources, compared)
    for state in join_states([source.states for source in sources]):
        if len(state.places) < 2:
            only = args.first if 0 in state.places else args.second
            yield f"state {state.name!r}: only in {only}"
            continue
        tensors = [each.states[state.places[i]].tensor for i, each in enumerate(sources)]
        compared = difference(sources, (tensors[0], tensors[1]), args.tolerance)
        if compared.differing:
            yield _row_finding(f"rows of state {state.name!r}", sources, compared)
    for name in [*dict.fromkeys([*first.columns, *second.columns])]:
        if name not in first.columns or name not in second.columns:
            yield f"{name}: only in {args.first if name in first.columns else args.second}"
            continue
        compared = difference(sources, (name, name), args.tolerance)
        if compared.differing:
            yield _row_finding(name, sources, compared)
    if first.about.num_pending or second.about.num_pending:
        seen = PendingKeys(first), PendingKeys(second)
        for name in PENDING_COLUMNS[1:]:
            compared = difference(seen, (name, name), args.tolerance)
            if name == PENDING_COLUMNS[1]:
                yield from _key_findings(args, sources, compared, " without a row")
            if compared.differing:
                yield _row_finding(name, sources, compared)


def _key_findings(
    args: argparse.Namespace,
    sources: tuple[Source, Source],
    compared: Difference,
    which: str = "",
) -> Iterator[str]:
    paths, examples = (args.first, args.second), compared.examples[:2]
    for path, count, keys in zip(paths, compared.only, examples, strict=True):
        if count:
            shown = listed(_with_texts(sources, keys), count)
            yield f"{counted(count, 'key')}{which} only in {path}: {shown}"


def _row_finding(what: str, sources: tuple[Source, Source], compared: Difference) -> str:
    keys = listed(_with_texts(sources, compared.examples[2]), compared.differing)
    return (
        f"{what} of {compared.differing:,} of {counted(compared.both, 'key')} differ, by up to "
        f"{compared.largest:g}: {keys}"
    )


def _with_texts(sources: tuple[Source, Source], keys: list[int]) -> list[str]:
    """Returns keys, each with its string if one of two tables knows it."""
    first, second = (source.texts_of(keys) for source in sources)
    return [named(key, second | first) for key in keys]


def difference(
    sources: tuple[Source, Source], columns: tuple[str, str], tolerance: float
) -> Difference:
    """Compares a column, by its name in each of two tables of one key type.

    The first of a repeated key counts. Elements may differ by `tolerance`; NaN equals NaN. OSError,
    ValueError: a table cannot be read, or temporary files do not fit, which take the bytes of keys
    and column of both.
    """
    kinds = [column_of(*pair) for pair in zip(sources, columns, strict=True)]
    dtypes = [
        np.dtype([("key", np.int64), ("row", kind.dtype, (1 if kind.dim is None else kind.dim,))])
        for kind in kinds
    ]
    only, both, differing, largest = [0, 0], 0, 0, 0.0
    examples: tuple[list[int], list[int], list[int]] = ([], [], [])
    with closing(Buckets(dtypes, [source.num_keys for source in sources])) as buckets:
        for side, (source, column) in enumerate(zip(sources, columns, strict=True)):
            for records in _records(source, column, dtypes[side]):
                buckets.add(side, records)
        for sides in buckets:
            first, second = (side[firsts(side["key"])] for side in sides)
            keys, at_first, at_second = np.intersect1d(
                first["key"], second["key"], assume_unique=True, return_indices=True
            )
            both += keys.size
            for side, records in enumerate((first, second)):
                alone = np.setdiff1d(records["key"], keys, assume_unique=True)
                only[side] += alone.size
                _show(examples[side], alone, sources[0].key_type)
            rows = [
                plain(source, column, records["row"][at])
                for source, column, records, at in zip(
                    sources, columns, (first, second), (at_first, at_second), strict=True
                )
            ]
            is_other, distance = _compare_rows(rows[0], rows[1], tolerance)
            differing += int(np.count_nonzero(is_other))
            largest = float(np.maximum(largest, distance))
            _show(examples[2], keys[is_other], sources[0].key_type)
    return Difference((only[0], only[1]), both, differing, largest, examples)


def _records(source: Source, column: str, dtype: np.dtype) -> Iterator[np.ndarray]:
    kind = key_dtype(source.key_type)
    for keys, rows in zip(source.read("keys"), source.read(column), strict=True):
        records = np.empty(keys.size, dtype)
        records["key"] = kind.to_int64(np, keys)
        records["row"] = rows.reshape(records["row"].shape)
        yield records


def _compare_rows(
    first: np.ndarray, second: np.ndarray, tolerance: float
) -> tuple[np.ndarray, np.number]:
    """Returns which rows differ, and the largest difference of two elements."""
    with np.errstate(invalid="ignore", over="ignore"):
        is_equal = first == second
        if first.dtype.kind == "f" or second.dtype.kind == "f":
            is_equal |= (first != first) & (second != second)
        if np.result_type(first, second).kind in "iu":
            # Differences modulo 2**64 are exact; float64 has not every integer above 2**53.
            larger, smaller = np.maximum(first, second), np.minimum(first, second)
            distances = larger.astype(np.uint64) - smaller.astype(np.uint64)
        else:
            distances = np.abs(first.astype(np.float64) - second.astype(np.float64))
        distances[is_equal] = 0
    is_near = is_equal | ((distances <= tolerance) & (tolerance > 0))
    return ~is_near.all(axis=1), np.max(distances, initial=0.0)


def _show(examples: list[int], keys: np.ndarray, key_type: str) -> None:
    some = key_dtype(key_type).from_int64(np, keys[: _NUM_EXAMPLES - len(examples)])
    examples.extend(some.tolist())
