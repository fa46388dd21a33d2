"""One checkpoint of all ranks: rank 0 writes the dense variables, every rank its rows."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from sok_lite.bridge import job
from sok_lite.comm import Communicator
from sok_lite.comm.launch import launched_ranks
from sok_lite.dynamic_embedding.checkpoint_folder import WrittenFolders, folder_beside, opened
from sok_lite.dynamic_embedding.ranks import communicator
from sok_lite.dynamic_embedding.tables import HashTable
from sok_lite.engine.files.key_value_names import file_prefix


def write_together(
    what: str,
    prefix: str,
    tables: Iterable[HashTable],
    write: Callable[[], Any],
    written: WrittenFolders,
) -> Any:
    """Writes a checkpoint and the files of its variables. Every rank must call it.

    It returns when all ranks have written. If one fails, it raises on all of them.

    Args:
      what: writes it, for errors.
      prefix: of the checkpoint.
      tables: those that are in it.
      write: writes it with its files; called on rank 0.
      written: is told of it.

    Returns:
      What `write` gives; None on other ranks.

    Raises:
      ValueError: several ranks, and a variable without a `FileSystemSaver`; two of one name.
      RuntimeError: another rank has failed.
    """
    tables = list(tables)
    _check_names(what, tables)
    if launched_ranks() > 1:
        communicator(what)  # connects them if nobody has
    comm = job.other_ranks()
    with opened(folder_beside(prefix)):
        if comm is None:
            result = write()
        else:
            result = _on_all(comm, what, tables, write)
    if comm is None or comm.rank == 0:
        written.note(prefix)
    return result


def _on_all(
    comm: Communicator, what: str, tables: list[HashTable], write: Callable[[], Any]
) -> Any:
    result, failure = None, None
    try:
        _check_have_files(what, tables)
        if comm.rank == 0:
            result = write()
        else:
            # In a graph of TF1 as well tensors are numbers here.
            with tf.__internal__.eager_context.eager_mode():
                for table in tables:
                    table.files.write()
    except Exception as error:  # the others wait for this rank
        failure = error
    failed = comm.allgatherv(np.array([failure is not None])).rows
    if failure is not None:
        raise failure
    if failed.any():
        raise RuntimeError(
            f"{what}: the checkpoint is not complete, for rank {int(np.argmax(failed))} has failed "
            "to write its part. See its error."
        )
    return result


def _check_names(what: str, tables: Iterable[HashTable]) -> None:
    """Raises if two tables would have the same files."""
    names = Counter(file_prefix(table.table.name) for table in tables if table.files is not None)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ValueError(
            f"{what}: each variable with a FileSystemSaver needs a name of its own, for its files. "
            f"Received: several of {twice[0]!r}. Give `name` to each variable, or layer."
        )


def _check_have_files(what: str, tables: Iterable[HashTable]) -> None:
    without = [table.table.name for table in tables if table.files is None]
    if without:
        raise ValueError(
            f"{what} on several ranks needs a FileSystemSaver for every variable, for each rank "
            f"has rows of its own. Received: {', '.join(map(repr, without))} without one. Make it "
            "with kv_creator=de.CuckooHashTableCreator(saver=de.FileSystemSaver())."
        )
