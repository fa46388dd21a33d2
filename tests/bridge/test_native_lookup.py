"""Lookups by native code and by Python: the same bits, the same errors, the same tables after them.

Two sets of equal tables have the same calls. Those of the first are native where they can be; of
the second `record.allows` is 0, by which native code leaves all to Python.
"""

import contextlib
import ctypes
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.backend import get_backend
from sok_lite.engine.initializer import MatrixInitializer
from sok_lite.engine.work_counters import LOOKUPS
from sok_lite.native.plans import num_entries
from tests.conftest import QUICK
from tests.support import chosen_keys
from tests.support.helpers import give_room
from tests.support.routes import (
    ALL,
    FLOATS,
    INTEGERS,
    KINDS,
    WRITES,
    assert_equal,
    audit_both,
    bits,
    both,
    new_variable,
    writing,
)
from tests.support.table_audit import audit
from tests.support.table_state import State

pytestmark = pytest.mark.usefixtures("initialised")

COMBINERS = ("sum", "mean", "sqrtn")


# ------------------------------------------------------------------------------- drawn calls

# Ids by the type of keys: some fit every type, some do not fit all.
_SMALL = range(100)
_UNIVERSE = {
    "int64": [*_SMALL, -1, -7, -(2**31), 2**31 - 1, 2**40, 2**62, 2**63 - 1, -(2**63)],
    "int32": [*_SMALL, -1, -7, -(2**31), 2**31 - 1],
    "uint64": [*_SMALL, 2**31 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1],
}
_OTHERS = {"int64": [2**63, 2**64 - 1], "int32": [2**31, 2**40], "uint64": [-1, -(2**63)]}
_ID_TYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
_ROWS = ("dense", "one each", "ragged", "ragged of int32", "sparse")


_INITIAL = {
    "constant": lambda dim: 0.25,
    "uniform": lambda dim: "uniform",
    "normal": lambda dim: tf.keras.initializers.RandomNormal(1.0, 2.0, seed=7),
    "truncated": lambda dim: tf.keras.initializers.TruncatedNormal(0.0, 2.0),
    "row": lambda dim: np.arange(dim),
    "matrix": lambda dim: MatrixInitializer(np.arange(5 * dim).reshape(5, dim)),
}


class PartOfCall(NamedTuple):
    """One table's part of a drawn lookup, without the batch."""

    table: int
    id_type: str
    rows: str  # one of _ROWS
    weights: str | None  # "same" rows as the ids, or their own: "ragged", "sparse" or "dense"
    combiner: str
    width: int  # ids of each dense row


class DrawnCall(NamedTuple):
    """A lookup, without its batches. A local one is `tf.nn.embedding_lookup`, of one part."""

    parts: tuple[PartOfCall, ...]
    is_local: bool
    options: dict[str, Any]
    has_tape: bool


class Drawing:
    """Draws calls for tables."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        names = list(KINDS)
        self.kinds = [names[seed % len(names)], *(self.one_of(names) for _ in range(2))]
        self.key_types = [self.one_of(("int64", "int64", "int32", "uint64")) for _ in self.kinds]
        self.dtypes = [self.one_of(FLOATS) for _ in self.kinds]
        self.dims = [self.one_of((1, 3, 4, 17)) for _ in self.kinds]
        self.firsts = [_INITIAL[self.one_of(list(_INITIAL))](dim) for dim in self.dims]
        self.reserved = 500 * self.is_so(0.5)  # native code inserts where there is room
        # And one whose rows are integers, which is looked up by itself.
        self.kinds.append("hbm")
        self.key_types.append("int64")
        self.dtypes.append(self.one_of(INTEGERS))
        self.dims.append(5)
        self.firsts.append(None)

    def one_of(self, things):
        return things[self.rng.integers(len(things))]

    def is_so(self, chance):
        return bool(self.rng.random() < chance)

    def make(self):
        """Makes the tables."""
        facts = zip(self.kinds, self.dims, self.key_types, self.dtypes, self.firsts, strict=True)
        made = [new_variable(kind, f"t{i}", *others) for i, (kind, *others) in enumerate(facts)]
        for kind, each in zip(self.kinds, made, strict=True):
            if self.reserved and not kind.startswith("full") and "tiers" not in kind:
                each.table.reserve(self.reserved)
                each.table.store.reserve(self.reserved)
        return made

    # --------------------------------------------------------------------- what is called

    def call(self):
        """Returns a lookup."""
        is_local = self.is_so(0.3)
        most = len(self.kinds) - (not is_local)
        parts = []
        for _ in range(1 if is_local else self.rng.integers(1, 6)):
            table = int(self.rng.integers(most))
            key_type, rows = self.key_types[table], self.one_of(_ROWS)
            weights = None
            if self.is_so(0.4):
                others = ("ragged", "sparse", "dense") if rows == "dense" else ("ragged", "sparse")
                weights = "same" if self.is_so(0.5) else self.one_of(others)
            id_type = self.one_of(_ID_TYPES) if self.is_so(0.3) else key_type
            where = "dense" if is_local else rows
            width = int(self.rng.integers(1, 4))
            parts.append(PartOfCall(table, id_type, where, weights, self.one_of(COMBINERS), width))
        options = {}
        if self.is_so(0.4):
            options["training"] = self.one_of((True, False, False, None))
        if self.is_so(0.4):
            options["missing"] = self.one_of(("initial", "zeros"))
        if not is_local and all(self.kinds[each.table] != "hbm" for each in parts):
            options["use_low_frequency_filter"] = self.is_so(0.5)
        is_trained = all(self.dtypes[each.table] in FLOATS for each in parts)
        return DrawnCall(tuple(parts), is_local, options, is_trained and self.is_so(0.5))

    # --------------------------------------------------------------------- what it is given

    def ids(self, count, key_type, id_type, known):
        """Returns ids, of keys that are `known` or of any."""
        limits = np.iinfo(id_type)
        if self.is_so(0.03):
            known = _OTHERS[key_type]  # an error, where such ids can be given
        fits = [key for key in known if limits.min <= key <= limits.max] or [1]
        return np.array([self.one_of(fits) for _ in range(count)], id_type)

    def batch(self, part, known):
        """Returns (ids, weights) as tensors, the weights None or of their own."""
        key_type, batch = self.key_types[part.table], int(self.one_of((*range(7), 40, 150)))
        lengths = self.rng.integers(0, 4, batch)
        if part.rows in ("dense", "one each"):
            lengths[:] = part.width if part.rows == "dense" else 1
        splits = np.concatenate([[0], np.cumsum(lengths)])
        ids = self.ids(int(splits[-1]), key_type, part.id_type, known)
        weights = self.rng.uniform(-1, 2, ids.size).astype(np.float32)
        if self.is_so(0.03):
            splits = self.wrong(splits)
        if part.rows == "dense":
            given = tf.constant(ids.reshape(batch, part.width))
        elif part.rows == "one each":
            given = tf.constant(ids)
        else:
            given = self.matrix(part.rows, ids, splits)
        if part.weights is None:
            return given, None
        if part.weights == "same" or part.rows == "one each":
            return given, tf.constant(weights)
        if self.is_so(0.05) and weights.size:
            weights = weights[1:]
        if self.is_so(0.05):
            splits = self.wrong(splits)
        if part.weights == "dense":
            return given, tf.constant(np.resize(weights, (batch, part.width)))
        return given, self.matrix(part.weights, weights, splits)

    def wrong(self, splits):
        splits = splits.copy()
        splits[self.rng.integers(splits.size)] += self.rng.integers(-2, 3)
        return splits

    def matrix(self, rows, values, splits):
        """Returns a ragged or sparse matrix, unchecked."""
        if rows != "sparse":
            splits = splits.astype(np.int32 if rows == "ragged of int32" else np.int64)
            return tf.RaggedTensor.from_row_splits(values, splits, validate=False)
        lengths = np.maximum(0, np.diff(splits))
        at = np.repeat(np.arange(lengths.size), lengths)
        at = np.resize(at, values.size) if at.size else np.zeros(values.size, np.int64)
        indices = np.stack([at, np.zeros_like(at)], 1)
        return tf.SparseTensor(indices.astype(np.int64), values, (lengths.size, 4))


def runs(route, drawn):
    """Returns the function that looks up in a route's tables."""
    variables = [route.variables[part.table] for part in drawn.parts]

    def look_up(ids, weights):
        if drawn.is_local:
            options = {name: drawn.options.get(name) for name in ("training", "missing")}
            return [variables[0].sparse_read(ids[0], **options)]
        own = iter(weights)
        own = [None if part.weights is None else next(own) for part in drawn.parts]
        weights = [
            given.with_flat_values(own)
            if part.weights == "same" and isinstance(given, tf.RaggedTensor)
            else tf.SparseTensor(given.indices, own, given.dense_shape)
            if part.weights == "same" and isinstance(given, tf.SparseTensor)
            else tf.reshape(own, tf.shape(given))
            if part.weights == "same"
            else own
            for part, given, own in zip(drawn.parts, ids, own, strict=True)
        ]
        combiners = [part.combiner for part in drawn.parts]
        return sok.lookup_sparse(variables, ids, weights, combiners, **drawn.options)

    def run(ids, weights):
        if not drawn.has_tape:
            return look_up(ids, weights), [], []
        flat = [getattr(each, "values", each) for each in weights]
        with tf.GradientTape() as tape:
            tape.watch(flat)
            rows = look_up(ids, weights)
            sums = [tf.reduce_sum(tf.cast(each, tf.float32) ** 2) for each in rows]
            loss = tf.add_n(sums) if sums else tf.constant(0.0)
        distinct = list({id(each): each for each in variables}.values())
        of_tables, of_weights = tape.gradient(loss, [distinct, flat])
        of_tables = [(each.indices, each.values) for each in of_tables]
        return rows, of_tables, of_weights

    return run


def noted(variable):
    """Returns what a table knows of its last gradient: (keys, rows, what else)."""
    known = variable.table.row_cache.read()
    kinds = (known.keys, ctypes.c_int64), (known.rows, ctypes.c_uint32)
    keys, rows = ((kind * known.size).from_address(at)[:] if at else [] for at, kind in kinds)
    return keys, rows, known[2:]


def spec_of(value):
    """Returns the spec of an argument of a function, of any size."""
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensorSpec([None, None], value.dtype, 1, value.row_splits.dtype)
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensorSpec([None, None], value.dtype)
    return tf.TensorSpec([None, *value.shape[1:]], value.dtype)


class Program:
    """Drawn calls, one after another, by both routes.

    Args:
      seed: of what is drawn.
      is_noted: whether what tables note of their last gradients is compared too, and row numbers.

    Attributes:
      num_native: lookups that ended without Python.
    """

    def __init__(self, seed, is_noted=True):
        self.drawing, self.is_noted = Drawing(seed), is_noted
        self.routes = both(self.drawing.make)
        self.calls = [self.drawing.call() for _ in range(5)]
        self.functions = {}
        self.num_native = 0

    def step(self, number):
        """Does one thing."""
        rng, drawing = self.drawing.rng, self.drawing
        done = rng.integers(10)
        if done < 7:
            self.look_up(int(rng.integers(len(self.calls))))
        else:
            getattr(self, drawing.one_of(("write", "erase", "epoch", "scores", "update")))()
        assert_equal(*self.routes, numbers=self.is_noted)
        if number % 10 == 9:
            audit_both(*self.routes)

    def known(self, table):
        """Returns the keys of a table, or any, to draw from."""
        keys = self.routes[0].variables[table].table.export()[0].tolist()
        if keys and self.drawing.is_so(0.8):
            return keys
        universe = _UNIVERSE[self.drawing.key_types[table]]
        return universe[: self.drawing.one_of((20, len(universe)))]

    def both(self, call):
        """Has both routes do the same; returns what it gave."""
        results = [route.run(call, route) for route in self.routes]
        assert results[0] == results[1]
        return results[0]

    # --------------------------------------------------------------------- lookups

    def look_up(self, number):
        drawn, drawing = self.calls[number], self.drawing
        batches = [drawing.batch(part, self.known(part.table)) for part in drawn.parts]
        ids = [each for each, _ in batches]
        weights = [each for _, each in batches if each is not None]
        is_traced, mode = drawing.is_so(0.5), contextlib.nullcontext
        if drawing.is_so(0.2):
            missing = drawing.one_of((None, "initial", "zeros"))
            mode = lambda: sok.inference_mode(missing=missing)  # noqa: E731
        updates = drawing.is_so(0.5) and drawing.one_of((0, 1, 2))

        def call(route):
            run = self.traced(route, number, ids, weights) if is_traced else runs(route, drawn)
            before = LOOKUPS.native[0]
            with mode():
                outputs, of_tables, of_weights = run(ids, weights)
            count = LOOKUPS.native[0] - before
            assert count <= int(route.is_native)
            self.num_native += count
            known = [noted(each) for each in route.variables] if self.is_noted else None
            distinct = dict.fromkeys(part.table for part in drawn.parts)
            if of_tables and updates is not False:
                gradients = [
                    (tf.IndexedSlices(values, keys), route.variables[table])
                    for (keys, values), table in zip(of_tables, distinct, strict=True)
                ]
                route.optimizers[updates].apply_gradients(gradients)
            return outputs, of_tables, of_weights, known

        return self.both(call)

    def traced(self, route, number, ids, weights):
        """Returns the lookup as a function."""

        def make():
            arguments = tf.nest.map_structure(spec_of, (ids, weights), expand_composites=False)
            run = runs(route, self.calls[number])
            return tf.function(run, input_signature=arguments, autograph=False)

        return self.planned(route, (route, number), make)

    def planned(self, route, name, make):
        """Returns a function, which is made once: native code has a plan of it on both routes."""
        if name not in self.functions:
            for each in route.variables:
                each.table.record.allows = ALL
            self.functions[name] = make().get_concrete_function()
            for each in route.variables:
                each.table.record.allows = route.is_native * ALL
        return self.functions[name]

    # --------------------------------------------------------------------- what else is done

    def some_of(self, tables):
        """Returns one of some tables and keys for it."""
        table = int(self.drawing.one_of(tables))
        key_type = self.drawing.key_types[table]
        known = [key for key in self.known(table) if key not in _OTHERS[key_type]]
        count = int(self.drawing.rng.integers(1, 8))
        keys = np.array([self.drawing.one_of(known) for _ in range(count)], key_type)
        return table, np.unique(keys)

    def write(self):
        drawing, name = self.drawing, self.drawing.one_of(list(WRITES))
        table, keys = self.some_of(range(len(drawing.kinds)))
        keys = drawing.rng.choice(keys, drawing.rng.integers(1, 80))
        rows = drawing.rng.integers(-9, 9, (keys.size, drawing.dims[table]))
        rows = tf.cast(rows, drawing.dtypes[table])

        def call(route):
            make = partial(writing, route.variables[table], name)
            self.planned(route, (route, table, name), make)(tf.constant(keys), rows)

        self.both(call)

    def erase(self):
        table, keys = self.some_of(range(len(self.drawing.kinds)))
        self.both(lambda route: route.variables[table].table.erase(keys))

    def epoch(self):
        tables = [i for i, kind in enumerate(self.drawing.kinds) if "Epoch" in kind]
        if tables:
            table, epoch = self.drawing.one_of(tables), int(self.drawing.rng.integers(1, 9))
            for route in self.routes:
                route.variables[table].table.epoch = epoch

    def scores(self):
        tables = [i for i, kind in enumerate(self.drawing.kinds) if "kCustomized" in kind]
        if tables:
            table, keys = self.some_of(tables)
            scores = self.drawing.rng.integers(0, 99, keys.size).astype(np.uint64)
            self.both(lambda route: route.variables[table].table.assign_scores(keys, scores))

    def update(self):
        tables = [i for i, kind in enumerate(self.drawing.dtypes) if kind in FLOATS]
        table, keys = self.some_of(tables)
        grads = self.drawing.rng.normal(size=(keys.size, self.drawing.dims[table]))
        given = tf.IndexedSlices(tf.constant(grads, tf.float32), tf.constant(keys))
        optimizer = self.drawing.one_of((0, 1, 2))
        self.both(
            lambda route: (
                route.optimizers[optimizer].apply_gradients([(given, route.variables[table])])
                and None
            )
        )


@pytest.mark.filterwarnings("ignore:Table 't. had no room")
@pytest.mark.parametrize("seed", range(len(KINDS)))
def test_drawn_calls_have_the_same_bits_by_both_routes(seed):
    program = Program(seed)
    for number in range(30 if QUICK else 60):
        program.step(number)
    audit_both(*program.routes)
    assert program.num_native > 0


# ------------------------------------------------------------------------------- entries


def ragged(keys, values=None):
    splits = np.array([0, 2, 2, len(keys)])
    return tf.RaggedTensor.from_row_splits(keys if values is None else values, splits)


def sparse(keys, values=None):
    given = ragged(keys, values).to_sparse()
    return tf.SparseTensor(given.indices, given.values, [5, 3])


def rows_of(weights, form=ragged):
    return lambda keys: form(keys, tf.range(1.0, len(keys) + 1)) if weights else None


def pooled(ids, weights=None, **options):
    """Returns a lookup of keys, pooled: in two tables, the first twice."""

    def look_up(variables, keys):
        one, other = variables
        own = weights(keys) if weights is not None else None
        return sok.lookup_sparse(
            [one, other, one], [ids(keys)] * 3, [own, None, own], list(COMBINERS), **options
        )

    return look_up


LOOKUPS_OF_KEYS = {
    "dense": pooled(lambda keys: tf.reshape(keys, [2, 2])),
    "one each": pooled(lambda keys: keys),
    "ragged": pooled(ragged),
    "ragged of int32": pooled(lambda keys: ragged(keys).with_row_splits_dtype(tf.int32)),
    "sparse": pooled(sparse),
    "weighted": pooled(ragged, rows_of(True)),
    "weighted, sparse": pooled(sparse, rows_of(True, sparse)),
    "weighted, dense": pooled(lambda keys: keys, lambda keys: tf.range(4.0)),
    "filtered": pooled(ragged, use_low_frequency_filter=True),
    "in training": pooled(ragged, training=True),
    "not in training": pooled(ragged, training=False),
    "zeros": pooled(ragged, training=False, missing="zeros"),
    "rows": lambda variables, keys: tf.nn.embedding_lookup(variables[0], keys),
    "rows, zeros": lambda variables, keys: variables[0].sparse_read(
        keys, training=False, missing="zeros"
    ),
    "rows of a matrix": lambda variables, keys: tf.gather(variables[1], tf.reshape(keys, [2, 2])),
}


TABLES_OF_KEYS = [
    *[("hbm", "int64", "float32", "uniform"), ("kLru", "int32", "float16", "normal")],
    *[("kEpochLfu", "int64", "float64", "constant"), ("kCustomized", "uint64", "bfloat16", "row")],
    *[("kLfu of repeats", "int64", "float32", "matrix"), ("hbm", "int64", "float16", "truncated")],
    *[("hbm", "uint64", "bfloat16", "matrix"), ("kLfu of all", "int64", "float32", "normal")],
    *[("hbm", "int64", dtype, None) for dtype in INTEGERS],
]


@pytest.mark.cases("name")
@pytest.mark.pairs
@pytest.mark.parametrize("table", TABLES_OF_KEYS, ids=lambda table: " ".join(map(str, table)))
@pytest.mark.parametrize("name", LOOKUPS_OF_KEYS)
def test_a_lookup_of_known_keys_or_with_room_does_not_enter_python(mode, name, table):
    kind, key_type, dtype, first = table
    if name == "filtered" and kind == "hbm":
        pytest.skip("a table that keeps every key has no filter")
    if dtype in INTEGERS and not name.startswith("rows"):
        pytest.skip("integers are not pooled")
    first = first and _INITIAL[first](3)
    variables = [new_variable(kind, f"t{i}", 3, key_type, dtype, first) for i in range(2)]
    for each in variables:
        each.table.lookup([5, 7, 9, 11])
        give_room(each.table)
    look_up = mode(lambda keys: LOOKUPS_OF_KEYS[name](variables, keys))
    known, new = (tf.constant(keys, key_type) for keys in ([7, 5, 5, 11], [7, 5, 6, 11]))
    look_up(known)
    counts = []
    for keys in (known, known, new, known):
        before = num_entries()
        look_up(keys)
        counts.append(num_entries() - before)
    # There is room for the new key; where repeats count Python inserts it.
    inserts = kind == "kLfu of repeats" and name not in ("zeros", "not in training", "rows, zeros")
    assert counts == [0, 0, int(inserts), 0]
    for each in variables:
        audit(each.table)


@pytest.mark.parametrize("kind", ["hbm", "kLfu of all"])
def test_new_keys_that_find_no_slot_are_taken_back_and_python_goes_on(mode, kind):
    def make():
        # The first one is in the lookup twice, and the second as well where keys find slots.
        variables = [new_variable(kind, "t0"), new_variable("hbm", "t1")]
        for each in variables:
            each.table.reserve(4000)
            each.table.store.reserve(4000)
        return variables

    routes = both(make)
    made = chosen_keys.of_one_line if kind == "hbm" else chosen_keys.of_two_buckets
    keys = made(1100 if kind == "hbm" else 36, routes[0].variables[0].table.index.seed)
    keys = tf.constant(np.concatenate([np.arange(20), keys, keys[:9], np.arange(30)]))
    before, results = num_entries(), []
    for route in routes:
        look_up = mode(partial(LOOKUPS_OF_KEYS["one each"], route.variables))
        look_up(tf.range(tf.constant(10, tf.int64)))
        results.append(route.run(look_up, keys))
        audit(route.variables[0].table)
        assert len(route.variables[0].table.export()[0]) == len(set(keys.numpy().tolist()))
    assert num_entries() - before == 2
    assert results[0] == results[1] and len(results[0]) == 3
    if kind == "hbm":  # native code has tried first
        native, by_python = (route.variables[0].table.index._counts[2] for route in routes)
        assert native > by_python


@pytest.mark.parametrize("name", ["ragged", "rows", "weighted"])
@pytest.mark.parametrize("kind", ["kLru in tiers", "kLfu in tiers", "kLfu of repeats in tiers"])
def test_python_moves_rows_between_tiers_and_native_code_counts_accesses(mode, name, kind):
    rng = np.random.default_rng(0)
    routes = both(lambda: [new_variable(kind, f"t{i}") for i in range(2)])
    functions = []
    for route in routes:
        for each in route.variables:
            each.table.lookup(np.arange(200))
            assert each.table.store.num_far_rows > 100
            give_room(each.table)
        look_up = partial(LOOKUPS_OF_KEYS[name], route.variables)
        functions.append(mode(look_up))
    entries = []
    for _ in range(40):
        keys = tf.constant(rng.zipf(1.3, 60) % 200)
        before = num_entries()
        results = [
            route.run(function, keys) for route, function in zip(routes, functions, strict=True)
        ]
        assert results[0] == results[1]
        entries.append(num_entries() - before - 1)
        assert_equal(*routes)
    passes = [each.table.tiers.num_passes for each in routes[0].variables]
    assert max(passes) > 1 and max(passes) <= sum(entries) < 20
    audit_both(*routes)


# ------------------------------------------------------------------------------- errors


def sparse_at(rows, num_rows=3, weights=None):
    """Returns ids, or weights, in some rows of a sparse matrix."""
    values = tf.constant([5, 7, 9][: len(rows)], tf.int64) if weights is None else weights
    indices = np.stack([rows, np.zeros(len(rows), np.int64)], 1)
    return tf.SparseTensor(indices, values, [num_rows, 1])


def ragged_at(splits, values=(5, 7, 9)):
    return tf.RaggedTensor.from_row_splits(
        np.array(values), np.array(splits, np.int64), validate=False
    )


def of_weights(weights, ids=None):
    return lambda variables: sok.lookup_sparse(
        variables[:1], [ragged_at([0, 2, 3]) if ids is None else ids], [weights], "sum"
    )


def of_ids(*ids, **options):
    return lambda variables: sok.lookup_sparse(variables[: len(ids)], list(ids), **options)


def in_a_pipeline(variables):
    dataset = tf.data.Dataset.from_tensors(np.array([5, 1]))
    return next(iter(dataset.map(lambda keys: tf.nn.embedding_lookup(variables[0], keys))))


def wrong_gradient(variables):
    with tf.GradientTape(persistent=True) as tape:
        (rows,) = sok.lookup_sparse(variables[:1], [tf.constant([[5], [7]])], combiners="sum")
    tape.gradient(rows, variables[0])  # it makes room
    return tape.gradient(rows, variables[0], tf.ones((2, 4)))


KEPT = ragged_at([0, 1, 3])
# Calls that raise, of an "hbm" table, one of int32 keys, one of uint64 keys, and one that is full:
# those that are hardly drawn.
WRONG = {
    "splits that fall, of the second": of_ids(KEPT, ragged_at([0, 3, 1, 3])),
    "splits below 0": of_ids(ragged_at([-1, 2, 3])),
    "splits of no rows": of_ids(ragged_at([0])),
    "splits of no rows and no keys": of_ids(ragged_at([2], np.array([], np.int64))),
    "no splits": of_ids(ragged_at([])),
    "rows that fall": of_ids(sparse_at([1, 0, 2])),
    "rows out of range": of_ids(sparse_at([0, 1, 3])),
    "rows below 0": of_ids(sparse_at([-1, 1, 2])),
    "rows of which there are none": of_ids(sparse_at([0], 0)),
    "fewer rows than none": of_ids(sparse_at([0], -1)),
    "more rows than memory has": of_ids(sparse_at([0], 2**62)),
    "more keys than indices": of_ids(
        tf.SparseTensor([[0, 0], [1, 0]], tf.constant([5, 7], tf.int64), [2, 1]),
        tf.SparseTensor([[0, 0], [1, 0]], tf.constant([2**31, 7], tf.int64), [2, 1]),
    ),
    "uint64 keys beyond int32": of_ids(KEPT, np.array([5, 2**32 + 5], np.uint64)),
    "weights in rows that fall": of_weights(sparse_at([1, 0, 0], 2, [1.0, 2.0, 3.0])),
    "weights of sparse rows": of_weights(
        sparse_at([0, 1, 2], 3, [1.0, 2.0, 3.0]), sparse_at([0, 1, 1])
    ),
    "insertion in a pipeline": in_a_pipeline,
    "a gradient of another dimension": wrong_gradient,
    "a full table": lambda variables: sok.lookup_sparse(
        [variables[0], variables[3]], [np.arange(70)] * 2, combiners="sum"
    ),
    "rows of a full table": lambda variables: tf.nn.embedding_lookup(variables[3], np.arange(70)),
}


def tables_of_errors():
    variables = [
        new_variable("hbm", "a"),
        new_variable("kLfu", "b", key_type="int32"),
        new_variable("hbm", "c", key_type="uint64"),
        new_variable("full kEpochLfu", "d"),
    ]
    for each in variables:
        each.table.lookup([5, 7, 9])
        give_room(each.table)
    return variables


@pytest.mark.cases("name")
@pytest.mark.parametrize("name", WRONG)
def test_errors_are_the_same_by_both_routes(mode, name):
    routes = both(tables_of_errors)
    functions = [mode(lambda route=route: WRONG[name](route.variables)) for route in routes]
    for _ in range(2):
        # A function is traced when it is called first, then with a plan.
        for each in routes[1].variables:
            each.table.record.allows = ALL
        found = [route.run(call) for route, call in zip(routes, functions, strict=True)]
        assert found[0] == found[1]
        assert len(found[0]) == 2 and len(found[0][1]) > 20, "nothing was wrong"
        assert_equal(*routes)
        audit_both(*routes)
    # And what follows is right.
    for table in range(4):
        found = [
            route.run(lambda variable: variable.sparse_read([5, 8]), route.variables[table])
            for route in routes
        ]
        assert found[0] == found[1]
    assert_equal(*routes)


@pytest.mark.parametrize("num_dims", [1, 2, 3])
def test_sparse_ids_of_a_rank_that_the_graph_does_not_know(num_dims):
    native, python = both(lambda: [new_variable()])
    indices = np.array([[0, 0, 1], [0, 1, 0], [1, 0, 1], [1, 1, 0]])[:, :num_dims]
    ids = tf.SparseTensor(indices, tf.constant([1, 2, 3, 1], tf.int64), [2] * num_dims)
    results = []
    for route in (native, python):
        (variable,) = route.variables
        variable.table.lookup([1, 2, 3])

        @tf.function(input_signature=[tf.SparseTensorSpec(None, tf.int64)])
        def call(ids, variable=variable):
            return sok.lookup_sparse([variable], [ids], combiners=["sum"])

        results.append(route.run(call, ids))
    assert results[0] == results[1]
    ((_, shape, _),) = results[0]
    assert shape == (2, 3)
    assert_equal(native, python)


# ------------------------------------------------------------------------------- gradients


@contextlib.contextmanager
def by_python(variables):
    """A block in which native code leaves all calls to Python."""
    for each in variables:
        each.table.record.allows = 0
    try:
        yield
    finally:
        for each in variables:
            each.table.record.allows = ALL


def bits_of(gradient):
    return bits(gradient.indices), bits(gradient.values)


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
            assert bits_of(gradient(ids)) == bits_of(found)
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
    assert bits_of(tape.gradient(output, variable)) == bits_of(first)
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
    assert bits_of(tape.gradient(output, variable)) == bits_of(before)


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
        assert bits_of(step(ids)) == bits_of(native)
