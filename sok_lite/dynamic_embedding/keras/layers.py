"""Layers of dynamic embeddings: `Embedding`, `SquashedEmbedding`, `FieldWiseEmbedding`, ..., and a
`LayerNormalization` that also takes ragged rows.

They are layers of `tf.keras`. For tf_keras beside Keras 3, call `layers_for(tf_keras)`.

Configs hold functions and initializers unchanged: Keras serializes its own and registered ones.
"""

import functools
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import tensorflow as tf

from sok_lite.bridge.checkpoint import saved_dtypes
from sok_lite.bridge.keras import guard, held
from sok_lite.bridge.keras.called import as_keys
from sok_lite.bridge.keras.classes import (
    layer_class,
    made_so_far,
    object_of,
    of_one_config,
    register_as_layer,
    root_of,
    share_in_copies,
)
from sok_lite.bridge.keras.hooks import is_loading
from sok_lite.bridge.stored import read_tensors, write_tensors
from sok_lite.dynamic_embedding import creators, restrict_policies
from sok_lite.dynamic_embedding.by_name import layer_variable, number_of_shared
from sok_lite.dynamic_embedding.optimizer import DynamicEmbeddingOptimizer
from sok_lite.dynamic_embedding.partition import default_partition_fn
from sok_lite.dynamic_embedding.shadow_ops import (
    HvdVariable,
    ShadowVariable,
    embedding_lookup_unique,
)
from sok_lite.dynamic_embedding.variable import Variable

__all__ = [
    "BasicEmbedding",
    "Embedding",
    "FieldWiseEmbedding",
    "HvdAllToAllEmbedding",
    "LayerNormalization",
    "SquashedEmbedding",
    "layers_for",
]

_PACKAGE = "sok_lite.dynamic_embedding"  # the name under which Keras saves classes
# Further arguments of `Embedding`, with defaults.
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
_SHARED = "shared_variable"  # config key: the number of a shared variable
_POLICIES = ("FrequencyRestrictPolicy", "TimestampRestrictPolicy")
_CREATORS = ("CuckooHashTableCreator", "HkvHashTableCreator")
# Whether the other ranks save their tables too.
all_ranks_save: ContextVar[bool] = ContextVar("all_ranks_save", default=False)


# ---- layers for both Keras versions -------------------------------------------------------------


class EmbeddingPart:
    """Rows of keys: ids of any shape, dense or ragged, return ids.shape + [embedding_size].

    Only training inserts the keys of a batch. Compile the model with
    `de.DynamicEmbeddingOptimizer(optimizer)`.

    Args:
      embedding_size: elements of a row.
      key_dtype: tf.int64, tf.int32 or tf.string.
      value_dtype: of the rows, such as tf.float32.
      combiner: for subclasses that combine rows.
      initializer: of new rows, or a Keras name; None: Keras' `RandomNormal()`.
      devices: one name per shard; None: one shard.
      name: of the layer; its variable is `<name>-parameter`, its trainable `<name>-shadow`. Layers
        of one name share the variable until Keras' `clear_session()`.
      with_unique: no effect: keys are deduplicated where that is cheapest.
      short_file_name, bp_v2, restrict_policy, partitioner, kv_creator, checkpoint, row_shape: of
        the layer's `Variable`.
      trainable: whether it is trained.
      init_capacity: keys to reserve memory for.
      max_norm: rows are clipped to this norm when read.
      distribute_strategy: None, or one with a single replica.
      keep_distribution: whether the config includes `devices` and `kv_creator`.
      **kwargs: of the Keras layer class.

    Attributes:
      params: the `Variable`.
      shadow: the `ShadowVariable`.

    Raises:
      TypeError: `embedding_size` is no integer.
      ValueError: a layer of the name has a variable of other dtypes, size or number of shards.
    """

    package: Any  # keras or tf_keras
    _combiners: tuple[str, ...] | None = None  # combiners of a class that combines rows
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
        size = _as_integer("embedding_size", embedding_size)
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
        # Not the variable's, which stays trainable: the layer may be unfrozen later. tf_keras asks
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
            restrict_policy=_policy_config(options["restrict_policy"]),
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
            self._configured.kv_creator = _creator_config(options["kv_creator"])

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
        """Returns the output shape of `call`."""
        return tf.TensorShape([*tf.TensorShape(input_shape), self.embedding_size])

    # ---------------------------------------------------------------- saving

    def get_config(self) -> dict[str, Any]:
        """Returns the config for `from_config`, which makes a new and empty table."""
        config = {**super().get_config(), **vars(self._configured)}  # type: ignore[misc]
        number = number_of_shared(self.params)
        return config if number is None else {**config, _SHARED: number}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Returns a layer from a config of `get_config`.

        Layers of one model that shared a table share the new one.

        Raises:
          NotImplementedError: it shares a table, but its model cannot be followed: loading began
            before this module was imported, or its from_config() bypasses Keras'.
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
        config["restrict_policy"] = _policy_of(config.get("restrict_policy"))
        config["kv_creator"] = _creator_of(config.get("kv_creator"))
        with of_one_config(own):
            return cls(**config)

    def save_own_variables(self, store: Any) -> None:
        """Writes the table's rows and states to a Keras store."""
        save_rows(self.params, store)

    def load_own_variables(self, store: Any) -> None:
        """Replaces the table's content by what `save_own_variables` wrote."""
        load_rows(self.params, store)


class SquashedEmbeddingPart(EmbeddingPart):
    """Rows of keys, reduced: ids (batch, ...) return (batch, embedding_size), ids (n,) one row.

    Arguments as for `Embedding`; `combiner` is "sum", "mean", "max", "min" or "prod".
    """

    _combiners = ("sum", "mean", "max", "min", "prod")

    def call(self, ids: Any) -> Any:
        """Returns the rows of ids, reduced over all dimensions but the first and last."""
        rows = self._rows(ids)
        reduce = getattr(tf, f"reduce_{self.combiner}")
        # Innermost first, as ragged rows allow.
        for axis in range(rows.shape.rank - 2, 0, -1):
            rows = reduce(rows, axis=axis)
        return rows if rows.shape.rank > 1 and len(ids.shape) > 1 else reduce(rows, axis=0)

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        """Returns the output shape of `call`."""
        outer = list(tf.TensorShape(input_shape))
        return tf.TensorShape([*outer[: len(outer) > 1], self.embedding_size])


class HvdAllToAllEmbeddingPart(EmbeddingPart):
    """Rows of keys from the tables of all ranks, as `Embedding` returns them.

    The partitioner assigns each key an owner rank, whose table has its row and receives the
    gradient, summed over ranks. Every rank must make the layer and call it equally often; see
    `HvdVariable`.

    Args:
      with_unique, with_secondary_unique: no effect: keys are always deduplicated before and after
        the exchange.
      mpi_size: expected number of ranks; None: not checked.
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
        """Writes this rank's rows and states; NotImplementedError if other ranks do not save
        theirs.
        """
        if self.hvd_variable.mpi_size > 1 and not all_ranks_save.get():
            raise NotImplementedError(
                f"{self.name!r} has its rows on {self.hvd_variable.mpi_size} ranks; this would "
                "save those of one. Have every rank call "
                "de.keras.models.de_hvd_save_model(model, path)."
            )
        super().save_own_variables(store)


class LayerNormalizationPart:
    """Keras' `LayerNormalization`, which also takes ragged inputs and pads them with 0."""

    def call(self, inputs: Any) -> Any:
        """Returns inputs normalized over `axis`; ragged inputs stay ragged."""
        if not isinstance(inputs, tf.RaggedTensor):
            return super().call(inputs)  # type: ignore[misc]
        rows = super().call(inputs.to_tensor())  # type: ignore[misc]
        return tf.RaggedTensor.from_tensor(
            rows, inputs.nested_row_lengths(), row_splits_dtype=inputs.row_splits.dtype
        )


class FieldWiseEmbeddingPart(EmbeddingPart):
    """Rows of keys, combined per field: ids (batch, n) return (batch, nslots, embedding_size).

    Args:
      nslots: number of fields.
      slot_map_fn: maps ids to fields in [0, nslots), of the same shape.
      others: of `Embedding`; `combiner` is "sum", "mean" or "sqrtn". A field without ids is 0.

    Raises:
      ValueError: `slot_map_fn` is not callable.
      TypeError: `nslots` is no integer.
    """

    _combiners = ("sum", "mean", "sqrtn")

    def __init__(
        self,
        embedding_size: int,
        nslots: int,
        slot_map_fn: Callable[[tf.Tensor], Any] | None = None,
        key_dtype: Any = tf.int64,
        value_dtype: Any = tf.float32,
        combiner: str = "sum",
        initializer: Any = None,
        devices: str | Sequence[str] | None = None,
        name: str = "SlotDynamicEmbeddingLayer",
        with_unique: bool = True,
        short_file_name: bool = False,
        **kwargs: Any,
    ) -> None:
        if not callable(slot_map_fn):
            raise ValueError(
                "`slot_map_fn` must be a function that takes ids and gives the field of each. "
                f"Received: slot_map_fn={slot_map_fn!r}."
            )
        nslots = _as_integer("nslots", nslots)
        super().__init__(
            embedding_size,
            key_dtype,
            value_dtype,
            combiner,
            initializer,
            devices,
            name,
            with_unique,
            short_file_name,
            **kwargs,
        )
        self.nslots, self.slot_map_fn = nslots, slot_map_fn
        self._configured.nslots, self._configured.slot_map_fn = nslots, slot_map_fn

    def call(self, ids: Any) -> tf.Tensor:
        """Returns the rows of ids, combined per field."""
        if len(ids.shape) > 2:
            raise NotImplementedError(
                "FieldWiseEmbedding takes ids (batch, n) or (n,). Received: ids of rank "
                f"{len(ids.shape)}. Reshape them."
            )
        ids = as_keys(ids, self.key_dtype_name)
        slots = tf.cast(self.slot_map_fn(ids), tf.int64)
        if isinstance(ids, tf.RaggedTensor):
            batch, number = ids.nrows(tf.int64), tf.cast(ids.value_rowids(), tf.int64)
            flat, slots = ids.flat_values, getattr(slots, "flat_values", slots)
        else:
            ids = tf.convert_to_tensor(ids)
            batch = tf.shape(ids, tf.int64)[0] if ids.shape.rank == 2 else tf.ones([], tf.int64)
            flat, slots = tf.reshape(ids, [-1]), tf.reshape(slots, [-1])
            each = tf.size(flat, tf.int64) // tf.maximum(batch, 1)
            number = tf.repeat(tf.range(batch), each)
        slots = _checked_slots(slots, self.nslots)
        rows = self._rows(flat)
        combine = getattr(tf.math, f"unsorted_segment_{self.combiner.replace('sqrtn', 'sqrt_n')}")
        combined = combine(rows, number * self.nslots + slots, batch * self.nslots)
        shape = [self.nslots, self.embedding_size]
        if len(ids.shape) == 1:
            return tf.reshape(combined, shape)
        return tf.reshape(combined, tf.stack([batch, *shape]))

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        """Returns the output shape of `call`."""
        outer = list(tf.TensorShape(input_shape))
        return tf.TensorShape([*outer[: len(outer) > 1], self.nslots, self.embedding_size])


def _checked_slots(slots: tf.Tensor, nslots: int) -> tf.Tensor:
    text = f"slot_map_fn must give numbers in [0, {nslots})."
    check = tf.debugging.Assert(tf.reduce_all((slots >= 0) & (slots < nslots)), [text, slots])
    with tf.control_dependencies([] if check is None else [check]):
        return tf.identity(slots)


# ---- the tables of a layer in its Keras store; bridge/stored.py ---------------------------------


def save_rows(params: Any, store: MutableMapping[str, Any]) -> None:
    """Writes rows, states and status of a `Variable` to a store of arrays by name."""
    for prefix, table in _tables(params).items():
        write_tensors(store, table.saved_tensors(), prefix)


def load_rows(params: Any, store: Mapping[str, Any]) -> None:
    """Replaces the content of a `Variable` by what `save_rows` wrote.

    ValueError: something is missing or is from another kind of variable. Nothing has changed.
    """
    tables = _tables(params)
    tensors = {
        prefix: read_tensors(store, _saved_dtypes(table), params.name, prefix)
        for prefix, table in tables.items()
    }
    for prefix, table in tables.items():
        table.restore_tensors(tensors[prefix])


def _tables(params: Any) -> dict[str, Any]:
    """Returns the tables of a variable by name prefix."""
    if not (params.checkpoint and params.rows.checkpoint):
        return {}
    policy = params.restrict_policy
    status = {} if policy is None else {"status_": policy.status.rows}
    return {"rows_": params.rows, **status}


def _saved_dtypes(table: Any) -> dict[str, tf.DType]:
    texts = {"texts": tf.string} if table.key_dtype == tf.string else {}
    return saved_dtypes(table.key_type, table.dtype) | texts


# ---- arguments in a config, which Keras writes as JSON, and back ---------------------------------


def _policy_config(policy: Any) -> Any:
    """Returns the name of one of our restrict policies; other policies unchanged."""
    name = getattr(policy, "__name__", None)
    return name if name in _POLICIES and getattr(restrict_policies, name) is policy else policy


def _policy_of(config: Any) -> Any:
    """Inverts `_policy_config`."""
    return getattr(restrict_policies, config) if config in _POLICIES else config


def _creator_config(creator: Any) -> Any:
    """Returns kind and settings of one of our creators; other creators unchanged."""
    name = type(creator).__name__
    if name not in _CREATORS or type(creator) is not getattr(creators, name) or creator.saver:
        return creator
    settings = dict(vars(creator.config)) if creator.config is not None else None
    if settings and "evict_strategy" in settings:
        settings["evict_strategy"] = int(settings["evict_strategy"])
    return {"creator": name, "settings": settings}


def _creator_of(config: Any) -> Any:
    """Inverts `_creator_config`."""
    if not isinstance(config, dict) or "creator" not in config:
        return config
    settings = config["settings"]
    is_hkv = config["creator"] == "HkvHashTableCreator"
    made = creators.HkvHashTableConfig(**settings) if is_hkv and settings is not None else None
    return getattr(creators, config["creator"])(made)


def _as_integer(name: str, value: Any) -> int:
    """Returns a size as an int. TypeError: not an integer. ValueError: below 1."""
    try:
        number = int(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"`{name}` must be an integer. Received: {name}={value!r}.") from error
    if number < 1:
        raise ValueError(f"`{name}` must be at least 1. Received: {name}={number}.")
    return number


# ---- classes per Keras ---------------------------------------------------------------------------


def layers_for(package: Any) -> SimpleNamespace:
    """Registers and returns the layers for `keras`, `tf_keras` or `tf.keras`, or TypeError."""
    return _layers_of(root_of(package))


@functools.cache
def _layers_of(package: Any) -> SimpleNamespace:
    _read_old_optimizers(package)
    base = layer_class(package)

    def make_class(name: str, part: type, above: type = base) -> Any:
        members = {"__module__": __name__, "package": package}
        return register_as_layer(_PACKAGE, name, part, above, members)

    embedding = make_class("Embedding", EmbeddingPart)
    return SimpleNamespace(
        Embedding=embedding,
        BasicEmbedding=embedding,
        SquashedEmbedding=make_class("SquashedEmbedding", SquashedEmbeddingPart, embedding),
        FieldWiseEmbedding=make_class("FieldWiseEmbedding", FieldWiseEmbeddingPart, embedding),
        HvdAllToAllEmbedding=make_class(
            "HvdAllToAllEmbedding", HvdAllToAllEmbeddingPart, embedding
        ),
        LayerNormalization=make_class(
            "LayerNormalization", LayerNormalizationPart, package.layers.LayerNormalization
        ),
    )


def _read_old_optimizers(package: Any) -> None:
    """Makes a Keras read optimizers in files of sok_lite from before 2026-11-27."""

    def from_config(made: type, config: dict[str, Any], custom_objects: Any = None) -> Any:
        plain = package.saving.deserialize_keras_object(config["optimizer"], custom_objects)
        return DynamicEmbeddingOptimizer(plain, synchronous=config["synchronous"])

    name = "DynamicEmbeddingOptimizer"
    members = {"get_config": dict, "from_config": classmethod(from_config)}
    package.saving.register_keras_serializable(_PACKAGE, name)(type(name, (), members))


_of_program = layers_for(tf.keras)
Embedding = _of_program.Embedding
BasicEmbedding = _of_program.BasicEmbedding
SquashedEmbedding = _of_program.SquashedEmbedding
FieldWiseEmbedding = _of_program.FieldWiseEmbedding
HvdAllToAllEmbedding = _of_program.HvdAllToAllEmbedding
LayerNormalization = _of_program.LayerNormalization
# A program that also imported tf_keras may load a model with it.
for _name in held.PACKAGES:
    if hasattr(sys.modules.get(_name), "layers"):
        layers_for(sys.modules[_name])
