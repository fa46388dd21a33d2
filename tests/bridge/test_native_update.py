"""Steps of optimizers in functions by native code and by Python: the same bits.

Native code leaves all to Python where `record.allows` is 0.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.bridge.optimizers import host
from sok_lite.engine.work_counters import UPDATES
from sok_lite.native.plans import num_entries
from tests.conftest import QUICK
from tests.support.optimizer_cases import CASES, Case
from tests.support.routes import FLOATS, FULL, KINDS, Route, assert_equal, audit_both, new_variable
from tests.support.table_audit import audit
from tests.support.table_state import State

tf_keras = pytest.importorskip("tf_keras")

pytestmark = pytest.mark.usefixtures("initialised")

KEY_TYPES = ("int64", "int32", "uint64")
IDS = [[[3, 1], [3, 9]], [[1, 1], [9, 3]], [[9, 9], [3, 3]], [[1, 3], [9, 1]]]


def new_tables(dtypes=FLOATS, kinds=("hbm", "kLfu of all"), dims=(3, 8)):
    """Returns variables of all types of rows, kinds and lengths of rows, in turns."""
    parts = zip(dtypes, itertools.cycle(kinds), itertools.cycle(dims), itertools.cycle(KEY_TYPES))
    return [
        new_variable(kind, f"t{i}", dim, key_type, dtype)
        for i, (dtype, kind, dim, key_type) in enumerate(parts)
    ]


class Trained(Route):
    """Tables that a function trains, all in one call.

    Args:
      optimizer: a wrapper of its own.
      arguments: of `apply_gradients`.
      make, is_native: as of Route.
    """

    def __init__(self, is_native, make, optimizer, **arguments):
        super().__init__(is_native, make)
        self.optimizer = optimizer
        self.function = self.compiled(self.step)
        self.arguments = arguments
        self.num_native = 0  # steps that native code took

    def compiled(self, step):
        return tf.function(step, autograph=False)

    def rows(self, ids):
        ids = [tf.cast(ids, variable.key_type) for variable in self.variables]
        return sok.lookup_sparse(self.variables, ids, combiners=["sum"] * len(ids))

    def taped(self, ids, factor):
        with tf.GradientTape() as tape:
            rows = [tf.cast(each, tf.float32) for each in self.rows(ids)]
            loss = tf.add_n([factor * tf.reduce_sum(tf.square(each)) for each in rows])
        return loss, tape.gradient(loss, self.variables)

    def step(self, ids, factor):
        loss, gradients = self.taped(ids, factor)
        self.apply(self.change(list(zip(gradients, self.variables, strict=True))))
        return loss

    def change(self, pairs):
        return pairs

    def apply(self, pairs):
        self.optimizer.apply_gradients(pairs, **self.arguments)

    def gradients(self, ids):
        """Returns the gradients of a batch, whose step is still to be taken."""
        with self.route():
            return self.taped(tf.constant(ids), 1.0)[1]

    def train(self, ids, factor=1.0):
        """Takes a step; returns the loss, and how often Python was entered."""
        before, entries = UPDATES.native[0], num_entries()
        with self.route():
            loss = self.function(tf.constant(ids), tf.constant(factor))
        self.num_native += UPDATES.native[0] - before
        return float(loss), num_entries() - entries


class Eager(Trained):
    """All that in eager mode."""

    def compiled(self, step):
        return step


class WithDense(Trained):
    """A dense variable is trained in the same call."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.dense = tf.Variable(1.0)
        if hasattr(self.optimizer.optimizer, "build"):
            self.optimizer.optimizer.build([self.dense])

    def apply(self, pairs):
        of_dense = tf.add_n([tf.reduce_sum(grad.values) for grad, _ in pairs])
        super().apply([*pairs, (of_dense, self.dense)])


class EagerWithDense(Eager, WithDense):
    """Both."""


class Local(Trained):
    """Gradients have the ids of the batch, which repeat."""

    def rows(self, ids):
        keys = [tf.cast(ids, variable.key_type) for variable in self.variables]
        pairs = zip(self.variables, keys, strict=True)
        return [
            tf.reduce_sum(tf.cast(tf.nn.embedding_lookup(*each), tf.float32), 1) for each in pairs
        ]


class EagerLocal(Eager, Local, WithDense):
    """All that in eager mode, with a dense variable."""


def two_routes(make_optimizer, make=new_tables, kind=Trained):
    """Returns two routes of equal tables and optimizers, each with an optimizer of its own."""
    made = []
    for is_native in (True, False):
        of_route = make_optimizer()
        optimizer, arguments = of_route if isinstance(of_route, tuple) else (of_route, {})
        made.append(kind(is_native, make, optimizer, **arguments))
    return made


def train_both(routes, ids, factor=1.0):
    """Takes a step by both routes; returns whether native code took it by the first."""
    native, python = routes
    before = native.num_native
    losses = [route.train(ids, factor)[0] for route in routes]
    assert losses[0] == losses[1] or np.isnan(losses[0])
    assert python.num_native == 0
    return native.num_native > before


def end(routes):
    assert_equal(*routes)
    audit_both(*routes)
    native, python = routes
    assert native.optimizer.num_nonfinite == python.optimizer.num_nonfinite


def case(name, family="Keras 3"):
    return next(each for each in CASES if (each.family, each.name) == (family, name))


def adam():
    return sok.OptimizerWrapper(case("Adam").make().optimizer)


# One of each formula; other optimizers enter the same.
_FORMULAS: dict[str, Case] = {
    str((each.twin, sorted(each.hyper.items()))): each for each in reversed(CASES)
}


@pytest.mark.parametrize(
    ("kind", "stochastic_rounding"),
    [
        (Trained, False),
        pytest.param(EagerWithDense, True, marks=pytest.mark.full_only("as many more")),
    ],
)
@pytest.mark.parametrize("each", _FORMULAS.values(), ids=str)
def test_every_rule_takes_the_same_steps_by_both_routes(each, kind, stochastic_rounding):
    def make_optimizer():
        made = each.make()
        options = {"stochastic_rounding": stochastic_rounding}
        return sok.OptimizerWrapper(made.optimizer, **options), made.arguments

    routes = two_routes(make_optimizer, kind=kind)
    took = [train_both(routes, ids, 0.1 * i) for i, ids in enumerate(IDS)]
    # Some optimizers have float32 variables for their numbers from their first dense step on.
    assert took in ([False, True, True, True], [False, False, True, True])
    end(routes)


@pytest.mark.parametrize("kind", [Trained, WithDense, Eager, EagerWithDense, Local, EagerLocal])
def test_a_step_does_not_enter_python_once_it_is_known(kind):
    """Neither for keys that were looked up before nor for new ones."""
    routes = two_routes(adam, kind=kind)
    batches = [*IDS, *([[number, 5], [1, 1]] for number in (11, 11, 12))]
    entries = [routes[0].train(ids)[1] for ids in batches]
    assert entries[0] > 0
    assert entries[1:] == [0] * 6
    assert routes[0].optimizer.iterations.numpy() == len(batches)
    for ids in batches:
        routes[1].train(ids)
    end(routes)


@pytest.mark.parametrize("kind", ["hbm", "kLfu of all"])
def test_a_first_batch_may_be_empty(mode, kind):
    variable = new_variable(kind, first=1.0)
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.25))

    @mode
    def train(ids):
        with tf.GradientTape() as tape:
            (rows,) = sok.lookup_sparse([variable], [ids], combiners=["sum"])
            loss = tf.reduce_sum(rows)
        optimizer.apply_gradients([(tape.gradient(loss, variable), variable)])

    for count in (0, 2, 0, 1):
        train(tf.range(count, dtype=tf.int64))
    rows, *_ = variable.table.lookup([0, 1], insert=False)
    np.testing.assert_array_equal(rows[:, 0], [0.5, 0.75])
    audit(variable.table)


def test_numbers_that_change_are_checked_by_python():
    def make_optimizer():
        made = tf_keras.optimizers.legacy.Adam(0.1, beta_1=0.9)
        return sok.OptimizerWrapper(made)

    routes = two_routes(make_optimizer)
    took = []
    for number, ids in enumerate([*IDS, *IDS]):
        for route in routes:
            route.optimizer.optimizer.learning_rate = 0.1 / (number + 1)  # a variable by now
            if number == 4:
                route.optimizer.optimizer.beta_1 = 0.5
        took.append(train_both(routes, ids))
    assert took == [False, True, True, True, False, True, True, True]
    for route in routes:
        route.optimizer.optimizer.beta_1 = 2.0
        with pytest.raises(tf.errors.InvalidArgumentError, match="beta_1"):
            route.train(IDS[0])
        route.optimizer.optimizer.beta_1 = 0.5
        route.optimizer.optimizer.learning_rate = float("nan")
        with pytest.raises(tf.errors.InvalidArgumentError, match="learning_rate"):
            route.train(IDS[0])
        route.optimizer.optimizer.learning_rate = 1e38  # Adam's factor is no float32
        route.optimizer.optimizer.beta_1 = 0.9999999
        with pytest.raises(tf.errors.InvalidArgumentError, match="fit float32"):
            route.train(IDS[0])
    end(routes)


def test_rows_that_are_no_numbers_are_counted():
    routes = two_routes(lambda: sok.OptimizerWrapper(case("SGD").make().optimizer))
    for factor in (1.0, 1.0, float("nan"), 1.0):
        train_both(routes, [[1, 2], [3, 4]], factor)
    count = routes[0].optimizer.num_nonfinite
    assert count == 2 * 4 * len(FLOATS)  # the rows are none either from then on
    for route in routes:
        route.optimizer.num_nonfinite = 3
    assert train_both(routes, [[1, 2], [1, 5]])
    assert routes[0].optimizer.num_nonfinite == 3 + 3 * len(FLOATS)
    end(routes)


def test_errors_are_asked_for_of_python():
    def make_optimizer():
        return sok.OptimizerWrapper(case("SGD").make().optimizer, on_nonfinite="error")

    routes = two_routes(make_optimizer)
    assert not any(train_both(routes, ids) for ids in IDS)
    for route in routes:
        with pytest.raises(tf.errors.InvalidArgumentError, match="have a NaN or an infinity"):
            route.train(IDS[0], float("inf"))
    end(routes)


def after_a_lookup(route, pairs):
    with tf.control_dependencies([grad.values for grad, _ in pairs]):
        some = [tf.cast([[7]], each.key_type) for each in route.variables]
        sok.lookup_sparse(route.variables, some, combiners=["sum"] * len(some))
    return pairs


def halved(grad):
    return tf.IndexedSlices(grad.values / 2, grad.indices, grad.dense_shape)


def moved(grad):
    """Other keys, but as many."""
    return tf.IndexedSlices(grad.values, tf.reverse(grad.indices, [0]), grad.dense_shape)


MANY = np.random.default_rng(0).integers(0, [[2], [3]] * 60, (120, 5)).tolist()
# What happens between a gradient and its step, and whether that is native.
BETWEEN = {
    "repeated keys": ([Local], lambda _, pairs: pairs, True, IDS),
    "many repeated keys": ([Local], lambda _, pairs: pairs, True, [MANY] * 3),
    "a lookup": ([], after_a_lookup, True, IDS),
    "other keys": ([], lambda _, pairs: [(moved(grad), v) for grad, v in pairs], True, IDS),
    "others of one": ([], lambda _, p: [(moved(p[0][0]), p[0][1]), *p[1:]], True, IDS),
    "each table twice": ([], lambda _, pairs: [*pairs, *pairs], False, IDS),
    "clipping": ([], lambda _, pairs: [(halved(grad), v) for grad, v in pairs], True, IDS),
}


@pytest.mark.parametrize("is_eager", [False, True], ids=["function", "eager"])
@pytest.mark.parametrize("name", BETWEEN)
def test_what_happens_between_a_gradient_and_its_step(name, is_eager):
    kinds, change, is_native, batches = BETWEEN[name]
    bases = (Eager, *kinds, WithDense) if is_eager else (*kinds, Trained)
    routes = two_routes(adam, kind=type("Changed", bases, {"change": change}))
    took = [train_both(routes, ids, 0.01) for ids in batches]
    assert took == [False, *[is_native] * (len(batches) - 1)]
    end(routes)


def test_states_of_others_are_python_s():
    routes = two_routes(adam)
    others = [sok.OptimizerWrapper(case("Adagrad").make().optimizer) for _ in routes]
    assert [train_both(routes, ids) for ids in IDS[:3]] == [False, True, True]
    for route, other in zip(routes, others, strict=True):
        with route.route():
            other.apply_gradients(zip(route.gradients([[1, 2]]), route.variables, strict=True))
    # The tables have states of two optimizers.
    assert not any(train_both(routes, ids) for ids in IDS)
    end(routes)


def test_tables_that_were_cleared_or_restored_begin_with_python(tmp_path):
    routes = two_routes(adam)

    def train():
        return [train_both(routes, ids) for ids in IDS]

    train()
    saved = [
        tf.train.Checkpoint(tables=route.variables, optimizer=route.optimizer) for route in routes
    ]
    paths = [each.write(str(tmp_path / str(number))) for number, each in enumerate(saved)]
    train()
    for each, path in zip(saved, paths, strict=True):
        each.restore(path)
    took = train()
    assert not took[0] and took[-1]
    for route in routes:
        for each in route.variables:
            each.table.clear()
    took = train()
    assert not took[0] and took[-1]
    end(routes)


def test_the_steps_of_an_optimizer_that_is_gone_are_refused():
    routes = two_routes(lambda: sok.OptimizerWrapper(case("SGD").make().optimizer))
    for ids in IDS:
        train_both(routes, ids)
    functions = [
        route.function.get_concrete_function(tf.constant(IDS[0]), tf.constant(1.0))
        for route in routes
    ]
    for route in routes:
        del route.optimizer
    for route, function in zip(routes, functions, strict=True):
        with route.route(), pytest.raises(tf.errors.InvalidArgumentError, match="was deleted"):
            function(tf.constant(IDS[1]), tf.constant(1.0))
    assert_equal(*routes)


@pytest.mark.parametrize("kind", [WithDense, EagerWithDense])
def test_skipped_steps_of_a_scaled_loss_move_no_rows(kind):
    def make_optimizer():
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5))
        return sok.OptimizerWrapper(scaled)

    routes = two_routes(make_optimizer, kind=kind)
    took = [train_both(routes, IDS[0], factor) for factor in (1.0, 1.0, float("inf"), 1.0)]
    assert took == [False, True, False, True]
    assert [int(route.optimizer.iterations) for route in routes] == [3, 3]
    end(routes)


@pytest.mark.parametrize("kind", [WithDense, EagerWithDense])
def test_a_plan_that_fails_is_no_failure_of_the_step(kind, monkeypatch):
    def fail(_):
        raise MemoryError("none is left")

    routes = two_routes(adam, kind=kind)
    with monkeypatch.context() as patch:
        patch.setattr(host, "plan_of", fail)
        assert not any(train_both(routes, ids) for ids in IDS)
    assert [int(route.optimizer.iterations) for route in routes] == [len(IDS)] * 2
    took = [train_both(routes, ids) for ids in IDS]
    assert took == [False, True, True, True]
    end(routes)


@pytest.mark.parametrize("kind", [EagerWithDense, EagerLocal])
def test_a_dense_step_that_fails_leaves_rows_and_when_keys_were_seen(kind):
    routes = two_routes(adam, lambda: new_tables(kinds=("kLru",)), kind)
    for ids in IDS:
        train_both(routes, ids)
    took = [route.num_native for route in routes]
    for route in routes:
        gradients = route.gradients(IDS[0])
        route.train([[8, 8], [8, 8]])  # a later lookup has not seen these keys
        dense, route.dense = route.dense, tf.Variable([1.0, 2.0])  # it was not built for this one
        before = [State.of(each.table) for each in route.variables]
        with route.route(), pytest.raises(ValueError):
            route.apply(list(zip(gradients, route.variables, strict=True)))
        assert [State.of(each.table) for each in route.variables] == before
        route.dense = dense
    assert [route.num_native for route in routes] == [took[0] + 1, took[1]]
    assert [int(route.optimizer.iterations) for route in routes] == [len(IDS) + 1] * 2
    assert train_both(routes, IDS[0])
    end(routes)


@pytest.mark.filterwarnings("ignore:Table 't. had no room")
@pytest.mark.parametrize("seed", range(6 if QUICK else 16))
def test_drawn_programs_have_the_same_bits_by_both_routes(seed):
    """Steps among erased keys, keys that are refused or evicted, and keys of other calls."""
    rng = np.random.default_rng(seed)
    each = list(_FORMULAS.values())[int(rng.integers(len(_FORMULAS)))]
    some = [name for name, kind in KINDS.items() if kind.options.get("on_refused") != "error"]
    kinds = some[int(rng.integers(len(some)))], "hbm"
    most = 12 if FULL.items() <= KINDS[kinds[0]].options.items() else 60

    def make_optimizer():
        made = each.make()
        rounding = bool(seed % 2)
        return sok.OptimizerWrapper(made.optimizer, stochastic_rounding=rounding), made.arguments

    kind = (Trained, EagerWithDense, Local, EagerLocal)[seed // 2 % 4]
    routes = two_routes(make_optimizer, lambda: new_tables(kinds=kinds), kind)
    took = 0
    for _ in range(12):
        keys = rng.integers(0, rng.choice([4, most]), (8, 2))
        took += train_both(routes, keys, float(rng.random()))
        table, some = int(rng.integers(len(FLOATS))), np.unique(rng.integers(0, most, 3))
        for route in routes if rng.random() < 0.3 else ():
            variable = route.variables[table]
            variable.table.erase(some.astype(variable.key_type.as_numpy_dtype))
        assert_equal(*routes)
    assert took > 0 or kinds[0] not in ("hbm", "kLru")  # others may leave a key without a row
    end(routes)
