"""Training through trainables: lookups, gradients, `DynamicEmbeddingOptimizer`."""

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


def test_the_example_of_the_document():
    init = tf.keras.initializers.RandomNormal()
    params = de.get_variable("foo", dim=4, initializer=init)
    optimizer = tf.keras.optimizers.Adam(1e-3)
    optimizer = de.DynamicEmbeddingOptimizer(optimizer)
    ids = tf.constant([[1, 2], [3, 1]], tf.int64)
    before = params.lookup([1, 2, 3]).numpy()

    @tf.function
    def loss_fn(ids):
        emb = de.embedding_lookup(params, ids, name="user_embedding")
        emb = tf.math.reduce_sum(emb, axis=1)
        loss = tf.reduce_mean(emb)
        return loss

    for _ in range(10):
        optimizer.minimize(
            lambda: loss_fn(ids),
            var_list=[params.get_eager_trainable_by_name("user_embedding")],
        )
    assert int(params.size()) == 3 and int(optimizer.iterations) == 10
    # A gradient that never changes moves a row by the learning rate in each step of Adam.
    np.testing.assert_allclose(params.lookup([1, 2, 3]), before - 10 * 1e-3, rtol=0, atol=1e-5)
    assert params.get_trainable_by_name("user_embedding").params is params


def test_training_inserts_and_lookups_do_not(here):
    variable = de.Variable(dim=2, initializer=1.0)
    step = one_step(here, variable, sgd(here, 0.0), [[3, 4]])
    assert here.run(variable.size) == 0
    step()
    np.testing.assert_array_equal(here.run(variable.export)[1], np.ones((2, 2)))


@pytest.mark.parametrize("lookup", [de.embedding_lookup, de.embedding_lookup_unique])
def test_gradients_of_repeated_keys_are_summed(here, lookup):
    variable = de.Variable(dim=1, initializer=1.0)
    step = one_step(here, variable, sgd(here), [7, 7, 5, 7], lookup=lookup)
    step()
    np.testing.assert_allclose(here.run(variable.lookup, [7, 5]), [[0.7], [0.9]], rtol=1e-6)
    step()
    np.testing.assert_allclose(here.run(variable.lookup, [7, 5]), [[0.4], [0.8]], rtol=1e-6)


def families():
    return {
        "keras 3": keras.optimizers.Adam(0.1),
        "tf_keras": tf_keras.optimizers.Adam(0.1),
        "legacy": tf_keras.optimizers.legacy.Adam(0.1),
        "v1": tf1.train.AdamOptimizer(0.1),
    }


@pytest.mark.parametrize("family", list(families()))
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("with_dense", [False, True])
def test_each_family_does_as_on_a_dense_variable(family, traced, with_dense):
    ours, theirs = (families()[family] for _ in range(2))
    ours = de.DynamicEmbeddingOptimizer(ours)
    variable = de.Variable(dim=3, initializer=0.5)
    shadow = variable.get_trainable_by_name("t")
    dense, other = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])
    table = tf.Variable(np.full((6, 3), 0.5, np.float32))
    rng = np.random.default_rng(0)

    def step(ids, weights):
        with tf.GradientTape() as tape:
            rows = de.embedding_lookup(variable, ids, name="t")
            loss = tf.reduce_sum(tf.square(rows - weights)) + tf.reduce_sum(dense**2)
        variables = [shadow, dense] if with_dense else [shadow]
        ours.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    step = tf.function(step) if traced else step
    for _ in range(6):
        # All keys in each step: dense Adam moves rows that have no gradient as well.
        ids = tf.constant(rng.permutation(np.r_[np.arange(6), rng.integers(0, 6, 3)]))
        weights = tf.constant(rng.normal(size=(9, 3)).astype(np.float32))
        step(ids, weights)
        with tf.GradientTape() as tape:
            rows = tf.nn.embedding_lookup(table, ids)
            loss = tf.reduce_sum(tf.square(rows - weights)) + tf.reduce_sum(other**2)
        variables = [table, other] if with_dense else [table]
        grads = [tf.convert_to_tensor(each) for each in tape.gradient(loss, variables)]
        theirs.apply_gradients(zip(grads, variables, strict=True))
    np.testing.assert_allclose(variable.lookup(np.arange(6)), table, rtol=0, atol=2e-6)
    np.testing.assert_allclose(dense, other, rtol=0, atol=2e-6)
    if family != "v1":
        assert int(ours.iterations) == 6
    slots = {slot.slot_name: slot for slot in variable.get_slot_variables(ours)}
    assert sorted(slots) == ["m", "v"]
    assert int(slots["m"].size()) == 6 and slots["m"].name.endswith("/m")


def test_the_optimizer_is_the_same_object():
    for optimizer in families().values():
        assert de.DynamicEmbeddingOptimizer(optimizer) is optimizer
        assert de.DynamicEmbeddingOptimizer(optimizer, bp_v2=True) is optimizer  # twice
    with pytest.raises(TypeError, match="must be a Keras 3, tf_keras or"):
        de.DynamicEmbeddingOptimizer("adam")
    with pytest.raises(NotImplementedError, match="Lamb"):
        de.DynamicEmbeddingOptimizer(keras.optimizers.Lamb())


def test_an_optimizer_of_a_programs_own():
    class Signs(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            self.assign_sub(variable, learning_rate * keras.ops.sign(gradient))

    class Signs1(tf1.train.GradientDescentOptimizer):
        def _apply_dense(self, grad, var):
            return var.assign_sub(0.5 * tf.sign(grad))

        def _resource_apply_dense(self, grad, handle):
            return handle.assign_sub(0.5 * tf.sign(grad))

    for own in (Signs(0.5), Signs1(0.5)):
        optimizer = de.DynamicEmbeddingOptimizer(own)
        variable = de.Variable(dim=2, initializer=1.0)
        shadow = variable.get_trainable_by_name("t")
        ids = tf.constant([3, 3], tf.int64)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(de.embedding_lookup(variable, ids, name="t"))
        optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])
        np.testing.assert_array_equal(variable.lookup([3, 4]), [[0.5, 0.5], [1.0, 1.0]])


def test_one_trainable_looked_up_twice_in_a_step():
    variable = de.Variable(dim=1, initializer=1.0)
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.1))
    shadow = variable.get_trainable_by_name("t")
    for sizes in ((2, 2), (1, 3)):
        variable.clear()
        with tf.GradientTape() as tape:
            a = de.embedding_lookup(variable, tf.range(sizes[0], dtype=tf.int64), name="t")
            b = de.embedding_lookup(variable, tf.range(sizes[1], dtype=tf.int64), name="t")
            loss = tf.reduce_sum(a) + 2 * tf.reduce_sum(b)
        optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])
        both, second = 0.7, 0.8
        expected = [both if i < sizes[0] else second for i in range(sizes[1])]
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
    np.testing.assert_allclose(
        variable.lookup([1, 2, 3])[:, 0], [1 - 0.29, 1 - 0.58, 1 - 0.29], rtol=1e-6
    )
    assert len(variable.get_slot_variables(optimizer)) == 1


def test_states_of_two_variables_keep_apart():
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.Adam(0.1))
    variables = [de.Variable(dim=2, name=f"v{i}") for i in range(2)]
    shadows = [variable.get_trainable_by_name("t") for variable in variables]
    with tf.GradientTape() as tape:
        loss = tf.add_n(
            [
                tf.reduce_sum(de.embedding_lookup(v, tf.range(n, dtype=tf.int64), name="t"))
                for v, n in zip(variables, (3, 5), strict=True)
            ]
        )
    optimizer.apply_gradients(zip(tape.gradient(loss, shadows), shadows, strict=True))
    for variable, n in zip(variables, (3, 5), strict=True):
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
    shadow = variable.get_trainable_by_name("t")
    gradient = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([4, 9], tf.int64))
    optimizer.apply_gradients([(gradient, shadow)])
    (slot,) = variable.get_slot_variables(optimizer)
    assert (slot.name, slot.dim) == ("slotted/accumulator", 2) and "slotted" in repr(slot)
    states, exists = slot.lookup([9, 5], return_exists=True)
    np.testing.assert_allclose(states, [[1.1, 1.1], [0.1, 0.1]], rtol=1e-6)
    assert exists.numpy().tolist() == [True, False]
    slot.upsert([4], [[7.0, 8.0]])
    keys, states = slot.export()
    assert keys.numpy().tolist() == [4, 9] and states.numpy()[0].tolist() == [7.0, 8.0]
    with pytest.raises(ValueError, match="have no row"):
        slot.upsert([5], [[1.0, 1.0]])
    assert slot.upsert([4], [[1.0, 1.0]]) is None


@pytest.mark.parametrize("family", ["v1", "legacy"])
def test_get_slot_of_a_trainable_is_the_state_of_its_variable(family):
    optimizer = de.DynamicEmbeddingOptimizer(families()[family])
    variable, dense = de.Variable(dim=2), tf.Variable([1.0])
    shadow, other = (variable.get_trainable_by_name(name) for name in "ab")
    none = contextlib.nullcontext() if family == "v1" else pytest.raises(KeyError)
    with none:  # as of a dense variable
        assert optimizer.get_slot(shadow, "m") is None
    gradient = tf.IndexedSlices(tf.ones([2, 2]), tf.constant([4, 9], tf.int64))
    optimizer.apply_gradients([(gradient, shadow), (tf.ones([1]), dense)])
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
        optimizer = de.DynamicEmbeddingOptimizer(tf1.train.AdamOptimizer(0.1))
        step = optimizer.minimize(tf.reduce_sum(rows), var_list=[trainable])
        names = [name for name in optimizer.get_slot_names() if name in ("m", "v")]
        slots = [optimizer.get_slot(trainable, name).params for name in names]
        sizes, first = [slot.size() for slot in slots], slots[0].lookup(ids)
        session.run(tf1.global_variables_initializer())
        session.run(step, {ids: [5, 7]})
        assert session.run(sizes) == [2, 2]
        found = session.run(first, {ids: [5, 6]})
        np.testing.assert_allclose(found, [[0.1, 0.1], [0.0, 0.0]], rtol=1e-6)


def test_slots_are_there_in_a_graph_before_the_first_step():
    with tf.Graph().as_default(), tf1.Session() as session:
        variable = de.get_variable("g", dim=2)
        ids = tf1.placeholder(tf.int64, [None])
        rows, trainable = de.embedding_lookup(variable, ids, return_trainable=True)
        optimizer = de.DynamicEmbeddingOptimizer(tf1.train.AdagradOptimizer(0.1))
        step = optimizer.minimize(tf.reduce_sum(rows), var_list=[trainable])
        (slot,) = variable.get_slot_variables(optimizer)
        state, exported = slot.lookup(ids), slot.export()
        session.run(tf1.global_variables_initializer())
        np.testing.assert_allclose(session.run(state, {ids: [5]}), [[0.1, 0.1]])
        session.run(step, {ids: [5]})
        np.testing.assert_allclose(session.run(state, {ids: [5, 6]}), [[1.1] * 2, [0.1] * 2])
        assert session.run(exported)[0].tolist() == [5]


def test_a_variable_that_is_not_trainable():
    variable = de.Variable(dim=2, trainable=False)
    dense = tf.Variable(1.0)
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.1))
    shadow = variable.get_trainable_by_name("t")
    with tf.GradientTape() as tape:
        rows = de.embedding_lookup(variable, tf.constant([1], tf.int64), name="t")
        loss = tf.reduce_sum(rows) + dense
    grads = tape.gradient(loss, [shadow, dense])
    assert grads[0] is None
    optimizer.apply_gradients(zip(grads, [shadow, dense], strict=True))
    assert int(variable.size()) == 0 and float(dense) == np.float32(0.9)


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64, tf.int8], ids=lambda d: d.name)
def test_integers_are_looked_up_and_not_trained(dtype):
    variable = de.Variable(value_dtype=dtype, dim=2, initializer=4)
    with tf.GradientTape() as tape:
        rows = de.embedding_lookup(variable, tf.constant([1], tf.int64), name="t")
        loss = tf.reduce_sum(tf.cast(rows, tf.float32))
    assert rows.dtype == dtype and rows.numpy().tolist() == [[4, 4]]
    assert tape.gradient(loss, variable.get_trainable_by_name("t")) is None


@pytest.mark.parametrize("dtype", [tf.float64, tf.float16, tf.bfloat16], ids=lambda d: d.name)
def test_other_floats_are_trained(dtype):
    variable = de.Variable(value_dtype=dtype, dim=2, initializer=1.0)
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.25))
    with tf.GradientTape() as tape:
        rows = de.embedding_lookup(variable, tf.constant([1, 1], tf.int64), name="t")
        loss = tf.reduce_sum(rows)
    shadow = variable.get_trainable_by_name("t")
    optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])
    assert variable.lookup([1]).numpy().tolist() == [[0.5, 0.5]]


# ---- max_norm, modes -----------------------------------------------------------------------------


def test_max_norm_clips_what_is_read_and_not_what_is_kept(here):
    variable = de.Variable(dim=2)
    here.run(variable.upsert, [1, 2], [[30.0, 40.0], [0.3, 0.4]])
    for lookup in (de.embedding_lookup, de.embedding_lookup_unique):
        rows = here.run(lambda ids, f=lookup: f(variable, ids, name="t", max_norm=1.0), [1, 2, 1])
        np.testing.assert_allclose(rows, [[0.6, 0.8], [0.3, 0.4], [0.6, 0.8]], rtol=1e-6)
    clipped = partial(de.embedding_lookup, max_norm=1.0)
    one_step(here, variable, sgd(here, 0.0), [1, 2], lookup=clipped)()
    np.testing.assert_array_equal(
        here.run(variable.lookup, [1, 2]), np.array([[30.0, 40.0], [0.3, 0.4]], np.float32)
    )


def test_the_inference_mode_has_no_gradient():
    variable = de.Variable(dim=2, initializer=1.0)
    assert de.get_model_mode() == "train" == de.ModelMode.TRAIN
    de.enable_inference_mode()
    assert de.get_model_mode() == de.ModelMode.CURRENT_SETTING == "inference"
    with tf.GradientTape() as tape:
        rows = de.embedding_lookup(variable, tf.constant([1], tf.int64), name="t")
        loss = tf.reduce_sum(rows)
    shadow = variable.get_trainable_by_name("t")
    assert rows.numpy().tolist() == [[1.0, 1.0]] and tape.gradient(loss, shadow) is None
    de.enable_train_mode()
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(de.embedding_lookup(variable, tf.constant([1], tf.int64), name="t"))
    assert tape.gradient(loss, shadow) is not None


# ---- trainables ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lookup", [de.embedding_lookup, de.embedding_lookup_unique])
def test_the_arguments_of_lookups(lookup):
    variable = de.Variable(dim=2)
    ids = tf.constant([1], tf.int64)
    assert lookup([variable], ids, name="t").shape == (1, 2)
    with pytest.raises(ValueError, match="Only one params is allowed"):
        lookup([variable, variable], ids, name="t")
    with pytest.raises(TypeError, match=r"must be a de\.Variable"):
        lookup(tf.Variable([1.0]), ids, name="t")
    with pytest.raises(TypeError, match="must be int64.*Received: int32"):
        lookup(variable, tf.constant([1]), name="t")
    with pytest.raises(ValueError, match="`name` must be given in eager mode"):
        lookup(variable, ids)
    with pytest.raises(NotImplementedError, match="get_trainable_by_name"):
        tf.function(partial(lookup, variable, name="t", return_trainable=True))(ids)
    _, trainable = lookup(variable, ids, name="t", return_trainable=True)
    assert trainable is variable.get_trainable_by_name("t")


def test_the_lookup_of_a_variable():
    variable = de.Variable(dim=2)
    ids = tf.constant([1], tf.int64)
    assert variable.embedding_lookup(ids).shape == (1, 2)
    assert variable.embedding_lookup(ids, name="own", return_trainable=True)[1] is (
        variable.get_trainable_by_name("own/embedding_lookup")
    )


def test_what_nobody_looks_up_is_not_trained_without_a_word():
    variable = de.Variable(dim=2)
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.1))
    other = variable.get_trainable_by_name("misspelt")
    ids = tf.constant([1], tf.int64)
    with pytest.raises(ValueError, match=r"no gradient of any of \['misspelt:0'\]"):
        optimizer.minimize(
            lambda: tf.reduce_sum(de.embedding_lookup(variable, ids, name="t")), [other]
        )


def test_get_trainable_by_name():
    variable = de.Variable(dim=2)
    trainable = variable.get_trainable_by_name("new")
    assert isinstance(trainable, de.shadow_ops.ShadowVariable)
    assert isinstance(trainable, de.TrainableWrapper) and isinstance(trainable, tf.Variable)
    assert variable.trainable_store == {"new": trainable}
    with pytest.raises(TypeError, match="name should be a string"):
        variable.get_trainable_by_name(3)
    with tf.Graph().as_default(), pytest.raises(RuntimeError, match="eager mode"):
        variable.get_trainable_by_name("new")


def test_what_shadow_variables_take():
    variable = de.Variable(dim=2)
    buffer = tf.Variable(tf.zeros([0], tf.int64), shape=[None])
    shadow = de.shadow_ops.ShadowVariable(variable, "s", ids=buffer)
    de.shadow_ops.embedding_lookup(shadow, tf.constant([[4], [5]], tf.int64))
    assert buffer.numpy().tolist() == [4, 5] and shadow.ids is buffer
    with pytest.raises(TypeError, match=r"`params` must be a de\.Variable"):
        de.shadow_ops.ShadowVariable(3)
    with pytest.raises(TypeError, match=r"`ids` must be a tf\.Variable"):
        de.shadow_ops.ShadowVariable(variable, ids=tf.constant([1]))
    with pytest.raises(TypeError, match="distribute_strategy"):
        de.shadow_ops.ShadowVariable(variable, distribute_strategy=3)
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
    np.testing.assert_allclose(shadow.read_value(), half, rtol=1e-6)
    np.testing.assert_allclose(shadow.prefetch_values(), half, rtol=1e-6)
    np.testing.assert_allclose(shadow.transform(tf.ones([2, 2])), half, rtol=1e-6)
    assert shadow.ids.numpy().tolist() == [4, 5] and int(shadow.size()) == 0
    shadow.update_op()
    assert variable.export()[0].numpy().tolist() == [4, 5]
    shadow.update_op(tf.constant([[2.0, 3.0], [4.0, 5.0]]))
    assert variable.lookup([5]).numpy().tolist() == [[4.0, 5.0]]


@pytest.mark.parametrize("with_unique", [True, False])
def test_shadow_lookups_of_any_shape(with_unique):
    variable = de.Variable(dim=2)
    variable.upsert(np.arange(9), np.arange(18).reshape(9, 2))
    shadow = variable.get_trainable_by_name("s")
    dense = tf.constant([[[3, 3], [0, 8]]], tf.int64)
    rows = de.shadow_ops.embedding_lookup_unique(shadow, dense, 2, with_unique)
    np.testing.assert_array_equal(rows, variable.lookup(dense))
    ragged = tf.ragged.constant([[1, 2], [], [8]], tf.int64)
    rows = de.shadow_ops.embedding_lookup_unique(shadow, ragged, 2, with_unique)
    assert rows.to_list() == [[[2, 3], [4, 5]], [], [[16, 17]]]
    base = partial(
        de.shadow_ops.embedding_lookup_unique_base,
        embedding_size=2,
        lookup_function=variable.lookup,
        with_unique=with_unique,
    )
    np.testing.assert_array_equal(base(dense), variable.lookup(dense))
    assert base(ragged).to_list() == rows.to_list()


def test_trainable_wrapper_filter():
    variable, dense = de.Variable(dim=2), tf.Variable(1.0)
    shadow = variable.get_trainable_by_name("s")
    pairs = [(1, dense), (2, shadow)]
    assert de.trainable_wrapper_filter(pairs) == (((1, dense),), ((2, shadow),))
    assert de.trainable_wrapper_filter([shadow, dense]) == ((dense,), (shadow,))
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


@pytest.mark.parametrize("bp_v2", [False, True])
def test_an_update_counts_for_every_worker(bp_v2):
    variable = de.Variable(dim=1, bp_v2=bp_v2)

    def work(number):
        optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(1.0), bp_v2=bp_v2)
        shadow = de.shadow_ops.ShadowVariable(variable, f"worker {number}")
        for _ in range(50):
            with tf.GradientTape() as tape:
                rows = de.shadow_ops.embedding_lookup(shadow, tf.constant([1, 2], tf.int64))
                loss = -tf.reduce_sum(rows)
            optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])

    run_threads(work)
    np.testing.assert_array_equal(variable.lookup([1, 2]), [[200.0], [200.0]])


def test_keys_of_texts_are_trained():
    variable = de.Variable(tf.string, dim=2, initializer=1.0)
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.5))
    shadow = variable.get_trainable_by_name("t")

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(de.embedding_lookup(variable, ids, name="t"))
        optimizer.apply_gradients([(tape.gradient(loss, shadow), shadow)])

    step(tf.constant(["a", "b", "a"]))
    assert sorted(variable.export()[0].numpy().tolist()) == [b"a", b"b"]
    assert variable.lookup(["a", "b", "c"]).numpy().tolist() == [[0, 0], [0.5, 0.5], [1, 1]]


def test_synchronous_is_nothing_on_one_rank(initialised):
    dense = tf.Variable([1.0, 2.0])
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(1.0), synchronous=True)
    optimizer.apply_gradients([(tf.constant([0.5, 0.5]), dense)])
    assert dense.numpy().tolist() == [0.5, 1.5]


def test_wrapping_twice_goes_on():
    variable = de.Variable(dim=1)
    optimizer = de.DynamicEmbeddingOptimizer(tf1.train.AdamOptimizer(0.1))
    shadow = variable.get_trainable_by_name("t")
    gradient = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([3], tf.int64))
    for _ in range(4):
        optimizer.apply_gradients([(gradient, shadow)])
        optimizer = de.DynamicEmbeddingOptimizer(optimizer)
    np.testing.assert_allclose(variable.lookup([3]), [[-0.4]], rtol=1e-5)


def test_keras_3_also_has_apply():
    variable, dense = de.Variable(dim=1, initializer=1.0), keras.Variable([2.0])
    shadow = variable.get_trainable_by_name("t")
    optimizer = de.DynamicEmbeddingOptimizer(keras.optimizers.SGD(0.5))
    gradient = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([3], tf.int64))
    optimizer.apply([gradient, tf.constant([1.0])], [shadow, dense])
    assert variable.lookup([3]).numpy().tolist() == [[0.5]]
    assert np.asarray(dense).tolist() == [1.5]
    assert int(optimizer.iterations) == 1


@pytest.mark.parametrize("name", ["SGD", "Adam", "Ftrl", "RMSprop"])
def test_a_legacy_optimizer_of_eager_mode_takes_its_steps_in_a_graph(name):
    legacy = pytest.importorskip("tf_keras").optimizers.legacy
    optimizer = de.DynamicEmbeddingOptimizer(getattr(legacy, name)(0.1))
    alone = getattr(legacy, name)(0.1)  # as it comes, it makes its variables where its step is
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = de.Variable(dim=1, name="v", initializer=1.0)
        rows, trainable = de.embedding_lookup(
            variable, tf.constant([3], tf.int64), name="t", return_trainable=True
        )
        dense, other = tf.Variable([1.0]), tf.Variable([[1.0]])
        loss = tf.reduce_sum(rows**2) + tf.reduce_sum(dense**2)
        variables = [trainable, dense]
        step = optimizer.apply_gradients(zip(tf.gradients(loss, variables), variables, strict=True))
        as_ever = alone.apply_gradients([(2 * other, other)])
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(variable.upsert(tf.constant([3], tf.int64), [[1.0]]))
        for _ in range(3):
            session.run([step, as_ever])
        expected = session.run(other)
        np.testing.assert_allclose(session.run(dense), expected[0], rtol=1e-6)
        np.testing.assert_allclose(session.run(rows), expected, rtol=1e-6)
