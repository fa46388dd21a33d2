"""`publish`: exported models in numbered folders, which servers load by themselves."""

import os
import shutil
from typing import Any

import numpy as np

from sok_lite.bridge import job
from sok_lite.bridge.serving.function import export_serving
from sok_lite.bridge.serving.together import Ranks
from sok_lite.engine.files.lock import Lock
from sok_lite.engine.files.store import Store, is_in_store, join_path, make_folder
from sok_lite.engine.files.versions import (
    MARK,
    check_keep,
    check_latest,
    link_latest,
    lock_versions,
    remove_all,
    remove_old,
    remove_old_at,
    versions_at,
    versions_in,
)
from sok_lite.engine.local_path import local_path


def publish(
    model_or_fn: Any,
    folder: str | os.PathLike[str],
    keep: int | None = 3,
    signature: Any = None,
    *,
    cutoff: float | None = None,
    quantize: str | None = None,
) -> str:
    """Exports a model as the next version in a folder, for servers that serve the newest.

    It writes `export_serving`'s files to `folder/N`, with N above all numbers there, as TensorFlow
    Serving expects in its `--model_base_path`. The version gets its number when complete. Then the
    link `latest` is set to it, and all but the newest `keep` are removed. If anything fails or ends
    the process before, the folder is unchanged, and the next call removes what is left. `rollback`
    returns to an older version.

    At an address, such as gs://bucket/models, a version exists once its `saved_model.pb` is there,
    which is uploaded last; there is no link `latest`.

    With several ranks every rank must call it, with the same arguments; rank 0 writes.

    Args:
      model_or_fn, signature, cutoff, quantize: as in `export_serving`.
      folder: created if missing; on this machine, mounted, or an address that fsspec supports, to
        which one job publishes at a time.
      keep: number of versions to keep; None: all.

    Returns:
      The path of the version, on all ranks.

    Raises:
      TypeError, ValueError, NotImplementedError, RuntimeError: as `export_serving`; or `keep` is
        not a number above 0, or there is no package for the address.
      BlockingIOError: another process publishes there; with several ranks an OSError.
      OSError: it cannot be written.

    Examples:
      >>> ids = keras.Input([2], dtype="int64")
      >>> model = keras.Model(ids, sk.Embedding(sk.Table("item", 2, "ones"), "sum")(ids))
      >>> trained = model(tf.constant([[7, 9]], tf.int64), training=True)
      >>> [sok_lite.publish(model, "models/ctr")[-1] for _ in range(3)]
      ['1', '2', '3']
    """
    ranks = Ranks(job.other_ranks())
    locks: list[Lock] = []
    path, number = "", 0
    store: Store | None = None
    try:
        with ranks.together():
            check_keep(keep)
            if is_in_store(folder):
                store = Store(folder, "folder")
            # The upload is written here.
            path = store.staging(0, 1) if store else os.path.abspath(local_path(folder, "folder"))
            if ranks.is_first:
                if store is not None:
                    make_folder(path)
                os.makedirs(path, exist_ok=True)
                locks.append(lock_versions(path, store.address if store else None))
                check_latest(path)
                if store is not None:  # left by a killed process
                    remove_all(path)
                found = versions_in(path) if store is None else versions_at(store)
                number = found.next
        if ranks.comm is not None:
            number = int(ranks.comm.broadcast(np.array([number], np.int64))[0])
        version = os.path.join(path, str(number))
        export_serving(model_or_fn, version, signature, cutoff=cutoff, quantize=quantize)
        with ranks.together():
            if ranks.is_first and store is not None:
                _upload(version, store, number)
                remove_old_at(store, keep)
            elif ranks.is_first:
                link_latest(path, number)
                remove_old(path, keep)
    finally:
        for lock in locks:
            lock.release()
    return version if store is None else join_path(store.given, str(number))


def _upload(version: str, store: Store, number: int) -> None:
    """Uploads a version to its address, and removes it here."""
    try:
        there = Store(join_path(store.given, str(number)))
        folders = [each.name for each in os.scandir(version) if each.is_dir()]
        there.upload(version, folders, last=MARK)
        there.mark(version, last=MARK)
    finally:
        shutil.rmtree(version, ignore_errors=True)
