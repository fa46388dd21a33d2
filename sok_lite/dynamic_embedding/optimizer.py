"""`DynamicEmbeddingOptimizer`: has an optimizer train dynamic embeddings as well."""

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
    """Has an optimizer train dynamic embeddings together with dense variables.

    The optimizer takes its step on the rows that have a gradient and inserts those that are new;
    docs/optimizers.md says how each does. States begin with a row and go with it. Where the
    variable has a restrict policy, it is told of the keys.

    Args:
      self: an optimizer of Keras 3, tf_keras (new or legacy) or tf.compat.v1.train.
      bp_v2: accepted: an update changes rows as they are at the time, in one piece, with it and
        without.
      synchronous: sums the gradients of dense variables over all ranks before the step. Those of
        dynamic embeddings stay as they are. Every rank must then take every step.
      **kwargs: not used.

    Returns:
      The same object. Where Keras 3 has no `minimize` it has one. Where it has a `get_slot`, that
      gives the states of a trainable as well. Models of Keras that are compiled with it train the
      tables of their layers, and so do those that `load_model` gives of them.

    Raises:
      TypeError: it is no optimizer.
      ValueError: `synchronous` where several ranks were launched that nothing connects.
      NotImplementedError: an optimizer whose step means nothing for rows; see docs/optimizers.md.
    """
    family = family_of(self)
    if synchronous:
        communicator("`synchronous=True`")
    train_for(API, self, synchronous=synchronous)
    attributes = vars(self)  # what is set, Keras and TensorFlow would track
    attributes.pop(OVER_RANKS, None)
    if synchronous:
        attributes[OVER_RANKS] = "sum"
    if family is KERAS3:
        attributes["minimize"] = MethodType(_minimize, self)
    if family.slots is not None:
        attributes["get_slot"] = MethodType(get_slot, self)
    return self


know_api(API, DynamicEmbeddingOptimizer)


# A checkpoint of the optimizer asks as well, and is told of no states: bridge/optimizers/slots.py
# knows it by the frames, so that no other may lie in between, such as one of AutoGraph's.
def get_slot(self: Any, var: Any, name: str) -> Any:
    """Returns a slot of a variable; of a trainable the state of its variable's rows.

    Args:
      self: the optimizer.
      var: a variable or trainable.
      name: of the slot, such as "m"; `get_slot_names` lists them.

    Returns:
      Of a trainable a `SlotTrainable`. Where there is no such slot, or none yet, an optimizer of
      TF1 gives None, and a legacy one of tf_keras raises KeyError.
    """
    is_ours = isinstance(var, TrainableWrapper)
    slot = type(self).get_slot(self, var.params.rows if is_ours else var, name)
    if slot is None or not is_ours:
        return slot
    return SlotTrainable(SlotVariable(var.params, slot, name), name)


def _minimize(
    self: Any, loss: Any, var_list: Any = None, tape: tf.GradientTape | None = None
) -> Any:
    """Updates variables so that a loss falls, with an optimizer of Keras 3.

    Args:
      loss: a function of nothing, or a tensor that `tape` has recorded.
      var_list: variables and trainables, or a function that gives them.
      tape: has recorded, or is to record, the loss.
    """
    pairs = gradients_of(self, KERAS3, loss, var_list, tape)
    check_any(pairs)
    return self.apply_gradients(pairs)
