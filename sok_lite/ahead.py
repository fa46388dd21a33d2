"""`sok.prefetch`: keys travel to the ranks that own them before they are looked up."""

import typing
import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_lite.communication import communicator
from sok_lite.host_call import host_call
from sok_lite.lookup_arguments import Argument, Facts, checked_arguments, joined_inputs
from sok_lite.lookup_host import LookupHost, Treatment

__all__ = ["Prefetched", "prefetch"]


class Prefetched(tf.experimental.ExtensionType):
    """Ids whose keys have been sent: `sok.lookup_sparse` takes it in place of them.

    It goes into and out of a `tf.function` as a tensor does, and holds nothing but tensors.

    Attributes:
      ids: as they were given, in a tuple.
      is_list: whether they were given as a list.
    """

    __name__ = "sok_lite.Prefetched"
    ids: typing.Tuple[typing.Union[tf.RaggedTensor, tf.SparseTensor], ...]  # noqa: UP006, UP007
    is_list: bool
    # What `LookupHost.send_packed` gave, as one row: of a tensor TensorFlow would count the
    # elements, and trace a function again where they are more or fewer.
    _sent: tf.RaggedTensor
    # Of the tables that it was made for.
    _tag: int

    def sent_for(self, tables: Sequence[Facts]) -> tf.Tensor:
        """Returns what `LookupHost.forward` takes of it.

        Raises:
          ValueError: it was made for other tables.
        """
        if self._tag != _tag_of(tables):
            names = ", ".join(repr(table.name) for table in tables)
            raise ValueError(
                "What sok.prefetch gives is looked up in the tables that it was made for. "
                f"Received: ids that were prefetched for others than {names}."
            )
        return self._sent.values


@tf.autograph.experimental.do_not_convert
def prefetch(params: Any, sp_ids: Any, sp_weights: Any = None, combiners: Any = None) -> Prefetched:
    """Sends the keys of a batch to the ranks that own them, ahead of its `sok.lookup_sparse`.

    Every rank must call it, at the same place among its lookups and gradients. Called between the
    lookup and the gradient of one batch with the ids of the next one, in a `tf.function`, it runs
    while TensorFlow computes the dense part of the model: what the next lookup has then left to do
    is to read rows and send them back. It reads no table and changes none. So a lookup of what it
    gives is exactly that of the ids, whatever was inserted, updated, erased or evicted in between;
    it may be looked up twice, or never. On one rank it does nothing.

    Args:
      params, sp_ids, sp_weights, combiners: as of `sok.lookup_sparse`. Weights and combiners are
        checked only; `lookup_sparse` is given them again.

    Returns:
      A Prefetched, to be given to `sok.lookup_sparse` as `sp_ids`.

    Raises:
      As `sok.lookup_sparse`.
    """
    comm = communicator()
    arguments = checked_arguments(params, sp_ids, sp_weights, combiners, comm.size)
    tables = [argument.facts for argument in arguments]
    is_list = isinstance(sp_ids, (list, tuple))
    sent = _sent(comm, arguments) if comm.size > 1 and arguments else tf.zeros([0], tf.int64)
    row = tf.RaggedTensor.from_row_lengths(sent, tf.shape(sent, tf.int64), validate=False)
    return Prefetched(tuple(sp_ids) if is_list else (sp_ids,), is_list, row, _tag_of(tables))


def _sent(comm: Any, arguments: Sequence[Argument]) -> tf.Tensor:
    tables = [
        argument.facts._replace(has_weights=False, weights_are_ragged=None, combiner="sum")
        for argument in arguments
    ]
    host = LookupHost(comm, tables, Treatment(None, None, False))
    what = f"prefetch in {', '.join(repr(table.name) for table in tables)}"
    keys = [
        argument._replace(facts=facts, weights=None, weight_rows=None)
        for argument, facts in zip(arguments, tables, strict=True)
    ]
    inputs, _ = joined_inputs(keys)
    (sent,) = host_call(host.send_packed, inputs, [tf.int64], host.backend, what)
    sent.set_shape([None])
    return sent


def _tag_of(tables: Sequence[Facts]) -> int:
    return zlib.crc32(repr([(table.name, table.key_type.name) for table in tables]).encode())
