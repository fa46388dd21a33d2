"""Optimizers that no rule follows: against themselves on dense variables, and a NumPy twin."""

import copy
import gc

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge.optimizers.fallback_step import fallback_steps
from sok_lite.bridge.optimizers.keras3 import KERAS3
from sok_lite.bridge.optimizers.settings import settings_of
from sok_lite.optimizers import GroupAdam
from tests.support.helpers import run_threads
from tests.support.own_optimizers import (
    ALL,
    KEYS,
    OfKeras3,
    OfLegacy,
    OfTfKeras,
    OfV1,
    Twin,
    slices,
)

tf_keras = pytest.importorskip("tf_keras")
k3, new, legacy = keras.optimizers, tf_keras.optimizers, tf_keras.optimizers.legacy
v1 = tf.compat.v1.train

every = pytest.mark.parametrize("make", ALL)


def new_table(dim, name, **options):
    return sok.DynamicVariable(dim, initializer="uniform", name=name, **options)


def rows_of(table, keys=KEYS):
    return tf.nn.embedding_lookup(table, keys).numpy()


def some_grads(seed, dim, n=3):
    return np.random.default_rng(seed).normal(size=(n, dim)).astype(np.float32)


@every
def test_rows_move_as_dense_variables_do(make, mode):
    """Two tables and a dense variable, all rows touched in each of 50 steps."""
    tables = [new_table(4, "a"), new_table(3, "b")]
    variables = [tf.Variable(rows_of(table)) for table in tables]
    dense, alone = tf.Variable([[1.0, 2.0]]), tf.Variable([[1.0, 2.0]])
    ours, theirs = sok.OptimizerWrapper(make()), make()

    @mode
    def step(a, b, grad):
        # The same gradient in two halves: repeated keys are summed.
        halves = slices(tf.concat([a * 0.25, a * 0.75], 0), KEYS * 2)
        ours.apply_gradients([(halves, tables[0]), (grad, dense), (slices(b), tables[1])])

    for i in range(50):
        a, b, grad = some_grads(i, 4), some_grads(i + 50, 3), some_grads(i + 100, 2, 1)
        step(tf.constant(a), tf.constant(b), tf.constant(grad))
        pairs = [(a, variables[0]), (b, variables[1]), (grad, alone)]
        theirs.apply_gradients([(tf.constant(value), variable) for value, variable in pairs])
    for table, variable in zip(tables, variables, strict=True):
        np.testing.assert_allclose(rows_of(table), variable, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dense, alone, rtol=1e-5, atol=1e-5)
    assert ours.iterations == 50


@every
def test_only_touched_rows_and_states_move(make, mode):
    table, twin = new_table(3, "lazy"), Twin()
    rng = np.random.default_rng(0)
    keys = np.arange(20) * 1009 - 7
    rows = dict(zip(keys.tolist(), rows_of(table, keys).astype(np.float64), strict=True))
    ours = sok.OptimizerWrapper(make())

    @mode
    def step(touched, grads):
        ours.apply_gradients([(tf.IndexedSlices(grads, touched), table)])

    for i in range(10):
        touched = rng.choice(keys, 7, replace=False)
        grads = some_grads(i, 3, 7)
        step(tf.constant(touched), tf.constant(grads))
        twin.step(rows, touched.tolist(), grads)
    np.testing.assert_allclose(rows_of(table, keys), [rows[k] for k in keys.tolist()], atol=1e-5)
    slot = ours.get_slot(table, "mom")
    held = dict(zip(*(part.numpy().tolist() for part in slot.export()), strict=True))
    for key, row in twin.m.items():
        np.testing.assert_allclose(held[key], row, rtol=1e-5, atol=1e-5)


@every
def test_tables_come_in_any_steps_and_numbers_go_on(make):
    """A table that is not in a step keeps its states, and a new one begins with its own."""
    tables = {name: new_table(dim, name) for name, dim in [("a", 4), ("b", 3), ("c", 4)]}
    variables = {name: tf.Variable(rows_of(table)) for name, table in tables.items()}
    ours, theirs = sok.OptimizerWrapper(make()), make()
    if make is not OfV1 and make is not OfLegacy:  # built once, for all
        theirs.build(list(variables.values()))
    if make is OfV1:
        theirs._create_slots(list(variables.values()))
    # tf_keras' counts by all variables that it was built with.
    for i, names in enumerate(["a", "ab", "b", "cab", "c", "ac"]):
        grads = {name: some_grads(i, tables[name].dimension) for name in names}
        ours.apply_gradients([(slices(grads[name]), tables[name]) for name in names])
        theirs.apply_gradients([(tf.constant(grads[name]), variables[name]) for name in names])
    for name, table in tables.items():
        np.testing.assert_allclose(rows_of(table), variables[name], rtol=1e-5, atol=1e-5)


@every
def test_a_step_without_rows_counts(make, mode):
    table, other, twin = new_table(3, "rows"), new_table(4, "none"), Twin()
    rows = dict(zip(KEYS, rows_of(table).astype(np.float64), strict=True))
    ours = sok.OptimizerWrapper(make())

    @mode
    def step(keys, grads):
        nothing = tf.IndexedSlices(tf.zeros((0, 4)), tf.zeros(0, tf.int64))
        ours.apply_gradients([(tf.IndexedSlices(grads, keys), table), (nothing, other)])

    for i in range(5):
        keys = KEYS if i % 2 else []
        step(tf.constant(keys, tf.int64), tf.constant(some_grads(i, 3)[: len(keys)]))
        twin.step(rows, keys, some_grads(i, 3)[: len(keys)])
    np.testing.assert_allclose(rows_of(table), [rows[key] for key in KEYS], atol=1e-5)
    assert int(other.size[0]) == 0


@pytest.mark.parametrize(
    ("base", "step"),
    [
        (k3.Adam, "update_step"),
        (new.Adam, "update_step"),
        (legacy.Adam, "_resource_apply_dense"),
        (v1.AdamOptimizer, "_resource_apply_dense"),
    ],
    ids=["Keras 3", "tf_keras", "legacy", "v1"],
)
def test_a_subclass_that_changes_the_step(base, step, mode):
    def halved(self, gradient, *rest, **more):
        return getattr(super(Mine, self), step)(tf.sign(gradient) * 0.5, *rest, **more)

    Mine = type("Mine", (base,), {step: halved})
    table = new_table(4, "adam")
    variable = tf.Variable(rows_of(table))
    ours, theirs = sok.OptimizerWrapper(Mine(0.1)), Mine(0.1)

    @mode
    def train(grads):
        ours.apply_gradients([(slices(grads), table)])

    for i in range(5):
        train(tf.constant(some_grads(i, 4)))
        theirs.apply_gradients([(tf.constant(some_grads(i, 4)), variable)])
    np.testing.assert_allclose(rows_of(table), variable, rtol=1e-5, atol=1e-5)
    assert not np.allclose(variable, rows_of(new_table(4, "adam")), atol=1e-2)


@pytest.mark.parametrize("package", [k3, new, legacy], ids=["Keras 3", "tf_keras", "legacy"])
def test_states_begin_as_the_optimizer_makes_them(package):
    class Mine(package.Adagrad):
        def mine(self):
            """Makes it a class with something of its own."""

    table = new_table(4, "adagrad")
    variable = tf.Variable(rows_of(table))
    ours = sok.OptimizerWrapper(Mine(0.1, initial_accumulator_value=0.5))
    theirs = Mine(0.1, initial_accumulator_value=0.5)
    for i in range(3):
        ours.apply_gradients([(slices(some_grads(i, 4)), table)])
        theirs.apply_gradients([(tf.constant(some_grads(i, 4)), variable)])
    np.testing.assert_allclose(rows_of(table), variable, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [OfKeras3, OfTfKeras])
def test_optimizers_see_the_names_of_tables(make):
    class Named(make):
        def update_step(self, gradient, variable, *rate):
            sign = -1.0 if "item" in variable.name else 1.0
            super().update_step(sign * gradient, variable, *rate)

    tables = [new_table(2, "user id"), new_table(2, "item id")]
    start = [rows_of(table) for table in tables]
    ours = sok.OptimizerWrapper(Named())
    ours.apply_gradients([(slices(np.ones((3, 2))), table) for table in tables])
    moves = [rows_of(table) - rows for table, rows in zip(tables, start, strict=True)]
    assert (moves[0] < 0).all()
    np.testing.assert_allclose(moves[1], -moves[0], rtol=1e-5)


def test_a_subclass_that_changes_nothing_keeps_its_rule():
    class Same(k3.SGD):
        def __init__(self):
            super().__init__(0.5, momentum=0.9)

    ours = sok.OptimizerWrapper(Same(), stochastic_rounding=True)
    assert ours.get_slot_names() == ["momentum"]


@pytest.mark.parametrize("placeholder", [True, False])
def test_in_a_tf1_session(placeholder):
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = new_table(3, "tf1")
        start = tf.nn.embedding_lookup(table, tf.constant(KEYS, tf.int64))
        rate = tf.compat.v1.placeholder(tf.float32, []) if placeholder else 0.1
        rho = tf.compat.v1.get_variable("rho", initializer=0.9, use_resource=True)
        grads = tf.compat.v1.placeholder(tf.float32, [3, 3])
        train = sok.OptimizerWrapper(OfV1(rate, rho)).apply_gradients([(slices(grads), table)])
        session.run(tf.compat.v1.global_variables_initializer())
        found = session.run(start).astype(np.float64)
        rows, twin = dict(zip(KEYS, found, strict=True)), Twin()
        for i in range(5):
            fed = {rate: 0.1 * (i + 1)} if placeholder else {}
            session.run(train, {grads: some_grads(i, 3), **fed})
            twin.step(rows, KEYS, some_grads(i, 3), 0.1 * (i + 1) if placeholder else 0.1)
        np.testing.assert_allclose(session.run(start), [rows[k] for k in KEYS], atol=1e-5)


@every
def test_settings_are_read_in_each_step(make):
    table, twin = new_table(3, "settings"), Twin()
    rows = dict(zip(KEYS, rows_of(table).astype(np.float64), strict=True))
    inner = make()
    ours = sok.OptimizerWrapper(inner)
    for i in range(4):
        rate = 0.1 / (i + 1)
        if make is OfV1:
            inner._lr = rate
            inner._rho = twin.rho = 0.9 - 0.1 * i
        else:
            inner.learning_rate = rate
            inner.rho = twin.rho = 0.9 - 0.1 * i
        ours.apply_gradients([(slices(some_grads(i, 3)), table)])
        twin.step(rows, KEYS, some_grads(i, 3), rate)
    np.testing.assert_allclose(rows_of(table), [rows[key] for key in KEYS], atol=1e-5)


@pytest.mark.parametrize("make, package", [(OfKeras3, keras), (OfTfKeras, tf_keras)])
def test_a_schedule_and_weight_decay(make, package):
    tables = [new_table(3, "decayed"), new_table(3, "not")]
    variables = [
        package.Variable(rows_of(t)) if package is keras else tf.Variable(rows_of(t))
        for t in tables
    ]
    schedules = package.optimizers.schedules

    def new_optimizer(last):
        made = make(schedules.ExponentialDecay(0.5, 2, 0.5), weight_decay=0.1)
        made.exclude_from_weight_decay(var_list=[last])
        return made

    ours = sok.OptimizerWrapper(new_optimizer(tables[1]))
    theirs = new_optimizer(variables[1])
    for i in range(5):
        a, b = some_grads(i, 3), some_grads(i + 9, 3)
        ours.apply_gradients([(slices(a), tables[0]), (slices(b), tables[1])])
        theirs.apply_gradients(zip([tf.constant(a), tf.constant(b)], variables, strict=True))
    for table, variable in zip(tables, variables, strict=True):
        np.testing.assert_allclose(rows_of(table), variable.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [OfKeras3, OfTfKeras, OfLegacy])
@pytest.mark.parametrize("limit", ["clipvalue", "clipnorm", "global_clipnorm"])
def test_gradients_are_clipped_once(make, limit, mode):
    """By the wrapper, of all variables; not by the copy once more, of the tables alone."""
    table, dense = new_table(3, "clipped"), tf.Variable([[3.0, -1.0]])
    variable, alone = tf.Variable(rows_of(table)), tf.Variable([[3.0, -1.0]])
    ours, theirs = sok.OptimizerWrapper(make(**{limit: 0.5})), make(**{limit: 0.5})

    @mode
    def step(grads, dense_grads):
        ours.apply_gradients([(slices(grads), table), (dense_grads, dense)])

    for i in range(4):
        grads, others = tf.constant(some_grads(i, 3)), tf.constant(some_grads(i + 9, 2, 1))
        step(grads, others)
        theirs.apply_gradients([(grads, variable), (others, alone)])
    np.testing.assert_allclose(rows_of(table), variable, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dense, alone, rtol=1e-5, atol=1e-5)


@every
def test_a_checkpoint_has_states_and_numbers(make, tmp_path):
    table, ours = new_table(3, "saved"), sok.OptimizerWrapper(make())
    for i in range(3):
        ours.apply_gradients([(slices(some_grads(i, 3)), table)])
    path = tf.train.Checkpoint(table=table, optimizer=ours).write(str(tmp_path / "ckpt"))
    other, theirs = new_table(3, "saved"), sok.OptimizerWrapper(make())
    tf.train.Checkpoint(table=other, optimizer=theirs).read(path)
    for i in range(3, 6):
        ours.apply_gradients([(slices(some_grads(i, 3)), table)])
        theirs.apply_gradients([(slices(some_grads(i, 3)), other)])
    np.testing.assert_array_equal(rows_of(table), rows_of(other))


@every
def test_states_are_read_and_assigned_by_key(make):
    table, ours = new_table(3, "slots"), sok.OptimizerWrapper(make())
    tf.nn.embedding_lookup(table, KEYS)
    assert ours.get_slot_names() == ["mom", "n" if make is not OfKeras3 else "ns"]
    ours._create_slots([table])
    slot = ours.get_slot(table, "mom")
    slot.assign(KEYS[:1], np.full((1, 3), 2.0, np.float32))
    np.testing.assert_array_equal(slot.sparse_read(KEYS), [[2.0] * 3, [0.0] * 3, [0.0] * 3])
    before = rows_of(table)
    ours.apply_gradients([(slices(np.zeros((3, 3))), table)])
    # m = 0.9 * 2, n = 0, and the power is 0.9 after one step.
    np.testing.assert_allclose(before - rows_of(table), [[0.018] * 3, [0] * 3, [0] * 3], atol=1e-6)
    assert ours.get_slot(table, ours.get_slot_names()[1]).dimension == 1


@every
@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16])
def test_rows_of_16_bits(make, dtype):
    table, twin = new_table(3, "short", dtype=dtype), Twin()
    ours = sok.OptimizerWrapper(make())
    rows = dict(zip(KEYS, tf.cast(rows_of(table), tf.float64).numpy(), strict=True))
    for i in range(3):
        ours.apply_gradients([(slices(some_grads(i, 3)), table)])
        twin.step(rows, KEYS, some_grads(i, 3))
    found = tf.cast(rows_of(table), tf.float64)
    np.testing.assert_allclose(found, [rows[key] for key in KEYS], atol=3e-2)


# ---- failures and refusals -----------------------------------------------------------------------


def test_a_step_that_raises_changes_nothing():
    class Failing(OfKeras3):
        fails = False

        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient, variable, learning_rate)
            if Failing.fails:
                raise ArithmeticError("no")

    table, dense = new_table(3, "failing"), tf.Variable([[1.0]])
    ours = sok.OptimizerWrapper(Failing())
    pairs = [(slices(some_grads(0, 3)), table), (tf.constant([[1.0]]), dense)]
    ours.apply_gradients(pairs)
    before = rows_of(table), ours.get_slot(table, "mom").export()[1].numpy(), dense.numpy()
    Failing.fails = True
    with pytest.raises(ArithmeticError):
        ours.apply_gradients(pairs)
    after = rows_of(table), ours.get_slot(table, "mom").export()[1].numpy(), dense.numpy()
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    assert ours.iterations == 1


def test_gradients_that_are_not_finite_are_counted_or_refused():
    table = new_table(3, "nan")
    grads = some_grads(0, 3)
    grads[1, 1] = np.nan
    strict = sok.OptimizerWrapper(OfKeras3(), on_nonfinite="error")
    before = rows_of(table)
    with pytest.raises(ValueError, match="1 of 3 gradient rows"):
        strict.apply_gradients([(slices(grads), table)])
    np.testing.assert_array_equal(rows_of(table), before)
    lenient = sok.OptimizerWrapper(OfKeras3())
    lenient.apply_gradients([(slices(grads), table)])
    assert lenient.num_nonfinite == 1


class Unlisted(k3.SGD):
    def __init__(self, scale, **options):
        super().__init__(0.1, **options)
        self.scale = scale

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient * self.scale)


class Counting(k3.SGD):
    def __init__(self, **options):
        super().__init__(**options)
        self.steps = 0

    def update_step(self, gradient, variable, learning_rate):
        self.steps += 1
        self.assign_sub(variable, gradient * self.steps)


class CountingInClass(k3.SGD):
    steps = 0

    def update_step(self, gradient, variable, learning_rate):
        self.steps += 1
        self.assign_sub(variable, gradient * self.steps)


class CountingByTensor(k3.SGD):
    """Its number is a tensor from the first step on, and counts from the third."""

    def __init__(self, **options):
        super().__init__(**options)
        self.steps = 0.0

    def apply(self, grads, variables=None):
        self.steps = self.steps + tf.constant(1.0)
        super().apply([grad * tf.maximum(1.0, self.steps - 2.0) for grad in grads], variables)


class Late(k3.SGD):
    def update_step(self, gradient, variable, learning_rate):
        self.late = self.add_variable(variable.shape)
        self.assign_sub(variable, gradient + self.late)


class Drawn(OfKeras3):
    def build(self, variables):
        super().build(variables)
        self.ms = [self.add_variable(v.shape, initializer="random_normal") for v in variables]


class Double(OfKeras3):
    def build(self, variables):
        super().build(variables)
        self.wide = [self.add_variable(v.shape, dtype="float64", name="wide") for v in variables]


class Failing(k3.SGD):
    def update_step(self, gradient, variable, learning_rate):
        raise ArithmeticError("never")


class WithInner(k3.SGD):
    """It would be trained by the trial."""

    def __init__(self, **options):
        super().__init__(**options)
        self.inner = {"fast": [k3.SGD(0.1, momentum=0.9)]}

    def update_step(self, gradient, variable, learning_rate):
        raise AssertionError("never asked")


class V1Inner(v1.Optimizer):
    def __init__(self):
        super().__init__(False, "V1Inner")
        self._opt = v1.MomentumOptimizer(0.1, 0.9)

    def apply_gradients(self, *args, **kwargs):
        return self._opt.apply_gradients(*args, **kwargs)


class Seeded(k3.SGD):
    """Each copy would draw the same."""

    def __init__(self, **options):
        super().__init__(**options)
        self.draws = keras.random.SeedGenerator(3)

    def update_step(self, gradient, variable, learning_rate):
        noise = keras.random.normal(gradient.shape, seed=self.draws)
        self.assign_sub(variable, gradient + noise)


class Remembering(k3.SGD):
    def __init__(self, **options):
        super().__init__(**options)
        self.last = {}

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient + self.last.get(variable.name, 0.0))
        self.last[variable.name] = gradient


class V1Remembering(v1.GradientDescentOptimizer):
    def __init__(self):
        super().__init__(0.1)
        self.steps = {}

    def _resource_apply_dense(self, grad, handle):
        self.steps[handle.name] = self.steps.get(handle.name, 0) + 1
        return handle.assign_sub(grad * self.steps[handle.name])


class Flat(k3.SGD):
    """A momentum of all elements in one vector: which row an element is of nobody knows."""

    def build(self, variables):
        super().build(variables)
        self.flat = [self.add_variable((v.shape[0] * v.shape[1],)) for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        flat = self.flat[self._get_variable_index(variable)]
        self.assign(flat, 0.9 * flat + keras.ops.reshape(gradient, (-1,)))
        self.assign_sub(variable, keras.ops.reshape(flat, variable.shape))


class Clipping(OfKeras3):
    def _clip_gradients(self, grads):
        return [grad / 2 for grad in grads]


class Nameless(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1


class OfGroup(GroupAdam):
    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient * 2, variable, learning_rate)


class Holding(v1.GradientDescentOptimizer):
    def __init__(self):
        super().__init__(0.1)
        self.held = [tf.Variable(1.0)]

    def _resource_apply_dense(self, grad, handle):
        return handle.assign_sub(grad * self.held[0])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Unlisted(2.0), r"from_config\(get_config\(\)\) raises TypeError"),
        (Counting, "attribute 'steps' changes in a step and is no variable"),
        (CountingInClass, "attribute 'steps' changes in a step and is no variable"),
        (CountingByTensor, "is in no variable"),
        (Late, "it makes variables .* while it takes the step"),
        (Drawn, "does not begin with the same number in all rows"),
        (Double, "its state 'wide' is float64"),
        (Failing, r"a step on dense variables raises ArithmeticError\('never'\)"),
        (WithInner, "an optimizer of its own in 'inner'. Wrap that one"),
        (V1Inner, "an optimizer of its own in '_opt'"),
        (Seeded, "is in no variable among its attributes"),
        (Remembering, "is in no variable among its attributes"),
        (V1Remembering, "is in no variable among its attributes"),
        (Flat, "the size of its variable in 'flat' depends on the number of rows"),
        (lambda: Clipping(clipnorm=1.0), "Clipping clips in a way of its own"),
        (lambda: OfKeras3(Nameless()), "A schedule of your own needs a get_config too"),
        (OfGroup, "changes GroupAdam, whose penalties only the update rule of rows has"),
        (Holding, r"it has variables \('held'\) that are no slots"),
    ],
)
def test_what_cannot_take_its_step_on_rows_is_refused(make, text):
    with pytest.raises(NotImplementedError, match=text):
        sok.OptimizerWrapper(make())


def test_horovods_optimizer_around_one_of_tf1_is_refused():
    hvd = pytest.importorskip("horovod.tensorflow")
    with pytest.raises(NotImplementedError, match="an optimizer of its own in '_optimizer'"):
        sok.OptimizerWrapper(hvd.DistributedOptimizer(v1.MomentumOptimizer(0.1, 0.9)))


def test_refusing_leaves_the_optimizer_as_it_was():
    remembering = V1Remembering()
    with pytest.raises(NotImplementedError):
        sok.OptimizerWrapper(remembering)
    assert remembering.steps == {}


class Scaled(OfKeras3):
    """Its config does not have what its `__init__` sets."""

    def __init__(self, learning_rate=0.1, rho=0.9):
        super().__init__(learning_rate, rho, loss_scale_factor=4.0)

    def get_config(self):
        return {"learning_rate": 0.1, "rho": 0.9}


def test_gradients_are_unscaled_once():
    table = new_table(3, "unscaled")
    variable = tf.Variable(rows_of(table))
    ours, theirs = sok.OptimizerWrapper(Scaled()), Scaled()
    for i in range(3):
        ours.apply_gradients([(slices(some_grads(i, 3)), table)])
        theirs.apply_gradients([(tf.constant(some_grads(i, 3)), variable)])
    np.testing.assert_allclose(rows_of(table), variable, rtol=1e-5, atol=1e-5)


RATES = {"slow": 0.1, "fast": 1.0}


class ByName(k3.SGD):
    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient * RATES[variable.name.split(":")[0]])


class BuiltByName(k3.SGD):
    def build(self, variables):
        super().build(variables)
        self.rates = [RATES[variable.name] for variable in variables]

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient * self.rates[self._get_variable_index(variable)])


@pytest.mark.parametrize("make", [ByName, BuiltByName])
def test_an_optimizer_may_know_its_tables_by_name(make):
    ours = sok.OptimizerWrapper(make())
    tables = [new_table(2, "slow"), new_table(2, "fast")]
    start = [rows_of(table) for table in tables]
    halves = [slices(np.full((3, 2), 0.5))] * 2  # a table may come twice
    ours.apply_gradients([(half, table) for table in tables for half in halves])
    for table, rows, rate in zip(tables, start, (0.1, 1.0), strict=True):
        np.testing.assert_allclose(rows - rows_of(table), rate, rtol=1e-5)


class CountingByTable(k3.SGD):
    """Each table has a count, which no row has."""

    def build(self, variables):
        super().build(variables)
        self.counts = [self.add_variable(()) for _ in variables]
        self.halves = self.add_variable((), initializer="ones", dtype="bfloat16")

    def update_step(self, gradient, variable, learning_rate):
        count = self.counts[self._get_variable_index(variable)]
        self.assign_add(count, 1.0)
        self.assign_sub(variable, gradient * count)


def test_numbers_of_tables_are_restored_by_name(tmp_path):
    def new():
        return sok.OptimizerWrapper(CountingByTable()), [new_table(2, "a"), new_table(2, "b")]

    (ours, tables), (theirs, others) = new(), new()
    grads = slices(np.ones((3, 2)))
    for number, table in zip((3, 1), tables, strict=True):
        for _ in range(number):
            ours.apply_gradients([(grads, table)])
    path = tf.train.Checkpoint(tables=tables, optimizer=ours).write(str(tmp_path / "ckpt"))
    tf.train.Checkpoint(tables=others, optimizer=theirs).read(path)
    for table in others[::-1]:  # in another order than before
        before = rows_of(table)
        theirs.apply_gradients([(grads, table)])
        np.testing.assert_allclose(
            before - rows_of(table), {"a": 4, "b": 2}[table.table.name], rtol=1e-5
        )
    again = tf.train.Checkpoint(tables=others, optimizer=theirs).write(str(tmp_path / "again"))
    tf.train.Checkpoint(tables=tables, optimizer=ours).read(again)


def test_tables_that_are_gone_are_forgotten():
    ours = sok.OptimizerWrapper(CountingByTable())
    for i in range(4):
        table = new_table(2, f"passing {i}")
        ours.apply_gradients([(slices(np.ones((3, 2))), table)])
        del table
        gc.collect()
    last = new_table(2, "last")
    ours.apply_gradients([(slices(np.ones((3, 2))), last)])
    assert len(fallback_steps(settings_of(ours.optimizer, KERAS3))._known.tables) == 1


def test_an_optimizer_that_has_trained_dense_variables():
    """One of TF1 then has tensors among its attributes, which its next step makes anew."""
    inner, twin = OfV1(), Twin()
    inner.apply_gradients([(tf.ones([1, 2]), tf.Variable([[1.0, 2.0]]))])
    ours = sok.OptimizerWrapper(inner)
    table, dense = new_table(3, "second"), tf.Variable([[1.0]])
    rows = dict(zip(KEYS, rows_of(table).astype(np.float64), strict=True))
    for i in range(3):
        pairs = [(slices(some_grads(i, 3)), table), (tf.constant([[1.0]]), dense)]
        ours.apply_gradients(pairs)
        twin.step(rows, KEYS, some_grads(i, 3))
    np.testing.assert_allclose(rows_of(table), [rows[key] for key in KEYS], atol=1e-5)
    ours.apply_gradients([(slices(some_grads(9, 3)), new_table(3, "third"))])


def test_a_copy_of_a_wrapper_counts_by_itself():
    table, ours = new_table(3, "copied"), sok.OptimizerWrapper(OfV1())
    ours.apply_gradients([(slices(some_grads(0, 3)), table)])
    theirs = copy.deepcopy(ours)
    theirs.apply_gradients([(slices(some_grads(0, 3)), table)])
    theirs.apply_gradients([(slices(some_grads(0, 3)), table)])
    for wrapper, power in [(ours, 0.9), (theirs, 0.81)]:
        (value,) = wrapper._carried.values.values()
        np.testing.assert_allclose(value, power, rtol=1e-6)


def test_wrappers_of_one_optimizer_in_several_threads():
    inner = OfKeras3()
    wrappers = [sok.OptimizerWrapper(inner) for _ in range(4)]

    def work(number):
        for i in range(3):
            table = new_table(2, f"{number} {i}")
            wrappers[number].apply_gradients([(slices(np.ones((3, 2))), table)])

    run_threads(work)


def test_random_rounding_needs_a_rule():
    with pytest.raises(NotImplementedError, match="Leave out `stochastic_rounding`"):
        sok.OptimizerWrapper(OfKeras3(), stochastic_rounding=True)


def test_a_setting_may_decide_which_variables_there_are():
    class Warm(k3.SGD):
        warm = False

        def build(self, variables):
            super().build(variables)
            self.total = [self.add_variable(())] if self.warm else []

        def update_step(self, gradient, variable, learning_rate):
            for total in self.total:
                self.assign_add(total, 1.0)
            self.assign_sub(variable, gradient * (self.total[0] if self.warm else 1.0))

    inner = Warm()
    inner.warm = True
    table, ours = new_table(3, "warm"), sok.OptimizerWrapper(inner)
    before = rows_of(table)
    for _ in range(2):
        ours.apply_gradients([(slices(np.ones((3, 3))), table)])
    np.testing.assert_allclose(before - rows_of(table), 3.0, rtol=1e-6)  # 1 and 2


@pytest.mark.parametrize("num_tables", [1, 14])
def test_a_variable_of_a_round_size_is_no_state(num_tables):
    class Windowed(k3.SGD):
        def build(self, variables):
            super().build(variables)
            self.window = self.add_variable((128,))

    tables = [new_table(2, f"table {i}") for i in range(num_tables)]
    before = [rows_of(table) for table in tables]
    ours = sok.OptimizerWrapper(Windowed(1.0))
    ours.apply_gradients([(slices(np.ones((3, 2))), table) for table in tables])
    for table, rows in zip(tables, before, strict=True):
        np.testing.assert_allclose(rows - rows_of(table), 1.0, rtol=1e-6)


def test_an_attribute_that_the_config_lacks_is_followed():
    """As long as the copy can be made without it: the step is that of the optimizer as it is."""

    class Optional(k3.SGD):
        def __init__(self, learning_rate=0.1, scale=1.0, **options):
            super().__init__(learning_rate, **options)
            self.scale = scale

        def update_step(self, gradient, variable, learning_rate):
            self.assign_sub(variable, gradient * self.scale)

    table, ours = new_table(3, "optional"), sok.OptimizerWrapper(Optional(scale=3.0))
    before = rows_of(table)
    ours.apply_gradients([(slices(np.ones((3, 3))), table)])
    np.testing.assert_allclose(before - rows_of(table), 3.0, rtol=1e-6)
