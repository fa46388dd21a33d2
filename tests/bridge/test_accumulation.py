"""`gradient_accumulation_steps` of Keras 3: rows move by the mean of several batches."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.engine.update import NonFiniteGradientError
from sok_lite.keras import Table

DIM = 3
pytestmark = pytest.mark.skipif(
    "iterations" in vars(keras.optimizers.SGD()),
    reason="Keras before 3.5 counts batches: test_optimizer.py",
)


class Own(keras.optimizers.Optimizer):
    """No rule follows it."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, learning_rate * gradient * 2.0)


def made(cls, **options):
    options = {"learning_rate": 0.5, "gradient_accumulation_steps": 3} | options
    return sok.OptimizerWrapper(cls(**options))


def table_of(name="t"):
    table = sok.DynamicVariable(dimension=DIM, name=name)
    sok.assign(table, np.arange(6), np.ones((6, DIM), np.float32))
    return table


def gradient(table, keys, value):
    keys = tf.constant(keys, tf.int64)
    return tf.IndexedSlices(tf.fill([len(keys), DIM], float(value)), keys)


def rows_of(table):
    return tf.nn.embedding_lookup(table, np.arange(6)).numpy()[:, 0].round(4).tolist()


def test_weight_decay_leaves_the_same_tables_out():
    one, other = table_of("one"), table_of("other")
    inner = keras.optimizers.AdamW(0.5, weight_decay=0.1, gradient_accumulation_steps=2)
    inner.exclude_from_weight_decay(var_list=[other])
    optimizer = sok.OptimizerWrapper(inner)
    none = [(gradient(table, [1], 0.0), table) for table in (one, other)]
    optimizer.apply_gradients(none)
    optimizer.apply_gradients(none[:1])
    assert rows_of(one)[1] == pytest.approx(0.95) and rows_of(other)[1] == 1.0


def test_clipping_and_loss_scales_are_refused():
    table, inner = table_of(), keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
    clips = [{name: 1.0} for name in ("clipnorm", "global_clipnorm", "clipvalue")]
    clipped = "gradient_accumulation_steps=3 .* with clipping"
    scaled = sok.OptimizerWrapper(keras.optimizers.LossScaleOptimizer(inner))
    for optimizer, text in (
        *((made(keras.optimizers.SGD, **option), clipped) for option in clips),
        (scaled, "with a LossScaleOptimizer"),
    ):
        with pytest.raises(NotImplementedError, match=text):
            optimizer.apply_gradients([(gradient(table, [1], 2.0), table)])
    assert rows_of(table) == [1] * 6


def test_a_row_whose_gradients_sum_up_to_zero_takes_its_step():
    table = table_of()
    optimizer = made(keras.optimizers.Adam, gradient_accumulation_steps=2, weight_decay=0.5)
    for value in (2.0, -2.0):
        optimizer.apply_gradients([(gradient(table, [1], value), table)])
    assert rows_of(table) == [1, 0.75, 1, 1, 1, 1]


def test_a_sum_that_was_taken_is_of_no_later_step_with_its_number(tmp_path):
    """As of a new optimizer, or of one whose counter was set back."""

    def batches(optimizer, table, *keys):
        for key in keys:
            optimizer.apply_gradients([(gradient(table, [key], 1.0), table)])

    table, optimizer = table_of(), made(keras.optimizers.SGD, gradient_accumulation_steps=2)
    batches(optimizer, table, 1, 1)
    sok.dump(tmp_path, table)
    again = table_of()
    sok.load(tmp_path, again)
    batches(made(keras.optimizers.SGD, gradient_accumulation_steps=2), again, 2, 2)
    assert rows_of(again) == [1, 0.5, 0.5, 1, 1, 1]
    optimizer.optimizer.variables[0].assign(0)
    batches(optimizer, table, 2, 1)
    assert rows_of(table) == [1, 0.25, 0.75, 1, 1, 1]


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("bad", [np.nan, 3e38])
def test_a_batch_that_is_not_finite_is_refused_and_not_counted(bad, number):
    """3e38 is finite, and twice as much is not: the sum is looked at when it is made."""
    table, dense = table_of(), tf.Variable(1.0)
    inner = keras.optimizers.SGD(0.5, gradient_accumulation_steps=3)
    optimizer = sok.OptimizerWrapper(inner, on_nonfinite="error")

    def call(value):
        optimizer.apply_gradients([(gradient(table, [1], value), table), (tf.constant(3.0), dense)])

    for place in range(3):
        if place == number and (bad != 3e38 or number):
            for _ in range(2):
                before = rows_of(table)
                with pytest.raises(NonFiniteGradientError):
                    call(bad)
                assert rows_of(table) == before
                assert int(inner.variables[0]) == number and float(dense) == 1
        call(3e38 if bad == 3e38 and not place and number else 3.0)
    if bad != 3e38:
        assert rows_of(table)[1] == float(dense) == -0.5


def test_a_row_that_is_removed_loses_its_share():
    table = table_of()
    optimizer = made(keras.optimizers.SGD)
    optimizer.apply_gradients([(gradient(table, [1, 2], 6.0), table)])
    table.table.erase(tf.constant([1], tf.int64).numpy())
    sok.assign(table, [1], np.ones((1, DIM), np.float32))
    for _ in range(2):
        optimizer.apply_gradients([(gradient(table, [1], 3.0), table)])
    assert rows_of(table) == [1, 0, 0, 1, 1, 1]


def test_elastic_ranks_go_back_to_a_commit_within_a_step():
    pytest.importorskip("horovod.tensorflow")
    table, dense = table_of(), tf.Variable(1.0)
    inner = keras.optimizers.SGD(0.5, gradient_accumulation_steps=2)
    inner.build([dense])
    optimizer = sok.OptimizerWrapper(inner)

    def call(value):
        value = tf.constant(value)
        optimizer.apply_gradients([(gradient(table, [1], value), table), (value, dense)])

    state = sok.elastic.TableState([table, dense], optimizer, step=0)
    call(1.0)
    state.save()
    call(9.0)
    call(9.0)
    state.sync()
    call(3.0)
    assert rows_of(table)[1] == float(dense) == 0


@pytest.mark.parametrize("batches", [(2, None), (None, 2), (2, 2)])
def test_other_states_are_found_where_an_optimizer_accumulates_no_more_or_now(tmp_path, batches):
    def trained(size, folder=None):
        table = sok.DynamicVariable(dimension=DIM, initializer="ones", name="t")
        optimizer = made(keras.optimizers.Adam, gradient_accumulation_steps=size)
        if folder is not None:
            sok.load(folder, table, *([optimizer] if batches == (2, 2) else []))
        for _ in range(2):
            optimizer.apply_gradients([(gradient(table, [1], 1.0), table)])
        return table, optimizer

    saved = trained(batches[0])
    sok.dump(tmp_path, *saved)
    table, optimizer = trained(batches[1], tmp_path)
    steps = sum(1 if size else 2 for size in batches)
    m = 1 - 0.9**steps  # of a gradient of 1 in every step
    _, rows = sok.export(optimizer.get_slot(table, "m"))
    np.testing.assert_allclose(rows, np.full((1, DIM), m), rtol=1e-5)
    if batches == (2, 2):  # the counts of a dump are those of batches
        assert int(optimizer.iterations) == 2 and int(optimizer.optimizer.variables[0]) == 4


# ---- drawn programs ------------------------------------------------------------------------------

OPTIMIZERS = {
    # Those that leave a row without a gradient as it is: Keras' dense step is the lazy one.
    "SGD": {},
    "Own": {},
    "Adagrad": {"initial_accumulator_value": 0.5},
    # Others: each key has a Keras optimizer of its own, which takes a step where the key does.
    "Adam": {},
    "RMSprop": {"momentum": 0.5},
    "Adamax": {},
}
IS_LAZY = ("SGD", "Own", "Adagrad")


def rate_of(program):
    if not program["is_scheduled"]:
        return 0.25
    boundaries = [1, 4, 5, 7]
    return keras.optimizers.schedules.PiecewiseConstantDecay(boundaries, [0.5, 0.3, 0.2, 0.1, 0.4])


def made_of(program, **options):
    cls = getattr(keras.optimizers, program["optimizer"], Own)
    return cls(rate_of(program), **OPTIMIZERS[program["optimizer"]], **options)


def drawn(number):
    """A program: calls, each with the gradients of two tables and a dense variable; which of them
    are undone by a restore; and how the others are saved."""
    rng = np.random.default_rng(number)
    calls = []
    for _ in range(int(rng.integers(6, 13))):
        gradients = []
        for _ in range(2):
            keys = rng.integers(0, 6, rng.integers(0, 5))
            values = rng.normal(size=(len(keys), DIM)).astype(np.float32)
            gradients.append((keys, values) if rng.random() < 0.7 else None)
        dense = np.float32(rng.normal()) if rng.random() < 0.8 else None
        if gradients == [None, None] and dense is None:
            dense = np.float32(1.0)
        calls.append((*gradients, dense))
    saved, is_keras = int(rng.integers(1, len(calls) - 1)), bool(rng.random() < 0.4)
    return {
        "optimizer": list(OPTIMIZERS)[rng.integers(len(OPTIMIZERS))],
        "batches": int(rng.integers(2, 5)),
        "is_scheduled": bool(rng.random() < 0.5),
        "is_traced": bool(rng.random() < 0.15),
        "is_keras": is_keras,  # tables of Keras, whose optimizer nobody wraps
        "var_type": ["hbm", "hybrid"][rng.integers(2)],
        "calls": calls,
        "saved": saved,
        "undone": range(saved, int(rng.integers(saved, len(calls)))),
        "how": ["nothing", "roll back", "checkpoint", "dump"][rng.integers(3 if is_keras else 4)],
    }


class Trained:
    """Two tables and a dense variable, as a program trains them."""

    def __init__(self, program):
        options = {}
        if program["var_type"] == "hybrid" and not program["is_keras"]:
            options = {"var_type": "hybrid", "init_capacity": 64, "max_capacity": 64}
        self.program, self.dense = program, tf.Variable(4.0)
        self.tables = [
            Table(name, DIM, "ones").variable
            if program["is_keras"]
            else sok.DynamicVariable(dimension=DIM, name=name, initializer="ones", **options)
            for name in "ab"
        ]
        for table in self.tables:
            sok.assign(table, np.arange(6), np.ones((6, DIM), np.float32))
        self.inner = made_of(program, gradient_accumulation_steps=program["batches"])
        self.inner.build([self.dense, *(self.tables if program["is_keras"] else [])])
        is_wrapped = not program["is_keras"]
        self.optimizer = sok.OptimizerWrapper(self.inner) if is_wrapped else self.inner
        parts = {"a": self.tables[0], "b": self.tables[1], "dense": self.dense}
        self.saver = tf.train.Checkpoint(optimizer=self.optimizer, **parts)

    def call(self, *gradients):
        def step(*given):
            pairs, given = [], list(given)
            for table, gradient in zip(self.tables, gradients, strict=False):
                if gradient is None:
                    pairs.append((None, table))
                else:
                    keys, values = given.pop(0), given.pop(0)
                    pairs.append((tf.IndexedSlices(values, keys), table))
            pairs += [(given.pop(0), self.dense)] if given else []
            self.optimizer.apply_gradients(pairs)

        arrays = [array for each in gradients[:2] if each is not None for array in each]
        arrays += [gradients[2]] if gradients[2] is not None else []
        step = tf.function(step) if self.program["is_traced"] else step
        step(*map(tf.constant, arrays))

    def saved(self, folder):
        """What is there after a save and a restore: this, or another."""
        how, again = self.program["how"], self
        if how == "nothing":
            return self
        if how == "dump":
            again = Trained(self.program)
            sok.dump(folder, self.tables, self.optimizer)
            sok.load(folder, again.tables, again.optimizer)
            pairs = zip(
                [self.dense, *self.inner.variables],
                [again.dense, *again.inner.variables],
                strict=True,
            )
            for mine, its in pairs:
                its.assign(mine)
            return again
        path = self.saver.save(folder / "saved")
        if how == "roll back":
            for number in self.program["undone"]:
                self.call(*self.program["calls"][number])
        else:
            again = Trained(self.program)
        again.saver.restore(path).assert_existing_objects_matched()
        return again

    def rows(self, i):
        return tf.nn.embedding_lookup(self.tables[i], np.arange(6)).numpy()


def as_dense(gradient):
    rows = np.zeros((6, DIM), np.float32)
    if gradient is not None:
        np.add.at(rows, *gradient)
    return rows


def dense_rows(program, table):
    """Keras' own accumulation on a dense variable: a table without a gradient has zeros."""
    rows = keras.Variable(np.ones((6, DIM), np.float32))
    optimizer = made_of(program, gradient_accumulation_steps=program["batches"])
    for call in program["calls"]:
        optimizer.apply_gradients([(tf.constant(as_dense(call[table])), rows)])
    return rows.numpy()


def dense_weight(program):
    weight = keras.Variable(4.0)
    optimizer = made_of(program, gradient_accumulation_steps=program["batches"])
    optimizer.build([weight])
    for *_, gradient in program["calls"]:
        if gradient is None:
            optimizer.variables[0].assign_add(1)
        else:
            optimizer.apply_gradients([(tf.constant(gradient), weight)])
    return weight.numpy()


def lazy_rows(program, table):
    """A variable and an optimizer of each key: a step where a batch of its group has the key."""
    rows = [keras.Variable(np.ones((1, DIM), np.float32)) for _ in range(6)]
    optimizers = [made_of(program | {"is_scheduled": False}) for _ in rows]
    rate, size = rate_of(program), program["batches"]
    for group in range(len(program["calls"]) // size):
        calls = program["calls"][group * size :][:size]
        for key in {int(k) for call in calls if call[table] is not None for k in call[table][0]}:
            total = np.zeros((1, DIM), np.float32)
            for call in calls:
                total += as_dense(call[table])[key]
            last = (group + 1) * size - 1
            optimizers[key].learning_rate = float(rate(last)) if callable(rate) else rate
            optimizers[key].iterations.assign(group)
            optimizers[key].apply_gradients([(tf.constant(total / size), rows[key])])
    return np.concatenate([row.numpy() for row in rows])


def check_drawn(number, folder):
    program = drawn(number)
    trained = Trained(program)
    for call in program["calls"][: program["saved"]]:
        trained.call(*call)
    trained = trained.saved(folder)
    for call in program["calls"][program["saved"] :]:
        trained.call(*call)
    expected = dense_rows if program["optimizer"] in IS_LAZY else lazy_rows
    facts = str({name: value for name, value in program.items() if name != "calls"})
    for table in range(2):
        np.testing.assert_allclose(
            trained.rows(table), expected(program, table), 1e-5, 1e-6, err_msg=f"{number} {facts}"
        )
    np.testing.assert_allclose(trained.dense.numpy(), dense_weight(program), 1e-6)
    assert int(trained.optimizer.iterations) == len(program["calls"]) // program["batches"]


@pytest.mark.parametrize("first", range(0, 30, 5))
def test_drawn_programs(first, tmp_path, request):
    """Of 60 programs, half have their tables in RAM and half on the simulated GPU."""
    first += 30 * (request.node.callspec.params["tables_on"] == "simt")
    for number in range(first, first + 5):
        check_drawn(number, tmp_path / str(number))
