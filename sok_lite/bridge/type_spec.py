"""How TensorFlow describes a variable of a table: the type of one table, never of all like it."""

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
    """Returns the variable of a reference that a graph keeps.

    A graph keeps references only: TensorFlow never drops the Python functions of a graph, and they
    would keep every table they ever used.

    Raises:
      ValueError: the variable is gone.
    """
    variable = reference()
    if variable is None:
        raise ValueError(
            "A tf.function or graph uses a table whose variable was deleted. Keep the variable for "
            "as long as the function is called."
        )
    return variable


def live_tables(references: "Sequence[weakref.ref[Any]]") -> list[Any]:
    """Returns the engine's tables of variables, by the references that a graph keeps.

    Raises:
      ValueError: a variable is gone.
    """
    return [alive(reference)._table for reference in references]


class Kept(dict[Any, Any]):
    """What is made once for all calls that are alike, by what they are known by. It keeps no table.

    A program has few kinds of calls. Where there are more, all are forgotten.
    """

    _MOST = 256

    def get_or_make(self, known_by: Any, make: Callable[[], Any]) -> Any:
        """Returns what is kept of calls; it is made at the first one."""
        try:
            return self[known_by]
        except KeyError:
            made = make()
        self.keep(known_by, made)
        return made

    def keep(self, known_by: Any, made: Any) -> None:
        """Keeps what was made for calls."""
        if len(self) >= self._MOST:
            self.clear()
        self[known_by] = made


class TableSpec(VariableSpec):
    """The type of the variable of one table.

    TensorFlow's own spec stands for every variable of a shape and dtype: taken apart and put
    together again, a table would come out as an empty dense variable, and a tf.function traced with
    one table would be reused for another. This one knows its variable.
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
        # Of the reference, which is one and the same for all specs of a variable: TensorFlow keeps
        # specs in dicts for longer than variables live.
        return hash((self.shape, self.dtype, id(self.variable)))

    def __eq__(self, other: Any) -> bool:
        return type(self) is type(other) and self.variable is other.variable


class _Arguments:
    """The signature of a class for `inspect.signature`, which notebooks show: its own arguments.

    A metaclass of TensorFlow makes variables by `(*args, **kwargs)`, which hides them.
    """

    def __get__(self, _: Any, cls: type) -> inspect.Signature:
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=[*signature.parameters.values()][1:])


class OfTable:
    """The base of variables that lookups and tf.function know by their table.

    A function that was traced for one variable must know which it is: TensorFlow's own type would
    give it another of that shape.
    """

    __signature__ = _Arguments()
    _table: Any  # the engine's

    @property
    def dimension(self) -> int:
        """Length of a row."""
        return self._table.dim

    @property
    def owner_rank(self) -> int:
        """The rank that holds the whole table, or -1 where it is spread over all ranks."""
        rank = self._table.owner.only_rank
        return -1 if rank is None else rank

    @property
    def spec_shape(self) -> tf.TensorShape:
        """The shape in its type, which must not change."""
        return self.shape  # type: ignore[attr-defined]

    @functools.cached_property
    def kept(self) -> Kept:
        """What is kept of eager lookups in it: alone, or with others that come after it."""
        return Kept()

    @functools.cached_property
    def _trace_id(self) -> int:
        # Not TensorFlow's own alias ids, which start at 0 in every call of a tf.function: a
        # function traced for one table must never be reused for another.
        return (1 << 32) + next(_serial)

    @property
    def _type_spec(self) -> TableSpec:
        return TableSpec.from_value(self)

    def __tf_tracing_type__(self, signature_context: Any) -> TableSpec:
        signature_context.add_placeholder(self._trace_id, self)
        return TableSpec.from_value(self, alias_id=self._trace_id)
