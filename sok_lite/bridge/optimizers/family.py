"""Families of optimizers: the update rule of each optimizer, and its settings.

An optimizer without a rule takes its step itself: a copy of it updates the rows.

A setting may be a number, a variable, a tensor or a callable; numbers that may change are read in
every step, what selects a formula is fixed.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sok_lite.engine.optimizers import UpdateRule


class FallbackStep(NamedTuple):
    """The step of an optimizer without a rule, which takes it itself; see Settings."""

    optimizer: Any
    family: "Family"
    numbers: dict[str, Any]
    decays: Callable[[Any], bool] = lambda variable: True


class Settings(NamedTuple):
    """An update of all variables in a step, by a rule.

    Attributes:
      numbers: hyperparameter -> number, variable or tensor; read in every step.
      flags: hyperparameter -> value that selects a formula; fixed.
      decays: whether weight decay applies to a variable.
    """

    rule: type[UpdateRule]
    numbers: dict[str, Any]
    flags: dict[str, Any]
    decays: Callable[[Any], bool] = lambda variable: True


@dataclass(frozen=True)
class Family:
    """The common properties of a family of optimizers.

    `config` to `apply` are for copies of optimizers without a rule.

    Attributes:
      iterations: the optimizer's own step counter, or None.
      learning_rate: of the step after `iterations` steps.
      has_decay: whether optimizers may have `weight_decay` and `_use_weight_decay`.
      config: of an optimizer before its first step, for copies.
      make: takes the optimizer, config, learning rate, numbers, and names of attributes to copy
        with their current values; returns a copy, not built.
      variable: makes a variable that a copy can update, from a float32 tensor and a name.
      build: takes a copy, all its variables, and those without weight decay; creates the copy's
        own.
      apply: takes a copy, (gradient, variable) pairs, and the number of the step, 1 for the first.
      numbers: settings of a copied optimizer that are tensors, variables or callables, read in
        every step.
      not_states: attributes of a copy whose variables are neither states nor carried.
      name_of_slot: takes a copy, its own variable and the one that this was created for; returns
        the family's name of the slot; None: the variable's own name.
      slots: how optimizers keep slots, "by variable" or "by name"; None: not at all.
      slot_names: rule -> {state: the family's name}, if different.
      clips_in_turn: whether optimizers clip by value, then by norm, and 0 is a limit; others do
        one, and 0 is none.
    """

    name: str
    settings: Mapping[str, Callable[[Any], Settings]]
    iterations: Callable[[Any], Any]
    learning_rate: Callable[[Any, Any], Any]
    has_decay: bool
    config: Callable[[Any], Mapping[str, Any]]
    make: Callable[[Any, Mapping[str, Any], float, Mapping[str, float], Collection[str]], Any]
    variable: Callable[[Any, str], Any]
    build: Callable[[Any, Sequence[Any], Sequence[Any]], None]
    apply: Callable[[Any, Sequence[tuple[Any, Any]], int], None]
    numbers: Callable[[Any], dict[str, Any]] = lambda optimizer: {}
    not_states: tuple[str, ...] = ()
    name_of_slot: Callable[[Any, Any, Any], str | None] = lambda copy, own, variable: None
    slots: str | None = None
    slot_names: Mapping[type[UpdateRule], Mapping[str, str]] = field(default_factory=dict)
    clips_in_turn: bool = False
