"""Optimizer states where programs may look for them: among the slots of the wrapped optimizer.

Legacy Keras optimizers and those of tf.compat.v1.train keep slots by variable. The states of a
table's rows lie with the table; what the optimizer has under the table's key are views of them,
made when somebody asks for one. The optimizer's own dense slots stay as they are, and where it
lists or saves its slots those of tables are not there: they are saved with their table.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from sok_lite.bridge import tf_private
from sok_lite.bridge.optimizers.family import FallbackStep, Family, Settings
from sok_lite.bridge.optimizers.settings import family_of, settings_of
from sok_lite.bridge.optimizers.slots import kinds_of, own_names, state_name
from sok_lite.bridge.slot import SlotView
from sok_lite.bridge.type_spec import alive
from sok_lite.bridge.variable import TableVariable

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
    asking = (each for each in tf_private.callers() if each.f_code.co_name not in _ASKING)
    frame = next(asking, None)
    name = None if frame is None else frame.f_globals.get("__name__")
    return name in tf_private.SLOTS_OF_CHECKPOINTS


class Shown(weakref.WeakSet[Any]):
    """The variables whose states an optimizer has among its slots."""

    def __reduce__(self) -> Any:
        return Shown, ()  # a copy of an optimizer has none
