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


class Scaled(OfKeras3):
    """Its config does not have what its `__init__` sets."""

    def __init__(self, learning_rate=0.1, rho=0.9):
        super().__init__(learning_rate, rho, loss_scale_factor=4.0)

    def get_config(self):
        return {"learning_rate": 0.1, "rho": 0.9}


def halving(base, **options):
    """Makes an optimizer of a class that changes the step of another one."""
    is_old = base.__module__.startswith(("tensorflow", "tf_keras.src.optimizers.legacy"))
    name = "_resource_apply_dense" if is_old else "update_step"

    def halved(self, gradient, *rest, **more):
        return getattr(super(Mine, self), name)(tf.sign(gradient) * 0.5, *rest, **more)

    Mine = type("Mine", (base,), {name: halved})
    return lambda: Mine(0.1, **options)


def decaying(make, package):
    rate = package.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5)
    return lambda: make(rate, weight_decay=0.1)


BEGUN = {"initial_accumulator_value": 0.5}
MAKES = {
    **{make.__name__: make for make in ALL},
    # Gradients are clipped and unscaled once: by the wrapper, of all variables, not by the copy.
    **{
        f"{make.__name__} {limit}": lambda make=make, limit=limit: make(**{limit: 0.5})
        for make in (OfKeras3, OfTfKeras, OfLegacy)
        for limit in ("clipvalue", "clipnorm", "global_clipnorm")
    },
    "unscaled": Scaled,
    "schedule of Keras 3": decaying(OfKeras3, keras),
    "schedule of tf_keras": decaying(OfTfKeras, tf_keras),
    # A state begins as the optimizer makes it.
    "halved Keras 3": halving(k3.Adagrad, **BEGUN),
    "halved tf_keras": halving(new.Adagrad, **BEGUN),
    "halved legacy": halving(legacy.Adagrad, **BEGUN),
    "halved TF1": halving(v1.AdamOptimizer),
}


# Limits, rates and states of the others are read, and gradients clipped, before any table has its
# step: on the host, or by operations that are the same for every family.
ON_GPU = [*(make.__name__ for make in ALL), "unscaled", "schedule of tf_keras", "halved TF1"]
ON_GPU.append("halved Keras 3")  # with a state that does not begin at 0
ON_GPU += [name for name in MAKES if name.startswith("OfTfKeras ")]


@pytest.mark.parametrize("make", [MAKES[name] for name in ON_GPU], ids=ON_GPU)
def test_rows_move_as_dense_variables_do(make, mode):
    """Two tables, one of which does not decay, and a dense variable."""
    assert_rows_move_as_dense_variables_do(make, mode)


@pytest.mark.parametrize("name", [name for name in MAKES if name not in ON_GPU])
def test_rows_move_as_dense_variables_do_whatever_is_set(name, mode):
    assert_rows_move_as_dense_variables_do(MAKES[name], mode)


def assert_rows_move_as_dense_variables_do(make, mode):
    tables = [new_table(4, "a"), new_table(3, "b")]
    dense = tf.Variable([[1.0, 2.0]])
    inner, theirs = make(), make()
    is_new = isinstance(inner, k3.Optimizer)
    of_framework = keras.Variable if is_new else tf.Variable
    variables = [of_framework(each) for each in [*map(rows_of, tables), dense.numpy()]]
    if getattr(inner, "weight_decay", None):
        for optimizer, last in ((inner, tables[1]), (theirs, variables[1])):
            optimizer.exclude_from_weight_decay(var_list=[last])
    ours = sok.OptimizerWrapper(inner)

    @mode
    def step(a, b, grad):
        # The same gradient in two halves: repeated keys are summed.
        halves = slices(tf.concat([a * 0.25, a * 0.75], 0), KEYS * 2)
        ours.apply_gradients([(halves, tables[0]), (grad, dense), (slices(b), tables[1])])

    for i in range(10):
        grads = [some_grads(i, 4), some_grads(i + 50, 3), some_grads(i + 100, 2, 1)]
        step(*map(tf.constant, grads))
        theirs.apply_gradients(zip(map(tf.constant, grads), variables, strict=True))
    for found, variable in zip([*map(rows_of, tables), dense], variables, strict=True):
        np.testing.assert_allclose(found, variable.numpy(), rtol=1e-5, atol=1e-5)
    assert ours.iterations == 10


@every
def test_rows_and_states_follow_the_twin(make, mode):
    """Some rows in a step, or none; of 16 bits; settings that change between steps."""
    keys = np.arange(20) * 1009 - 7
    dtypes = {tf.float32: 1e-5, tf.bfloat16: 6e-2}
    tables = [new_table(3, dtype.name, dtype=dtype) for dtype in dtypes]
    rows = [
        dict(zip(keys.tolist(), tf.cast(rows_of(table, keys), tf.float64).numpy(), strict=True))
        for table in tables
    ]
    inner, twins = make(), [Twin() for _ in tables]
    ours, rng = sok.OptimizerWrapper(inner), np.random.default_rng(0)

    def step(touched, grads):
        ours.apply_gradients([(tf.IndexedSlices(grads, touched), table) for table in tables])

    changes = mode.__name__ == "eagerly"
    names = ("_lr", "_rho") if make is OfV1 else ("learning_rate", "rho")
    step = mode(step)
    for i in range(8):
        rate, rho = (0.1 / (1 + i % 3), 0.9 - 0.1 * (i % 3)) if changes else (0.1, 0.9)
        if changes:
            setattr(inner, names[0], rate)
            setattr(inner, names[1], rho)
        touched = rng.choice(keys, 0 if i == 3 else 7, replace=False)
        grads = some_grads(i, 3, len(touched))
        step(tf.constant(touched), tf.constant(grads))
        for twin, of_table in zip(twins, rows, strict=True):
            twin.rho = rho
            twin.step(of_table, touched.tolist(), grads, rate)
    for table, of_table, within in zip(tables, rows, dtypes.values(), strict=True):
        found = tf.cast(rows_of(table, keys), tf.float64)
        np.testing.assert_allclose(found, [of_table[k] for k in keys.tolist()], atol=within)
    slot = ours.get_slot(tables[0], "mom")
    held = dict(zip(*(part.numpy().tolist() for part in slot.export()), strict=True))
    for key, row in twins[0].m.items():
        np.testing.assert_allclose(held[key], row, rtol=1e-5, atol=1e-5)


@every
def test_tables_come_in_any_steps_and_numbers_go_on(make, tmp_path):
    """A table that is not in a step keeps its states, a new one begins with its own, a copy of the
    wrapper and one that reads a checkpoint go on."""

    def made():
        tables = {name: new_table(dim, name) for name, dim in [("a", 4), ("b", 3), ("c", 4)]}
        return tables, sok.OptimizerWrapper(make())

    tables, ours = made()
    variables = {name: tf.Variable(rows_of(table)) for name, table in tables.items()}
    theirs = make()
    if make is not OfV1 and make is not OfLegacy:  # built once, for all
        theirs.build(list(variables.values()))
    if make is OfV1:
        theirs._create_slots(list(variables.values()))
    # tf_keras' counts by all variables that it was built with.
    for i, names in enumerate(["a", "ab", "b", "cab", "c", "ac"]):
        if i == 3:
            path = tf.train.Checkpoint(optimizer=ours, **tables).write(str(tmp_path / "ckpt"))
            if make is OfV1:  # those of Keras are no attributes that can be copied
                copy.deepcopy(ours).apply_gradients([(slices(np.ones([3, 2])), new_table(2, "d"))])
            tables, ours = made()
            tf.train.Checkpoint(optimizer=ours, **tables).read(path)
        grads = {name: some_grads(i, tables[name].dimension) for name in names}
        ours.apply_gradients([(slices(grads[name]), tables[name]) for name in names])
        theirs.apply_gradients([(tf.constant(grads[name]), variables[name]) for name in names])
    for name, table in tables.items():
        np.testing.assert_allclose(rows_of(table), variables[name], rtol=1e-5, atol=1e-5)


def test_in_a_tf1_session():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        table = new_table(3, "tf1")
        start = tf.nn.embedding_lookup(table, tf.constant(KEYS, tf.int64))
        rate = tf.compat.v1.placeholder(tf.float32, [])
        rho = tf.compat.v1.get_variable("rho", initializer=0.9, use_resource=True)
        grads = tf.compat.v1.placeholder(tf.float32, [3, 3])
        train = sok.OptimizerWrapper(OfV1(rate, rho)).apply_gradients([(slices(grads), table)])
        session.run(tf.compat.v1.global_variables_initializer())
        found = session.run(start).astype(np.float64)
        rows, twin = dict(zip(KEYS, found, strict=True)), Twin()
        for i in range(5):
            session.run(train, {grads: some_grads(i, 3), rate: 0.1 * (i + 1)})
            twin.step(rows, KEYS, some_grads(i, 3), 0.1 * (i + 1))
        np.testing.assert_allclose(session.run(start), [rows[k] for k in KEYS], atol=1e-5)


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


# ---- failures and refusals -----------------------------------------------------------------------


def with_step(base=k3.SGD, init=None, build=None, **methods):
    """A class whose `update_step` and others are functions; `init`, `build`: after the base's."""
    name = methods.pop("name", "Mine")

    def made_with(self, *args, **options):
        base.__init__(self, *args, **options)
        if init is not None:
            init(self)

    def built(self, variables):
        base.build(self, variables)
        build(self, variables)

    more = {"__init__": made_with} | ({} if build is None else {"build": built})
    return type(name, (base,), {**more, **methods})


def move(self, variable, by):
    self.assign_sub(variable, by)


def counted(self, gradient, variable, learning_rate):
    self.steps += 1
    move(self, variable, gradient * self.steps)


def tensor_counted(self, grads, variables=None):
    """Its number is a tensor from the first step on, and counts from the third."""
    self.steps = self.steps + tf.constant(1.0)
    factor = tf.maximum(1.0, self.steps - 2.0)
    k3.SGD.apply(self, [grad * factor for grad in grads], variables)


def late(self, gradient, variable, learning_rate):
    self.late = self.add_variable(variable.shape)
    move(self, variable, gradient + self.late)


def noisy(self, gradient, variable, learning_rate):
    move(self, variable, gradient + keras.random.normal(gradient.shape, seed=self.draws))


def fail(self, gradient, variable, learning_rate):
    raise ArithmeticError("never")


def flattened(self, gradient, variable, learning_rate):
    """A momentum of all elements in one vector: which row an element is of nobody knows."""
    flat = self.flat[self._get_variable_index(variable)]
    self.assign(flat, 0.9 * flat + keras.ops.reshape(gradient, (-1,)))
    move(self, variable, keras.ops.reshape(flat, variable.shape))


def kept(**attributes):
    return lambda self: [setattr(self, *each) for each in attributes.items()]


class Unlisted(k3.SGD):
    def __init__(self, scale, **options):
        super().__init__(0.1, **options)
        self.scale = scale

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient * self.scale)


class V1Remembering(v1.GradientDescentOptimizer):
    def __init__(self):
        super().__init__(0.1)
        self.steps = {}

    def _resource_apply_dense(self, grad, handle):
        self.steps[handle.name] = self.steps.get(handle.name, 0) + 1
        return handle.assign_sub(grad * self.steps[handle.name])


class Nameless(keras.optimizers.schedules.LearningRateSchedule):
    def __call__(self, step):
        return 0.1


def holding():
    def of_dense(self, grad, handle):
        return handle.assign_sub(grad * self.held[0])

    made = type("Holding", (v1.GradientDescentOptimizer,), {"_resource_apply_dense": of_dense})(0.1)
    made.held = [tf.Variable(1.0)]
    return made


def of_horovod():
    hvd = pytest.importorskip("horovod.tensorflow")
    return hvd.DistributedOptimizer(v1.MomentumOptimizer(0.1, 0.9))


def drawn(self, variables):
    self.ms = [self.add_variable(v.shape, initializer="random_normal") for v in variables]


def wide(self, variables):
    self.wide = [self.add_variable(v.shape, dtype="float64", name="wide") for v in variables]


def flat(self, variables):
    self.flat = [self.add_variable((v.shape[0] * v.shape[1],)) for v in variables]


IN_NO_VARIABLE = "is in no variable among its attributes"
INNER = {"fast": [k3.SGD(0.1, momentum=0.9)]}


@pytest.mark.cases("make")
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Unlisted(2.0), r"from_config\(get_config\(\)\) raises TypeError"),
        (
            with_step(init=kept(steps=0), update_step=counted),
            "attribute 'steps' changes in a step and is no",
        ),
        (with_step(init=kept(steps=0.0), apply=tensor_counted), "is in no variable"),
        (with_step(update_step=late), "it makes variables .* while it takes the step"),
        (with_step(OfKeras3, build=drawn), "does not begin with the same number in all rows"),
        (with_step(OfKeras3, build=wide), "its state 'wide' is float64"),
        (with_step(update_step=fail), r"on dense variables raises ArithmeticError\('never'\)"),
        # It would be trained by the trial.
        (
            with_step(init=kept(inner=INNER), update_step=fail),
            "an optimizer of its own in 'inner'. Wrap that one",
        ),
        (of_horovod, "an optimizer of its own in '_optimizer'"),
        # Each copy would draw the same.
        (
            with_step(
                init=lambda self: kept(draws=keras.random.SeedGenerator(3))(self), update_step=noisy
            ),
            IN_NO_VARIABLE,
        ),
        (V1Remembering, IN_NO_VARIABLE),
        (
            with_step(build=flat, update_step=flattened),
            "the size of its variable in 'flat' depends on the number of rows",
        ),
        (
            lambda: with_step(OfKeras3, _clip_gradients=lambda self, grads: grads, name="Clipping")(
                clipnorm=1.0
            ),
            "Clipping clips in a way of its own",
        ),
        (lambda: OfKeras3(Nameless()), "A schedule of your own needs a get_config too"),
        (
            with_step(GroupAdam, update_step=fail),
            "changes GroupAdam, whose penalties only the update rule of rows has",
        ),
        (holding, r"it has variables \('held'\) that are no slots"),
    ],
)
def test_what_cannot_take_its_step_on_rows_is_refused(make, text):
    inner = make()
    steps = copy.copy(getattr(inner, "steps", None))
    with pytest.raises(NotImplementedError, match=text):
        sok.OptimizerWrapper(inner)
    assert getattr(inner, "steps", None) == steps
    with pytest.raises(NotImplementedError, match="Leave out `stochastic_rounding`"):
        sok.OptimizerWrapper(OfKeras3(), stochastic_rounding=True)


RATES = {"slow": 0.1, "fast": 1.0}


def by_name(self, gradient, variable, learning_rate):
    move(self, variable, gradient * RATES[variable.name.split(":")[0]])


def with_rates(self, variables):
    self.rates = [RATES[variable.name] for variable in variables]


def by_rate(self, gradient, variable, learning_rate):
    move(self, variable, gradient * self.rates[self._get_variable_index(variable)])


def of_tf_keras(self, gradient, variable):
    variable.assign_sub(gradient * RATES[variable.name.split(":")[0]])


@pytest.mark.parametrize(
    "make",
    [
        with_step(update_step=by_name),
        with_step(build=with_rates, update_step=by_rate),
        with_step(new.SGD, update_step=of_tf_keras),
    ],
    ids=["in a step", "when built", "tf_keras"],
)
def test_an_optimizer_may_know_its_tables_by_name(make):
    ours = sok.OptimizerWrapper(make())
    tables = [new_table(2, "slow"), new_table(2, "fast")]
    start = [rows_of(table) for table in tables]
    halves = [slices(np.full((3, 2), 0.5))] * 2  # a table may come twice
    ours.apply_gradients([(half, table) for table in tables for half in halves])
    for table, rows, rate in zip(tables, start, (0.1, 1.0), strict=True):
        np.testing.assert_allclose(rows - rows_of(table), rate, rtol=1e-5)


def warm(self, variables):
    self.total = [self.add_variable(())] if self.warm else []


def warmed(self, gradient, variable, learning_rate):
    for total in self.total:
        self.assign_add(total, 1.0)
    move(self, variable, gradient * (self.total[0] if self.warm else 1.0))


def scaled(self, gradient, variable, learning_rate):
    move(self, variable, gradient * self.scale)


def window(self, variables):
    self.window = self.add_variable((128,))


def test_settings_that_the_config_lacks_and_sizes_that_are_no_rows_are_followed():
    """As long as the copy can be made without them: the step is that of the optimizer as it is."""
    # A setting may decide which variables there are; one of a round size is no state.
    makes = [with_step(warm=False, build=warm, update_step=warmed), 2, {"warm": True}, 3.0]
    others = [with_step(scale=1.0, update_step=scaled), 1, {"scale": 3.0}, 3.0]
    for make, num_steps, attributes, moved in (makes, others):
        inner = make()
        kept(**attributes)(inner)
        table, ours = new_table(3, "set"), sok.OptimizerWrapper(inner)
        before = rows_of(table)
        for _ in range(num_steps):
            ours.apply_gradients([(slices(np.ones((3, 3))), table)])
        np.testing.assert_allclose(before - rows_of(table), moved, rtol=1e-6)
    for num_tables in (1, 14):
        tables = [new_table(2, f"table {i}") for i in range(num_tables)]
        before = [rows_of(table) for table in tables]
        ours = sok.OptimizerWrapper(with_step(build=window)(1.0))
        ours.apply_gradients([(slices(np.ones((3, 2))), table) for table in tables])
        for table, rows in zip(tables, before, strict=True):
            np.testing.assert_allclose(rows - rows_of(table), 1.0, rtol=1e-6)


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


def test_wrappers_of_one_optimizer_in_several_threads():
    inner = OfKeras3()
    wrappers = [sok.OptimizerWrapper(inner) for _ in range(4)]

    def work(number):
        for i in range(3):
            pair = slices(np.ones((3, 2))), new_table(2, f"{number} {i}")
            wrappers[number].apply_gradients([pair])

    run_threads(work)
