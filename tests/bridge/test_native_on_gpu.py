"""Native launches on a GPU: the bits of Python, on TensorFlow's stream, and how many there are."""

import ctypes
import itertools
from functools import partial

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge import tensor
from sok_lite.bridge.table_ops import erase
from sok_lite.native import gpu
from sok_lite.native.plans import num_entries
from tests.bridge import test_native_lookup as lookups
from tests.bridge import test_native_update as updates
from tests.conftest import QUICK
from tests.support import chosen_keys
from tests.support.gpu_play import play_gpu
from tests.support.helpers import give_room
from tests.support.routes import KINDS, Route, assert_equal, both, new_variable
from tests.support.simt import device
from tests.support.simt.driver import SIGNATURES
from tests.support.table_audit import audit
from tests.support.tf_fixtures import eagerly, traced

pytestmark = pytest.mark.usefixtures("initialised")

# Which of several new keys find no room hangs on the schedule.
_WITH_ROOM = {name: kind for name, kind in KINDS.items() if not name.startswith("full")}


@pytest.fixture(params=["tensorflow", "context"])
def way(request):
    """How native launches and TensorFlow's work are in order."""
    return request.param


def make_room(table, count):
    """Lets native code insert so many keys."""
    table.reserve(count)
    table.store.reserve(count)
    give_room(table)


def play(monkeypatch, way="tensorflow"):
    """Begins a play in which TensorFlow has a stream of its own."""
    play = play_gpu(monkeypatch, streams=True)
    play.driver.record.order = gpu.WAYS.index(way) + 1
    return play


# ------------------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("seed", range(2 if QUICK else 8))
def test_drawn_lookups_have_the_bits_of_python(monkeypatch, seed):
    its = play_gpu(monkeypatch)
    monkeypatch.setattr(lookups, "KINDS", _WITH_ROOM)
    program = lookups.Program(seed, is_noted=False)
    for number in range(30 if QUICK else 60):
        program.step(number)
        its.check()
    lookups.audit_both(*program.routes)


@pytest.mark.parametrize("kind", [updates.Trained, updates.EagerWithDense, updates.EagerLocal])
@pytest.mark.parametrize("stochastic_rounding", [False, True])
def test_steps_have_the_bits_of_python(monkeypatch, kind, stochastic_rounding):
    its = play_gpu(monkeypatch)
    monkeypatch.setattr(updates, "KEY_TYPES", ("int64", "uint64"))
    adam = updates.case("Adam")
    routes = updates.two_routes(
        lambda: sok.OptimizerWrapper(
            adam.make().optimizer, stochastic_rounding=stochastic_rounding
        ),
        kind=kind,
    )
    took = [updates.train_both(routes, ids) for ids in (*updates.IDS, updates.MANY)]
    took.append(updates.train_both(routes, updates.MANY, float("nan")))
    its.check()
    # Of ids that repeat Python sums the gradients, and there is no plan before the first step, in a
    # function of each shape.
    is_native = kind is not updates.EagerLocal
    assert took == [False, *[is_native] * 3, kind is updates.EagerWithDense, is_native]
    assert_equal(*routes, numbers=False)
    updates.audit_both(*routes)
    assert len({route.optimizer.num_nonfinite for route in routes}) == 1


class Step:
    """A training step of some tables, by turns of some dtypes and kinds."""

    def __init__(self, num_tables, mode, size=8, dtypes=("float32",), kinds=("hbm",)):
        self.tables = [
            new_variable(kind, f"t{i}", 4, dtype=dtype)
            for i, dtype, kind in zip(
                range(num_tables), itertools.cycle(dtypes), itertools.cycle(kinds), strict=False
            )
        ]
        self.optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adam(0.1))
        rng = np.random.default_rng(0)
        self.ids = [tf.constant(rng.integers(0, 50, (size, 2))) for _ in self.tables]
        self.look_up = mode(lambda: sok.lookup_sparse(self.tables, self.ids))
        self.gradients = mode(self._gradients)
        self.update = mode(self._update)
        self.whole = mode(self._whole)
        self.grads = None

    def _gradients(self):
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse(self.tables, self.ids)
            loss = tf.add_n([tf.reduce_sum(tf.square(tf.cast(each, "float32"))) for each in rows])
        return tape.gradient(loss, self.tables)

    def _whole(self):
        self.grads = self._gradients()
        self._update()
        self.grads = None

    def _update(self):
        self.optimizer.apply_gradients(zip(self.grads, self.tables, strict=True))


@pytest.mark.parametrize("is_whole", [False, True])
def test_both_ways_are_in_order_with_tensorflow(monkeypatch, mode, way, is_whole):
    expected = _trained(mode, is_whole)
    its = play(monkeypatch, way)
    before = num_entries()
    rows = _trained(mode, is_whole)
    its.check()
    device.wait()
    for mine, theirs in zip(rows, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert num_entries() > before


def _trained(mode, is_whole):
    step = Step(3, mode)
    for _ in range(3):
        if is_whole:
            step.whole()
        else:
            step.grads = step.gradients()
            step.update()
    return [np.asarray(each) for each in step.look_up()]


# ------------------------------------------------------------------------------- new keys

LIMITS = np.iinfo(np.int64)


class NewKeys:
    """Calls with new keys, which repeat within a table and among calls."""

    def __init__(self, make, is_native, mode):
        self.route = Route(is_native, make)
        self.optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1))
        for each in self.route.variables:
            make_room(each.table, 400)
        self.pooled, self.local, self.update = map(mode, (self._pooled, self._local, self._update))

    def _pooled(self, ids):
        with tf.GradientTape() as tape:
            rows = _look_up(self.route.variables, ids)
            loss = tf.add_n([tf.reduce_sum(tf.square(each)) for each in rows])
        return rows, tape.gradient(loss, self.route.variables)

    def _local(self, ids):
        return self.route.variables[0].sparse_read(ids)

    def _update(self, grads):
        # A state that begins with 0.1.
        self.optimizer.apply_gradients(zip(grads, self.route.variables, strict=True))

    def run(self, ids):
        """Returns what lookups gave, as bits, and how often all but the first entered Python."""
        given, entries = [], 0
        with self.route.route():
            for number, of_tables in enumerate(ids):
                before = num_entries()
                rows, grads = self.pooled(of_tables)
                given.append([np.asarray(each).tobytes() for each in rows])
                rows = self.local(of_tables[-1] + number)
                given.append(np.asarray(rows).tobytes())
                # The first gradient has room made for its keys.
                entries += (num_entries() - before) * (number > 0)
                self.update(grads)
        return given, entries

    def state(self):
        """Returns what the tables hold and have counted, but for numbers of rows, and the seeds."""
        return [
            (state._replace(numbers=None, seed=None), counts)
            for state, counts in self.route.state()
        ]


@pytest.mark.parametrize("num_tables", [1, 26])
@pytest.mark.parametrize("kinds", [("kLru", "kEpochLfu"), ("kLfu of all", "hbm", "kCustomized")])
def test_new_keys_have_the_bits_of_python_and_of_a_cpu(monkeypatch, mode, kinds, num_tables):
    def make():
        each_kind = zip(range(num_tables), itertools.cycle(kinds), strict=False)
        return [new_variable(kind, f"t{i}") for i, kind in each_kind]

    rng = np.random.default_rng(num_tables)
    keys = np.array([LIMITS.min, LIMITS.max, LIMITS.max - 1, -1, *range(60)])
    ids = [
        [tf.constant(rng.choice(keys[: 20 * n], (10, 3))) for _ in range(num_tables + 1)]
        for n in (1, 2, 4)
    ]
    calls = [NewKeys(make, True, mode)]
    results = [calls[0].run(ids)]
    its = play(monkeypatch)
    for is_native in (True, False):
        calls.append(NewKeys(make, is_native, mode))
        results.append(calls[-1].run(ids))
        its.check()
    on_cpu, native, by_python = results
    assert native == on_cpu and native[0] == by_python[0]
    assert native[1] == 0 < by_python[1]
    assert calls[1].state() == calls[0].state()
    assert_equal(calls[1].route, calls[2].route, numbers=False)
    for each in calls[1].route.variables:
        assert each.table.counters.inserted > 20
        audit(each.table)


def _look_up(variables, ids):
    # The first table twice.
    return sok.lookup_sparse([*variables, variables[0]], ids)


@pytest.mark.parametrize("kinds", [("kLru",), ("kEpochLfu", "hbm", "kLru")], ids=", ".join)
def test_hybrid_keys_that_find_no_slot_are_taken_back_and_python_goes_on(monkeypatch, mode, kinds):
    its = play(monkeypatch)

    def make():
        variables = [new_variable(kind, f"t{i}") for i, kind in enumerate(kinds)]
        for each in variables:
            make_room(each.table, 1000)
        return variables

    routes = both(make)
    keys = chosen_keys.of_two_buckets(36, routes[0].variables[0].table.index.seed)
    keys = tf.constant(np.concatenate([np.arange(20), keys, keys[:9], np.arange(30)]))
    results, entries = [], []
    for route in routes:
        look_up = mode(partial(_look_up, route.variables))
        for ids in (tf.range(tf.constant(10, tf.int64)), keys, keys):
            before = num_entries()
            results.append(route.run(look_up, [ids] * (len(kinds) + 1)))
            entries.append(num_entries() - before)
        its.check()
    assert results[:3] == results[3:] and entries[:3] == [0, 1, 0]
    assert_equal(*routes, numbers=False)
    for each in routes[0].variables:
        audit(each.table)
        assert each.table.size == each.table.counters.inserted == 66


# ------------------------------------------------------------------------------- what is counted


def counted(call):
    before = num_entries()
    with device.counted() as counts:
        call()
    names = ("kernels", "array operations", "memsets", "waits")
    copied = ("copies to the device", "copies to the host")
    return [num_entries() - before, *(counts[name] for name in (*names, *copied))]


@pytest.mark.parametrize(
    "num_tables", [1, 26, pytest.param(300, marks=pytest.mark.full_only("long"))]
)
def test_what_a_step_of_known_keys_asks_of_a_gpu(monkeypatch, mode, num_tables):
    its = play(monkeypatch)
    step = Step(num_tables, mode)
    for _ in range(2):
        step.whole()
    # 300 tables need more launches where their arguments find no room in one.
    more = num_tables > 200
    assert counted(step.look_up) == [0, 2 + more, 0, 1, 1, 0, 1]
    # By the gradient: the rows of the batch, three for the numbers of keys, one or more for the
    # sort, offsets, sums, those of long groups, keys. By the update: rows, and the step. In a
    # function the update has the gradient's inputs: nobody counts keys, gives them, or seeks rows.
    apart, at_once = [0, 12 + 5 * more, 0, 2, 2, 0, 2], [0, 9 + 4 * more, 0, 2, 1, 0, 1]
    assert counted(step.whole) == (apart if mode is eagerly else at_once)
    its.check()


# Beside those of known keys, launches and memsets of new ones: put into slots, and the rows told,
# which a scratch hash has of hybrid tables; given initial values, pooled again.
NEW_KEYS = {("hbm",): (4, 0), ("kLru", "kEpochLfu"): (3, 1), ("hbm", "kLfu of all"): (5, 1)}


@pytest.mark.parametrize("num_tables", [1, 26])
@pytest.mark.parametrize("kinds", NEW_KEYS, ids=", ".join)
def test_what_new_keys_ask_of_a_gpu(monkeypatch, mode, kinds, num_tables):
    num_tables = max(num_tables, len(kinds))
    its = play(monkeypatch)
    step = Step(num_tables, mode, kinds=kinds)
    for each in step.tables:
        make_room(each.table, 200)
    launches, memsets = NEW_KEYS[kinds]
    assert counted(step.look_up) == [0, 2 + launches, 0, 1 + memsets, 2, 0, 2]
    assert counted(step.look_up) == [0, 2, 0, 1, 1, 0, 1]
    its.check()
    for each in step.tables:
        audit(each.table)


# ------------------------------------------------------------------ the inputs of a gradient


class StepOfRoute(updates.WithDense):
    """A step of two tables, and of a dense variable whose gradient does not read theirs."""

    def rows(self, ids):
        return sok.lookup_sparse(self.tables, [tf.cast(ids, tf.int64)] * len(self.tables))

    @property
    def tables(self):
        return self.variables

    def taped(self, ids, factor):
        with tf.GradientTape() as tape:
            rows = self.rows(ids)
            loss = tf.add_n([factor * tf.reduce_sum(tf.square(each)) for each in rows])
            loss *= self.dense
        *gradients, self.of_dense = tape.gradient(loss, [*self.variables, self.dense])
        return loss, gradients

    def apply(self, pairs):
        updates.Trained.apply(self, [*pairs, (self.of_dense, self.dense)])

    def is_fused(self):
        """Whether the update has the inputs of a gradient."""
        graph = self.function.get_concrete_function(tf.constant(updates.MANY), 1.0).graph
        (update,) = [op for op in graph.get_operations() if op.type == "SokUpdate"]
        return update.get_attr("K") > 1


class Weighted(StepOfRoute):
    def rows(self, ids):
        weights = [tf.ones_like(ids, tf.float32)] * 2
        return sok.lookup_sparse(self.tables, [tf.cast(ids, tf.int64)] * 2, sp_weights=weights)


class Means(StepOfRoute):
    def rows(self, ids):
        ids = [tf.cast(ids, tf.int64)] * 2
        return sok.lookup_sparse(self.tables, ids, combiners=["mean", "sqrtn"])


class OneTwice(StepOfRoute):
    @property
    def tables(self):
        return [*self.variables, self.variables[0]]


class SeesUpdates(StepOfRoute):
    """Python takes the steps of a table whose updates count as lookups."""

    @property
    def tables(self):
        self.variables[1].table.sees_updates = True
        return self.variables


class UnderControl(StepOfRoute):
    def taped(self, ids, factor):
        with tf.GradientTape() as tape:
            rows = self.rows(ids)
        grads = [2 * factor * self.dense * each for each in rows]
        loss = self.of_dense = factor * tf.add_n([tf.reduce_sum(tf.square(each)) for each in rows])
        with tf.control_dependencies([tf.debugging.assert_positive(factor)]):
            return loss * self.dense, tape.gradient(rows, self.variables, grads)


class ReadAfter(StepOfRoute):
    def step(self, ids, factor):
        super().step(ids, factor)
        return tf.add_n([tf.reduce_sum(grad.values) for grad, _ in self.pairs])

    def change(self, pairs):
        self.pairs = pairs
        return pairs


class Erased(StepOfRoute):
    """A key that was looked up has no row when its step is taken."""

    def change(self, pairs):
        with tf.control_dependencies([self.of_dense]):
            erase(self.variables[1], tf.constant([1], tf.int64))
        return pairs


def _read_before(_, pairs):
    with tf.control_dependencies([tf.debugging.assert_all_finite(pairs[0][0].values, "")]):
        return [*pairs]


def _swapped(_, pairs):
    grads, variables = zip(*pairs, strict=True)
    return [*zip(grads, variables[::-1], strict=True)]


def changing(change):
    return type("Changed", (StepOfRoute,), {"change": change})


# What a program does with gradients: whether the update takes their inputs, and native code then.
WHOLE = {
    "whole": (StepOfRoute, True, True),
    "whole, of means": (Means, True, True),
    "in another order": (changing(lambda _, pairs: pairs[::-1]), True, True),
    "read by others later": (ReadAfter, True, True),
    "a lookup between": (changing(updates.after_a_lookup), True, False),
    "a key erased between": (Erased, True, False),
    "read by others before": (changing(_read_before), False, True),
    "clipped": (changing(updates.BETWEEN["clipping"][1]), False, True),
    "other keys": (changing(updates.BETWEEN["other keys"][1]), False, False),
    "of each other": (changing(_swapped), True, False),
    "of one table": (changing(lambda _, pairs: pairs[:1]), False, True),
    "each twice": (changing(lambda _, pairs: [*pairs, *pairs]), False, False),
    "a table twice": (OneTwice, False, False),
    "updates that count": (SeesUpdates, False, False),
    "weights": (Weighted, False, True),
    "a control input": (UnderControl, False, True),
}


@pytest.mark.cases("name")
@pytest.mark.parametrize("name", WHOLE)
def test_an_update_takes_the_inputs_of_a_gradient_that_is_whole(monkeypatch, name):
    kind, is_fused, is_native = WHOLE[name]

    def make():
        return [new_variable(each, f"t{i}", 4) for i, each in enumerate(("hbm", "kLfu of all"))]

    batches = [*updates.IDS, *[updates.MANY] * 3]
    on_cpu, _ = updates.two_routes(updates.adam, make, kind)
    losses = [on_cpu.train(ids, 0.01)[0] for ids in batches]
    assert not on_cpu.is_fused()
    its = play(monkeypatch)
    routes = updates.two_routes(updates.adam, make, kind)
    for route in routes:
        for each in route.variables:
            make_room(each.table, 400)
    took = []
    for ids, expected in zip(batches, losses, strict=True):
        before = routes[0].num_native
        assert [route.train(ids, 0.01)[0] for route in routes] == [expected] * 2
        took.append(routes[0].num_native > before)
        its.check()
    device.wait()
    assert [route.is_fused() for route in routes] == [is_fused] * 2
    # The first step of each shape is Python's.
    assert took == [False, *[is_native] * 3, False, *[is_native] * 2]
    assert_equal(*routes, numbers=False)
    updates.audit_both(*routes)
    for mine, theirs in zip(routes[0].variables, on_cpu.variables, strict=True):
        keys = np.arange(12)
        rows = [each.table.lookup(keys, insert=False)[0] for each in (mine, theirs)]
        np.testing.assert_array_equal(its.backend.to_host(rows[0]), rows[1])


def test_new_keys_of_a_step_do_not_enter_python(monkeypatch):
    its = play(monkeypatch)
    step = Step(2, traced, kinds=("hbm", "kLru"))
    for each in step.tables:
        make_room(each.table, 400)
    step.optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.5))
    numbers = tf.Variable(0, dtype=tf.int64)

    @tf.function
    def take():
        step.ids = [tf.range(8, dtype=tf.int64)[:, None] + numbers] * 2
        step.grads = step._gradients()
        step._update()
        numbers.assign_add(4)

    asked = [counted(take) for _ in range(3)]
    its.check()
    launches, memsets = 4, 1
    assert asked[1:] == [[0, 9 + launches, 0, 2 + memsets, 2, 0, 2]] * 2
    for each in step.tables:
        audit(each.table)
        assert each.table.size == 16


def test_a_gradient_of_a_session_may_be_fed(monkeypatch):
    its = play(monkeypatch)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variable = new_variable("hbm", dim=4, first=1.0)
        ids = tf.constant([[1], [2]], tf.int64)
        (rows,) = sok.lookup_sparse([variable], [ids])
        (grad,) = tf.compat.v1.gradients(tf.reduce_sum(rows), [variable])
        optimizer = tf.compat.v1.train.GradientDescentOptimizer(0.5)
        step = sok.OptimizerWrapper(optimizer).apply_gradients([(grad, variable)])
        session.run(tf.compat.v1.global_variables_initializer())
        for _ in range(3):
            session.run(step, {grad.values: np.full((2, 4), 0.25, np.float32)})
        session.run(step)
        its.check()
        rows = its.backend.to_host(variable.table.lookup([1, 2], insert=False)[0])
    np.testing.assert_array_equal(rows, np.full((2, 4), 1 - 3 * 0.125 - 0.5))


def test_gradients_that_were_changed_are_compared(monkeypatch, mode):
    its = play(monkeypatch)
    step = Step(2, mode)
    for _ in range(3):
        step.grads = [
            tf.IndexedSlices(2.0 * each.values, tf.identity(each.indices))
            for each in step.gradients()
        ]
        asked = counted(step.update)
    its.check()
    assert asked == [0, 2, 0, 1, 1, 0, 1]


# ------------------------------------------------------------------------------- what goes wrong


def test_what_python_has_updated_is_not_kept_once_native_code_goes_on(monkeypatch, mode):
    its = play_gpu(monkeypatch)
    step = Step(2, mode)
    for _ in range(4):
        step.whole()
    its.check()
    assert not tensor._left_behind.get(its.backend.device_id)


def replace(its, name, types, result, function):
    """Has native code call another function of the driver. It has a copy for each backend."""
    its.driver._set(name, result, types, function)
    setattr(gpu.record_of(its.backend), name, getattr(its.driver.record, name))


def fail(its, name, fails):
    """Has a call of the driver fail where `fails` of its number and its arguments says so.

    Returns the list of the numbers of its calls.
    """
    works, calls = getattr(its.driver, f"_{name}"), []

    def call(*arguments):
        calls.append(len(calls) + 1)
        if fails(calls[-1], arguments):
            raise RuntimeError("a failure of the test's own")
        return works(*arguments)

    replace(its, name, SIGNATURES[name], ctypes.c_int, call)
    return calls


def test_an_update_that_fails_halfway_is_an_error(monkeypatch, mode):
    """Python would take the step of the first rows again."""
    its = play_gpu(monkeypatch)
    step, updates_of_step = Step(2, mode, dtypes=("float32", "float16")), []  # a kernel for each
    for _ in range(2):
        step.whole()

    def is_second_update(_, arguments):
        name = its.driver._kernel(arguments[0])[0].name
        updates_of_step.extend([name] * name.startswith("update_adam"))
        return len(updates_of_step) == 2

    fail(its, "launch", is_second_update)
    with pytest.raises(Exception, match="in the midst of an update"):
        step.whole()
    assert its.driver.errors.pop()


@pytest.mark.cases("name")
@pytest.mark.parametrize("name", ["launch", "fill", "copy_to_host", "synchronize", "record"])
def test_a_call_of_the_driver_that_fails_is_python_s(monkeypatch, mode, name):
    expected = _trained(mode, is_whole=False)
    its = play(monkeypatch)
    monkeypatch.setattr(its, "check", lambda: None)
    calls = fail(its, name, lambda number, _: number % 3 == 0)
    for mine, theirs in zip(_trained(mode, is_whole=False), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert len(calls) > 3


@pytest.mark.cases("name")
@pytest.mark.parametrize(
    ("name", "number"),
    [*[("launch", number) for number in range(3, 10)], ("fill", 2)]
    + [("wait", number) for number in (3, 4)],
)
def test_a_step_amid_which_the_driver_fails_is_python_s(monkeypatch, name, number):
    """By the update, after the launches of the lookup."""
    expected = _trained(traced, is_whole=True)
    its = play(monkeypatch)
    step = Step(3, traced)
    for _ in range(2):
        step.whole()
    its.check()
    monkeypatch.setattr(its, "check", lambda: None)
    before = num_entries()
    calls = fail(its, name, lambda call, _: call == number)
    step.whole()
    assert len(calls) >= number and its.driver.errors
    assert num_entries() == before + (name != "wait" or number == 3)
    for mine, theirs in zip(step.look_up(), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.cases("name")
@pytest.mark.parametrize("kinds", [("hbm", "hbm"), ("kLru", "hbm")], ids=", ".join)
@pytest.mark.parametrize(
    ("name", "number"),
    [*[("launch", number) for number in range(1, 9)], *[("copy_to_host", n) for n in (1, 2)]]
    + [("record", n) for n in (1, 2, 3)]
    + [("fill", n) for n in (1, 2)],
)
def test_new_keys_amid_which_the_driver_fails_are_taken_back(monkeypatch, kinds, name, number):
    its = play(monkeypatch)
    monkeypatch.setattr(its, "check", lambda: None)
    tables = [new_variable(kind, f"t{i}", 4) for i, kind in enumerate(kinds)]
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.Adagrad(0.1))
    for each in tables:
        make_room(each.table, 200)

    def look_up(*keys):
        ids = [tf.constant(each, tf.int64) for each in keys]
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse(tables, ids)
            grads = tape.gradient(tf.add_n([tf.reduce_sum(each) for each in rows]), tables)
        return rows, grads

    _, grads = look_up([1, 2, 3], [1, 2, 3])
    optimizer.apply_gradients(zip(grads, tables, strict=True))  # a state that begins with 0.1
    calls = fail(its, name, lambda call, _: call == number)
    keys = [4, 5, 2, 4, *2 * tables[0].table.index.reserved_keys()], [1, 2, 3, 9]
    rows, _ = look_up(*keys)
    assert len(calls) >= number
    again, _ = look_up(*keys)
    for mine, theirs in zip(rows, again, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    look_up([7, 8, 9, 4], [7, 8, 9, 9])
    device.wait()
    for each, count in zip(tables, (10, 6), strict=True):
        audit(each.table)
        assert each.table.size == each.table.counters.inserted == count


@pytest.mark.parametrize("kinds", [("hbm",), ("kLru", "hbm")], ids=", ".join)
def test_launches_of_many_tables_of_which_a_later_one_fails_are_taken_back(monkeypatch, kinds):
    its = play(monkeypatch)
    monkeypatch.setattr(its.backend._binaries, "has_wide", False)
    monkeypatch.setattr(its, "check", lambda: None)
    each_kind = zip(range(50), itertools.cycle(kinds), strict=False)
    tables = [new_variable(kind, f"t{i}", 4) for i, kind in each_kind]
    for each in tables:
        make_room(each.table, 100)
    rng = np.random.default_rng(0)
    ids = [tf.constant(rng.integers(0, 12, (5, 2))) for _ in tables]
    sok.lookup_sparse(tables, ids[::-1])
    note, inserting = its.driver._note, []

    def spoil(address, num_bytes, is_input):
        if num_bytes and not is_input:
            ctypes.memset(address, 0xDB, num_bytes)
        note(address, num_bytes, bool(is_input))

    replace(its, "note", (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64), None, spoil)

    def is_second(_, arguments):
        inserting.append(its.driver._kernel(arguments[0])[0].name == "det_insert_items")
        return inserting[-1] and sum(inserting) == 2

    fail(its, "launch", is_second)
    rows = sok.lookup_sparse(tables, ids)
    assert sum(inserting) >= 2
    for mine, theirs in zip(rows, sok.lookup_sparse(tables, ids), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    device.wait()
    for each, first, then in zip(tables, ids[::-1], ids, strict=True):
        audit(each.table)
        assert each.table.size == np.unique(np.concatenate([first, then])).size


# ------------------------------------------------------------------------------- which way


@pytest.fixture
def choosing(monkeypatch):
    """A machine whose ways a test says: of each a record, or what it raises."""
    ways = {"tensorflow": gpu.GpuRecord(), "context": gpu.GpuRecord(), "python": None}

    def opening(way):
        def open_it(_):
            if isinstance(ways[way], Exception):
                raise ways[way]
            return ways[way]

        return open_it

    monkeypatch.setattr(gpu, "_OPENING", {way: opening(way) for way in gpu.WAYS})
    monkeypatch.setattr(gpu, "reasons", {})
    monkeypatch.setattr(gpu, "chosen", None)
    monkeypatch.delenv("SOK_LITE_GPU_STREAM", raising=False)
    return ways


def test_the_first_way_is_taken_or_else_the_last_or_the_one_that_is_asked_for(
    choosing, monkeypatch
):
    assert gpu.open_gpu(None) is choosing["tensorflow"] and gpu.chosen == "tensorflow"
    choosing["tensorflow"] = RuntimeError("")
    assert gpu.open_gpu(None) is None
    assert (gpu.chosen, gpu.reasons) == ("python", {"tensorflow": "RuntimeError('')"})
    choosing["tensorflow"] = gpu.GpuRecord()
    gpu.reasons["locks"] = "no kernels"
    assert gpu.open_gpu(None) is None and gpu.reasons["tensorflow"] == "no kernels"
    gpu.reasons.clear()
    monkeypatch.setenv("SOK_LITE_GPU_STREAM", "python")
    assert gpu.open_gpu(None) is None and gpu.chosen == "python"
    monkeypatch.setenv("SOK_LITE_GPU_STREAM", "context")
    assert gpu.open_gpu(None) is choosing["context"]
    choosing["tensorflow"] = RuntimeError("no compiler")
    monkeypatch.setenv("SOK_LITE_GPU_STREAM", "tensorflow")
    with pytest.warns(UserWarning, match="tensorflow is not possible.*no compiler. Python"):
        assert gpu.open_gpu(None) is None
    monkeypatch.setenv("SOK_LITE_GPU_STREAM", "null")
    text = "must be one of tensorflow, context, python. Received: 'nu"
    with pytest.raises(ValueError, match=text):
        gpu.open_gpu(None)


def test_without_a_driver_of_cuda_python_launches(monkeypatch):
    monkeypatch.setattr(gpu, "reasons", {})
    monkeypatch.setattr(gpu, "chosen", None)
    monkeypatch.delenv("SOK_LITE_GPU_STREAM", raising=False)
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        assert gpu.open_gpu(None) is None
        assert "libcuda.so.1" in gpu.reasons["tensorflow"] and gpu.chosen == "python"
