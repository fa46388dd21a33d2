"""Gradients of pooled lookups by native code and by Python: the same bits, in the same order.

Native code leaves all to Python where `record.allows` is 0.
"""

import contextlib
import ctypes
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.backend import get_backend
from sok_lite.bridge.variable import TableVariable
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.table import make_table
from sok_lite.engine.table.record import INSERTS, READS
from sok_lite.engine.work_counters import GRADIENTS
from sok_lite.native.plans import num_entries
from tests.conftest import QUICK
from tests.support.table_audit import audit
from tests.support.table_state import State

pytestmark = pytest.mark.usefixtures("initialised")

COMBINERS = ("sum", "mean", "sqrtn")
DTYPES = ("float32", "float16", "bfloat16", "float64")
ROWS = ("one each", "dense", "ragged", "ragged of int32", "sparse")
# Lookups evict keys, or refuse some.
FULL = {"init_capacity": 32, "max_capacity": 32, "max_bucket_size": 8}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "hbm": ("hbm", {}),
    "hybrid": ("hybrid", {"init_capacity": 16}),
    "full": ("hybrid", {"on_refused": "ignore", **FULL}),
    "full kLfu": ("hybrid", {"on_refused": "ignore", "evict_strategy": "kLfu", **FULL}),
}


def new_variable(kind="hbm", name="table", dim=4, key_type="int64", dtype="float32"):
    """Returns a variable whose new rows depend on its name and the key alone."""
    var_type, options = KINDS[kind]
    table = make_table(
        var_type,
        get_backend("cpu"),
        dim,
        initializer=make_initializer("uniform", dim, None, var_type),
        key_type=key_type,
        dtype=dtype,
        name=name,
        **options,
    )
    return TableVariable(table, name=name, trainable=True)


@contextlib.contextmanager
def by_python(variables):
    """A block in which native code leaves all calls to Python."""
    for each in variables:
        each.table.record.allows = 0
    try:
        yield
    finally:
        for each in variables:
            each.table.record.allows = READS | INSERTS


def bits(tensors):
    """Returns the types and the bytes of gradients."""
    flat = []
    for each in tensors:
        flat += [each.indices, each.values] if isinstance(each, tf.IndexedSlices) else [each]
    arrays = [each.numpy() for each in flat]
    return [(array.dtype.name, array.shape, array.tobytes()) for array in arrays]


def noted(variable):
    """Returns what a table knows of its last gradient: (keys, rows, what else)."""
    known = variable.table.row_cache.read()
    kinds = (known.keys, ctypes.c_int64), (known.rows, ctypes.c_uint32)
    keys, rows = ((kind * known.size).from_address(at)[:] if at else [] for at, kind in kinds)
    return keys, rows, known[2:]


class Drawn(NamedTuple):
    """A lookup.

    Attributes:
      variables: that it looks up in; some come several times.
      ids: of each.
      weights: of each, None or (n,) float32.
      combiners: of each.
      options: its other arguments.
    """

    variables: list[Any]
    ids: list[Any]
    weights: list[Any]
    combiners: list[str]
    options: dict[str, Any]

    def look_up(self, weights):
        """Looks up with these weights."""
        given = [
            None if own is None else alike(ids, own)
            for ids, own in zip(self.ids, weights, strict=True)
        ]
        return sok.lookup_sparse(
            self.variables, self.ids, given, combiners=self.combiners, **self.options
        )

    def own_weights(self):
        return [each for each in self.weights if each is not None]


def alike(ids, weights):
    """Returns weights in the rows of ids."""
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(weights)
    if isinstance(ids, tf.SparseTensor):
        return tf.SparseTensor(ids.indices, weights, ids.dense_shape)
    return tf.reshape(weights, tf.shape(ids))


def keys_of(ids):
    """Returns the keys, and where each row begins and ends."""
    if isinstance(ids, tf.RaggedTensor):
        return ids.flat_values.numpy(), ids.row_splits.numpy()
    if isinstance(ids, tf.SparseTensor):
        lengths = np.bincount(ids.indices.numpy()[:, 0], minlength=int(ids.dense_shape[0]))
        return ids.values.numpy(), np.concatenate([[0], np.cumsum(lengths)])
    array = ids.numpy()
    width = 1 if array.ndim == 1 else array.shape[1]
    return array.reshape(-1), np.arange(len(array) + 1) * width


class Drawing:
    """Draws lookups in tables."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.variables = [
            new_variable(
                self.one_of([*KINDS]),
                f"table{i}",
                self.one_of((1, 3, 4, 17)),
                self.one_of(("int64", "int64", "int32", "uint64")),
                self.one_of(DTYPES),
            )
            for i in range(3)
        ]

    def one_of(self, things):
        return things[self.rng.integers(len(things))]

    def draw(self):
        rng = self.rng
        variables = [self.one_of(self.variables) for _ in range(rng.integers(1, 5))]
        ids, weights = [], []
        for variable in variables:
            ids.append(self.ids(variable.key_type.as_numpy_dtype))
            number = keys_of(ids[-1])[0].size
            own = rng.uniform(-1, 2, number) * (rng.random(number) < 0.9)
            weights.append(tf.constant(own, tf.float32) if rng.random() < 0.5 else None)
        options = self.one_of(
            ({}, {}, {"training": False}, {"training": False, "missing": "zeros"})
        )
        combiners = [self.one_of(COMBINERS) for _ in variables]
        return Drawn(variables, ids, weights, combiners, options)

    def ids(self, key_type):
        rng, rows = self.rng, self.one_of(ROWS)
        batch = int(self.one_of((0, 1, 7, 40, 150)))
        width = int(rng.integers(2, 5))
        lengths = {"one each": np.ones, "dense": lambda n: np.full(n, width)}.get(
            rows, lambda n: rng.integers(0, 5, n)
        )(batch).astype(np.int64)
        # Of few keys some come more often than a sum has in one piece.
        keys = rng.integers(0, self.one_of((4, 60, 2000)), int(lengths.sum())).astype(key_type)
        if key_type != np.uint64 and rng.random() < 0.5:
            keys = -keys
        if rows == "one each":
            return tf.constant(keys)
        if rows == "dense":
            return tf.constant(keys.reshape(batch, width))
        splits = np.concatenate([[0], np.cumsum(lengths)])
        if rows != "sparse":
            kind = np.int32 if rows == "ragged of int32" else np.int64
            return tf.RaggedTensor.from_row_splits(keys, splits.astype(kind))
        at = np.repeat(np.arange(batch), lengths)
        place = np.arange(keys.size) - splits[:-1][at]
        indices = np.stack([at, place], 1).astype(np.int64)
        return tf.SparseTensor(indices, keys, (batch, 5))


def expected(drawn, arrived):
    """Returns of each part (keys in the order of first occurrence, the float64 gradients of their
    rows), by the definition."""
    results = []
    for i, ids in enumerate(drawn.ids):
        keys, splits = keys_of(ids)
        weights = np.ones(keys.size) if drawn.weights[i] is None else drawn.weights[i].numpy()
        order = {key: number for number, key in enumerate(dict.fromkeys(keys.tolist()))}
        sums = np.zeros((len(order), arrived[i].shape[1]))
        for b, (begin, end) in enumerate(pairwise(splits)):
            own = weights[begin:end].astype(np.float64)
            divisor = {"sum": 1.0, "mean": own.sum(), "sqrtn": np.sqrt((own**2).sum())}
            scale = divisor[drawn.combiners[i]]
            for key, weight in zip(keys[begin:end].tolist(), own, strict=True):
                factor = 0.0 if scale == 0 else weight / scale
                sums[order[key]] += factor * arrived[i][b].astype(np.float64)
        results.append((list(order), sums))
    return results


@pytest.mark.parametrize("seed", range(4 if QUICK else 60))
def test_drawn_gradients_have_the_bits_of_python(seed):
    assert compare_drawn(seed) == 0


def compare_drawn(seed):
    """Takes drawn gradients by both routes; returns how often Python was entered by the first."""
    drawing, num_entered = Drawing(seed), 0
    for _ in range(8):
        drawn = drawing.draw()
        weights = drawn.own_weights()
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(weights)
            own = iter(weights)
            outputs = drawn.look_up([None if each is None else next(own) for each in drawn.weights])
        arrived = [
            tf.cast(tf.constant(drawing.rng.normal(size=each.shape)), each.dtype)
            for each in outputs
        ]
        sources = [*dict.fromkeys(drawn.variables), *weights]

        def gradients(tape=tape, outputs=outputs, sources=sources, arrived=arrived):
            return tape.gradient(outputs, sources, arrived)

        with by_python(drawn.variables):
            theirs = gradients()
            known = [noted(each) for each in drawn.variables]
        for each in drawn.variables:
            each.table.record.gradient.size = -1
        entries, number = num_entries(), GRADIENTS.number
        mine = gradients()
        num_entered += num_entries() - entries
        assert GRADIENTS.number == number + 1
        assert bits(mine) == bits(theirs)
        assert [noted(each) for each in drawn.variables] == known
        parts = expected(drawn, [tf.cast(each, tf.float32).numpy() for each in arrived])
        for variable, gradient in zip(dict.fromkeys(drawn.variables), mine, strict=False):
            own = [
                part for each, part in zip(drawn.variables, parts, strict=True) if each is variable
            ]
            keys = [key for part_keys, _ in own for key in part_keys]
            assert gradient.indices.numpy().tolist() == keys
            sums = np.concatenate([sums for _, sums in own])
            np.testing.assert_allclose(gradient.values.numpy(), sums, rtol=1e-4, atol=1e-4)
    for variable in drawing.variables:
        audit(variable.table)
    return num_entered


def batches(seed, count=6):
    """Returns batches of ids for two tables, in which keys come back."""
    rng = np.random.default_rng(seed)
    return [[tf.constant(rng.integers(0, 90, (40, 3))) for _ in range(2)] for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", [tf.keras.optimizers.SGD, tf.keras.optimizers.Adam])
def test_steps_after_it_are_those_of_python(mode, optimizer, kind):
    states = []
    for is_native in (True, False):
        variables = [new_variable(kind, f"table{i}") for i in range(2)]
        steps = sok.OptimizerWrapper(optimizer(0.1))

        def step(ids, variables=variables, steps=steps):
            with tf.GradientTape() as tape:
                outputs = sok.lookup_sparse(variables, ids, combiners=["mean", "sum"])
                loss = tf.add_n([tf.reduce_sum(each**2) for each in outputs])
            steps.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

        step = mode(step)
        for ids in batches(1):
            with contextlib.nullcontext() if is_native else by_python(variables):
                step(ids)
        for each in variables:
            audit(each.table)
        states.append([State.of(each.table) for each in variables])
    assert states[0] == states[1]


def test_a_gradient_of_known_keys_enters_python_only_for_room(mode):
    variable = new_variable()

    def gradient(ids):
        with tf.GradientTape() as tape:
            output = sok.lookup_sparse([variable], [ids], combiners=["sum"])[0]
        return tape.gradient(output, variable)

    gradient = mode(gradient)
    rng = np.random.default_rng(0)
    small, large = (tf.constant(rng.integers(0, 50, (size, 1))) for size in (1000, 1025))
    counts = []
    for ids in (small, small, large, large, small):
        entries = num_entries()
        found = gradient(ids)
        counts.append(num_entries() - entries)
        with by_python([variable]):
            assert bits([gradient(ids)]) == bits([found])
    # The first lookup has new keys. There is room for a power of two.
    assert counts == [2, 0, 1, 0, 0]


@pytest.mark.parametrize(("num_threads", "is_native"), [(2, True), (8, False)])
def test_one_long_table_is_grouped_by_several_threads(num_threads, is_native, monkeypatch):
    monkeypatch.setattr(get_backend("cpu"), "num_threads", num_threads)
    variable = new_variable(dim=1)
    ids = tf.constant(np.random.default_rng(0).integers(0, 1000, ((1 << 17) + 1, 1)))
    with tf.GradientTape(persistent=True) as tape:
        output = sok.lookup_sparse([variable], [ids], combiners=["sum"])[0]
    first = tape.gradient(output, variable)  # it makes room
    entries = num_entries()
    assert bits([tape.gradient(output, variable)]) == bits([first])
    assert num_entries() == entries + (not is_native)


def test_rows_that_have_moved_since_the_lookup_are_not_updated():
    tables = []
    for is_native in (True, False):
        variable = new_variable()
        ids = tf.constant(np.arange(20)[:, None])
        steps = sok.OptimizerWrapper(tf.keras.optimizers.SGD(1.0))
        with tf.GradientTape(persistent=True) as tape:
            output = sok.lookup_sparse([variable], [ids], combiners=["sum"])[0]
        tape.gradient(output, variable)  # it makes room
        # What had the rows of these keys has them no more, and other keys get them.
        variable.table.erase(np.arange(5, 15))
        variable.table.lookup(np.arange(100, 110))
        entries = num_entries()
        with contextlib.nullcontext() if is_native else by_python([variable]):
            gradient = tape.gradient(output, variable)
        assert num_entries() == entries + (not is_native)
        assert gradient.indices.numpy().tolist() == [*range(20)]
        steps.apply_gradients([(gradient, variable)])
        audit(variable.table)
        tables.append(State.of(variable.table))
    assert tables[0] == tables[1]


def test_a_gradient_within_a_call_of_its_table_notes_nothing():
    variable = new_variable()
    ids = tf.constant(np.arange(20)[:, None])
    with tf.GradientTape(persistent=True) as tape:
        output = sok.lookup_sparse([variable], [ids], combiners=["sum"])[0]
    before = tape.gradient(output, variable)
    known, found = noted(variable), []
    with tf.GradientTape() as other_tape:
        other = sok.lookup_sparse([variable], [ids[:5]], combiners=["sum"])[0]

    def predicate(entries):
        found.append(other_tape.gradient(other, variable))
        return np.zeros(entries.keys.size, bool)

    variable.table.export_if(predicate)
    assert found[0].indices.numpy().tolist() == [*range(5)]
    assert noted(variable) == known
    assert bits([tape.gradient(output, variable)]) == bits([before])


def test_a_gradient_that_is_not_as_it_should_be_raises_what_python_raises():
    variable = new_variable()
    ids = tf.constant(np.arange(20)[:, None])
    texts = []
    for is_native in (True, False):
        with tf.GradientTape(persistent=True) as tape:
            output = sok.lookup_sparse([variable], [ids], combiners=["sum"])[0]
        tape.gradient(output, variable)  # it makes room
        with contextlib.nullcontext() if is_native else by_python([variable]):
            with pytest.raises(ValueError, match="gradient of the output of table 0") as caught:
                tape.gradient(output, variable, tf.ones((20, 3)))
        texts.append(str(caught.value))
    assert texts[0] == texts[1]


def test_several_threads_take_gradients_of_one_table():
    variable = new_variable()

    @tf.function(reduce_retracing=True)
    def gradient(ids):
        with tf.GradientTape() as tape:
            output = sok.lookup_sparse([variable] * 2, [ids, ids[::-1]], combiners=["sum", "mean"])
        found = tape.gradient(output, variable)
        return found.indices, found.values

    rng = np.random.default_rng(0)
    all_ids = [tf.constant(rng.integers(0, 300, (size, 2))) for size in (3, 40, 700, 90) * 5]
    for ids in all_ids:  # not by Python: what is traced then is never native
        gradient(ids)
    with by_python([variable]):
        wanted = [bits(gradient(ids)) for ids in all_ids]
    entries = num_entries()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda ids: bits(gradient(ids)), all_ids)) == wanted
    assert num_entries() == entries
    audit(variable.table)


@pytest.mark.parametrize("shape", [(4, 2), (2, 4)])
def test_rows_that_are_not_as_long_as_a_graph_was_told(shape):
    variable = new_variable()

    @tf.function(input_signature=[tf.TensorSpec(None, tf.int64)])
    def step(ids):
        ids.set_shape([None, 3])
        with tf.GradientTape() as tape:
            (rows,) = sok.lookup_sparse([variable], [ids], combiners=["mean"])
            loss = tf.reduce_sum(rows)
        return tape.gradient(loss, variable)

    ids = np.arange(8).reshape(shape)
    for _ in range(2):  # now all keys are there, and there is room
        native = step(ids)
    with by_python([variable]):
        assert bits([step(ids)]) == bits([native])
