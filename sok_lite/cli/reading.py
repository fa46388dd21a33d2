"""Opens tables of any format for a command."""

import os
from collections.abc import Sequence
from typing import Any

from sok_lite.cli.errors import WrongUse
from sok_lite.cli.importers import detected_format, format_module, names_with
from sok_lite.cli.named import check_opens
from sok_lite.cli.options import options_for
from sok_lite.engine.files import manifest
from sok_lite.engine.files.manifest import Manifest
from sok_lite.engine.files.source import JoinedSource, Source

OWN = "sok_lite"


def format_of(path: str, name: str | None = None) -> str:
    """Returns the format to read a path as: the user's `name`, or else as detected.

    OSError: nothing is there, or a pipe or device. WrongUse: an unknown or undetected format.
    """
    if not os.path.isdir(path):
        check_opens(path)
    if name is None:
        # If nothing fits a folder without a manifest, this error says what is expected.
        return detected_format(path)
    if not hasattr(format_module(name), "sources"):
        raise WrongUse(
            f"format {name!r} cannot be read: take one of {_list(names_with('sources'))}"
        )
    return name


def open_sources(path: str, name: str | None = None, options: Sequence[str] = ()) -> list[Source]:
    """Returns the tables at a path of a format (None: detect it), with options such as "dim=8".

    OSError, ValueError: they cannot be read. WrongUse: an unknown format, or an invalid option.
    """
    name = format_of(path, name)
    function = format_module(name).sources
    sources: list[Source] = function(path, **options_for(function, options, name))
    return sources


def chosen(sources: Sequence[Source], names: Sequence[str], path: str) -> list[Source]:
    """Returns the tables of some names, or all without names. WrongUse: no such table."""
    by_name = {source.name: source for source in sources}
    for name in names:
        if name not in by_name:
            raise WrongUse(f"{path} has no table {name!r}; it has: {_list(map(repr, by_name))}")
    return [by_name[name] for name in names] if names else list(sources)


# From `sok_lite.keras.Checkpoint`: names files of dense weights beside the tables.
KERAS_EXTRA = "sok_lite.keras"


def own_extra(path: str, to: str) -> dict[str, Any]:
    """Returns what the caller of the dump added to our checkpoint, for a new one at `to`.

    Only in the same place are there the files of dense weights that it names.
    """
    if format_of(path) != OWN:
        return {}
    extra = manifest.read(path).extra
    if os.path.realpath(path) == os.path.realpath(to):
        return extra
    return {name: value for name, value in extra.items() if name != KERAS_EXTRA}


def own_manifest(path: str) -> Manifest | None:
    """Returns the manifest of a checkpoint; None for other formats."""
    return manifest.read(path) if format_of(path) == OWN else None


def num_texts(source: Source, found: Manifest | None) -> int:
    """Returns the number of strings that a table keeps, from its manifest or else by reading."""
    if found is None:
        return len(source.texts())
    shards = found.tables[source.name].shards
    return sum(shard.texts.keys for shard in shards if shard.texts is not None)


def own_ranks(path: str) -> int:
    """Returns the number of ranks of a checkpoint; 1 for other formats."""
    return manifest.read(path).ranks if format_of(path) == OWN else 1


def keys_of_ranks(sources: Sequence[Source]) -> dict[str, tuple[int, ...]]:
    """Returns the number of keys per writing rank, for tables that state it."""
    joined = (each for each in sources if isinstance(each, JoinedSource))
    return {each.name: each.keys_of_parts for each in joined}


def _list(names: Any) -> str:
    return ", ".join(names) or "none"
