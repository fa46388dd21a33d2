"""OptimizerWrapper and SGD: steps, settings and refusals; test_every_optimizer.py has each rule."""

import gc
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from tests.support.own_optimizers import KEYS, slices

tf_keras = pytest.importorskip("tf_keras")
k3, new, legacy = keras.optimizers, tf_keras.optimizers, tf_keras.optimizers.legacy
v1 = tf.compat.v1.train

DIM = 4


def new_pair():
    table = sok.DynamicVariable(DIM, initializer="uniform")
    return table, tf.Variable(tf.nn.embedding_lookup(table, KEYS))


def rows_of(table):
    return tf.nn.embedding_lookup(table, KEYS).numpy()


def applying(optimizer, pairs):
    """A function of nothing that applies gradients and returns nothing."""

    def apply():
        optimizer.apply_gradients(pairs())

    return apply


def some_grads(seed=0, steps=4):
    return np.random.default_rng(seed).normal(size=(steps, len(KEYS), DIM)).astype(np.float32)


@pytest.mark.parametrize("module", [k3, new, legacy], ids=["Keras 3", "tf_keras", "legacy"])
def test_dense_and_dynamic_variables_in_one_call(module, mode):
    table, variable = new_pair()
    shared, alone = tf.Variable([1.0, 2.0]), tf.Variable([1.0, 2.0])
    inner, theirs = module.Adam(0.1), module.Adam(0.1)
    ours = sok.OptimizerWrapper(inner)

    @mode
    def step(grads, dense_grads):
        ours.apply_gradients([(dense_grads, shared), (slices(grads), table), (None, table)])

    for i, grads in enumerate(some_grads()):
        dense_grads = tf.constant([0.5, -1.0]) * (i + 1)
        step(tf.constant(grads), dense_grads)
        theirs.apply_gradients([(dense_grads, alone), (tf.constant(grads), variable)])
    np.testing.assert_allclose(rows_of(table), variable, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(shared, alone, rtol=1e-6)
    assert int(inner.iterations) == int(theirs.iterations) == int(ours.iterations) == 4


def test_an_optimizer_may_be_a_name():
    wrapper = sok.OptimizerWrapper("adagrad")
    assert isinstance(wrapper.optimizer, tf.keras.optimizers.Adagrad)
    with pytest.raises(ValueError, match="adagrat"):
        sok.OptimizerWrapper("adagrat")


def test_the_wrapped_optimizer_may_serve_dense_variables_by_itself(mode):
    # SOK's programs do this: its wrapper counts its own steps.
    table, variable = new_pair()
    shared, alone = tf.Variable([1.0]), tf.Variable([1.0])
    inner = k3.Adam(0.1)
    ours, dense, sparse = sok.OptimizerWrapper(inner), k3.Adam(0.1), k3.Adam(0.1)

    @mode
    def step(grads):
        ours.apply_gradients([(slices(grads), table)])
        inner.apply_gradients([(tf.constant([0.5]), shared)])

    for grads in some_grads():
        step(tf.constant(grads))
        sparse.apply_gradients([(tf.constant(grads), variable)])
        dense.apply_gradients([(tf.constant([0.5]), alone)])
    np.testing.assert_allclose(rows_of(table), variable, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(shared, alone)


def test_with_dense_variables_the_step_is_the_wrapped_optimizers(mode):
    # As after loading a model whose optimizer has gone 100 steps.
    table, variable = new_pair()
    shared, alone = tf.Variable([1.0]), tf.Variable([1.0])
    inner, theirs = k3.Adam(0.1), k3.Adam(0.1)
    ours = sok.OptimizerWrapper(inner)
    for optimizer in (inner, theirs):
        optimizer.iterations.assign(100)
    theirs.build([alone, variable])

    @mode
    def step(grads):
        ours.apply_gradients([(tf.constant([0.5]), shared), (slices(grads), table)])

    for grads in some_grads(steps=2):
        step(tf.constant(grads))
        theirs.apply_gradients([(tf.constant([0.5]), alone), (tf.constant(grads), variable)])
    np.testing.assert_allclose(rows_of(table), variable, rtol=1e-5, atol=1e-6)
    assert int(inner.iterations) == int(ours.iterations) == 102


class Halving(k3.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.5 ** tf.cast(step, tf.float32)

    def get_config(self):
        return {}


class OldHalving(tf_keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.5 ** tf.cast(step, tf.float32)

    def get_config(self):
        return {}


@pytest.mark.parametrize("with_dense", [False, True], ids=["rows only", "with dense"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: k3.SGD(Halving()),
        lambda: new.SGD(OldHalving()),
        lambda: legacy.SGD(OldHalving()),
    ],
    ids=["Keras 3", "tf_keras", "legacy"],
)
def test_a_schedule_is_read_in_every_step(make, with_dense, mode):
    table = sok.DynamicVariable(1, initializer="zeros")
    tf.nn.embedding_lookup(table, [1])
    ours, dense = sok.OptimizerWrapper(make()), tf.Variable([0.0])

    @mode
    def step():
        pairs = [(slices([[1.0]], [1]), table)]
        ours.apply_gradients(pairs + [(tf.constant([1.0]), dense)] * with_dense)

    expected = 0.0
    for rate in (1.0, 0.5, 0.25, 0.125):
        step()
        expected -= rate
        np.testing.assert_array_equal(tf.nn.embedding_lookup(table, [1]), [[expected]])
        if with_dense:
            np.testing.assert_array_equal(dense, [expected])


def test_legacy_decay_is_read_in_every_step(mode):
    table = sok.DynamicVariable(1, initializer="zeros")
    tf.nn.embedding_lookup(table, [1])
    ours = sok.OptimizerWrapper(legacy.SGD(1.0, decay=1.0))
    step = mode(applying(ours, lambda: [(slices([[1.0]], [1]), table)]))
    for _ in range(3):
        step()
    expected = -(1.0 + 1 / 2 + 1 / 3)
    np.testing.assert_allclose(tf.nn.embedding_lookup(table, [1]), [[expected]], rtol=1e-6)


@pytest.mark.parametrize("module", [k3, new, legacy], ids=["Keras 3", "tf_keras", "legacy"])
def test_an_assigned_learning_rate_counts_from_the_next_step(module, mode):
    table = sok.DynamicVariable(1, initializer="zeros")
    tf.nn.embedding_lookup(table, [1])
    ours = sok.OptimizerWrapper(module.SGD(1.0))
    step = mode(applying(ours, lambda: [(slices([[1.0]], [1]), table)]))
    step()
    ours.learning_rate = 0.25
    step()
    np.testing.assert_array_equal(tf.nn.embedding_lookup(table, [1]), [[-1.25]])
    assert float(ours.learning_rate) == float(ours.lr) == 0.25


@pytest.mark.parametrize("module", [k3, new, legacy], ids=["Keras 3", "tf_keras", "legacy"])
def test_the_learning_rate_of_a_schedule_is_that_of_the_coming_step(module, mode):
    schedule = (k3 if module is k3 else new).schedules.ExponentialDecay(1.0, 1, 0.5)
    table = sok.DynamicVariable(1, initializer="zeros")
    tf.nn.embedding_lookup(table, [1])
    ours = sok.OptimizerWrapper(module.SGD(schedule))
    step = mode(applying(ours, lambda: [(slices([[1.0]], [1]), table)]))
    rates = []
    for _ in range(3):
        rates.append(float(ours.learning_rate))
        step()
    assert rates == [1.0, 0.5, 0.25]
    np.testing.assert_array_equal(tf.nn.embedding_lookup(table, [1]), [[-sum(rates)]])


def test_a_v1_learning_rate_may_be_a_variable_or_a_function(mode):
    rate = tf.Variable(1.0)
    for given in (rate, lambda: rate):
        rate.assign(1.0)
        table = sok.DynamicVariable(1, initializer="zeros")
        tf.nn.embedding_lookup(table, [1])
        ours = sok.OptimizerWrapper(v1.GradientDescentOptimizer(given))
        step = mode(applying(ours, lambda t=table: [(slices([[1.0]], [1]), t)]))
        step()
        rate.assign(0.25)
        step()
        np.testing.assert_array_equal(tf.nn.embedding_lookup(table, [1]), [[-1.25]])


def test_setting_a_v1_learning_rate_is_refused():
    ours = sok.OptimizerWrapper(v1.GradientDescentOptimizer(0.1))
    with pytest.raises(NotImplementedError, match=r"Make the optimizer with a tf\.Variable"):
        ours.lr = 0.5


@pytest.mark.parametrize(
    "make",
    [lambda rate: v1.MomentumOptimizer(rate, 0.9), lambda rate: new.SGD(rate, momentum=0.9)],
    ids=["v1", "tf_keras"],
)
def test_momentum_holds_what_the_optimizer_puts_in_it(make):
    # v1 keeps gradients in it, Keras steps: they part when the learning rate changes.
    table, variable = new_pair()
    rate = tf.Variable(0.1)
    ours, theirs = sok.OptimizerWrapper(make(rate)), make(rate)
    for number, grads in enumerate(some_grads()):
        for optimizer in (ours.optimizer, theirs):
            if hasattr(optimizer, "learning_rate"):
                optimizer.learning_rate = 0.1 / (1 + number)
        rate.assign(0.1 / (1 + number))
        ours.apply_gradients([(slices(grads), table)])
        theirs.apply_gradients([(tf.constant(grads), variable)])
    np.testing.assert_allclose(rows_of(table), variable, rtol=1e-5, atol=1e-6)


def counting(value, name, read):
    def get():
        read.append(name)
        return value

    return get


def test_a_setting_is_evaluated_once_a_step_for_all_tables(mode):
    read = []
    optimizer = v1.AdamOptimizer(
        counting(0.1, "lr", read), counting(0.9, "beta1", read), counting(0.99, "beta2", read)
    )
    ours = sok.OptimizerWrapper(optimizer)
    tables = [sok.DynamicVariable(DIM, initializer="zeros") for _ in range(3)]
    gradients = [slices(np.ones((2, DIM), np.float32), [1, 2]) for _ in tables]
    for table in tables:
        tf.nn.embedding_lookup(table, [1, 2])
    read.clear()
    mode(applying(ours, lambda: zip(gradients, tables, strict=True)))()
    assert sorted(read) == ["beta1", "beta2", "lr"]
    for table in tables:
        np.testing.assert_allclose(tf.nn.embedding_lookup(table, [1]), [[-0.1] * DIM], rtol=1e-4)


def test_one_number_of_each_setting_crosses_for_all_tables():
    optimizer = k3.AdamW(0.1, weight_decay=0.5)
    tables = [sok.DynamicVariable(dim, initializer="1") for dim in (3, 16, 5)]
    ours = sok.OptimizerWrapper(optimizer)

    @tf.function
    def step(*gradients):
        ours.apply_gradients(zip(gradients, tables, strict=True))

    gradients = [slices(np.ones((2, table.dimension), np.float32), [1, 2]) for table in tables]
    graph = step.get_concrete_function(*gradients).graph
    (update,) = (each for each in graph.get_operations() if each.type == "SokUpdate")
    numbers = update.inputs[-1]
    assert numbers.shape == [7]  # step, whether rows move, learning rate, three of Adam, decay
    assert numbers.dtype == tf.int64  # their bits
    dtypes = [each.dtype for each in update.inputs]
    call = [tf.int64]
    assert dtypes == [tf.resource] * 3 + call + [tf.int64] * 3 + [tf.float32] * 3 + [tf.int64]


def test_a_gradient_that_does_not_fit_is_refused(mode):
    good, bad = sok.DynamicVariable(DIM, initializer="1"), sok.DynamicVariable(DIM, name="bad")
    tf.nn.embedding_lookup(good, [1])
    ours = sok.OptimizerWrapper(k3.SGD(1.0))
    rows = np.ones((2, DIM), np.float32)
    shapes = "table 'bad' must have one row of dimension 4 for each"
    for grads, keys, error, text in (
        (rows, [1, 2, 3], ValueError, shapes),
        (rows[:, :3], [1, 2], ValueError, shapes),
        (rows, [[1, 2]], ValueError, shapes),
        (rows[0], [1, 2, 3, 4], ValueError, shapes),
        (rows, [1.0, 2.0], TypeError, "'bad.*' must be integers"),
    ):
        wrong = tf.IndexedSlices(tf.constant(grads), tf.constant(keys))
        pairs = [(slices(rows[:1], [1]), good), (wrong, bad)]
        with pytest.raises((error, tf.errors.InvalidArgumentError), match=text):
            mode(applying(ours, lambda p=pairs: p))()
    np.testing.assert_array_equal(tf.nn.embedding_lookup(good, [1]), np.ones((1, DIM)))


def test_excluded_variables_do_not_decay():
    decayed, kept = sok.DynamicVariable(1, initializer="1"), sok.DynamicVariable(1, initializer="1")
    optimizer = k3.AdamW(0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[kept])
    for table in (decayed, kept):
        tf.nn.embedding_lookup(table, [1])
    ours = sok.OptimizerWrapper(optimizer)
    ours.apply_gradients([(slices([[0.0]], [1]), decayed), (slices([[0.0]], [1]), kept)])
    np.testing.assert_allclose(tf.nn.embedding_lookup(decayed, [1]), [[0.95]], rtol=1e-6)
    np.testing.assert_array_equal(tf.nn.embedding_lookup(kept, [1]), [[1.0]])


def test_a_lookup_in_an_inner_function_sees_the_update_before_it():
    table = sok.DynamicVariable(1, initializer="zeros")
    ours = sok.OptimizerWrapper(k3.SGD(1.0))

    @tf.function
    def lookup():
        return tf.nn.embedding_lookup(table, [1])

    @tf.function
    def step():
        before = lookup()
        ours.apply_gradients([(slices([[1.0]], [1]), table)])
        return before, lookup()

    for number in range(3):
        before, after = step()
        np.testing.assert_array_equal(before, [[-number]])
        np.testing.assert_array_equal(after, [[-number - 1]])


def test_only_touched_rows_move():
    table, _ = new_pair()
    before = rows_of(table)
    sok.OptimizerWrapper(k3.Adam(0.1)).apply_gradients([(slices(np.ones((1, DIM)), [5]), table)])
    after = rows_of(table)
    assert not np.array_equal(after[0], before[0])
    np.testing.assert_array_equal(after[1:], before[1:])


OPTIMIZERS = {
    "Keras 3": lambda: k3.SGD(0.1),
    "tf_keras": lambda: new.SGD(0.1),
    "legacy": lambda: legacy.SGD(0.1),
    "TF1": lambda: v1.GradientDescentOptimizer(0.1),
}


def wrapped(family):
    return sok.SGD(0.1) if family == "sok.SGD" else sok.OptimizerWrapper(OPTIMIZERS[family]())


@pytest.mark.parametrize("family", [*OPTIMIZERS, "sok.SGD"])
def test_a_step_that_would_train_nothing_raises_as_the_optimizers_own_does(family, mode):
    table, _ = new_pair()
    dense = tf.Variable(1.0)
    ours = wrapped(family)

    @mode
    def step():
        with pytest.raises(ValueError, match=f"no gradient of any of .*{table.name}"):
            ours.apply_gradients([(None, table)])
        with pytest.raises(ValueError, match="no gradient of any of .*Variable"):
            ours.apply_gradients(zip([None, None], [table, dense], strict=True))

    step()
    if family in OPTIMIZERS:
        with pytest.raises(ValueError, match="No gradients provided"):
            OPTIMIZERS[family]().apply_gradients([(None, dense)])
    assert ours.iterations == 0


@pytest.mark.parametrize("family", [*OPTIMIZERS, "sok.SGD"])
def test_no_variables_raise_where_the_optimizers_own_step_of_none_does(family):
    if family in ("tf_keras", "legacy"):
        OPTIMIZERS[family]().apply_gradients([])
        wrapped(family).apply_gradients([])
        return
    if family in OPTIMIZERS:
        with pytest.raises(ValueError):
            OPTIMIZERS[family]().apply_gradients([])
    ours = wrapped(family)
    with pytest.raises(ValueError, match="Received: none.*no DynamicVariable"):
        ours.apply_gradients(iter([]))


@pytest.mark.parametrize("family", [*OPTIMIZERS, "sok.SGD"])
@pytest.mark.parametrize("without", ["table", "dense"])
def test_a_step_warns_of_the_variables_that_have_no_gradient(family, without):
    table, _ = new_pair()
    dense = tf.Variable(1.0, name="dense")
    ours = wrapped(family)
    of_table = None if without == "table" else slices(np.ones((1, DIM)), [5])
    of_dense = None if without == "dense" else tf.constant(1.0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours.apply_gradients([(of_table, table), (of_dense, dense)])
    found = [each for each in said if "Gradients do not exist" in str(each.message)]
    assert len(found) == (family != "TF1")  # whose optimizers say nothing
    if found:
        name = table.path if without == "table" else "dense"
        assert name in str(found[0].message)
        assert found[0].filename == __file__


def test_of_dense_variables_the_optimizer_warns_itself():
    table, _ = new_pair()
    first, second = tf.Variable(1.0, name="first"), tf.Variable(1.0, name="second")
    pairs = [(None, table), (None, first), (tf.constant(1.0), second)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        sok.OptimizerWrapper(k3.SGD(0.1)).apply_gradients(pairs)
    texts = [str(each.message) for each in said if "Gradients do not exist" in str(each.message)]
    assert len(texts) == 2
    assert table.path in texts[0] and "first" not in texts[0]
    assert "first" in texts[1]


def test_dense_variables_alone_go_to_the_wrapped_optimizer(mode):
    dense, inner = tf.Variable([1.0]), k3.SGD(0.5)
    ours = sok.OptimizerWrapper(inner)
    mode(applying(ours, lambda: [(tf.constant([1.0]), dense)]))()
    np.testing.assert_array_equal(dense, [0.5])
    assert (int(inner.iterations), int(ours.iterations)) == (1, 1)


def test_states_can_be_exported_as_slots():
    table, variable = new_pair()
    ours, theirs = sok.OptimizerWrapper(legacy.Adam(0.1)), legacy.Adam(0.1)
    grads = some_grads(steps=1)[0]
    ours.apply_gradients([(slices(grads), table)])
    theirs.apply_gradients([(tf.constant(grads), variable)])
    assert ours.get_slot_names() == ["m", "v"]
    for name in ours.get_slot_names():
        keys, values = sok.export(ours.get_slot(table, name))
        order = np.argsort(KEYS)
        np.testing.assert_array_equal(keys, np.array(KEYS)[order])
        np.testing.assert_allclose(
            values, theirs.get_slot(variable, name).numpy()[order], rtol=1e-6
        )
    with pytest.raises(ValueError, match="no state 'vhat' in table .* It has 'm', 'v'"):
        ours.get_slot(table, "vhat")
    with pytest.raises(ValueError, match="It has none yet"):
        sok.OptimizerWrapper(legacy.Adam(0.1)).get_slot(table, "m")
    slot = ours.get_slot(table, "m")
    del ours
    gc.collect()
    with pytest.raises(ValueError, match="The optimizer whose state 'm' .* was deleted"):
        slot.export()


def test_nonfinite_gradients_are_counted(mode):
    table, _ = new_pair()
    ours = sok.OptimizerWrapper(k3.SGD(0.1))
    grads = np.zeros((3, DIM), np.float32)
    grads[0, 0], grads[2, 1] = np.nan, np.inf
    mode(applying(ours, lambda: [(slices(grads), table)]))()
    assert ours.num_nonfinite == 2


def test_nonfinite_gradients_can_be_an_error_before_anything_changes(mode):
    table, _ = new_pair()
    dense, inner = tf.Variable([1.0]), k3.Adam(0.1)
    ours = sok.OptimizerWrapper(inner, on_nonfinite="error")
    before = rows_of(table)
    grads = np.ones((3, DIM), np.float32)
    grads[1, 2] = np.inf
    step = mode(applying(ours, lambda: [(slices(grads), table), (tf.constant([1.0]), dense)]))
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="1 of 3 gradient rows"):
        step()
    np.testing.assert_array_equal(rows_of(table), before)
    np.testing.assert_array_equal(dense, [1.0])
    assert int(inner.iterations) == 0


@pytest.mark.parametrize("dtype, ulp", [(tf.bfloat16, 2.0**-7), (tf.float16, 2.0**-10)])
@pytest.mark.parametrize(
    "make",
    [
        lambda rate, **options: sok.OptimizerWrapper(k3.SGD(rate), **options),
        lambda rate, **options: sok.OptimizerWrapper(v1.GradientDescentOptimizer(rate), **options),
        lambda rate, **options: sok.SGD(rate, **options),
    ],
    ids=["Keras 3", "v1", "sok.SGD"],
)
def test_small_steps_of_16_bit_rows_count_if_rounding_is_stochastic(make, dtype, ulp, mode):
    keys, share, num_steps = np.arange(1000), 1 / 32, 16
    grads = slices(-np.ones((keys.size, DIM)), keys)
    moved = {}
    for is_stochastic in (False, True):
        table = sok.DynamicVariable(DIM, initializer="ones", dtype=dtype, name="rounded")
        tf.nn.embedding_lookup(table, keys)
        ours = make(share * ulp, stochastic_rounding=is_stochastic)
        step = mode(applying(ours, lambda t=table: [(grads, t)]))
        for _ in range(num_steps):
            step()
        rows = tf.cast(tf.nn.embedding_lookup(table, keys), tf.float64).numpy()
        moved[is_stochastic] = (rows - 1) / ulp
    np.testing.assert_array_equal(moved[False], 0)
    # Each step moves a number by one ulp with chance 1/32: five standard errors of the mean.
    error = np.sqrt(num_steps * share * (1 - share) / moved[True].size)
    np.testing.assert_allclose(moved[True].mean(), num_steps * share, rtol=0, atol=5 * error)


def test_stochastic_rounding_is_the_same_eagerly_traced_and_in_a_session():
    def new_table():
        table = sok.DynamicVariable(DIM, initializer="ones", dtype=tf.bfloat16, name="same")
        return table, sok.OptimizerWrapper(v1.AdamOptimizer(1e-3), stochastic_rounding=True)

    keys = np.arange(33)
    grads = np.random.default_rng(0).normal(size=(33, DIM)).astype(np.float32)
    results = []
    for way in (lambda function: function, tf.function):
        table, ours = new_table()
        tf.nn.embedding_lookup(table, keys)
        step = way(applying(ours, lambda t=table: [(slices(grads, keys), t)]))
        for _ in range(3):
            step()
        results.append(tf.cast(tf.nn.embedding_lookup(table, keys), tf.float32).numpy())
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table, ours = new_table()
        rows = tf.cast(tf.nn.embedding_lookup(table, keys), tf.float32)
        train = ours.apply_gradients([(slices(grads, keys), table)])
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(rows)
        for _ in range(3):
            session.run(train)
        results.append(session.run(rows))
    np.testing.assert_array_equal(results[1], results[0])
    np.testing.assert_array_equal(results[2], results[0])
    assert len(np.unique(results[0])) > 1


def test_sgd_is_plain_descent_on_rows(mode):
    table, _ = new_pair()
    before, grads = rows_of(table), some_grads(steps=1)[0]
    ours = sok.SGD(lr=0.5)
    step = mode(applying(ours, lambda: [(slices(grads), table), (None, table)]))
    step()
    np.testing.assert_allclose(rows_of(table), before - 0.5 * grads, rtol=1e-6)
    ours.lr.assign(0.0)
    middle = rows_of(table)
    step()
    np.testing.assert_array_equal(rows_of(table), middle)
    with pytest.raises(TypeError, match="updates DynamicVariables and tf.Variables.*ndarray"):
        ours.apply_gradients([(tf.constant([1.0]), np.ones(1))])


@pytest.mark.parametrize("has_table", [True, False])
def test_sgd_updates_dense_variables_too(mode, has_table):
    table, _ = new_pair()
    before, grads = rows_of(table), some_grads(steps=1)[0]
    dense, gathered = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([3, 2], tf.float16))
    repeated = tf.IndexedSlices(tf.ones([3, 2], tf.float16), tf.constant([2, 0, 2]))
    pairs = [(tf.constant([1.0, -1.0]), dense), (None, dense), (repeated, gathered)]
    ours = sok.SGD(lr=0.5)
    step = mode(applying(ours, lambda: pairs + [(slices(grads), table)] * has_table))
    step()
    np.testing.assert_array_equal(dense, [0.5, 2.5])
    np.testing.assert_array_equal(gathered, [[0.5, 0.5], [1.0, 1.0], [0.0, 0.0]])
    np.testing.assert_allclose(rows_of(table), before - 0.5 * grads * has_table, rtol=1e-6)
    assert ours.iterations == 1


@pytest.mark.parametrize("is_sparse", [False, True])
def test_sgd_changes_nothing_where_a_dense_gradient_does_not_fit(mode, is_sparse):
    table, _ = new_pair()
    before = rows_of(table)
    first, second = tf.Variable([1.0]), tf.Variable([[1.0, 2.0]])
    grad = tf.ones([1, 3])
    grad = tf.IndexedSlices(grad, tf.constant([0])) if is_sparse else grad
    ours = sok.SGD(lr=0.5)
    pairs = [(tf.ones([1]), first), (slices(some_grads(steps=1)[0]), table), (grad, second)]
    with pytest.raises(ValueError, match="The gradient of 'Variable:0' must have"):
        mode(applying(ours, lambda: pairs))()
    np.testing.assert_array_equal(rows_of(table), before)
    assert (first.numpy(), ours.iterations.numpy()) == (1.0, 0)


def test_the_step_of_a_lookup_and_its_gradient(initialised, mode):
    table = sok.DynamicVariable(2, initializer="ones")
    ours = sok.OptimizerWrapper(k3.SGD(1.0))
    ids = tf.ragged.constant([[1, 2, 1], [2]], dtype=tf.int64)

    @mode
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(table, ids, combiners="sum"))
            loss += tf.reduce_sum(tf.nn.embedding_lookup(table, [2, 3]))
        ours.apply_gradients([(tape.gradient(loss, table), table)])

    step()
    rows = tf.nn.embedding_lookup(table, [1, 2, 3])
    np.testing.assert_array_equal(rows, [[-1.0] * 2, [-2.0] * 2, [0.0] * 2])


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: k3.SGD(use_ema=True), NotImplementedError, "use_ema=True"),
        (lambda: new.SGD(use_ema=True), NotImplementedError, "use_ema=True"),
        (lambda: k3.Lamb(), NotImplementedError, "Lamb of Keras 3 .*: its step needs the norms of"),
        (
            lambda: k3.Adafactor(),
            NotImplementedError,
            "Adafactor of Keras 3 .*: its states are mean",
        ),
        (
            lambda: new.Adafactor(),
            NotImplementedError,
            "Adafactor of tf_keras .*: its states are me",
        ),
        (
            lambda: v1.SyncReplicasOptimizer(v1.GradientDescentOptimizer(0.1), 1),
            NotImplementedError,
            "SyncReplicasOptimizer of tf.compat.v1.train cannot update rows .*: its gradients wait",
        ),
        (lambda: 0.1, TypeError, "must be a Keras 3, tf_keras or tf.compat.v1.train optimizer"),
    ],
)
def test_what_would_not_act_on_rows_is_refused(make, error, text):
    with pytest.raises(error, match=text):
        sok.OptimizerWrapper(make())


class CountsBatches(k3.SGD):
    """As those of Keras before 3.5, which keep what counts batches in `iterations` itself."""

    iterations = None


def test_batches_are_not_accumulated_where_keras_counts_no_steps():
    with pytest.raises(NotImplementedError, match=r"steps=2 of CountsBatches.*Install a newer"):
        sok.OptimizerWrapper(CountsBatches(gradient_accumulation_steps=2))


def test_a_setting_that_comes_later_is_refused_too():
    table, _ = new_pair()
    inner = k3.SGD(0.1)
    ours = sok.OptimizerWrapper(inner)
    inner.use_ema = True
    with pytest.raises(NotImplementedError, match="use_ema=True"):
        ours.apply_gradients([(slices(some_grads()[0]), table)])


def test_bad_gradients_are_refused():
    table, _ = new_pair()
    ours = sok.OptimizerWrapper(k3.SGD(0.1))
    with pytest.raises(TypeError, match="must be a tf.IndexedSlices"):
        ours.apply_gradients([(tf.zeros([3, DIM]), table)])
    with pytest.raises(ValueError, match=f"one row of dimension {DIM}"):
        ours.apply_gradients([(slices(np.ones((1, 2)), [5]), table)])
    with pytest.raises(ValueError, match="'allow' or 'error'"):
        sok.OptimizerWrapper(k3.SGD(0.1), on_nonfinite="skip")
    with pytest.raises(TypeError, match="`stochastic_rounding` must be True or False. Received: 1"):
        sok.OptimizerWrapper(k3.SGD(0.1), stochastic_rounding=1)


@pytest.mark.parametrize("how", ["embedding_lookup", "lookup_sparse"])
def test_a_loop_inside_a_function_trains_step_by_step(initialised, how):
    batches = np.random.default_rng(0).integers(0, 10, (30, 8))

    def new_step():
        table = sok.DynamicVariable(DIM, name="looped", initializer="uniform")
        optimizer = sok.OptimizerWrapper(k3.Adam(0.1))

        def step(keys):
            with tf.GradientTape() as tape:
                if how == "embedding_lookup":
                    rows = tf.nn.embedding_lookup(table, keys)
                else:
                    splits = tf.constant([0, 3, 3, 8], tf.int64)
                    ids = tf.RaggedTensor.from_row_splits(keys, splits)
                    rows = sok.lookup_sparse(table, ids)
                loss = tf.reduce_sum((rows - 1.0) ** 2)
            optimizer.apply_gradients([(tape.gradient(loss, table), table)])

        return table, step

    (one, one_step), (other, other_step) = new_step(), new_step()
    for keys in batches:
        one_step(tf.constant(keys))

    @tf.function
    def loop(dataset):
        for keys in dataset:
            other_step(keys)

    loop(tf.data.Dataset.from_tensor_slices(batches))
    for looped, stepped in zip(sok.export(other), sok.export(one), strict=True):
        np.testing.assert_array_equal(looped, stepped)


def test_a_traced_step_keeps_no_table_alive(initialised):
    import gc
    import weakref

    table = sok.DynamicVariable(DIM)
    optimizer = sok.OptimizerWrapper(k3.Adam(0.1))
    ids = tf.ragged.constant([[1, 2]], dtype=tf.int64)
    reference = weakref.ref(table)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(sok.lookup_sparse(reference(), ids))
        optimizer.apply_gradients([(tape.gradient(loss, reference()), reference())])

    step()
    held = weakref.ref(table.table)
    del table
    gc.collect()
    assert held() is None
