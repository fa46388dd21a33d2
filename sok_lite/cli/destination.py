"""Where a command writes: old files stay until the new ones are complete."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from types import ModuleType

from sok_lite.cli.errors import WrongUse
from sok_lite.engine.files import atomic_write, manifest
from sok_lite.engine.files.disk import explain_full_disk
from sok_lite.engine.files.source import Source, columns_of
from sok_lite.engine.files.store import Store, is_in_store, make_folder, stores_folder


@contextlib.contextmanager
def checkpoint_at(path: str, module: ModuleType, is_forced: bool, *read: str) -> Iterator[str]:
    """Yields a folder for a new checkpoint, which moves or uploads to `path` at the end.

    Arguments and errors as for `check_destination`; `path` may be an address. OSError: the store
    cannot be reached.
    """
    if not is_in_store(path):
        check_destination(path, module, is_forced, *read)
        yield path
        return
    store = Store(path)
    names = store.names()
    if names and not is_forced:
        raise WrongUse(_is_there(store.address))
    for name in names:
        if name != manifest.NAME and not manifest.DATA_FOLDER.fullmatch(name):
            raise WrongUse(_has_others(store.address, name))
    store.check_is_ours()
    make_folder(stores_folder())
    with tempfile.TemporaryDirectory(dir=stores_folder()) as folder:
        yield folder
        found = manifest.read(folder)
        store.upload(folder, {file.split("/")[0] for file in found.files})
        store.check_has(found)
        store.mark(folder)
        store.sweep(found)


def check_destination(path: str, module: ModuleType, is_forced: bool, *read: str) -> None:
    """Raises WrongUse if a command must not write to a path.

    Args:
      is_forced: whether to permit replacing a file, or a folder of that format with nothing else in
        it. An empty folder may always be replaced.
    """
    inside = [each for each in read if _is_inside(each, path)]
    if inside:
        raise WrongUse(f"{path} cannot be replaced: {inside[0]}, which is read, is in it")
    if not os.path.lexists(path) or (os.path.isdir(path) and not os.listdir(path)):
        return
    if not is_forced:
        raise WrongUse(_is_there(path))
    if os.path.isdir(path):
        is_known = hasattr(module, "detect") and module.detect(path)
    else:
        is_known = os.path.isfile(path)
    if not is_known:
        raise WrongUse(f"{path} is not replaced, since it is nothing that this command writes")
    others = module.others(path) if os.path.isdir(path) and hasattr(module, "others") else []
    if others:
        raise WrongUse(_has_others(path, others[0]))


def _is_there(path: str) -> str:
    return f"{path} is there already: give another name, or --force to replace it"


def _has_others(path: str, name: str) -> str:
    return (
        f"{path} is not replaced, since there is something else in it: {name!r}. Remove that, or "
        "give another name"
    )


def _is_inside(path: str, folder: str) -> bool:
    path, folder = os.path.realpath(path), os.path.realpath(folder)
    return path != folder and os.path.commonpath([path, folder]) == folder


@contextlib.contextmanager
def in_place_of(path: str, module: ModuleType, sources: Sequence[Source] = ()) -> Iterator[str]:
    """Yields a path to write to, and moves it to `path` at the end; a failure leaves `path` as is.

    A module that replaces by itself gets `path`. An error of a full disk names the size of
    `sources`. OSError: it cannot be moved.
    """
    size = sum(each.num_keys * column.row_bytes for each in sources for column in columns_of(each))
    names = ", ".join(repr(each.name) for each in sources)
    of = f" of {names}, from {size:,} bytes of keys and rows" if sources else ""
    with explain_full_disk(path, f"the output{of}"):
        if getattr(module, "REPLACES_ITSELF", False):
            yield path
            return
        with atomic_write.replacing(path) as new:
            yield new
