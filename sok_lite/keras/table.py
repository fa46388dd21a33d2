"""`Table` for both Keras versions; classes.py makes it a layer class of each."""

import itertools
import weakref
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from sok_lite.backend import Backend
from sok_lite.bridge import table_exports, table_ops, writes
from sok_lite.bridge.checks import refusing_names
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.keras.classes import made_so_far, object_of, says_what_is_shared
from sok_lite.bridge.keras.hooks import is_cloning
from sok_lite.bridge.loss_weight import make_weight
from sok_lite.bridge.optimizers.patched import train_alone
from sok_lite.bridge.texts import remember_texts, texts_of_keys
from sok_lite.bridge.variable import facts_html, table_for_variable
from sok_lite.engine.dtypes import check_integer, is_integer
from sok_lite.engine.initializer_spec import make_initializer, refusing_sizes, warn_of_fans
from sok_lite.engine.owner import HASH, MOD
from sok_lite.engine.table import EmbeddingTable, make_table
from sok_lite.engine.table.hkv_options import HkvOptions, refuse_hybrid_option, round_up_capacities
from sok_lite.keras.features import Feature, rows_of
from sok_lite.keras.lookup_fusion import note_call, prepared_rows
from sok_lite.keras.table_keys import key_of, keys_of, tensor_of_ids
from sok_lite.keras.weight import TableWeight, load_rows, save_rows

_numbers = itertools.count()

_TEXTS = "str"
_KEY_TYPES = ("int64", "int32", "uint64", _TEXTS)
_ROW_DTYPES = ("float32", "float16", "bfloat16")
_OWNERS = {"mod": MOD, "hash": HASH}
_OF_LOOKUP_SPARSE = "filter_ratio"
_OF_BATCH = (
    "A step touches the rows of its batch alone: penalize those, for example with "
    "keras.layers.ActivityRegularization behind the table. docs/howto/regularization.md has more."
)
_OF_VARIABLE = (
    "It is an option of sok_lite.DynamicVariable: all ranks have a part of a Table, and its "
    "gradients travel as float32."
)
# Arguments of Keras' Embedding or of DynamicVariable, and what to write instead.
_INSTEAD = {
    "input_dim": 'A table has a name and no number of rows: Table("item", 16).',
    "output_dim": "It is called `dim` here.",
    "dimension": "It is called `dim` here; `dimension` is that of sok_lite.DynamicVariable.",
    "embeddings_initializer": "It is called `initializer` here.",
    "embeddings_regularizer": _OF_BATCH,
    "activity_regularizer": _OF_BATCH,
    "embeddings_constraint": "A step changes single rows: clip what you look up, for example with "
    "tf.clip_by_norm(rows, 1.0, axes=[-1]).",
    "constraint": "A step changes single rows: clip what you look up.",
    "mask_zero": "For an id that stands for no id use sok_lite.keras.Embedding(table, "
    "mask_value=0).",
    "mask_value": "It is an argument of sok_lite.keras.Embedding(table, mask_value=0).",
    "combiner": 'It is an argument of sok_lite.keras.Embedding(table, combiner="mean").',
    "input_length": "Ids may have any shape: leave it out.",
    "weights": "Make the table, and then table.assign(keys, rows).",
    "sparse": "The gradients of a table are sparse always: leave it out.",
    "mode": _OF_VARIABLE,
    "gradient_dtype": _OF_VARIABLE,
}
# Config key: the number, in its process, of a table that several layers share.
_SHARED = "shared"


class TablePart:
    """A table for layers to look up keys in, and itself a layer that does so.

    Only training inserts keys: every key of a batch gets a row. The optimizer that the model is
    compiled with trains the rows that have a gradient, and the table stores their optimizer state.
    Called as a layer, ids of any shape, dense or ragged or lists, return ids.shape + [dim]. On
    several ranks each holds a part of the keys, and every rank must call the layer.

    Args:
      name: of the layer; also seeds the rows.
      dim: elements of a row.
      initializer: initial value of a row: a number, or a Keras initializer or its name; None:
        Keras' "uniform", as for its Embedding.
      key_type: "int64", "int32" or "uint64"; or str: strings, whose key is `tf.fingerprint`
        (FarmHash Fingerprint64), 64 bits that are the same everywhere.
      var_type: "hbm": grows without bound. "hybrid": evicts keys beyond `max_capacity`.
      row_dtype: "float32", "float16" or "bfloat16". The layer's output has its compute dtype.
      seed: of random rows.
      row_shape: (fan_in, fan_out) for Glorot, He, Lecun and VarianceScaling, such as (1000, dim) to
        start as an Embedding of 1000 rows does. None: (dim, dim), as for a vector, with a warning
        on what that changes.
      keep_texts: whether a table of key_type=str remembers its strings, so that `texts` finds them
        by key. Each rank keeps those that its training lookups ask for.
      trainable: whether it is trained.
      partitioner: assigns keys to ranks: "mod", key mod ranks; or "hash", which spreads keys that
        "mod" would crowd on some ranks, such as even numbers on two.
      optimizer: trains this table instead of the compiled optimizer, with its own learning rate,
        schedule and clipping: an optimizer of the same Keras, or its name; tables may share one.
        None: the model's. It counts only steps with a gradient of the table. It is saved with the
        table.
      dtype: as in Keras.
      **options: `init_capacity`, keys to reserve memory for; for "hybrid" see
        `sok_lite.engine.table.hkv_options.HkvOptions`. Capacities are rounded up to powers of two,
        with a warning.

    Attributes:
      variable: the weight that `model.trainable_weights` lists.
      optimizer: the table's own optimizer, or None.

    Raises:
      TypeError, ValueError: an invalid argument.

    Examples:
      >>> items = sk.Table("item", 2, initializer="ones")
      >>> items(tf.constant([7, 9]), training=True).numpy().tolist()
      [[1.0, 1.0], [1.0, 1.0]]
      >>> items(tf.constant([8])).numpy().tolist(), len(items)
      ([[0.0, 0.0]], 2)
    """

    package: Any  # keras or tf_keras
    name: str
    variable: TableWeight

    @refusing_names(**_INSTEAD)
    @refusing_sizes
    def __init__(
        self,
        name: str,
        dim: int,
        initializer: Any = None,
        key_type: Any = "int64",
        *,
        var_type: str = "hbm",
        row_dtype: Any = "float32",
        seed: int = 0,
        row_shape: tuple[int, int] | None = None,
        keep_texts: bool = False,
        trainable: bool = True,
        partitioner: str = "mod",
        optimizer: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        names = _checked_arguments(name, dim, seed, key_type, row_dtype, var_type, keep_texts)
        _check_among("partitioner", partitioner, tuple(_OWNERS))
        key_type, row_dtype = names
        options = _checked_options(var_type, options)
        super().__init__(name=name, trainable=trainable, dtype=dtype)  # type: ignore[call-arg]
        optimizer = _own_optimizer(self.package, name, optimizer)
        if initializer is None or isinstance(initializer, str):
            initializer = self.package.initializers.get(initializer or "uniform")
        initial = make_initializer(initializer, int(dim), row_shape)
        if row_shape is None:
            warn_of_fans(initializer, int(dim), name)

        def make(backend: Backend) -> EmbeddingTable:
            return make_table(
                var_type,
                backend,
                int(dim),
                initializer=initial,
                key_type="int64" if key_type == _TEXTS else key_type,
                dtype=row_dtype,
                name=name,
                seed=int(seed),
                owner=_OWNERS[partitioner],
                **options,
            )

        # No dict: Keras and TensorFlow track those.
        self._configured = SimpleNamespace(
            dim=int(dim),
            initializer=initializer,
            key_type=key_type,
            var_type=var_type,
            row_dtype=row_dtype,
            seed=int(seed),
            **({"row_shape": tuple(row_shape)} if row_shape is not None else {}),
            **({"keep_texts": True} if keep_texts else {}),
            **({"partitioner": partitioner} if partitioner != "mod" else {}),
            **({"optimizer": optimizer} if optimizer is not None else {}),
            **options,
        )
        self._number = next(_numbers)
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        table = table_for_variable(TableWeight.kind, make, can_be_cloned=True)
        table.ids = "texts" if key_type == _TEXTS else "integers"
        if keep_texts:
            remember_texts(table)
        make_weight()
        self.variable = TableWeight(table, name=name, trainable=True)
        self.variable.is_frozen = not trainable
        self.optimizer = self.variable.own_optimizer = optimizer
        self.supports_masking = self.built = True

    # ---------------------------------------------------------------- facts

    @property
    def dim(self) -> int:
        """Elements of a row."""
        return self._configured.dim

    @property
    def has_texts(self) -> bool:
        """Whether its ids are strings."""
        return self._configured.key_type == _TEXTS

    @property
    def key_dtype_name(self) -> str:
        """Name of the dtype of ids."""
        return "string" if self.has_texts else self._configured.key_type

    @property
    def listed(self) -> TableWeight | None:
        """The weight that Keras 3 lists."""
        return getattr(self, "variable", None)

    def __len__(self) -> int:
        """Returns the number of keys on this rank."""
        return int(on_device(self._table.backend, lambda: self._table.size))

    def __contains__(self, key: Any) -> bool:
        """Returns whether a key, or the string of a string table, has a row on this rank."""
        return table_ops.has(self.variable, key_of(self, key))

    def __getitem__(self, key: Any) -> NoReturn:
        raise TypeError(
            f"Table {self.name!r} cannot be indexed. Received: table[{key!r}]. Call it: "
            "table(tf.constant([key])) gives the rows of keys, table.export() gives all."
        )

    def __call__(self, ids: Any, *args: Any, **kwargs: Any) -> Any:
        _check_names_differ(self.name, ids)
        rows = super().__call__(tensor_of_ids(self, ids), *args, **kwargs)  # type: ignore[misc]
        note_call(self, [ids], not args and not kwargs)
        return rows

    def __bool__(self) -> bool:
        return True  # an empty table is a table

    def __repr__(self) -> str:
        text = on_device(self._table.backend, self._table.summary)
        return f"<sok_lite.keras.Table {self.name!r} dim={self.dim} {text}>"

    def _repr_html_(self) -> str:
        """Returns the HTML for notebooks."""
        facts = on_device(self._table.backend, self._table.facts, self.variable.dtype.name)
        if self.has_texts:
            facts["key type"] = "text, by its 64-bit hash"
        return facts_html(f"sok_lite.keras.Table {self.name}", facts)

    @property
    def _table(self) -> EmbeddingTable:
        return self.variable.table

    def statistics(self) -> Any:
        """Returns sizes and counters of this rank's part."""
        return table_ops.statistics(self.variable)

    def count_params(self) -> int:
        """Returns the number of elements of all rows on this rank."""
        return len(self) * self.dim

    # ---------------------------------------------------------------- rows

    def call(self, ids: Any, training: Any = None) -> Any:
        """Returns the rows of ids."""
        return self._rows(ids, training)

    @tf.autograph.experimental.do_not_convert
    def _rows(self, ids: Any, training: Any) -> Any:
        prepared = prepared_rows(self, [ids])
        (rows,) = prepared or rows_of(self.features_of(), [ids], [None], training)
        return tf.cast(rows, self.compute_dtype)  # type: ignore[attr-defined]

    def features_of(self) -> list[Feature]:
        """Returns the feature that it looks up when called as a layer."""
        return [Feature(self)]

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the output shape of `call`."""
        return (*input_shape, self.dim)

    def export(self, cutoff: float | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns this rank's keys (n,), ascending (hashes of strings), and rows (n, dim).

        Args:
          cutoff: skips keys whose row has every |element| < cutoff; None: keeps all.
        """
        return table_exports.export(self.variable, cutoff)

    def assign(self, keys: Any, rows: Any) -> None:
        """Sets the rows of keys on this rank, inserting new keys. No communication.

        On several ranks pass each rank the keys that it owns: those with key mod ranks == rank (by
        hash, for strings), unless `partitioner` is "hash". Here and below, keys of a string table
        are strings, or their hashes as an int64 tensor or array, as returned by `export` and
        `sok_lite.hash_strings`; Python integers are rejected.

        Args:
          keys, rows: (n,) integers or strings, and (n, dim).

        Raises:
          TypeError: keys are not of the table's kind, or rows are not floats.
          ValueError: shapes do not match, a key does not fit the key type, or other ranks own keys
            that have no row here. Nothing has changed.
        """
        keys = keys_of(self, keys, remember=True)
        writes.insert_or_assign(self.variable, "Table.assign", keys, rows, None)

    def contains(self, keys: Any, all_ranks: bool = False) -> tf.Tensor:
        """Returns whether keys of any shape have a row on this rank, bool of the same shape.

        Args:
          all_ranks: whether to ask the owner ranks; each rank may pass its own keys, and every rank
            must call it.
        """
        return table_ops.contains(self.variable, keys_of(self, keys), all_ranks)

    def scores(self, keys: Any) -> tf.Tensor:
        """Returns the scores of keys of any shape, uint64; the lowest is evicted first.

        A key without a row has 0. Without an eviction strategy the score is the number of the last
        lookup that asked for the key.
        """
        return table_ops.scores(self.variable, keys_of(self, keys))

    def decay_scores(self, factor: float) -> None:
        """Multiplies the counts that kLfu and kEpochLfu evict by, on this rank, rounding down.

        A formerly popular key then has to be seen again to stay.

        Args:
          factor: from 0 to 1 (else an error, as for a table that does not evict by counts), such as
            0.5 once a day. The next increment of a checkpoint is a full one.
        """
        table_ops.decay_scores(self.variable, factor)

    def erase(self, keys: Any) -> tf.Tensor:
        """Removes keys of any shape with rows and optimizer state; returns how many existed."""
        return table_ops.erase(self.variable, keys_of(self, keys))

    def expire(
        self, *, num_lookups: int | None = None, seconds: float | None = None, **others: Any
    ) -> tf.Tensor:
        """Removes this rank's keys that were not seen recently; returns how many.

        Pass exactly one of the arguments; days and the like raise. The call is atomic and shows no
        progress: removing half of 10 million keys of dim 16 takes about a second of one core.

        Args:
          num_lookups: removes keys that none of the table's last `num_lookups` lookups asked for.
          seconds: removes keys that no lookup asked for within that time.
        """
        return table_ops.expire(self.variable, num_lookups=num_lookups, seconds=seconds, **others)

    def clear(self) -> None:
        """Removes all keys of this rank."""
        table_ops.clear(self.variable)

    def texts(self, keys: Any, missing: str | bytes | None = None) -> tf.Tensor:
        """Returns the strings of keys, for a table with keep_texts=True. Every rank must call it.

        It asks all ranks: the rank that looked a string up knows it, not the one that has the row.
        A string is known from the first training lookup or `assign` with it. Each rank may pass its
        own keys. It waits for all ranks and needs eager mode.

        Args:
          keys: int64 of any shape, as `export` returns them.
          missing: replaces strings that no rank knows; None: such keys raise.

        Returns:
          The strings as bytes, in the shape of `keys`.

        Raises:
          ValueError: strings are not kept, or a key has none. TypeError: an invalid argument.
            RuntimeError: in a tf.function. All ranks raise the same; for invalid arguments before
            any communication.
        """
        return texts_of_keys(self._table, keys, missing)

    # ---------------------------------------------------------------- saving

    def get_config(self) -> dict[str, Any]:
        """Returns the config for `from_config`, which makes a new and empty table.

        Raises:
          NotImplementedError: `clone_model` asks for a table with several users, which the clone
            would not share.
        """
        config = {**super().get_config(), **vars(self._configured)}  # type: ignore[misc]
        return _shared_config(config, self.name, self._number) if self._num_users() > 1 else config

    def _num_users(self) -> int:
        """Returns how many layers look up in it, including itself in a functional model."""
        is_layer = getattr(self, "inbound_nodes", None) or hasattr(self, "output")
        return len(self._users) + bool(is_layer)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Returns a table; NotImplementedError if layers share it, and only this one is made."""
        return _table_from_config(cls, config)

    def save_own_variables(self, store: Any) -> None:
        """Writes keys, rows, optimizer states and scores of all ranks to a Keras store.

        Raises:
          NotImplementedError: on several ranks, called outside `model.save` and
            `model.save_weights`, which every rank calls.
        """
        save_rows(self.variable, store, self.name)

    def load_own_variables(self, store: Any) -> None:
        """Replaces the content by what `save_own_variables` wrote, on any number of ranks.

        Raises:
          ValueError: something is missing or is from another kind of table. Nothing has changed.
        """
        load_rows(self.variable, store, self.name)


def _refuse_as_tensor(table: TablePart, *_: Any, **__: Any) -> NoReturn:
    """Refuses to convert a table, which TensorFlow would read as an empty list."""
    raise TypeError(
        f"Table {table.name!r} is no tensor. Call it: table(ids) gives the rows of ids, in place "
        "of tf.nn.embedding_lookup(table, ids) or tf.gather(table, ids); table.export() gives all."
    )


tf.register_tensor_conversion_function(TablePart, _refuse_as_tensor, priority=10)


# ---- arguments -----------------------------------------------------------------------------------


def _checked_arguments(
    name: Any,
    dim: Any,
    seed: Any,
    key_type: Any,
    row_dtype: Any,
    var_type: Any,
    keep_texts: Any,
) -> tuple[str, str]:
    """Returns the names of the key type and row dtype; raises TypeError or ValueError."""
    if not isinstance(name, str):
        raise TypeError(
            f"`name` must be a string. Received: name={name!r}. A table has a name and a "
            'dimension, and no size: Table("item", 16).'
        )
    check_integer("dim", dim, 1)
    check_integer("seed", seed)
    key_type = _TEXTS if key_type in (str, _TEXTS, tf.string) else _dtype_name(key_type)
    row_dtype = _dtype_name(row_dtype)
    _check_among("key_type", key_type, _KEY_TYPES)
    _check_among("row_dtype", row_dtype, _ROW_DTYPES)
    _check_among("var_type", var_type, ("hbm", "hybrid"))
    if not isinstance(keep_texts, bool):
        raise TypeError(f"`keep_texts` must be a bool. Received: keep_texts={keep_texts!r}.")
    if keep_texts and key_type != _TEXTS:
        raise ValueError(
            f"Only a table of key_type=str has texts to keep. Received: key_type={key_type!r} with "
            "keep_texts=True."
        )
    return key_type, row_dtype


def _checked_options(var_type: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that are not None; raises TypeError or ValueError."""
    of_hybrid = [name for name in HkvOptions.names() if name != _OF_LOOKUP_SPARSE]
    known = of_hybrid if var_type == "hybrid" else ["init_capacity"]
    if _OF_LOOKUP_SPARSE in options:
        raise TypeError(
            f"`{_OF_LOOKUP_SPARSE}` is for sok.lookup_sparse with use_low_frequency_filter=True, "
            "and a Table is looked up by layers. Give `enter_threshold` with "
            'var_type="hybrid": a key gets a row when so many batches have had it.'
        )
    for name in sorted(set(options) - set(known)):
        if name not in of_hybrid:
            raise TypeError(
                f"A table of var_type={var_type!r} has no option {name!r}. Received: "
                f"{name}={options[name]!r}. It has: {', '.join(known)}."
            )
        if options[name] is not None:
            refuse_hybrid_option(name, options[name], var_type)
    given = {name: value for name, value in options.items() if value is not None}
    return round_up_capacities(given) if var_type == "hybrid" else given


def _own_optimizer(package: Any, name: str, given: Any) -> Any:
    """Returns the table's own optimizer, or None.

    TypeError: not an optimizer of the same Keras. ValueError: an unknown name. NotImplementedError:
    it cannot train rows, or not beside another.
    """
    if given is None:
        return None
    optimizer = package.optimizers.get(given) if isinstance(given, str) else given
    if not isinstance(optimizer, package.optimizers.Optimizer):
        inside = getattr(given, "optimizer", None)  # as in sok.OptimizerWrapper
        is_wrapped = isinstance(inside, package.optimizers.Optimizer)
        raise TypeError(
            f"`optimizer` of table {name!r} must be an optimizer of {package.__name__}, or its "
            f"name. Received: {type(given).__module__}.{type(given).__name__}."
            + (f" Give the {type(inside).__name__} that it wraps." if is_wrapped else "")
        )
    train_alone(optimizer, f"table {name!r}")
    return optimizer


def _dtype_name(dtype: Any) -> str:
    """Returns the name of a dtype, or the text of another value."""
    try:
        return (
            str(dtype)
            if is_integer(dtype)
            else tf.as_dtype(np.int64 if dtype is int else dtype).name
        )
    except TypeError:
        return str(dtype)


def _check_names_differ(name: str, ids: Any) -> None:
    """Raises ValueError if a keras.Input that a table is called with has the table's name."""
    history = getattr(ids, "_keras_history", None)  # Keras 3 has operations, tf_keras layers
    origin = getattr(history, "operation", getattr(history, "layer", None))
    if origin is not None and origin.name == name:
        raise ValueError(
            f"The table and its keras.Input have the same name, {name!r}, but names in a model "
            f'must differ. Rename one, for example the table: sk.Table("{name}_table", ...).'
        )


def _check_among(argument: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(
            f"`{argument}` must be one of {', '.join(allowed)}. Received: {argument}={value!r}."
        )


# ---- the config of a table that several layers of a model share: it has a number there -----------


def _shared_config(config: dict[str, Any], name: str, number: int) -> dict[str, Any]:
    """Returns the config of a shared table; `clone_model`, which would not share it, is refused."""
    if is_cloning():
        raise NotImplementedError(
            f"clone_model() does not know that several layers share table {name!r}: "
            "it would give each a table of its own. Use "
            "type(model).from_config(model.get_config()), which keeps it shared."
        )
    # Keras' own sharing does not cover models within a model.
    return {**config, _SHARED: number}


def _table_from_config(cls: Any, config: dict[str, Any]) -> Any:
    """Returns a table from a config, or the one already made for a shared table.

    NotImplementedError: several layers share it, and only this one is being made.
    """
    config, made = dict(config), made_so_far()
    config.pop("filter_ratio", None)  # in old configs, where it had no effect
    number = config.pop(_SHARED, None)
    # Some Keras versions track shared objects themselves.
    if number is None or (made is None and says_what_is_shared(cls.package)):
        return _make_table(cls, config)
    if made is None:
        raise NotImplementedError(
            f"Several layers share table {config['name']!r}, and one of them cannot be made of "
            "its config alone. Make the whole model, by type(model).from_config(config) or "
            "model_from_json, or give the layers that you make the same Table."
        )
    if number not in made:
        made[number] = _make_table(cls, config)
    return made[number]


def _make_table(cls: Any, config: dict[str, Any]) -> Any:
    made = {"initializer": object_of(config["initializer"], cls.package)}
    if config.get("optimizer") is not None:
        # A copy: the object of an unserialized config belongs to the other table.
        its = object_of(config["optimizer"], cls.package)
        made["optimizer"] = type(its).from_config(its.get_config())
    return cls(**{**config, **made})
