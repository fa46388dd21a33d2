"""Training of variables whose rows are in a real Redis, against variables in memory."""

import threading
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from sok_lite import dynamic_embedding as de
from sok_lite.engine.optimizers import SGD
from sok_lite.engine.update import NonFiniteGradientError
from sok_lite.engine.update_rows import Update
from tests.dynamic_embedding.test_training import step_on
from tests.support import redis_server
from tests.support.helpers import run_threads
from tests.support.steps import apply_all_updates

if redis_server.unavailable() is not None:
    pytest.skip(f"no Redis: {redis_server.unavailable()}", allow_module_level=True)


def test_trains_as_in_memory(creator, tables_on):
    """With variables in memory and dense ones. Rows begin as in memory, and states go with their
    rows, and stay where a row is written."""
    results = []
    for kv_creator in (creator, None):
        options = {"dim": 2, "initializer": keras.initializers.RandomNormal(seed=5)}
        variables = [
            de.Variable(name=name, kv_creator=kind, **options)
            for name, kind in (("a", kv_creator), ("b", None), ("c", kv_creator))
        ]
        dense = tf.Variable([3.0, 4.0])
        optimizer = de.DynamicEmbeddingOptimizer(tf_keras.optimizers.Adam(0.1, amsgrad=True))
        trained = [*(variable.get_trainable_by_name("t") for variable in variables), dense]
        for step in range(5):
            if step == 3:
                variables[0].remove([7])
                variables[0].upsert([1, 50], np.ones((2, 2), np.float32))
            with tf.GradientTape() as tape:
                looked_up = [
                    de.embedding_lookup(
                        variable, tf.constant([[7, step % 3], [i, 7]], tf.int64), name="t"
                    )
                    for i, variable in enumerate(variables)
                ]
                loss = tf.reduce_sum(tf.square(tf.concat(looked_up, 0) * dense))
            grads = tape.gradient(loss, trained)
            # One of them twice: its gradients are summed.
            pairs = [*zip(grads, trained, strict=True), (grads[0], trained[0])]
            optimizer.apply_gradients(pairs)
        assert int(optimizer.iterations) == 5
        slots = [slot for each in variables for slot in each.get_slot_variables(optimizer)]
        states = [[slot.name, slot.lookup([1, 777]), *slot.export()] for slot in slots]
        results.append([dense.numpy(), [each.export() for each in variables], states])
    tf.nest.map_structure(np.testing.assert_array_equal, *results)


def test_states_of_equal_names_are_those_of_their_optimizer(creator):
    def adagrad():
        return keras.optimizers.Adagrad(0.2, initial_accumulator_value=0.3)

    def ftrl():
        return tf_keras.optimizers.legacy.Ftrl(0.2, initial_accumulator_value=0.3)

    results = []
    for kv_creator in (creator, None):
        variable = de.Variable(dim=2, initializer=1.0, name="v", kv_creator=kv_creator)
        for make in (adagrad, ftrl, adagrad):
            optimizer = de.DynamicEmbeddingOptimizer(make())
            slices = tf.IndexedSlices(tf.constant([[1.0, -2.0]]), tf.constant([7], tf.int64))
            optimizer.apply_gradients([(slices, variable.get_trainable_by_name("t"))])
            results.append(
                {
                    slot.slot_name: slot.lookup([7])
                    for slot in variable.get_slot_variables(optimizer)
                }
            )
    first, other, second = results[:3]
    for got, expected in zip(results[:2], results[3:5], strict=True):
        tf.nest.map_structure(np.testing.assert_allclose, got, expected)
    assert list(first) == ["accumulator"] and len(other) == 2
    # The second Adagrad goes on where the first one ended: states are known by what they are.
    np.testing.assert_allclose(second["accumulator"], first["accumulator"] + [[1, 4]])


def test_states_can_be_set(creator):
    variable = de.Variable(dim=2, name="v", kv_creator=creator)
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1))
    step_on(optimizer, variable.get_trainable_by_name("t"), [7, 8])
    m, v = variable.get_slot_variables(optimizer)
    before = variable.lookup([7, 8]).numpy(), v.lookup([7, 8]).numpy()
    m.upsert([8, 7, 8], [[1.0, 2], [3, 4], [5, 6]])
    np.testing.assert_array_equal(m.lookup([[7], [8], [9]]), [[[3, 4]], [[5, 6]], [[0, 0]]])
    with pytest.raises(ValueError, match="cannot be set for 1 of 2 keys, which have no row"):
        m.upsert([7, 9], np.zeros((2, 2), np.float32))
    np.testing.assert_array_equal(m.lookup([7]), [[3, 4]])
    np.testing.assert_array_equal(variable.lookup([7, 8]), before[0])
    np.testing.assert_array_equal(v.lookup([7, 8]), before[1])


# ---------------------------------------------------------------- several workers


def test_a_row_that_changes_meanwhile_is_updated_again(creator):
    variable, other = (de.Variable(dim=2, name="v", kv_creator=creator) for _ in range(2))
    variable.upsert([1, 2], np.zeros((2, 2), np.float32))
    table, made, done = variable.rows.table, [], []
    make = table.make

    def make_and_change():
        made.append(1)
        if len(made) == 2:  # the first one is to find what is to be refused
            other.upsert([2], [[50.0, 60.0]])
        return make()

    table.make = make_and_change
    grads = np.float32([[1, 1], [np.nan, 1], [2, 2]])
    num_nonfinite = np.zeros(1, np.int64)
    apply_all_updates(
        [Update(table, SGD(), np.int64([1, 2, 3]), grads)],
        *(0.5, 1),
        note=partial(done.append, 1),
        num_nonfinite=num_nonfinite,
    )
    assert len(made) == 3 and done == [1] and num_nonfinite.tolist() == [1]
    np.testing.assert_array_equal(
        variable.lookup([1, 2, 3]), [[-0.5, -0.5], [np.nan, 59.5], [-1, -1]]
    )


def test_nothing_changes_where_one_gradient_is_refused(creator):
    there, here = (de.Variable(dim=2, name="v", kv_creator=each) for each in (creator, None))
    grads = np.float32([[1, 1], [1, 1]])
    for bad in range(2):
        updates = [
            Update(
                variable.rows.table, SGD(), np.int64([1, 2]), grads if i != bad else grads * np.nan
            )
            for i, variable in enumerate((there, here))
        ]
        with pytest.raises(NonFiniteGradientError, match="2 of 2 gradient rows"):
            apply_all_updates(updates, 0.5, 1, on_nonfinite="error")
    assert int(there.size()) == int(here.size()) == 0


def of_one_key(config):
    """Returns a step that trains key 7 with a gradient of 1, and the variable."""
    variable = de.Variable(dim=2, name="v", kv_creator=de.RedisTableCreator(config))
    made = keras.optimizers.Adagrad(0.5, initial_accumulator_value=0.0)
    optimizer = de.DynamicEmbeddingOptimizer(made)
    return (
        partial(step_on, optimizer, variable.get_trainable_by_name("t"), [7]),
        variable,
        optimizer,
    )


def check_all_counted(config, count):
    """Adagrad's steps are the same whoever takes them, and its states count them."""
    step, variable, optimizer = of_one_key(config)
    step()
    (slot,) = variable.get_slot_variables(optimizer)
    np.testing.assert_array_equal(slot.lookup([7]), [[count + 1] * 2])
    expected = -0.5 * np.sum(1 / np.sqrt(np.arange(1, count + 2)))
    np.testing.assert_allclose(variable.lookup([7]), [[expected] * 2], rtol=1e-5)


def test_steps_of_several_threads_all_count(creator):
    def work(number):
        step, *kept = of_one_key(creator.config)
        barrier.wait()
        for _ in range(15):
            step()
        del kept

    barrier = threading.Barrier(3)
    run_threads(work, 3)
    check_all_counted(creator.config, 45)


# ---------------------------------------------------------------- what does not work


class Signs(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * keras.ops.sign(gradient))


NORM = "a norm is of the gradients of all"
REFUSED = [
    (lambda: Signs(0.1), "no update rule for Signs"),
    (lambda: keras.optimizers.SGD(0.1, clipnorm=1.0), NORM),
    (lambda: keras.optimizers.Adam(global_clipnorm=1.0), NORM),
    (
        lambda: tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.Adam()),
        "a LossScaleOptimizer skips",
    ),
    (
        lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
        "gradients of several batches are added up in rows of this process",
    ),
]


def test_refused_before_anything_changes(creator):
    variable, dense = de.Variable(dim=3, name="v", kv_creator=creator), tf.Variable([1.0, -2.0])
    shadow, more = variable.get_trainable_by_name("t"), [(tf.ones([2]), dense)]
    for optimizer, why in REFUSED:
        made = de.DynamicEmbeddingOptimizer(optimizer())
        with pytest.raises(NotImplementedError, match=f"'v'.* cannot take this step: .*{why}"):
            step_on(made, shadow, [7], more=more)
        assert int(variable.size()) == 0 and dense.numpy().tolist() == [1, -2]


def test_values_are_clipped(creator):
    variable = de.Variable(dim=1, name="v", kv_creator=creator)
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(1.0, clipvalue=0.5))
    shadow = variable.get_trainable_by_name("t")
    slices = tf.IndexedSlices([[9.0], [0.25]], tf.constant([1, 2], tf.int64))
    optimizer.apply_gradients([(slices, shadow)])
    np.testing.assert_array_equal(variable.lookup([1, 2]), [[-0.5], [-0.25]])


def test_where_the_redis_is_gone_nothing_changes(tmp_path):
    import redis

    with redis_server.server(tmp_path / "server") as port:
        (tmp_path / "redis.json").write_text(f'{{"redis_host_port": {port}}}')
        creator = de.RedisTableCreator(de.RedisTableConfig(str(tmp_path / "redis.json")))
        there, here = de.Variable(dim=2, name="v", kv_creator=creator), de.Variable(dim=2)
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(1.0))
    trained = [each.get_trainable_by_name("t") for each in (there, here)]
    dense = tf.Variable([1.0])
    slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([7], tf.int64))
    for more in ([], [(tf.ones([1]), dense)]):
        with pytest.raises(redis.ConnectionError):
            optimizer.apply_gradients([*((slices, each) for each in trained), *more])
    assert int(here.size()) == 0 and dense.numpy() == 1 and int(optimizer.iterations) == 0
