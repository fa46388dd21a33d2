"""A random table for programs.py, and the dicts of rows and of states that it must equal."""

import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import tensorflow as tf

import sok_lite as sok
from sok_lite.engine.table.base import table_seed
from tests.support import reference_initializer
from tests.support.chosen_keys import of_one_line, of_one_segment, of_two_buckets
from tests.support.state_groups import Group
from tests.support.table_audit import pending_index

NAME = "table"
_SPACE = 300  # most keys are of so many
# Of a row after a step, (relative, absolute): the oracle reckons in float64.
_TOLERANCES = {"float32": (5e-4, 1e-4), "float16": (3e-3, 1e-3), "bfloat16": (2e-2, 4e-3)}

Rows = dict[int, np.ndarray]  # by key, float32


class CheckedTable:
    """A table and what it must hold.

    Attributes:
      table: the variable.
      options: what it was made with, in words.
      rows: what it holds, as its rows keep it.
      groups: its optimizer states.
      counts: of what was done.
      told: the same in words.
      expected: rows after the operation, but for what is dropped.
      moved: keys whose rows may differ from that by rounding.
      before: its statistics before the operation; None: it can have dropped nothing.
    """

    def __init__(self, dice: random.Random, counts: Counter) -> None:
        self.dice, self.rng = dice, np.random.default_rng(dice.getrandbits(32))
        self.counts, self.told = counts, list[str]()
        self.before: Any = None
        self.expected, self.moved = Rows(), set[int]()
        self.dim = dice.choice([1, 2, 3, 4, 5, 8, 33])
        self.key_type = dice.choice([tf.int64, tf.int64, tf.int64, tf.int32, tf.uint64])
        self.replace_table()

    def replace_table(self, dtype: Any = None) -> None:
        """Takes an empty table in place of what there is; None: of any dtype."""
        dtypes = [tf.float32, tf.float32, tf.float16, tf.bfloat16]
        self.dtype = self.dice.choice(dtypes) if dtype is None else dtype
        self.initializer = self.dice.choice([None, "uniform", "normal", "ones", "zeros", 0.25])
        self.table, self.options = self.new_table()
        self.rows: Rows = {}
        self.groups: list[Group] = []

    def new_table(self) -> tuple[Any, str]:
        """Makes an empty table of any kind; returns it and what it is, in words."""
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
        kinds = {"key_type": self.key_type, "dtype": self.dtype}
        table = sok.DynamicVariable(
            self.dim, self.initializer, var_type, name=NAME, **kinds, **options
        )
        types = f"{self.key_type.name} to {self.dim} {self.dtype.name}"
        return table, f"{var_type} {options}, {types}, initializer {self.initializer}"

    # ---------------------------------------------------------------- what is given to it

    def new_keys(self, most: int = 60) -> np.ndarray:
        """Draws keys: a few of the space, repeated, extreme, or chosen against the hash."""
        dice, dtype = self.dice, self.key_type.as_numpy_dtype
        count, limits = dice.choice([0, 1, 2, 7, 20, most]), np.iinfo(dtype)
        least = -_SPACE // 2 if limits.min else 0
        keys = self.rng.integers(least, least + _SPACE, count).astype(dtype)
        # The index of pending counts never takes another seed.
        can_choose = dtype != np.int32 and pending_index(self.table.table) is None
        if can_choose and dice.random() < 0.12:
            chosen = dice.choice([of_one_line, of_one_segment, of_two_buckets])
            keys = chosen(count, self.table.table.index.seed).view(dtype)
        if count and dice.random() < 0.2:
            keys[dice.randrange(count)] = dice.choice([limits.max, limits.min, limits.max - 1])
        return np.resize(keys[:3], count) if dice.random() < 0.1 else keys

    def new_rows(self, count: int) -> np.ndarray:
        """Draws rows (count, dim) float32 that every dtype keeps."""
        return self.rng.integers(-40, 40, (count, self.dim)).astype(np.float32) / 8

    def rounded(self, values: Any) -> np.ndarray:
        """Returns numbers as a row of the table keeps them, as float32."""
        return tf.cast(tf.cast(values, self.dtype), tf.float32).numpy()

    # ---------------------------------------------------------------- what it must hold

    def first(self, keys: Iterable[int]) -> Rows:
        """Returns the rows that keys begin with."""
        listed, kind = list(keys), self.initializer
        numbers = np.array(listed, self.key_type.as_numpy_dtype).astype(np.int64)
        seed = table_seed(0, NAME)
        if kind is None:
            kind = "small" if self.table.backend_type == "hbm" else "normal"
        if kind == "normal":
            values = reference_initializer.normal(numbers, self.dim, seed, 0.0, 1.0)
        elif kind in ("small", "uniform"):
            ends = (-0.05, 0.05) if kind == "small" else (0.0, 1.0)
            values = reference_initializer.uniform(numbers, self.dim, seed, *ends)
        else:
            number = {"ones": 1.0, "zeros": 0.0}[kind] if isinstance(kind, str) else kind
            values = np.full((len(listed), self.dim), number, np.float32)
        return dict(zip(listed, self.rounded(values), strict=True))

    def rows_of(self, keys: Iterable[int], missing: str = "initial") -> Rows:
        """Returns the rows that a lookup gives."""
        keys = set(keys)
        first = self.first(keys - self.rows.keys())
        if missing == "zeros":
            first = dict.fromkeys(first, np.zeros(self.dim, np.float32))
        return first | {key: self.rows[key] for key in keys & self.rows.keys()}

    def looked_up(self, keys: Iterable[int]) -> Rows:
        """Returns what the table holds when a lookup has inserted keys."""
        return self.rows | self.rows_of(keys)

    def assert_rows(self, found: Any, keys: Iterable[int], rows: Rows, what: str) -> None:
        """Raises AssertionError unless rows (..., dim) are those of keys, but for rounding."""
        wanted = np.array([rows[key] for key in keys], np.float32).reshape(found.shape)
        self.assert_near(tf.cast(found, tf.float32).numpy(), wanted, what)

    def assert_near(self, found: Any, wanted: Any, what: str) -> None:
        relative, absolute = _TOLERANCES[self.dtype.name]
        np.testing.assert_allclose(found, wanted, relative, absolute, err_msg=what)

    def settle(self, expected: Rows) -> None:
        """Raises AssertionError unless the table holds that, but for what it says it has dropped.

        What it holds is then in `rows`, `expected` and `before`.
        """
        before, moved = self.before, self.moved
        keys, rows = sok.export(self.table)
        listed, found = keys.numpy().tolist(), tf.cast(rows, tf.float32).numpy()
        held = dict(zip(listed, found, strict=True))
        strange, gone = held.keys() - expected.keys(), expected.keys() - held.keys()
        assert not strange, f"keys that must not be there: {sorted(strange)[:5]}"
        if gone:
            assert before is not None and not self.table.table.keeps_every_key, f"lost: {gone}"
            now = self.table.statistics()
            evicted, refused = len(gone & self.rows.keys()), len(gone - self.rows.keys())
            told = now.evicted_total - before.evicted_total
            assert evicted == told, f"{evicted} keys are gone, {told} were evicted"
            told = now.refused_total - before.refused_total
            told += now.not_admitted_total - before.not_admitted_total
            assert refused == told, f"{refused} new keys have no row, the table says {told}"
        is_loose = (held.keys() - self.rows.keys()) | moved
        wanted = np.array([expected[key] for key in listed], np.float32).reshape(found.shape)
        is_exact = np.array([key not in is_loose for key in listed], bool)
        np.testing.assert_array_equal(found[is_exact], wanted[is_exact], "rows")
        self.assert_near(found[~is_exact], wanted[~is_exact], "rows that were written")
        self.rows = self.expected = held
        self.before = self.table.statistics()
        for group in self.groups:
            for name, states in group.states.items():
                group.states[name] = {key: row for key, row in states.items() if key in held}

    def settle_states(self, moved: Group | None = None) -> None:
        """Raises AssertionError unless the optimizer states are those of the dicts.

        Args:
          moved: those that a step has changed, which may differ by rounding.
        """
        by_group: dict[Any, dict[str, Any]] = {}
        for state in sok.optimizer_states(self.table).values():
            by_group.setdefault(state.group, {})[state.kind] = state
        found = [
            ({name: s.initial_value for name, s in its.items()}, {s.is_used for s in its.values()})
            for its in by_group.values()
        ]
        expected = [(group.kinds, {group.trainer is not None}) for group in self.groups]
        assert found == expected, f"the states are {found}, not {expected}"
        for group, its in zip(self.groups, by_group.values(), strict=True):
            for name, state in its.items():
                keys, rows = (tensor.numpy() for tensor in state.export())
                wanted = group.rows(name, keys.tolist(), self.dim)
                if group is moved and group is not None:
                    np.testing.assert_allclose(rows, wanted, 5e-4, 1e-4, err_msg=f"states {name}")
                    group.states[name] = dict(zip(keys.tolist(), rows, strict=True))
                else:
                    np.testing.assert_array_equal(rows, wanted, f"states {name}")
