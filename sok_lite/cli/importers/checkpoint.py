"""Checkpoints of ours; docs/checkpoint_format.md has their format."""

import os
from collections.abc import Sequence

from sok_lite.engine.files import manifest
from sok_lite.engine.files.rewriting import write_checkpoint
from sok_lite.engine.files.shard import open_file
from sok_lite.engine.files.source import Source, checkpoint_sources

# A checkpoint takes the place of another in one piece.
REPLACES_ITSELF = True
_BEGINNING = 1 << 12  # bytes in which a manifest says its format


def detect(path: str) -> bool:
    """Returns whether the folder has a manifest of ours, whole or not."""
    try:
        with open_file(os.path.join(path, manifest.NAME)) as file:
            return manifest.FORMAT.encode() in file.read(_BEGINNING)
    except (FileNotFoundError, NotADirectoryError):
        return False


def sources(path: str) -> list[Source]:
    """Returns the tables of a checkpoint."""
    return checkpoint_sources(path)


def write(path: str, sources: Sequence[Source], ranks: int = 1) -> None:
    """Writes tables as a checkpoint.

    Args:
      ranks: how many files each table has.
    """
    write_checkpoint(path, sources, ranks)
