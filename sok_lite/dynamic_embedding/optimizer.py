"""`DynamicEmbeddingOptimizer`: has an optimizer train dynamic embeddings as well."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import tensorflow as tf

from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.optimizers.all_ranks import summed
from sok_lite.bridge.optimizers.here import StepsHere
from sok_lite.bridge.optimizers.keras3 import KERAS3
from sok_lite.bridge.optimizers.minimize import check_any
from sok_lite.bridge.optimizers.settings import family_of
from sok_lite.bridge.optimizers.v1 import V1
from sok_lite.dynamic_embedding.ranks import communicator
from sok_lite.dynamic_embedding.saved_optimizer import known_to_keras
from sok_lite.dynamic_embedding.slots import SlotTrainable, SlotVariable
from sok_lite.dynamic_embedding.trainable import TRAINS_TABLES, TrainableWrapper


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
      The same object: its `apply_gradients` has changed, and where Keras 3 has no `minimize` it
      has one. Where it has a `get_slot`, that gives the states of a trainable as well. Models of
      Keras that are compiled with it train the tables of their layers, and save it so that what
      `load_model` gives does so too.

    Raises:
      TypeError: it is no optimizer.
      ValueError: `synchronous` where several ranks were launched that nothing connects.
      NotImplementedError: an optimizer whose step means nothing for rows; see docs/optimizers.md.
    """
    family = family_of(self)
    if synchronous:
        communicator("`synchronous=True`")
    steps = getattr(getattr(self, "apply_gradients", None), "__self__", None)
    if isinstance(steps, _Steps):  # wrapped before: it goes on
        steps.synchronous = synchronous
        return self
    steps = _Steps(self, synchronous)
    self.apply_gradients = steps.apply_gradients
    if family is KERAS3:
        self.apply, self.minimize = steps.apply, steps.minimize
    if family.slots is not None:
        self.get_slot = partial(get_slot, steps)
    if family is not V1:
        known_to_keras(self, DynamicEmbeddingOptimizer, synchronous)
    setattr(self, TRAINS_TABLES, True)
    return self


# A checkpoint of the optimizer asks as well, and is told of no states: bridge/optimizers/shown.py
# knows it by the frames, so that no other may lie in between, such as one of AutoGraph's.
def get_slot(steps: "_Steps", var: Any, name: str) -> Any:
    """Returns a slot of a variable; of a trainable the state of its variable's rows.

    Args:
      steps: of the optimizer.
      var: a variable or trainable.
      name: of the slot, as in `get_slot_names`.

    Returns:
      Of a trainable a `SlotTrainable`. Where there is no such slot, or none yet, an optimizer of
      TF1 gives None, and a legacy one of tf_keras raises KeyError.
    """
    is_ours = isinstance(var, TrainableWrapper)
    own = type(steps.optimizer).get_slot
    slot = own(steps.optimizer, var.params.rows if is_ours else var, name)
    if slot is None or not is_ours:
        return slot
    return SlotTrainable(SlotVariable(var.params, slot, name), name)


def _dense_step(optimizer: Any, dense: Any, **options: Any) -> Any:
    # The methods of the class: those of the object are what called.
    own = type(optimizer)
    if family_of(optimizer) is KERAS3:
        return own.apply(optimizer, *zip(*dense, strict=True))
    return own.apply_gradients(optimizer, dense, **options)


@unconverted
class _Steps(StepsHere):
    """What takes the steps of an optimizer, in eager mode and in each graph.

    Args:
      optimizer: the optimizer.
      synchronous: whether dense gradients are summed over ranks.
    """

    def __init__(self, optimizer: Any, synchronous: bool) -> None:
        super().__init__(optimizer, _dense_step)
        self.synchronous = synchronous
        self.here()  # refuses what it cannot follow

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Does what `apply_gradients` does, in the form that Keras 3 has beside it."""
        optimizer = self.optimizer
        if trainable_variables is None:
            return type(optimizer).apply(optimizer, grads)
        return self.apply_gradients(zip(grads, trainable_variables, strict=True))

    def apply_gradients(
        self,
        grads_and_vars: Iterable[tuple[Any, Any]],
        global_step: Any = None,
        name: str | None = None,
        **options: Any,
    ) -> Any:
        """Updates variables, those of dynamic embeddings among them, with their gradients.

        Raises:
          ValueError: no variable has a gradient.
        """
        pairs = list(grads_and_vars)
        if pairs:
            check_any(pairs)
        ours = [
            (grad, var.params)
            for grad, var in pairs
            if isinstance(var, TrainableWrapper) and grad is not None
        ]
        dense = [pair for pair in pairs if not isinstance(pair[1], TrainableWrapper)]
        if self.synchronous and communicator("`synchronous=True`").size > 1:
            dense = summed(dense)
        of_tables = [(grad, params.rows) for grad, params in ours]
        is_v1 = family_of(self.optimizer) is V1
        more = {"global_step": global_step, "name": name} if is_v1 else {}
        done = self.take([*of_tables, *dense], **more)
        noted = _noted(ours, done)
        if tf.executing_eagerly() or tf.inside_function() or not noted:
            return done
        return tf.group(done, *noted)

    def minimize(self, loss: Any, var_list: Any = None, tape: tf.GradientTape | None = None) -> Any:
        """Updates variables so that a loss falls.

        Args:
          loss: a function of nothing, or a tensor that `tape` has recorded.
          var_list: variables and trainables, or a function that gives them.
          tape: has recorded, or is to record, the loss.
        """
        pairs = self.here().compute_gradients(loss, var_list, tape=tape)
        return self.optimizer.apply_gradients(pairs)


def _noted(ours: list[tuple[Any, Any]], done: Any) -> list[Any]:
    """Tells policies and tables of the keys that were trained; returns operations of a graph."""
    trained: dict[int, tuple[Any, list[Any]]] = {}
    for grad, params in ours:
        trained.setdefault(id(params), (params, []))[1].append(grad.indices)
    operations = []
    is_tf1 = not tf.executing_eagerly() and not tf.inside_function()
    for params, indices in trained.values():
        with tf.control_dependencies([done] if is_tf1 else []):
            keys = tf.concat(indices, 0) if len(indices) > 1 else tf.identity(indices[0])
            if params.restrict_policy is not None:
                given = params.rows.given_keys(keys)
                operations.append(params.restrict_policy.apply_update(given))
            if hasattr(params.rows, "after_update"):
                operations.append(params.rows.after_update(keys))
    return [operation for operation in operations if operation is not None]
