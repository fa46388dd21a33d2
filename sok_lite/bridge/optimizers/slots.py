"""Optimizer states by the names that programs know them by, and where programs look for them.

Legacy Keras optimizers and those of tf.compat.v1.train keep slots by variable. The states of a
table's rows lie with the table; what the optimizer has under the table's key are views of them,
made when somebody asks for one. The optimizer's own dense slots stay as they are, and where it
lists or saves its slots those of tables are not there: they are saved with their table.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from sok_lite.bridge import tf_private
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.optimizer_states import SlotView
from sok_lite.bridge.optimizers.fallback_step import Now, fallback_steps
from sok_lite.bridge.optimizers.family import FallbackStep, Family, Settings
from sok_lite.bridge.optimizers.settings import family_of, settings_of
from sok_lite.bridge.type_spec import alive
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine import optimizers as rules
from sok_lite.engine.callers import callers
from sok_lite.engine.optimizers import UpdateRule
from sok_lite.engine.rows.column import Kinds
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


# ---- the states of rows among the slots of an optimizer ------------------------------------------

_View = Callable[[], SlotView]


def view_of(optimizer: Any, variable: TableVariable, name: str) -> SlotView:
    """Returns a view of a state that an optimizer has of a variable's rows.

    Args:
      name: the rule's or the framework's.

    Raises:
      ValueError: it has no such state in this variable.
    """
    settings = settings_of(optimizer, family_of(optimizer))
    return SlotView(variable, state_name(settings, name), optimizer, partial(kinds_of, settings))


def show_slots(
    optimizer: Any,
    family: Family,
    settings: Settings | FallbackStep,
    variables: Iterable[TableVariable],
) -> None:
    """Puts the states of variables where an optimizer has slots, if it is of a kind that has any.

    Only attributes of this one optimizer change, and none where a copy of it takes the step.
    """
    if family.slots is None or isinstance(settings, FallbackStep):
        return
    names = own_names(settings, family)
    for variable in variables:
        views = {name: _view(optimizer, variable, name) for name in names}
        if family.slots == "by variable":
            key = variable._shared_name if variable._in_graph_mode else variable._unique_id
            optimizer._slots[key] = _Views(views)
            optimizer._slot_names += [name for name in names if name not in optimizer._slot_names]
            continue
        for name, view in views.items():
            slots = optimizer._slots.get(name)
            if not isinstance(slots, _SlotsAndViews):
                slots = optimizer._slots[name] = _SlotsAndViews(slots or {})
            slots.views[_v1_key(variable)] = view


def _view(optimizer: Any, variable: TableVariable, name: str) -> _View:
    optimizer_of, variable_of = weakref.ref(optimizer), weakref.ref(variable)
    return lambda: view_of(alive(optimizer_of), alive(variable_of), name)


def _v1_key(variable: TableVariable) -> Any:
    if variable._in_graph_mode:
        return (variable.op.graph, variable.op.name)
    return variable._unique_id


class _Views(Mapping[Any, SlotView]):
    """Views of states, each made when it is asked for; a checkpoint of the optimizer has none."""

    def __init__(self, views: dict[Any, _View]) -> None:
        self._views = views

    def __getitem__(self, key: Any) -> SlotView:
        if _is_saving():
            raise KeyError(key)
        return self._views[key]()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def __reduce__(self) -> Any:
        return dict, ()  # a copy of the optimizer has no states in the table


class _SlotsAndViews(dict[Any, Any]):
    """Slots by variable, and views that are found by who asks for one, but are not listed.

    Attributes:
      views: by the key of the variable.
    """

    def __init__(self, slots: Mapping[Any, Any]) -> None:
        super().__init__(slots)
        self.views: dict[Any, _View] = {}

    def __missing__(self, key: Any) -> SlotView:
        return _Views(self.views)[key]

    def get(self, key: Any, default: Any = None) -> Any:
        """Returns a slot, as of any dict."""
        return self[key] if key in self.views and not _is_saving() else super().get(key, default)

    def __bool__(self) -> bool:
        # Without dense slots it would be taken for none.
        return bool(self.views) or len(self) > 0

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


# What may lie between whoever wants a slot and `_is_saving`: all of them hand a question on.
_ASKING = {"get_slot", "get", "__getitem__", "__missing__"}


def _is_saving() -> bool:
    """Whether a checkpoint asks for the slots that it is to list with the optimizer."""
    asking = (each for each in callers() if each.f_code.co_name not in _ASKING)
    frame = next(asking, None)
    name = None if frame is None else frame.f_globals.get("__name__")
    return name in tf_private.SLOTS_OF_CHECKPOINTS


class Shown(weakref.WeakSet[Any]):
    """The variables whose states an optimizer has among its slots."""

    def __reduce__(self) -> Any:
        return Shown, ()  # a copy of an optimizer has none
