"""A lookup over all ranks in static tables, whose rows TensorFlow reads.

The rows are in TensorFlow's variables, which only TensorFlow's operations read without a copy of
all of them. So such a lookup is two operations: the first sends the keys and says which rows this
rank is asked for; the second is given them. What TensorFlow reads has TensorFlow's own gradient,
so optimizers see the gradient of any other variable.
"""

import contextlib
from collections.abc import Sequence
from functools import partial

import tensorflow as tf

from sok_lite.backend import Array
from sok_lite.bridge.keras.guard import refuse_custom_step
from sok_lite.bridge.lookup_arguments import Argument, TableSpec
from sok_lite.bridge.lookup_inputs import inputs_of
from sok_lite.bridge.operation import Facts, Outputs, operation
from sok_lite.bridge.pooled_lookup import LookupOfTables, give_words, shape_of_words
from sok_lite.bridge.type_spec import alive, live_tables
from sok_lite.comm import Communicator
from sok_lite.engine import static_lookup
from sok_lite.engine.agreement import agree
from sok_lite.engine.failure import failure_known_to_all, shared_failure
from sok_lite.engine.static_lookup import Sent
from sok_lite.engine.work_done import LOOKUPS

# What the first operation tells the second beside places: the number of the row of each key, and
# `inverse` and `order` of several ranks, numbers of 32 bits as the words of int64.
OF_KEYS = (tf.int64,) * 3


def look_up(comm: Communicator, arguments: Sequence[Argument], what: str) -> list[tf.Tensor]:
    """Looks up in the static tables of a call. Every rank must call it.

    Args:
      arguments: of all tables of the call, some of them static.
      what: names the call.

    Returns:
      For each static table (batch, dimension) of its rows' dtype, with gradients of the rows and of
      the weights.

    Raises:
      ValueError: there is no such row. Nothing has been read then.
    """
    static = [each for each in arguments if each.spec.is_static]
    tables, count = [each.spec for each in static], len(static)
    variables = [alive(table.variable) for table in tables]
    lookup = StaticLookup(comm, tables, [each.spec for each in arguments], what)
    inputs, numbers = inputs_of(static)
    facts = Facts.of_static(variables)
    *places, number, inverse, order, told = operation(
        "sok_static_places",
        None,
        lookup.locate,
        inputs,
        [*[tf.int64] * count, *OF_KEYS],
        lookup.backend,
        what,
        facts,
        numbers=numbers,
        num_told=1,
        collective=lookup.collective,
    )
    # Eagerly, the other ranks wait for the rows already; in a graph nothing is read yet.
    known = failure_known_to_all(comm) if tf.executing_eagerly() else contextlib.nullcontext()
    with known:
        rows = [_read_rows(*each) for each in zip(tables, places, strict=True)]
    weighted = [table.dtype for table in tables if table.has_weights]
    outputs = operation(
        "sok_static_lookup",
        None,
        lookup.forward,
        [*rows, *inputs, number, inverse, order],
        [*[tf.float32] * count, *weighted],
        lookup.backend,
        what,
        facts,
        LOOKUPS,
        numbers=[*numbers, told],
        gradient=lookup.gradient,
        collective=lookup.collective,
    )
    return lookup.pooled(outputs, [each.batch for each in static])


def _read_rows(spec: TableSpec, places: tf.Tensor) -> tf.Tensor:
    variable = alive(spec.variable)
    refuse_custom_step([variable])
    if not tf.executing_eagerly():
        places.set_shape([None])
        variable.free_with_its_variable()
    rows = tf.gather(variable, places)
    rows.set_shape([None, spec.dim])
    return rows


class StaticLookup(LookupOfTables):
    """One call of `lookup_sparse` for static tables: what its operations run.

    Args:
      tables: the static ones of the call.
      of_call: all tables of the call, which ranks have to agree on before anything is sent.
    """

    has_keys = False

    def __init__(
        self, comm: Communicator, tables: list[TableSpec], of_call: list[TableSpec], what: str
    ) -> None:
        super().__init__(comm, tables, what)
        self._of_call, self._tag = of_call, self.tag_of(of_call)

    def locate(self, outputs: Outputs, arrays: list[Array]) -> None:
        """Says which rows are to be read, and sends the keys where there are several ranks.

        Args:
          outputs: the places (n,) of each table, `OF_KEYS`; told: the numbers of the `Sent`.
          arrays: what `inputs_of` gave.
        """
        backend, comm = self.backend, self.comm
        with shared_failure(comm):
            of_call = live_tables([spec.variable for spec in self._of_call])
        agree(comm, self._tag, of_call, [spec.combiner for spec in self._of_call])
        with shared_failure(comm):
            batch = self.batch(arrays, arrays)
        located = static_lookup.locate(backend, comm, batch, self._tag)
        with failure_known_to_all(comm):
            words = located.others()
            shapes = list(zip(located.num_places.tolist()))
            count = len(shapes)
            of_words = [shape_of_words(each.size) for each in words]
            outputs.allocate((0, shapes), *((count + i, [s]) for i, s in enumerate(of_words)))
            static_lookup.copy_places(backend, located, outputs.several(0, shapes))
            for i, each in enumerate(words):
                give_words(outputs, count + i, each)
            outputs.tell(0, located.numbers())

    def forward(self, outputs: Outputs, arrays: list[Array]) -> None:
        """Pools rows that were read.

        Args:
          outputs: pooled rows of each table, then the rows of each weighted table's items.
          arrays: the rows of each table, what `inputs_of` gave, `OF_KEYS`; on the host what
            follows: the numbers of `inputs_of`, and those of the `Sent`.
        """
        comm, count = self.comm, len(self.tables)
        with failure_known_to_all(comm):  # the others wait for rows already
            *arrays, numbers = arrays
            rows, inputs = arrays[:count], arrays[count:]
            given = self.given(inputs, arrays)
            outputs.allocate((0, self.shapes_of(given)))
            batch = self.batch(inputs, arrays)
            sent = Sent.of(self.backend, comm, batch, numbers, self._of_keys(arrays, 0))
        allocate = partial(outputs.several, 0)
        _, context = static_lookup.forward(self.backend, comm, batch, sent, rows, allocate)
        with failure_known_to_all(comm):
            self.give_sources(outputs, count, context.pooling.sources)

    def backward(self, outputs: Outputs, arrays: list[Array]) -> None:
        """Takes the gradient.

        Args:
          outputs: the gradients of each table's rows that were read, then those of the weights.
          arrays: gradients of the pooled rows, what `inputs_of` gave, `OF_KEYS`, and the rows of
            weighted items; on the host what follows: as of `forward`.
        """
        backend, comm, count = self.backend, self.comm, len(self.tables)
        with failure_known_to_all(comm):
            *arrays, numbers = arrays
            grads, inputs = arrays[:count], arrays[count:]
            batch = self.batch(inputs, arrays)
            sent = Sent.of(backend, comm, batch, numbers, self._of_keys(arrays, self.num_weighted))
            context = sent.context(batch, self.sources(arrays, batch))
            parts = list(zip(batch.tables, batch.weights, self.combiners, strict=True))
            allocate = partial(outputs.several, 0)
            _, by_weights = static_lookup.backward(backend, parts, grads, context, allocate)
            self.give_weight_grads(outputs, count, by_weights)

    def _of_keys(self, arrays: list[Array], after: int) -> list[Array]:
        """Returns `OF_KEYS` among arrays that end with so many others and with numbers."""
        end = len(arrays) - self.num_numbers - after
        return [each.view("int32") for each in arrays[end - len(OF_KEYS) : end]]
