"""LossScaleOptimizer around an optimizer of tables, against the same one on dense variables."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

tf_keras = pytest.importorskip("tf_keras")
k3, new, legacy = keras.optimizers, tf_keras.optimizers, tf_keras.optimizers.legacy

KEYS = [5, -7, 2**40]
DIM = 2


def of_keras3(inner, scale=16.0, growth=2):
    return keras.optimizers.LossScaleOptimizer(inner, scale, growth)


def of_tf_keras(inner, scale=16.0, growth=2):
    return tf_keras.mixed_precision.LossScaleOptimizer(
        inner, initial_scale=scale, dynamic_growth_steps=growth
    )


ALL = pytest.mark.parametrize(
    ("module", "scaling"),
    [(k3, of_keras3), (new, of_tf_keras), (legacy, of_tf_keras)],
    ids=["Keras 3", "tf_keras", "legacy"],
)


class Model:
    """A table and a dense variable, their copies, and what trains either."""

    def __init__(self, make, is_built=True):
        self.table = sok.DynamicVariable(DIM, initializer="uniform")
        self.rows = tf.Variable(tf.nn.embedding_lookup(self.table, KEYS))
        self.dense, self.copy = tf.Variable([1.0, -2.0]), tf.Variable([1.0, -2.0])
        self.inner, self.theirs = make(), make()
        self.ours = sok.OptimizerWrapper(self.inner)
        for optimizer in (self.inner, self.theirs) if is_built else ():
            if not hasattr(optimizer, "get_scaled_loss"):
                is_ours = optimizer is self.inner
                optimizer.build([self.dense] if is_ours else [self.copy, self.rows])

    def check(self):
        rows = tf.nn.embedding_lookup(self.table, KEYS)
        np.testing.assert_allclose(rows, self.rows, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(self.dense, self.copy, rtol=1e-5, atol=1e-6)
        assert scale_of(self.inner) == scale_of(self.theirs)
        counts = [self.inner.iterations, self.theirs.iterations, self.ours.iterations]
        assert len(set(map(int, counts))) == 1


def scale_of(optimizer):
    is_old = hasattr(optimizer, "get_scaled_loss")
    return float(optimizer.loss_scale if is_old else optimizer.dynamic_scale)


def slices(rows):
    return tf.IndexedSlices(tf.convert_to_tensor(rows), tf.constant(KEYS, tf.int64))


@ALL
@pytest.mark.parametrize("clip", [{}, {"clipnorm": 0.5}, {"global_clipnorm": 0.5}], ids=str)
def test_steps_are_taken_and_skipped_as_with_dense_variables(module, scaling, clip, mode):
    model = Model(lambda: scaling(module.Adam(0.1, epsilon=0.1, **clip)))
    rng, scales = np.random.default_rng(0), []

    @mode
    def step(rows, dense):
        pairs = [(slices(rows), model.table), (dense, model.dense)]
        model.ours.apply_gradients(pairs)

    for bad in (None, "table", None, None, "dense", "table", None, None, None):
        rows = rng.normal(size=(3, DIM)).astype(np.float32) * 8
        dense = rng.normal(size=2).astype(np.float32) * 8
        if bad == "table":
            rows[1, 0] = np.inf if len(scales) == 1 else np.nan
        elif bad == "dense":
            dense[1] = np.nan
        before = tf.nn.embedding_lookup(model.table, KEYS)
        step(tf.constant(rows), tf.constant(dense))
        pairs = [(tf.constant(rows), model.rows), (tf.constant(dense), model.copy)]
        model.theirs.apply_gradients(pairs)
        model.check()
        moved = bool(tf.reduce_any(tf.nn.embedding_lookup(model.table, KEYS) != before))
        assert moved == (bad is None)
        scales.append(scale_of(model.inner))
    assert min(scales) < 16.0
    assert scales[-1] > min(scales)


@ALL
@pytest.mark.parametrize("by", ["minimize", "hand"])
def test_the_loss_is_scaled_and_its_gradient_unscaled(module, scaling, by, mode):
    """Also where `minimize` makes the scale of Keras 3 before a graph uses it."""
    model = Model(lambda: scaling(module.SGD(0.1), 2.0**127), is_built=by == "hand")

    def loss_of(rows, dense):
        return tf.reduce_sum(rows * dense)

    @mode
    def step():
        def loss():
            return loss_of(tf.nn.embedding_lookup(model.table, KEYS), model.dense)

        variables = [model.table, model.dense]
        if by == "minimize":
            model.ours.minimize(loss, variables)
            return
        with tf.GradientTape() as tape:
            scaled = model.ours.scale_loss(loss())
        grads = model.ours.get_unscaled_gradients(tape.gradient(scaled, variables))
        model.ours.apply_gradients(zip(grads, variables, strict=True))

    theirs, before = module.SGD(0.1), 2.0**127
    for number in range(6):
        with tf.GradientTape() as tape:
            loss = loss_of(model.rows, model.copy)
        grads = tape.gradient(loss, [model.rows, model.copy])
        step()
        # A gradient of 2 and more times 2^127 is infinite.
        if scale_of(model.inner) >= before:
            theirs.apply_gradients(zip(grads, [model.rows, model.copy], strict=True))
        np.testing.assert_allclose(model.dense, model.copy, rtol=1e-5)
        rows = tf.nn.embedding_lookup(model.table, KEYS)
        np.testing.assert_allclose(rows, model.rows, rtol=1e-5, atol=1e-6)
        if number == 0:
            assert scale_of(model.inner) < before
        before = scale_of(model.inner)
    assert int(theirs.iterations) > 1


@ALL
@pytest.mark.parametrize("is_sgd", [False, True])
def test_one_around_a_wrapper_is_refused_when_it_is_made(module, scaling, is_sgd):
    ours = sok.SGD(0.1) if is_sgd else sok.OptimizerWrapper(module.SGD(0.1))
    kind = "SGD" if is_sgd else "OptimizerWrapper"
    text = rf"Received: a sok.{kind}. Wrap .*: sok.OptimizerWrapper\(LossScaleOptimizer\(optim"
    with pytest.raises(TypeError, match=text):
        scaling(ours)
    scaling(module.SGD(0.1))


def test_a_fixed_scale_skips_nothing(mode):
    make = lambda: tf_keras.mixed_precision.LossScaleOptimizer(  # noqa: E731
        new.SGD(1.0), dynamic=False, initial_scale=8.0
    )
    table, wrapper = sok.DynamicVariable(1, initializer="ones"), sok.OptimizerWrapper(make())
    grad = tf.IndexedSlices(tf.constant([[0.5], [np.nan]]), tf.constant([1, 2], tf.int64))

    @mode
    def step():
        wrapper.apply_gradients([(grad, table)])

    step()
    np.testing.assert_array_equal(tf.nn.embedding_lookup(table, [1, 2]), [[0.5], [np.nan]])


@ALL
def test_states_rate_and_description_are_those_of_the_optimizer_inside(module, scaling):
    inner = module.Adam(0.1)
    wrapper = sok.OptimizerWrapper(scaling(inner, 32.0, 7))
    table, dense = sok.DynamicVariable(DIM, initializer="ones"), tf.Variable([1.0])
    wrapper.apply_gradients([(slices(tf.ones([3, DIM])), table), (tf.constant([1.0]), dense)])
    name = wrapper.get_slot_names()[0]
    one = wrapper.get_slot(table, name).export()[1]
    other = sok.OptimizerWrapper(inner).get_slot(table, name).export()[1]
    np.testing.assert_array_equal(one, other)
    assert float(tf.reduce_max(tf.abs(one))) > 0
    assert float(wrapper.learning_rate) == pytest.approx(0.1)
    wrapper.learning_rate = 0.5
    assert float(inner.learning_rate) == 0.5
    again = sok.OptimizerWrapper.from_config(wrapper.get_config()).optimizer
    assert type(again) is type(wrapper.optimizer)
    assert (again.initial_scale, again.dynamic_growth_steps) == (32.0, 7)
    assert type(again.inner_optimizer) is module.Adam


@ALL
def test_a_call_without_a_dense_gradient_is_refused(module, scaling):
    table, dense = sok.DynamicVariable(DIM, initializer="ones"), tf.Variable([[1.0, 2.0]])
    wrapper = sok.OptimizerWrapper(scaling(module.SGD(1.0)))
    sparse = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([1, 2]))
    for pairs in ([], [(None, dense)], [(sparse, dense)]):
        with pytest.raises(NotImplementedError, match="Train a dense variable in the same call"):
            wrapper.apply_gradients([(slices(tf.ones([3, DIM])), table), *pairs])
    assert len(sok.export(table)[0]) == 0
    assert wrapper.iterations == 0


def test_in_a_function_keras_3_has_its_scale_before():
    table, dense = sok.DynamicVariable(DIM), tf.Variable([1.0])
    wrapper = sok.OptimizerWrapper(of_keras3(k3.SGD(1.0)))
    pairs = [(slices(tf.ones([3, DIM])), table), (tf.constant([1.0]), dense)]
    for call in (lambda: wrapper.apply_gradients(pairs), lambda: wrapper.scale_loss(dense[0])):
        with pytest.raises(ValueError, match="must be built before a tf.function scales a loss"):
            tf.function(call)()
    assert len(sok.export(table)[0]) == 0


def test_in_a_graph_of_tf1():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = sok.DynamicVariable(1, initializer="ones")
        dense = tf.compat.v1.Variable([1.0])
        given = tf.compat.v1.placeholder(tf.float32, [1, 1])
        inner = of_tf_keras(legacy.SGD(1.0))
        wrapper = sok.OptimizerWrapper(inner)
        grad = tf.IndexedSlices(given, tf.constant([7], tf.int64))
        train = wrapper.apply_gradients([(grad, table), (tf.constant([0.5]), dense)])
        rows, scale = tf.nn.embedding_lookup(table, [7]), inner.loss_scale
        session.run(tf.compat.v1.global_variables_initializer())
        results = []
        for value in (0.25, np.nan, 0.25):
            session.run(train, {given: [[value]]})
            results.append([float(x.item()) for x in session.run([rows, dense, scale])])
    assert results == [[0.75, 0.5, 16.0], [0.75, 0.5, 8.0], [0.5, 0.0, 8.0]]
