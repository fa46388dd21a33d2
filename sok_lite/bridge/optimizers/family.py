"""What a family of optimizers tells about a step: the rule it stands for, and its settings.

A setting may be a number, a variable, a tensor or a callable; what may change is read anew in every
step, what selects a formula is not.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sok_lite.engine.optimizers import UpdateRule


class Settings(NamedTuple):
    """An optimizer's update of all variables in this step.

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
    """What the optimizers of one family have in common.

    Attributes:
      name: for messages.
      settings: class name -> function of the optimizer.
      iterations: the optimizer's own step counter, or None.
      learning_rate: of the step after `iterations` steps.
      has_decay: whether the optimizers may have a `weight_decay`, and `_use_weight_decay`.
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
    slots: str | None = None
    slot_names: Mapping[type[UpdateRule], Mapping[str, str]] = field(default_factory=dict)
    clips_in_turn: bool = False
