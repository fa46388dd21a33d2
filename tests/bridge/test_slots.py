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
MODULES = {"Keras 3": lambda: k3, "TF1": lambda: v1}
MODULES["tf_keras"] = lambda: pytest.importorskip("tf_keras").optimizers
MODULES["legacy"] = lambda: MODULES["tf_keras"]().legacy
MOMENTUM, CENTERED = {"momentum": 0.9}, {"momentum": 0.9, "centered": True}
CASES = {
    ("Keras 3", "SGD"): (MOMENTUM, "momentum"),
    ("Keras 3", "Adam"): ({"amsgrad": True}, "momentum velocity velocity_hat"),
    ("Keras 3", "RMSprop"): (CENTERED, "velocity momentum average_gradient"),
    ("Keras 3", "Ftrl"): ({}, "accumulator linear"),
    ("Keras 3", "Adamax"): ({}, "momentum norm"),
    ("Keras 3", "Adadelta"): ({}, "accumulated_grad accumulated_delta_var"),
    ("Keras 3", "Nadam"): ({}, "momentum velocity"),
    ("Keras 3", "Lion"): ({}, "momentum"),
    ("tf_keras", "SGD"): (MOMENTUM, "m"),
    ("tf_keras", "Adam"): ({"amsgrad": True}, "m v vhat"),
    ("legacy", "Adadelta"): ({}, "accum_grad accum_var"),
    ("legacy", "Adamax"): ({}, "m v"),
    ("legacy", "RMSprop"): (CENTERED, "rms momentum mg"),
    ("legacy", "Adagrad"): ({}, "accumulator"),
    ("TF1", "AdadeltaOptimizer"): ({}, "accum accum_update"),
    ("TF1", "ProximalAdagradOptimizer"): ({}, "accumulator"),
    ("TF1", "AdagradDAOptimizer"): (
        {"global_step": tf.constant(1, tf.int64)},
        "gradient_accumulator gradient_squared_accumulator",
    ),
    ("TF1", "RMSPropOptimizer"): (CENTERED, "mg momentum rms"),
    ("TF1", "FtrlOptimizer"): ({}, "accum linear"),
    ("TF1", "AdamOptimizer"): ({}, "m v"),
}
IDS = [" ".join(case) for case in CASES]


def made(family, name):
    """Returns the optimizer of a case, and its names."""
    options, names = CASES[family, name]
    make = getattr(MODULES[family](), name)
    return make(learning_rate=0.1, **options), names.split()


def state_of(optimizer, variable, name):
    """Returns a state of a dense variable by the framework's name, as it is in the framework."""
    if not hasattr(optimizer, "get_slot"):
        ends = (f"dense_{name}", f"/{name}/dense:0")  # Keras 3, tf_keras
        return next(v.numpy() for v in optimizer.variables if v.name.endswith(ends))
    return optimizer.get_slot(variable, name).numpy()


def slot_in(inner, variable, name):
    """Returns what a program finds that knows where the optimizer keeps its slots."""
    if isinstance(inner, v1.Optimizer):
        return inner._slots[name][variable._unique_id]
    return inner._slots.get(variable._unique_id)[name]


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_frameworks_names_name_the_frameworks_states(case, tmp_path):
    (inner, names), (theirs, _) = made(*case), made(*case)
    has_slots = case[0] in ("legacy", "TF1")
    tables = [sok.DynamicVariable(DIM, initializer="uniform", name="same") for _ in range(2)]
    start = tf.nn.embedding_lookup(tables[0], KEYS)
    make = keras.Variable if case[0] == "Keras 3" else tf.Variable
    dense, beside, alone = make(start, name="dense"), make(start), make(start)
    ours = sok.OptimizerWrapper(inner)
    rng = np.random.default_rng(0)

    def step():
        grads = tf.constant(rng.normal(size=(3, DIM)), tf.float32)
        theirs.apply_gradients([(grads, dense)])
        slices = tf.IndexedSlices(grads, tf.constant(KEYS, tf.int64))
        ours.apply_gradients([(slices, tables[0]), (slices, tables[1]), (grads, beside)])

    for _ in range(3):
        step()
    for name in names:
        state = tf.nn.embedding_lookup(ours.get_slot(tables[0], name), KEYS)
        np.testing.assert_allclose(state, state_of(theirs, dense, name), rtol=1e-4)
    assert len(ours.get_slot_names()) == len(names)
    assert hasattr(inner, "get_slot") == hasattr(ours, "_slots") == has_slots
    if has_slots:
        inner.apply_gradients([(tf.ones((3, DIM)), alone)])  # by itself, of what is new to it
        check_slots(inner, ours, names, tables, [beside, alone])
        check_checkpoint(inner, ours, names, step, {"table": tables[0], "dense": beside}, tmp_path)


def check_slots(inner, ours, names, tables, dense):
    """The wrapped optimizer has the slots of tables and of dense variables, as in SOK."""
    assert sorted(ours.get_slot_names()) == sorted(names) == sorted(inner.get_slot_names())
    assert ours._slots is inner._slots
    for name in names:
        assert all(isinstance(inner.get_slot(each, name), tf.Variable) for each in dense)
        for table in tables:
            expected = ours.get_slot(table, name).sparse_read(KEYS)
            assert np.any(expected)
            for slot in (inner.get_slot(table, name), slot_in(inner, table, name)):
                np.testing.assert_array_equal(slot.sparse_read(KEYS), expected)
        sok.assign(inner.get_slot(tables[1], name), KEYS, np.full((3, DIM), 7.0))
        first, second = (ours.get_slot(table, name).sparse_read(KEYS) for table in tables)
        assert np.all(second == 7.0) and not np.any(first == 7.0)
    variables = inner.variables() if callable(inner.variables) else inner.variables
    assert all(isinstance(variable, tf.Variable) for variable in variables)


def check_checkpoint(inner, ours, names, step, variables, folder):
    """A checkpoint of the wrapped optimizer has the slots of dense variables alone."""
    checkpoint = tf.train.Checkpoint(inner=inner, wrapper=ours, **variables)
    path = checkpoint.write(str(folder / "all"))
    saved = [name for name, _ in tf.train.list_variables(path)]
    slots = [name for name in saved if ".OPTIMIZER_SLOT" in name]
    assert len(slots) == len(names) and all(name.startswith("dense/") for name in slots), slots

    def states():
        of_table = [ours.get_slot(variables["table"], name).sparse_read(KEYS) for name in names]
        return of_table + [inner.get_slot(variables["dense"], name).numpy() for name in names]

    before = states()
    step()
    checkpoint.read(path).assert_existing_objects_matched()
    for one, other in zip(before, states(), strict=True):
        np.testing.assert_array_equal(one, other)


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
    assert len(slot.export(cutoff=1.0)[0]) == 3 and len(slot.export(cutoff=1.5)[0]) == 0
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


@pytest.mark.parametrize("case", [("legacy", "Adamax"), ("Keras 3", "RMSprop")], ids=" ".join)
def test_states_are_known_by_name_while_a_function_is_traced(case):
    """The settings of a legacy optimizer are variables, which AutoGraph's `float` leaves alone."""
    table = sok.DynamicVariable(DIM, initializer="ones")
    optimizer = sok.OptimizerWrapper(made(*case)[0])
    names = []

    @tf.function
    def step():
        names.extend(optimizer.get_slot_names())
        optimizer._create_slots([table])
        tf.nn.embedding_lookup(table, KEYS)
        return optimizer.get_slot(table, names[0]).size

    np.testing.assert_array_equal(step(), [3, DIM])
    assert table.table.store.state_names == names[: len(optimizer.get_slot_names())]


@pytest.mark.parametrize("case", [("legacy", "RMSprop"), ("TF1", "FtrlOptimizer")], ids=" ".join)
def test_a_copy_of_the_wrapper_begins_without_slots(case):
    inner, (name, *_) = made(*case)
    table = sok.DynamicVariable(DIM, "uniform", name="copied")
    optimizer = sok.OptimizerWrapper(inner)
    pair = tf.IndexedSlices(tf.ones([3, DIM]), tf.constant(KEYS, tf.int64)), table
    optimizer.apply_gradients([pair])
    other = copy.deepcopy(optimizer)
    assert optimizer.get_slot(table, name) is not None
    if isinstance(inner, v1.Optimizer):
        assert other.optimizer.get_slot(table, name) is None
    else:
        with pytest.raises(KeyError):
            other.optimizer.get_slot(table, name)
    other.apply_gradients([pair])
    slots = other.optimizer.get_slot(table, name), other.get_slot(table, name)
    np.testing.assert_array_equal(*(slot.sparse_read(KEYS) for slot in slots))


@pytest.mark.parametrize("case", [("legacy", "Adagrad"), ("TF1", "RMSPropOptimizer")], ids=" ".join)
def test_slots_of_a_graph(case):
    """Keys are other than in eager mode, and states come with the first step that runs."""
    with tf.Graph().as_default():
        inner, names = made(*case)
        table = sok.DynamicVariable(DIM, "uniform")
        dense = tf.compat.v1.get_variable("dense", initializer=tf.ones((3, DIM)))
        optimizer = sok.OptimizerWrapper(inner)
        slices = tf.IndexedSlices(tf.ones([3, DIM]), tf.constant(KEYS, tf.int64))
        with tf.control_dependencies([tf.nn.embedding_lookup(table, KEYS)]):
            step = optimizer.apply_gradients([(slices, table), (tf.ones((3, DIM)), dense)])
        with pytest.raises(ValueError, match="none yet"):
            inner.get_slot(table, names[0])
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(step)
            for name in names:
                assert np.any(session.run(inner.get_slot(table, name).sparse_read(KEYS)))
                assert isinstance(inner.get_slot(dense, name), tf.Variable)


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


@pytest.mark.cases("wrong")
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
    for use in (
        lambda: tf.nn.embedding_lookup(slot, KEYS, max_norm=1.0),
        lambda: tf.reduce_sum(slot),
    ):
        with pytest.raises(ValueError, match="SlotView"):
            use()


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
