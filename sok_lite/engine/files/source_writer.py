"""Writes a checkpoint from sources: in one process, for any number of ranks, column by column."""

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import zip_longest
from typing import Any

import numpy as np

from sok_lite.engine.dtypes import key_dtype
from sok_lite.engine.files import manifest
from sok_lite.engine.files.disk import sync_path
from sok_lite.engine.files.dump import sweep
from sok_lite.engine.files.manifest import Manifest, Shard, TableFacts, path_of
from sok_lite.engine.files.progress import Progress
from sok_lite.engine.files.shard import CHUNK_BYTES, NOT_WRITTEN, ShardWriter
from sok_lite.engine.files.source import PENDING_COLUMNS, Source, column_of
from sok_lite.engine.files.table_file import tensors_of
from sok_lite.engine.files.text_file import write_texts
from sok_lite.engine.local_path import local_path
from sok_lite.engine.owner import HASH, MOD, OneRank, OwnerRule
from sok_lite.engine.texts import KeyTexts

# Returns the owner rank of each key of a source.
_Owners = Callable[[np.ndarray], np.ndarray]


def write_checkpoint(
    folder: str | os.PathLike[str],
    sources: Sequence[Source],
    ranks: int = 1,
    extra: Mapping[str, Any] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Writes tables as a checkpoint, as if so many ranks had dumped them.

    An existing checkpoint is replaced when the new one is complete, as by `dump`; the sources may
    read it. Memory is needed for a few pieces of each source and for all texts of one, and one file
    for each rank is open at a time. The keys are read once for every column, everything else once.

    Args:
      folder: it is made if missing.
      sources: with different names. The keys of each are distinct: a load takes the first of equal
        ones.
      ranks: number of files of each table.
      extra: values that JSON knows, returned by a load.
      chunk_bytes: bytes that have one checksum.

    Raises:
      BlockingIOError: a dump writes into the folder. OSError: a file cannot be written or read.
      ValueError: the path is no local one, a source is corrupt, two have one name, or `ranks` is
        below 1. What was in the folder is unchanged.
    """
    if ranks < 1:
        raise ValueError(f"A checkpoint must have at least 1 rank. Received: ranks={ranks}.")
    names = [source.name for source in sources]
    if len(set(names)) != len(names):
        raise ValueError(
            "The tables of a checkpoint must have different names. Received: "
            f"{', '.join(map(repr, names))}."
        )
    folder = os.path.abspath(local_path(folder, "folder"))
    data = "data-" + secrets.token_hex(8)
    is_new = not os.path.lexists(folder)
    lock = manifest.lock(folder)
    try:
        os.mkdir(os.path.join(folder, data))
        tables = {
            source.name: _write(source, folder, data, ranks, chunk_bytes) for source in sources
        }
        sync_path(os.path.join(folder, data))
        text = manifest.as_text(Manifest(ranks, tables, dict(extra or {})))
        manifest.publish(folder, text)
    finally:
        sweep(folder, data)
        lock.release()
        if is_new:
            with suppress(OSError):
                os.rmdir(folder)  # only an empty one goes: nothing was published


def owner_rule(name: str, ranks: int) -> OwnerRule | None:
    """Returns the owner rule of a name; None if it is a function, or of a rank beyond `ranks`."""
    if name in (MOD.name, HASH.name):
        return MOD if name == MOD.name else HASH
    word, _, number = name.partition(" ")
    if word == "rank" and number.isdecimal() and int(number) < ranks:
        return OneRank(int(number))
    return None


def _write(source: Source, folder: str, data: str, ranks: int, chunk_bytes: int) -> TableFacts:
    # Under another rule than that of its table, a load determines the owners of all keys anew.
    rule, about = owner_rule(source.about.owner, ranks) or MOD, source.about
    kind = key_dtype(source.key_type)

    def owners(keys: np.ndarray) -> np.ndarray:
        return rule.owners(kind.to_int64(np, keys), ranks, kind)

    counts = _count_keys(source, "keys", owners, ranks)
    pending = (
        _count_keys(source, "sighted_keys", owners, ranks) if about.num_pending else counts * 0
    )
    states = tuple(
        state._replace(tensor=f"states.{i}.{state.name}") for i, state in enumerate(source.states)
    )
    blank = Shard("", 0, 0, "scores" in source.columns, False, states, {}, NOT_WRITTEN)
    shards = [
        blank._replace(
            file=f"{data}/{manifest.file_name(source.name, rank, ranks)}",
            rows=int(counts[rank]),
            sighted=int(pending[rank]),
            facts=dict(about.facts),
        )
        for rank in range(ranks)
    ]
    with ExitStack() as stack:
        writers = []
        for shard in shards:
            tensors = tensors_of(source.dim, source.dtype, source.key_type, shard)
            path = path_of(folder, shard)
            writers.append(ShardWriter(path, tensors, {"table": source.name}, chunk_bytes))
            stack.callback(writers[-1].close)
        for keys, piece in _content(source):
            _write_to_owners(writers, owners(keys), piece)
        written = [writer.finish() for writer in writers]
    shards = [s._replace(written=w) for s, w in zip(shards, written, strict=True)]
    return TableFacts(
        source.name,
        about.var_type,
        source.dim,
        source.dtype,
        source.key_type,
        owner=rule.name,
        options=dict(about.options),
        shards=tuple(_with_texts(source, shards, owners, folder, chunk_bytes)),
    )


def _with_texts(
    source: Source, shards: Sequence[Shard], owners: _Owners, folder: str, chunk_bytes: int
) -> Sequence[Shard]:
    """Writes the texts of keys beside the files of their owners; returns shards that name them."""
    texts = source.texts()
    if not texts:
        return shards
    ranks = owners(np.fromiter(texts, key_dtype(source.key_type).dtype, len(texts))).tolist()
    by_rank: list[dict[int, bytes]] = [{} for _ in shards]
    for rank, (key, text) in zip(ranks, texts.items(), strict=True):
        by_rank[rank][key] = text
    where = source.name, folder
    return [
        s._replace(texts=write_texts(KeyTexts.of(own), *where, s.file, chunk_bytes, Progress()))
        for s, own in zip(shards, by_rank, strict=True)
    ]


def _count_keys(source: Source, column: str, owners: _Owners, ranks: int) -> np.ndarray:
    counts = np.zeros(ranks, np.int64)
    for keys in source.read(column):
        counts += np.bincount(owners(keys), minlength=ranks)
    return counts


def _content(source: Source) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields (keys, piece) of all columns, in the order of `tensors_of`."""
    yield from _with_keys(source, "keys")
    yield from _with_keys(source, "values")
    if "stamps" in source.columns:
        yield from _with_keys(source, "stamps")
    else:
        yield from ((keys, np.zeros(keys.size, np.uint32)) for keys in source.read("keys"))
    if "scores" in source.columns:
        yield from _with_keys(source, "scores")
    for state in source.states:
        yield from _with_keys(source, state.tensor)
    if source.about.num_pending:
        for name in PENDING_COLUMNS:
            yield from _with_keys(source, name, "sighted_keys")


def _with_keys(
    source: Source, name: str, key_column: str = "keys"
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    _, dtype, dim = column_of(source, name)
    if name == key_column:
        yield from ((keys, keys) for keys in source.read(name))
        return
    for keys, piece in zip_longest(source.read(key_column), source.read(name)):
        num_keys = 0 if keys is None else keys.size
        shape = (num_keys,) if dim is None else (num_keys, dim)
        if keys is None or piece is None or piece.shape != shape or piece.dtype != dtype:
            received = "no more" if piece is None else f"{piece.dtype} of shape {piece.shape}"
            raise ValueError(
                f"Column {name!r} of table {source.name!r} must have {dtype} of shape {shape} "
                f"beside the next keys. Received: {received}."
            )
        yield keys, piece


def _write_to_owners(writers: Sequence[ShardWriter], owners: np.ndarray, piece: np.ndarray) -> None:
    if len(writers) == 1:
        writers[0].write(piece)
        return
    order = np.argsort(owners, kind="stable")
    ends = np.searchsorted(owners[order], np.arange(len(writers) + 1))
    for rank, writer in enumerate(writers):
        writer.write(piece[order[ends[rank] : ends[rank + 1]]])
