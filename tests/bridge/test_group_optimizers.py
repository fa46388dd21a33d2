"""Optimizers that set rows to zero, from Keras to the rows, and what is done with such rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite import optimizers
from sok_lite.optimizers import GroupAdam, GroupAMSGrad, GroupLamb, GroupMomentum, SparseGroupFtrl
from tests.support import reference_updates

KEYS = np.array([5, -7, 2**40, 3, 11])
DIM = 6
STRENGTHS = {"l1": 0.02, "l2": 0.1, "l21": 0.1}
PENALTIES = {f"{name}_regularization_strength": value for name, value in STRENGTHS.items()}
ADAM = {"beta_1": 0.8, "beta_2": 0.9, "epsilon": 1e-5}
# The optimizer, its twin with its settings, the parent, and what is said to both of these two.
EVERY = [
    pytest.param(GroupAdam, "groupadam", ADAM, keras.optimizers.Adam, ADAM, id="GroupAdam"),
    pytest.param(
        GroupAMSGrad,
        "groupamsgrad",
        ADAM,
        lambda *args, **kwargs: keras.optimizers.Adam(*args, amsgrad=True, **kwargs),
        ADAM,
        id="GroupAMSGrad",
    ),
    pytest.param(
        GroupMomentum,
        "groupmomentum",
        {"momentum": 0.7, "nesterov": True},
        keras.optimizers.SGD,
        {"momentum": 0.7, "nesterov": True},
        id="GroupMomentum",
    ),
    pytest.param(
        SparseGroupFtrl,
        "sparsegroupftrl",
        {"initial_accumulator": 0.2, "l2_shrinkage": 0.01, "beta": 0.1},
        # Ftrl has the first two penalties too.
        lambda *args, **kwargs: keras.optimizers.Ftrl(
            *args,
            l1_regularization_strength=STRENGTHS["l1"],
            l2_regularization_strength=STRENGTHS["l2"],
            **kwargs,
        ),
        {
            "initial_accumulator_value": 0.2,
            "l2_shrinkage_regularization_strength": 0.01,
            "beta": 0.1,
        },
        id="SparseGroupFtrl",
    ),
    pytest.param(
        GroupLamb, "grouplamb", ADAM, getattr(keras.optimizers, "Lamb", None), ADAM, id="GroupLamb"
    ),
]
CLASSES = [GroupAdam, GroupAMSGrad, SparseGroupFtrl, GroupMomentum, GroupLamb]


def the_gradients(num_steps, seed=0):
    """For each step which keys, and the gradients of their rows and of a dense variable."""
    rng = np.random.default_rng(seed)
    size = np.array([1, 0.1, 0.01, 1, 0.1])[:, None]
    for _ in range(num_steps):
        touched = np.flatnonzero(rng.random(len(KEYS)) < 0.7)
        rows = (rng.normal(0, 1, (len(KEYS), DIM)) * size)[touched].astype(np.float32)
        yield touched, rows, rng.normal(0, 1, 3).astype(np.float32)


def rate_of(step):
    return 0.1 * 0.8**step


@pytest.mark.parametrize("decay", [None, 0.05])
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("make, twin, settings, parent, arguments", EVERY)
def test_rows_follow_the_twin_and_dense_variables_the_parent(
    make, twin, settings, parent, arguments, traced, decay
):
    if parent is None:
        pytest.skip("this Keras has no Lamb")
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=1, decay_rate=0.8)
    optimizer = sok.OptimizerWrapper(make(schedule, **PENALTIES, **arguments, weight_decay=decay))
    table = sok.DynamicVariable(DIM, name=f"{twin} {traced} {decay}")
    start = np.random.default_rng(1).normal(0, 0.1, (len(KEYS), DIM)).astype(np.float32)
    sok.assign(table, KEYS, start)
    dense, alone = tf.Variable([0.5, -1.0, 2.0]), tf.Variable([0.5, -1.0, 2.0])
    by_parent = parent(schedule, weight_decay=decay, **arguments)

    def step(keys, rows, grad):
        optimizer.apply_gradients([(tf.IndexedSlices(rows, keys), table), (grad, dense)])

    if traced:
        step = tf.function(
            step,
            input_signature=[
                tf.TensorSpec([None], tf.int64),
                tf.TensorSpec([None, DIM]),
                tf.TensorSpec([3]),
            ],
        )
    w = start.astype(np.float64)
    initials = {"accumulator": 0.2}
    names = optimizer.get_slot_names()
    states = {name: np.full(w.shape, initials.get(name, 0.0)) for name in names}
    for number, (touched, rows, grad) in enumerate(the_gradients(8), start=1):
        step(tf.constant(KEYS[touched]), tf.constant(rows), tf.constant(grad))
        by_parent.apply_gradients([(tf.constant(grad), alone)])
        part = {name: state[touched] for name, state in states.items()}
        w_part = w[touched]
        getattr(reference_updates, twin)(
            *(w_part, part, rows.astype(np.float64), rate_of(number - 1), number),
            **settings,
            **STRENGTHS,
            weight_decay=decay or 0.0,
        )
        w[touched] = w_part
        for name, state in part.items():
            states[name][touched] = state
    keys, rows = sok.export(table)
    order = np.argsort(KEYS)
    np.testing.assert_array_equal(keys, KEYS[order])
    np.testing.assert_allclose(rows, w[order], rtol=2e-4, atol=2e-6)
    np.testing.assert_array_equal(dense, alone)
    is_zero = (w == 0).all(axis=1)
    assert int(table.num_zero_rows()) == is_zero.sum()
    for name in names:
        state = optimizer.get_slot(table, name).export()[1]
        np.testing.assert_allclose(state, states[name][order], rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("make", CLASSES)
def test_rows_of_zeros_are_counted_dropped_at_export_and_come_back(make, mode):
    strength = {SparseGroupFtrl: 3.0, GroupMomentum: 3.0}.get(make, 2.0)
    optimizer = sok.OptimizerWrapper(make(0.1, l21_regularization_strength=strength))
    table = sok.DynamicVariable(DIM, initializer="zeros", name=f"zeros {make.__name__}")
    keys = tf.constant([1, 2, 3], tf.int64)
    size = tf.constant([[1e-3], [100.0], [1e-3]])

    @tf.function
    def step(size):
        optimizer.apply_gradients([(tf.IndexedSlices(size * tf.ones([3, DIM]), keys), table)])

    step(size)
    assert int(mode(table.num_zero_rows)()) == 2
    left, rows = mode(lambda: sok.export(table, cutoff=1e-20))()
    assert left.numpy().tolist() == [2] and (rows.numpy() < 0).all()
    slot = optimizer.get_slot(table, "linear")
    assert slot.export(cutoff=1e-20)[0].numpy().tolist() == [2]
    assert slot.export()[0].numpy().tolist() == sok.export(table)[0].numpy().tolist() == [1, 2, 3]
    assert int(table.num_zero_rows()) == 2  # nothing that was asked has changed that
    step(tf.constant([[100.0], [100.0], [1e-3]]))
    assert int(table.num_zero_rows()) == 1
    assert sok.export(table, cutoff=1e-20)[0].numpy().tolist() == [1, 2]


def test_a_bad_cutoff_is_refused(mode):
    table = sok.DynamicVariable(2)
    with pytest.raises(ValueError, match="`cutoff` must be above 0. Received: cutoff=0"):
        mode(lambda: table.export(cutoff=0.0))()
    with pytest.raises(TypeError, match="`cutoff` must be a number or None"):
        mode(lambda: table.export(cutoff="1e-20"))()


@pytest.mark.parametrize("make", CLASSES)
def test_a_configuration_comes_back(make):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
    optimizer = make(schedule, **PENALTIES, weight_decay=0.25)
    saved = keras.saving.serialize_keras_object(optimizer)
    again = keras.saving.deserialize_keras_object(saved)
    for other in (again, make.from_config(optimizer.get_config())):
        assert type(other) is make
        assert other.get_config() == optimizer.get_config()
        assert {name: getattr(other, name) for name in PENALTIES} == PENALTIES
        assert other.weight_decay == 0.25


def test_the_module_has_them_and_nothing_else():
    assert set(optimizers.__all__) == {*(make.__name__ for make in CLASSES), "RowWiseAdagrad"}
    assert sok.optimizers is optimizers
    assert isinstance(GroupMomentum().momentum, float) and GroupMomentum().momentum == 0.9
    assert GroupAMSGrad().amsgrad and not GroupAdam().amsgrad


def test_amsgrad_without_amsgrad_is_refused():
    with pytest.raises(ValueError, match="`amsgrad` of GroupAMSGrad must be True"):
        GroupAMSGrad(amsgrad=False)


def test_a_subclass_that_changes_nothing_has_the_rule_too():
    class Mine(GroupAdam):
        def __init__(self):
            super().__init__(0.1, l21_regularization_strength=100.0)

    optimizer = sok.OptimizerWrapper(Mine())
    assert optimizer.get_slot_names() == ["linear", "m", "v"]
    table = sok.DynamicVariable(2, initializer="ones")
    optimizer.apply_gradients([(tf.IndexedSlices(tf.ones([1, 2]), [4]), table)])
    assert int(table.num_zero_rows()) == 1


def test_adam_with_penalties_and_amsgrad_is_amsgrad():
    optimizer = sok.OptimizerWrapper(GroupAdam(0.1, amsgrad=True))
    assert optimizer.get_slot_names() == ["linear", "m", "v", "vhat"]


def test_a_strength_may_change_between_steps():
    inner = GroupMomentum(0.1)
    optimizer = sok.OptimizerWrapper(inner)
    table = sok.DynamicVariable(2, initializer="ones")
    gradient = tf.IndexedSlices(tf.ones([1, 2]), [4])
    optimizer.apply_gradients([(gradient, table)])
    assert int(table.num_zero_rows()) == 0
    inner.l21_regularization_strength = 100.0
    optimizer.apply_gradients([(gradient, table)])
    assert int(table.num_zero_rows()) == 1


@pytest.mark.parametrize("make", CLASSES)
@pytest.mark.parametrize("name", ["l1", "l2", "l21"])
def test_bad_strengths_are_refused(make, name):
    argument = f"{name}_regularization_strength"
    for strength in (-0.5, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"`{argument}` of {make.__name__} must be finite"):
            make(0.1, **{argument: strength})
    with pytest.raises(TypeError, match=f"`{argument}` of {make.__name__} must be a number"):
        make(0.1, **{argument: "much"})


def test_keras_without_lamb_is_told(monkeypatch):
    monkeypatch.setattr("sok_lite.bridge.optimizers.group._Lamb", None)
    with pytest.raises(NotImplementedError, match="Install a newer Keras, or use GroupAdam"):
        GroupLamb(0.1)


@pytest.mark.skipif(not hasattr(keras.optimizers, "Lamb"), reason="this Keras has no Lamb")
def test_without_penalties_group_lamb_is_keras_lamb_of_a_variable_of_one_row():
    # Epsilon counts where second moments are corrected in one and not in the other.
    options = {"epsilon": 1e-12}
    start = np.random.default_rng(1).normal(0, 1, (3, DIM)).astype(np.float32)
    table = sok.DynamicVariable(DIM)
    sok.assign(table, [0, 1, 2], start)
    optimizer = sok.OptimizerWrapper(GroupLamb(0.1, **options))
    rows = [tf.Variable(row) for row in start]
    theirs = keras.optimizers.Lamb(0.1, **options)
    for seed in range(5):
        grads = np.random.default_rng(seed).normal(0, 1, (3, DIM)).astype(np.float32)
        optimizer.apply_gradients([(tf.IndexedSlices(grads, [0, 1, 2]), table)])
        theirs.apply_gradients(list(zip(map(tf.constant, grads), rows, strict=True)))
    np.testing.assert_allclose(sok.export(table)[1], np.stack(rows), rtol=2e-5, atol=2e-6)
