"""The rows of static tables that a lookup over all ranks asks for: read by TensorFlow.

The rows are in TensorFlow's variables, which only TensorFlow's operations read without a copy of
all of them. So such a lookup is two host calls: the first sends the keys and says which rows this
rank is asked for; the second is given them. What TensorFlow reads has TensorFlow's own gradient,
so optimizers see the gradient of any other variable.
"""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from sok_lite.bridge.host_call import host_call
from sok_lite.bridge.joined import cut, join
from sok_lite.bridge.keras_guard import refuse_own_step
from sok_lite.bridge.lookup_arguments import Argument, Facts
from sok_lite.bridge.lookup_host import LookupHost, Treatment
from sok_lite.bridge.type_spec import alive
from sok_lite.comm import Communicator
from sok_lite.engine.failure import failure_known_to_all


class Read(NamedTuple):
    """The rows that this rank is asked for.

    Attributes:
      sent: on several ranks, what `LookupHost.forward` takes of the keys that have been sent.
      numbers: none, or one int32 tensor: which of its rows each key has that this rank is asked, of
        all static tables one after the other.
      rows: of each static table (u, dim) of its dtype, distinct rows.
    """

    sent: list[tf.Tensor]
    numbers: list[tf.Tensor]
    rows: list[tf.Tensor]


def read_asked(
    comm: Communicator, arguments: Sequence[Argument], inputs: Sequence[tf.Tensor]
) -> Read:
    """Reads the rows of all static tables of a lookup. Every rank must call it.

    Args:
      arguments: of each table of the lookup.
      inputs: what `joined_inputs` gave.

    Raises:
      ValueError: there is no such row. No key has been sent then.
    """
    tables = [argument.facts for argument in arguments]
    static = [facts for facts in tables if facts.is_static]
    if not static:
        return Read([], [], [])
    host = LookupHost(comm, tables, Treatment(None, None, False))
    dtypes = [tf.int64, tf.int64, tf.int32] + [tf.int64] * (comm.size > 1)
    weights = [each.weights for each in arguments if each.weights is not None]
    items = [*inputs, join(weights)] if weights else inputs
    lengths, places, numbers, *sent = host_call(
        host.locate, items, dtypes, host.backend, host.what, host.together
    )
    if not tf.executing_eagerly():
        lengths.set_shape([len(static)])
        for each in (places, numbers, *sent):
            each.set_shape([None])
    # Eagerly, the other ranks wait for the rows already; in a graph nothing is read yet.
    known = failure_known_to_all(comm) if tf.executing_eagerly() else contextlib.nullcontext()
    with known:
        pieces = zip(static, cut(places, lengths, len(static)), strict=True)
        rows = [_read(facts, piece) for facts, piece in pieces]
    return Read(sent, [numbers], rows)


def _read(facts: Facts, places: tf.Tensor) -> tf.Tensor:
    variable = alive(facts.variable)
    refuse_own_step(variable)
    if not tf.executing_eagerly():
        variable.free_with_its_variable()
    rows = tf.gather(variable, places)
    rows.set_shape([None, facts.dim])
    return rows
