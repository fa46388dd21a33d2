"""Finds the tensors of a KvVariable in TF1 checkpoints of all ranks.

Each rank saves the keys that it owns into its own checkpoint, named by `rank_path`.
"""

import os
import re
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.bridge import job
from sok_lite.bridge.saveable import prefix_in_the_end
from sok_lite.engine.dtypes import RowDtype
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.content import Content, concatenate, owned_by, owns
from sok_lite.kv_variable.saved_tensors import Facts, decode, facts_of, saved_dtypes

_RANK = re.compile(r"\.rank-(\d+)-of-(\d+)")
_KEYS = re.compile(r"(.+?)(?:/part_\d+)?:0-keys")


class PartPlace(NamedTuple):
    """Where a saved part of a variable is."""

    path: str  # prefix of the checkpoint's files
    reader: Any
    prefix: str  # of the tensor names
    facts: Facts | None  # None: TFPlus wrote it

    def has(self, tensor: str) -> bool:
        return bool(self.reader.has_tensor(f"{self.prefix}-{tensor}"))

    def tensor(self, name: str) -> Any:
        """Returns a tensor: an array, or the bytes of a string."""
        return self.reader.get_tensor(f"{self.prefix}-{name}")

    def form(self, name: str) -> tuple[tf.DType, list[int]]:
        """Returns dtype and shape of a tensor."""
        full = f"{self.prefix}-{name}"
        dtypes = self.reader.get_variable_to_dtype_map()
        return tf.as_dtype(dtypes[full]), self.reader.get_variable_to_shape_map()[full]

    @property
    def is_delta(self) -> bool:
        """Whether it holds changes since another save."""
        return self.has("need_full_import") and not np.all(self.tensor("need_full_import"))


def ranks() -> tuple[int, int]:
    """Returns this rank and the number of ranks."""
    comm = job.other_ranks()
    return (0, 1) if comm is None else (comm.rank, comm.size)


def rank_path(path: str) -> str:
    """Returns the checkpoint path of this rank, from that of the job.

    On one rank it is the path itself, on several `<path>.rank-<rank>-of-<ranks>`. Give it to
    `Saver.save`, or to `MonitoredTrainingSession` and `CheckpointSaverHook` as `checkpoint_dir`, on
    every rank and at equal steps; the names may differ in nothing else, or ranks cannot find each
    other's. `Saver.restore` takes the path of any saving rank, and on any number of ranks each
    takes its own keys.

    A rank saves all keys that it has without asking the others. The logger "sok_lite" names keys
    that others own, as after lookups before `sok_lite.init`; if their owners save them too, the
    checkpoint cannot be restored: remove them, or call `sok_lite.init` first.
    """
    rank, size = ranks()
    return path if size == 1 else f"{path}.rank-{rank}-of-{size}"


def saved_path(path: str) -> str:
    """Returns the path that this rank restores from, given the path passed to `rank_path`.

    It may be a checkpoint, also with the step ("-7") that `Saver.save` appends, or a folder of
    checkpoints. With another number of ranks than saved, it is the path of the first saving rank.

    Raises:
      FileNotFoundError: nothing was saved there.
    """
    step = "".join(re.findall(r"-\d+$", path))
    stem = path.removesuffix(step)
    for candidate in (rank_path(path), rank_path(stem) + step, path):
        if _exists(candidate) or tf.io.gfile.isdir(candidate):
            return candidate
    folder, base = os.path.split(path)
    name = re.escape(os.path.basename(stem))
    of_first = r"\.rank-0-of-\d+"
    first = re.compile(rf"({re.escape(base)}{of_first}|{name}{of_first}{step})(\.index)?/?")
    files = tf.io.gfile.listdir(folder or ".") if tf.io.gfile.isdir(folder or ".") else []
    matches = [match for file in files if (match := first.fullmatch(file))]
    found = sorted({os.path.join(folder, match[1]) for match in matches})
    if not found:
        raise FileNotFoundError(f"No checkpoint {path!r}, nor one of ranks: {rank_path(path)!r}.")
    if len(found) > 1:
        raise FileNotFoundError(
            f"Checkpoints of several jobs are named {path!r}: {found}. Restore from one of "
            "them by its own path."
        )
    return found[0]


def _exists(path: str) -> bool:
    return bool(tf.io.gfile.exists(f"{path}.index"))


def _reader_of(path: str) -> Any:
    # Checkpoints first: ram:// takes the prefix of a folder's name for a folder.
    reader = tf.compat.v1.train.NewCheckpointReader if _exists(path) else tf.train.load_checkpoint
    return reader(path)


def check_path(path: str, name: str) -> None:
    """Raises ValueError if several ranks would save, or have saved, under one name."""
    rank, size = ranks()
    found = _RANK.search(prefix_in_the_end(path))
    if size > 1 and (found is None or found.groups() != (str(rank), str(size))):
        raise ValueError(
            f"Each of the {size} ranks saves the keys of {name!r} that it owns, into a checkpoint "
            f"of its own. Received: {path!r} on rank {rank}. Save to "
            "sok_lite.kv_variable.rank_path(path), on every rank."
        )


def places_of(path: str, name: str) -> list[PartPlace]:
    """Returns a variable's partitions in a checkpoint and in those of the other saving ranks.

    [] if the checkpoint does not have it. ValueError: a part is missing.
    """
    places = _places_in(path, name)
    if not places or places[0].facts is None or places[0].facts.num_ranks == 1:
        return places
    facts = places[0].facts
    rank, size = facts.rank, facts.num_ranks
    own = f".rank-{rank}-of-{size}"
    if own not in path:
        raise ValueError(
            f"{path!r} has the keys of {name!r} of rank {rank} of {size}, and its name does not "
            f"have {own!r}: so nobody knows where those of the others are. Give it the name that "
            "it was saved by."
        )
    for other in range(size):
        if other == rank:
            continue
        sibling = _RANK.sub(f".rank-{other}-of-{size}", path)
        found = _places_in(sibling, name) if _exists(sibling) else []
        if not found:
            raise ValueError(
                f"{path!r} has the keys of {name!r} of rank {rank} of {size}, and {sibling!r} of "
                f"rank {other} is missing. Restore where the checkpoints of all ranks are."
            )
        places += found
    return places


def names_in(path: str) -> list[str]:
    """Returns the names of variables in a checkpoint, without partition."""
    tensors = _reader_of(path).get_variable_to_shape_map()
    return sorted({match[1] for tensor in tensors if (match := _KEYS.fullmatch(tensor))})


def _places_in(path: str, name: str) -> list[PartPlace]:
    reader = _reader_of(path)
    part = re.compile(re.escape(name) + r"(?:/part_(\d+))?:0-keys")
    found = {
        match[1]: tensor.removesuffix("-keys")
        for tensor in reader.get_variable_to_shape_map()
        if (match := part.fullmatch(tensor))
    }
    if None in found:  # without partitions
        found = {None: found[None]}
    places = []
    for number in sorted(found, key=lambda number: int(number or 0)):
        place = PartPlace(path, reader, found[number], None)
        if place.has("facts"):
            place = place._replace(facts=facts_of(place.tensor("facts"), f"{name!r} in {path!r}"))
        places.append(place)
    if not places:
        return []
    facts = places[0].facts
    count = len(places) if facts is None else facts.num_partitions
    numbers = {int(number or 0) for number in found}
    missing = sorted(set(range(count)) - numbers)
    if missing:
        raise ValueError(
            f"{path!r} has not all partitions of {name!r}: {missing} of {count} are missing. Save "
            "all partitions together."
        )
    return places


def check_forms(
    places: list[PartPlace], key_type: tf.DType, dtype: tf.DType, dim: int, name: str
) -> None:
    """Raises ValueError if saved dtypes or shapes differ from a variable's."""
    expected = saved_dtypes(key_type, dtype)
    wanted = (dim, key_type.name, dtype.name)
    for place in places:
        keys, (values, shape) = place.form("keys")[0], place.form("values")
        has = (shape[-1] if len(shape) == 2 else None, keys.name, values.name)
        if has != wanted:
            raise ValueError(
                f"{place.path!r} does not fit {name!r}, which has {wanted} for (embedding_dim, "
                f"key_dtype, value_dtype). Received: {has}. Make the variable as it was."
            )
        if place.facts is None:
            continue
        for tensor, each in expected.items():
            if not place.has(tensor) or place.form(tensor)[0] != each:
                raise ValueError(
                    f"What was saved of {name!r} in {place.path!r} is corrupt: no {each.name} "
                    f"tensor {place.prefix}-{tensor}."
                )


class SavedContent(NamedTuple):
    """A variable as read."""

    content: Content
    is_delta: bool  # whether it changes another save
    saves: dict[int, tuple[int, int | None]]  # (save, base of a delta) by rank; {} from TFPlus
    deleted: np.ndarray  # (d,) removed keys


def read(places: list[PartPlace], table: EmbeddingTable, threshold: int, name: str) -> SavedContent:
    """Reads the saved keys of a variable that this rank owns."""
    whole = read_all(places, table.row_dtype, threshold, table.clock.read(), name)
    are_own = owns(table, *ranks())
    deleted = whole.deleted[are_own(whole.deleted)]
    return whole._replace(content=owned_by(whole.content, are_own), deleted=deleted)


def read_all(
    places: list[PartPlace], row_dtype: RowDtype, threshold: int, now: float, name: str
) -> SavedContent:
    """Reads the saved keys of a variable of all ranks.

    Args:
      threshold: times that a key must be seen to get a row.
      now: time for keys saved without one.

    Raises:
      ValueError: inconsistent files.
    """
    contents, deleted = [], []
    saves: dict[int, tuple[int, int | None]] = {}
    for place in places:
        whose = f"{name!r} in {place.path!r}"
        names = [tensor for tensor in _TENSORS if place.has(tensor)]
        tensors = {tensor: place.tensor(tensor) for tensor in names}
        contents.append(decode(tensors, place.facts, row_dtype, threshold, now, whose))
        deleted.append(tensors.get("delete_keys", tensors["keys"][:0]))
        if place.facts is None:
            continue
        save = (place.facts.save, place.facts.base)
        if saves.setdefault(place.facts.rank, save) != save:
            raise ValueError(f"What was saved of {whose} is corrupt: partitions of several saves.")
    content = concatenate(contents, repr(name))
    are_deltas = {place.is_delta for place in places}
    if len(are_deltas) > 1:
        raise ValueError(
            f"Some ranks have saved all of {name!r} in {places[0].path!r}, others what has "
            "changed. Restore what they have saved together."
        )
    return SavedContent(content, are_deltas.pop(), saves, np.concatenate(deleted))


_TENSORS = [
    name for name in saved_dtypes(tf.int64, tf.float32) if name not in ("init_table", "facts")
]
