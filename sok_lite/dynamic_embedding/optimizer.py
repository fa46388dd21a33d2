"""`DynamicEmbeddingOptimizer`: makes an optimizer train dynamic embeddings too."""

from types import MethodType
from typing import Any

import tensorflow as tf

from sok_lite.bridge.keras.training import OVER_RANKS
from sok_lite.bridge.optimizers.keras3 import KERAS3
from sok_lite.bridge.optimizers.minimize import check_any, gradients_of
from sok_lite.bridge.optimizers.patched import know_api, train_for
from sok_lite.bridge.optimizers.settings import family_of
from sok_lite.dynamic_embedding.ranks import communicator
from sok_lite.dynamic_embedding.slots import SlotTrainable, SlotVariable
from sok_lite.dynamic_embedding.trainable import API, TrainableWrapper


def DynamicEmbeddingOptimizer(
    self: Any, bp_v2: bool = False, synchronous: bool = False, **kwargs: Any
) -> Any:
    """Makes an optimizer train dynamic embeddings together with dense variables.

    Its step updates the rows that have a gradient and inserts new ones; docs/optimizers.md
    describes each optimizer. States start and end with their row. A variable's restrict policy is
    notified of the keys.

    Args:
      self: an optimizer of Keras 3, tf_keras (new or legacy) or tf.compat.v1.train.
      bp_v2: no effect: an update always changes the current row, atomically.
      synchronous: sum gradients of dense variables over all ranks before the step; those of dynamic
        embeddings are unchanged. Every rank must then take every step.
      **kwargs: not used.

    Returns:
      The same object. Keras 3's gains `minimize`. `get_slot`, where it exists, also returns states
      of trainables. Keras models compiled with it train the tables of their layers, also after
      `load_model`.

    Raises:
      TypeError: not an optimizer.
      ValueError: `synchronous`, but several launched ranks are not connected.
      NotImplementedError: an optimizer whose step has no meaning for rows; see docs/optimizers.md.
    """
    family = family_of(self)
    if synchronous:
        communicator("`synchronous=True`")
    train_for(API, self, synchronous=synchronous)
    attributes = vars(self)  # Keras and TensorFlow would track attributes that are set
    attributes.pop(OVER_RANKS, None)
    if synchronous:
        attributes[OVER_RANKS] = "sum"
    if family is KERAS3:
        attributes["minimize"] = MethodType(_minimize, self)
    if family.slots is not None:
        attributes["get_slot"] = MethodType(get_slot, self)
    return self


know_api(API, DynamicEmbeddingOptimizer)


# An optimizer's checkpoint also calls it, and is told of no states: bridge/optimizers/slots.py
# recognizes it by the frames, so no other may lie between, such as AutoGraph's.
def get_slot(self: Any, var: Any, name: str) -> Any:
    """Returns a slot of a variable; for a trainable the state of its variable's rows.

    Args:
      name: of the slot, such as "m"; `get_slot_names` lists them.

    Returns:
      A `SlotTrainable` for a trainable. Without such a slot a TF1 optimizer returns None, and a
      legacy tf_keras one raises KeyError.
    """
    is_ours = isinstance(var, TrainableWrapper)
    slot = type(self).get_slot(self, var.params.rows if is_ours else var, name)
    if slot is None or not is_ours:
        return slot
    return SlotTrainable(SlotVariable(var.params, slot, name), name)


def _minimize(
    self: Any, loss: Any, var_list: Any = None, tape: tf.GradientTape | None = None
) -> Any:
    """Minimizes a loss (a function, or recorded by `tape`) with an optimizer of Keras 3."""
    pairs = gradients_of(self, KERAS3, loss, var_list, tape)
    check_any(pairs)
    return self.apply_gradients(pairs)
