"""Faults planted in the real kernels do not pass the simulated GPU."""

import contextlib
import shutil

import numpy as np
import pytest

from sok_lite.backend import sources
from sok_lite.engine import sort
from sok_lite.engine.dedup import dedup_and_group
from sok_lite.engine.rows.store import NO_ROW
from tests.support.helpers import first_row, new_table
from tests.support.hkv_facts import check_items
from tests.support.reference import DictTable
from tests.support.simt import device, runtime
from tests.support.simt.backend import simt_module

pytestmark = pytest.mark.filterwarnings("ignore:.*had no room:RuntimeWarning")

SEEDS = range(6)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A folder for compiled kernels: most are the same in all of these tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def plant(monkeypatch, tmp_path, compiled):
    """Returns a function that gives a backend whose kernels have a text replaced, where it is."""
    folder = tmp_path / "kernels"
    shutil.copytree(sources.kernel_folder(), folder)
    monkeypatch.setattr(sources, "kernel_folder", lambda: folder)
    monkeypatch.setenv("SOK_LITE_CACHE", str(compiled))
    runtime.set_limits(idle=200_000)
    monkeypatch.setattr(sort, "_LEAST_TILE_ITEMS", 64)
    monkeypatch.setattr(sort, "_TILES", 16)

    def planted(name=None, old="", new=""):
        if name is not None:
            text = (folder / name).read_text()
            assert old in text, f"{name} has changed: plant this fault in another way"
            (folder / name).write_text(text.replace(old, new))
        return simt_module().CudaBackend()

    yield planted
    with contextlib.suppress(runtime.SimtError):  # what a table undoes after a fault
        device.wait()


def day_of_a_table(backend, kind, seed):
    """Uses a table as a dictionary would be used. Raises AssertionError at the first difference."""
    options = {"max_capacity": 256, "init_capacity": 256} if kind == "hybrid" else {}
    table, oracle = new_table(backend, 4, kind, **options), DictTable(4, first_row(4))
    rng = np.random.default_rng(seed)
    for _ in range(3):
        keys = rng.integers(-300, 300, 150)
        rows = backend.to_host(table.find_or_insert(keys))
        held = keys[rows != NO_ROW]
        np.testing.assert_array_equal(backend.to_host(table.find(keys)), rows)
        assert len(set(rows[rows != NO_ROW].tolist())) == len(set(held.tolist())) > 90
        expected = oracle.find_or_insert(held)
        np.testing.assert_array_equal(backend.to_host(table.lookup(held).values), expected)
        gone = rng.integers(-300, 300, 40)
        for each in (table, oracle):
            each.erase(gone)
        if kind == "hbm":
            assert table.size == len(oracle.rows)


def groups_of_items(backend, seed):
    """Finds distinct keys and sorts their items, several tiles of them."""
    keys = np.random.default_rng(seed).integers(0, 60, 300)
    rows = backend.from_host(np.zeros(300, np.uint32))
    distinct, groups = dedup_and_group(backend, backend.from_host(keys), (0, 300), rows)
    numbers = [list(dict.fromkeys(keys.tolist())).index(key) for key in keys.tolist()]
    np.testing.assert_array_equal(backend.to_host(distinct.inverse), numbers)
    expected = np.argsort(numbers, kind="stable")
    np.testing.assert_array_equal(backend.to_host(groups.order), expected)


def fault_of(backend, kind):
    """Returns what went wrong in the first schedule in which something does; None: nothing."""
    for seed in SEEDS:
        runtime.set_seed(seed)
        try:
            if kind == "tiles":
                groups_of_items(backend, seed)
            elif kind == "items":
                check_items(backend, 4, "kLfu", seed)
            else:
                day_of_a_table(backend, kind, seed)
        except (runtime.SimtError, AssertionError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return None


MY_MASK = "__ballot_sync(sok_tile_threads(), w < kCount && is(w))"
# Of each kind: the table that is used, or other work, what is replaced, and what is said of it.
FAULTS = {
    "lanes: a vote that names those of other tiles": (
        "hbm",
        ("platform_gpu.cuh", MY_MASK, MY_MASK.replace("sok_tile_threads()", "~0u")),
        "__ballot_sync",
    ),
    "a race: an exchange that is none": (
        "hbm",
        (
            "platform_gpu.cuh",
            "  return (i64)atomicCAS((u64*)p, (u64)expected, (u64)desired);",
            "  i64 seen = sok_load(p);\n  if (seen == expected) sok_store(p, desired);\n"
            "  return seen;",
        ),
        "",
    ),
    "no order: a key that is there before what is known of it": (
        "hybrid",
        (
            "platform_gpu.cuh",
            'asm volatile("st.release.gpu.s64 [%0], %1;" ::"l"(p), "l"(v) : "memory");',
            "sok_store(p, v);",
        ),
        "Mismatched elements",
    ),
    "a race: an item that looks whether it is the first and does not exchange": (
        "items",
        (
            "hkv/hkv.cu",
            "if (!first) first = sok_cas(heads + head, 0, (i64)key);",
            "if (!first) sok_store(heads + head, (i64)key);",
        ),
        "",
    ),
    "out of bounds: a first line beyond the last": (
        "hbm",
        ("det/det.cuh", "sok_scaled(hash, segment.size)", "sok_scaled(hash, 2 * segment.size)"),
        "behind the end of",
    ),
    "blocks: a tile that waits for those of blocks that have not begun": (
        "tiles",
        (
            "tiles.cuh",
            "*tile = atomicAdd(taken, 1u)",
            "*tile = gridDim.x - 1 - atomicAdd(taken, 1u)",
        ),
        "no progress",
    ),
    "a stale load: a plain look at what a tile tells": (
        "tiles",
        ("tiles.cuh", "sok_load(told + (tile - 1 - j) * stride)", "told[(tile - 1 - j) * stride]"),
        "no progress",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(plant, name):
    kind, edit, text = FAULTS[name]
    backend = plant(*edit)
    if name.startswith("a stale load"):
        runtime.set_limits(idle=200_000, launch=10_000_000)  # lanes that vote for ever are not idle
        runtime.set_stale_loads(1)
    fault = fault_of(backend, kind)
    assert fault is not None, "all schedules passed"
    assert text in fault
