"""The file formats of the command line, one module each.

A module has

  detect(path) -> bool               whether what is there looks like its format sources(path,
  **options)           a list of the tables there, each a `Source` of the engine write(path,
  sources, **options)    writes tables there

or the first two or the last one of them. Where it writes the texts of keys that a table keeps, it
says `HOLDS_TEXTS = True`. Where it writes a folder that the command line replaces and `detect` does
not look at all that is in it, it has

  others(path) -> list[str]          names of what is there and not of its format

Options are keyword arguments with annotations; the user gives them as `--from-option NAME=VALUE`
and `--to-option NAME=VALUE`. `write` makes a new file or folder: the command line puts it in place
when it is whole, unless the module says `REPLACES_ITSELF = True`. Packages that not everybody has
are imported when they are needed.
"""

import importlib
import os
from types import ModuleType

from sok_lite.cli.errors import WrongUse
from sok_lite.engine.files import manifest
from sok_lite.engine.files.disk import open_file

# Format name and module, in the order of detection.
FORMATS = {
    "sok_lite": "checkpoint",
    "sok": "sok",
    "hkv": "hkv",
    "npz": "npz",
    "parquet": "parquet",
    "safetensors": "safetensors",
    "csv": "csv",
    "keras": "keras_file",
    "tfra": "tfra_files",
    "tfra_tensorflow": "tfra_checkpoint",
    "tfplus": "tfplus",
}
# Format by file name ending, for writing.
_ENDINGS = {
    ".npz": "npz",
    ".parquet": "parquet",
    ".safetensors": "safetensors",
    ".csv": "csv",
    ".keras": "keras",
    ".h5": "keras",
}
_NPY = b"\x93NUMPY"


def format_module(name: str) -> ModuleType:
    """Returns the module of a format. WrongUse: unknown format."""
    if name == "torch":
        raise WrongUse(
            "format 'torch' is gone: write numpy.savez(path, keys=keys.numpy(), "
            "values=rows.numpy()) where PyTorch is, and take format npz"
        )
    if name not in FORMATS:
        raise WrongUse(f"there is no format {name!r}: take one of {', '.join(FORMATS)}")
    return importlib.import_module(f"sok_lite.cli.importers.{FORMATS[name]}")


def names_with(function: str) -> list[str]:
    """Returns the formats that can be read ("sources") or written ("write")."""
    return [name for name in FORMATS if hasattr(format_module(name), function)]


def format_of_ending(path: str) -> str | None:
    """Returns the format of a file name's ending, or None."""
    return _ENDINGS.get(os.path.splitext(path)[1].lower())


def detected_format(path: str) -> str:
    """Returns the first format that a path looks like.

    OSError: nothing is there, it cannot be read, or is an unfinished checkpoint. WrongUse: it looks
    like none.
    """
    with_sources = names_with("sources")
    for name in with_sources:
        if format_module(name).detect(path):
            return name
    if manifest.newest_in(path) is not None:  # as for those of sok.dump above
        raise WrongUse(manifest.explain_missing(path).removesuffix("."))
    if manifest.is_unfinished(path) or manifest.all_saves_in(path):
        raise FileNotFoundError(manifest.explain_missing(path))
    _check_is_no_other(path)
    raise WrongUse(
        f"{path} looks like none of the formats {', '.join(with_sources)}: say which one it is, "
        "with --from-format where the command has it"
    )


def _check_is_no_other(path: str) -> None:
    """Raises WrongUse for a known kind of file that cannot be read."""
    if os.path.isdir(path):
        return
    if format_of_ending(path) == "csv":
        raise WrongUse(
            f"{path} is a CSV file by its name, and those are written only: make an npz or Parquet "
            "file of it, with columns of keys and rows"
        )
    with open_file(path) as file:
        if file.read(len(_NPY)) == _NPY:
            raise WrongUse(
                f"{path} is one array of NumPy, and a table has two: write numpy.savez(FILE, "
                "keys=keys, values=rows), and give that .npz file"
            )
