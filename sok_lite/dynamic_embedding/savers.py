"""`FileSystemSaver`: saves a variable's rows in files beside TensorFlow's checkpoint."""

import json
import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.bridge import job
from sok_lite.bridge.checkpoint import as_arrays, saved_tensors
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.saveable import prefix_in_the_end
from sok_lite.bridge.table_call import to_rows
from sok_lite.bridge.tensor import to_array
from sok_lite.bridge.type_spec import alive
from sok_lite.dynamic_embedding.checkpoint_folder import current, directory, folder_beside
from sok_lite.dynamic_embedding.file_system import Source, insert, source_of
from sok_lite.engine.files.key_value_files import (
    checksums,
    make_layout,
    open_shards,
    read_states,
    states_path,
    write_shard,
    write_states,
)
from sok_lite.engine.files.key_value_names import ShardPlace, find_places, group_sizes
from sok_lite.engine.table.content import Content, concatenate, owned_by
from sok_lite.engine.table.locking import with_lock
from sok_lite.engine.table.named_arrays import columns_of, from_named_arrays
from sok_lite.engine.table.restore import restore

_TEXTS = ("facts", "state_columns")  # arrays in the files of states


class DynamicEmbeddingSaver:
    """Base class for the `saver` of a `KVCreator`."""


class FileSystemSaverConfig(NamedTuple):
    """The arguments of a `FileSystemSaver`.

    Attributes:
      proc_size: number of saving processes; proc_rank: number of this one.
      save_path: the directory; None: beside the checkpoint.
      buffer_size: keys per write.
    """

    proc_size: int
    proc_rank: int
    save_path: str | None
    buffer_size: int


class FileSystemSaver(DynamicEmbeddingSaver):
    """Keeps rows in key and value files of a directory, outside TensorFlow's checkpoint.

    Optimizer states and scores are in one more file per process. The same number of processes
    restores everything exactly; another number distributes it by the partitioner. Each process
    saves all of its keys, as in TFRA: of a key in several processes, the last wins when another
    number restores, and the logger "sok_lite" reports how many there were.

    Args:
      proc_size, proc_rank: number of saving processes, and of this one; None: those of the
        connected job, else one.
      save_path: one directory for all saves; None: one beside each checkpoint of
        `de.train.Checkpoint`, `de.train.DEHvdSaver` or a `tf.compat.v1.train.Saver`, which does not
        remove the directories of old checkpoints.
      buffer_size: keys per write.

    Raises:
      TypeError: only one of `proc_size` and `proc_rank` is passed.
      ValueError: a rank out of range.
    """

    def __init__(
        self,
        proc_size: int | None = None,
        proc_rank: int | None = None,
        save_path: Any = None,
        buffer_size: int = 4096,
    ) -> None:
        if (proc_size is None) != (proc_rank is None):
            raise TypeError(
                "`proc_size` and `proc_rank` are given together, or neither. "
                f"Received: proc_size={proc_size}, proc_rank={proc_rank}."
            )
        size, rank = (1, 0) if proc_size is None or proc_rank is None else (proc_size, proc_rank)
        if not 0 <= rank < size:
            raise ValueError(
                "`proc_rank` must be from 0 to proc_size - 1. "
                f"Received: proc_size={proc_size}, proc_rank={proc_rank}."
            )
        path = None if save_path is None else str(save_path)
        self.config = FileSystemSaverConfig(size, rank, path, buffer_size)
        self._is_of_job = proc_size is None

    def ranks(self) -> tuple[int, int]:
        """Returns the current number of saving processes, and of this one."""
        others = job.other_ranks() if self._is_of_job else None
        if others is not None:
            return others.size, others.rank
        return self.config.proc_size, self.config.proc_rank


class VariableFiles:
    """Writes and reads files of a weakly held variable; ValueError if its rows do not fit."""

    def __init__(self, variable: Any, saver: FileSystemSaver) -> None:
        self._variable = weakref.ref(variable)
        self._saver = saver
        key_dtype, value_dtype = variable.key_dtype.name, variable.value_dtype.name
        make_layout(variable.name, key_dtype, value_dtype, variable.dim)

    def write(self, prefix: bytes = b"") -> list[tuple[int, int]]:
        """Writes this process's shards, and one more file of states and scores.

        Returns the checksums of keys and values of each shard. `prefix` is of the checkpoint that a
        TF1 saver is writing. ValueError: no folder is named, and no checkpoint with one is being
        saved.
        """
        source, folder = source_of(alive(self._variable)), self._folder("saved", prefix)
        size, rank = self._saver.ranks()
        layout, rows, shards = source.layout, source.rows, source.num_shards
        tensors = on_device(
            rows.table.backend, saved_tensors, rows.table, rows.key_type, rows.dtype
        )
        arrays = as_arrays(tensors)
        arrays |= {name: np.frombuffer(arrays[name], np.uint8) for name in _TEXTS}
        keys, values = arrays.pop("keys"), arrays.pop("values")
        owners = source.owners(keys, shards) if shards > 1 else None
        written = []
        for index in range(shards):
            place = ShardPlace(index + 1, shards, rank, size)
            is_here = slice(None) if owners is None else owners == index
            piece = keys[is_here], values[is_here]
            buffer_size = self._saver.config.buffer_size
            write_shard(folder, layout, place, [piece], buffer_size=buffer_size)
            found = checksums(folder, place.base(layout.name))
            assert found is not None
            written.append(found)
        write_states(states_path(folder, layout.name, rank, size), arrays, written)
        return written

    def read(self, expected: Sequence[tuple[int, int]] | None = None, prefix: bytes = b"") -> None:
        """Replaces the content by the saved one: exactly, if saved by the same number of processes.

        Otherwise this process takes its keys by the partitioner. States start fresh if files have
        none, or the kinds differ between processes.

        Args:
          expected: the result of `write` on the rank that wrote the checkpoint; None: unknown.
          prefix: of the checkpoint that a TF1 saver is restoring; else empty.

        Raises:
          FileNotFoundError: files are missing.
          ValueError: no folder is named, or the files are of something else, of two saves, or
            corrupt.
        """
        source, folder = source_of(alive(self._variable)), self._folder("restored", prefix)
        size, rank = self._saver.ranks()
        name = source.layout.name
        # Files of two jobs are rejected: nothing says which are newer.
        is_spread = group_sizes(folder, name) != {size}
        places = find_places(folder, name) if is_spread else find_places(folder, name, size, rank)
        ranks = sorted({place.rank for place in places})
        if expected is not None and not _belong_to_save(expected, folder, name):
            raise ValueError(
                f"{folder!r} holds the rows of {name!r} of another save than this checkpoint's: a "
                "later one has written over them. Save each checkpoint into a folder of its own: "
                "without `save_path`, and those of one step in different directories."
            )
        parts = [
            _read_part(source, folder, [place for place in places if place.rank == each])
            for each in ranks
        ]
        if is_spread:

            def are_own(keys: np.ndarray) -> np.ndarray:
                return source.owners(keys, size) == rank

            parts = [owned_by(part, are_own) for part in parts]
        part = _join_parts(parts, f"table {name!r}")
        table = source.rows.table
        if "stamps" not in part.columns:
            tf.get_logger().warning(
                f"The optimizer states of {name!r} begin anew: {folder!r} has no states of all its "
                "rows, or states of several kinds."
            )
            with_lock(table, lambda: _replace(source, part))
            return
        on_device(table.backend, _restore, source, part)

    def _folder(self, done: str, prefix: bytes) -> str:
        name = alive(self._variable).name
        folder = self._saver.config.save_path or current() or ""
        if not folder and prefix:
            folder = folder_beside(prefix_in_the_end(os.fsdecode(prefix)))
        if not folder and not os.environ.get("TFRA_SAVED_KV"):
            raise ValueError(
                f"Variable {name!r} has a FileSystemSaver and cannot be {done} by this: it does "
                "not say where files are. Use de.train.Checkpoint, in a TF1 graph "
                "de.train.DEHvdSaver or a Saver, and make the variable before it restores; or give "
                "FileSystemSaver(save_path=...)."
            )
        return directory(folder)


def _belong_to_save(expected: Sequence[tuple[int, int]], folder: str, name: str) -> bool:
    """Whether a process's files have the checksums of a save, or none at all."""
    by_rank: dict[int, list[tuple[int, int] | None]] = {}
    for place in find_places(folder, name):
        by_rank.setdefault(place.rank, []).append(checksums(folder, place.base(name)))
    return any(None in found or found == list(expected) for found in by_rank.values())


def _read_part(source: Source, folder: str, places: Sequence[ShardPlace]) -> Content:
    """Reads what one process saved; without a states file the keys have no further facts."""
    layout = source.layout
    shards = open_shards(folder, layout, file_name_list=[p.base(layout.name) for p in places])
    pieces = [piece for shard in shards for piece in shard.pieces()]
    keys = np.concatenate([np.empty(0, layout.key_storage), *(keys for keys, _ in pieces)])
    empty = np.empty((0, layout.dim), layout.value_storage)
    values = np.concatenate([empty, *(values for _, values in pieces)])
    order = np.argsort(keys, kind="stable")
    path = states_path(folder, layout.name, places[0].rank, places[0].size)
    found = [checksums(folder, place.base(layout.name)) for place in places]
    known = read_states(path, found)
    keys, values = keys[order], values[order]
    if known is None:
        return Content(keys, values, [], {}, np.empty(0, np.int64), {}, {})
    texts = {name: known[name].tobytes() for name in _TEXTS}
    arrays = {**known, **texts, "keys": keys, "values": values}
    return from_named_arrays(arrays, f"table {layout.name!r}")


def _join_parts(parts: Sequence[Content], whose: str) -> Content:
    """Joins the parts of several processes; the last of a repeated key wins.

    If a states file is missing, or kinds of states differ, all keys lose their further facts.
    """
    kinds = {json.dumps(columns_of(part.states)) for part in parts}
    if len(kinds) > 1 or not all("stamps" in part.columns for part in parts):
        parts = [part._replace(states=[], columns={}, pending={}) for part in parts]
    return concatenate(parts, whose, last_counts=True)


def _restore(source: Source, part: Content) -> None:
    table = source.rows.table
    values = source.tensor(part.values)
    rows = to_rows(to_array(values, table.backend), values.dtype, table)
    restore(table, part._replace(values=table.store.to_storage(rows)))


def _replace(source: Source, part: Content) -> None:
    source.rows.clear()
    insert(source, part.keys, part.values)
