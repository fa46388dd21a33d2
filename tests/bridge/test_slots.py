"""Optimizer states as programs reach them: by the framework's names, read and set by key."""

import copy
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok

k3 = keras.optimizers
v1 = tf.compat.v1.train
KEYS = [5, -7, 2**40]
DIM = 2

# Of each family the names that its own slots have, or its own variables.
CASES = {
    "Keras 3 SGD": (lambda _: k3.SGD(0.1, momentum=0.9), ["momentum"]),
    "Keras 3 Adam": (
        lambda _: k3.Adam(0.1, amsgrad=True),
        ["momentum", "velocity", "velocity_hat"],
    ),
    "Keras 3 RMSprop": (
        lambda _: k3.RMSprop(0.1, momentum=0.9, centered=True),
        ["velocity", "momentum", "average_gradient"],
    ),
    "Keras 3 Ftrl": (lambda _: k3.Ftrl(0.1), ["accumulator", "linear"]),
    "Keras 3 Adamax": (lambda _: k3.Adamax(0.1), ["momentum", "norm"]),
    "Keras 3 Adadelta": (
        lambda _: k3.Adadelta(0.1),
        ["accumulated_grad", "accumulated_delta_var"],
    ),
    "Keras 3 Nadam": (lambda _: k3.Nadam(0.1), ["momentum", "velocity"]),
    "Keras 3 Lion": (lambda _: k3.Lion(0.1), ["momentum"]),
    "legacy Adadelta": (
        lambda tf_keras: tf_keras.legacy.Adadelta(0.1),
        ["accum_grad", "accum_var"],
    ),
    "legacy Adamax": (lambda tf_keras: tf_keras.legacy.Adamax(0.1), ["m", "v"]),
    "TF1 Adadelta": (lambda _: v1.AdadeltaOptimizer(0.1), ["accum", "accum_update"]),
    "TF1 ProximalAdagrad": (lambda _: v1.ProximalAdagradOptimizer(0.1), ["accumulator"]),
    "TF1 AdagradDA": (
        lambda _: v1.AdagradDAOptimizer(0.1, tf.constant(1, tf.int64)),
        ["gradient_accumulator", "gradient_squared_accumulator"],
    ),
    "tf_keras SGD": (lambda tf_keras: tf_keras.SGD(0.1, momentum=0.9), ["m"]),
    "tf_keras Adam": (lambda tf_keras: tf_keras.Adam(0.1, amsgrad=True), ["m", "v", "vhat"]),
    "legacy RMSprop": (
        lambda tf_keras: tf_keras.legacy.RMSprop(0.1, momentum=0.9, centered=True),
        ["rms", "momentum", "mg"],
    ),
    "legacy Adagrad": (lambda tf_keras: tf_keras.legacy.Adagrad(0.1), ["accumulator"]),
    "TF1 RMSProp": (
        lambda _: v1.RMSPropOptimizer(0.1, momentum=0.9, centered=True),
        ["mg", "momentum", "rms"],
    ),
    "TF1 Ftrl": (lambda _: v1.FtrlOptimizer(0.1), ["accum", "linear"]),
    "TF1 Adam": (lambda _: v1.AdamOptimizer(0.1), ["m", "v"]),
}


def states_of(optimizer, variable, name):
    """Returns a state of a dense variable by the framework's name, as it is in the framework."""
    if not hasattr(optimizer, "get_slot"):
        ends = (f"dense_{name}", f"/{name}/dense:0")  # Keras 3, tf_keras
        return next(v.numpy() for v in optimizer.variables if v.name.endswith(ends))
    return optimizer.get_slot(variable, name).numpy()


@pytest.mark.parametrize("case", CASES)
def test_the_frameworks_names_name_the_frameworks_states(case):
    families = (
        None
        if not case.startswith(("tf_keras", "legacy"))
        else pytest.importorskip("tf_keras").optimizers
    )
    make, names = CASES[case]
    table = sok.DynamicVariable(DIM, initializer="uniform")
    start = tf.nn.embedding_lookup(table, KEYS)
    dense = (keras.Variable if case.startswith("Keras 3") else tf.Variable)(start, name="dense")
    ours, theirs = sok.OptimizerWrapper(make(families)), make(families)
    rng = np.random.default_rng(0)
    for _ in range(3):
        grads = tf.constant(rng.normal(size=(3, DIM)), tf.float32)
        theirs.apply_gradients([(grads, dense)])
        slices = tf.IndexedSlices(grads, tf.constant(KEYS, tf.int64))
        ours.apply_gradients([(slices, table)])
    for name in names:
        state = tf.nn.embedding_lookup(ours.get_slot(table, name), KEYS)
        np.testing.assert_allclose(state, states_of(theirs, dense, name), rtol=1e-4)
    assert len(ours.get_slot_names()) == len(names)


@pytest.fixture
def trained():
    """A table and its Adagrad, whose state begins with 0.5; three keys, untrained."""
    table = sok.DynamicVariable(DIM, initializer="ones")
    tf.nn.embedding_lookup(table, KEYS)
    optimizer = sok.OptimizerWrapper(k3.Adagrad(0.1, initial_accumulator_value=0.5))
    optimizer._create_slots(table)
    return table, optimizer


def test_create_slots_makes_states_before_the_first_update(trained):
    table, optimizer = trained
    slot = optimizer.get_slot(table, "accumulator")
    np.testing.assert_array_equal(slot.export()[1], np.full((3, DIM), 0.5))
    assert optimizer._optimizer is optimizer.optimizer
    optimizer._create_slots([table, tf.Variable([1.0])])  # again, and a dense one beside it
    optimizer._create_slots([])
    sok.assign(slot, [5], [[2.0, 3.0]])
    another = sok.OptimizerWrapper(k3.Adagrad(0.1, initial_accumulator_value=0.5))
    another._create_slots([table])
    its_slot = another.get_slot(table, "accumulator")
    np.testing.assert_array_equal(its_slot.sparse_read([5]), [[0.5, 0.5]])
    sok.assign(its_slot, [5], [[7.0, 8.0]])
    np.testing.assert_array_equal(slot.sparse_read([5]), [[2.0, 3.0]])
    np.testing.assert_array_equal(its_slot.sparse_read([5]), [[7.0, 8.0]])


def test_create_slots_in_a_function_makes_states_while_it_is_traced():
    table = sok.DynamicVariable(DIM, initializer="ones")
    optimizer = sok.OptimizerWrapper(k3.Adam(0.1))

    @tf.function
    def step():
        optimizer._create_slots([table])
        tf.nn.embedding_lookup(table, KEYS)
        return optimizer.get_slot(table, "m").size

    np.testing.assert_array_equal(step(), [3, DIM])


def legacy_adam():
    return pytest.importorskip("tf_keras").optimizers.legacy.Adam(0.1)


@pytest.mark.parametrize("make", [legacy_adam, lambda: k3.RMSprop(0.1)])
def test_states_are_known_by_name_while_a_function_is_traced(make):
    """The settings of a legacy optimizer are variables, which AutoGraph's `float` leaves alone."""
    table = sok.DynamicVariable(DIM, initializer="ones")
    optimizer = sok.OptimizerWrapper(make())
    names = []

    @tf.function
    def step():
        names.extend(optimizer.get_slot_names())
        optimizer._create_slots([table])
        tf.nn.embedding_lookup(table, KEYS)
        return optimizer.get_slot(table, names[0]).size

    np.testing.assert_array_equal(step(), [3, DIM])
    assert table.table.store.state_names == names[: len(optimizer.get_slot_names())]


def test_states_are_read_by_key_and_change_nothing(trained, mode):
    table, optimizer = trained
    slot = optimizer.get_slot(table, "accumulator")
    sok.assign(slot, [5], [[2.0, 3.0]])
    ids = [[5, 5], [-7, 99]]
    expected = [[[2.0, 3.0], [2.0, 3.0]], [[0.5, 0.5], [0.5, 0.5]]]
    np.testing.assert_array_equal(mode(lambda: tf.nn.embedding_lookup(slot, ids))(), expected)
    np.testing.assert_array_equal(mode(lambda: slot.sparse_read(tf.constant(ids)))(), expected)
    np.testing.assert_array_equal(mode(lambda: slot.size)(), [3, DIM])
    assert table.size[0] == 3
    empty = mode(lambda: slot.sparse_read(tf.zeros([0], tf.int64)))()
    assert empty.shape == (0, DIM)


def test_a_state_that_was_set_is_what_training_goes_on_with(trained, mode):
    table, optimizer = trained
    slot = optimizer.get_slot(table, "accumulator")
    mode(lambda: sok.assign(slot, [5, -7, 5], [[9.0, 9.0], [1.0, 4.0], [0.0, 3.0]]) and None)()
    np.testing.assert_array_equal(slot.sparse_read(KEYS), [[0.0, 3.0], [1.0, 4.0], [0.5, 0.5]])
    slices = tf.IndexedSlices(tf.ones((1, DIM)), tf.constant([5], tf.int64))
    optimizer.apply_gradients([(slices, table)])
    # The row goes down by 0.1 / sqrt(state + 1).
    row = tf.nn.embedding_lookup(table, [5])
    np.testing.assert_allclose(row, [[1 - 0.1, 1 - 0.1 / 2]], rtol=1e-5)


def test_a_state_of_half_precision_rows_is_float32():
    table = sok.DynamicVariable(DIM, initializer="ones", dtype=tf.bfloat16)
    tf.nn.embedding_lookup(table, KEYS)
    optimizer = sok.OptimizerWrapper(k3.Adam(0.1))
    optimizer._create_slots([table])
    slot = optimizer.get_slot(table, "v")
    sok.assign(slot, [5], tf.constant([[1.0000001, 2.0]]))
    np.testing.assert_array_equal(slot.sparse_read([5]), np.float32([[1.0000001, 2.0]]))


WRONG = {
    "a key without a row": ([5, 6], np.ones((2, 2)), None, ValueError, "1 of 2 keys.*no row"),
    "shape": ([5], np.ones((1, 3)), None, ValueError, "must have shape"),
    "float keys": ([5.5], np.ones((1, 2)), None, TypeError, "must be integers"),
    "integer states": ([5], tf.ones((1, 2), tf.int32), None, TypeError, "must be float32"),
    "scores": ([5], np.ones((1, 2)), [1], ValueError, "has no scores"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_state_is_not_set_in_part(trained, wrong):
    table, optimizer = trained
    slot = optimizer.get_slot(table, "accumulator")
    keys, values, scores, error, text = wrong
    with pytest.raises(error, match=text):
        sok.assign(slot, keys, values, scores)
    np.testing.assert_array_equal(slot.export()[1], np.full((3, DIM), 0.5))
    assert table.size[0] == 3


def test_a_state_is_no_tensor(trained):
    table, optimizer = trained
    slot = optimizer.get_slot(table, "accumulator")
    with pytest.raises(ValueError, match="SlotView"):
        tf.nn.embedding_lookup(slot, KEYS, max_norm=1.0)
    with pytest.raises(ValueError, match="SlotView"):
        tf.reduce_sum(slot)


def test_a_view_is_made_while_no_other_thread_makes_states(trained):
    """It looks at which states there are: within a step of another thread it would see half."""
    table, optimizer = trained
    made = []
    thread = threading.Thread(target=lambda: made.append(optimizer.get_slot(table, "accumulator")))
    with table.table.lock:
        thread.start()
        thread.join(0.3)
        assert not made
    thread.join(60)
    assert len(made) == 1


# ---- slots in the wrapped optimizer, where SOK has them

HAVING_SLOTS = {name: case for name, case in CASES.items() if name.startswith(("legacy", "TF1"))}


def having_slots(case):
    make, names = HAVING_SLOTS[case]
    families = pytest.importorskip("tf_keras").optimizers if case.startswith("legacy") else None
    return make(families), names


def grads_of(table, seed=0):
    grads = np.random.default_rng(seed).normal(size=(3, DIM))
    return tf.IndexedSlices(tf.constant(grads, tf.float32), tf.constant(KEYS, tf.int64)), table


def slots_in(inner, variable, name):
    """What a program finds that knows where the optimizer keeps its slots."""
    if isinstance(inner, v1.Optimizer):
        return inner._slots[name][variable._unique_id]
    return inner._slots.get(variable._unique_id)[name]


@pytest.mark.parametrize("case", HAVING_SLOTS)
def test_the_wrapped_optimizer_has_the_slots_of_tables_and_of_dense_variables(case):
    inner, names = having_slots(case)
    tables = [sok.DynamicVariable(DIM, "uniform", name="same") for _ in range(2)]
    dense, alone = tf.Variable(tf.ones((3, DIM))), tf.Variable(tf.ones((3, DIM)))
    for table in tables:
        tf.nn.embedding_lookup(table, KEYS)
    optimizer = sok.OptimizerWrapper(inner)
    for step in range(2):
        pairs = [grads_of(table, step) for table in tables]
        pairs.append((tf.ones((3, DIM)), dense))
        optimizer.apply_gradients(pairs)
    inner.apply_gradients([(tf.ones((3, DIM)), alone)])  # by itself, a variable that is new to it
    assert sorted(optimizer.get_slot_names()) == sorted(names) == sorted(inner.get_slot_names())
    for name in names:
        for variable in (dense, alone):
            assert isinstance(inner.get_slot(variable, name), tf.Variable)
        for table in tables:
            expected = optimizer.get_slot(table, name).sparse_read(KEYS)
            assert np.any(expected)
            for slot in (inner.get_slot(table, name), slots_in(inner, table, name)):
                np.testing.assert_array_equal(slot.sparse_read(KEYS), expected)
        sok.assign(inner.get_slot(tables[0], name), KEYS, np.full((3, DIM), 7.0))
        first, second = (optimizer.get_slot(table, name).sparse_read(KEYS) for table in tables)
        assert np.all(first == 7.0) and not np.any(second == 7.0)
    assert optimizer._slots is inner._slots
    variables = inner.variables() if callable(inner.variables) else inner.variables
    assert all(isinstance(variable, tf.Variable) for variable in variables)


@pytest.mark.parametrize("case", HAVING_SLOTS)
def test_a_checkpoint_of_the_wrapped_optimizer_has_its_dense_slots_alone(case, tmp_path):
    inner, names = having_slots(case)
    table, dense = sok.DynamicVariable(DIM, "uniform", name="saved"), tf.Variable(tf.ones((3, DIM)))
    tf.nn.embedding_lookup(table, KEYS)
    optimizer = sok.OptimizerWrapper(inner)
    optimizer.apply_gradients([grads_of(table), (tf.ones((3, DIM)), dense)])
    checkpoint = tf.train.Checkpoint(inner=inner, table=table, dense=dense, wrapper=optimizer)
    path = checkpoint.write(str(tmp_path / "all"))
    saved = [name for name, _ in tf.train.list_variables(path)]
    slots = [name for name in saved if ".OPTIMIZER_SLOT" in name]
    assert len(slots) == len(names)
    assert all(name.startswith("dense/") for name in slots), slots
    before = {name: optimizer.get_slot(table, name).sparse_read(KEYS).numpy() for name in names}
    of_dense = {name: inner.get_slot(dense, name).numpy() for name in names}
    optimizer.apply_gradients([grads_of(table, 1), (tf.ones((3, DIM)), dense)])
    checkpoint.read(path).assert_consumed()
    for name in names:
        np.testing.assert_array_equal(inner.get_slot(table, name).sparse_read(KEYS), before[name])
        np.testing.assert_array_equal(inner.get_slot(dense, name), of_dense[name])


@pytest.mark.parametrize("case", ["legacy RMSprop", "TF1 Ftrl", "TF1 Adam"])
def test_a_copy_of_the_wrapper_begins_without_slots(case):
    inner, names = having_slots(case)
    table = sok.DynamicVariable(DIM, "uniform", name="copied")
    tf.nn.embedding_lookup(table, KEYS)
    optimizer = sok.OptimizerWrapper(inner)
    optimizer.apply_gradients([grads_of(table)])
    other = copy.deepcopy(optimizer)
    assert optimizer.get_slot(table, names[0]) is not None
    if isinstance(inner, v1.Optimizer):
        assert other.optimizer.get_slot(table, names[0]) is None
    else:
        with pytest.raises(KeyError):
            other.optimizer.get_slot(table, names[0])
    other.apply_gradients([grads_of(table)])
    np.testing.assert_array_equal(
        other.optimizer.get_slot(table, names[0]).sparse_read(KEYS),
        other.get_slot(table, names[0]).sparse_read(KEYS),
    )


@pytest.mark.parametrize("case", ["legacy Adagrad", "TF1 Ftrl", "TF1 RMSProp"])
def test_slots_of_a_graph(case):
    """Keys are other than in eager mode, and states come with the first step that runs."""
    with tf.Graph().as_default():
        inner, names = having_slots(case)
        tables = [sok.DynamicVariable(DIM, "uniform", name="same") for _ in range(2)]
        dense = tf.compat.v1.get_variable("dense", initializer=tf.ones((3, DIM)))
        optimizer = sok.OptimizerWrapper(inner)
        pairs = [*(grads_of(table) for table in tables), (tf.ones((3, DIM)), dense)]
        looked_up = [tf.nn.embedding_lookup(table, KEYS) for table in tables]
        with tf.control_dependencies(looked_up):
            step = optimizer.apply_gradients(pairs)
        with pytest.raises(ValueError, match="none yet"):
            inner.get_slot(tables[0], names[0])
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(step)
            for name in names:
                got = session.run([inner.get_slot(t, name).sparse_read(KEYS) for t in tables])
                np.testing.assert_array_equal(got[0], got[1])
                assert np.any(got[0])
                assert isinstance(inner.get_slot(dense, name), tf.Variable)


def test_keras_3_has_no_slots(trained):
    _, optimizer = trained
    assert not hasattr(optimizer, "_slots") and not hasattr(optimizer.optimizer, "get_slot")
