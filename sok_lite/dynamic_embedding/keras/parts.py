"""The layers for either Keras; layers.py makes classes of them."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from sok_lite.bridge.keras import guard
from sok_lite.bridge.keras.called import as_keys
from sok_lite.bridge.keras.classes import made_so_far, object_of, of_one_config, share_in_copies
from sok_lite.bridge.keras.hooks import is_loading
from sok_lite.dynamic_embedding.by_name import layer_variable, number_of_shared
from sok_lite.dynamic_embedding.keras import config as configs
from sok_lite.dynamic_embedding.keras.stored import all_ranks_save, load_rows, save_rows
from sok_lite.dynamic_embedding.partition import default_partition_fn
from sok_lite.dynamic_embedding.shadow_ops import (
    HvdVariable,
    ShadowVariable,
    embedding_lookup_unique,
)
from sok_lite.dynamic_embedding.variable import Variable

# What `Embedding` takes besides, and the defaults.
_OPTIONS: dict[str, Any] = {
    "bp_v2": False,
    "restrict_policy": None,
    "init_capacity": 0,
    "partitioner": default_partition_fn,
    "kv_creator": None,
    "max_norm": None,
    "distribute_strategy": None,
    "keep_distribution": False,
    "checkpoint": True,
    "row_shape": None,
}
_SHARED = "shared_variable"  # in a config: the number of a variable that other layers have too


class EmbeddingPart:
    """Rows of keys: ids of any shape, dense or ragged, give ids.shape + [embedding_size].

    Training inserts the keys of a batch; nothing else does. The model is to be compiled with
    `de.DynamicEmbeddingOptimizer(optimizer)`.

    Args:
      embedding_size: elements of a row.
      key_dtype: tf.int64, tf.int32 or tf.string.
      value_dtype: of the rows, such as tf.float32.
      combiner: of the subclasses that combine.
      initializer: of new rows, or the name of one of Keras; None: `RandomNormal()` of Keras.
      devices: one name for each shard; None: one shard.
      name: of the layer; the variable is `<name>-parameter`, and what is trained `<name>-shadow`.
        Layers of one name share the variable until Keras' `clear_session()`.
      with_unique: accepted: keys are deduplicated where that is cheapest.
      short_file_name, bp_v2, restrict_policy, partitioner, kv_creator, checkpoint, row_shape: of
        the `Variable` that the layer makes.
      trainable: whether it is trained.
      init_capacity: keys to make room for.
      max_norm: rows are clipped to this norm where they are read.
      distribute_strategy: None, or one with a single replica.
      keep_distribution: whether the config has `devices` and `kv_creator`.
      **kwargs: of the layer class of Keras.

    Attributes:
      params: the `Variable`.
      shadow: the `ShadowVariable`.

    Raises:
      TypeError: `embedding_size` is no integer.
      ValueError: a layer of the name has a variable of other dtypes, size or number of shards.
    """

    package: Any  # keras or tf_keras
    _combiners: tuple[str, ...] | None = None  # of a class that combines rows, those it has
    params: Variable
    shadow: ShadowVariable
    name: str

    def __init__(
        self,
        embedding_size: int,
        key_dtype: Any = tf.int64,
        value_dtype: Any = tf.float32,
        combiner: str = "sum",
        initializer: Any = None,
        devices: str | Sequence[str] | None = None,
        name: str = "DynamicEmbeddingLayer",
        with_unique: bool = True,
        short_file_name: bool = False,
        **kwargs: Any,
    ) -> None:
        options = {option: kwargs.pop(option, default) for option, default in _OPTIONS.items()}
        size = configs.as_integer("embedding_size", embedding_size)
        if self._combiners is not None and combiner not in self._combiners:
            raise ValueError(
                f"`combiner` must be one of {self._combiners}. Received: {combiner!r}."
            )
        trainable = kwargs.get("trainable", True)
        super().__init__(name=name, **kwargs)  # type: ignore[call-arg]
        if initializer is None:
            initializer = self.package.initializers.RandomNormal()
        elif isinstance(initializer, str):
            initializer = self.package.initializers.get(initializer)
        self.embedding_size, self.combiner, self.with_unique = size, combiner, with_unique
        self.keep_distribution = options["keep_distribution"]
        self.max_norm = options["max_norm"]
        self.params = layer_variable(
            self,
            f"{name}-parameter",
            key_dtype=key_dtype,
            value_dtype=value_dtype,
            dim=size,
            devices=devices,
            partitioner=options["partitioner"],
            initializer=initializer,
            checkpoint=options["checkpoint"],
            init_size=options["init_capacity"],
            kv_creator=options["kv_creator"],
            restrict_policy=options["restrict_policy"],
            bp_v2=options["bp_v2"],
            short_file_name=short_file_name,
            row_shape=options["row_shape"],
        )
        self.shadow = ShadowVariable(
            self.params,
            name=f"{name}-shadow",
            max_norm=options["max_norm"],
            distribute_strategy=options["distribute_strategy"],
        )
        # Not of the variable, which keeps it: the layer may be told to train later. tf_keras asks
        # the layer.
        if self.package.__name__ == "keras":
            self.shadow.is_frozen = not trainable
        # No dict: Keras and TensorFlow track those.
        self._configured = SimpleNamespace(
            embedding_size=size,
            key_dtype=self.params.key_dtype.name,
            value_dtype=self.params.value_dtype.name,
            combiner=combiner,
            initializer=initializer,
            devices=self.params.devices if self.keep_distribution else None,
            with_unique=with_unique,
            short_file_name=short_file_name,
            bp_v2=options["bp_v2"],
            restrict_policy=configs.policy_config(options["restrict_policy"]),
            init_capacity=options["init_capacity"],
            max_norm=options["max_norm"],
            keep_distribution=self.keep_distribution,
            checkpoint=options["checkpoint"],
            row_shape=options["row_shape"],
            kv_creator=None,
        )
        if options["partitioner"] is not default_partition_fn:
            self._configured.partitioner = options["partitioner"]
        if self.keep_distribution and options["kv_creator"] is not None:
            self._configured.kv_creator = configs.creator_config(options["kv_creator"])

    @property
    def listed(self) -> ShadowVariable | None:
        """The weight that Keras 3 lists."""
        return getattr(self, "shadow", None)

    @property
    def key_dtype_name(self) -> str:
        """Name of the dtype of ids."""
        return self.params.key_dtype.name

    def call(self, ids: Any) -> Any:
        """Returns the rows of ids."""
        return self._rows(ids)

    @tf.autograph.experimental.do_not_convert
    def _rows(self, ids: Any) -> Any:
        ids = as_keys(ids, self.key_dtype_name)
        return embedding_lookup_unique(self.shadow, ids, self.embedding_size, self.with_unique)

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        """Returns the shape of what ids of a shape give."""
        return tf.TensorShape([*tf.TensorShape(input_shape), self.embedding_size])

    # ---------------------------------------------------------------- saving

    def get_config(self) -> dict[str, Any]:
        """Returns what `from_config` makes a layer of, with a new and empty table."""
        config = {**super().get_config(), **vars(self._configured)}  # type: ignore[misc]
        number = number_of_shared(self.params)
        return config if number is None else {**config, _SHARED: number}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Returns a layer of what `get_config` gave.

        Of the layers of one model those share a table that did.

        Raises:
          NotImplementedError: it shares one, and Keras loads a model before it is known here, or
            one whose from_config() does not call that of Keras.
        """
        config, made = dict(config), made_so_far()
        number = config.pop(_SHARED, None)
        if number is not None and made is None:
            guard.tell(share_in_copies)
            if is_loading():
                raise NotImplementedError(
                    f"Layer {config['name']!r} shares its table with another one, and this load "
                    "does not say which layers are of one model. Load it with "
                    "de.keras.models.load_model(path), or have the model's from_config() call "
                    "super().from_config()."
                )
        own = {} if number is None or made is None else made.setdefault((_SHARED, number), {})
        for name in ("initializer", "partitioner", "slot_map_fn", "restrict_policy"):
            if name in config:
                config[name] = object_of(config[name], cls.package)
        config["restrict_policy"] = configs.policy_of(config.get("restrict_policy"))
        config["kv_creator"] = configs.creator_of(config.get("kv_creator"))
        with of_one_config(own):
            return cls(**config)

    def save_own_variables(self, store: Any) -> None:
        """Writes the rows and states of the table to a store of Keras."""
        save_rows(self.params, store)

    def load_own_variables(self, store: Any) -> None:
        """Makes the table what `save_own_variables` wrote."""
        load_rows(self.params, store)


class SquashedEmbeddingPart(EmbeddingPart):
    """Rows of keys, reduced: ids (batch, ...) give (batch, embedding_size), ids (n,) one row.

    The arguments are those of `Embedding`, and `combiner` is "sum", "mean", "max", "min" or "prod".
    """

    _combiners = ("sum", "mean", "max", "min", "prod")

    def call(self, ids: Any) -> Any:
        """Returns the rows of ids, reduced over all dimensions but the first and the last."""
        rows = self._rows(ids)
        reduce = getattr(tf, f"reduce_{self.combiner}")
        # From the innermost on, as ragged rows can be reduced.
        for axis in range(rows.shape.rank - 2, 0, -1):
            rows = reduce(rows, axis=axis)
        return rows if rows.shape.rank > 1 and len(ids.shape) > 1 else reduce(rows, axis=0)

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        """Returns the shape of what ids of a shape give."""
        outer = list(tf.TensorShape(input_shape))
        return tf.TensorShape([*outer[: len(outer) > 1], self.embedding_size])


class HvdAllToAllEmbeddingPart(EmbeddingPart):
    """Rows of keys that any rank may own: what `Embedding` gives, from the tables of all ranks.

    The partitioner says which rank owns a key, and the table of a rank has the keys that it owns.
    Gradients are summed over ranks where the key is owned. Every rank must make the layer, and
    call it equally often; `HvdVariable` says more.

    Args:
      embedding_size: elements of a row.
      with_unique, with_secondary_unique: accepted: keys are deduplicated before they travel and
        where they arrive, with them and without.
      mpi_size: the number of ranks, which is known; None: not checked.
      batch_size: not used.
      **kwargs: further arguments of `Embedding`.

    Raises:
      ValueError: the ranks cannot be connected.
    """

    def __init__(
        self,
        embedding_size: int,
        with_unique: bool = True,
        with_secondary_unique: bool = True,
        mpi_size: int | None = None,
        batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(embedding_size, with_unique=with_unique, **kwargs)
        self.with_secondary_unique, self.batch_size = with_secondary_unique, batch_size
        self.hvd_variable = HvdVariable(
            self.params.name,
            self.shadow,
            self.embedding_size,
            with_unique,
            with_secondary_unique,
            mpi_size,
        )
        self._configured.with_secondary_unique = with_secondary_unique
        self._configured.batch_size = batch_size

    @tf.autograph.experimental.do_not_convert
    def _rows(self, ids: Any) -> Any:
        return self.hvd_variable.lookup(as_keys(ids, self.key_dtype_name))

    def save_own_variables(self, store: Any) -> None:
        """Writes the rows and states of this rank to a store of Keras.

        Raises:
          NotImplementedError: there are several ranks, and the others do not save theirs.
        """
        if self.hvd_variable.mpi_size > 1 and not all_ranks_save.get():
            raise NotImplementedError(
                f"{self.name!r} has its rows on {self.hvd_variable.mpi_size} ranks; this would "
                "save those of one. Have every rank call "
                "de.keras.models.de_hvd_save_model(model, path)."
            )
        super().save_own_variables(store)


class LayerNormalizationPart:
    """`LayerNormalization` of Keras for ragged inputs as well, which are padded with 0.

    Args: as of that.
    """

    def call(self, inputs: Any) -> Any:
        """Returns inputs, normalized over `axis`, ragged as they are."""
        if not isinstance(inputs, tf.RaggedTensor):
            return super().call(inputs)  # type: ignore[misc]
        rows = super().call(inputs.to_tensor())  # type: ignore[misc]
        return tf.RaggedTensor.from_tensor(
            rows, inputs.nested_row_lengths(), row_splits_dtype=inputs.row_splits.dtype
        )
