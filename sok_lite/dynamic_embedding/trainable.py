"""`TrainableWrapper` and `ShadowVariable`: variables for gradient tapes and optimizers.

A trainable has no rows or buffers: it is the variable's table by another name. A variable may have
many; their gradients go to the same rows, with one state per optimizer, whatever the trainable.
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

# How optimizers that train dynamic embeddings identify themselves.
API = "dynamic_embedding"


@unconverted
class TrainableWrapper(TableVariable):
    """A variable's trainable in a graph, for `var_list` and gradients.

    Args:
      params: the variable.
      ids: keys that it was made for; None: any.
      max_norm: clip rows to this norm when read; they are never stored clipped.
      name: in TensorFlow; None: the variable's.
      trainable: whether it is trained; None: as the variable is.

    Attributes:
      params, max_norm: the arguments.
      is_frozen: whether a Keras layer currently excludes it from training.
    """

    kind = "de.TrainableWrapper"
    instead_of_value = "Use params.lookup(keys) for some rows and params.export() for all."
    instead_of_write = "Use params.upsert(keys, values)."
    instead_of_copy = "Make another one of the same variable."
    instead_of_save = (
        "Save a model with layers of de.keras.layers by de.keras.models.save_model(model, path), "
        "or use tf.train.Checkpoint. For serving alone there is sok_lite.export_serving."
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
    # In TF1 it is trainable, but needs no initialization, and savers skip it.
    collections = (tf.compat.v1.GraphKeys.LOCAL_VARIABLES,)
    is_frozen = False

    def __init__(
        self,
        params: Any,
        ids: Any = None,
        max_norm: float | None = None,
        *,
        name: str | None = None,
        trainable: bool | None = None,
    ) -> None:
        patch_optimizers()  # optimizers that Keras loads must train it too
        self.params = params
        self.max_norm = max_norm
        self.is_in_checkpoints = params.checkpoint
        self._ids = ids
        trained = params.trainable if trainable is None else trainable
        super().__init__(
            params.rows.table,
            name=name or f"{params.name}_trainable",
            trainable=bool(trained and params.is_differentiable),
        )
        if params.checkpoint:
            self._track_trackable(params, "params")  # a checkpoint of a layer then has its rows

    @property
    def trainable(self) -> bool:
        """Whether gradient tapes watch it."""
        return super().trainable and not self.is_frozen

    @property
    def shape(self) -> tf.TensorShape:
        """[0, dim]: it has no rows of its own."""
        return tf.TensorShape([0, self.dimension])

    def is_trained_by(self, optimizer: Any) -> bool:
        """Whether an optimizer was passed to `DynamicEmbeddingOptimizer`."""
        return trains_for(API, tf1_optimizer_in(optimizer))

    @property
    def trained_as(self) -> TableVariable:
        """The variable's rows: all its trainables are one table."""
        rows: TableVariable = self.params.rows
        return rows

    def after_step(self, keys: tf.Tensor) -> list[Any]:
        """Notifies the policy and the table of trained keys."""
        params, told = self.params, []
        if params.restrict_policy is not None:
            told.append(params.restrict_policy.apply_update(params.rows.original_keys(keys)))
        if hasattr(params.rows, "after_update"):
            told.append(params.rows.after_update(keys))
        return [each for each in told if each is not None]

    @property
    def ids(self) -> Any:
        """The keys last looked up outside of tf.functions; (0,) without any."""
        return tf.zeros([0], self.params.key_dtype) if self._ids is None else self._ids

    def lookup(self, ids: Any) -> tf.Tensor:
        """Returns rows (ids.shape + [dim]) of keys, with a gradient; inserts nothing."""
        if not tf.inside_function():
            self._ids = ids
        if not self.trainable or get_model_mode() == ModelMode.INFERENCE:
            return clipped(self.params.lookup(ids), self.max_norm)
        keys = self.params.keys_of(ids, remember=True)
        return clipped(local_lookup(self, keys, MissingKeyPolicy(False)), self.max_norm)

    def sparse_read(self, indices: Any, name: Any = None, *_: Any, **options: Any) -> tf.Tensor:
        """As `lookup`: rows with a gradient; inserts nothing."""
        return self.lookup(indices)

    def read_value(self, do_prefetch: bool = True) -> tf.Tensor:
        """Returns the current rows of `ids`, ids.shape + [dim]."""
        return self.lookup(self.ids)

    def prefetch_values(self, update: bool = False) -> tf.Tensor:
        """Returns the current rows of `ids`, without a gradient."""
        return clipped(self.params.lookup(self.ids), self.max_norm)

    def transform(self, values: tf.Tensor) -> tf.Tensor:
        """Clips rows to `max_norm`."""
        return clipped(values, self.max_norm)

    def update_op(self, v0: Any = None) -> Any:
        """Writes rows to `ids`: by default their own, which inserts missing keys."""
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
    """A variable's trainable in eager code and tf.functions, by name.

    Args:
      params: a `Variable`.
      name: for the variable's `get_trainable_by_name`.
      max_norm: clip rows to this norm when read; None: do not clip.
      trainable: whether it is trained.
      distribute_strategy: must be None, or have one replica.
      ids: a tf.Variable that receives the keys of each lookup, or None.
      exists, collections, model_mode: not used.

    Raises:
      NotImplementedError: in a TF1 graph.
      TypeError: `params` or `ids` of another type.
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
    """Returns the TF1 optimizer that tf_keras wrapped for a model; others unchanged."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, tf.compat.v1.train.Optimizer) else optimizer


class DEResourceVariable:
    """A marker for buffers of other implementations; this package has none."""


def trainable_wrapper_filter(
    iterable_object_in: Iterable[Any],
    test_unaggregated_function: Callable[[Any], bool] | None = None,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Splits (gradient, variable) pairs, or variables, into (dense, dynamic embeddings).

    Args:
      test_unaggregated_function: tells whether one is of a dynamic embedding; None: whether its
        variable is a `TrainableWrapper`.
    """

    def is_trainable(item: Any) -> bool:
        return isinstance(item[1] if isinstance(item, tuple) else item, TrainableWrapper)

    test = test_unaggregated_function or is_trainable
    items = list(iterable_object_in)
    return (
        tuple(item for item in items if not test(item)),
        tuple(item for item in items if test(item)),
    )
