"""A table in checkpoints: one object for all variables over it, which saves and restores.

A full save gets a number, and the table remembers its base. So it can save a delta of all changes
since, and rejects a delta of another save.
"""

import secrets
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from sok_lite.bridge import checkpoint, job
from sok_lite.bridge.table_call import array_call
from sok_lite.bridge.type_spec import alive
from sok_lite.engine.foreign_keys import warn_of_foreign_keys
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.table.content import select
from sok_lite.engine.table.locking import with_lock
from sok_lite.engine.table.restore import restore
from sok_lite.kv_variable.saved_files import (
    PartPlace,
    SavedContent,
    check_forms,
    places_of,
    ranks,
    read,
)
from sok_lite.kv_variable.saved_tensors import Facts, apply_delta, as_of_table, copy_content, encode
from sok_lite.kv_variable.share import Share


class Base(NamedTuple):
    """The full save that a table's changes are relative to."""

    saves: Mapping[int, int]  # its numbers, by saving rank
    num_ranks: int  # number of saving ranks
    number: int  # of the last lookup before it
    seen: np.ndarray  # (n,) keys of that lookup
    changed: np.ndarray  # (n,) keys that a restored delta changed
    removed: np.ndarray  # (n,) keys that it removed
    is_logged: bool  # whether removed keys are logged


class SavedTable(tf.__internal__.tracking.Trackable):
    """A table as checkpoints know it, once for all variables over it.

    Args:
      num_partitions: of the variable; None: not partitioned.

    Attributes:
      count: number of partitions, 1 without any.
      base: the full save that changes are relative to, or None.
      handles: the resources of its variables.
      made: the results for the last saver: a weak reference to its file name, and results by name.
    """

    def __init__(self, table: EmbeddingTable, name: str, num_partitions: int | None = None) -> None:
        self.table, self.name = table, name
        self.key_type = tf.as_dtype(table.key_dtype.name)
        self.dtype = tf.as_dtype(table.row_dtype.name)
        self.count = num_partitions or 1
        self._is_partitioned = num_partitions is not None
        self.base: Base | None = None
        self.handles: list[tf.Tensor] = []
        self.made: tuple[Any, dict[Any, Any]] | None = None

    @property
    def dimension(self) -> int:
        """Length of a row."""
        return self.table.dim

    # ---------------------------------------------------------------- tf.train.Checkpoint

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return checkpoint.serialized(self)

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        restored, whole = checkpoint.restored(self, restored_tensors), weakref.ref(self)

        def forget(table: EmbeddingTable) -> None:
            alive(whole).base = None

        with tf.control_dependencies([restored]):
            done = array_call(self, f"The restore of {self.name!r}", forget)
        return tf.no_op() if tf.executing_eagerly() else self.mark_initialized(self.handles, done)

    def mark_initialized(self, handles: Sequence[tf.Tensor], after: Any) -> Any:
        """Returns the operation that marks variables as initialized in a session."""
        with tf.control_dependencies([after]):
            empty = tf.zeros([0, self.dimension], self.dtype)
            return tf.group(
                *(tf.raw_ops.AssignVariableOp(resource=handle, value=empty) for handle in handles)
            )

    # ---------------------------------------------------------------- tf.compat.v1.train.Saver

    def saved(
        self, shares: Sequence[Share], mode: int, is_full: bool, is_logged: bool
    ) -> list[dict[str, Any]]:
        """Returns the tensors of parts of the table, by name. The caller holds the table's lock.

        Args:
          mode: 1 for training, 0 for serving.
          is_full: whether to save all keys, or changes since the last full save.
          is_logged: whether a delta may follow.

        Raises:
          ValueError: a delta without a full save.
        """
        table, (rank, num_ranks) = self.table, ranks()
        comm = job.other_ranks()
        if comm is not None:  # a restore rejects keys that their owners have too
            warn_of_foreign_keys([table], comm)
        content, save, base, deleted = (
            copy_content(table),
            secrets.randbits(64),
            None,
            _no_keys(table),
        )
        if is_full:
            self._begin({rank: save}, num_ranks, is_logged)
        else:
            last = self._base_of_delta(rank, num_ranks)
            base = last.saves[rank]
            host = table.backend.to_host
            keys = np.union1d(host(table.changed_since(last.number)), last.changed)
            gone = np.union1d(host(table.removed_since(last.number)), last.removed)
            deleted = np.setdiff1d(gone, content.keys)
            everything = np.ones(content.pending_keys.size, bool)
            content = select(content, np.isin(content.keys, keys), everything)
        return [
            encode(
                content,
                Facts(share.number, share.count, rank, num_ranks, 0, save, base, mode),
                share,
                deleted,
                table.row_dtype,
            )
            for share in shares
        ]

    def _base_of_delta(self, rank: int, num_ranks: int) -> Base:
        last = self.base
        if last is None or not last.is_logged or last.num_ranks != num_ranks:
            raise ValueError(
                f"A delta of {self.name!r} changes a full save, and there is none that this table "
                "goes on from and after which removed keys were noted. Call enable_delta_export() "
                "before the Saver is made, and save in full first, on as many ranks."
            )
        if last.number > self.table.num_lookups:
            raise ValueError(
                f"The lookups of {self.name!r} have been numbered anew since its full save. Save "
                "in full."
            )
        return last

    def _begin(
        self,
        saves: Mapping[int, int],
        num_ranks: int,
        is_logged: bool,
        changed_keys: np.ndarray | None = None,
        removed_keys: np.ndarray | None = None,
    ) -> None:
        """Sets the base, and what has changed since."""
        table, no_keys = self.table, _no_keys(self.table)
        if is_logged:
            table.log_removals()
        number = table.num_lookups
        seen = table.backend.to_host(table.changed_since(number))
        if is_logged:
            table.forget_removals(before=number)
        changed_keys = no_keys if changed_keys is None else changed_keys
        removed_keys = no_keys if removed_keys is None else removed_keys
        self.base = Base(saves, num_ranks, number, seen, changed_keys, removed_keys, is_logged)

    def prefix(self, name: str, share: Share) -> str:
        """Returns the prefix of a partition's tensors, of a variable named `name` in the file."""
        return f"{name}/part_{share.number}:0" if self._is_partitioned else f"{name}:0"

    def place(self, path: str, name: str) -> str:
        """Returns the name of a tensor of key type that a checkpoint has, or should have, of a
        variable.

        ValueError: it does not match, parts are missing, or it is a delta of another save:
        everything that can be known before anything, other variables included, is restored.
        """
        places = self._places(path, name)
        if not places:
            return f"{self.prefix(name, Share())}-keys"
        if any(place.is_delta for place in places):
            self._check_base(read(places, self.table, self._threshold, name), path)
        # An empty one, except from TFPlus.
        tensor = "keys" if places[0].facts is None else "delete_keys"
        return f"{places[0].prefix}-{tensor}"

    def _places(self, path: str, name: str) -> list[PartPlace]:
        places = places_of(path, name)
        check_forms(places, self.key_type, self.dtype, self.dimension, name)
        return places

    def restore(self, path: str, name: str, is_logged: bool) -> None:
        """Restores a variable's save into the table.

        Args:
          is_logged: whether a delta may follow.

        Raises:
          ValueError: the save does not match, is corrupt, or is a delta of another save. Nothing
            has changed.
        """
        what = read(self._places(path, name), self.table, self._threshold, name)
        with_lock(self.table, lambda: self._restore(what, path, is_logged))

    @property
    def _threshold(self) -> int:
        table: Any = self.table
        return int(table.options.enter_threshold)

    def _restore(self, what: SavedContent, path: str, is_logged: bool) -> None:
        num_ranks = max(len(what.saves), 1)
        if not what.is_delta:
            restore(self.table, as_of_table(what.content))
            self.base = None
            if what.saves:
                saves = {rank: save for rank, (save, _) in what.saves.items()}
                self._begin(saves, num_ranks, is_logged)
            return
        last = self.base
        self._check_base(what, path)
        known = apply_delta(copy_content(self.table), what.content, what.deleted, repr(self.name))
        restore(self.table, as_of_table(known))
        self.base = None
        if last is not None and what.saves:
            self._begin(last.saves, num_ranks, is_logged, what.content.keys, what.deleted)

    def _check_base(self, what: SavedContent, path: str) -> None:
        """Raises ValueError if a delta (not TFPlus', which name none) changes another save."""
        if not what.saves:
            return
        last, table = self.base, self.table
        bases = {rank: base for rank, (_, base) in what.saves.items()}
        if last is None or any(bases.get(rank) != save for rank, save in last.saves.items()):
            raise ValueError(
                f"{path!r} has what changed in {self.name!r} since a full save, and the table does "
                "not go on from that one. Restore the full save first, then this."
            )
        touched = np.setdiff1d(table.backend.to_host(table.changed_since(last.number)), last.seen)
        touched = np.union1d(touched, last.changed)
        others = np.setdiff1d(touched, np.union1d(what.content.keys, what.deleted))
        if others.size:
            raise ValueError(
                f"{path!r} has what changed in {self.name!r} since a full save, and {others.size:,}"
                " other keys of the table have changed since. Restore the full save first, then "
                "this."
            )


def _no_keys(table: EmbeddingTable) -> np.ndarray:
    return np.empty(0, np.dtype(table.key_dtype.name))
