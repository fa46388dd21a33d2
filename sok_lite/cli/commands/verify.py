"""`sok-lite verify`: checks every byte of a checkpoint."""

import argparse
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import numpy as np

from sok_lite.cli.arguments import readable
from sok_lite.cli.buckets import Buckets, firsts
from sok_lite.cli.errors import FINDINGS, FINE
from sok_lite.cli.progress import progress_bar
from sok_lite.engine.dtypes import key_dtype
from sok_lite.engine.files import manifest
from sok_lite.engine.files.disk import open_file
from sok_lite.engine.files.manifest import Shard, TableFacts, TextFile, path_of
from sok_lite.engine.files.saved_file import SavedFile
from sok_lite.engine.files.shard import CHUNK_BYTES, ShardReader
from sok_lite.engine.files.source_writer import owner_rule
from sok_lite.engine.files.table_file import open_shard
from sok_lite.engine.files.text_file import read_texts
from sok_lite.reports.text import counted, listed

HELP = "read every byte of a checkpoint and list what is corrupt, missing or duplicated"
EXAMPLES = "sok-lite verify runs/model"

_NUM_EXAMPLES = 5
_RECORD = np.dtype([("key", np.int64), ("rank", np.int32)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path", metavar="PATH", type=readable, help="checkpoint folder, or its address"
    )


def run(args: argparse.Namespace) -> int:
    try:
        found = manifest.read(args.path)
    except ValueError as error:
        print(error)
        return FINDINGS
    folder, count = os.path.abspath(args.path), 0
    shards = [shard for facts in found.tables.values() for shard in facts.shards]
    total = sum(file.num_bytes for shard in shards for file in shard.written_files)
    with progress_bar("verify", total, args.progress) as add:
        for facts in found.tables.values():
            for finding in _findings_of_table(folder, facts, add):
                print(finding)
                count += 1
            if owner_rule(facts.owner, found.ranks) is None:
                print(f"table {facts.name!r}: owners of keys were not checked: {facts.owner}")
    if count:
        print(f"{counted(count, 'finding')}")
        return FINDINGS
    num_keys = sum(shard.rows for shard in shards)
    sizes = counted(len(found.tables), "table"), counted(num_keys, "key"), counted(total, "byte")
    print(f"{args.path} is whole: {', '.join(sizes)}")
    return FINE


def _findings_of_table(
    folder: str, facts: TableFacts, add: Callable[[int], object]
) -> Iterator[str]:
    """Yields the faults of a table: of the file, the table, or a chunk; `add` counts bytes read.

    It needs memory for a chunk and a bucket of keys, and with increments for the keys of a rank;
    disk for all keys, in temporary files. OSError: a file cannot be read, or those do not fit.
    """
    total = sum(shard.rows for shard in facts.shards)
    with closing(Buckets([_RECORD], [total])) as buckets:
        for rank, shard in enumerate(facts.shards):
            can_read = True
            for part in shard.chain:
                reader, findings = _open_checked(folder, facts, part, add)
                can_read &= reader is not None
                yield from findings
            if shard.texts is not None:
                yield from _wrong_texts(folder, facts, shard.texts, add)
            if reader is not None:
                yield from _keys(folder, facts, rank, reader, buckets)
            if shard.changed is not None and can_read:
                yield from _missing_rows(folder, facts, shard)
        yield from _repeats(folder, facts, buckets)


def _open_checked(
    folder: str, facts: TableFacts, shard: Shard, add: Callable[[int], object]
) -> tuple[ShardReader | None, list[str]]:
    """Returns a reader of a file, None if unusable, and its faults."""
    path = path_of(folder, shard)
    try:
        findings = [
            f"{path}: table {facts.name!r}, chunk {number} of {len(shard.written.crcs)}, "
            f"{shard.written.chunk_bytes:,} bytes or less from "
            f"{number * shard.written.chunk_bytes:,} on, is not what was written"
            for number in _wrong_chunks(path, shard, add)
        ]
        reader = open_shard(facts, shard, folder)
    except FileNotFoundError:
        return None, [f"{path}: table {facts.name!r}: the file is missing"]
    except ValueError as error:
        return None, findings or [f"{path}: table {facts.name!r}: {_reason(error)}"]
    return (None if findings else reader), findings


def _wrong_texts(
    folder: str, facts: TableFacts, file: TextFile, add: Callable[[int], object]
) -> Iterator[str]:
    """Yields the faults of a file of strings, which it reads into memory."""
    path = path_of(folder, file)
    try:
        read_texts(file, facts.name, folder)
        add(file.written.num_bytes)
    except FileNotFoundError:
        yield f"{path}: table {facts.name!r}: the file is missing"
    except ValueError as error:
        yield f"{path}: table {facts.name!r}: {_reason(error)}"


def _reason(error: ValueError) -> str:
    """Returns the fault from the error text of a load."""
    return str(error).partition(" is corrupt: ")[2].partition(". Nothing was loaded")[0]


def _missing_rows(folder: str, facts: TableFacts, shard: Shard) -> Iterator[str]:
    """Yields whether an increment has keys without a row, holding its keys in memory."""
    try:
        SavedFile(shard, partial(open_shard, facts, folder=folder)).newest_rows()
    except ValueError as error:
        yield f"{path_of(folder, shard)}: table {facts.name!r}: {_reason(error)}"


def _wrong_chunks(path: str, shard: Shard, add: Callable[[int], object]) -> Iterator[int]:
    """Yields the changed chunks of a file of the right size."""
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size != shard.written.num_bytes:
            return
        for number, crc in enumerate(shard.written.crcs):
            chunk = file.read(shard.written.chunk_bytes)
            add(len(chunk))
            if zlib.crc32(chunk) != crc:
                yield number


def _keys(
    folder: str, facts: TableFacts, rank: int, reader: ShardReader, buckets: Buckets
) -> Iterator[str]:
    """Collects the keys of a file for `_repeats`; yields whether other ranks own some."""
    kind, num_ranks = key_dtype(facts.key_type), len(facts.shards)
    rule = owner_rule(facts.owner, num_ranks)
    shard, step = facts.shards[rank], CHUNK_BYTES // kind.dtype.itemsize
    num_foreign, examples = 0, list[str]()
    for column, total in (("keys", shard.rows), ("sighted_keys", shard.sighted)):
        spans = ((first, min(first + step, total)) for first in range(0, total, step))
        for keys in reader.rows(column, spans):
            engine_keys = kind.to_int64(np, keys)
            if column == "keys":
                records = np.empty(keys.size, _RECORD)
                records["key"], records["rank"] = engine_keys, rank
                buckets.add(0, records)
            if rule is not None:
                owners = rule.owners(engine_keys, num_ranks, kind)
                at = np.flatnonzero(owners != rank)
                num_foreign += at.size
                some = at[: _NUM_EXAMPLES - len(examples)]
                examples += [f"{keys[i]} of rank {owners[i]}" for i in some.tolist()]
    if num_foreign:
        count = counted(num_foreign, "key")
        yield (
            f"{path_of(folder, shard)}: table {facts.name!r}: {count} owned by other ranks than "
            f"{rank}, by {facts.owner}: {listed(examples, num_foreign)}"
        )


def _repeats(folder: str, facts: TableFacts, buckets: Buckets) -> Iterator[str]:
    """Yields whether keys repeat."""
    kind, num_repeats, examples = key_dtype(facts.key_type), 0, list[str]()
    for (records,) in buckets:
        is_first = firsts(records["key"])
        again = np.flatnonzero(~is_first)
        num_repeats += again.size
        for i in again[: _NUM_EXAMPLES - len(examples)].tolist():
            key = kind.from_int64(np, records["key"][i : i + 1])[0]
            ranks = records["rank"][i - 1], records["rank"][i]
            files = " and ".join(dict.fromkeys(f"rank {rank}" for rank in ranks))
            examples.append(f"{key} in {files}")
    if num_repeats:
        count = counted(num_repeats, "key is", "keys are")
        yield f"{folder}: table {facts.name!r}: {count} repeated: {listed(examples, num_repeats)}"
