"""Optimizer states by the names that programs know them by, and made before the first update."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.optimizers.fallback_step import Now, fallback_steps
from sok_lite.bridge.optimizers.family import FallbackStep, Family, Settings
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine import optimizers as rules
from sok_lite.engine.optimizers import UpdateRule
from sok_lite.engine.rows.state_owner import Kinds
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.update import make_states

# What Keras 3, tf_keras, its legacy optimizers and those of TF1 call a state that a rule calls
# otherwise. "momentum" and "velocity" are one thing to Adam and another to RMSprop.
_FRAMEWORKS_NAMES: dict[type[UpdateRule], dict[str, str]] = {
    rules.Momentum: {"m": "momentum"},
    rules.Adam: {"momentum": "m", "velocity": "v", "velocity_hat": "vhat"},
    rules.RMSprop: {"velocity": "rms", "mg": "mean_grad", "average_gradient": "mean_grad"},
    rules.Ftrl: {"accum": "accumulator"},
    rules.Adamax: {"momentum": "m", "norm": "v"},
    rules.Nadam: {"momentum": "m", "velocity": "v"},
    rules.Lion: {"momentum": "m"},
    rules.GroupAdam: {"momentum": "m", "velocity": "v", "velocity_hat": "vhat"},
    rules.GroupMomentum: {"m": "momentum"},
    rules.Adadelta: {
        "accum": "accumulator",
        "accum_grad": "accumulator",
        "accumulated_grad": "accumulator",
        "accum_update": "delta_accumulator",
        "accum_var": "delta_accumulator",
        "accumulated_delta_var": "delta_accumulator",
    },
}


@tf.autograph.experimental.do_not_convert  # else `float` leaves a variable as it is
def rule_of(settings: Settings) -> UpdateRule:
    """Returns the rule by whose states those of rows are made, also while a graph is.

    A number that only a session could tell is left out. Of those only a momentum matters to the
    states, whether there is any: what is no plain number is.
    """
    with tf.init_scope():
        numbers = {
            name: float(value) if _is_known(value) else 0.5
            for name, value in settings.numbers.items()
            if name == "momentum" or _is_known(value)
        }
    return settings.rule(**numbers, **settings.flags)


def _is_known(value: Any) -> bool:
    is_plain = isinstance(value, (int, float))
    return is_plain or (tf.executing_eagerly() and not tf.is_symbolic_tensor(value))


def kinds_of(settings: Settings | FallbackStep, table: EmbeddingTable) -> Kinds:
    """Returns the states of the rows of a table, before the first update as well."""
    if isinstance(settings, Settings):
        return rule_of(settings).kinds(table.dim)
    steps = fallback_steps(settings)
    with tf.init_scope():
        steps.know(settings.optimizer, now_of(settings), [table])
    return steps.kinds(table)


def begin(settings: FallbackStep, stochastic_rounding: bool) -> None:
    """Tries an optimizer out that takes its steps itself, unless a TF1 graph is outside.

    Raises:
      NotImplementedError: it cannot, or not with random rounding.
    """
    if stochastic_rounding:
        raise NotImplementedError(
            f"Rows have no update rule for {type(settings.optimizer).__name__}: a copy of it "
            "updates them, and what it gives is rounded to nearest. Leave out "
            "`stochastic_rounding`, or make the table of tf.float32."
        )
    steps = fallback_steps(settings)
    with tf.init_scope():
        if tf.executing_eagerly():
            steps.try_out(settings.optimizer, now_of(settings))


@tf.autograph.experimental.do_not_convert
def now_of(settings: FallbackStep) -> Now:
    """Returns what a trial step is taken with."""
    rate = settings.family.learning_rate(settings.optimizer, 0)
    numbers = {name: float(value) for name, value in settings.numbers.items()}
    return Now(1, 0.0 if rate is None else float(rate), numbers)


def state_name(settings: Settings | FallbackStep, name: str) -> str:
    """Returns the rule's name of a state that may have the framework's; others as they are."""
    if isinstance(settings, FallbackStep):
        return name
    for rule in settings.rule.__mro__:
        if name in _FRAMEWORKS_NAMES.get(rule, {}):
            return _FRAMEWORKS_NAMES[rule][name]
    return name


def own_names(settings: Settings | FallbackStep, family: Family) -> list[str]:
    """Returns the names of the states as the optimizers of a family have them.

    No setting is evaluated, for it may be a tensor of a graph. Only of a momentum does it matter to
    the states whether there is any: what is no plain number is.
    """
    if isinstance(settings, FallbackStep):
        return fallback_steps(settings).state_names
    numbers = {
        name: value if isinstance(value, (int, float)) else 0.5
        for name, value in settings.numbers.items()
        if name == "momentum" or isinstance(value, (int, float))
    }
    others = family.slot_names.get(settings.rule, {})
    rule = settings.rule(**numbers, **settings.flags)
    return [others.get(name, name) for name in rule.states]


def create_slots(
    optimizer: Any, settings: Settings | FallbackStep, variables: Sequence[TableVariable]
) -> None:
    """Makes the states of the rows of variables now, as the first update would."""
    if not variables:
        return
    with tf.init_scope():
        tables = [variable.table for variable in variables]
        kinds = [kinds_of(settings, table) for table in tables]
        on_device(tables[0].backend, make_states, tables, kinds, optimizer)
