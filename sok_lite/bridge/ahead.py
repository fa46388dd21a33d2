"""Keys that travel to the ranks that own them before they are looked up."""

import typing
import zlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from sok_lite.bridge.host_call import host_call
from sok_lite.bridge.lookup_arguments import Argument, Facts, joined_inputs
from sok_lite.bridge.lookup_host import LookupHost, Treatment
from sok_lite.bridge.serving.mode import is_exporting
from sok_lite.comm import Communicator


class Prefetched(tf.experimental.ExtensionType):
    """Ids whose keys have been sent: a lookup takes it in place of them.

    It goes into and out of a `tf.function` as a tensor does, and holds nothing but tensors.

    Attributes:
      ids: as they were given, in a tuple.
      is_list: whether they were given as a list.
    """

    __name__ = "sok_lite.Prefetched"
    ids: typing.Tuple[  # noqa: UP006
        typing.Union[tf.RaggedTensor, tf.SparseTensor, tf.Tensor], ...  # noqa: UP007
    ]
    is_list: bool
    # What `LookupHost.send_packed` gave, as one row: of a tensor TensorFlow would count the
    # elements, and trace a function again where they are more or fewer.
    _sent: tf.RaggedTensor
    # Of the tables that it was made for.
    _tag: int
    # Of each whether weights were given, and the combiner; "": none was.
    _with_weights: typing.Tuple[bool, ...]  # noqa: UP006
    _combiners: typing.Tuple[str, ...]  # noqa: UP006

    def sent_for(self, tables: Sequence[Facts]) -> tf.Tensor:
        """Returns what `LookupHost.forward` takes of it.

        Raises:
          ValueError: it was made for other tables, or with weights or combiners that the lookup
            was not given again.
        """
        if self._tag != _tag_of(tables):
            names = ", ".join(repr(table.name) for table in tables)
            raise ValueError(
                "What a prefetch gives is looked up in the tables that it was made for. "
                f"Received: ids that were prefetched for others than {names}."
            )
        for table, with_weights, combiner in zip(
            tables, self._with_weights, self._combiners, strict=True
        ):
            if with_weights and not table.has_weights:
                raise ValueError(
                    f"The ids of {table.name!r} were prefetched with weights. Received: a lookup "
                    "without any. Give it the weights, too."
                )
            if combiner not in ("", table.combiner):
                raise ValueError(
                    f"The ids of {table.name!r} were prefetched with combiner {combiner!r}. "
                    f"Received: a lookup with {table.combiner!r}. Give it the same."
                )
        return self._sent.values


def send_ahead(
    comm: Communicator, arguments: Sequence[Argument], sp_ids: Any, has_combiners: bool
) -> Prefetched:
    """Sends the keys of a lookup to the ranks that own them. Every rank must call it.

    Args:
      arguments: of each table.
      sp_ids: what the program gave for them: ids of one table, or a list.
      has_combiners: whether it gave combiners.
    """
    tables = [argument.facts for argument in arguments]
    is_list = isinstance(sp_ids, (list, tuple))
    sends = not comm.is_alone and arguments and not is_exporting()
    sent = _sent(comm, arguments) if sends else tf.zeros([0], tf.int64)
    row = tf.RaggedTensor.from_row_lengths(sent, tf.shape(sent, tf.int64), validate=False)
    ids = tuple(sp_ids) if is_list else (sp_ids,)
    with_weights = tuple(table.has_weights for table in tables)
    combiners = tuple(table.combiner if has_combiners else "" for table in tables)
    return Prefetched(ids, is_list, row, _tag_of(tables), with_weights, combiners)


def _sent(comm: Communicator, arguments: Sequence[Argument]) -> tf.Tensor:
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
    (sent,) = host_call(host.send_packed, inputs, [tf.int64], host.backend, what, host.together)
    sent.set_shape([None])
    return sent


def _tag_of(tables: Sequence[Facts]) -> int:
    return zlib.crc32(
        repr([(t.name, t.key_type.name, t.owner, t.num_rows) for t in tables]).encode()
    )
