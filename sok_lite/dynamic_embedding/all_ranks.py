"""`HvdVariable`: lookups through a `ShadowVariable` in the tables of all ranks."""

from typing import Any

import tensorflow as tf

from sok_lite.bridge.inference import MissingKeyPolicy
from sok_lite.bridge.lookup import look_up_each
from sok_lite.dynamic_embedding.arguments import DtypeError
from sok_lite.dynamic_embedding.mode import ModelMode, get_model_mode
from sok_lite.dynamic_embedding.ranks import communicator
from sok_lite.dynamic_embedding.trainable import ShadowVariable, clipped


class HvdVariable:
    """A variable of which each rank has the keys that it owns, and any rank may ask for all.

    The variable's partitioner says which rank owns a key. A lookup is one exchange of keys and
    rows; its gradient, summed over all ranks, is of the keys that this rank owns. Every rank must
    make one, and must call each lookup and gradient. It inserts nothing.

    Args:
      name: of the variable.
      shadow: what is trained, on each rank its own.
      embedding_size: elements of a row.
      with_unique, with_secondary_unique: accepted: keys are deduplicated before they travel and
        where they arrive, with them and without.
      mpi_size: the number of ranks, which is known; None: not checked.

    Raises:
      ValueError: the ranks cannot be connected, or `mpi_size` is another number.
      TypeError: several ranks, and keys are texts or rows no float32.
    """

    def __init__(
        self,
        name: str,
        shadow: ShadowVariable,
        embedding_size: int,
        with_unique: bool = True,
        with_secondary_unique: bool = True,
        mpi_size: int | None = None,
    ) -> None:
        self.name, self.shadow, self.embedding_size = name, shadow, embedding_size
        self.with_unique, self.with_secondary_unique = with_unique, with_secondary_unique
        self._comm = communicator(f"A lookup of {name!r} on all ranks")
        self.mpi_size = self._comm.size
        if mpi_size not in (None, self.mpi_size):
            raise ValueError(
                f"`mpi_size` must be the number of ranks, {self.mpi_size}. Received: {mpi_size}. "
                "Leave it out."
            )
        params = shadow.params
        if self.mpi_size > 1 and (params.key_dtype == tf.string or not params.is_pooled):
            raise DtypeError(
                "Ranks look up integer keys, of rows of float32. Received: "
                f"key_dtype={params.key_dtype.name}, value_dtype={params.value_dtype.name}."
            )

    def lookup(self, ids: Any) -> Any:
        """Returns the rows of keys, with a gradient of the shadow. Every rank must call it.

        Args:
          ids: a tensor of any shape, or a RaggedTensor, of the variable's key dtype.

        Returns:
          ids.shape + [embedding_size], ragged as `ids` are.

        Raises:
          NotImplementedError: `ids` is a SparseTensor.
          ValueError: keys of another dtype. (It is a TypeError as well.)
        """
        if isinstance(ids, tf.SparseTensor):
            raise NotImplementedError(
                "A lookup on all ranks takes dense or ragged keys. Received: a SparseTensor. Give "
                "tf.RaggedTensor.from_sparse(ids)."
            )
        if isinstance(ids, tf.RaggedTensor):
            return ids.with_flat_values(self.lookup(ids.flat_values))
        ids = tf.convert_to_tensor(ids)
        params = self.shadow.params
        if ids.dtype != params.key_dtype:
            raise DtypeError(
                f"`ids` must be {params.key_dtype.name}, as the keys of {params.name!r}. "
                f"Received: {ids.dtype.name}. Cast them first."
            )
        if self.mpi_size == 1:
            return self.shadow.lookup(ids)
        rows = look_up_each(self._comm, self.shadow, ids, MissingKeyPolicy(False))
        if get_model_mode() != ModelMode.TRAIN:
            rows = tf.stop_gradient(rows)
        return clipped(rows, self.shadow.max_norm)

    __lookup__ = lookup
