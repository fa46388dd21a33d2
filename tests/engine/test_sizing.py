"""What a table is planned to take, against `statistics()` of one that was filled."""

import copy
import itertools

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.engine.optimizer_states import acquire_states
from sok_lite.engine.optimizers import SGD, Adagrad, Adam
from sok_lite.engine.table import sizing
from sok_lite.engine.table.sizing import RowBytes
from tests.support.helpers import new_table

CPU = get_backend("cpu")
OPTIMIZERS = {"sgd": SGD(), "adagrad": Adagrad(), "adam": Adam(), "amsgrad": Adam(amsgrad=True)}
KEYS = np.random.default_rng(0).permutation(60_000) * 2_654_435_761
ITEM = {"float32": 4, "float16": 2, "bfloat16": 2}


class Owner:
    """What states belong to."""


def filled(var_type, num_keys, dim, dtype, optimizer, backend=CPU, parts=1, **options):
    """The statistics of a table with so many keys and the states of an optimizer."""
    table = new_table(backend, dim, var_type, dtype=dtype, **options)
    states = {name: (dim, initial) for name, initial in OPTIMIZERS[optimizer].states.items()}
    owner = Owner()
    acquire_states([table], [states], [owner])
    for keys in np.array_split(KEYS[:num_keys], parts):
        table.find_or_insert(keys)
    assert table.size == num_keys
    return table.statistics()


def row_of(dim, dtype, optimizer):
    return RowBytes.of(dim, dtype, len(OPTIMIZERS[optimizer].states) * dim)


@pytest.mark.parametrize("num_keys", [1, 700, 50_000])
@pytest.mark.parametrize(
    ("dim", "dtype", "optimizer"),
    [(1, "float32", "sgd"), (7, "bfloat16", "adagrad"), (64, "float32", "adam")],
)
def test_an_hbm_table_takes_what_is_planned(dim, dtype, optimizer, num_keys):
    found = filled("hbm", num_keys, dim, dtype, optimizer)
    plan = sizing.hbm_bytes(num_keys, row_of(dim, dtype, optimizer))
    assert found.near_bytes == plan.near_rows + plan.near_states
    assert plan.near_rows == num_keys * dim * ITEM[dtype]
    assert abs(found.index_bytes - plan.slots) <= 64  # the slots of the two reserved keys
    assert (found.far_bytes, plan.far, plan.access_counts) == (0, 0, 0)


@pytest.mark.parametrize(("num_keys", "strategy"), [(700, "kLru"), (50_000, "kLfu")])
@pytest.mark.parametrize(
    ("dim", "dtype", "optimizer"),
    [(1, "float32", "sgd"), (7, "float16", "adagrad"), (16, "float32", "amsgrad")],
)
def test_a_hybrid_table_takes_what_is_planned(dim, dtype, optimizer, num_keys, strategy):
    row, capacity = row_of(dim, dtype, optimizer), sizing.max_capacity_for(num_keys)
    gigabytes = num_keys // 3 * row.row / 2**30
    options = {"max_capacity": capacity, "max_hbm_for_vectors": gigabytes}
    found = filled("hybrid", num_keys, dim, dtype, optimizer, evict_strategy=strategy, **options)
    plan = sizing.hybrid_bytes(num_keys, row, capacity, num_keys // 3, strategy != "kLru")
    assert plan.far_rows and found.evicted_total == found.refused_total == 0
    for measured, planned in (
        (found.near_bytes, plan.near_rows + plan.near_states),
        (found.far_bytes, plan.far_rows + plan.far_states),
        (found.index_bytes, plan.slots + plan.access_counts),
    ):
        assert measured == pytest.approx(planned, rel=0.05)


def test_a_hybrid_table_of_one_tier_counts_no_accesses():
    row, capacity = row_of(4, "float32", "sgd"), sizing.max_capacity_for(5000)
    found = filled("hybrid", 5000, 4, "float32", "sgd", max_capacity=capacity)
    plan = sizing.hybrid_bytes(5000, row, capacity, None)
    assert (found.near_bytes, plan.access_counts, plan.far) == (plan.near_rows, 0, 0)
    assert found.index_bytes == pytest.approx(plan.slots, rel=0.05)


@pytest.mark.parametrize("var_type", ["hbm", "hybrid"])
def test_what_is_set_aside_is_within_the_spare(var_type):
    """Filled a few keys at a time, by slabs so small that many are made."""
    backend = copy.copy(CPU)
    backend.chunk_bytes = backend.far_chunk_bytes = 1 << 10
    row, num_keys, options = row_of(8, "float32", "adam"), 60_000, {}
    plan = sizing.hbm_bytes(num_keys, row)
    if var_type == "hybrid":
        capacity, near = sizing.max_capacity_for(num_keys), 20_000
        options = {"max_capacity": capacity, "max_hbm_for_vectors": near * row.row / 2**30}
        plan = sizing.hybrid_bytes(num_keys, row, capacity, near)
    found = filled(var_type, num_keys, 8, "float32", "adam", backend, 97, **options)
    slab = 3 * backend.chunk_bytes  # of each column, the last is not full
    near, far = found.near_reserved_bytes + found.index_bytes, found.far_reserved_bytes
    assert plan.near - plan.near_spare <= near * 1.01 and near <= plan.near + slab
    assert plan.far - plan.far_spare <= far * 1.01 and far <= plan.far + slab


def test_max_capacity_keeps_every_key():
    for num_keys in (1, 768, 769, 100_000, 1_610_612_736):
        capacity = sizing.max_capacity_for(num_keys)
        assert num_keys <= 0.75 * capacity and capacity & (capacity - 1) == 0
        assert capacity == 1024 or num_keys > 0.75 * capacity / 2
    assert sizing.max_capacity_for(1_610_612_737) is None


def test_the_numbers_of_the_page():
    """Of docs/sizing.md: bytes a key of an index, and of a billion keys."""
    shares = [
        sizing.hbm_bytes(n, RowBytes(64, 128)).slots / n
        for n in itertools.accumulate(range(60), lambda n, _: n * 5 // 4, initial=50_000)
    ]
    assert min(shares) >= 22.8 and max(shares) <= 34.5
    billion = sizing.hbm_bytes(10**9, RowBytes.of(16, "float32", 32))
    kept = billion.near - billion.near_spare
    assert (round(billion.slots / 1e9), round(kept / 1e9)) == (31, 223)
