"""Lookups that change nothing: sok.inference_mode and training=False, at once, traced, in TF1."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import inference
from sok_lite.bridge.inference import AS_USUAL, MissingKeyPolicy
from tests.support.modes import MODES
from tests.support.table_state import State
from tests.support.tripwire import CtrlC

pytestmark = pytest.mark.usefixtures("initialised")

KINDS = ["hbm", "hybrid"]


def embedding_lookup(table, keys, **arguments):
    return table.sparse_read(keys, **arguments)


def lookup_sparse(table, keys, **arguments):
    ids = tf.RaggedTensor.from_row_lengths(keys, tf.ones_like(keys))
    return sok.lookup_sparse(table, ids, combiners="sum", **arguments)


LOOKUPS = [embedding_lookup, lookup_sparse]


@pytest.fixture(params=MODES)
def here(request):
    """Calls functions in one of TensorFlow's modes; see `modes`."""
    with MODES[request.param]() as mode:
        yield mode


def new_table(var_type, here=None):
    """A table of the keys 1 and 2, which start with 1s and were set to 5s."""
    table = sok.DynamicVariable(2, initializer="ones", var_type=var_type)
    here = here or MODES["eager"]()

    def write():
        written = sok.assign(table, [1, 2], tf.fill([2, 2], 5.0))
        return written if here.is_graph else None

    here.run(write)
    return table


def state(table):
    """The keys, rows and scores."""
    known = State.of(table.table)
    return known.rows, known.seen


@pytest.mark.pairs
@pytest.mark.parametrize("missing", ["initial", "zeros"])
@pytest.mark.parametrize("look_up", LOOKUPS)
@pytest.mark.parametrize("var_type", KINDS)
def test_no_training_inserts_nothing_and_leaves_scores(here, var_type, look_up, missing):
    table = new_table(var_type, here)
    before = state(table)
    rows = here.run(
        lambda keys: look_up(table, keys, training=False, missing=missing), [1, 3, 2, 3]
    )
    absent = 1.0 if missing == "initial" else 0.0
    np.testing.assert_array_equal(rows[:, 0], [5.0, absent, 5.0, absent])
    assert state(table) == before


@pytest.mark.parametrize("look_up", LOOKUPS)
@pytest.mark.parametrize("var_type", KINDS)
def test_the_mode_is_asked_for_at_run_time(here, var_type, look_up):
    table = new_table(var_type, here)
    call = here.step(lambda keys: look_up(table, keys), [9])
    call()
    assert sorted(state(table)[0]) == [1, 2, 9]
    table.table.erase(np.array([9]))
    before = state(table)
    with sok.inference_mode():
        np.testing.assert_array_equal(call(), [[1.0, 1.0]])
        with sok.inference_mode(missing="zeros"):
            np.testing.assert_array_equal(call(), [[0.0, 0.0]])
        np.testing.assert_array_equal(call(), [[1.0, 1.0]])
        assert state(table) == before
    call()
    assert sorted(state(table)[0]) == [1, 2, 9]


@pytest.mark.cases("look_up")
@pytest.mark.parametrize("look_up", LOOKUPS)
def test_an_argument_outweighs_the_mode(here, look_up):
    table = new_table("hybrid", here)
    with sok.inference_mode(missing="zeros"):
        rows = here.run(lambda keys: look_up(table, keys, missing="initial"), [8])
        np.testing.assert_array_equal(rows, [[1.0, 1.0]])
        assert table.table.size == 2
        here.run(lambda keys: look_up(table, keys, training=True), [8])
        # What such a lookup does not admit is no business of the mode.
        assert MissingKeyPolicy(True).now() == (True, "initial")
    assert sorted(state(table)[0]) == [1, 2, 8]


def test_an_exception_inside_closes_it():
    table = new_table("hbm")
    with pytest.raises(RuntimeError, match="stop"), sok.inference_mode():
        raise RuntimeError("stop")
    embedding_lookup(table, [6])
    assert table.table.size == 3


def test_an_interrupt_leaves_native_code_in_the_same_mode():
    table = sok.DynamicVariable(2)
    keys = tf.constant([1, 2])
    tf.nn.embedding_lookup(table, keys)
    opened = set()

    def block():
        with sok.inference_mode(missing="zeros"):
            pass

    for at in range(1, 1000):
        wire = CtrlC(at)
        with contextlib.suppress(KeyboardInterrupt):
            wire.run(block)
        before = table.table.clock.now
        tf.nn.embedding_lookup(table, keys)  # by native code
        inserts, _ = AS_USUAL.now()
        assert table.table.clock.now == before + inserts, wire.place
        opened.add(not inserts)
        inference._set_open(())
        if wire.place is None:
            break
    assert at > 5 and False in opened


def test_it_is_of_all_threads_and_closed_in_any_order():
    first, second = sok.inference_mode(missing="zeros"), sok.inference_mode(missing="initial")
    none, seen = [None] * 3, []
    with ThreadPoolExecutor(1) as another:
        for step in (
            first.__enter__,
            second.__enter__,
            lambda: first.__exit__(*none),
            lambda: second.__exit__(*none),
        ):
            step()
            seen.append(another.submit(AS_USUAL.now).result())
    assert seen == [(False, "zeros"), (False, "initial"), (False, "initial"), (True, "initial")]


def test_it_cannot_be_opened_where_only_tracing_would_be_inside():
    table = new_table("hbm")

    @tf.function
    def evaluate(keys):
        with sok.inference_mode():
            return tf.nn.embedding_lookup(table, keys)

    with pytest.raises(RuntimeError, match="Open it around the call"):
        evaluate(tf.constant([9]))
    assert AS_USUAL.now() == (True, "initial")


@pytest.mark.pairs
@pytest.mark.parametrize("n", [0, 1, 33])
@pytest.mark.parametrize("var_type", KINDS)
def test_missing_keys_give_what_training_would_start_with(mode, var_type, n):
    keys = np.random.default_rng(n).integers(-50, 50, n)
    tables = [sok.DynamicVariable(3, name="same", var_type=var_type) for _ in range(2)]
    for table in tables:
        sok.assign(table, [7], [[1.0, 2.0, 3.0]])
    read = mode(lambda keys: tables[0].sparse_read(keys, training=False))(tf.constant(keys))
    np.testing.assert_array_equal(read, tables[1].sparse_read(tf.constant(keys)))
    assert tables[0].table.size == 1


def test_bad_arguments():
    table, keys = new_table("hbm"), tf.constant([1], tf.int64)
    for look_up in LOOKUPS:
        with pytest.raises(TypeError, match="`training` must be True, False or None"):
            look_up(table, keys, training=tf.constant(True))
        with pytest.raises(ValueError, match="'initial' or 'zeros'. Received: missing='none'"):
            look_up(table, keys, missing="none")
        assert look_up(table, keys, training=np.True_).shape == (1, 2)
    with pytest.raises(ValueError, match="Received: missing='none'"):
        with sok.inference_mode(missing="none"):
            pass


def nested(function):
    def within(keys):
        return tf.cond(keys[0] > 0, lambda: function(keys), lambda: tf.zeros([2, 2]))

    return tf.function(within)


PIPELINES = {
    "map": lambda data, f: data.map(f),
    "parallel map": lambda data, f: data.map(f, num_parallel_calls=2),
    "filter": lambda data, f: data.filter(lambda keys: tf.reduce_all(f(keys) > -1.0)),
    "flat_map": lambda data, f: data.flat_map(lambda k: tf.data.Dataset.from_tensors(f(k))),
    "interleave": lambda data, f: data.interleave(lambda k: tf.data.Dataset.from_tensors(f(k))),
    "a function within": lambda data, f: data.map(nested(f)),
}


@pytest.mark.parametrize("look_up", LOOKUPS)
@pytest.mark.parametrize("name", PIPELINES)
def test_a_lookup_in_a_pipeline_inserts_nothing(name, look_up):
    table, data = new_table("hbm"), tf.data.Dataset.from_tensors(tf.constant([1, 7], tf.int64))
    before, pipeline = state(table), PIPELINES[name]
    with pytest.raises(tf.errors.OpError, match="cannot insert new keys in a function of tf.data"):
        list(pipeline(data, lambda keys: look_up(table, keys)))
    rows = [1, 7] if name == "filter" else [[5, 5], [1, 1]]
    reads = pipeline(data, lambda keys: look_up(table, keys, training=False))
    assert [each.numpy().tolist() for each in reads] == [rows]
    with sok.inference_mode():
        (given,) = pipeline(data, lambda keys: look_up(table, keys))
    assert given.numpy().tolist() == rows
    assert state(table) == before


@pytest.mark.parametrize("look_up", LOOKUPS)
def test_a_loop_over_a_pipeline_trains(look_up):
    table = new_table("hbm")
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))

    @tf.function
    def train(data):
        for keys in data:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(look_up(table, keys))
            optimizer.apply_gradients(zip(tape.gradient(loss, [table]), [table], strict=True))

    train(tf.data.Dataset.from_tensor_slices(tf.constant([[1, 7], [7, 8]], tf.int64)))
    keys, rows = (each.numpy().tolist() for each in sok.export(table))
    assert (keys, rows) == ([1, 2, 7, 8], [[4, 4], [5, 5], [-1, -1], [0, 0]])
