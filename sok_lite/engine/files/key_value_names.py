"""Names of TFRA's files of keys and values, and the search for those of a variable in a folder.

The file names of a shard begin with its base,

    <variable>_mht_<i>of<n>_rank<r>_size<s>

the variable's name with `_` for `/`, shard i of n of a process, from 1, and process r of s, from 0.
All shards of one save have the same s: a group.
"""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_SUFFIX = re.compile(r"_mht_(\d+)of(\d+)_rank(\d+)_size(\d+)")
# Files that a variable's table writes itself have no rank in their names.
_NAME = re.compile(
    r"(?P<base>(?P<prefix>.+)_mht_\d+of\d+(?P<rank>_rank\d+_size\d+)?)-(keys|values)"
)
# The suffix of a base, with or without a rank.
_ANY_SUFFIX = re.compile(r"_mht_\d+of\d+(_rank\d+_size\d+)?$")
_ENDINGS = ("-keys", "-values")


@dataclass(frozen=True)
class ShardPlace:
    """The position of a shard among those of a variable.

    Attributes:
      index: from 1 to num_shards, the number of shards of the process.
      rank: of the process, from 0.
      size: number of processes.
    """

    index: int = 1
    num_shards: int = 1
    rank: int = 0
    size: int = 1

    def base(self, name: str) -> str:
        """Returns the base of the file names, for a variable's name. ValueError: no such shard."""
        if not (1 <= self.index <= self.num_shards and 0 <= self.rank < self.size):
            raise ValueError(
                "A shard has an index from 1 to num_shards and a rank from 0 to size - 1. "
                f"Received: {self}."
            )
        shard = f"{self.index}of{self.num_shards}_rank{self.rank}_size{self.size}"
        return f"{file_prefix(name)}_mht_{shard}"


def bases_by_prefix(folder: str) -> dict[str, list[tuple[str, bool]]]:
    """Returns the bases of all shards in a folder, by `file_prefix`, in the order of the names.

    Args:
      folder: may be missing.

    Returns:
      Lists of (base, whether it has a rank).
    """
    names = os.listdir(folder) if os.path.isdir(folder) else []
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    found = {(match["prefix"], match["base"], match["rank"] is not None) for match in matches}
    by_prefix: dict[str, list[tuple[str, bool]]] = {}
    for prefix, base, has_rank in sorted(found):
        by_prefix.setdefault(prefix, []).append((base, has_rank))
    return by_prefix


def group_sizes(folder: str, name: str) -> set[int]:
    """Returns the sizes of all groups of a variable's files. The folder may be missing."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return {place.size for place in _places(names, name)}


def bases_of_save(folder: str, names: Sequence[str]) -> list[str]:
    """Returns the bases of complete saves.

    Args:
      names: of variables, or of files.

    Raises:
      FileNotFoundError, ValueError: as `find_shards`.
    """
    bases: list[str] = []
    for name in names:
        if os.path.isfile(os.path.join(folder, f"{name}-keys")) and not _ANY_SUFFIX.search(name):
            bases.append(name)  # a file name that the program chose
            continue
        variable = _ANY_SUFFIX.sub("", name)
        found = bases_by_prefix(folder).get(file_prefix(variable), [])
        if not found or any(has_rank for _, has_rank in found):
            bases += find_shards(folder, variable)
            continue
        without_rank = [base for base, _ in found]
        counts = {base.rpartition("of")[2] for base in without_rank}
        if counts != {str(len(without_rank))}:
            raise FileNotFoundError(
                f"{folder!r} does not hold the shards of one save: there are "
                f"{', '.join(without_rank)}. Name the files to read, without load_entire_dir."
            )
        bases += without_rank
    return list(dict.fromkeys(bases))


def find_shards(
    folder: str, name: str, size: int | None = None, rank: int | None = None
) -> list[str]:
    """Returns the bases of a variable's shards. Arguments and errors are those of `find_places`."""
    return [place.base(name) for place in find_places(folder, name, size, rank)]


def find_places(
    folder: str, name: str, size: int | None = None, rank: int | None = None
) -> list[ShardPlace]:
    """Returns the places of a variable's shards in a folder, by rank, then by index.

    Args:
      name: of the variable.
      size: of the group; None: there must be only one.
      rank: of one process, so that files of others may be missing; None: all.

    Raises:
      FileNotFoundError: the folder, the group, or a shard of it is missing.
      ValueError: there are several groups, or files of two saves in the group.
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
    """Returns a variable's name as it is in file names."""
    return name.replace("/", "_")


def _places(file_names: Iterable[str], name: str) -> Iterable[ShardPlace]:
    """Yields the places of a variable's files, those of keys and those of values."""
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
    """Returns the places of a group in order, after checking that it is one complete save.

    Args:
      only: the one rank to check; None: all.
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
        # Of a rank without files report one shard as missing.
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
