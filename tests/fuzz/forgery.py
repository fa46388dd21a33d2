"""Checkpoints that somebody has forged, loaded into random tables.

A round fills a table, dumps it, whole or with an increment, changes something in the files and
loads them into a table of another kind. Either an error names the file or the table, and nothing
has changed; or the table holds rows of the file and no others, and is sound inside
(tests/support/table_audit.py). The command line must end as it documents. Every round has a seed
of its own and says it:

  python -m tests.fuzz.forgery                        until the first failure, or Ctrl-C
  python -m tests.fuzz.forgery --minutes 120
  python -m tests.fuzz.forgery --seed 1234 --rounds 1 the round of that seed again
"""

import contextlib
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import sok_lite as sok
from sok_lite.backend import get_backend
from sok_lite.engine.hashing import fix_seed
from tests.fuzz import rounds
from tests.fuzz.forgery_changes import command, forge, little_memory, rows_in
from tests.support.table_audit import audit
from tests.support.table_state import State

NAME = "table"


class Forger:
    """Tables of one key type and dimension, and files of them.

    Attributes:
      told: what was done, in words.
    """

    def __init__(self, dice: random.Random, folder: Path) -> None:
        self.dice, self.rng = dice, np.random.default_rng(dice.getrandbits(32))
        self.folder, self.told = folder, list[str]()
        self.dim = dice.choice([1, 2, 3, 8, 33])
        self.key_type = dice.choice([tf.int64, tf.int64, tf.int32, tf.uint64])
        self.dtype = dice.choice([tf.float32, tf.float32, tf.float16, tf.bfloat16])

    def new_table(self) -> Any:
        """Makes an empty table of any kind."""
        dice, options = self.dice, dict[str, Any]()
        var_type = dice.choice(["hbm", "hybrid"])
        if var_type == "hybrid":
            slots = dice.choice([16, 64, 256])
            options = {
                "init_capacity": slots,
                "max_capacity": slots if dice.random() < 0.5 else 1 << 16,
                "max_bucket_size": dice.choice([4, 16]),
                "evict_strategy": dice.choice(["kLru", "kLfu", "kEpochLru", "kEpochLfu"]),
                "enter_threshold": dice.choice([0, 0, 0, 2]),
                "on_refused": "ignore",
            }
            near = dice.choice([0, slots // 4, 4096])
            options["max_hbm_for_vectors"] = near * self.dim * self.dtype.size / 2**30
        self.told.append(f"{var_type} {options} of {self.key_type.name}, {self.dtype.name}")
        types = {"key_type": self.key_type, "dtype": self.dtype}
        return sok.DynamicVariable(self.dim, "normal", var_type, name=NAME, **types, **options)

    def write(self, table: Any) -> None:
        """Gives rows to some keys, a few of them extreme."""
        limits, count = np.iinfo(self.key_type.as_numpy_dtype), self.dice.choice([0, 1, 7, 60])
        keys = self.rng.integers(-150 if limits.min else 0, 150, count)
        keys = keys.astype(self.key_type.as_numpy_dtype)
        if count and self.dice.random() < 0.2:
            keys[0] = self.dice.choice([limits.max, limits.min])
        rows = self.rng.integers(-40, 40, (count, self.dim)).astype(np.float32) / 8
        sok.assign(table, keys, tf.cast(rows, self.dtype))

    def run(self, counts: Counter) -> None:
        """Forges files of one table once; raises whatever is wrong."""
        folder, source = self.folder / "forged", self.new_table()
        shutil.rmtree(folder, ignore_errors=True)
        trainer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.5))
        self.write(source)
        sok.dump(folder, source, trainer)
        if self.dice.random() < 0.4:
            self.write(source)
            sok.dump(folder, source, trainer, incremental=True)
        target, mode = self.new_table(), self.dice.choice(["replace", "merge"])
        self.told.append(f"{forge(self.dice, folder)}; {mode}")
        sok.assign(target, [1, 2, 3], tf.ones([3, self.dim], self.dtype))
        gradient = tf.IndexedSlices(tf.ones([2, self.dim]), tf.constant([1, 2], self.key_type))
        trainer.apply_gradients([(gradient, target)])
        before = State.of(target.table)
        try:
            with little_memory():
                sok.load(folder, target, trainer, mode)
        except (ValueError, OSError) as error:
            said = f"{type(error).__name__}: {error}"
            assert f"'{NAME}" in said or str(folder) in said, f"an error from inside: {said}"
            if "has no step count" not in said:  # the variables were loaded, it says
                assert State.of(target.table) == before, f"it has changed the table: {said}"
        else:
            counts["loaded"] += 1
            own = before.rows if mode == "merge" else {}
            found, saved = State.of(target.table).rows, rows_in(folder, NAME)
            assert found.keys() == saved.keys() | own.keys(), "other keys than in the file"
            for key, (row, _) in found.items():
                allowed = saved.get(key) or [own[key][0]]
                assert row in allowed, f"the row of {key} is not that in the file"
        audit(target.table)
        for name in ("verify", "inspect"):
            command(name, folder)
        with contextlib.suppress(ValueError, OSError), little_memory():
            for table in sok.open_readonly(folder, check_rows=True).values():
                table.lookup(table.keys())


def run_round(_: None, seed: int, counts: Counter) -> None:
    """Runs the round of a seed; raises AssertionError with what it found."""
    fix_seed(seed)  # of the hash
    with tempfile.TemporaryDirectory() as folder:
        forger = Forger(random.Random(seed), Path(folder))
        try:
            for _number in range(4):
                forger.run(counts)
                counts["operations"] += 1
        except Exception as error:
            text = f"{traceback.format_exc(limit=-8)}  {'; '.join(forger.told)}"
            raise AssertionError(text) from error


@contextlib.contextmanager
def on_cpu(name: str) -> Iterator[None]:
    """Makes this process a job of one rank, whose tables have their memory in small pieces."""
    os.environ["SOK_LITE_BACKEND"] = name
    sok.init("single")
    backend = get_backend(name)
    backend.chunk_bytes = backend.far_chunk_bytes = 512
    backend.segment_slots = 128
    yield


if __name__ == "__main__":
    sys.exit(rounds.main(__doc__, run_round, on_cpu, ["cpu"]))
