"""What programs.py does with the gradients of a table and with the states of optimizers."""

import gc
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import sok_lite as sok
from tests.fuzz.programs_table import CheckedTable
from tests.support import state_groups
from tests.support.optimizer_cases import CASES

# The sign of a sum that cancels may differ between float32 and float64.
_CASES = [case for case in CASES if case.twin != "lion"]


def _norm(values: np.ndarray) -> float:
    return float(np.sqrt((values.astype(np.float64) ** 2).sum()))


# What takes a gradient, and what its values are then; None: it must be refused.
_DENSE: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray] | None]] = {
    "convert_to_tensor": (tf.convert_to_tensor, None),
    "norm": (tf.norm, None),
    "add_n": (lambda g: tf.add_n([g]), None),
    "square": (tf.square, None),
    "multiply": (lambda g: tf.multiply(g, 2.0), None),
    "reduce_max": (tf.reduce_max, None),
    "jacobian": (lambda g: g, None),
    "clip_by_global_norm": (
        lambda g: tf.clip_by_global_norm([g], 1.0)[0][0],
        lambda v: v / max(1.0, _norm(v)),
    ),
    "clip_by_value": (lambda g: tf.clip_by_value(g, -0.5, 0.5), lambda v: np.clip(v, -0.5, 0.5)),
    "scalar_mul": (lambda g: tf.math.scalar_mul(2.0, g), lambda v: 2 * v),
}


class Trained(CheckedTable):
    """A table that optimizers train.

    Attributes:
      trainers: those that are there.
    """

    def __init__(self, dice: random.Random, counts: Counter) -> None:
        super().__init__(dice, counts)
        self.trainers: list[state_groups.Trainer] = []

    def countable(self) -> state_groups.Trainer | None:
        """Returns an optimizer that may go with a dump or a load, or None."""
        trainers = [t for t in self.trainers if not t.made.arguments]
        return self.dice.choice(trainers) if trainers and self.dice.random() < 0.5 else None

    def gradient(self, keys: np.ndarray, grads: np.ndarray, flag: Any = None) -> Any:
        """Returns the gradient of a sum of rows, weighted by `grads`.

        Args:
          flag: whether they are looked up at all, in a tf.cond; None: they are.
        """

        def look_up() -> tf.Tensor:
            return tf.nn.embedding_lookup(self.table, tf.constant(keys))

        with tf.GradientTape() as tape:
            nothing = tf.zeros([len(keys), self.dim], self.dtype)
            rows = look_up() if flag is None else tf.cond(flag, look_up, lambda: nothing)
            loss = tf.reduce_sum(rows * tf.cast(grads, self.dtype))
        return tape.gradient(loss, self.table)

    def do_step(self) -> None:
        dice = self.dice
        if not self.trainers or (len(self.trainers) < 3 and dice.random() < 0.3):
            case = dice.choice(_CASES)
            made, kinds = case.make(), state_groups.kinds_of(case)
            wrapper = sok.OptimizerWrapper(made.optimizer)
            self.trainers.append(state_groups.Trainer(case, made, wrapper, kinds))
        trainer = dice.choice(self.trainers)
        self.told[-1] += f" of {trainer.case}"
        keys = self.new_keys()
        grads = self.rng.normal(size=(len(keys), self.dim)).astype(np.float32)
        grads[self.rng.random(len(keys)) < 0.1] = 0
        grads = self.rounded(grads)
        gradient = self.gradient(keys, grads)
        self.settle(self.looked_up(keys.tolist()))
        if dice.random() < 0.1:
            gone = list(self.rows)[::3]
            self.table.erase(np.array(gone, keys.dtype))
            self.settle({key: row for key, row in self.rows.items() if key not in gone})
        sums: dict[int, Any] = {}
        for key, grad in zip(keys.tolist(), grads.astype(np.float64), strict=True):
            sums[key] = sums.get(key, 0) + grad
        group = state_groups.for_step(self.groups, trainer)
        rows = self.rows_of(sums)
        twin = trainer.case.new_twin(np.array([rows[k] for k in sums]).reshape(-1, self.dim))
        for name in group.kinds:
            twin.states[name] = group.rows(name, sums, self.dim).astype(np.float64)
        twin.num_steps = trainer.num_steps
        twin.step(np.arange(len(sums)), np.array(list(sums.values())).reshape(-1, self.dim))
        trainer.wrapper.apply_gradients([(gradient, self.table)], **trainer.made.arguments)
        trainer.num_steps += 1
        for name in group.kinds:
            group.of(name).update(zip(sums, twin.states[name].astype(np.float32), strict=True))
        moved = dict(zip(sums, self.rounded(twin.rows.astype(np.float32)), strict=True))
        if not self.table.table.inserts_for_updates:
            moved = {key: row for key, row in moved.items() if key in self.rows}
        self.moved = set(sums)
        self.settle(self.rows | moved)
        self.settle_states(group)

    def do_forget_optimizer(self) -> None:
        if self.trainers:
            trainer = self.trainers.pop(self.dice.randrange(len(self.trainers)))
            self.groups = state_groups.without(self.groups, trainer)
            del trainer
            gc.collect()

    def do_states(self) -> None:
        listed = list(sok.optimizer_states(self.table).values())
        if not listed:
            return
        numbers = list(dict.fromkeys(state.group for state in listed))
        state = self.dice.choice(listed)
        group, name = self.groups[numbers.index(state.group)], state.kind
        kind = self.dice.choice(["assign", "assign", "read", "rename", "drop"])
        self.told[-1] += f" {kind} {state.name}"
        if kind == "assign" and self.rows:
            held = np.array(list(self.rows), self.key_type.as_numpy_dtype)
            keys, values = self.rng.choice(held, 5), abs(self.new_rows(5)) + 0.125
            sok.assign(state, keys, values)
            group.of(name).update(zip(keys.tolist(), values, strict=True))
        elif kind == "read":
            keys = self.new_keys()
            found = tf.nn.embedding_lookup(state, keys).numpy()
            np.testing.assert_array_equal(found, group.rows(name, keys.tolist(), self.dim))
        elif kind == "rename" and group.trainer is None:
            new = self.dice.choice(["m", "v", "accumulator", "momentum", "x"])
            if new not in group.kinds:
                state.rename(new)
                group.states[new] = group.states.pop(name, {})
                group.kinds[new] = group.kinds.pop(name)
        elif kind == "drop":
            for each in listed:
                if each.group == state.group:
                    each.drop()
            self.groups.remove(group)

    def do_dense(self) -> None:
        name, place = self.dice.choice(list(_DENSE)), self.dice.choice(["eager", "graph", "cond"])
        if name == "jacobian" and self.dice.random() < 0.7:
            return  # it takes long
        # Of such a table TensorFlow takes no gradient out of one branch: it raises.
        has_no_cond = self.dtype != tf.float32 or self.key_type == tf.uint64
        if self.dice.random() < 0.5 or (place == "cond" and has_no_cond):
            place = "eager"
        dense, allowed = _DENSE[name]
        keys = self.new_keys(20)
        grads = self.rounded(self.rng.normal(size=(len(keys), self.dim)))
        is_on = self.dice.random() < 0.8
        is_nothing = not len(keys) or (place == "cond" and not is_on)
        self.told[-1] += f" {name} {place} {is_on}"

        def run(flag: Any) -> Any:
            if name == "jacobian":
                with tf.GradientTape() as tape:
                    rows = tf.nn.embedding_lookup(self.table, tf.constant(keys))
                return tape.jacobian(rows, self.table)
            gradient = self.gradient(keys, grads, flag if place == "cond" else None)
            made = dense(gradient)
            if not isinstance(made, tf.IndexedSlices):
                return made
            return made.values, made.indices, gradient.values, gradient.indices

        try:
            found = (run if place == "eager" else tf.function(run))(tf.constant(is_on))
        except (NotImplementedError, tf.errors.UnimplementedError) as error:
            assert "g.values" in str(error), f"a refusal that does not help: {error}"
            assert allowed is None, f"{name} is refused: {error}"
        except tf.errors.InvalidArgumentError as error:
            assert place == "cond" and "-1" in str(error), f"an error of TensorFlow: {error}"
            assert allowed is None, f"{name} is refused: {error}"
        else:
            if isinstance(found, tuple):
                assert allowed is not None, f"{name} gave slices: {found}"
                values, indices, given, its = (tensor.numpy() for tensor in found)
                np.testing.assert_array_equal(indices, its, f"keys of {name}")
                self.assert_near(values.astype(np.float32), allowed(given.astype(np.float32)), name)
            else:
                # The largest of no numbers is -inf, as of any empty tensor.
                is_empty = not np.any(np.nan_to_num(found, posinf=0.0, neginf=0.0))
                assert is_nothing and is_empty, f"{name} gave a dense tensor: {found}"
        now = self.table.statistics()
        if now.found_total + now.missed_total > self.before.found_total + self.before.missed_total:
            self.expected = self.looked_up(keys.tolist())  # else it was refused before it ran
