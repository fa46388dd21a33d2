"""`TableWeight`: the table of a layer as Keras, gradient tapes and optimizers know it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from sok_lite.bridge import checkpoint, table_exports
from sok_lite.bridge.autograph import unconverted
from sok_lite.bridge.host_call import on_device
from sok_lite.bridge.job import other_ranks
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.optimizer_states import settle_states


@unconverted
class TableWeight(TableVariable):
    """A weight of a layer whose rows are known by key.

    Args:
      table: what `table_for_variable` gave.
      name: in TensorFlow.
      trainable: whether gradient tapes watch it.

    Attributes:
      is_frozen: whether it is not to be trained for the time being, as a layer can say.
    """

    kind = "sok_lite.keras.Table"
    instead_of_value = "Use layer(keys) for some rows and table.export() for all."
    instead_of_write = "Use table.assign(keys, rows)."
    instead_of_copy = "Make another layer of table.get_config(), and set_weights(get_weights())."
    instead_of_custom_step = (
        "Compile the model with an optimizer of the Keras that the layer is of, and keep the table "
        "or its layer where Keras finds it: in an attribute of a layer or model, or in a list or "
        "dict of one."
    )
    instead_of_save = (
        "Save to a path that ends in .keras or .weights.h5; for serving, use "
        "sok_lite.export_serving."
    )
    trained_by_patched = True
    averages_over_ranks = True
    tracked_as_weight = True
    is_frozen = False
    _shown: Any = None  # the rows where `showing_rows` is open
    regularizer = None  # Keras 3 asks each weight of a model for it

    @property
    def trainable(self) -> bool:
        """Whether gradient tapes watch it."""
        return super().trainable and not self.is_frozen

    @property
    def shape(self) -> tf.TensorShape:
        """[rows on this rank, dim] as of now: what `model.summary()` counts."""
        size = on_device(self.table.backend, lambda: self.table.size)
        return tf.TensorShape([size, self.dimension])

    @property
    def spec_shape(self) -> tf.TensorShape:
        return tf.TensorShape([None, self.dimension])

    @contextmanager
    def showing_rows(self) -> Iterator[None]:
        """A `with` block in which the table is read as a dense variable (n, dim).

        It has the rows of this rank as they are now, by ascending key.
        """
        handle, rows = self._handle, tf.Variable(table_exports.export(self)[1], trainable=False)
        # Eager operators read what `_handle` names, and ask no method.
        self._shown, self._handle = rows, rows.handle
        try:
            yield
        finally:
            self._shown, self._handle = None, handle

    def _dense_var_to_tensor(self, *args: Any, **kwargs: Any) -> Any:
        if self._shown is not None:
            return self._shown._dense_var_to_tensor(*args, **kwargs)
        return super()._dense_var_to_tensor(*args, **kwargs)

    def saved_dtypes(self) -> dict[str, tf.DType]:
        """Returns names and dtypes of what is saved; see bridge/checkpoint.py."""
        return checkpoint.saved_dtypes(self.key_type, self.dtype)

    def saved_tensors(self) -> dict[str, tf.Tensor]:
        """Returns keys, rows, optimizer states and scores of this rank, eager tensors."""
        return checkpoint.serialized(self)

    def restore_tensors(self, tensors: dict[str, tf.Tensor]) -> None:
        """Makes the table what `saved_tensors` gave: other keys go."""
        checkpoint.restored(self, tensors)

    def settle_states(self) -> None:
        """Has an optimizer that is new begin anew, whatever states the table was restored with."""
        on_device(self.table.backend, settle_states, self.table)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        rank, size = part = _part()
        if size > 1:
            warnings.warn(
                f"A checkpoint of TensorFlow has of {self.name!r} the rows of one rank, here of "
                f"rank {rank} of {size}. Every rank has to write one, to a path of its own. Or "
                "have every rank call model.save(path): that is one file of all ranks.",
                stacklevel=2,
            )
        return checkpoint.serialized(self, part)

    def _restore_from_tensors(self, restored_tensors: dict[str, tf.Tensor]) -> Any:
        return checkpoint.restored(self, restored_tensors, _part())


def _part() -> tuple[int, int]:
    """Returns this rank and the number of ranks."""
    comm = other_ranks()
    return (0, 1) if comm is None else (comm.rank, comm.size)
