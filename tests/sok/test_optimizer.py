"""OptimizerWrapper and SGD: steps, settings and refusals; test_every_optimizer.py has each rule."""

import gc
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from tests.support.own_optimizers import KEYS, OfKeras3, slices

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
    for optimizer in (inner, dense):
        optimizer.iterations.assign(100)  # as after loading a model

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
    # With dense variables in the call the step is that of the wrapped optimizer.
    sparse.iterations.assign(104)
    for grads in some_grads(seed=1, steps=2):
        mode(applying(ours, lambda g=grads: [(tf.constant([0.5]), shared), (slices(g), table)]))()
        sparse.apply_gradients([(tf.constant(grads), variable)])
    np.testing.assert_allclose(rows_of(table), variable, rtol=1e-5, atol=1e-6)
    mode(applying(ours, lambda: [(tf.constant([0.5]), shared)]))()
    assert int(inner.iterations) == int(ours.iterations) == 107


@pytest.mark.parametrize("with_dense", [False, True], ids=["rows only", "with dense"])
@pytest.mark.parametrize("name", ["Keras 3", "tf_keras", "legacy", "legacy decay"])
def test_a_learning_rate_is_read_in_every_step(name, with_dense, mode):
    """That of a schedule is that of the coming step; a number can be assigned."""
    module = {"Keras 3": k3, "tf_keras": new}.get(name, legacy)
    schedule = (k3 if module is k3 else new).schedules.ExponentialDecay(1.0, 1, 0.5)
    scheduled = legacy.SGD(1.0, decay=1.0) if "decay" in name else module.SGD(schedule)
    for inner, rates in (
        (scheduled, [1.0, 1 / 2, 1 / 3] if "decay" in name else [1.0, 0.5, 0.25]),
        (module.SGD(1.0), [1.0, 0.25]),
    ):
        table = sok.DynamicVariable(1, initializer="zeros")
        ours, dense = sok.OptimizerWrapper(inner), tf.Variable([0.0])
        pairs = [(slices([[1.0]], [1]), table), (tf.constant([1.0]), dense)]
        step = mode(applying(ours, lambda ours=ours, pairs=pairs: pairs[: 1 + with_dense]))
        for number, rate in enumerate(rates):
            if len(rates) == 2:
                ours.learning_rate = rate
            if "decay" not in name:
                assert float(ours.learning_rate) == float(ours.lr) == rate
            step()
            expected = [[-sum(rates[: number + 1])]]
            np.testing.assert_allclose(tf.nn.embedding_lookup(table, [1]), expected, rtol=1e-6)
            np.testing.assert_allclose(dense, expected[0] if with_dense else [0.0], rtol=1e-6)


def test_a_v1_learning_rate_may_be_a_variable_or_a_function(mode):
    rate = tf.Variable(1.0)
    for given in (rate, lambda: rate):
        rate.assign(1.0)
        table = sok.DynamicVariable(1, initializer="zeros")
        ours = sok.OptimizerWrapper(v1.GradientDescentOptimizer(given))
        step = mode(applying(ours, lambda t=table: [(slices([[1.0]], [1]), t)]))
        for value in (1.0, 0.25):
            rate.assign(value)
            step()
        np.testing.assert_array_equal(tf.nn.embedding_lookup(table, [1]), [[-1.25]])
        with pytest.raises(NotImplementedError, match=r"Make the optimizer with a tf\.Variable"):
            ours.lr = 0.5


@pytest.mark.cases("make")
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


def test_a_setting_is_evaluated_once_a_step_for_all_tables(mode):
    read, values = [], {"lr": 0.1, "beta1": 0.9, "beta2": 0.99}
    settings = [lambda name=name: (read.append(name), values[name])[1] for name in values]
    ours = sok.OptimizerWrapper(v1.AdamOptimizer(*settings))
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


OPTIMIZERS = {
    "Keras 3": lambda: k3.SGD(0.1),
    "tf_keras": lambda: new.SGD(0.1),
    "legacy": lambda: legacy.SGD(0.1),
    "TF1": lambda: v1.GradientDescentOptimizer(0.1),
}


def wrapped(family, **options):
    if family == "sok.SGD":
        return sok.SGD(0.1, **options)
    return sok.OptimizerWrapper(OPTIMIZERS[family](), **options)


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
    # Of no variables at all.
    if family in ("tf_keras", "legacy"):
        for optimizer in (OPTIMIZERS[family](), wrapped(family)):
            optimizer.apply_gradients([])
    else:
        with pytest.raises(ValueError):
            OPTIMIZERS.get(family, OPTIMIZERS["TF1"])().apply_gradients([])
        with pytest.raises(ValueError, match="Received: none.*no DynamicVariable"):
            ours.apply_gradients(iter([]))
    assert ours.iterations == 0


@pytest.mark.parametrize("family", [*OPTIMIZERS, "sok.SGD"])
@pytest.mark.parametrize("without", ["table", "dense", "both"])
def test_a_step_warns_of_the_variables_that_have_no_gradient(family, without):
    table, _ = new_pair()
    dense, second = tf.Variable(1.0, name="dense"), tf.Variable(1.0, name="second")
    ours = wrapped(family)
    of_table = slices(np.ones((1, DIM)), [5]) if without == "dense" else None
    of_dense = tf.constant(1.0) if without == "table" else None
    pairs = [(of_table, table), (of_dense, dense)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        ours.apply_gradients(pairs + [(tf.constant(1.0), second)] * (without == "both"))
    found = [each for each in said if "Gradients do not exist" in str(each.message)]
    names = {"table": [table.path], "dense": ["dense"], "both": [table.path, "dense"]}[without]
    if family == "TF1":  # whose optimizers say nothing
        names = []
    if family in ("tf_keras", "legacy"):  # which log those that they leave out of a step
        names = names[:1]
    text = " ".join(str(each.message) for each in found)
    assert all(name in text for name in names) and "second" not in text
    assert bool(found) == bool(names)
    if found:
        assert found[0].filename == __file__


def test_states_that_are_not_there_are_said_to_be_so():
    table, _ = new_pair()
    ours = sok.OptimizerWrapper(legacy.Adam(0.1))
    with pytest.raises(ValueError, match="It has none yet"):
        ours.get_slot(table, "m")
    ours.apply_gradients([(slices(some_grads()[0]), table)])
    with pytest.raises(ValueError, match="no state 'vhat' in table .* It has 'm', 'v'"):
        ours.get_slot(table, "vhat")
    slot = ours.get_slot(table, "m")
    del ours
    gc.collect()
    with pytest.raises(ValueError, match="The optimizer whose state 'm' .* was deleted"):
        slot.export()


@pytest.mark.parametrize("make", [lambda: k3.Adam(0.1), OfKeras3], ids=["rule", "fallback"])
def test_nonfinite_gradients_are_counted_or_an_error_before_anything_changes(make, mode):
    table, _ = new_pair()
    dense, inner = tf.Variable([[1.0]]), make()
    ours = sok.OptimizerWrapper(inner, on_nonfinite="error")
    before = rows_of(table)
    grads = np.ones((3, DIM), np.float32)
    grads[1, 2] = np.inf
    pairs = [(slices(grads), table), (tf.constant([[1.0]]), dense)]
    step = mode(applying(ours, lambda: pairs))
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="1 of 3 gradient rows"):
        step()
    np.testing.assert_array_equal(rows_of(table), before)
    np.testing.assert_array_equal(dense, [[1.0]])
    assert int(inner.iterations) == 0
    ours = sok.OptimizerWrapper(make())
    mode(applying(ours, lambda: pairs))()
    assert ours.num_nonfinite == 1


def test_stochastic_rounding_is_the_same_eagerly_traced_and_in_a_session():
    keys = np.arange(33)
    grads = np.random.default_rng(0).normal(size=(33, DIM)).astype(np.float32) / 100

    def new_table():
        return sok.DynamicVariable(DIM, initializer="ones", dtype=tf.bfloat16, name="same")

    def trained(way, family, is_stochastic=True):
        table, ours = new_table(), wrapped(family, stochastic_rounding=is_stochastic)
        step = way(applying(ours, lambda: [(slices(grads, keys), table)]))
        for _ in range(3):
            step()
        return tf.cast(tf.nn.embedding_lookup(table, keys), tf.float32).numpy()

    results = [trained(tf.function, "TF1")]
    for family in ("TF1", "Keras 3", "sok.SGD"):
        results.append(trained(lambda function: function, family))
        assert not np.array_equal(results[0], trained(tf.function, family, is_stochastic=False))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table, ours = new_table(), wrapped("TF1", stochastic_rounding=True)
        rows = tf.cast(tf.nn.embedding_lookup(table, keys), tf.float32)
        train = ours.apply_gradients([(slices(grads, keys), table)])
        session.run(tf.compat.v1.global_variables_initializer())
        session.run(rows)
        for _ in range(3):
            session.run(train)
        results.append(session.run(rows))
    for each in results[1:]:
        np.testing.assert_array_equal(each, results[0])


@pytest.mark.parametrize("has_table", [True, False])
def test_sgd_is_plain_descent_on_rows_and_dense_variables(mode, has_table):
    table, _ = new_pair()
    before, grads = rows_of(table), some_grads(steps=1)[0]
    dense, gathered = tf.Variable([1.0, 2.0]), tf.Variable(tf.ones([3, 2], tf.float16))
    repeated = tf.IndexedSlices(tf.ones([3, 2], tf.float16), tf.constant([2, 0, 2]))
    pairs = [(tf.constant([1.0, -1.0]), dense), (None, dense), (repeated, gathered)]
    ours = sok.SGD(lr=0.5)
    step = mode(applying(ours, lambda: pairs + [(slices(grads), table), (None, table)] * has_table))
    step()
    ours.lr.assign(0.0)
    step()
    np.testing.assert_array_equal(dense, [0.5, 2.5])
    np.testing.assert_array_equal(gathered, [[0.5, 0.5], [1.0, 1.0], [0.0, 0.0]])
    np.testing.assert_allclose(rows_of(table), before - 0.5 * grads * has_table, rtol=1e-6)
    assert ours.iterations == 2
    with pytest.raises(TypeError, match="updates DynamicVariables and tf.Variables.*ndarray"):
        ours.apply_gradients([(tf.constant([1.0]), np.ones(1))])


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


# ---- what is refused -----------------------------------------------------------------------------


class CountsBatches(k3.SGD):
    """As those of Keras before 3.5, which keep what counts batches in `iterations` itself."""

    iterations = None


REPLICAS = "SyncReplicasOptimizer of tf.compat.v1.train cannot update rows .*: its gradients wait"
SYNC = v1.SyncReplicasOptimizer
COUNTS = r"steps=2 of CountsBatches.*Install a newer"
KINDS = "must be a Keras 3, tf_keras or tf.compat.v1.train optimizer"


@pytest.mark.cases("make")
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: k3.SGD(use_ema=True), NotImplementedError, "use_ema=True"),
        (lambda: new.SGD(use_ema=True), NotImplementedError, "use_ema=True"),
        (lambda: k3.Lamb(), NotImplementedError, "Lamb of Keras 3 .*: its step needs the norms of"),
        (lambda: k3.Adafactor(), NotImplementedError, "of Keras 3 .*: its states are mean"),
        (lambda: new.Adafactor(), NotImplementedError, "Adafactor of tf_keras .*: its states are"),
        (lambda: SYNC(v1.GradientDescentOptimizer(0.1), 1), NotImplementedError, REPLICAS),
        (lambda: CountsBatches(gradient_accumulation_steps=2), NotImplementedError, COUNTS),
        (lambda: 0.1, TypeError, KINDS),
    ],
)
def test_what_would_not_act_on_rows_is_refused(make, error, text):
    with pytest.raises(error, match=text):
        sok.OptimizerWrapper(make())


def test_bad_gradients_and_settings_are_refused():
    table, _ = new_pair()
    inner = k3.SGD(0.1)
    ours = sok.OptimizerWrapper(inner)
    with pytest.raises(TypeError, match="must be a tf.IndexedSlices"):
        ours.apply_gradients([(tf.zeros([3, DIM]), table)])
    with pytest.raises(ValueError, match="'allow' or 'error'"):
        sok.OptimizerWrapper(k3.SGD(0.1), on_nonfinite="skip")
    with pytest.raises(TypeError, match="`stochastic_rounding` must be True or False. Received: 1"):
        sok.OptimizerWrapper(k3.SGD(0.1), stochastic_rounding=1)
    inner.use_ema = True
    with pytest.raises(NotImplementedError, match="use_ema=True"):
        ours.apply_gradients([(slices(some_grads()[0]), table)])


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
