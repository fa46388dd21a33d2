"""A family of optimizers: the update rule of each, and its settings.

An optimizer that stands for no rule takes its step itself: a copy of it updates the rows.

A setting may be a number, a variable, a tensor or a callable; what may change is read anew in every
step, what selects a formula is not.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sok_lite.engine.optimizers import UpdateRule


class FallbackStep(NamedTuple):
    """The step of an optimizer that no rule follows, and takes it itself.

    Attributes:
      optimizer: the optimizer.
      family: of it.
      numbers: setting -> number, variable or tensor; read in every step.
      decays: whether weight decay acts on a variable.
    """

    optimizer: Any
    family: "Family"
    numbers: dict[str, Any]
    decays: Callable[[Any], bool] = lambda variable: True


class Settings(NamedTuple):
    """An optimizer's update of all variables in this step, by a rule.

    Attributes:
      rule: class of the rule.
      numbers: hyper-parameter -> number, variable or tensor; read in every step.
      flags: hyper-parameter -> value that selects a formula; fixed.
      decays: whether weight decay acts on a variable.
    """

    rule: type[UpdateRule]
    numbers: dict[str, Any]
    flags: dict[str, Any]
    decays: Callable[[Any], bool] = lambda variable: True


@dataclass(frozen=True)
class Family:
    """The properties that the optimizers of one family share.

    An optimizer that no rule follows is copied, and the copy updates variables: `config` to `apply`
    say how.

    Attributes:
      name: for messages.
      settings: class name -> function of the optimizer.
      iterations: the optimizer's own step counter, or None.
      learning_rate: of the step after `iterations` steps.
      has_decay: whether the optimizers may have a `weight_decay`, and `_use_weight_decay`.
      config: of an optimizer, taken before its first step: what a copy is made from.
      make: takes the optimizer, the config, the learning rate, the numbers, and names of attributes
        that the copy is to have as they are by now; gives a copy that is not built.
      variable: makes a variable that a copy can update, of a float32 tensor and a name.
      build: takes a copy, all variables that it is to update, and those of them that weight decay
        does not act on; makes its own variables.
      apply: takes a copy, pairs of gradients and variables, and the number of the step, 1 for the
        first.
      numbers: what of the settings of an optimizer that is copied are tensors, variables or
        callables: read in every step.
      not_states: attributes of a copy whose variables are neither states nor numbers that go on
        from step to step.
      name_of_slot: takes a copy, a variable of its own and the variable it was made for; gives what
        the family calls it; None: its own name says it.
      slots: how the optimizers keep slots, "by variable" or "by name"; None: they have none.
      slot_names: of a rule, what the family calls a state by another name.
      clips_in_turn: whether the optimizers clip by value and then by norm, and 0 is a limit; others
        do one of them, and 0 is none.
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
