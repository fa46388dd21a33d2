"""The names of files of keys and values, and the files of a folder that a variable is read from.

The name of a shard's files starts with its base, which is

    <variable>_mht_<i>of<n>_rank<r>_size<s>

the variable's name with `_` for each `/`, the shard i of the n shards of a process, from 1, and the
process r, from 0, of the s processes. All shards that one save writes have the same s: a group.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_SUFFIX = re.compile(r"_mht_(\d+)of(\d+)_rank(\d+)_size(\d+)")
# Files that a table of a variable writes by itself do not say of which process they are.
_NAME = re.compile(
    r"(?P<base>(?P<prefix>.+)_mht_\d+of\d+(?P<rank>_rank\d+_size\d+)?)-(keys|values)"
)
# What a base ends with, whether it says that or not.
_OF_SHARD = re.compile(r"_mht_\d+of\d+(_rank\d+_size\d+)?$")
_ENDINGS = ("-keys", "-values")


@dataclass(frozen=True)
class ShardPlace:
    """The position of a shard among those of a variable.

    Attributes:
      index: from 1 to num_shards.
      num_shards: of a process.
      rank: of the process, from 0.
      size: how many processes there are.
    """

    index: int = 1
    num_shards: int = 1
    rank: int = 0
    size: int = 1

    def base(self, name: str) -> str:
        """Returns what the names of the shard's files start with.

        Args:
          name: of the variable.

        Raises:
          ValueError: there is no such shard.
        """
        if not (1 <= self.index <= self.num_shards and 0 <= self.rank < self.size):
            raise ValueError(
                "A shard has an index from 1 to num_shards and a rank from 0 to size - 1. "
                f"Received: {self}."
            )
        shard = f"{self.index}of{self.num_shards}_rank{self.rank}_size{self.size}"
        return f"{file_prefix(name)}_mht_{shard}"


def bases_by_prefix(folder: str) -> dict[str, list[tuple[str, bool]]]:
    """Returns the bases of all files of keys and values of a folder, by `file_prefix`.

    Args:
      folder: where they are; it may be missing.

    Returns:
      In the order of the names, each base with whether it says of which process it is.
    """
    names = os.listdir(folder) if os.path.isdir(folder) else []
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    found = {(match["prefix"], match["base"], match["rank"] is not None) for match in matches}
    by_prefix: dict[str, list[tuple[str, bool]]] = {}
    for prefix, base, is_of_process in sorted(found):
        by_prefix.setdefault(prefix, []).append((base, is_of_process))
    return by_prefix


def group_sizes(folder: str, name: str) -> set[int]:
    """Returns the numbers of processes that wrote a variable's files, one for each save.

    Args:
      folder: where they are; it may be missing.
      name: of the variable.
    """
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return {place.size for place in _places(names, name)}


def bases_of_save(folder: str, names: Sequence[str]) -> list[str]:
    """Returns the bases of all files of one save, or of several, each of which is whole.

    Args:
      names: of variables, or of files.

    Raises:
      FileNotFoundError, ValueError: as of `find_shards`.
    """
    bases: list[str] = []
    for name in names:
        if os.path.isfile(os.path.join(folder, f"{name}-keys")) and not _OF_SHARD.search(name):
            bases.append(name)  # a program's own name of a whole table
            continue
        variable = _OF_SHARD.sub("", name)
        found = bases_by_prefix(folder).get(file_prefix(variable), [])
        if not found or any(is_of_process for _, is_of_process in found):
            bases += find_shards(folder, variable)
        else:
            bases += _of_one_save(folder, [base for base, _ in found])
    return list(dict.fromkeys(bases))


def _of_one_save(folder: str, bases: Sequence[str]) -> Sequence[str]:
    """Returns the files of one save by a table itself, which do not say of which process they are.

    Raises:
      FileNotFoundError: some are missing, or they are of several saves.
    """
    counts = {base.rpartition("of")[2] for base in bases}
    if counts != {str(len(bases))}:
        raise FileNotFoundError(
            f"{folder!r} does not hold the shards of one save: there are {', '.join(bases)}. Name "
            "the files to read, without load_entire_dir."
        )
    return bases


def find_shards(
    folder: str, name: str, size: int | None = None, rank: int | None = None
) -> list[str]:
    """Returns the bases of a variable's files in a folder, by rank and then by index.

    Args:
      folder: that has the files.
      name: of the variable.
      size: the number of processes that wrote the group; None: there must be one group only.
      rank: of one process, so that files of others may be missing; None: of all.

    Raises:
      FileNotFoundError: there is no such folder, no such group, or a shard of it is missing.
      ValueError: there are several groups, or files of the group that cannot be of one save.
    """
    return [place.base(name) for place in find_places(folder, name, size, rank)]


def find_places(
    folder: str, name: str, size: int | None = None, rank: int | None = None
) -> list[ShardPlace]:
    """Returns the places of a variable's files in a folder, by rank and then by index.

    Args:
      folder: where they are.
      name: of the variable.
      size: which group, by the number of processes that wrote it; None: there must be one only.
      rank: of which process, and those of others need not be there; None: of all.

    Raises:
      FileNotFoundError: there is no such folder, no such group, or a shard of it is missing.
      ValueError: there are several groups, or files of the group that cannot be of one save.
    """
    if not os.path.isdir(folder):
        raise FileNotFoundError(
            f"There is no folder {folder!r} to read variable {name!r} from. Name the folder that "
            "holds its files."
        )
    groups: dict[int, set[ShardPlace]] = {}
    for place in _places(os.listdir(folder), name):
        groups.setdefault(place.size, set()).add(place)
    if not groups:
        raise FileNotFoundError(
            f"{folder!r} holds no files of variable {name!r}. Expected some with names such as "
            f"{ShardPlace().base(name)}-keys. Name the files if they have other names."
        )
    if size is None:
        if len(groups) > 1:
            raise ValueError(
                f"{folder!r} holds several groups of files of variable {name!r}, from jobs of "
                f"different sizes: {_describe(groups)}. Name the size of one of them, or remove "
                "the files of the others."
            )
        (size,) = groups
    if size not in groups:
        raise FileNotFoundError(
            f"{folder!r} holds no files of variable {name!r} from {size} processes. It has "
            f"{_describe(groups)}. Name one of these."
        )
    return _whole_group(folder, name, size, groups[size], rank)


def file_prefix(name: str) -> str:
    """Returns what the names of all files of a variable start with."""
    return name.replace("/", "_")


def _places(file_names: Iterable[str], name: str) -> Iterable[ShardPlace]:
    """Yields the place of each file of the variable."""
    start = file_prefix(name)
    for file_name in file_names:
        for ending in _ENDINGS:
            if file_name.startswith(start) and file_name.endswith(ending):
                found = _SUFFIX.fullmatch(file_name[len(start) : -len(ending)])
                if found:
                    yield ShardPlace(*map(int, found.groups()))


def _describe(groups: dict[int, set[ShardPlace]]) -> str:
    return ", ".join(
        f"size {size} with {len(places)} shard{'s' * (len(places) > 1)} of "
        f"{len({place.rank for place in places})} of its ranks"
        for size, places in sorted(groups.items())
    )


def _whole_group(
    folder: str, name: str, size: int, places: set[ShardPlace], only: int | None
) -> list[ShardPlace]:
    """Returns the places of a group in order, if they are all there and of one save.

    Args:
      only: the rank that is looked at; None: all.
    """
    ranks = range(size) if only is None else [only]
    places = {place for place in places if only in (None, place.rank)}
    expected: list[ShardPlace] = []
    for rank in ranks:
        counts = sorted({place.num_shards for place in places if place.rank == rank})
        if len(counts) > 1:
            raise ValueError(
                f"{folder!r} holds files of variable {name!r} of rank {rank} of {size} from two "
                f"saves: one of {counts[0]} and one of {counts[1]} shards. Remove those of one of "
                "them, or name the files."
            )
        # One of a rank that wrote nothing, to have a name for what is missing.
        num_shards = counts[0] if counts else 1
        expected += [
            ShardPlace(index, num_shards, rank, size) for index in range(1, num_shards + 1)
        ]
    missing = [place for place in expected if place not in places]
    if missing:
        raise FileNotFoundError(
            f"{folder!r} lacks {len(missing)} of the {len(expected)} shards of variable {name!r} "
            f"that {size} processes wrote. The first: {missing[0].base(name)}-keys. Bring them "
            "all, or name the files that are enough."
        )
    foreign = places.difference(expected)
    if foreign:
        raise ValueError(
            f"{folder!r} holds files of variable {name!r} of no shard that there can be. The "
            f"first: {min(map(str, foreign))}. Remove them, or name the files to read."
        )
    return expected
