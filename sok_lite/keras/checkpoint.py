"""`Checkpoint`: saves tables, dense weights and optimizers together, and resumes `fit`.

A checkpoint is a folder of `sok_lite.dump` with files of dense weights beside the tables. The dump
publishes its manifest last and in one piece, and the manifest names the dense files: a killed
process leaves a complete checkpoint or the previous one. An increment adds new dense files and
publishes a manifest that names them.
"""

import contextlib
import inspect
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.job import communicator
from sok_lite.bridge.keras import held, hooks
from sok_lite.bridge.saves import Saves
from sok_lite.comm.header import save_by
from sok_lite.engine.agreement import check_equal_on_all_ranks
from sok_lite.engine.dtypes import check_integer, is_integer
from sok_lite.engine.failure import together
from sok_lite.engine.files import manifest
from sok_lite.engine.files.disk import sync_path
from sok_lite.engine.files.dump import (
    BackgroundDump,
    dump,
    dump_in_background,
    folder_of,
    place_of,
    wait_for_pending,
)
from sok_lite.engine.files.load import load
from sok_lite.engine.files.store import Store, join_path, without_password
from sok_lite.keras.data_sharding import reshuffles
from sok_lite.keras.dense_states import DenseStates, learning_rates
from sok_lite.reports.text import counted

_log = logging.getLogger("sok_lite")
_DENSE = re.compile(r"dense-[\d-]+")
# The first file in each folder and the last to go; only marked folders are ever cleaned up.
_MARK = "of_sok_lite_keras_checkpoint"
# The link to the newest checkpoint.
_LATEST = "latest"
# The key of the training position in the `extra` of a dump.
_EXTRA = "sok_lite.keras"


class Restored(NamedTuple):
    """The training position of a checkpoint, in the folder `path`.

    Attributes:
      epoch: number of finished epochs, which is the next epoch as Keras counts, from 0.
      batch: number of finished batches of that epoch.
      steps: total number of trained batches.
    """

    path: str
    epoch: int
    batch: int
    steps: int

    def __repr__(self) -> str:
        path = without_password(self.path)
        at = f"epoch={self.epoch}, batch={self.batch}, steps={self.steps}"
        return f"Restored(path={path!r}, {at})"


class CheckpointPart:
    """A callback that saves tables, dense weights and optimizers together, and resumes `fit`.

    `fit` resumes from the newest checkpoint at `path`, in the same epoch and after the same batch,
    and reproduces an uninterrupted run bit for bit, unless a table evicts. It prints where it
    resumes, whether all epochs are done, and a learning rate that differs from the program's.
    Finished batches of the epoch are read and skipped, so pass `fit` the same batches in the same
    order: a tf.data.Dataset whose shuffle has a seed and reshuffle_each_iteration=False. With data
    in another order training continues on other batches; inside an epoch a warning says so.
    Learning rates, step counts, lookup times and the random state of Keras 3 resume too. Other
    callbacks do not, and the logs of an interrupted epoch average only its remaining batches. Only
    the first `fit` of a program resumes, and it ignores `initial_epoch`: a program that calls `fit`
    for each day asks `newest` which day comes next.

    It saves at the end of each epoch and, with `every`, in between. When any rank receives SIGTERM
    during `fit`, as when a machine is preempted, all ranks save after the step in which they learn
    of it, usually the next, and exit with status 143; `sok_lite.Autosave` does this for custom
    loops. Each checkpoint is a folder `step-N`, which `sok_lite.load` and `sok-lite` read. Where
    the file system has links, `latest` points to the newest complete one.

    On several ranks every rank must have it, with the same arguments and storage that all ranks
    see. Each rank writes its tables, rank 0 the dense weights; any number of ranks can restore
    them.

    Args:
      path: folder for checkpoints, local or mounted, or an address such as s3://bucket/ck. Other
        files there are never removed. An address has no `latest` link; a save is written to a local
        folder, uploaded, and counts once it is complete: docs/howto/object-stores.md.
      every: batches between saves, or a time by the clock of rank 0: "90s", "10min", "1h". None:
        after epochs only.
      keep: number of checkpoints to keep; a new complete one removes older ones.
      incremental: number of saves after a full one that write only changes, into its folder; True:
        all of them.
      background: whether tables are written while training continues, which needs memory for a
        copy. On several ranks the checkpoint exists from the end of the first step after all have
        written.
      on_error: what a failed save does (OSError, as when a disk is full or another process writes
        the same checkpoint, or MemoryError). "warn": the logger "sok_lite" reports it and training
        continues with the previous checkpoint; the third failure in a row raises. "raise": the
        first failure raises.

    Raises:
      TypeError, ValueError: an invalid argument, or `path` is a single save. A save raises
        FileExistsError where the files at `path` are not of a Checkpoint.
    """

    _of_every_rank = True

    model: Any
    params: dict[str, Any]

    def __init__(
        self,
        path: str | os.PathLike[str],
        every: int | str | None = None,
        *,
        keep: int = 3,
        incremental: int | bool = False,
        background: bool = False,
        on_error: str = "warn",
    ) -> None:
        super().__init__()
        self._saves = Saves([self._save], every, on_error)
        check_integer("keep", keep, 1)
        if not isinstance(incremental, bool) and not (is_integer(incremental) and incremental >= 0):
            raise ValueError(
                "`incremental` must be True, False, or how many increments follow a whole save. "
                f"Received: incremental={incremental!r}."
            )
        self._shown_path, self._store = place_of(path)
        self._path = self._store.given if self._store else os.path.abspath(self._shown_path)
        if _is_own_folder(self._path):
            raise ValueError(
                "`path` must be the folder that the saves of a Checkpoint are in. Received: path="
                f"{self._shown_path!r}, one of its saves. Give {os.path.dirname(self._path)!r}."
            )
        self._every, self._keep, self._in_background = every, int(keep), bool(background)
        self._on_error = on_error
        self._most_increments = sys.maxsize if incremental is True else int(incremental)
        self._increments = 0
        self._folder: str | None = None  # of the next increment
        self._found: Restored | None = None
        self._is_resumed = False
        self._at: tuple[int, int] = (0, 0)  # epoch and batch
        self._steps = 0
        self._epoch, self._last_batch = 0, -1
        self._skipped = 0  # batches of the first epoch to skip

    # ---------------------------------------------------------------- public methods

    def newest(self) -> Restored | None:
        """Returns the position of the newest checkpoint, or None. Every rank must call it.

        It restores nothing: the next `fit` resumes from there.

        Raises:
          OSError, ValueError: it cannot be read. RanksDifferError: ranks have different arguments.
        """
        comm = communicator()
        arguments = {
            name: getattr(self, f"_{name}")
            for name in ("every", "keep", "most_increments", "in_background", "on_error")
        }
        arguments["path"] = self._store.address if self._store else self._path
        check_equal_on_all_ranks(comm, arguments, "A Checkpoint")
        self.wait()
        try:  # what a `fit` that was stopped had begun
            wait_for_pending(comm, arguments["path"], arguments["path"])
        except OSError as error:
            _log.warning("The checkpoint before it is the newest: %s", error)

        numbers = together(comm, lambda: self._numbers() if comm.rank == 0 else [])
        number = int(comm.broadcast(np.array(numbers[-1:] or [-1], np.int64))[0])
        if number < 0:
            return None
        folder = join_path(self._path, _folder_name(number))

        def place() -> dict[str, Any]:
            with self._fetch(folder) as here:
                return _read_position(here)

        at = together(comm, place)
        return Restored(folder, at["epoch"], at["batch"], at["steps"])

    def _numbers(self) -> list[int]:
        """Returns the numbers of the whole checkpoints, ascending."""
        if self._store is None:
            names = list(map(os.path.basename, manifest.saves_in(self._path)))
        else:
            names = [name for name, is_marked in self._store.saves().items() if is_marked]
        return [int(match[1]) for match in map(manifest.SAVE.fullmatch, names) if match]

    @contextlib.contextmanager
    def _fetch(self, folder: str, with_dense: bool = False) -> Iterator[str]:
        """Yields a local folder with the newest checkpoint, without its tables."""
        if self._store is None:
            yield folder
            return

        def dense(found: manifest.Manifest) -> str:
            return str(found.extra[_EXTRA]["dense"])

        with self._store.download(lambda found: (), dense if with_dense else None) as (here, _):
            if os.path.basename(here) != folder.rpartition("/")[2]:
                raise ValueError(
                    f"{without_password(folder)} must be the newest checkpoint there. Received: "
                    f"{os.path.basename(here)}, which another process has saved meanwhile. Have "
                    "one job save there at a time."
                )
            yield here

    def restore(self, model: Any) -> Restored | None:
        """Restores a built and compiled model from the newest checkpoint. Every rank must call it.

        Returns its position, or None without one; then nothing has changed. `fit` restores by
        itself and skips finished batches. After `restore`, `fit` trains on all of its data, from
        its `initial_epoch`: for programs that train on new data each time. A warning says so if the
        checkpoint is inside an epoch.

        Raises:
          OSError, ValueError: it cannot be read, or belongs to another model. Nothing has changed.
          RanksDifferError: ranks have different arguments or models.
        """
        found = self.newest()
        if found is not None:
            rates = self._restore(model, found)
            if rates and communicator().rank == 0:
                _log.warning("%s", rates)
            if found.batch and communicator().rank == 0:
                _log.warning(
                    "%s was made after %s batches of epoch %s. fit after restore trains on all "
                    "batches that it is given: leave those out, or call fit without restore, which "
                    "does so.",
                    without_password(found.path),
                    f"{found.batch:,}",
                    found.epoch,
                )
        self._is_resumed = True
        return found

    def wait(self) -> None:
        """Waits for a background save, on all ranks. Every rank must call it.

        Raises:
          OSError: the save failed; the previous checkpoint is still there.
        """
        self._saves.wait()

    # ---------------------------------------------------------------- called by Keras

    def begin(self, model: Any) -> Restored | None:
        """Returns the checkpoint from which `fit` resumes, or None. Every rank must call it."""
        if self._is_resumed:
            return None
        self._found = self.newest()
        return self._found

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores the checkpoint that `begin` found."""
        if not held.kept_tables(self.model):
            raise ValueError(
                f"Checkpoint saves tables with the rest of a model. Received: {self.model.name!r}, "
                "which has none. Use BackupAndRestore of Keras."
            )
        found, self._found = self._found, None
        if found is None:
            newest = self.newest()
            if newest is not None and newest.steps > self._steps:
                raise ValueError(
                    f"{self._shown_path} has a checkpoint of {newest.steps:,} steps, and this "
                    f"training is at {self._steps:,}. Nothing was changed. Call restore(model) "
                    "before fit, or give another path."
                )
        else:
            self._check_batches(found)
            rates = self._restore(self.model, found)
            epochs = self.params.get("epochs")
            nothing = found.epoch >= (epochs or sys.maxsize)
            none = f"Nothing to train: epochs={epochs} are done." if nothing else ""
            if communicator().rank == 0:
                folder = os.path.join(self._shown_path, os.path.basename(found.path))
                print(
                    f"Resuming from {folder} ({_position_text(found)}).",
                    *filter(None, [none, rates]),
                    flush=True,
                )
        _skip_batches(self.model, 0 if found is None else found.batch)
        self._is_resumed = True
        self._last_batch = -1
        self._skipped = 0 if found is None else found.batch
        self._saves.open(self._steps, is_saved=found is not None)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remembers the epoch."""
        self._epoch, self._last_batch = epoch, -1

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Saves if it is time to."""
        most = self.params.get("steps")
        if most is not None:  # Keras counts all batches of the last call
            batch = min(batch, most - 1)
        if batch < self._skipped:
            self._last_batch = batch
            return
        self._skipped = 0
        self._steps += batch - self._last_batch
        is_last = batch + 1 == most
        self._last_batch = batch
        self._at = (self._epoch + 1, 0) if is_last else (self._epoch, batch + 1)
        self._saves.step(self._steps, is_save_due=not is_last)  # the end of the epoch saves

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        """Terminates a job that received SIGTERM during validation."""
        if self._saves.is_open:
            self._finish_epoch(self._epoch)
            self._saves.look()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves."""
        _skip_batches(self.model, 0)
        self._finish_epoch(epoch)
        self._skipped = 0
        self._saves.save(self._steps)

    def _finish_epoch(self, epoch: int) -> None:
        """Moves the position to the next epoch."""
        most = self.params.get("steps")
        # A callback may have stopped training inside the epoch: keep the rest for resuming.
        if not self.model.stop_training or most is None or self._last_batch + 1 >= most:
            self._at = (epoch + 1, 0)

    def on_train_end(self, logs: Any = None) -> None:
        """Waits for the last save, and terminates a job that received SIGTERM."""
        self._saves.leave(must_be_saved=True)
        self._saves.close()

    # ---------------------------------------------------------------- saving

    def _save(self, step: int) -> Any:
        """Saves, and returns the save in the background. Every rank must call it."""
        comm = communicator()
        call = save_by("Checkpoint")
        states = together(comm, lambda: DenseStates.of(self.model, "Checkpoint"), call)
        tables = [variable.table for variable in held.kept_tables(self.model)]
        is_increment = self._folder is not None and self._increments < self._most_increments
        is_increment &= not self._saves.has_failed
        folder = self._folder if is_increment else join_path(self._path, _folder_name(step))
        assert folder is not None
        here = folder_of(*place_of(folder), comm) if self._store else folder
        epoch, batch = self._at
        dense = f"dense-{step}-{epoch}-{batch}"  # unique to this checkpoint
        if not is_increment:
            together(comm, lambda: _remove_interrupted(self._store or self._path, comm.rank))

        def mark() -> None:
            _mark_folder(here, comm.rank)
            if comm.rank == 0 and self._store is not None:  # before other ranks write there
                Store(folder).put(here, _MARK)

        def prepare() -> None:
            together(comm, mark)
            together(comm, lambda: states.write(os.path.join(here, dense), comm.rank, comm.size))

        at = {"epoch": epoch, "batch": batch, "steps": step, "dense": dense}
        in_background = self._in_background and not self._saves.ends
        write: Callable[..., Any] = dump_in_background if in_background else dump
        writing = partial(
            write,
            folder,
            tables,
            comm,
            {_EXTRA: at},
            incremental=is_increment,
            prepare=prepare,
            published=None if self._store else partial(_link_newest, self._path),
            beside=[dense],
        )
        begun = on_device(tables[0].backend, writing)
        self._increments = self._increments + 1 if is_increment else 0
        self._folder = folder
        tidy = partial(_remove_old, self._path, self._keep, here, dense)
        if self._store is not None:
            tidy = partial(_remove_old_in_store, self._store, self._keep, here, dense)
        if begun is not None:
            return _BackgroundSave(begun, tidy)
        tidy()
        return None

    # ---------------------------------------------------------------- restoring

    def _check_batches(self, found: Restored) -> None:
        in_one = _batches_per_call(self.model)
        if found.batch % in_one:
            raise ValueError(
                f"The checkpoint at {without_password(found.path)} was made after {found.batch} "
                f"batches of an epoch, and this model takes {in_one} at a time. Compile it with "
                "the steps_per_execution that it had."
            )

    def _restore(self, model: Any, found: Restored) -> str:
        """Restores a model; returns a note on its learning rates, or ""."""
        comm = communicator()
        tables = [variable.table for variable in held.kept_tables(model)]
        states = together(comm, lambda: DenseStates.of(model, "Checkpoint"))
        names = sorted(table.name for table in tables)
        models = {"tables": names, "dense weights": states.kinds}
        check_equal_on_all_ranks(comm, models, "The model of a Checkpoint")

        def values() -> Any:
            with self._fetch(found.path, with_dense=True) as here:
                folder = os.path.join(here, _read_position(here)["dense"])
                return states.read(folder, comm.rank, comm.size)

        dense = together(comm, values)
        before = learning_rates(model)
        # The store has already fetched the newest save of its address.
        path = found.path if self._store is None else self._store.given
        on_device(tables[0].backend, lambda: load(path, tables, comm))
        states.assign(dense)
        self._steps = found.steps
        self._at = (found.epoch, found.batch)
        return " ".join(
            f"The learning rate {new:g} of the checkpoint replaces {old:g}."
            for old, new in zip(before, learning_rates(model), strict=True)
            if old is not None and new is not None and old != new
        )


class _BackgroundSave:
    """A background save, which removes old checkpoints once it is written."""

    def __init__(self, begun: BackgroundDump, tidy: Callable[[], None]) -> None:
        self._begun, self._remove_old = begun, tidy

    @property
    def done(self) -> bool:
        return self._begun.done

    def wait(self) -> None:
        self._begun.wait()
        self._remove_old()


# ---- folders: complete ones, and cleaning up ---------------------------------------------------


def _remove_interrupted(path: str | Store, rank: int) -> None:
    """Removes interrupted saves that no process is still writing."""
    if rank != 0:
        return
    if isinstance(path, Store):
        for name, is_marked in path.saves().items():
            if not is_marked and path.has(f"{name}/{_MARK}"):
                path.remove(name, last=_MARK)
        return
    os.makedirs(path, exist_ok=True)
    for name in filter(manifest.SAVE.fullmatch, os.listdir(path)):
        folder = os.path.join(path, name)
        if os.path.exists(os.path.join(folder, _MARK)) and not manifest.is_whole(folder):
            # Another process may have completed it meanwhile.
            manifest.remove_unless_locked(folder, partial(_empty_if_broken_off, folder))


def _empty_if_broken_off(folder: str) -> bool:
    return not manifest.is_whole(folder) and _empty(folder)


def _mark_folder(folder: str, rank: int) -> None:
    """Marks a locked folder as a `Checkpoint`'s. FileExistsError: it has other files."""
    if rank != 0:
        return
    names = os.listdir(folder)
    others = sorted(name for name in names if not _is_own_name(name))
    others = [] if _MARK in names else others
    if others or (manifest.is_whole(folder) and not _is_own_folder(folder)):
        what = repr(others[0]) if others else "a checkpoint of another program"
        raise FileExistsError(
            f"{folder} must be of sok_lite.keras.Checkpoint alone. Received: {what} in it. Give "
            "Checkpoint a path of its own."
        )
    if _MARK not in names:
        with open(os.path.join(folder, _MARK), "xb") as file:
            os.fsync(file.fileno())
        sync_path(folder)


def _is_own_name(name: str) -> bool:
    return bool(_DENSE.fullmatch(name)) or manifest.is_checkpoint_name(name)


def _remove_old(path: str, keep: int, folder: str, dense: str) -> None:
    """Removes old checkpoints, and dense weights that no manifest names.

    A file that cannot be removed stays: the new checkpoint is complete, and other ranks train on.
    """
    if communicator().rank != 0:
        return
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if _DENSE.fullmatch(name) and name != dense:
                shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
        for old in list(filter(_is_own_folder, manifest.saves_in(path)))[:-keep]:
            manifest.remove_unless_locked(old, partial(_empty, old))


def _remove_old_in_store(store: Store, keep: int, here: str, dense: str) -> None:
    """As `_remove_old` for a store; also removes all local saves but the last."""
    root, current = os.path.split(here)
    with contextlib.suppress(OSError):
        for name in filter(manifest.SAVE.fullmatch, os.listdir(root)):
            if name != current:
                folder = os.path.join(root, name)
                manifest.remove_unless_locked(folder, partial(_empty, folder))
        for name in filter(_DENSE.fullmatch, os.listdir(here)):
            if name != dense:
                shutil.rmtree(os.path.join(here, name), ignore_errors=True)
    if communicator().rank != 0:
        return
    try:
        inside = Store(join_path(store.given, current))
        for name in filter(_DENSE.fullmatch, inside.names()):
            if name != dense:
                inside.remove(name)
        marked = [name for name, is_marked in store.saves().items() if is_marked]
        for name in marked[:-keep]:
            if store.has(f"{name}/{_MARK}"):
                store.remove(name, first=manifest.NAME, last=_MARK)
    except OSError as error:
        _log.warning("What is too old stays there: %s", error)


def _link_newest(path: str) -> None:
    """Points the link `latest` to the newest complete checkpoint, atomically.

    A file of this name that is no such link is the user's and stays. On a file system without links
    there is none; readers find the newest in the folder itself.
    """
    link = os.path.join(path, _LATEST)
    try:
        newest = os.path.basename(manifest.saves_in(path)[-1])
        before = os.readlink(link) if os.path.lexists(link) else None
        if before == newest or not (before is None or manifest.SAVE.fullmatch(before)):
            return
        if os.path.islink(f"{link}.tmp"):  # left by a killed process
            os.unlink(f"{link}.tmp")
        os.symlink(newest, f"{link}.tmp")
        os.replace(f"{link}.tmp", link)
        sync_path(path)
    except OSError as error:
        _log.info("%s does not lead to the newest checkpoint: %s.", link, error)


def _empty(folder: str) -> bool:
    """Removes the files in a folder, except its mark."""
    with contextlib.suppress(FileNotFoundError):
        # The manifest first: an incomplete folder must not look like a checkpoint.
        os.unlink(os.path.join(folder, manifest.NAME))
    for name in os.listdir(folder):
        if os.path.isdir(os.path.join(folder, name)):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)
    return True


def _folder_name(number: int) -> str:
    """Returns the folder name of a checkpoint."""
    return f"step-{number:010d}"


def _is_own_folder(folder: str) -> bool:
    """Whether a `Checkpoint` of any version wrote the files in a folder."""
    try:
        return _EXTRA in manifest.read(folder).extra
    except (OSError, ValueError):
        return os.path.exists(os.path.join(folder, _MARK))


def _position_text(found: Restored) -> str:
    epochs = f"{counted(found.epoch, 'epoch')} complete"
    more = f", {counted(found.batch, 'batch', 'batches')} of the next" if found.batch else ""
    return f"step {found.steps:,}, {epochs}{more}"


def _read_position(folder: str) -> dict[str, Any]:
    """Returns the training position and the name of the dense weights."""
    extra = manifest.read(folder).extra
    if _EXTRA not in extra:
        raise ValueError(
            f"{folder} was not written by sok_lite.keras.Checkpoint. Give it a path of its own."
        )
    found: dict[str, Any] = extra[_EXTRA]
    return found


# ---- skipping finished batches -----------------------------------------------------------------


class _Skipping:
    """Replaces the training function of a model while batches are read and skipped."""

    def __init__(self, model: Any, count: int) -> None:
        self.original = model.train_function
        self._model, self._left, self._in_one = model, count, _batches_per_call(model)

    def __call__(self, iterator: Any) -> Any:
        if self._left <= 0:
            self._model.train_function = self.original
            return self.original(iterator)
        for _ in range(self._in_one):
            next(iterator)
        self._left -= self._in_one
        # Other callbacks expect a loss. Compiled metrics have no result before the first batch
        # builds them.
        return {"loss": 0.0}


def _batches_per_call(model: Any) -> int:
    """Returns the number of batches per call of the training function."""
    in_one = model.steps_per_execution  # a variable in tf_keras
    return int(in_one.numpy() if hasattr(in_one, "numpy") else in_one)


def _skip_batches(model: Any, count: int) -> None:
    """Makes a model skip exactly the first batches of its data."""
    if isinstance(model.train_function, _Skipping):  # left by an interrupted fit
        model.train_function = model.train_function.original
    if count:
        model.train_function = _Skipping(model, count)


def is_skipping(model: Any) -> bool:
    """Whether a model skipped its last batch."""
    return isinstance(model.train_function, _Skipping)


def _resume_in(arguments: dict[str, Any], epoch: int, batch: int) -> None:
    """Makes `fit` begin in an epoch; warns if its batches differ from those before the stop.

    A dataset that reshuffles has a new order for each iteration. How often Keras starts one per
    epoch depends on its version, so the order of a later epoch cannot be reproduced.

    Args:
      arguments: of `fit`, by name.
      epoch, batch: number of finished epochs, and of finished batches of the next.
    """
    first, arguments["initial_epoch"] = arguments.get("initial_epoch", 0), epoch
    data = arguments.get("x")
    if not batch or isinstance(data, Iterator):
        return
    if isinstance(data, tf.data.Dataset):
        is_one = arguments.get("steps_per_epoch") is not None  # one iterator for all epochs
        is_other = epoch > first and not is_one and reshuffles(data)
        instead = "Give its shuffle() a seed and reshuffle_each_iteration=False."
    else:
        is_other = bool(arguments.get("shuffle", True))
        instead = "Give fit a tf.data.Dataset, or shuffle=False."
    if is_other:
        _log.warning(
            "The data of fit, a %s, comes in another order than before the stop: of epoch %s some "
            "samples come twice and others not at all. %s",
            type(data).__name__,
            epoch,
            instead,
        )


def resume_fit(name: str, package: Any) -> None:
    """Makes `fit` begin with the epoch of the checkpoint that a `Checkpoint` resumes from."""
    hooks.around(package.Model, "fit", _resuming, package)


def _resuming(package: Any, call: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    bound = inspect.signature(package.Model.fit).bind(self, *args, **kwargs)
    named: Any = bound.arguments.get("callbacks")
    is_list = isinstance(named, package.callbacks.CallbackList)
    callbacks = named.callbacks if is_list else tf.nest.flatten(named or [])
    mine = [each for each in callbacks if isinstance(each, CheckpointPart)]
    if len(mine) > 1:
        raise ValueError(f"fit takes one Checkpoint. Received: {len(mine)}.")
    found = mine[0].begin(self) if mine else None
    if found is not None:
        _resume_in(bound.arguments, found.epoch, found.batch)
    try:
        return call(*bound.args, **bound.kwargs)
    finally:
        if mine:  # even after an error
            _skip_batches(self, 0)
            mine[0]._saves.close()
