"""Dense arrays may begin at any element: a GPU moves 16 bytes at a time only where they lie so.

Every result is compared, bit for bit, with that of the same content in arrays of their own, which
begin on 64 bytes and more.
"""

import numpy as np
import pytest

from scripts.bench.common.row_steps import apply_rule
from sok_lite.engine.initializer_spec import make_initializer
from sok_lite.engine.message import RowMessage
from sok_lite.engine.optimizers import SGD, Adam, Ftrl
from sok_lite.engine.table import make_table
from tests.support.helpers import on
from tests.support.pooled import combine, combine_grad, combine_weight_grad, gather_rows

N, UNIQUE = 50, 20
DIMS = (4, 8, 36, 132)  # rows of whole words of 16 bytes, up to more than a warp has lanes
DTYPES = ["float32", "float16", "bfloat16", "float64"]


def placed(backend, values, shift):
    """Returns an array of the values that begins `shift` elements behind where arrays begin."""
    flat = backend.xp.empty(values.size + shift, values.dtype)
    part = flat[shift:].reshape(values.shape)
    part[...] = backend.from_host(values)
    return part


def drawn(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(dtype)


def items(backend):
    rng = np.random.default_rng(7)
    splits = np.concatenate([[0, 0], np.sort(rng.integers(0, N + 1, 14)), [N]])
    lists = (rng.integers(0, UNIQUE, N).astype(np.int32), splits)
    return [backend.from_host(each) for each in lists]


def pooled(backend, dim, dtype, at):
    source = drawn(1, UNIQUE, dim, dtype="float32" if dtype == "bfloat16" else dtype)
    if dtype == "bfloat16":
        source = (source.view(np.uint32) >> 16).astype(np.uint16)
    inverse, splits = items(backend)
    weights, n = backend.from_host(drawn(2, N)), int(splits.size) - 1
    grads = placed(backend, drawn(3, n, dim), at("grads"))
    rows = placed(backend, source, at("rows"))
    out = placed(backend, np.zeros((n, dim), np.float32), at("out"))
    back = placed(backend, np.zeros((UNIQUE, dim), np.float32), at("back"))
    yield combine(backend, rows, inverse, splits, weights, "mean", out)
    yield combine(backend, rows, inverse, splits, None, "sum")
    yield combine_grad(backend, grads, inverse, splits, weights, "mean", UNIQUE, [back])
    yield combine_weight_grad(backend, grads, rows, inverse, splits, weights, "mean")
    # One item a row: the copy that most lookups are.
    one = backend.from_host(np.arange(N + 1))
    yield combine(backend, rows, inverse, one, None, "sum")


def updated(backend, dim, dtype, at):
    for number, rule in enumerate((SGD(), Adam(), Ftrl())):
        first = make_initializer("normal", dim)
        table = make_table("hbm", backend, dim, dtype=dtype, initializer=first)
        keys = np.arange(UNIQUE) * 7
        rows = table.find_or_insert(keys)
        for step in (1, 2):
            grads = placed(backend, drawn(10 * number + step, UNIQUE, dim), at("grads"))
            apply_rule(table, rule, rows, grads, 0.1, step)
        table.accumulate(keys[::2], placed(backend, drawn(4, UNIQUE // 2, dim), at("deltas")))
        values = backend.to_host(table.lookup(keys[5:10]).values)
        table.insert_or_assign(keys[:5], placed(backend, values, at("values")))
        out = placed(backend, np.zeros((UNIQUE, dim), values.dtype), at("out"))
        yield table.lookup(keys, out=out).values
        yield gather_rows(backend, out, backend.from_host(np.arange(UNIQUE, dtype=np.int32)[::-1]))


def exchanged(backend, dim, dtype, at):
    counts = np.array([[7, 0], [3, 4], [0, 5]])  # rows for three ranks of two tables
    dtypes = (np.dtype("float32" if dtype == "bfloat16" else dtype), np.dtype(np.float32))
    rng = np.random.default_rng(1)
    order = np.concatenate([rng.permutation(10), 10 + rng.permutation(9)]).astype(np.int32)
    tables = [
        placed(backend, drawn(5, 10, dim, dtype=dtypes[0]), at("rows")),
        placed(backend, drawn(6, 9, dim + 1, dtype=dtypes[1]), at("grads")),
    ]
    row_bytes = [dim * dtypes[0].itemsize, (dim + 1) * 4]
    for places in on(backend, order, None):
        message = RowMessage.layout(backend, counts, row_bytes, places)
        results = [placed(backend, np.zeros(t.shape, t.dtype), at("out")) for t in tables]
        message.unpack(message.pack(tables), results)
        for table, result in zip(tables, results, strict=True):
            np.testing.assert_array_equal(backend.to_host(result), backend.to_host(table))
        yield from results
    yield from tables


WORK = {"pooled": pooled, "updated": updated, "exchanged": exchanged}
PLACES = ("rows", "grads", "out", "back", "deltas", "values")


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", DIMS)
def test_results_do_not_depend_on_where_arrays_begin(backend, work, dtype, dim):
    expected = [backend.to_host(x) for x in WORK[work](backend, dim, dtype, lambda place: 0)]
    assert len(expected) > 4 and all(np.any(x) for x in expected)
    for apart in (*PLACES, "all"):
        shift = 1 + len(apart) % 3
        found = WORK[work](backend, dim, dtype, lambda p, a=apart, s=shift: s * (a in (p, "all")))
        for want, got in zip(expected, found, strict=True):
            np.testing.assert_array_equal(backend.to_host(got), want, err_msg=apart)
