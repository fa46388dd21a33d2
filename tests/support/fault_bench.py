"""Small tables of every kind, built the same again and again for faults to befall them."""

import contextlib
from typing import Any

import numpy as np

from scripts.bench.common.row_steps import ensure_state
from sok_lite.engine.table.hkv import RefusedError
from tests.support.helpers import new_table

INT64 = np.iinfo(np.int64)
DIM = 2
NEW = 5000  # keys from here on are in no table that was built

# "full": as many slots as keys, three of them free, a quarter of the rows near.
_FULL = {"var_type": "hybrid", "max_bucket_size": 4, "on_refused": "ignore"}
_ROOMY = _FULL | {"init_capacity": 8, "max_capacity": 1 << 20}
KINDS: dict[str, dict[str, Any]] = {
    "hbm": {"var_type": "hbm"},
    "kLru": _FULL,
    "kLfu": _FULL | {"evict_strategy": "kLfu"},
    "kEpochLru": _FULL | {"evict_strategy": "kEpochLru"},
    "kCustomized": _FULL | {"evict_strategy": "kCustomized"},
    "refusing": _FULL | {"on_refused": "error"},
    "roomy": _ROOMY,
    # Of buckets that are not full by chance while so few slots are in use.
    "wide": {"var_type": "hybrid", "init_capacity": 1 << 11, "max_capacity": 1 << 20},
    "sighting": _ROOMY | {"enter_threshold": 3},
    "counting": _ROOMY | {"enter_threshold": 3, "evict_strategy": "kLfu", "count_repeats": True},
}
# Of these, too, which keys were removed is logged.
KINDS |= {f"{kind} log": KINDS[kind] for kind in ("hbm", "kLru")}
FULL = ("kLru log", "kLru", "kLfu", "kEpochLru", "kCustomized", "refusing")


class Bench:
    """Builds equal tables of one kind; `held` are the keys of one that was built, ascending."""

    def __init__(self, backend, kind, n=10, folder=None):
        self.backend, self.kind, self.n = backend, kind, n
        self.options = dict(KINDS[kind])
        if "max_bucket_size" in self.options:
            slots = 1 << (3 * n - 1).bit_length()
            self.options = {"init_capacity": slots, "max_capacity": slots} | self.options
            # As it splits them: gigabytes of rows.
            self.options["max_hbm_for_vectors"] = slots // 4 * DIM * 4 / 2**30
            if folder is not None and backend.name == "cpu":
                self.options["far_path"] = str(folder)
        self.held = backend.to_host(self.build().export_rows()[0])

    @property
    def may_drop(self):
        """Whether a key may lose its row, or get none."""
        return KINDS[self.kind]["var_type"] != "hbm"

    def empty(self):
        table = new_table(self.backend, DIM, name=self.kind, **self.options)
        ensure_state(table.store, "m", 0.5)
        if self.kind.endswith(" log"):
            table.log_removals()
        return table

    def build(self):
        """Keys of several ages with rows and states of their own, free rows, erased slots."""
        table, n = self.empty(), self.n
        keys = np.concatenate([np.arange(-n, n), [INT64.max, INT64.min]])
        if self.kind in FULL:
            # Twice as many as there are slots: almost all of them are used then.
            keys = np.concatenate([keys, 100 + np.arange(2 * table.capacity)])
        given = np.arange(keys.size, dtype=np.uint64) % np.uint64(97)
        given = given if self.kind == "kCustomized" else None
        for _ in range(3 if "enter_threshold" in self.options else 1):
            with contextlib.suppress(RefusedError):
                table.find_or_insert(keys, scores=given)
        keys, rows = table.export_rows()
        count = int(keys.size)
        values = np.arange(DIM * count, dtype=np.float32).reshape(-1, DIM) + 2000
        table.assign(keys, self.backend.from_host(values))
        table.store.write(rows, self.backend.from_host(values / 8), column="m")
        # After the rows were written, which marks all keys as seen.
        table.lookup(keys[::2])
        table.lookup(keys[1::3])
        usual = self.backend.to_host(keys)
        usual = usual[(usual != INT64.max) & (usual != INT64.min)]
        table.erase(usual[5 : 5 + max(3, n // 4)])
        if "enter_threshold" in self.options:
            table.find_or_insert(NEW + np.arange(0, n, 2))
            table.find_or_insert(NEW + np.arange(0, n, 4))
        return table
