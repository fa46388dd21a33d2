"""Faults planted in the real kernels do not pass the simulated GPU."""

import contextlib
import itertools
import shutil

import numpy as np
import pytest

from sok_lite.backend import sources
from sok_lite.engine import dedup as dedup_module
from sok_lite.engine.dedup import dedup, unique
from sok_lite.engine.rows.store import NO_ROW
from sok_lite.engine.segments import Terms, group, segment_sums
from tests.support.helpers import first_row, new_table, with_segments
from tests.support.simt import compiler, device, runtime
from tests.support.simt.backend import simt_module

reason = compiler.unavailable()
pytestmark = [
    pytest.mark.skipif(reason is not None, reason=str(reason)),
    pytest.mark.filterwarnings("ignore:.*had no room:RuntimeWarning"),
]

SEEDS = range(6)
DIM = 4  # 16 bytes
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

    def planted(name=None, old="", new=""):
        if name is not None:
            text = (folder / name).read_text()
            assert old in text, f"{name} has changed: plant this fault in another way"
            (folder / name).write_text(text.replace(old, new))
        return simt_module().CudaBackend()

    yield planted
    with contextlib.suppress(runtime.SimtError):  # what a table undoes after a fault
        device.wait()
    runtime.set_limits()
    runtime.set_stale_loads(0)
    runtime.set_seed(0)


def misaligned(backend, values):
    """Returns a C-contiguous array of the values, 4 bytes behind where 16 bytes would begin."""
    xp = backend.xp
    flat = xp.empty(values.size + 1, np.float32)[1:].reshape(values.shape)
    flat[...] = backend.from_host(values)
    return flat


def day_of_a_table(backend, kind, dim, seed):
    """Uses a table as a dictionary would be used. Raises AssertionError at the first difference."""
    options = {"max_capacity": 1 << 10, "init_capacity": 1 << 10} if kind == "hybrid" else {}
    table, oracle = new_table(backend, dim, kind, **options), {}
    rng = np.random.default_rng(seed)
    first = first_row(dim)
    for round_ in range(3):
        keys = rng.integers(-300, 300, 150)
        rows = backend.to_host(table.find_or_insert(keys))
        for key in keys.tolist():
            oracle.setdefault(key, first(key))
        by_key = dict(zip(keys.tolist(), rows.tolist(), strict=True))
        assert [by_key[key] for key in keys.tolist()] == rows.tolist(), "equal keys, one row"
        assert len(set(by_key.values())) == len(by_key), "one row, one key"
        assert table.size == len(oracle)

        keys = rng.permutation(rng.integers(-300, 300, 60))
        values = rng.normal(size=(len(keys), dim)).astype(np.float32)
        table.insert_or_assign(keys, misaligned(backend, values) if round_ else values)
        oracle.update(zip(keys.tolist(), values, strict=True))

        gone = rng.integers(-300, 300, 40)
        table.erase(gone)
        for key in gone.tolist():
            oracle.pop(key, None)
        assert table.size == len(oracle)

        keys = rng.integers(-300, 300, 100)
        assert backend.to_host(table.contains(keys)).tolist() == [
            k in oracle for k in keys.tolist()
        ]
        keys = np.array(rng.permutation(list(oracle)))
        out = misaligned(backend, np.zeros((len(keys), dim), np.float32)) if round_ else None
        found = backend.to_host(table.lookup(keys, out=out).values)
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


def days_of_growing_tables(backend):
    """Grows tables of several segments. A key keeps its row."""
    for kind, options in (("hbm", {}), ("hybrid", {"max_capacity": 1 << 12, "init_capacity": 16})):
        table = new_table(with_segments(backend, 64 if options else 256), 1, kind, **options)
        rows = np.empty(0, np.uint32)
        for first in range(0, 600, 100):
            new = backend.to_host(table.find_or_insert(np.arange(first, first + 100)))
            rows = np.concatenate([rows, new])
            np.testing.assert_array_equal(
                backend.to_host(table.find(np.arange(len(rows)))), rows, kind
            )
        assert len(set(rows.tolist())) == len(rows) and len(table.index.directory.segments) > 2


def sums_of_rows(backend, dim, seed, lie_apart):
    """Pools rows that lie, or whose sums are to lie, apart from where four columns would begin."""
    xp, rng = backend.xp, np.random.default_rng(seed)
    rows = rng.normal(size=(30, dim)).astype(np.float32)
    source = misaligned(backend, rows) if lie_apart == "rows" else backend.from_host(rows)
    zeros = np.zeros((10, dim), np.float32)
    out = misaligned(backend, zeros) if lie_apart == "sums" else backend.from_host(zeros)
    inverse = rng.permutation(30).astype(np.int32)
    splits = np.array([0, 1, 1, *range(3, 25, 4), 29, 30])
    items = (backend.from_host(inverse), 0, backend.from_host(splits), None, 0)
    n = len(splits) - 1
    backend.launch("combine_f32", n, source, dim, *items, out, n)
    sums = [rows[inverse[a:b]].sum(0) for a, b in itertools.pairwise(splits)]
    np.testing.assert_allclose(xp.asnumpy(out)[:n], sums, rtol=1e-5, atol=1e-6)


def sums_of_groups(backend, dim, seed):
    """Deduplicates the keys of two tables, groups their items and sums their rows."""
    rng = np.random.default_rng(seed)
    begin = np.array([0, 150, 230])
    keys = rng.integers(0, 2, begin[-1])
    ids = keys + 10 * (np.arange(begin[-1]) >= begin[1])
    first = sorted(np.unique(ids, return_index=True)[1].tolist())
    distinct = dedup(backend, backend.from_host(keys), begin)
    assert backend.to_host(distinct.first).tolist() == first
    assert distinct.starts.tolist() == [0, 2, 4]
    assert (ids[first][backend.to_host(distinct.inverse)] == ids).all()
    rows = rng.integers(-9, 9, (len(ids), dim)).astype(np.float32)
    terms = Terms([backend.from_host(part) for part in np.split(rows, [begin[1]])])
    groups = group(backend, distinct.inverse, begin, distinct.starts)
    sums = [backend.to_host(part) for part in segment_sums(backend, groups, terms)]
    expected = [rows[ids == ids[item]].sum(0) for item in first]
    np.testing.assert_array_equal(np.concatenate(sums), expected)


def fault_of(backend, kind, dim=DIM):
    """Returns what went wrong in the first schedule in which something does; None: nothing."""
    for seed in SEEDS:
        runtime.set_seed(seed)
        try:
            if kind == "full":
                days_of_a_full_table(backend, dim, seed)
            elif kind == "growing":
                days_of_growing_tables(backend)
            elif kind == "groups":
                sums_of_groups(backend, dim, seed)
            elif kind in ("rows", "sums"):
                sums_of_rows(backend, dim, seed, kind)
            else:
                day_of_a_table(backend, kind, dim, seed)
        except (runtime.SimtError, AssertionError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize(
    "kind",
    [
        *(
            pytest.param(kind, marks=pytest.mark.full_only("9 to 16 s on the simulated GPU"))
            for kind in ("hbm", "hybrid", "full", "growing", "rows")
        ),
        "sums",
        "groups",
    ],
)
@pytest.mark.parametrize("loads", ["fresh", "stale"])
def test_the_kernels_as_they_are_pass(plant, kind, loads):
    backend = plant()
    runtime.set_stale_loads(loads == "stale")
    assert fault_of(backend, kind) is None
    # Blocks of one warp, of warps that are no power of two, and as large as a GPU's by default.
    for block_size in (32, 96, 256):
        assert fault_of(backend.for_table(block_size=block_size), kind, LONG_ROW) is None


MY_MASK = "__ballot_sync(sok_tile_threads(), w < kCount && is(w))"
FAULTS = {
    "a vote that names the lanes of other tiles": (
        "hbm",
        ("platform_gpu.cuh", MY_MASK, MY_MASK.replace("sok_tile_threads()", "~0u")),
        "__ballot_sync",
    ),
    "a mask that is not moved to the tile": (
        "hbm",
        ("platform_gpu.cuh", "- 1u) << sok_tile_first_lane();", "- 1u);"),
        "does not name its own lane",
    ),
    "a shuffle over the whole warp by a tile": (
        "hbm",
        ("platform_gpu.cuh", "x, 0, SOK_TILE)", "x, 0)"),
        "reads from lane 0, which the mask does not name",
    ),
    "a lane stride off by one": (
        "hbm",
        ("platform_gpu.cuh", "w += 1u << (lanes).shift)", "w += (1u << (lanes).shift) + 1)"),
        "",
    ),
    "rows that begin one lane late": (
        "hbm",
        ("platform_gpu.cuh", "u32 w = (lanes).lane;", "i64 w = (lanes).lane + 1;"),
        "",
    ),
    "words of 16 bytes wherever an array lies": (
        "hbm",
        ("platform_gpu.cuh", "&& (u64)dense % sizeof(SokWord) == 0", "&& dense != (const T*)1"),
        "misaligned access of 16 bytes",
    ),
    "four columns at a time wherever rows lie": (
        "rows",
        ("pooling.cuh", "sok_moves_quads(dim, source) && ", ""),
        "misaligned access of 16 bytes",
    ),
    "four columns at a time wherever their sums go": (
        "sums",
        ("pooling.cuh", " && sok_moves_quads(dim, out)", ""),
        "misaligned access of 16 bytes",
    ),
    "more lanes a row than a block has": (
        "hbm",
        ("platform_gpu.cuh", "shift < 5", "shift < 6"),
        "",
    ),
    "every lane a leader": (
        "hbm",
        ("platform_gpu.cuh", "(threadIdx.x & (SOK_TILE - 1u)) == 0;", "true;"),
        "",
    ),
    "an exchange that is none": (
        "hbm",
        (
            "platform_gpu.cuh",
            "  return (i64)atomicCAS((u64*)p, (u64)expected, (u64)desired);",
            "  i64 seen = sok_load(p);\n  if (seen == expected) sok_store(p, desired);\n"
            "  return seen;",
        ),
        "",
    ),
    "a slot that is taken though another key was faster": (
        "hbm",
        ("det/det.cu", "if (was == empty_key || was == reclaim_key) break;", "break;"),
        "",
    ),
    "a first line beyond the last": (
        "hbm",
        ("det/det.cuh", "sok_scaled(hash, segment.size)", "sok_scaled(hash, 2 * segment.size)"),
        "behind the end of",
    ),
    "an entry behind the end of the directory": (
        "hybrid",
        ("slots.cuh", ">> 1 >> (index.hashing", ">> (index.hashing"),
        "behind the end of",
    ),
    "a key that does not move along": (
        "growing",
        ("hkv/hkv.cu", "is_first ? place.first : place.second", "place.first"),
        "",
    ),
    "a key that moves without its row": (
        "growing",
        ("det/det.cu", "slot.key, slot.row, slot.stamp", "slot.key, slot.stamp, slot.stamp"),
        "Arrays are not equal",
    ),
    "the smallest item is not kept": (
        "hbm",
        ("segments.cu", "if (item < head) sok_min(heads + slot, item);", ""),
        "",
    ),
    "a number for two keys": (
        "groups",
        (
            "platform_gpu.cuh",
            "__popc((bits) & ((1u << j) - 1u))",
            "__popc((bits) & ((1u << j) - 2u))",
        ),
        "",
    ),
    "a piece that begins a window early": (
        "groups",
        ("segments.cu", "(late + kPiece - 1) / kPiece", "late / kPiece"),
        "Mismatched elements",
    ),
    "a count by one lane for its tile alone": (
        "hbm",
        (
            "platform_gpu.cuh",
            "__shfl_xor_sync(~0u, x,",
            "__shfl_xor_sync(sok_tile_threads(), x,",
        ),
        "which the mask does not name",
    ),
    "a lock that is held while the lanes of its warp spin": (
        "hybrid",
        # Whoever has taken a slot waits for the whole warp, of which others wait for the slot.
        ("hkv/hkv.cu", "        slot = taken;\n", "slot = taken; __syncwarp();\n"),
        "__syncwarp",
    ),
    "a slot that two keys see free": (
        "hybrid",
        ("hkv/hkv.cu", "if (seen != victim.key) continue;", ""),
        "",
    ),
    "a key that is there before what is known of it": (
        "full",
        (
            "platform_gpu.cuh",
            'asm volatile("st.release.gpu.s64 [%0], %1;" ::"l"(p), "l"(v) : "memory");',
            "sok_store(p, v);",
        ),
        "Mismatched elements",
    ),
    "a row number for two keys": (
        "hybrid",
        (
            "platform_gpu.cuh",
            "__popc(all & ((1u << lane) - 1u))",
            "__popc(all & ((1u << lane) - 2u))",
        ),
        "",
    ),
}


SHORT = "a vote that names the lanes of other tiles", "a key that moves without its row"


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in SHORT
        else pytest.param(name, marks=pytest.mark.full_only("up to 13 s on the simulated GPU"))
        for name in FAULTS
    ],
)
def test_a_planted_fault_is_found(plant, name):
    kind, (file, old, new), text = FAULTS[name]
    dim = LONG_ROW if "stride" in name or "block" in name else DIM
    block_size = 32 if "block" in name else 0
    fault = fault_of(plant(file, old, new).for_table(block_size=block_size), kind, dim)
    assert fault is not None, "all schedules passed"
    assert text in fault


# Plain loads where a kernel needs relaxed ones or acquires. Most often they load what is there.
STALE_FAULTS = {
    "a plain look for a free slot": (
        "hbm",
        [("det/det.cu", "i64 held = sok_load(&line[w].key);", "i64 held = line[w].key;")],
        "no progress",
    ),
    "a plain look for a free slot of a bucket": (
        "hybrid",
        [("hkv/hkv.cu", "sok_load(&at[w].key) == empty_key", "at[w].key == empty_key")],
        "no progress",
    ),
    # What follows an acquire may be loaded plainly; without one a key of this batch is a victim.
    "a victim whose stamp is loaded plainly, without an acquire": (
        "full",
        [
            ("hkv/hkv.cu", "sok_load_acquire(", "sok_load("),
            ("hkv/hkv.cu", "sok_load(&slot->stamp)", "slot->stamp"),
            ("hkv/hkv.cu", "sok_load(&taken->stamp)", "taken->stamp"),
            ("hkv/hkv.cuh", "sok_load(&slot->stamp)", "slot->stamp"),
        ],
        "",
    ),
}


@pytest.mark.parametrize("name", STALE_FAULTS)
def test_a_plain_load_where_it_is_too_weak_is_found(plant, name):
    kind, edits, text = STALE_FAULTS[name]
    for edit in edits:
        backend = plant(*edit)
    runtime.set_limits(idle=200_000, launch=10_000_000)  # lanes that vote for ever are not idle
    runtime.set_stale_loads(1)
    fault = fault_of(backend, kind)
    assert fault is not None, "all schedules passed"
    assert text in fault


# ---------------------------------------------------------------- slow, and right all the same


def facts_of(kernel, call):
    """Makes a call. Returns the facts of the one launch of a kernel in it."""
    with device.launched() as launches:
        call()
    (facts,) = [launch.facts for launch in launches if launch.name == kernel]
    return facts


@pytest.mark.parametrize("items, busy", [(1024, 8), (128, 64)])
def test_too_many_items_for_a_warp_are_seen_by_the_busy_warps(plant, monkeypatch, items, busy):
    monkeypatch.setattr(dedup_module, "_WARP_BLOCK", items)
    backend = plant().for_table(block_size=64)
    keys = backend.from_host(np.arange(8192))
    facts = facts_of("dedup_count", lambda: unique(backend, keys))
    assert (facts.warps, facts.busy_warps) == (64, busy)


def test_a_serial_miss_is_seen_by_the_longest_chain(plant):
    """Without the byte that says whether keys are elsewhere a key that is missing has both of its
    buckets read, one line after another."""

    def chain(backend, keys, bucket):
        options = {"max_capacity": 1 << 10, "init_capacity": 1 << 10, "max_bucket_size": bucket}
        table = new_table(backend, DIM, "hybrid", **options)
        table.find_or_insert(np.arange(16))
        facts = facts_of("find", lambda: table.lookup(keys, insert=False, missing="zeros"))
        return facts.longest_chain

    known, missing, lines = np.arange(16), np.arange(16, 32), 2 * 32 // 4
    backend = plant().for_table(block_size=64)
    hit = chain(backend, known, 32)
    assert chain(backend, missing, 32) == chain(backend, missing, 64) <= hit + 1
    edit = "hkv/hkv.cuh", "found.slot || !*hkv_overflow_of(segment, place)", "found.slot"
    backend = plant(*edit).for_table(block_size=64)
    miss = chain(backend, missing, 32)
    assert hit + lines - 3 <= miss <= hit + lines
    assert chain(backend, missing, 64) == miss + lines
