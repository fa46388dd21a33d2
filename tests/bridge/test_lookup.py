"""One contract for the lookups of all APIs: rows, pools and gradients, by NumPy."""

from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite import dynamic_embedding as de
from sok_lite import kv_variable as kv
from sok_lite.keras import Table as KerasTable
from tests.support.modes import MODES
from tests.support.step_oracle import key_gradients, outputs

pytestmark = pytest.mark.usefixtures("initialised")

tf1 = tf.compat.v1
DIM = 3
KEYS = np.array([0, 1, -1, 5, -7, 40, -(2**63), 2**63 - 1])
ROWS = np.random.default_rng(3).normal(size=(len(KEYS), DIM)).astype(np.float32)


class Table(NamedTuple):
    """A table that holds ROWS, as a lookup takes it.

    Attributes:
      params: what a lookup is given.
      sources: what gradients are taken of.
      keys: of the rows.
    """

    params: Any
    sources: list[Any]
    keys: np.ndarray = KEYS


def fill(here, write):
    """Writes ROWS by a function of keys and rows."""

    def call(keys, rows):
        written = write(keys, rows)
        return written if here.is_graph else None

    here.run(call, KEYS, ROWS)


def of_sok(here, **options):
    table = sok.DynamicVariable(DIM, "9", **options)
    fill(here, lambda keys, rows: sok.assign(table, keys, rows))
    return Table(table, [table])


def static(here, **options):
    table = sok.Variable(ROWS, **options)
    return Table(table, [table], np.arange(len(ROWS)))


def of_kv(here, parts):
    options = {}
    if parts:
        options["partitioner"] = tf1.fixed_size_partitioner(parts)
    # Names are of the process.
    with tf1.variable_scope(f"contract_{id(here)}"):
        table = kv.get_kv_variable("kv", DIM, initializer=9.0, **options)
    fill(here, lambda keys, rows: kv.insert_kv_embedding(table, keys, rows))
    return Table(table, list(table) if parts else [table])


def of_keras(here):
    layer = KerasTable("item", DIM, initializer=9.0)
    layer.assign(KEYS, ROWS)
    return Table(layer.variable, [layer.variable])


def of_de(here):
    variable = de.get_variable(f"contract_{id(here)}", dim=DIM, initializer=9.0)
    fill(here, variable.upsert)
    table = variable.get_trainable_by_name("name")
    return Table(table, [])


def trained_of_de(here):
    table = of_de(here)
    return table._replace(sources=[table.params])


TABLES = {
    "sok": of_sok,
    "localized": lambda here: of_sok(here, mode="localized:0"),
    "static": static,
    "static, localized": lambda here: static(here, mode="localized:0"),
    "keras": of_keras,
    "de": of_de,
    "de, trained": trained_of_de,
    "kv": lambda here: of_kv(here, None),
    "kv of 1 part": lambda here: of_kv(here, 1),
    "kv of 3 parts": lambda here: of_kv(here, 3),
}
ROW_CALLS = {
    "tf": (tf.nn.embedding_lookup, ["sok", "keras", "kv", "kv of 3 parts"]),
    "tf1": (tf1.nn.embedding_lookup, ["sok", "kv of 1 part"]),
    "gather": (tf.gather, ["sok"]),
    "kv": (kv.embedding_lookup, ["kv", "kv of 3 parts"]),
    "kv unique": (kv.embedding_lookup_unique, ["kv of 1 part", "kv of 3 parts"]),
    "all2all": (
        sok.all2all_dense_embedding,
        ["sok", "localized", "static", "static, localized"],
    ),
    "de": (de.embedding_lookup, ["de, trained"]),
    "de unique": (de.embedding_lookup_unique, ["de, trained"]),
}
POOLING_CALLS = {
    "sok": (sok.lookup_sparse, ["sok", "localized", "static", "static, localized", "keras"]),
    "tf": (tf.nn.embedding_lookup_sparse, ["sok", "kv", "kv of 3 parts"]),
    "tf1": (tf1.nn.embedding_lookup_sparse, ["sok", "kv of 1 part"]),
    "kv": (kv.embedding_lookup_sparse, ["kv", "kv of 3 parts"]),
    "tf safe": (tf.nn.safe_embedding_lookup_sparse, ["sok", "keras", "de", "kv of 3 parts"]),
    "tf1 safe": (tf1.nn.safe_embedding_lookup_sparse, ["sok", "de", "kv"]),
    "kv safe": (kv.safe_embedding_lookup_sparse, ["kv of 1 part", "kv of 3 parts"]),
    "de": (de.embedding_lookup_sparse, ["de, trained"]),
    "de safe": (de.safe_embedding_lookup_sparse, ["de, trained"]),
}


@pytest.fixture(params=MODES)
def here(request):
    """Calls functions in one of TensorFlow's modes; see `modes`."""
    with MODES[request.param]() as mode:
        yield mode


def pairs_of(calls):
    return [(name, table) for name, (_, tables) in calls.items() for table in tables]


def made(here, table):
    if here.is_graph and table in ("keras", "de", "de, trained"):
        pytest.skip("a layer of Keras, and a trainable of TFRA by its name, are of eager mode")
    return TABLES[table](here)


def params_of(table, number):
    """The table as it is, or in a list."""
    return table.sources if number % 2 and table.sources else table.params


def run(here, table, look_up, factors, *arrays):
    """Returns what a lookup gives, {key: gradient of its row}, and the gradients by the arrays
    but the first. In a graph of TF1 a tape must find what `tf.gradients` finds."""

    def call(*tensors):
        watched = [*table.sources, *tensors[1:]]
        with tf.GradientTape() as tape:
            tape.watch(tensors[1:])
            rows = look_up(*tensors)
            loss = tf.reduce_sum(rows * factors)
        found = [tape.gradient(loss, watched)]
        if here.is_graph and watched:
            found.append(tf.gradients(loss, watched))
        return rows, [
            ([(each.indices, each.values) for each in gradients[:number]], gradients[number:])
            for gradients in found
        ]

    number, results = len(table.sources), []
    rows, found = here.run(call, *arrays)
    for slices, by_arrays in found:
        sums = {}
        for part, (keys, values) in enumerate(slices):
            for key, value in zip(keys.tolist(), np.float64(values), strict=True):
                assert table.keys is not KEYS or key % number == part
                sums[key] = sums.get(key, 0) + value
        results.append((sums, by_arrays))
    for sums, by_arrays in results[1:]:
        assert sums.keys() == results[0][0].keys()
        for key, row in sums.items():
            np.testing.assert_allclose(row, results[0][0][key], rtol=1e-6)
        for one, other in zip(by_arrays, results[0][1], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    return rows, *results[0]


def assert_gradients(table, found, expected):
    """`expected` is by the place of a key."""
    expected = {int(table.keys[place]): row for place, row in expected.items()}
    if table.sources:
        assert found.keys() == expected.keys()
        for key, row in expected.items():
            np.testing.assert_allclose(found[key], row, rtol=1e-5, atol=1e-6)


def padded(table, rows):
    """All rows: TensorFlow's own function leaves empty ones at the end out."""
    if not isinstance(table.params, sok.DynamicVariable):
        return rows
    return tf.pad(rows, [[0, len(LISTS) - tf.shape(rows)[0]], [0, 0]])


def clipped(rows, max_norm):
    norms = np.linalg.norm(rows, axis=-1, keepdims=True)
    return np.where(norms > max_norm, rows * (max_norm / norms), rows)


@pytest.mark.cases("name")
@pytest.mark.pairs
@pytest.mark.parametrize(("name", "table"), pairs_of(ROW_CALLS))
def test_a_row_for_each_key(here, name, table):
    table, call = made(here, table), ROW_CALLS[name][0]
    shapes = [(0,), (1,), (10,)] if name == "all2all" else [(), (0, 3), (10,), (5, 1, 2)]
    for number, shape in enumerate(shapes):
        places = np.array([3, 0, 3, 7, 6, 5, 4, 2, 1, 3])[: int(np.prod(shape))].reshape(shape)
        factors = np.random.default_rng(1).normal(size=(*shape, DIM)).astype(np.float32)
        params = table.params if name in ("gather", "all2all") else params_of(table, number)
        rows, found, _ = run(
            here, table, lambda ids, p=params: call(p, ids), factors, table.keys[places]
        )
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows, ROWS[places])
        flat = [[place] for place in places.reshape(-1).tolist()]
        assert_gradients(table, found, key_gradients(flat, factors.reshape(-1, DIM), "sum"))
    if name in ("gather", "all2all"):
        return
    if name != "kv unique":
        rows = here.run(lambda ids: call(table.params, ids, max_norm=0.5), table.keys)
        np.testing.assert_allclose(rows, clipped(ROWS, 0.5), rtol=1e-6)
    if name.startswith("de"):  # which have functions of their own for ragged ids
        return

    def ragged(keys):
        out = call(table.params, tf.RaggedTensor.from_row_lengths(keys, [2, 0, 1]))
        assert isinstance(out, tf.RaggedTensor)
        return out.flat_values, out.row_lengths()

    rows, lengths = here.run(ragged, table.keys[[3, 0, 2]])
    np.testing.assert_array_equal(rows, ROWS[[3, 0, 2]])
    assert lengths.tolist() == [2, 0, 1]


# Places of keys. An empty row in the middle and one at the end; one whose only weight does not
# count where a lookup is safe.
LISTS = [[3, 4], [], [6], [7, 0, 0, 2], []]
WEIGHTS = [[2.0, 0.5], [], [-1.0], [0.0, 0.25, 4.0, 3.0], []]


def weight_gradients(weights, combiner, factors):
    """By the quotient rule, flat."""
    found = []
    for places, each, factor in zip(LISTS, weights, np.float64(factors), strict=True):
        each = np.float64(each)
        dots = np.float64(ROWS[places]) @ factor
        divisor = {"sum": 1.0, "mean": each.sum(), "sqrtn": np.sqrt((each**2).sum())}[combiner]
        slope = {"sum": 0.0, "mean": 1.0, "sqrtn": each / (divisor or 1.0)}[combiner]
        found += [(dots - slope * (each @ dots) / divisor) / divisor] if places else []
    return np.concatenate(found)


CASES = [
    *[("mean", True, "ragged"), ("sqrtn", True, "sparse"), ("sum", False, "sparse")],
    *[("mean", False, "ragged"), ("sum", True, "ragged"), ("sqrtn", False, "sparse")],
]


@pytest.mark.pairs
@pytest.mark.parametrize(("name", "table"), pairs_of(POOLING_CALLS))
def test_rows_are_pooled(here, name, table, request):
    table, call = made(here, table), POOLING_CALLS[name][0]
    is_safe, is_sok = "safe" in name, name == "sok"
    if is_safe and "tf.function-simt" in request.node.name:
        pytest.skip("what leaves weights out in a graph has no kernel of a GPU")
    # What fills empty rows in a graph has none either.
    has_default = is_safe and table.keys is KEYS and "simt" not in request.node.name
    factors = np.random.default_rng(2).normal(size=(len(LISTS), DIM)).astype(np.float32)
    keys = table.keys[np.concatenate(LISTS).astype(int)]
    for number, (combiner, is_weighted, form) in enumerate(CASES):
        weights = WEIGHTS if is_weighted else [[1.0] * len(row) for row in LISTS]
        default = -7 if has_default and number % 2 else None

        def look_up(ids, *own, number=number, combiner=combiner, form=form, default=default):
            ids = tf.RaggedTensor.from_row_lengths(ids, [len(row) for row in LISTS])
            given = ids.with_flat_values(own[0]) if own else None
            if form == "sparse":
                ids, given = ids.to_sparse(), given if given is None else given.to_sparse()
            options = {"combiners" if is_sok else "combiner": combiner}
            if default is not None:
                options["default_id"] = default
            params = table.params if is_sok else params_of(table, number)
            return padded(table, call(params, ids, given, **options))

        arrays = [np.concatenate(WEIGHTS).astype(np.float32)] * is_weighted
        rows, found, by_weights = run(here, table, look_up, factors, keys, *arrays)
        lists, numbers = LISTS, weights
        if is_safe:
            kept = [
                [(k, w) for k, w in zip(*row, strict=True) if w > 0 or combiner == "sum"]
                or [(4, 1.0)] * (default is not None)
                for row in zip(lists, numbers, strict=True)
            ]
            lists, numbers = ([[each[i] for each in row] for row in kept] for i in (0, 1))
        wanted = outputs(lists, lambda place: ROWS[place], combiner, DIM, numbers)
        assert rows.dtype == np.float32
        np.testing.assert_allclose(rows, wanted, rtol=1e-5, atol=1e-6)
        assert_gradients(table, found, key_gradients(lists, factors, combiner, numbers))
        for each in [] if is_safe else by_weights:
            slopes = weight_gradients(weights, combiner, factors)
            np.testing.assert_allclose(each, slopes, rtol=1e-4, atol=1e-5)
    if isinstance(table.params, sok.DynamicVariable):
        assert len(here.run(lambda: sok.export(table.params))[0]) == len(KEYS), "a key was inserted"


@pytest.mark.parametrize("name", [name for name in POOLING_CALLS if name != "sok"])
def test_rows_are_clipped_before_they_are_pooled(here, name):
    call, tables = POOLING_CALLS[name]
    table = made(here, tables[0])

    for combiner in ("mean", "sum", "sqrtn"):

        def look_up(ids, combiner=combiner):
            ids = tf.RaggedTensor.from_row_lengths(ids, [len(row) for row in LISTS]).to_sparse()
            return padded(table, call(table.params, ids, None, combiner=combiner, max_norm=0.5))

        rows = here.run(look_up, KEYS[np.concatenate(LISTS).astype(int)])
        wanted = outputs(LISTS, lambda place: clipped(ROWS, 0.5)[place], combiner, DIM)
        np.testing.assert_allclose(rows, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in POOLING_CALLS if "safe" in name])
def test_safe_lookups_of_a_higher_rank_and_of_no_ids(here, name):
    call, tables = POOLING_CALLS[name]
    table = made(here, tables[0])
    options = {"default_id": -7, "max_norm": 1.0, "combiner": "sum"}

    def look_up(keys):
        places = tf.constant([[0, 0, 1], [1, 2, 0], [1, 2, 3]], tf.int64)[: tf.size(keys)]
        return call(table.params, tf.SparseTensor(places, keys, [2, 3, 4]), **options)

    wanted = np.tile(clipped(ROWS, 1.0)[4], (2, 3, 1))
    np.testing.assert_allclose(here.run(look_up, KEYS[:0]), wanted, rtol=1e-6)
    wanted[0, 0], wanted[1, 2] = clipped(ROWS, 1.0)[5], clipped(ROWS, 1.0)[[3, 2]].sum(axis=0)
    np.testing.assert_allclose(here.run(look_up, KEYS[[5, 3, 2]]), wanted, rtol=1e-5)


@pytest.mark.cases("name")
@pytest.mark.parametrize("name", ["tf safe", "tf1 safe"])
@pytest.mark.parametrize("form", ["ragged", "sparse"])
def test_variables_of_tensorflow_are_looked_up_as_ever(name, form):
    sok.DynamicVariable(2)
    ids = tf.ragged.constant([[1, -1, 3], [], [2]], tf.int64)
    ids = ids if form == "ragged" else ids.to_sparse()
    rows = POOLING_CALLS[name][0](tf.Variable(ROWS), ids, combiner="sum")
    # TensorFlow leaves a number below 0 out.
    np.testing.assert_array_equal(rows, [ROWS[1] + ROWS[3], [0.0] * DIM, ROWS[2]])
