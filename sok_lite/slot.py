"""Optimizer states as SOK shows them: "slots" that can be exported like a variable."""

import weakref
from collections.abc import Sequence

import tensorflow as tf

from sok_lite.dynamic_variable import DynamicVariable
from sok_lite.host_call import host_call
from sok_lite.tensor import to_tensor
from sok_lite.variable_spec import alive


class SlotView:
    """A read-only view of one optimizer state of a variable's rows.

    Attributes:
      name: of the state, such as "m".
      dimension: elements of a row.
    """

    def __init__(self, variable: DynamicVariable, name: str) -> None:
        states = variable.table.store.state_names
        if name not in states:
            raise ValueError(
                f"{variable.name!r} has no optimizer state {name!r}. It has "
                f"{', '.join(map(repr, states)) or 'none yet: they come with the first update'}."
            )
        self.name = name
        self.dimension = variable.table.store.column(name).dim
        self._variable = weakref.ref(variable)
        self._key_type = variable.key_type
        self._backend = variable.table.backend

    @property
    def shape(self) -> tf.TensorShape:
        """[None, dimension]."""
        return tf.TensorShape([None, self.dimension])

    def export(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns this rank's keys, ascending, and their states: (n,), (n, dimension) float32."""

        def run() -> Sequence[tf.Tensor]:
            keys, values = alive(self._variable).table.export(self.name)
            return (
                to_tensor(keys, self._key_type, self._backend),
                to_tensor(values, tf.float32, self._backend),
            )

        dtypes = [self._key_type, tf.float32]
        keys, values = host_call(run, [], dtypes, self._backend, f"The export of {self.name!r}")
        keys.set_shape([None])
        values.set_shape([None, self.dimension])
        return keys, values
