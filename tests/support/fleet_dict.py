"""What a table of a fleet holds, in plain Python: initial values, pending counts, last lookups."""

import functools

import numpy as np

from sok_lite.engine.dtypes import bfloat16_to_float32, float32_to_bfloat16
from sok_lite.engine.table.base import table_seed
from tests.support import reference_initializer
from tests.support.reference import DictTable, drawn


class FleetDict(DictTable):
    """A table in plain Python, of whose evictions it is told.

    Attributes:
      now: number of the last lookup.
      seen: key -> number of the lookup that saw it last.
      pending: key without a row -> [count, number of the last lookup].
      counts: of the table's statistics, but for what was found: updates find as well.
    """

    def __init__(self, kind, name):
        super().__init__(kind.dim, functools.cache(self._first_row))
        self.kind, self.seed = kind, table_seed(0, name)
        self.threshold = kind.options.get("enter_threshold", 0)
        self.is_full_once = kind.options.get("on_refused") is not None
        self.now, self.seen, self.pending = 0, {}, {}
        self._begin_counts()

    def _begin_counts(self):
        names = ("inserted", "evicted", "refused", "not_admitted", "not_updated", "erased")
        self.counts = dict.fromkeys(names, 0)

    def _first_row(self, key):
        initial = self.kind.initializer
        row = np.full(self.dim, initial.a, np.float32)
        if initial.kind != "constant":
            draw = getattr(reference_initializer, initial.kind)
            row = draw(np.array([key]), self.dim, self.seed, initial.a, initial.b)[0]
        return self.rounded(row)

    def rounded(self, values):
        """float32 values as the table's rows keep them."""
        if self.kind.dtype == "bfloat16":
            return bfloat16_to_float32(np, float32_to_bfloat16(np, values))
        return values.astype(self.kind.dtype).astype(np.float32)

    def look_up(self, items, insert, ratio, held_after):
        """Looks keys up; of a full table `held_after` says which keys it has afterwards."""
        if not insert:
            return
        self.now += 1
        missing = list(dict.fromkeys(key for key in items if key not in self.rows))
        entering = self._admitted(missing, ratio)
        self.counts["not_admitted"] += len(missing) - len(entering)
        self.take(items, {key: self.first_row(key) for key in entering}, held_after)

    def begin_update(self, items, held_after):
        """Gives keys of an update that are missing a row, as a lookup, or leaves them out."""
        missing = [key for key in items if key not in self.rows]
        self._write(items)
        if not missing:
            return
        if self.threshold < 2 and self.kind.options.get("filter_ratio", 1.0) >= 1:
            self.now += 1
            refused = self.counts["refused"]
            self.take(items, {key: self.first_row(key) for key in missing}, held_after)
            self.counts["not_updated"] += self.counts["refused"] - refused
        else:
            self.counts["not_updated"] += len(missing)

    def assign(self, keys, values):
        super().assign(keys, values)
        self._write(keys)

    def _write(self, keys):
        """What is written counts as seen by the last lookup."""
        self.seen.update((key, self.now) for key in keys if key in self.rows)

    def take(self, items, new, held_after):
        """Takes new keys with their rows, as far as there is room; all items are seen."""
        given = {key for key in new if not self.is_full_once or key in held_after}
        self.counts["refused"] += len(new) - len(given)
        self.counts["inserted"] += len(given)
        if self.is_full_once:
            gone = self.rows.keys() - held_after
            assert not gone & set(items), "a key of the batch went"
            self.counts["evicted"] += len(gone)
            self._drop(gone)
        for key in given:
            self.rows[key] = new[key]
            self.pending.pop(key, None)
        self.seen.update((key, self.now) for key in items if key in self.rows)

    def _admitted(self, missing, ratio):
        keys = np.array(missing, np.int64)
        is_drawn = np.ones(keys.size, bool)
        if ratio < 1.0 and self.kind.options["var_type"] == "hybrid":
            is_drawn = drawn(keys, ratio, self.seed, self.now)
        chosen = [key for key, is_in in zip(missing, is_drawn, strict=True) if is_in]
        if self.threshold < 2:
            return chosen
        entering = []
        for key in chosen:
            count = self.pending.get(key, [0, 0])[0] + 1
            if count >= self.threshold:
                entering.append(key)
            else:
                self.pending[key] = [count, self.now]
        return entering

    def _drop(self, keys):
        for key in keys:
            del self.rows[key], self.seen[key]

    def erase(self, keys):
        held = {key for key in keys if key in self.rows}
        self._drop(held)
        for key in keys:
            self.pending.pop(key, None)
        self.counts["erased"] += len(held)
        return len(held)

    def expire(self, num_lookups):
        limit = self.now - num_lookups
        old = {key for key, seen in self.seen.items() if seen <= limit}
        gone = self.erase(old)
        self.pending = {key: each for key, each in self.pending.items() if each[1] > limit}
        return gone

    def clear(self):
        self.rows, self.seen, self.pending = {}, {}, {}
        self._begin_counts()
