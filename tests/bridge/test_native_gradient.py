"""Gradients of pooled lookups by native code and by Python: when which, and what it notes.

Drawn ones: test_native_lookup.py.

Native code leaves all to Python where `record.allows` is 0.
"""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.backend import get_backend
from sok_lite.engine.table.record import INSERTS, READS
from sok_lite.native.plans import num_entries
from tests.bridge.test_native_lookup import noted
from tests.support.routes import new_variable
from tests.support.table_audit import audit
from tests.support.table_state import State

pytestmark = pytest.mark.usefixtures("initialised")


@contextlib.contextmanager
def by_python(variables):
    """A block in which native code leaves all calls to Python."""
    for each in variables:
        each.table.record.allows = 0
    try:
        yield
    finally:
        for each in variables:
            each.table.record.allows = READS | INSERTS


def bits(tensors):
    """Returns the types and the bytes of gradients."""
    flat = []
    for each in tensors:
        flat += [each.indices, each.values] if isinstance(each, tf.IndexedSlices) else [each]
    arrays = [each.numpy() for each in flat]
    return [(array.dtype.name, array.shape, array.tobytes()) for array in arrays]


def test_a_gradient_of_known_keys_enters_python_only_for_room(mode):
    variable = new_variable()

    def gradient(ids):
        with tf.GradientTape() as tape:
            output = sok.lookup_sparse([variable], [ids], combiners=["sum"])[0]
        return tape.gradient(output, variable)

    gradient = mode(gradient)
    rng = np.random.default_rng(0)
    small, large = (tf.constant(rng.integers(0, 50, (size, 1))) for size in (1000, 1025))
    counts = []
    for ids in (small, small, large, large, small):
        entries = num_entries()
        found = gradient(ids)
        counts.append(num_entries() - entries)
        with by_python([variable]):
            assert bits([gradient(ids)]) == bits([found])
    # The first lookup has new keys. There is room for a power of two.
    assert counts == [2, 0, 1, 0, 0]


@pytest.mark.parametrize(("num_threads", "is_native"), [(2, True), (8, False)])
def test_one_long_table_is_grouped_by_several_threads(num_threads, is_native, monkeypatch):
    monkeypatch.setattr(get_backend("cpu"), "num_threads", num_threads)
    variable = new_variable(dim=1)
    ids = tf.constant(np.random.default_rng(0).integers(0, 1000, ((1 << 17) + 1, 1)))
    with tf.GradientTape(persistent=True) as tape:
        output = sok.lookup_sparse([variable], [ids], combiners=["sum"])[0]
    first = tape.gradient(output, variable)  # it makes room
    entries = num_entries()
    assert bits([tape.gradient(output, variable)]) == bits([first])
    assert num_entries() == entries + (not is_native)


def test_rows_that_have_moved_since_the_lookup_are_not_updated():
    tables = []
    for is_native in (True, False):
        variable = new_variable()
        ids = tf.constant(np.arange(20)[:, None])
        steps = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
        with tf.GradientTape(persistent=True) as tape:
            output = sok.lookup_sparse([variable], [ids], combiners=["sum"])[0]
        tape.gradient(output, variable)  # it makes room
        # What had the rows of these keys has them no more, and other keys get them.
        variable.table.erase(np.arange(5, 15))
        variable.table.lookup(np.arange(100, 110))
        entries = num_entries()
        with contextlib.nullcontext() if is_native else by_python([variable]):
            gradient = tape.gradient(output, variable)
        assert num_entries() == entries + (not is_native)
        assert gradient.indices.numpy().tolist() == [*range(20)]
        steps.apply_gradients([(gradient, variable)])
        audit(variable.table)
        tables.append(State.of(variable.table))
    assert tables[0] == tables[1]


def test_a_gradient_within_a_call_of_its_table_notes_nothing():
    variable = new_variable()
    ids = tf.constant(np.arange(20)[:, None])
    with tf.GradientTape(persistent=True) as tape:
        output = sok.lookup_sparse([variable], [ids], combiners=["sum"])[0]
    before = tape.gradient(output, variable)
    known, found = noted(variable), []
    with tf.GradientTape() as other_tape:
        other = sok.lookup_sparse([variable], [ids[:5]], combiners=["sum"])[0]

    def predicate(entries):
        found.append(other_tape.gradient(other, variable))
        return np.zeros(entries.keys.size, bool)

    variable.table.export_if(predicate)
    assert found[0].indices.numpy().tolist() == [*range(5)]
    assert noted(variable) == known
    assert bits([tape.gradient(output, variable)]) == bits([before])


def test_a_gradient_that_is_not_as_it_should_be_raises_what_python_raises():
    variable = new_variable(dim=4)
    ids = tf.constant(np.arange(20)[:, None])
    texts = []
    for is_native in (True, False):
        with tf.GradientTape(persistent=True) as tape:
            output = sok.lookup_sparse([variable], [ids], combiners=["sum"])[0]
        tape.gradient(output, variable)  # it makes room
        with contextlib.nullcontext() if is_native else by_python([variable]):
            with pytest.raises(ValueError, match="gradient of the output of table 0") as caught:
                tape.gradient(output, variable, tf.ones((20, 3)))
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_several_threads_take_gradients_of_one_table():
    variable = new_variable()

    @tf.function(reduce_retracing=True)
    def gradient(ids):
        with tf.GradientTape() as tape:
            output = sok.lookup_sparse([variable] * 2, [ids, ids[::-1]], combiners=["sum", "mean"])
        found = tape.gradient(output, variable)
        return found.indices, found.values

    rng = np.random.default_rng(0)
    all_ids = [tf.constant(rng.integers(0, 300, (size, 2))) for size in (3, 40, 700, 90) * 5]
    for ids in all_ids:  # not by Python: what is traced then is never native
        gradient(ids)
    with by_python([variable]):
        wanted = [bits(gradient(ids)) for ids in all_ids]
    entries = num_entries()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda ids: bits(gradient(ids)), all_ids)) == wanted
    assert num_entries() == entries
    audit(variable.table)


@pytest.mark.parametrize("shape", [(4, 2), (2, 4)])
def test_rows_that_are_not_as_long_as_a_graph_was_told(shape):
    variable = new_variable()

    @tf.function(input_signature=[tf.TensorSpec(None, tf.int64)])
    def step(ids):
        ids.set_shape([None, 3])
        with tf.GradientTape() as tape:
            (rows,) = sok.lookup_sparse([variable], [ids], combiners=["mean"])
            loss = tf.reduce_sum(rows)
        return tape.gradient(loss, variable)

    ids = np.arange(8).reshape(shape)
    for _ in range(2):  # now all keys are there, and there is room
        native = step(ids)
    with by_python([variable]):
        assert bits([step(ids)]) == bits([native])
