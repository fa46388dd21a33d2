"""Optimizer states of a variable's rows, as variables for programs."""

from typing import Any, NamedTuple

import tensorflow as tf

from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.optimizer_states import SlotView
from sok_lite.bridge.optimizers.settings import family_of, settings_of
from sok_lite.bridge.optimizers.slots import own_names, view_of
from sok_lite.engine.optimizer_states import states_owned_by
from sok_lite.engine.table.locking import with_lock


class SlotTrainable(NamedTuple):
    """The result of an optimizer's `get_slot(trainable, name)`.

    Attributes:
      params: the `SlotVariable`.
      name: of the state.
    """

    params: "SlotVariable"
    name: str


@unconverted
class SlotVariable:
    """A view of one optimizer state of a variable: `dim` float32 values per key.

    Removing a key removes its states.

    Attributes:
      name: `<variable>/<state>`.
      dim: elements of a state.
      key_dtype, value_dtype: of keys and states.
      params: the variable.
    """

    def __init__(self, params: Any, view: SlotView, name: str) -> None:
        self.params, self._view = params, view
        self.name = f"{params.name}/{name}"
        self.slot_name = name
        self.dim = view.dimension
        self.key_dtype, self.value_dtype = params.key_dtype, tf.float32

    def lookup(self, keys: Any, return_exists: bool = False, name: str | None = None) -> Any:
        """Returns states, keys.shape + [dim], initial if missing; with `return_exists` also which
        exist.
        """
        states = self._view.sparse_read(self.params.keys_of(keys))
        if not return_exists:
            return states
        return states, self.params.lookup(keys, return_exists=True)[1]

    def upsert(self, keys: Any, values: Any, name: str | None = None) -> Any:
        """Sets the states of keys (n,) of the variable; ValueError if a key is not in it."""
        done = self._view.assign(tf.reshape(self.params.keys_of(keys), [-1]), values)
        return None if tf.executing_eagerly() else done

    def export(self, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns all keys (n,) and their states (n, dim)."""
        keys, states = self._view.export()
        return self.params.rows.original_keys(keys), states

    def size(self, index: int | None = None, name: str | None = None) -> tf.Tensor:
        """Returns the number of keys: all of the variable, or of one shard."""
        return self.params.size(index)

    def __repr__(self) -> str:
        return f"<de slot {self.name!r} dim={self.dim}>"


def slots_of(params: Any, optimizer: Any) -> list[SlotVariable]:
    """Returns the states that an optimizer keeps for a variable; [] if it never trained it."""
    table = params.rows.table
    if not with_lock(table, lambda: bool(states_owned_by(table.store, optimizer))):
        return []
    family = family_of(optimizer)
    names = own_names(settings_of(optimizer, family), family)
    return [SlotVariable(params, view_of(optimizer, params.rows, name), name) for name in names]
