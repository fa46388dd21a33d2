"""Training through trainables: what TFRA's recorded answers do not tell of it."""

import contextlib
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from sok_lite import dynamic_embedding as de
from tests.support.helpers import run_threads

tf1 = tf.compat.v1
IDS = tf.constant([1], tf.int64)


def one_step(here, variable, optimizer, ids, weights=None, lookup=de.embedding_lookup):
    """Returns a function that takes one step on `sum(weights * rows of ids)`."""
    ids = np.asarray(ids, np.int64)
    weights = np.ones((*ids.shape, variable.dim), np.float32) if weights is None else weights
    if here.is_graph:

        def build(ids, weights):
            rows, trainable = lookup(variable, ids, name="t", return_trainable=True)
            loss = tf.reduce_sum(rows * weights)
            return optimizer.minimize(loss, var_list=[trainable])

    else:
        trainable = variable.get_trainable_by_name("t")

        def build(ids, weights):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(lookup(variable, ids, name="t") * weights)
            optimizer.apply_gradients([(tape.gradient(loss, trainable), trainable)])

    return here.step(build, ids, weights)


def sgd(here, rate=0.1):
    made = tf1.train.GradientDescentOptimizer(rate) if here.is_graph else keras.optimizers.SGD(rate)
    return de.DynamicEmbeddingOptimizer(made)


def step_on(optimizer, shadow, keys, grad=1.0, more=()):
    """Takes a step with one gradient for all elements of the rows of keys."""
    with tf.GradientTape() as tape:
        rows = shadow.lookup(tf.constant(list(keys), shadow.params.key_dtype))
        loss = tf.reduce_sum(rows) * tf.constant(grad, rows.dtype)
    optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow), *more])


@pytest.mark.parametrize("lookup", [de.embedding_lookup, de.embedding_lookup_unique])
def test_gradients_of_repeated_keys_are_summed(here, lookup):
    """Those of clipped rows too; what is kept is not clipped, and nothing but a step inserts."""
    variable = de.Variable(dim=1, initializer=1.0)
    step = one_step(here, variable, sgd(here), [7, 7, 5, 7], lookup=lookup)
    assert here.run(variable.size) == 0
    for expected in ([[0.7], [0.9]], [[0.4], [0.8]]):
        step()
        np.testing.assert_allclose(here.run(variable.lookup, [7, 5]), expected, rtol=1e-6)
    clipped = partial(lookup, max_norm=0.25)
    rows = here.run(lambda ids: clipped(variable, ids, name="t"), [7, 5, 7])
    np.testing.assert_allclose(rows, [[0.25]] * 3, rtol=1e-6)
    one_step(here, variable, sgd(here, 0.0), [7, 5], lookup=clipped)()
    np.testing.assert_allclose(here.run(variable.lookup, [7, 5]), [[0.4], [0.8]], rtol=1e-6)


FAMILIES = {
    "keras 3": keras.optimizers,
    "tf_keras": tf_keras.optimizers,
    "legacy": tf_keras.optimizers.legacy,
    "v1": tf1.train,
}


def made_by(family, name, **options):
    return getattr(FAMILIES[family], name + "Optimizer" * (family == "v1"))(0.1, **options)


def test_the_optimizer_is_the_same_object():
    for family in FAMILIES:
        optimizer = made_by(family, "Adam")
        assert de.DynamicEmbeddingOptimizer(optimizer) is optimizer
        assert de.DynamicEmbeddingOptimizer(optimizer, bp_v2=True) is optimizer  # twice
    with pytest.raises(TypeError, match="must be a Keras 3, tf_keras or"):
        de.DynamicEmbeddingOptimizer("adam")
    for family, name in (("keras 3", "Lamb"), ("keras 3", "Adafactor"), ("tf_keras", "Adafactor")):
        with pytest.raises(NotImplementedError, match=name):
            de.DynamicEmbeddingOptimizer(made_by(family, name))


def test_one_trainable_looked_up_twice_in_a_step():
    variable = de.Variable(dim=1, initializer=1.0)
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.1))
    shadow = variable.get_trainable_by_name("t")
    for sizes in ((2, 2), (1, 3)):
        variable.clear()
        with tf.GradientTape() as tape:
            a, b = (
                de.embedding_lookup(variable, tf.range(n, dtype=tf.int64), name="t") for n in sizes
            )
            loss = tf.reduce_sum(a) + 2 * tf.reduce_sum(b)
        optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])
        expected = [0.7 if i < sizes[0] else 0.8 for i in range(sizes[1])]
        np.testing.assert_allclose(variable.lookup(np.arange(sizes[1]))[:, 0], expected, rtol=1e-6)


def test_a_variable_under_two_names_has_one_state():
    variable = de.Variable(dim=1, initializer=1.0)
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    shadows = [variable.get_trainable_by_name(name) for name in ("a", "b")]
    for _ in range(2):
        with tf.GradientTape() as tape:
            a = de.embedding_lookup(variable, tf.constant([1, 2], tf.int64), name="a")
            b = de.embedding_lookup(variable, tf.constant([2, 3], tf.int64), name="b")
            loss = tf.reduce_sum(a) + tf.reduce_sum(b)
        optimizer.apply_gradients(zip(tape.gradient(loss, shadows), shadows, strict=True))
    # Momentum: 0.1 g, then 0.1 g + 0.09 g; key 2 has twice the gradient.
    expected = [1 - 0.29, 1 - 0.58, 1 - 0.29]
    np.testing.assert_allclose(variable.lookup([1, 2, 3])[:, 0], expected, rtol=1e-6)
    assert len(variable.get_slot_variables(optimizer)) == 1


def test_states_of_two_variables_keep_apart():
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1))
    variables = [de.Variable(dim=2, name=f"v{i}") for i in range(2)]
    for variable, n in zip(variables, (3, 5), strict=True):
        step_on(optimizer, variable.get_trainable_by_name("t"), range(n))
        slots = variable.get_slot_variables(optimizer)
        assert [int(slot.size()) for slot in slots] == [n, n]
        assert all(slot.name.startswith(variable.name) for slot in slots)
    variables[0].remove([0, 1])
    assert int(variables[1].get_slot_variables(optimizer)[0].size()) == 5
    assert variables[0].get_slot_variables(keras.optimizers.Adam()) == []
    with pytest.raises(TypeError, match="optimizer"):
        variables[0].get_slot_variables(3)


def test_what_a_slot_can_do():
    variable = de.Variable(dim=2, name="slotted", initializer=1.0)
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adagrad(0.1))
    step_on(optimizer, variable.get_trainable_by_name("t"), [4, 9])
    (slot,) = variable.get_slot_variables(optimizer)
    assert (slot.name, slot.dim) == ("slotted/accumulator", 2) and "slotted" in repr(slot)
    values, are_there = slot.lookup([4, 7], return_exists=True)
    assert are_there.numpy().tolist() == [True, False]
    np.testing.assert_allclose(values[1], [0.1, 0.1])  # what it begins with
    assert slot.upsert([4], [[7.0, 8.0]]) is None
    keys, states = slot.export()
    assert keys.numpy().tolist() == [4, 9] and states.numpy()[0].tolist() == [7.0, 8.0]
    with pytest.raises(ValueError, match="have no row"):
        slot.upsert([5], [[1.0, 1.0]])


@pytest.mark.parametrize("family", ["v1", "legacy"])
def test_get_slot_of_a_trainable_is_the_state_of_its_variable(family):
    optimizer = de.DynamicEmbeddingOptimizer(made_by(family, "Adam"))
    variable, dense = de.Variable(dim=2), tf.Variable([1.0])
    shadow, other = (variable.get_trainable_by_name(name) for name in "ab")
    none = contextlib.nullcontext() if family == "v1" else pytest.raises(KeyError)
    with none:  # as of a dense variable
        assert optimizer.get_slot(shadow, "m") is None
    step_on(optimizer, shadow, [4, 9], more=[(tf.ones([1]), dense)])
    assert {"m", "v"} <= set(optimizer.get_slot_names())
    for name in "mv":
        (expected,) = (s for s in variable.get_slot_variables(optimizer) if s.slot_name == name)
        for trainable in (shadow, other):
            slot = optimizer.get_slot(trainable, name).params
            np.testing.assert_array_equal(slot.lookup([4, 9]), expected.lookup([4, 9]))
            assert int(slot.size()) == 2
        assert optimizer.get_slot(dense, name).shape == [1]
    with none:
        assert optimizer.get_slot(shadow, "none such") is None


def test_get_slot_is_there_in_a_graph_before_the_first_step():
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = de.get_variable("g", dim=2)
        ids = tf1.placeholder(tf.int64, [None])
        rows, trainable = de.embedding_lookup(variable, ids, return_trainable=True)
        optimizer = de.DynamicEmbeddingOptimizer(tf1.train.AdagradOptimizer(0.1))
        step = optimizer.minimize(tf.reduce_sum(rows), var_list=[trainable])
        (name,) = optimizer.get_slot_names()
        slot = optimizer.get_slot(trainable, name).params
        size, state, exported = slot.size(), slot.lookup(ids), slot.export()
        session.run(tf1.global_variables_initializer())
        np.testing.assert_allclose(session.run(state, {ids: [5]}), [[0.1, 0.1]])
        session.run(step, {ids: [5]})
        np.testing.assert_allclose(session.run(state, {ids: [5, 6]}), [[1.1] * 2, [0.1] * 2])
        assert session.run(exported)[0].tolist() == [5] and session.run(size) == 1


def gradient_of(variable):
    """Returns the gradient of a lookup of key 1 by itself and in a matrix, and its rows."""
    matrix = tf.SparseTensor([[0, 0]], IDS, [1, 1])
    with tf.GradientTape(persistent=True) as tape:
        rows = de.embedding_lookup(variable, IDS, name="t")
        pooled = de.embedding_lookup_sparse(variable, matrix, None, name="t")
        losses = [tf.reduce_sum(tf.cast(each, tf.float32)) for each in (rows, pooled)]
    shadow = variable.get_trainable_by_name("t")
    gradient, other = (tape.gradient(loss, shadow) for loss in losses)
    assert (gradient is None) == (other is None)
    return gradient, rows


def test_what_is_not_trained_has_no_gradient():
    for dtype in (tf.int32, tf.int64, tf.int8):
        gradient, rows = gradient_of(de.Variable(value_dtype=dtype, dim=2, initializer=4))
        assert gradient is None and rows.dtype == dtype and rows.numpy().tolist() == [[4, 4]]
    variable, dense = de.Variable(dim=2, trainable=False), tf.Variable(1.0)
    assert gradient_of(variable)[0] is None
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.1))
    pairs = [(None, variable.get_trainable_by_name("t")), (tf.constant(1.0), dense)]
    optimizer.apply_gradients(pairs)
    assert int(variable.size()) == 0 and float(dense) == np.float32(0.9)
    variable = de.Variable(dim=2)
    assert de.get_model_mode() == "train" == de.ModelMode.TRAIN
    assert gradient_of(variable)[0] is not None
    de.enable_inference_mode()
    assert de.get_model_mode() == de.ModelMode.CURRENT_SETTING == "inference"
    assert gradient_of(variable)[0] is None


# ---- trainables ----------------------------------------------------------------------------------


def test_the_arguments_of_lookups():
    """Those that they have in common with sparse lookups are in test_sparse_lookups.py."""
    for lookup in (de.embedding_lookup, de.embedding_lookup_unique):
        variable = de.Variable(dim=2)
        assert lookup([variable], IDS, name="t").shape == (1, 2)
        with pytest.raises(ValueError, match="`name` must be given in eager mode"):
            lookup(variable, IDS)
        with pytest.raises(NotImplementedError, match="get_trainable_by_name"):
            tf.function(partial(lookup, variable, name="t", return_trainable=True))(IDS)


def test_get_trainable_by_name():
    variable = de.Variable(dim=2)
    trainable = variable.get_eager_trainable_by_name("new")
    assert variable.get_trainable_by_name("new") is trainable and trainable.params is variable
    assert isinstance(trainable, de.shadow_ops.ShadowVariable)
    assert isinstance(trainable, de.TrainableWrapper) and isinstance(trainable, tf.Variable)
    assert variable.trainable_store == {"new": trainable}
    with pytest.raises(TypeError, match="name should be a string"):
        variable.get_trainable_by_name(3)
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="eager mode"):
        variable.get_trainable_by_name("new")
    assert variable.embedding_lookup(IDS).shape == (1, 2)
    _, own = variable.embedding_lookup(IDS, name="own", return_trainable=True)
    assert own is variable.get_trainable_by_name("own/embedding_lookup")


def test_what_nobody_looks_up_is_not_trained_without_a_word():
    variable = de.Variable(dim=2)
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.1))
    other = variable.get_trainable_by_name("misspelt")
    with pytest.raises(ValueError, match=r"no gradient of any of \['misspelt:0'\]"):
        optimizer.minimize(
            lambda: tf.reduce_sum(de.embedding_lookup(variable, IDS, name="t")), [other]
        )


def test_what_shadow_variables_take():
    variable = de.Variable(dim=2)
    buffer = tf.Variable(tf.zeros([0], tf.int64), shape=[None])
    shadow = de.shadow_ops.ShadowVariable(variable, "s", ids=buffer)
    de.shadow_ops.embedding_lookup(shadow, tf.constant([[4], [5]], tf.int64))
    assert buffer.numpy().tolist() == [4, 5] and shadow.ids is buffer
    for params, options, text in (
        (3, {}, r"`params` must be a de\.Variable"),
        (variable, {"ids": tf.constant([1])}, r"`ids` must be a tf\.Variable"),
        (variable, {"distribute_strategy": 3}, "distribute_strategy"),
    ):
        with pytest.raises(TypeError, match=text):
            de.shadow_ops.ShadowVariable(params, **options)
    with tf.Graph().as_default(), pytest.raises(NotImplementedError, match="return_trainable"):
        de.shadow_ops.ShadowVariable(variable)
    with pytest.raises(ValueError, match="must be int64"):
        de.shadow_ops.embedding_lookup(shadow, tf.constant([1]))


def test_a_trainable_reads_the_keys_it_looked_up():
    variable = de.Variable(dim=2, initializer=1.0)
    shadow = de.shadow_ops.ShadowVariable(variable, "s", max_norm=1.0)
    assert shadow.ids.shape == (0,) and shadow.ids.dtype == tf.int64
    for read in (shadow.read_value, shadow.prefetch_values):
        assert read().shape == (0, 2)
    de.shadow_ops.embedding_lookup(shadow, tf.constant([4, 5], tf.int64))
    half = np.full((2, 2), np.sqrt(0.5), np.float32)
    for rows in (shadow.read_value(), shadow.prefetch_values(), shadow.transform(tf.ones([2, 2]))):
        np.testing.assert_allclose(rows, half, rtol=1e-6)
    assert shadow.ids.numpy().tolist() == [4, 5] and int(shadow.size()) == 0
    shadow.update_op()
    assert variable.export()[0].numpy().tolist() == [4, 5]
    shadow.update_op(tf.constant([[2.0, 3.0], [4.0, 5.0]]))
    assert variable.lookup([5]).numpy().tolist() == [[4.0, 5.0]]


def test_unique_lookups_of_any_function():
    """What `embedding_lookup_unique` gives is recorded: see scenarios_of_lookups.py."""
    table, asked = tf.reshape(tf.range(18.0), [9, 2]), []

    def look_up(ids):
        asked.append(ids.numpy().tolist())
        return tf.gather(table, ids)

    dense = tf.constant([[[3, 3], [0, 8]]], tf.int64)
    for with_unique, distinct in ((True, [3, 0, 8]), (False, [3, 3, 0, 8])):
        base = partial(de.shadow_ops.embedding_lookup_unique_base, with_unique=with_unique)
        np.testing.assert_array_equal(base(dense, 2, look_up), tf.gather(table, dense))
        assert asked.pop() == distinct
        rows = base(tf.ragged.constant([[1, 2], [], [8]], tf.int64), 2, look_up)
        assert rows.to_list() == [[[2, 3], [4, 5]], [], [[16, 17]]]


def test_trainable_wrapper_filter():
    dense, shadow = tf.Variable(1.0), de.Variable(dim=2).get_trainable_by_name("s")
    pairs = [(1, dense), (2, shadow)]
    assert de.trainable_wrapper_filter(pairs) == (((1, dense),), ((2, shadow),))
    assert de.trainable_wrapper_filter([1, 2, 3], lambda n: n > 1) == ((1,), (2, 3))


def test_a_trainable_is_in_the_collections_of_a_graph():
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = de.get_variable("v", dim=2, initializer=1.0)
        ids = tf.constant([1, 2], tf.int64)
        rows, trainable = de.embedding_lookup(variable, ids, name="u", return_trainable=True)
        assert tf1.trainable_variables() == [trainable] and tf1.global_variables() == []
        # Nothing was initialized.
        assert session.run(rows).tolist() == [[1, 1], [1, 1]]
        grads = tf.gradients(tf.reduce_sum(rows), trainable)[0]
        assert session.run(grads.indices).tolist() == [1, 2]
        optimizer = de.DynamicEmbeddingOptimizer(tf1.train.GradientDescentOptimizer(0.5))
        step = optimizer.minimize(tf.reduce_sum(rows))  # of all trainable variables
        session.run(tf1.global_variables_initializer())
        session.run(step)
        assert session.run(variable.lookup(ids)).tolist() == [[0.5, 0.5]] * 2


def test_an_update_counts_for_every_worker():
    variable = de.Variable(dim=1, bp_v2=True)

    def work(number):
        optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(1.0))
        shadow = de.shadow_ops.ShadowVariable(variable, f"worker {number}")
        for _ in range(50):
            step_on(optimizer, shadow, [1, 2], -1.0)

    run_threads(work)
    np.testing.assert_array_equal(variable.lookup([1, 2]), [[200.0], [200.0]])


@pytest.mark.parametrize("name", ["SGD", "Adam", "Ftrl", "RMSprop"])
def test_a_legacy_optimizer_of_eager_mode_takes_its_steps_in_a_graph(name):
    optimizer = de.DynamicEmbeddingOptimizer(made_by("legacy", name))
    alone = made_by("legacy", name)  # as it comes, it makes its variables where its step is
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = de.Variable(dim=1, name="v", initializer=1.0)
        ids = tf.constant([3], tf.int64)
        rows, trainable = de.embedding_lookup(variable, ids, name="t", return_trainable=True)
        dense, other = tf.Variable([1.0]), tf.Variable([[1.0]])
        loss = tf.reduce_sum(rows**2) + tf.reduce_sum(dense**2)
        variables = [trainable, dense]
        step = optimizer.apply_gradients(zip(tf.gradients(loss, variables), variables, strict=True))
        as_ever = alone.apply_gradients([(2 * other, other)])
        session.run(tf1.global_variables_initializer())
        session.run(variable.upsert(ids, [[1.0]]))
        for _ in range(3):
            session.run([step, as_ever])
        expected = session.run(other)
        np.testing.assert_allclose(session.run(dense), expected[0], rtol=1e-6)
        np.testing.assert_allclose(session.run(rows), expected, rtol=1e-6)
