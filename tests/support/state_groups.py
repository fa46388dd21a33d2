"""Whose the optimizer states of a table are, in dicts: the oracle of steps, loads and merges."""

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.support.optimizer_cases import Case, Made


@dataclass(eq=False)
class Trainer:
    """An optimizer, and how many steps its wrapper has counted.

    Attributes:
      kinds: what it calls its states, and what they begin with.
    """

    case: Case
    made: Made
    wrapper: Any
    kinds: dict[str, float]
    num_steps: int = 0


def kinds_of(case: Case) -> dict[str, float]:
    """Returns what an optimizer of a case calls its states, and what they begin with."""
    twin = case.new_twin(np.zeros((1, 1)))
    kinds = {name: float(state[0, 0]) for name, state in twin.states.items()}
    if case.twin in ("adam", "rectifiedadam") and not case.hyper.get("amsgrad"):
        del kinds["vhat"]
    if case.twin == "rmsprop":
        for option, name in (("centered", "mean_grad"), ("momentum", "momentum")):
            if not case.hyper.get(option):
                del kinds[name]
    return kinds


@dataclass(eq=False)
class Group:
    """The states of one optimizer in a table.

    Attributes:
      trainer: whose they are; None: they wait for the next that has the same.
      kinds: as of Trainer.
      states: by name, then by key; a key that is missing has what the state begins with.
      is_fresh: whether a load gave them to the trainer, which has not used them since.
    """

    trainer: Trainer | None
    kinds: dict[str, float]
    states: dict[str, dict[int, np.ndarray]] = field(default_factory=dict)
    is_fresh: bool = False

    def of(self, name):
        return self.states.setdefault(name, {})

    def rows(self, name, keys, dim):
        """(n, dim) float32, a state of keys."""
        initial = np.full(dim, self.kinds[name], np.float32)
        its = self.of(name)
        return np.array([its.get(key, initial) for key in keys], np.float32).reshape(-1, dim)

    def copied(self):
        """The same states, of nobody."""
        return Group(None, dict(self.kinds), copy.deepcopy(self.states))


def for_step(groups, trainer):
    """The states that a step works on: the trainer's own, else free ones, else new ones."""
    own = next((group for group in groups if group.trainer is trainer), None)
    if own is None and not trainer.kinds:
        return Group(trainer, {})
    if own is None:
        own = next((g for g in groups if g.trainer is None and g.kinds == trainer.kinds), None)
    if own is None:
        # If a load gave some to another of the same kind, which has not used them: a copy.
        other = next((g for g in groups if g.is_fresh and g.kinds == trainer.kinds), None)
        own = Group(None, dict(trainer.kinds)) if other is None else other.copied()
        if other is not None:
            other.is_fresh = False
        groups.append(own)
    own.trainer, own.is_fresh = trainer, False
    own.kinds |= trainer.kinds  # some may have been dropped
    return own


def without(groups, trainer):
    """The groups when an optimizer is gone: what it has not used since a load is free again."""
    left = [group for group in groups if group.trainer is not trainer or group.is_fresh]
    for group in left:
        group.trainer = None if group.trainer is trainer else group.trainer
    return left


def loaded(saved, now):
    """The groups of a table that had some, `now`, and has loaded others."""
    groups = [group.copied() for group in saved]
    copied = []
    for old in now:
        if old.trainer is None:
            continue
        free = [g for g in groups if g.trainer is None and g.kinds == old.kinds]
        given = [g for g in groups if g.is_fresh and g.kinds == old.kinds]
        if free:
            its = free[0]
        elif given:
            its = given[copied.count(old.kinds) % len(given)].copied()
            copied.append(old.kinds)
        else:
            its = Group(None, dict(old.kinds))
        groups += [] if free else [its]
        its.trainer, its.is_fresh = old.trainer, bool(free or given)
    return groups


def merged(saved, now, keys):
    """What is to be `loaded` for a table to have its own groups, and those saved of some keys."""
    others, groups = list(saved), []
    for own in now:
        match = next((g for g in others if g.kinds == own.kinds), None)
        others = [group for group in others if group is not match]
        states = {
            name: {key: row for key, row in own.of(name).items() if key not in keys}
            | (match.of(name) if match else {})
            for name in own.kinds
        }
        groups.append(Group(None, own.kinds, states))
    return [*groups, *others]
