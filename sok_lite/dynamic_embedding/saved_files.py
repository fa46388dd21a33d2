"""The files that a variable with a `FileSystemSaver` keeps beside TensorFlow's checkpoint."""

import json
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.bridge.checkpoint import restore_tensors, saved_tensors
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.type_spec import alive
from sok_lite.dynamic_embedding.checkpoint_folder import current, directory
from sok_lite.dynamic_embedding.file_system import Source, insert, source_of
from sok_lite.dynamic_embedding.savers import FileSystemSaver
from sok_lite.engine.files.key_value_files import checksums, make_layout, open_shards, write_shard
from sok_lite.engine.files.key_value_names import Place, find_places, group_sizes
from sok_lite.engine.files.key_value_states import read_states, states_path, write_states
from sok_lite.engine.table.exclusive import alone

_TEXTS = ("facts", "state_columns")
_OF_KEYS = ("states", "stamps", "scores")
_OF_SIGHTED = ("sighted_keys", "sightings")


class Part(NamedTuple):
    """What a process has saved of a variable.

    Attributes:
      keys: (n,) ascending.
      values: (n, dim), as in a file.
      arrays: of its states file; None: there is none.
    """

    keys: np.ndarray
    values: np.ndarray
    arrays: dict[str, np.ndarray] | None


class VariableFiles:
    """Writes and reads the files of a variable. It keeps no variable alive.

    Args:
      variable: a `Variable`.
      saver: says where they are.

    Raises:
      ValueError: files cannot hold such keys or rows.
    """

    def __init__(self, variable: Any, saver: FileSystemSaver) -> None:
        self._variable = weakref.ref(variable)
        self._saver = saver
        key_dtype, value_dtype = variable.key_dtype.name, variable.value_dtype.name
        make_layout(variable.name, key_dtype, value_dtype, variable.dim)

    def write(self) -> list[tuple[int, int]]:
        """Writes the shards of this process, and what they do not hold in one file more.

        Returns:
          The checksums of the keys and of the values of each shard.

        Raises:
          ValueError: no folder is given, and no checkpoint is being saved that has one.
        """
        source, folder = source_of(alive(self._variable)), self._folder("saved")
        size, rank = self._saver.ranks()
        layout, rows, shards = source.layout, source.rows, source.num_shards
        tensors = on_device(
            rows.table.backend, saved_tensors, rows.table, rows.key_type, rows.dtype
        )
        arrays = {
            name: np.frombuffer(tensor.numpy(), np.uint8) if name in _TEXTS else tensor.numpy()
            for name, tensor in tensors.items()
        }
        keys, values = arrays.pop("keys"), arrays.pop("values")
        owners = source.owners(keys, shards) if shards > 1 else None
        written = []
        for index in range(shards):
            place = Place(index + 1, shards, rank, size)
            is_here = slice(None) if owners is None else owners == index
            piece = keys[is_here], values[is_here]
            buffer_size = self._saver.config.buffer_size
            write_shard(folder, layout, place, [piece], buffer_size=buffer_size)
            found = checksums(folder, place.base(layout.name))
            assert found is not None
            written.append(found)
        write_states(states_path(folder, layout.name, rank, size), arrays, written)
        return written

    def read(self, expected: Sequence[tuple[int, int]] | None = None) -> None:
        """Makes the variable hold what was saved: exactly, if by as many processes as there are.

        Of another number this process takes the keys that are its own by the partitioner. States
        begin anew where files have none, or those of several processes differ in kind.

        Args:
          expected: what `write` has returned on the rank that wrote the checkpoint which is
            restored; None: nobody knows.

        Raises:
          FileNotFoundError: files are missing.
          ValueError: no folder is given, or files of something else, of two saves, or corrupt.
        """
        source, folder = source_of(alive(self._variable)), self._folder("restored")
        size, rank = self._saver.ranks()
        name = source.layout.name
        # Files of two jobs are refused: nobody knows which are the later ones.
        is_spread = group_sizes(folder, name) != {size}
        places = find_places(folder, name) if is_spread else find_places(folder, name, size, rank)
        ranks = sorted({place.rank for place in places})
        if expected is not None and not _are_of(expected, folder, name):
            raise ValueError(
                f"{folder!r} holds the rows of {name!r} of another save than this checkpoint's: a "
                "later one has written over them. Save each checkpoint into a folder of its own: "
                "without `save_path`, and those of one step in different directories."
            )
        parts = [
            _part(source, folder, [place for place in places if place.rank == each])
            for each in ranks
        ]
        if is_spread:
            parts = [_of_process(source, part, size, rank) for part in parts]
        part = _together(parts)
        if part.arrays is None:
            tf.get_logger().warning(
                f"The optimizer states of {name!r} begin anew: {folder!r} has no states of all its "
                "rows, or states of several kinds."
            )
            alone(source.rows.table, lambda: _replace(source, part))
            return
        tensors = {
            array: tf.constant(values.tobytes() if array in _TEXTS else values)
            for array, values in part.arrays.items()
        }
        tensors |= {"keys": tf.constant(part.keys), "values": source.tensor(part.values)}
        table = source.rows.table
        on_device(table.backend, restore_tensors, table, tensors)

    def _folder(self, done: str) -> str:
        name = alive(self._variable).name
        folder = directory(self._saver.config.save_path or current() or "")
        if not folder:
            raise ValueError(
                f"Variable {name!r} has a FileSystemSaver and cannot be {done} by this: it does "
                "not say where files are. Use de.train.Checkpoint, in a TF1 graph "
                "de.train.DEHvdSaver, and make the variable before it restores; or give "
                "FileSystemSaver(save_path=...)."
            )
        return folder


def _are_of(expected: Sequence[tuple[int, int]], folder: str, name: str) -> bool:
    """Whether one of the processes has the checksums of a save, or its files have none."""
    by_rank: dict[int, list[tuple[int, int] | None]] = {}
    for place in find_places(folder, name):
        by_rank.setdefault(place.rank, []).append(checksums(folder, place.base(name)))
    return any(None in found or found == list(expected) for found in by_rank.values())


def _part(source: Source, folder: str, places: Sequence[Place]) -> Part:
    """Reads what one process has saved."""
    layout = source.layout
    shards = open_shards(folder, layout, file_name_list=[p.base(layout.name) for p in places])
    pieces = [piece for shard in shards for piece in shard.pieces()]
    keys = np.concatenate([np.empty(0, layout.key_storage), *(keys for keys, _ in pieces)])
    empty = np.empty((0, layout.dim), layout.value_storage)
    values = np.concatenate([empty, *(values for _, values in pieces)])
    order = np.argsort(keys, kind="stable")
    path = states_path(folder, layout.name, places[0].rank, places[0].size)
    found = [checksums(folder, place.base(layout.name)) for place in places]
    return Part(keys[order], values[order], read_states(path, found))


def _of_process(source: Source, part: Part, size: int, rank: int) -> Part:
    """Returns the keys of a part that are of one process, with what is known of them."""
    is_here = source.owners(part.keys, size) == rank
    arrays = None
    if part.arrays is not None:
        sighted = source.owners(part.arrays["sighted_keys"].astype(part.keys.dtype), size) == rank
        arrays = _taken(part.arrays, is_here, sighted)
    return Part(part.keys[is_here], part.values[is_here], arrays)


def _together(parts: Sequence[Part]) -> Part:
    """Returns what several processes have saved as of one; of a repeated key the last counts."""
    if len(parts) == 1:
        return parts[0]
    keys = np.concatenate([part.keys for part in parts])
    kept = _last_of_each(keys)
    values = np.concatenate([part.values for part in parts])[kept]
    all_arrays = [part.arrays for part in parts if part.arrays is not None]
    columns = {arrays["state_columns"].tobytes() for arrays in all_arrays}
    if len(all_arrays) < len(parts) or len(columns) > 1:
        return Part(keys[kept], values, None)
    names = (*_OF_KEYS, *_OF_SIGHTED)
    joined = {name: np.concatenate([arrays[name] for arrays in all_arrays]) for name in names}
    # Of the process that has looked up most: no stamp is later than its count.
    latest = max(
        all_arrays, key=lambda arrays: json.loads(arrays["facts"].tobytes())["num_lookups"]
    )
    joined |= {name: latest[name] for name in _TEXTS}
    if len(joined["scores"]) != len(keys):
        joined["scores"] = joined["scores"][:0]
    return Part(keys[kept], values, _taken(joined, kept, _last_of_each(joined["sighted_keys"])))


def _taken(arrays: dict[str, np.ndarray], of_keys: Any, of_sighted: Any) -> dict[str, np.ndarray]:
    """Returns what arrays say of some of the keys; where their slots are is another table's."""
    taken = {
        name: arrays[name][of_keys] if len(arrays[name]) else arrays[name] for name in _OF_KEYS
    }
    taken |= {name: arrays[name][of_sighted] for name in _OF_SIGHTED}
    return taken | {name: arrays[name] for name in _TEXTS} | {"slots": np.empty(0, np.int64)}


def _last_of_each(keys: np.ndarray) -> np.ndarray:
    """Returns the places of the distinct keys, in their order, where each stands last."""
    _, from_behind = np.unique(keys[::-1], return_index=True)
    return len(keys) - 1 - from_behind


def _replace(source: Source, part: Part) -> None:
    source.rows.clear()
    insert(source, part.keys, part.values)
