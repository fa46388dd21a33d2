"""What programs.py does with files: it dumps a table, loads it, and forges what it dumped."""

import contextlib
import random
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import tensorflow as tf

import sok_lite as sok
from tests.fuzz.programs_forgery import command, forge, forge_export, little_memory, rows_in
from tests.fuzz.programs_table import NAME, Rows
from tests.fuzz.programs_training import Trained
from tests.support import state_groups
from tests.support.table_audit import audit
from tests.support.table_state import State


class Dumped(Trained):
    """A table that goes into files and comes out of them.

    Attributes:
      folder: of the files.
      saved: the last checkpoint: its folder, rows, states and step count.
    """

    def __init__(self, dice: random.Random, counts: Counter, folder: Path) -> None:
        super().__init__(dice, counts)
        self.folder = folder
        self.saved: tuple[Path, Rows, list[state_groups.Group], int | None] | None = None
        self.num_dumps = 0

    def do_dump(self) -> None:
        incremental = self.num_dumps > 0 and self.dice.random() < 0.5
        self.num_dumps += not incremental
        folder, trainer = self.folder / f"dump {self.num_dumps}", self.countable()
        wrapper = None if trainer is None else trainer.wrapper
        sok.dump(folder, self.table, wrapper, incremental=incremental)
        groups = [group.copied() for group in self.groups]
        num_steps = None if trainer is None else trainer.num_steps
        self.saved = folder, dict(self.rows), groups, num_steps
        self.told[-1] += " incremental" if incremental else ""
        assert command("verify", folder) == 0, "verify finds fault with a new checkpoint"
        drawn = self.new_keys()
        rows, is_there = sok.open_readonly(folder, check_rows=True)[NAME].find(drawn)
        keys = drawn.tolist()
        assert is_there.tolist() == [key in self.rows for key in keys], "find() is wrong"
        nothing = np.zeros(self.dim, np.float32)
        wanted = np.array([self.rows.get(key, nothing) for key in keys]).reshape(rows.shape)
        np.testing.assert_array_equal(rows, wanted, "rows in files")

    def do_load(self) -> None:
        if self.saved is None:
            return
        folder, rows, groups, num_steps = self.saved
        mode, is_new = self.dice.choice(["replace", "merge"]), self.dice.random() < 0.5
        if is_new:
            self.replace_table(None if self.dice.random() < 0.3 else self.dtype)
            self.expected = {}
        self.before, own, before = None, self.rows, State.of(self.table.table)
        self.told[-1] += f" {mode} {self.options if is_new else ''}"
        trainer = None if num_steps is None else self.countable()
        wrapper = None if trainer is None else trainer.wrapper
        try:
            sok.load(folder, self.table, wrapper, mode=mode, cast=True)
        except ValueError as error:
            assert "has no room" in str(error), str(error)
            assert State.of(self.table.table) == before, "a load that failed has changed the table"
            return
        if trainer is not None and num_steps is not None:
            trainer.num_steps = num_steps
        if mode == "merge":
            groups = state_groups.merged(groups, self.groups, rows.keys())
        self.groups = state_groups.loaded(groups, self.groups)
        cast = {key: self.rounded(row) for key, row in rows.items()}
        self.expected = (own if mode == "merge" else {}) | cast
        self.rows = self.expected  # of which none may differ

    def do_forge(self) -> None:
        folder = self.folder / "forged"
        shutil.rmtree(folder, ignore_errors=True)
        trainer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.5))
        sok.dump(folder, self.table, trainer)
        if self.dice.random() < 0.4:
            self.do_assign()  # type: ignore[attr-defined]  # of the whole program
            self.settle(self.expected)
            sok.dump(folder, self.table, trainer, incremental=True)
        self.counts["forged"] += 1
        if self.dice.random() < 0.25:
            self.forge_export(folder)
            return
        target, options = self.new_table()
        mode = self.dice.choice(["replace", "merge"])
        self.told[-1] += f" {forge(self.dice, folder)}; {mode} into {options}"
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
            self.counts["forged and loaded"] += 1
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

    def forge_export(self, folder: Path) -> None:
        """Forges another file of what a checkpoint has."""
        kind = self.dice.choice(["npz", "safetensors"])
        path, converted = self.folder / f"exported.{kind}", self.folder / "converted"
        path.unlink(missing_ok=True)
        shutil.rmtree(converted, ignore_errors=True)
        assert command("convert", folder, path, "--to-format", kind) == 0, "it is not converted"
        self.told[-1] += f" {kind}: {forge_export(self.dice, path)}"
        command("inspect", path)
        if command("convert", path, converted, "--from-format", kind) == 0:
            command("verify", converted)
