"""Writing a checkpoint: several tables, on all ranks, into one folder.

The folder has a manifest and, for each dump, a folder of files. A dump writes its files beside
those of the one before, then the manifest takes the place of the old one in one piece, and only
then those of the old files go that it does not name: an increment names what it continues. So
whenever a dump ends, however it ends, the folder has a whole checkpoint: the old one, or the new
one. What an interrupted dump leaves is read by nobody, and the next dump removes it.
"""

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from sok_lite.comm.protocol import Communicator
from sok_lite.engine.agreement import check_equal_on_all_ranks
from sok_lite.engine.failure import together
from sok_lite.engine.files import manifest
from sok_lite.engine.files.increment import shards_to_continue
from sok_lite.engine.files.item import (
    Item,
    Named,
    forget_gone_optimizers,
    items_of,
    tables_of,
)
from sok_lite.engine.files.manifest import Manifest, Shard, TableFacts
from sok_lite.engine.files.pending import wait_for_pending
from sok_lite.engine.files.progress import Progress, Report
from sok_lite.engine.files.shard import CHUNK_BYTES, open_file
from sok_lite.engine.files.shard_content import ShardContent, write_part
from sok_lite.engine.static_table import AnyTable
from sok_lite.engine.table.exclusive import holding

T = TypeVar("T")

_TOKEN_BYTES = 8


def dump(
    path: str | os.PathLike[str],
    tables: Sequence[Named],
    comm: Communicator,
    extra: Mapping[str, Any] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    report: Report | None = None,
    incremental: bool = False,
) -> None:
    """Writes all that tables hold into a folder. Every rank must call it; it returns together.

    All ranks must see the same folder. A checkpoint that is there is replaced when the new one is
    whole. The tables are held meanwhile: no other thread changes them. Memory is needed for a few
    chunks, whatever the tables hold.

    An incremental dump leaves the files that are there, and writes the rows and states that have
    changed since, with the keys of all. Where it cannot be told what has changed it writes all of
    them, as without `incremental`, and rank 0 warns.

    Args:
      path: of the folder; it is made if it is not there. One dump at a time: one of this process
        that goes on in the background is waited for.
      tables: with different names, the same on all ranks.
      comm: the ranks.
      extra: what JSON knows, given back by `load`. That of rank 0 counts.
      chunk_bytes: bytes that are written together.
      report: called with the bytes of this rank's files that are written, and all of them.
      incremental: whether to add to the checkpoint that is there.

    Raises:
      TypeError, ValueError: as of `checked_items`.
      RuntimeError: another thread has restored a table meanwhile.
      OSError, MemoryError: the files of a rank cannot be written. The old checkpoint is as it was.
    """
    begun = begin(path, tables, comm, extra, incremental)

    def write(parts: list[ShardContent]) -> list[Shard]:
        return write_parts(begun, parts, chunk_bytes, report)

    finish(begun, lambda: with_parts(begun, chunk_bytes, write))


class Begun(NamedTuple):
    """A dump that all ranks have begun.

    Attributes:
      folder, data: of the checkpoint; in it, of the files of this dump.
      items: what is dumped.
      tables: what the manifest says of them, but for their files.
      comm: the ranks.
      extra: as of `dump`.
      before: by table the file of this rank that is continued; none: all is written.
    """

    folder: str
    data: str
    items: list[Item]
    tables: list[TableFacts]
    comm: Communicator
    extra: dict[str, Any]
    before: Mapping[str, Shard]


def begin(
    path: str | os.PathLike[str],
    tables: Sequence[Named],
    comm: Communicator,
    extra: Mapping[str, Any] | None,
    incremental: bool,
) -> Begun:
    """Makes the folders of a dump; arguments and errors are those of `dump`."""
    wanted = {"path": os.fspath(path), "incremental": incremental}
    items = checked_items(tables, comm, wanted, "dump")
    folder = os.path.abspath(path)
    wait_for_pending(comm, folder)
    mine = np.frombuffer(secrets.token_bytes(_TOKEN_BYTES), np.uint8)
    data = "data-" + comm.broadcast(mine).tobytes().hex()
    before: Mapping[str, Shard] = {}
    if incremental:
        names = [item.table.name for item in items]
        before, reason = shards_to_continue(folder, tables_of(items), names, comm)
        if reason and comm.rank == 0:
            text = f"All is dumped into {folder}, and not only what has changed: {reason}."
            warnings.warn(text, RuntimeWarning, stacklevel=3)
    facts = [_facts(item.table) for item in items]
    begun = Begun(folder, data, items, facts, comm, dict(extra or {}), before)
    try:
        together(comm, lambda: _make_folders(folder, data, comm))
    except BaseException:
        end(begun)
        raise
    return begun


def finish(begun: Begun, write: Callable[[], list[Shard]]) -> None:
    """Lets the folder have the new checkpoint, or the old one if a rank fails. Every rank calls it.

    Args:
      write: returns what this rank has written.
    """
    try:
        shards = together(begun.comm, write)
        by_rank = _gathered(begun.comm, shards)
        together(begun.comm, lambda: _publish(begun, by_rank))
    finally:
        end(begun)


def end(begun: Begun) -> None:
    """Removes what belongs to no checkpoint, once no rank writes any more."""
    if begun.comm.rank == 0:
        sweep(begun.folder, begun.data)


def with_parts(begun: Begun, chunk_bytes: int, function: Callable[[list[ShardContent]], T]) -> T:
    """Calls a function of what this rank is to write, while the tables are held.

    Args:
      chunk_bytes: of a piece at most.
    """
    forget_gone_optimizers(begun.items)

    def part(item: Item) -> ShardContent:
        name, comm = item.table.name, begun.comm
        file = f"{begun.data}/{manifest.file_name(name, comm.rank, comm.size)}"
        return item.part(begun.folder, file, comm, chunk_bytes, begun.before.get(name))

    return holding(tables_of(begun.items), lambda: function(list(map(part, begun.items))))


def write_parts(
    begun: Begun, parts: Sequence[ShardContent], chunk_bytes: int, report: Report | None = None
) -> list[Shard]:
    """Writes what this rank has for a checkpoint, which is on the disk then. No communication."""
    progress = Progress(report, sum(part.num_bytes for part in parts))
    shards = [write_part(part, begun.folder, chunk_bytes, progress) for part in parts]
    manifest.sync_path(os.path.join(begun.folder, begun.data))
    return shards


def checked_items(
    tables: Sequence[Named], comm: Communicator, more: Mapping[str, Any], what: str
) -> list[Item]:
    """Returns tables as items of a checkpoint. Every rank must call it.

    Args:
      more: what must be equal on all ranks as well.
      what: "dump" or "load".

    Raises:
      TypeError: an item is no table with keys of its own. ValueError: a name repeats, or a rank
        has other tables.
    """

    def check() -> list[Item]:
        items = items_of(tables, what)
        names = [item.table.name for item in items]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(
                "The tables of a checkpoint must have different names. Received: several of "
                f"{', '.join(map(repr, twice))}. Make them with other names."
            )
        return items

    items = together(comm, check)
    description = dict(more)
    for i, item in enumerate(items):
        table = item.table
        facts = (table.name, table.dim, table.row_dtype.name, table.key_dtype.name)
        description[f"table {i}"] = [*facts, table.owner.name, *item.of_all_ranks]
    check_equal_on_all_ranks(comm, description, f"A {what}")
    return items


def _make_folders(folder: str, data: str, comm: Communicator) -> None:
    if comm.rank == 0:
        os.makedirs(folder, exist_ok=True)
        check_is_ours(os.path.join(folder, manifest.NAME))
        os.mkdir(os.path.join(folder, data))


def check_is_ours(path: str) -> None:
    """Raises FileExistsError if there is a file that is no manifest where one is to go."""
    try:
        with open_file(path) as file:
            is_ours = manifest.FORMAT.encode() in file.read()
    except FileNotFoundError:
        return
    if not is_ours:
        raise FileExistsError(
            f"{path} is no manifest of a checkpoint, and a dump would replace it. Dump into a "
            "folder of its own."
        )


def _gathered(comm: Communicator, shards: list[Shard]) -> list[list[Shard]]:
    """Returns what the files of every rank are."""
    text = np.frombuffer(manifest.shards_to_text(shards).encode(), np.uint8)
    gathered = comm.allgatherv(text, call="dump")
    return [manifest.shards_from_text(part.tobytes()) for part in gathered.by_rank()]


def _publish(begun: Begun, by_rank: list[list[Shard]]) -> None:
    if begun.comm.rank != 0:
        return
    tables = {
        facts.name: facts._replace(shards=tuple(shards[i] for shards in by_rank))
        for i, facts in enumerate(begun.tables)
    }
    text = manifest.as_text(Manifest(begun.comm.size, tables, begun.extra))
    manifest.publish(begun.folder, text)


def _facts(table: AnyTable) -> TableFacts:
    """Returns what the manifest says of a table, but for its files."""
    kinds = (table.var_type, table.dim, table.row_dtype.name, table.key_dtype.name)
    return TableFacts(table.name, *kinds, table.owner.name, _options(table), ())


def _options(table: AnyTable) -> dict[str, Any]:
    options = {"seed": table.seed, "initializer": repr(table.initializer)}
    options |= table.options_of_all_ranks()
    plain: dict[str, Any] = json.loads(json.dumps(options, default=repr))
    return plain


def sweep(folder: str, data: str) -> None:
    """Removes what belongs to no checkpoint: files of old dumps, and of those that failed.

    What cannot be removed stays. Where the manifest cannot be read nothing goes but, if there is no
    manifest at all, the files of this dump.

    Args:
      data: the folder of this dump's files.
    """
    try:
        found = manifest.read(folder)
    except FileNotFoundError:
        doomed = [data]
    except (OSError, ValueError):
        return
    else:
        used = {file.split("/")[0] for file in found.files}
        try:
            names = os.listdir(folder)
        except OSError:
            return
        doomed = [name for name in names if manifest.DATA_FOLDER.fullmatch(name)]
        doomed = [name for name in doomed if name not in used]
    for name in doomed:
        shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
