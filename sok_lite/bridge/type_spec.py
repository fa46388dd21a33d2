"""TensorFlow's type of a table's variable: one type per table."""

import functools
import inspect
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.tf_private import ResourceVariable, VariableSpec

_serial = itertools.count()


def alive(reference: "weakref.ref[Any]") -> Any:
    """Returns the variable of a graph's weak reference; raises ValueError if it is gone.

    TensorFlow never drops the Python functions of a graph: strong references would keep tables.
    """
    variable = reference()
    if variable is None:
        raise ValueError(
            "A tf.function or graph uses a table whose variable was deleted. Keep the variable for "
            "as long as the function is called."
        )
    return variable


def live_tables(references: "Sequence[weakref.ref[Any]]") -> list[Any]:
    """Returns the engine's tables of a graph's weak references to variables, as `alive`."""
    return [alive(reference)._table for reference in references]


class CallCache(dict[Any, Any]):
    """A cache for similar calls, without tables. Cleared when full: calls are of few kinds."""

    _MOST = 256

    def get_or_make(self, known_by: Any, make: Callable[[], Any]) -> Any:
        """Returns the cached value; makes it at the first call."""
        try:
            return self[known_by]
        except KeyError:
            made = make()
        self.keep(known_by, made)
        return made

    def keep(self, known_by: Any, made: Any) -> None:
        """Caches a value."""
        if len(self) >= self._MOST:
            self.clear()
        self[known_by] = made


class TableSpec(VariableSpec):
    """The type of one table's variable.

    TensorFlow's own spec stands for every variable of a shape and dtype: a table that is flattened
    and repacked would become an empty dense variable, and a tf.function traced with one table would
    be reused for another.
    """

    __slots__ = ["variable"]

    def __init__(self, shape: Any, dtype: Any, trainable: bool, alias_id: Any, variable: Any):
        super().__init__(shape, dtype, trainable, alias_id)
        self.variable = variable

    @property
    def value_type(self) -> Any:
        variable = self.variable()
        return ResourceVariable if variable is None else type(variable)

    @classmethod
    def from_value(cls, value: Any, alias_id: Any = None) -> "TableSpec":
        return cls(value.spec_shape, value.dtype, value.trainable, alias_id, weakref.ref(value))

    def _from_components(self, components: Any) -> Any:
        return alive(self.variable)

    def _serialize(self) -> Any:
        return (*super()._serialize(), self.variable)

    def is_compatible_with(self, spec_or_value: Any) -> bool:
        if isinstance(spec_or_value, TableSpec):
            return spec_or_value.variable() is self.variable()
        return spec_or_value is self.variable()

    def is_subtype_of(self, other: Any) -> bool:
        return self == other

    def most_specific_common_supertype(self, others: Any) -> Any:
        return self if all(self == other for other in others) else None

    def __hash__(self) -> int:
        # By the reference, one object for all specs of a variable: TensorFlow keeps specs in dicts
        # longer than variables live.
        return hash((self.shape, self.dtype, id(self.variable)))

    def __eq__(self, other: Any) -> bool:
        return type(self) is type(other) and self.variable is other.variable


class _Arguments:
    """`__init__`'s signature for notebooks: TensorFlow's metaclass hides it."""

    def __get__(self, _: Any, cls: type) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=[*signature.parameters.values()][1:])


class OfTable:
    """Base of variables that lookups and tf.function identify by their table.

    By TensorFlow's type, a function traced for one variable would be reused for others of its
    shape.
    """

    __signature__ = _Arguments()
    _table: Any  # the engine's

    @property
    def dimension(self) -> int:
        """Length of a row."""
        return self._table.dim

    @property
    def owner_rank(self) -> int:
        """The rank that holds the whole table, or -1 if all ranks share it."""
        rank = self._table.owner.only_rank
        return -1 if rank is None else rank

    @property
    def spec_shape(self) -> tf.TensorShape:
        """The shape in its type, which must not change."""
        return self.shape  # type: ignore[attr-defined]

    @functools.cached_property
    def kept(self) -> CallCache:
        """Cache of eager lookups in it, alone or as the first of several."""
        return CallCache()

    @functools.cached_property
    def _trace_id(self) -> int:
        # Not TensorFlow's alias ids, which start at 0 in every call of a tf.function: a function
        # traced for one table must never be reused for another.
        return (1 << 32) + next(_serial)

    @property
    def _type_spec(self) -> TableSpec:
        return TableSpec.from_value(self)

    def __tf_tracing_type__(self, signature_context: Any) -> TableSpec:
        signature_context.add_placeholder(self._trace_id, self)
        return TableSpec.from_value(self, alias_id=self._trace_id)
