"""The slots that an optimizer has for a dense variable: momenta and the like, of its shape."""

from typing import Any

from sok_lite.bridge import tf_private
from sok_lite.bridge.optimizers.clones import LISTS_OF_ALL, is_variable
from sok_lite.bridge.optimizers.family import Family
from sok_lite.bridge.optimizers.keras3 import KERAS3
from sok_lite.bridge.optimizers.legacy import LEGACY
from sok_lite.bridge.optimizers.v1 import V1


def dense_slots(optimizer: Any, family: Family, variable: Any, makes: bool) -> dict[str, Any]:
    """Returns the slots of a variable, by name.

    Args:
      optimizer: of TensorFlow or Keras, none that scales the loss.
      family: of it.
      variable: of TensorFlow, made in eager mode.
      makes: whether missing ones are made, as the first step would. Keras 3 and tf_keras make those
        of all variables at once, when the optimizer is built: not here.
    """
    if family is LEGACY:
        if makes:
            optimizer._create_all_weights([variable])
        slots = dict(optimizer._slots.get(variable._unique_id, {}))
    elif family is V1:
        if makes:
            optimizer._create_slots([variable])
        slots = {name: optimizer.get_slot(variable, name) for name in optimizer.get_slot_names()}
    else:
        slots = _slots_of_keras(optimizer, family, variable)
    shape = tuple(variable.shape)
    return {
        name: slot
        for name, slot in slots.items()
        if slot is not None and tuple(slot.shape) == shape
    }


def _slots_of_keras(optimizer: Any, family: Family, variable: Any) -> dict[str, Any]:
    """Returns what is at the variable's place in lists with a place for each variable."""
    named = tf_private.NUMBERS_OF_VARIABLES["keras" if family is KERAS3 else "tf_keras"]
    numbers = getattr(optimizer, named, {})  # it comes with the build
    number = numbers.get(getattr(optimizer, tf_private.KEY_OF_A_VARIABLE)(variable))
    if number is None:
        return {}
    lists = {
        name.strip("_"): value
        for name, value in list(vars(optimizer).items())
        if isinstance(value, (list, tuple)) and len(value) == len(numbers)
        if name not in LISTS_OF_ALL and not name.startswith("_self_")
    }
    return {name: value[number] for name, value in lists.items() if is_variable(value[number])}
