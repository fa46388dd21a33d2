"""Faults planted in the real kernels do not pass the simulated GPU."""

import contextlib
import shutil

import numpy as np
import pytest

from sok_lite.backend import sources
from sok_lite.engine import sort
from sok_lite.engine.dedup import dedup_and_group, unique
from sok_lite.engine.rows.store import NO_ROW
from tests.support.helpers import first_row, new_table
from tests.support.simt import device, runtime
from tests.support.simt.backend import simt_module

pytestmark = pytest.mark.filterwarnings("ignore:.*had no room:RuntimeWarning")

SEEDS = range(6)
LONG_ROW = 132  # a piece of 16 bytes more than a warp has lanes


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


def day_of_a_table(backend, kind, dim, seed):
    """Uses a table as a dictionary would be used. Raises AssertionError at the first difference."""
    options = {"max_capacity": 1 << 10, "init_capacity": 1 << 10} if kind == "hybrid" else {}
    table, oracle = new_table(backend, dim, kind, **options), {}
    rng = np.random.default_rng(seed)
    first = first_row(dim)
    for _ in range(3):
        keys = rng.integers(-300, 300, 150)
        table.find_or_insert(keys)
        for key in keys.tolist():
            oracle.setdefault(key, first(key))
        assert table.size == len(oracle)

        keys = rng.permutation(rng.integers(-300, 300, 60))
        values = rng.normal(size=(len(keys), dim)).astype(np.float32)
        table.insert_or_assign(keys, values)
        oracle.update(zip(keys.tolist(), values, strict=True))

        gone = rng.integers(-300, 300, 40)
        table.erase(gone)
        for key in gone.tolist():
            oracle.pop(key, None)
        assert table.size == len(oracle)

        keys = np.array(rng.permutation(list(oracle)))
        found = backend.to_host(table.lookup(keys).values)
        np.testing.assert_array_equal(found, np.array([oracle[key] for key in keys.tolist()]))

        keys = rng.integers(-50, 50, 120)
        distinct, inverse = unique(backend, backend.from_host(keys))
        order = list(dict.fromkeys(keys.tolist()))
        assert backend.to_host(distinct).tolist() == order
        assert backend.to_host(inverse).tolist() == [order.index(key) for key in keys.tolist()]


def days_of_a_full_table(backend, dim, seed):
    """Puts keys into a table that has no room. Whoever got a row in a batch has it at its end."""
    table = new_table(backend, dim, "hybrid", max_capacity=256, init_capacity=256)
    rng, first = np.random.default_rng(seed), first_row(dim)
    for _ in range(4):
        keys = rng.choice(5000, 200, replace=False)
        rows = backend.to_host(table.find_or_insert(keys))
        np.testing.assert_array_equal(backend.to_host(table.find(keys)), rows)
        held = keys[rows != NO_ROW]
        assert len(held) > 100
        assert len(set(rows[rows != NO_ROW].tolist())) == len(held)
        found = backend.to_host(table.lookup(held, insert=False, missing="zeros").values)
        np.testing.assert_array_equal(found, np.array([first(key) for key in held.tolist()]))
        assert table.size <= 256


def groups_of_items(backend, seed):
    """Finds distinct keys and sorts their items, several tiles of them."""
    keys = np.random.default_rng(seed).integers(0, 60, 300)
    rows = backend.from_host(np.zeros(300, np.uint32))
    distinct, groups = dedup_and_group(backend, backend.from_host(keys), (0, 300), rows)
    numbers = [list(dict.fromkeys(keys.tolist())).index(key) for key in keys.tolist()]
    np.testing.assert_array_equal(backend.to_host(distinct.inverse), numbers)
    expected = np.argsort(numbers, kind="stable")
    np.testing.assert_array_equal(backend.to_host(groups.order), expected)


def fault_of(backend, kind, dim=4):
    """Returns what went wrong in the first schedule in which something does; None: nothing."""
    for seed in SEEDS:
        runtime.set_seed(seed)
        try:
            if kind == "tiles":
                groups_of_items(backend, seed)
            elif kind == "full":
                days_of_a_full_table(backend, dim, seed)
            else:
                day_of_a_table(backend, kind, dim, seed)
        except (runtime.SimtError, AssertionError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.full_only("9 to 16 s on the simulated GPU")
@pytest.mark.parametrize("kind", ["hbm", "hybrid", "full", "tiles"])
@pytest.mark.parametrize("loads", ["fresh", "stale"])
def test_the_kernels_as_they_are_pass(plant, kind, loads):
    backend = plant()
    runtime.set_stale_loads(loads == "stale")
    assert fault_of(backend, kind) is None
    # Blocks of one warp, of warps that are no power of two, and as large as a GPU's by default.
    for block_size in (32, 96, 256):
        assert fault_of(backend.for_table(block_size=block_size), kind, LONG_ROW) is None


MY_MASK = "__ballot_sync(sok_tile_threads(), w < kCount && is(w))"
# Of each kind: the table that is used, what is replaced, and what is said of it.
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
        "full",
        (
            "platform_gpu.cuh",
            'asm volatile("st.release.gpu.s64 [%0], %1;" ::"l"(p), "l"(v) : "memory");',
            "sok_store(p, v);",
        ),
        "Mismatched elements",
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
    "no sync: items that are placed before all are counted": (
        "tiles",
        (
            "sort.cu",
            "    __syncthreads();\n    // All that",
            "    // All that",
        ),
        "",
    ),
    "a stale load: a plain look at what a tile tells": (
        "tiles",
        ("tiles.cuh", "sok_load(told + (tile - 1 - j) * stride)", "told[(tile - 1 - j) * stride]"),
        "no progress",
    ),
    "a stale load: a plain look for a free slot": (
        "hbm",
        ("det/det.cu", "i64 held = sok_load(&line[w].key);", "i64 held = line[w].key;"),
        "no progress",
    ),
}


SHORT = ("lanes", "a stale load", "blocks", "no sync")
LONG = pytest.mark.full_only("up to 13 s on the simulated GPU")


@pytest.mark.parametrize(
    "name",
    [name if name.startswith(SHORT) else pytest.param(name, marks=LONG) for name in FAULTS],
)
def test_a_planted_fault_is_found(plant, name):
    kind, edit, text = FAULTS[name]
    backend = plant(*edit)
    if name.startswith("a stale load"):
        runtime.set_limits(idle=200_000, launch=10_000_000)  # lanes that vote for ever are not idle
        runtime.set_stale_loads(1)
    fault = fault_of(backend, kind)
    assert fault is not None, "all schedules passed"
    assert text in fault
