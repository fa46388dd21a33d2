"""Places that a table's gradient cannot pass: each is refused by name, the rest goes on."""

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

pytestmark = pytest.mark.usefixtures("initialised")

KEYS = [[1, 2], [2, 3]]
LOOKUPS = {
    "embedding_lookup": lambda table, keys: tf.nn.embedding_lookup(table, keys),
    "lookup_sparse": lambda table, keys: sok.lookup_sparse(
        table, tf.RaggedTensor.from_tensor(keys[:, None]), combiners="sum"
    ),
    "sparse_read_and_evict": lambda table, keys: sok.sparse_read_and_evict(table, keys)[0],
}
REFUSALS = (NotImplementedError, tf.errors.UnimplementedError)


@pytest.fixture(params=LOOKUPS.values(), ids=LOOKUPS.keys())
def look_up(request):
    return request.param


@pytest.fixture
def table():
    table = sok.DynamicVariable(2, name="narrow_way")
    sok.assign(table, [1, 2, 3], [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])
    return table


def mapped(table, look_up, scale):
    keys = tf.constant(KEYS, tf.int64)
    return tf.vectorized_map(lambda some: look_up(table, some) * scale, keys)


def test_a_gradient_through_vectorized_map_is_refused(table, look_up, mode):
    def gradient():
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(mapped(table, look_up, 2.0) ** 2)
        return tape.gradient(total, table)

    with pytest.raises(REFUSALS, match="'narrow_way:0'.*cannot leave the loop.*vectorized_map"):
        mode(gradient)()


def test_vectorized_map_goes_on_without_that_gradient(table, look_up, mode):
    expected = 2.0 * np.array([[[1, 1], [2, 2]], [[2, 2], [3, 3]]])
    np.testing.assert_array_equal(mode(lambda: mapped(table, look_up, 2.0))(), expected)

    @tf.function
    def by_scale():
        scale = tf.constant(2.0)
        with tf.GradientTape() as tape:
            tape.watch(scale)
            total = tf.reduce_sum(mapped(table, look_up, scale) ** 2)
        return tape.gradient(total, scale)

    np.testing.assert_allclose(by_scale(), 2 * (expected**2).sum() / 2)

    def one(keys):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum((2.0 * look_up(table, keys)) ** 2)
        return tape.gradient(total, table).values

    inside = mode(lambda: tf.vectorized_map(one, tf.constant(KEYS, tf.int64)))()
    np.testing.assert_array_equal(inside, 4 * expected)


def test_a_frozen_table_lets_dense_gradients_through_vectorized_map(look_up):
    frozen = sok.DynamicVariable(2, "ones", trainable=False)
    scale = tf.Variable(2.0)
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(mapped(frozen, look_up, scale) ** 2)
    np.testing.assert_allclose(tape.gradient(total, scale), 2 * 2.0 * 8)


LOOPS = {
    "map_fn": lambda look: tf.map_fn(look, tf.constant(KEYS, tf.int64), tf.float32),
    "while_loop": lambda look: tf.while_loop(
        lambda i, _: i < 3,
        lambda i, total: (i + 1, total + look(i[tf.newaxis])),
        [tf.constant(0, tf.int64), 0.0],
    )[1],
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS.keys())
@pytest.mark.parametrize("wrap", [True, False], ids=["tf.function", "graph"])
def test_a_step_with_a_gradient_out_of_a_loop_names_the_loop(look_up, loop, wrap):
    def gradient(table):
        total = tf.reduce_sum(loop(lambda some: tf.reduce_sum(look_up(table, some))))
        return tf.gradients(total, table)[0]

    def step():
        table = tables[0] if wrap else sok.DynamicVariable(2, name="narrow_way")
        optimizer.apply_gradients([(gradient(table), table)])

    optimizer = sok.OptimizerWrapper(tf.compat.v1.train.GradientDescentOptimizer(0.1))
    tables = [sok.DynamicVariable(2, name="narrow_way")] if wrap else []
    refused = pytest.raises(TypeError, match="(?s)'narrow_way:0'.*a loop.*tf.while_loop.*before")
    if wrap:
        with refused:
            tf.function(step)()
        return
    with tf.Graph().as_default(), refused:
        step()


def own_gradient(function):
    @tf.custom_gradient
    def with_gradient(x):
        return function(x), lambda dy, variables=None: (dy, [None])

    return with_gradient


@pytest.mark.cases("name")
@pytest.mark.parametrize("name", ["recompute_grad", "custom_gradient"])
def test_a_lookup_within_a_function_with_its_own_gradient_is_refused_by_name(
    table, look_up, mode, name
):
    keys = tf.constant(KEYS[0], tf.int64)
    make = {"recompute_grad": tf.recompute_grad, "custom_gradient": own_gradient}[name]
    total = make(lambda x: tf.reduce_sum(look_up(table, keys) * x))
    with pytest.raises(NotImplementedError, match=f"'narrow_way:0'.*{name}.*pass them"):
        mode(lambda: total(tf.constant(2.0)))()


DENSE = {
    "convert_to_tensor": tf.convert_to_tensor,
    "norm": tf.norm,
    "add_n": lambda gradient: tf.add_n([gradient, gradient]),
    "multiply": lambda gradient: tf.multiply(gradient, 2.0),
    "reduce_sum": tf.reduce_sum,
}
KEYS_OF_ANY_SIGN = [-5, 0, 2**40]


def gradient_of(table, look_up):
    with tf.GradientTape() as tape:
        rows = look_up(table, tf.constant(KEYS_OF_ANY_SIGN, tf.int64))
        loss = tf.reduce_sum(rows * rows)
    return tape.gradient(loss, table)


@pytest.mark.cases("dense")
@pytest.mark.parametrize("dense", DENSE.values(), ids=DENSE)
def test_a_gradient_is_made_no_dense_tensor(table, look_up, dense, mode):
    with pytest.raises(NotImplementedError, match=r"no dense form.* g\.values"):
        mode(lambda: dense(gradient_of(table, look_up)))()


@pytest.mark.parametrize("dense", DENSE.values(), ids=DENSE)
def test_a_graph_that_does_not_know_the_shape_refuses_when_it_runs(table, look_up, dense):
    @tf.function
    def out_of_a_branch(is_on):
        if is_on:
            gradient = gradient_of(table, look_up)
        else:
            none = tf.zeros([0, 2]), tf.zeros([0], tf.int64)
            gradient = tf.IndexedSlices(*none, tf.constant([0, 2]))
        return dense(gradient)

    with pytest.raises(tf.errors.InvalidArgumentError, match="-1"):
        out_of_a_branch(tf.constant(True))


def test_what_asks_for_no_dense_gradient_goes_on(table, look_up, mode):
    def clipped():
        gradient = gradient_of(table, look_up)
        (gradient, dense), norm = tf.clip_by_global_norm([gradient, tf.constant([3.0])], 1.0)
        return gradient.values, gradient.indices, dense, norm

    values, keys, dense, norm = mode(clipped)()
    expected = 2 * tf.nn.embedding_lookup(table, KEYS_OF_ANY_SIGN).numpy()
    length = np.sqrt((expected**2).sum() + 9)
    np.testing.assert_allclose(norm, length, rtol=1e-6)
    order = np.argsort(keys)
    assert keys.numpy()[order].tolist() == KEYS_OF_ANY_SIGN
    np.testing.assert_allclose(values.numpy()[order], expected / length, rtol=1e-6)
    np.testing.assert_allclose(dense, [3 / length], rtol=1e-6)


def test_a_jacobian_by_a_table_is_refused_and_one_by_dense_weights_goes_on(table, look_up, mode):
    weights = tf.Variable([[1.0], [2.0]])

    def jacobian(source):
        with tf.GradientTape() as tape:
            rows = look_up(table, tf.constant([1, 2], tf.int64))
            out = tf.reshape(rows @ weights, [-1])
        return tape.jacobian(out, source)

    with pytest.raises(NotImplementedError, match=r"tape\.jacobian.* g\.values"):
        mode(lambda: jacobian(table))()
    by_weights = mode(lambda: jacobian(weights))()
    np.testing.assert_array_equal(by_weights[:, :, 0], [[1.0, 1.0], [2.0, 2.0]])


WEIGHTS = tf.constant([[2.0, 3.0]])
FORWARD = {
    "tf.nn": lambda table: tf.nn.embedding_lookup(table, [3, 4]),
    "sok": lambda table: sok.lookup_sparse(table, tf.constant([[3, 4]]), combiners="sum"),
    "weights": lambda table: sok.lookup_sparse(table, tf.constant([[3, 4]]), WEIGHTS, "sum"),
}


@pytest.mark.parametrize("look_up", FORWARD)
def test_a_forward_accumulator_is_told_to_be_a_tape(table, look_up):
    watched, tangent, scale = table, tf.ones([2, 2]), tf.constant(3.0)
    if look_up == "weights":
        watched, tangent = WEIGHTS, tf.ones([1, 2])
    with (
        pytest.raises(NotImplementedError, match="ForwardAccumulator does not.*tf.GradientTape"),
        tf.autodiff.ForwardAccumulator(watched, tangent),
    ):
        FORWARD[look_up](table)
    if look_up == "tf.nn":
        return
    function = tf.function(lambda: FORWARD[look_up](table) * scale, autograph=False)
    with (
        pytest.raises(NotImplementedError, match="ForwardAccumulator does not.*tf.function"),
        tf.autodiff.ForwardAccumulator(scale, tf.constant(1.0)),
    ):
        function()


@pytest.mark.parametrize("look_up", ["tf.nn", "sok"])
def test_a_forward_accumulator_goes_through_what_is_computed_of_rows(table, look_up):
    scale = tf.constant(3.0)
    with tf.autodiff.ForwardAccumulator(scale, tf.constant(1.0)) as accumulator:
        rows = FORWARD[look_up](table)
        out = tf.reduce_sum(rows * scale**2)
    np.testing.assert_allclose(accumulator.jvp(out), tf.reduce_sum(rows) * 6.0, rtol=1e-6)
