"""`TrainableWrapper` and `ShadowVariable`: variables for gradient tapes and optimizers.

A trainable has no rows and no buffers of its own: it is the variable's table by another name. Many
may be of one variable; their gradients are of the same rows, and the rows have one state for each
optimizer, whatever the trainable.
"""

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf

from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.inference import MissingKeyPolicy
from sok_lite.bridge.local_lookup import local_lookup
from sok_lite.bridge.optimizers.patched import patch_optimizers, trains_for
from sok_lite.bridge.sparse_matrix import clipped
from sok_lite.bridge.variable import TableVariable
from sok_lite.dynamic_embedding.mode import ModelMode, get_model_mode

# What optimizers that train dynamic embeddings say of themselves.
API = "dynamic_embedding"


@unconverted
class TrainableWrapper(TableVariable):
    """A variable as a graph trains it: `var_list` and gradients name it.

    Args:
      params: the variable.
      ids: keys that it was made for; None: it is for any.
      max_norm: rows are clipped to this norm where they are read, and never written so.
      name: in TensorFlow; None: the variable's.
      trainable: whether it is trained; None: as the variable is.

    Attributes:
      params, max_norm: the arguments.
      is_frozen: whether it is not to be trained for the time being, as a layer of Keras can say.
    """

    kind = "de.TrainableWrapper"
    instead_of_value = "Use params.lookup(keys) for some rows and params.export() for all."
    instead_of_write = "Use params.upsert(keys, values)."
    instead_of_copy = "Make another one of the same variable."
    instead_of_save = (
        "Hold it in a layer of de.keras.layers, and use de.keras.models.save_model(model, path); "
        "or tf.train.Checkpoint. For serving alone there is sok_lite.export_serving."
    )
    instead_of_custom_step = (
        "Hold it in a layer of de.keras.layers, and compile the model with "
        "de.DynamicEmbeddingOptimizer(optimizer)."
    )
    instead_of_this_optimizer = (
        "Call de.DynamicEmbeddingOptimizer(optimizer), after any other wrapper, such as "
        "hvd.DistributedOptimizer, that makes a new optimizer."
    )
    instead_of_partitions = "Look each up by itself."
    # Of TF1: it is trainable, but needs no initialization, and no saver saves it.
    collections = (tf.compat.v1.GraphKeys.LOCAL_VARIABLES,)
    is_frozen = False
    regularizer = None  # Keras 3 asks each weight of a model for it

    def __init__(
        self,
        params: Any,
        ids: Any = None,
        max_norm: float | None = None,
        *,
        name: str | None = None,
        trainable: bool | None = None,
    ) -> None:
        patch_optimizers()  # an optimizer that Keras loads is to train it, too
        self.params = params
        self.max_norm = max_norm
        self._ids = ids
        trained = params.trainable if trainable is None else trainable
        super().__init__(
            params.rows.table,
            name=name or f"{params.name}_trainable",
            trainable=bool(trained and params.is_differentiable),
        )
        if params.checkpoint:
            self._track_trackable(params, "params")  # a checkpoint of a layer has its rows

    @property
    def trainable(self) -> bool:
        """Whether gradient tapes watch it."""
        return super().trainable and not self.is_frozen

    @property
    def shape(self) -> tf.TensorShape:
        """[0, dim]: it has no rows of its own."""
        return tf.TensorShape([0, self.dimension])

    def is_trained_by(self, optimizer: Any) -> bool:
        """Whether an optimizer went through `DynamicEmbeddingOptimizer`."""
        return trains_for(API, tf1_optimizer_in(optimizer))

    @property
    def trained_as(self) -> TableVariable:
        """The variable's rows: those of all its trainables are one table."""
        rows: TableVariable = self.params.rows
        return rows

    def after_step(self, keys: tf.Tensor) -> list[Any]:
        """Tells the policy and the table of the keys that were trained."""
        params, told = self.params, []
        if params.restrict_policy is not None:
            told.append(params.restrict_policy.apply_update(params.rows.original_keys(keys)))
        if hasattr(params.rows, "after_update"):
            told.append(params.rows.after_update(keys))
        return [each for each in told if each is not None]

    @property
    def ids(self) -> Any:
        """The keys that were looked up last outside of tf.functions; (0,) if there were none."""
        return tf.zeros([0], self.params.key_dtype) if self._ids is None else self._ids

    def lookup(self, ids: Any) -> tf.Tensor:
        """Returns the rows of keys, with a gradient; nothing is inserted.

        Args:
          ids: keys of any shape, of the variable's key dtype.

        Returns:
          ids.shape + [dim].
        """
        if not tf.inside_function():
            self._ids = ids
        if not self.trainable or get_model_mode() == ModelMode.INFERENCE:
            return clipped(self.params.lookup(ids), self.max_norm)
        keys = self.params.keys_of(ids, remember=True)
        return clipped(local_lookup(self, keys, MissingKeyPolicy(False)), self.max_norm)

    def sparse_read(self, indices: Any, name: Any = None, *_: Any, **options: Any) -> tf.Tensor:
        """Returns the rows of keys with a gradient, as `lookup` does; nothing is inserted."""
        return self.lookup(indices)

    def read_value(self, do_prefetch: bool = True) -> tf.Tensor:
        """Returns the rows of `ids` as they are now, ids.shape + [dim]."""
        return self.lookup(self.ids)

    def prefetch_values(self, update: bool = False) -> tf.Tensor:
        """Returns the rows of `ids` as they are now, without a gradient."""
        return clipped(self.params.lookup(self.ids), self.max_norm)

    def transform(self, values: tf.Tensor) -> tf.Tensor:
        """Returns rows as they are read: clipped to `max_norm`."""
        return clipped(values, self.max_norm)

    def update_op(self, v0: Any = None) -> Any:
        """Writes rows to `ids`: by default those that they have, which inserts missing keys.

        Returns:
          None in eager mode, the operation in a graph.
        """
        ids = self.ids
        return self.params.upsert(ids, self.params.lookup(ids) if v0 is None else v0)

    def size(self) -> tf.Tensor:
        """Returns the number of keys of the variable, scalar int64."""
        return self.params.size()

    # ---------------------------------------------------------------- checkpoints

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {}  # the variable is saved, once

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        return tf.no_op()


@unconverted
class ShadowVariable(TrainableWrapper):
    """A variable as eager code and tf.functions train it; the variable has it by its name.

    Args:
      params: a `Variable`.
      name: the variable's `get_trainable_by_name` gives it back.
      max_norm: rows are clipped to this norm where they are read; None: they are not.
      trainable: whether it is trained.
      distribute_strategy: must be None, or have one replica.
      ids: a tf.Variable that is assigned the keys of each lookup; None: there is none.
      exists, collections, model_mode: not used.

    Raises:
      NotImplementedError: in a graph of TF1.
      TypeError: `params` or `ids` is no such thing.
    """

    kind = "de.shadow_ops.ShadowVariable"

    def __init__(
        self,
        params: Any,
        name: str = "ShadowVariable",
        max_norm: float | None = None,
        trainable: bool = True,
        distribute_strategy: Any = None,
        *,
        ids: tf.Variable | None = None,
        exists: Any = None,
        collections: Any = None,
        model_mode: Any = None,
    ) -> None:
        with tf.init_scope():
            if not tf.executing_eagerly():
                raise NotImplementedError(
                    "A ShadowVariable is for eager mode and tf.function. In a graph of TF1 use "
                    "de.embedding_lookup(..., return_trainable=True)."
                )
        if not getattr(params, "is_dynamic_embedding", False):
            raise TypeError(f"`params` must be a de.Variable. Received: {type(params).__name__}.")
        if ids is not None and not isinstance(ids, tf.Variable):
            raise TypeError(f"`ids` must be a tf.Variable. Received: {type(ids).__name__}.")
        if distribute_strategy is not None and not isinstance(
            distribute_strategy, tf.distribute.Strategy
        ):
            raise TypeError(
                "`distribute_strategy` must be a tf.distribute.Strategy or None. "
                f"Received: {type(distribute_strategy).__name__}."
            )
        super().__init__(
            params, None, max_norm, name=name, trainable=trainable and params.trainable
        )
        self._buffer = ids
        params.trainable_store[name] = self

    @property
    def ids(self) -> Any:
        return super().ids if self._buffer is None else self._buffer

    def lookup(self, ids: Any) -> tf.Tensor:
        if self._buffer is not None:
            self._buffer.assign(tf.reshape(ids, [-1]))
        return super().lookup(ids)


def tf1_optimizer_in(optimizer: Any) -> Any:
    """Returns the optimizer of TF1 that tf_keras has wrapped for a model; another as it is."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, tf.compat.v1.train.Optimizer) else optimizer


class DEResourceVariable:
    """A marker for the buffers that other implementations keep: there are none here."""


def trainable_wrapper_filter(
    iterable_object_in: Iterable[Any],
    test_unaggregated_function: Callable[[Any], bool] | None = None,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Splits (gradient, variable) pairs, or variables, into (dense, of dynamic embeddings).

    Args:
      iterable_object_in: the pairs.
      test_unaggregated_function: takes one and tells whether it is of a dynamic embedding; None:
        whether its variable is a `TrainableWrapper`.
    """

    def is_trainable(item: Any) -> bool:
        return isinstance(item[1] if isinstance(item, tuple) else item, TrainableWrapper)

    test = test_unaggregated_function or is_trainable
    items = list(iterable_object_in)
    return (
        tuple(item for item in items if not test(item)),
        tuple(item for item in items if test(item)),
    )
