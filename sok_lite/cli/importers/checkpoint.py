"""Our own checkpoints, in the format of docs/checkpoint_format.md."""

import os
from collections.abc import Sequence

from sok_lite.engine.files import manifest
from sok_lite.engine.files.disk import open_file
from sok_lite.engine.files.source import Source, checkpoint_sources
from sok_lite.engine.files.source_writer import write_checkpoint

# A new checkpoint replaces an old one atomically.
REPLACES_ITSELF = True
_BEGINNING = 1 << 12  # bytes of a manifest that contain its format


def detect(path: str) -> bool:
    """Whether the folder has one of our manifests, complete or not."""
    try:
        with open_file(os.path.join(path, manifest.NAME)) as file:
            return manifest.FORMAT.encode() in file.read(_BEGINNING)
    except (FileNotFoundError, NotADirectoryError):
        return False


def sources(path: str) -> list[Source]:
    return checkpoint_sources(path)


def write(path: str, sources: Sequence[Source], ranks: int = 1) -> None:
    """Writes tables as a checkpoint of `ranks` files per table."""
    write_checkpoint(path, sources, ranks)
