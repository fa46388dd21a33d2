"""`Embedding` and `Embeddings` for both Keras versions; classes.py makes them layer classes."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any

import tensorflow as tf

from sok_lite.bridge.checks import refusing_names
from sok_lite.keras.features import COMBINERS, Feature, mask_of, rows_of
from sok_lite.keras.lookup_fusion import are_symbolic, note_call, prepared_rows
from sok_lite.keras.table_keys import check_mask_value, tensor_of_ids

_OF_TABLE = "It is for the table: sok_lite.keras.Table(name, dim, initializer)."


class EmbeddingsPart:
    """Rows of several features, with one lookup and one optimizer step for all of them.

    Inputs and outputs are dicts or lists, like `features`; for a list of one, the list may be left
    out. Ids may be dense, ragged or, with a combiner, sparse. Without a combiner ids of any shape
    return ids.shape + [dim]; with one, the rows along the last dimension are combined: (batch, n)
    returns (batch, dim). On several ranks every rank must call it.

    Args:
      features: dict or list of features: each a `Table`, a pair (table, combiner) or a `Feature`.
      name, trainable, dtype: as in Keras.

    Raises:
      TypeError, ValueError: invalid features.

    Examples:
      >>> user, item = sk.Table("user", 2, initializer="zeros"), sk.Table("item", 2, "ones")
      >>> rows = sk.Embeddings({"user": user, "items": (item, "sum")})
      >>> ids = {"user": tf.constant([7]), "items": tf.constant([[3, 5]])}
      >>> {name: each.numpy().tolist() for name, each in rows(ids, training=True).items()}
      {'user': [[0.0, 0.0]], 'items': [[2.0, 2.0]]}
    """

    package: Any  # keras or tf_keras
    table_class: Any  # of the same Keras
    name: str

    def __init__(
        self, features: Any, name: str | None = None, trainable: bool = True, dtype: Any = None
    ) -> None:
        named, listed = _parse_features(features, self.table_class)
        tables = list({id(each.table): each.table for each in listed}.values())
        if len({table.name for table in tables}) < len(tables):
            raise ValueError(
                "The tables of a layer must have different names, which seed their initial rows. "
                f"Received: {', '.join(repr(table.name) for table in tables)}. Give features that "
                "share a table the same Table."
            )
        super().__init__(name=name, trainable=trainable, dtype=dtype)  # type: ignore[call-arg]
        # Neither dict nor list: Keras 3 hides those from TensorFlow's checkpoints.
        self._of = SimpleNamespace(names=named, features=listed, tables=tables)
        for number, table in enumerate(tables):
            setattr(self, f"table_{number}", table)
            table._users.add(self)
            if not trainable:
                table.trainable = False
        self.supports_masking = True

    @property
    def tables(self) -> Mapping[str, Any]:
        """The tables by name."""
        # No dict: Keras would search it for layers to save and load again.
        return MappingProxyType({table.name: table for table in self._of.tables})

    def features_of(self) -> Sequence[Feature]:
        """Returns the features, in the order of their ids."""
        features: Sequence[Feature] = self._of.features
        return features

    def build(self, input_shape: Any = None) -> None:
        """Does nothing: tables already exist."""
        self.built = True

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = self._tensors(inputs)
        rows = super().__call__(inputs, *args, **kwargs)  # type: ignore[misc]
        if are_symbolic(inputs):
            note_call(self, self._flat("inputs", inputs), not args and not kwargs)
        return rows

    def _tensors(self, inputs: Any) -> Any:
        """Converts ids given as Python values to tensors."""
        tables = [feature.table for feature in self._of.features]
        if isinstance(inputs, Mapping):
            known = dict(zip(self._of.names or (), tables, strict=False))
            return {
                name: tensor_of_ids(known[name], ids) if name in known else ids
                for name, ids in inputs.items()
            }
        if isinstance(inputs, (list, tuple)):
            flat = self._flat("inputs", inputs)
            return [tensor_of_ids(*each) for each in zip(tables, flat, strict=True)]
        return inputs

    def call(self, inputs: Any, weights: Any = None, training: Any = None) -> Any:
        """Returns the rows of each feature.

        Args:
          weights: None, or per feature None or the weights of its ids; needs combiners.
          training: whether to insert new keys, as in `fit`; None: whether a gradient tape is
            recording.
        """
        return self._rows(inputs, weights, training)

    @tf.autograph.experimental.do_not_convert
    def _rows(self, inputs: Any, weights: Any, training: Any) -> Any:
        ids = self._flat("inputs", inputs)
        rows = prepared_rows(self, ids) if weights is None else None
        if rows is None:
            flat = [] if weights is None else self._flat("weights", weights, may_miss=True)
            rows = rows_of(self._of.features, ids, flat or [None] * len(ids), training)
        dtype = self.compute_dtype  # type: ignore[attr-defined]
        return self._pack(self._of.names, [tf.cast(each, dtype) for each in rows])

    def compute_output_spec(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Checks the input dtype while Keras 3 builds a functional model."""
        for feature, ids in zip(self._of.features, self._flat("inputs", inputs), strict=True):
            if tf.as_dtype(getattr(ids, "dtype", "int64")).is_floating:
                raise _FloatInputError(
                    f"Ids of table {feature.table.name!r} must be {feature.table.key_dtype_name}. "
                    f"Received: an input of {ids.dtype}. Make it with keras.Input(..., dtype="
                    f"{feature.table.key_dtype_name!r})."
                )
        return super().compute_output_spec(inputs, *args, **kwargs)  # type: ignore[misc]

    def compute_output_shape(self, input_shape: Any) -> Any:
        """Returns the output shapes of `call`."""
        pairs = zip(self._of.features, self._flat("input_shape", input_shape), strict=True)
        return self._pack(self._of.names, [_shape_of_rows(*each) for each in pairs])

    def compute_mask(self, inputs: Any, previous: Any = None) -> Any:
        """Returns the masks of features with a `mask_value` and no combiner."""
        if all(each.mask_value is None or each.combiner is not None for each in self._of.features):
            return None
        pairs = zip(self._of.features, self._flat("inputs", inputs), strict=True)
        masks = [mask_of(feature, ids, self.package) for feature, ids in pairs]
        is_none = all(mask is None for mask in masks)
        return None if is_none else self._pack(self._of.names, masks)

    def _flat(self, what: str, inputs: Any, may_miss: bool = False) -> list[Any]:
        names = self._of.names
        if names is None:
            if isinstance(inputs, (list, tuple)) and len(inputs) == len(self._of.features):
                return list(inputs)
            # A config of tf_keras replaces a list of one by its element.
            if len(self._of.features) == 1 and not isinstance(inputs, (list, tuple, Mapping)):
                return [inputs]
            got = f"{len(inputs)} of them" if isinstance(inputs, (list, tuple)) else type(inputs)
            raise ValueError(
                f"`{what}` of {self.name!r} must be a list with one entry for each feature, "
                f"{len(self._of.features)} in all. Received: {got}."
            )
        if not isinstance(inputs, Mapping):
            raise ValueError(
                f"`{what}` of {self.name!r} must be a dict with {', '.join(names)}. "
                f"Received: {type(inputs).__name__}."
            )
        missing = [name for name in names if name not in inputs]
        if missing and not may_miss:
            raise ValueError(
                f"`{what}` of {self.name!r} must have {', '.join(names)}. Received: "
                f"{', '.join(map(str, inputs))}, without {', '.join(missing)}."
            )
        return [inputs.get(name) for name in names]

    @staticmethod
    def _pack(names: Any, values: list[Any]) -> Any:
        """Returns one value per feature, structured as the features."""
        return values if names is None else dict(zip(names, values, strict=True))

    def get_config(self) -> dict[str, Any]:
        """Returns the config for `from_config`, which makes new and empty tables."""
        places = {id(table): place for place, table in enumerate(self._of.tables)}
        listed = [
            {"table": places[id(table)], "combiner": combiner, "mask_value": mask_value}
            for table, combiner, mask_value in self._of.features
        ]
        config = {"names": self._of.names, "listed": listed, "tables": list(self._of.tables)}
        return {**super().get_config(), **config}  # type: ignore[misc]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Any:
        """Returns a layer from a config of `get_config`."""
        config = dict(config)
        names, listed, tables = (config.pop(name) for name in ("names", "listed", "tables"))
        made = [_copy_table(table, cls.package) for table in tables]
        features = [Feature(**{**each, "table": made[each["table"]]}) for each in listed]
        return cls(cls._pack(names, features), **config)


class EmbeddingPart(EmbeddingsPart):
    """Rows of one feature: ids of any shape, dense, ragged or, with a combiner, sparse.

    Without a combiner ids return ids.shape + [dim]; with one, the rows along the last dimension are
    combined: (batch, n) returns (batch, dim). On several ranks every rank must call it.

    Args:
      table: a `Table`, which layers may share, or a `Feature`.
      combiner: "sum", "mean" or "sqrtn"; None: one row per id.
      mask_value: padding id, such as 0 or "": it returns zeros and does not count in a combiner.
        None: no padding.
      name, trainable, dtype: as in Keras.

    Raises:
      TypeError, ValueError: invalid arguments.

    Examples:
      >>> rows = sk.Embedding(sk.Table("item", 2, initializer="ones"), combiner="sum", mask_value=0)
      >>> rows(tf.constant([[7, 9], [9, 0]]), training=True).numpy().tolist()
      [[2.0, 2.0], [1.0, 1.0]]
    """

    @refusing_names(
        mask_zero="Write mask_value=0.",
        weights="They are an argument of the call: layer(ids, weights=weights). Rows of your own "
        "are for table.assign(keys, rows).",
        **dict.fromkeys(
            (
                *("input_dim", "output_dim", "dim", "key_type", "initializer"),
                *("embeddings_initializer", "embeddings_regularizer", "embeddings_constraint"),
            ),
            _OF_TABLE,
        ),
    )
    def __init__(
        self,
        table: Any,
        combiner: str | None = None,
        mask_value: Any = None,
        *,
        name: str | None = None,
        trainable: bool = True,
        dtype: Any = None,
    ) -> None:
        feature = table
        if not isinstance(table, Feature):
            feature = Feature(table, combiner, mask_value)
        elif combiner is not None or mask_value is not None:
            raise ValueError(
                "A Feature has a combiner and a mask_value of its own: set them there. Received: a "
                f"Feature with combiner={combiner!r}, mask_value={mask_value!r} beside it."
            )
        super().__init__([feature], name, trainable, dtype)

    @property
    def key_dtype_name(self) -> str:
        """Name of the dtype of ids."""
        return self._of.tables[0].key_dtype_name

    def __call__(self, ids: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        return super().__call__(ids, *args, **kwargs)

    def _tensors(self, inputs: Any) -> Any:
        return tensor_of_ids(self._of.tables[0], inputs)

    def call(self, ids: Any, weights: Any = None, training: Any = None) -> Any:
        """As `Embeddings.call` for one feature: ids.shape + [dim], or combined over the last."""
        return self._rows(ids, weights, training)

    def _flat(self, what: str, inputs: Any, may_miss: bool = False) -> list[Any]:
        return [inputs]

    @staticmethod
    def _pack(names: Any, values: list[Any]) -> Any:
        return values[0]


class _FloatInputError(NotImplementedError, TypeError):
    """Raised while Keras 3 builds a model with a float input for ids.

    A Sequential without an Input assumes a float one. When a layer raises NotImplementedError, it
    calls its layers one by one on the real inputs.
    """


def _shape_of_rows(feature: Feature, shape: Any) -> tuple[int | None, ...]:
    is_pooled = feature.combiner is not None and len(shape) > 1
    return (*(tuple(shape)[:-1] if is_pooled else shape), feature.table.dim)


def _parse_features(features: Any, table_class: Any) -> tuple[list[str] | None, list[Feature]]:
    """Returns the feature names (None for a list) and the features."""
    is_dict = isinstance(features, Mapping)
    if not is_dict and (isinstance(features, (str, Feature)) or not isinstance(features, Sequence)):
        raise TypeError(
            "`features` must be a dict or list of features, each a Table, a pair (table, combiner) "
            f"or a Feature. Received: {type(features).__name__}."
        )
    if not features:
        raise ValueError("`features` must have at least one feature. Received: none.")
    values = list(features.values()) if is_dict else list(features)
    return list(features) if is_dict else None, [_feature(each, table_class) for each in values]


def _feature(value: Any, table_class: Any) -> Feature:
    feature = value
    if not isinstance(value, Feature):
        feature = Feature(*value) if isinstance(value, (tuple, list)) else Feature(value)
    if not isinstance(feature.table, table_class):
        raise TypeError(
            "The table of a feature must be a sok_lite.keras.Table of the same Keras as the layer. "
            f"Received: {type(feature.table).__module__}.{type(feature.table).__name__}. Make one: "
            "sok_lite.keras.Table(name, dim)."
        )
    if feature.combiner is not None and feature.combiner not in COMBINERS:
        raise ValueError(
            f"`combiner` must be one of {', '.join(COMBINERS)} or None. "
            f"Received: combiner={feature.combiner!r}."
        )
    check_mask_value(feature.table, feature.mask_value)
    return feature


def _copy_table(table: Any, package: Any) -> Any:
    """Returns a new table from a table or its Keras config."""
    if isinstance(table, dict):
        return package.saving.deserialize_keras_object(table)
    return type(table).from_config(table.get_config())
