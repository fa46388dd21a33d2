"""Paths of this machine, which Python opens, as opposed to those of TensorFlow's file systems."""

import os
import re

# An address, such as s3://bucket/rows; pathlib makes s3:/bucket/rows of it.
_ADDRESS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/|[^/]*://")
_OF_THIS_MACHINE = re.compile(r"file:(?://)?(?=/[^/]|/$)")


def plain_path(path: str | os.PathLike[str]) -> str:
    """Returns "file:///rows" as "/rows", and any other path as it is."""
    return _OF_THIS_MACHINE.sub("", os.fsdecode(path), count=1)


def is_address(path: str) -> bool:
    """Whether a path is an address, for TensorFlow's file systems."""
    return "://" in path


def local_path(path: str | os.PathLike[str], name: str = "path") -> str:
    """Returns a path of this machine; "file:///rows" is "/rows", as for TensorFlow.

    Args:
      path: of a file or folder. Write "./name:/rows" for a folder whose name ends in a colon.
      name: of the argument, for the error.

    Raises:
      ValueError: it is empty, or an address, which Python would take for the name of a folder.
    """
    given, local = os.fsdecode(path), plain_path(path)
    if not local or _ADDRESS.match(local):
        is_cut = local and not is_address(local)
        hint = " pathlib has taken a slash away: give the address as a str." if is_cut else ""
        raise ValueError(
            f"`{name}` must be in a folder of this machine, which may be a mounted one. Received: "
            f"{given!r}.{hint} Mount it, or use a local folder and copy that. Addresses are for "
            "dump, load, open_readonly, sk.Checkpoint, publish and what sok-lite reads; and for "
            "what goes by TensorFlow's file systems: model.save, export_serving, "
            "tf.train.Checkpoint."
        )
    return local
