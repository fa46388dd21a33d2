"""The wrapper's methods besides apply_gradients: those of the wrapped optimizers, with tables."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

tf_keras = pytest.importorskip("tf_keras")
k3, new, legacy = keras.optimizers, tf_keras.optimizers, tf_keras.optimizers.legacy
v1 = tf.compat.v1.train

KEYS = [5, -7, 2**40]
MODULES = {"Keras 3": k3, "tf_keras": new, "legacy": legacy}
ALL = pytest.mark.parametrize("module", MODULES.values(), ids=MODULES)


class Pair:
    """A table and a dense variable, their copies, and a loss of either."""

    def __init__(self, dense=tf.Variable):
        self.table = sok.DynamicVariable(2, initializer="uniform")
        self.rows = tf.Variable(tf.nn.embedding_lookup(self.table, KEYS))
        self.dense, self.copy = dense([1.0, -2.0]), dense([1.0, -2.0])

    def ours(self):
        return self._loss(tf.nn.embedding_lookup(self.table, KEYS), self.dense)

    def theirs(self):
        return self._loss(tf.gather(self.rows, [0, 1, 2]), self.copy)

    @staticmethod
    def _loss(rows, dense):
        return tf.reduce_sum(tf.exp(rows) * tf.convert_to_tensor(dense))

    def check(self):
        rows = tf.nn.embedding_lookup(self.table, KEYS)
        np.testing.assert_allclose(rows, self.rows, rtol=1e-5, atol=1e-6)
        dense, copy = map(tf.convert_to_tensor, (self.dense, self.copy))
        np.testing.assert_allclose(dense, copy, rtol=1e-5, atol=1e-6)


def train_by_hand(pair, optimizer, factor=1.0):
    with tf.GradientTape() as tape:
        loss = pair.theirs() * factor
    rows, dense = tape.gradient(loss, [pair.rows, pair.copy])
    optimizer.apply_gradients([(tf.convert_to_tensor(rows), pair.rows), (dense, pair.copy)])


@pytest.mark.parametrize("family", [*MODULES, "TF1", "scaled"])
@pytest.mark.parametrize("given", ["function", "tensor", "variables later"])
def test_minimize(family, given, mode):
    pair, options, count = Pair(), {}, tf.Variable(0, dtype=tf.int64)
    make = {"TF1": v1.AdamOptimizer, "scaled": k3.SGD}.get(family) or MODULES[family].Adam
    scale = {"loss_scale_factor": 8.0} if family == "scaled" else {}
    ours, theirs = sok.OptimizerWrapper(make(0.1, **scale)), make(0.1)
    if family == "TF1":
        given, options = "function", {"global_step": count}
    elif family == "scaled":
        given, options = "function", {"grad_loss": 3.0}

    @mode
    def step():
        variables = [pair.table, pair.dense]
        if given == "tensor":
            with tf.GradientTape() as tape:
                loss = pair.ours()
            ours.minimize(loss, variables, tape=tape)
        else:
            given_variables = (lambda: variables) if given != "function" else variables
            ours.minimize(pair.ours, given_variables, **options)

    for _ in range(2):
        step()
        train_by_hand(pair, theirs, factor=options.get("grad_loss", 1.0))
    pair.check()
    assert int(ours.iterations) == 2
    assert count == (2 if family == "TF1" else 0)


def test_variables_of_keras_and_those_that_no_tape_watches_are_trained():
    pair = Pair(dense=lambda value: keras.Variable(value, trainable=False))
    tape = tf.GradientTape(watch_accessed_variables=False)
    sok.OptimizerWrapper(k3.SGD(0.1)).minimize(pair.ours, [pair.table, pair.dense], tape=tape)
    with tf.GradientTape() as tape:
        tape.watch(pair.copy.value)
        loss = pair.theirs()
    rows, dense = tape.gradient(loss, [pair.rows, pair.copy.value])
    k3.SGD(0.1).apply_gradients([(tf.convert_to_tensor(rows), pair.rows), (dense, pair.copy)])
    pair.check()


@pytest.mark.parametrize("given", [True, False], ids=["given", "all trainable"])
def test_minimize_in_a_graph_of_tf1(given):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = sok.DynamicVariable(2, initializer="ones", name="table")
        dense = tf.compat.v1.get_variable("dense", initializer=[1.0, -2.0])
        count = v1.get_or_create_global_step()
        loss = tf.reduce_sum(tf.nn.embedding_lookup(table, [1, 2, 1]) * dense)
        ours = sok.OptimizerWrapper(v1.GradientDescentOptimizer(0.5))
        variables = [table, dense] if given else None
        pairs = ours.compute_gradients(loss, variables, grad_loss=tf.constant(2.0))
        train = ours.minimize(
            loss,
            variables,
            grad_loss=tf.constant(2.0),
            global_step=count,
            name="train",
            colocate_gradients_with_ops=True,
        )
        rows = tf.nn.embedding_lookup(table, [1, 2])
        session.run(tf.compat.v1.global_variables_initializer())
        of_dense = next(grad for grad, variable in pairs if variable is dense)
        np.testing.assert_array_equal(session.run(of_dense), [6.0, 6.0])
        session.run(train)
        assert train.name.startswith("train")
        np.testing.assert_array_equal(session.run(rows), [[-1.0, 5.0], [0.0, 3.0]])
        np.testing.assert_array_equal(session.run(dense), [-2.0, -5.0])
        assert session.run(count) == 1


def test_what_an_optimizer_cannot_do_is_refused():
    pair = Pair()
    keras_one, old = sok.OptimizerWrapper(k3.SGD(0.1)), sok.OptimizerWrapper(v1.AdamOptimizer(0.1))
    for optimizer, arguments, options, error, text in (
        (keras_one, [tf.constant(1.0), [pair.dense]], {}, ValueError, "needs the `tape`"),
        (keras_one, [pair.ours], {}, ValueError, "`var_list` must be the variables"),
        (keras_one, [pair.ours, [pair.dense]], {"gate_gradients": 1}, TypeError, "gate_gradients"),
        (old, [pair.ours, [pair.dense]], {"tape": tf.GradientTape()}, TypeError, "take no `tape`"),
        (keras_one, [lambda: tf.constant(1.0), [pair.table]], {}, ValueError, "must depend on one"),
    ):
        with pytest.raises(error, match=text):
            optimizer.minimize(*arguments, **options)
    assert keras_one.iterations == 0
    pair.check()
    for wrapper in (old, sok.OptimizerWrapper(legacy.SGD(0.1))):
        with pytest.raises(NotImplementedError, match="has no weight decay"):
            wrapper.exclude_from_weight_decay(var_names=["x"])
    with pytest.raises(NotImplementedError, match="AdamOptimizer of tf.compat.v1.train has no get"):
        old.get_config()


class Halving(k3.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.5 ** (tf.cast(step, tf.float32) + 1)

    def get_config(self):
        return {}


@ALL
def test_a_wrapper_comes_back_of_its_description(module):
    schedule, custom = new.schedules.ExponentialDecay(0.5, 1, 0.5), {}
    if module is k3:
        schedule, custom = Halving(), {"custom_objects": {"Halving": Halving}}
    inner = module.Adam(schedule, beta_1=0.5, clipnorm=0.7)
    first = sok.OptimizerWrapper(inner, on_nonfinite="error", stochastic_rounding=True)
    config = json.loads(json.dumps(first.get_config()))
    second = sok.OptimizerWrapper.from_config(config, **custom)
    assert type(second.optimizer) is type(inner)
    assert second.optimizer is not inner
    assert (second.on_nonfinite, second.stochastic_rounding) == ("error", True)
    one, other = Pair(), Pair()
    sok.assign(other.table, KEYS, tf.nn.embedding_lookup(one.table, KEYS))
    for pair, optimizer in ((one, first), (other, second)):
        for _ in range(2):
            optimizer.minimize(pair.ours, [pair.table, pair.dense])
    np.testing.assert_array_equal(sok.export(other.table)[1], sok.export(one.table)[1])


@pytest.mark.parametrize("module", [k3, new], ids=["Keras 3", "tf_keras"])
@pytest.mark.parametrize("by", ["variable", "name"])
def test_weight_decay_leaves_alone_what_is_excluded(module, by, mode):
    optimizer = sok.OptimizerWrapper(module.SGD(0.5, weight_decay=0.5))
    decayed, kept = (sok.DynamicVariable(1, "ones", name=name) for name in ("one", "kept_rows"))
    dense = tf.Variable([1.0], name="kept_too"), tf.Variable([1.0], name="other")
    if by == "variable":
        optimizer.exclude_from_weight_decay(var_list=[kept, dense[0]])
    else:
        optimizer.exclude_from_weight_decay(var_names=["kept"])
    zero = tf.IndexedSlices(tf.zeros([1, 1]), tf.constant([7], tf.int64))

    @mode
    def step():
        pairs = [(tf.zeros([1]), each) for each in dense]
        optimizer.apply_gradients([(zero, decayed), (zero, kept), *pairs])

    step()
    rows = [tf.nn.embedding_lookup(table, [7]).numpy().item() for table in (decayed, kept)]
    assert rows == [0.75, 1.0]
    assert [float(each[0]) for each in dense] == [1.0, 0.75]


@ALL
def test_a_schedule_may_take_the_place_of_a_number(module):
    """And a number that of a schedule where the optimizer lets it."""
    schedules = (k3 if module is k3 else new).schedules
    table = sok.DynamicVariable(1, initializer="zeros")
    optimizer = sok.OptimizerWrapper(module.SGD(1.0))
    one = tf.IndexedSlices(tf.ones([1, 1]), tf.constant([7], tf.int64))
    optimizer.apply_gradients([(one, table)])
    optimizer.learning_rate = schedules.ExponentialDecay(1.0, 1, 0.5)
    assert float(optimizer.lr) == 0.5
    optimizer.apply_gradients([(one, table)])
    np.testing.assert_array_equal(tf.nn.embedding_lookup(table, [7]), [[-1.5]])
    optimizer = sok.OptimizerWrapper(module.SGD(schedules.ExponentialDecay(1.0, 1, 0.5)))
    if module is legacy:
        optimizer.learning_rate = 0.125
        assert float(optimizer.lr) == 0.125
        return
    with pytest.raises(TypeError, match="created with a `LearningRateSchedule`"):
        optimizer.learning_rate = 0.125
    assert float(optimizer.lr) == 1.0
