"""Every kernel source compiles for the GPU too, whether or not there is one here."""

import functools
import importlib.util
import re
import subprocess
from pathlib import Path

import pytest

from sok_lite.backend import cpu, sources
from sok_lite.backend.build import compile_library, find_library
from sok_lite.backend.gpu_binaries import WIDE_LAUNCH_WORDS, kernel_names
from sok_lite.backend.tunables import THREADS_PER_BLOCK, kernel_defines
from tests.support.helpers import need_nvrtc

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = sources.kernel_files()
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)


@functools.cache
def registers():
    """The tool, which needs NVRTC."""
    need_nvrtc()
    return importlib.import_module("tools.kernel_registers")


@functools.cache
def compiled(path, arch):
    """What NVRTC makes of a file: compiled once for all tests."""
    return registers().compile_source(sources.inline_includes(path), arch)


# No source asks for which architecture it is compiled. Each is compiled for that of other tests,
# and for one more, but for update rules, which differ in a few lines of arithmetic, and combine.cu,
# which takes 8 s.
FILES_AND_ARCHS = [
    (path, arch)
    for number, path in enumerate(FILES)
    for arch in ("sm_90", ("sm_80", "sm_100")[number % 2])
    if arch == "sm_90" or not (path.parent.name == "update" or path.name == "combine.cu")
]
each_file_and_arch = pytest.mark.parametrize(
    ("path", "arch"), FILES_AND_ARCHS, ids=lambda value: getattr(value, "name", value)
)


@each_file_and_arch
def test_kernels_compile_without_any_include_path_and_do_not_spill(path, arch):
    assert compiled(path, arch).error is None
    usage = compiled(path, arch).kernels
    assert set(usage) == set(re.findall(r"\.entry (\w+)", compiled(path, arch).ptx))
    assert usage, path.name
    assert {name: each for name, each in usage.items() if each.spill_bytes} == {}
    # Arrays with an index that is known at run time only have no place in registers().
    assert {name: each for name, each in usage.items() if each.stack_bytes} == {}


# They copy rows, 16 bytes a lane and request: what fills the bandwidth of a GPU's memory.
COPY_ROWS = {
    f"{name}_u{bits}"
    for name in ("rows_read", "rows_write", "rows_swap", "rows_deliver", "dense_gather")
    for bits in (8, 16, 32, 64)
} | {"find", "exchange_pack", "exchange_unpack"}
# They read slots of an index that nobody writes meanwhile, each with one request.
READ_SLOTS = {"find", "det_stamps", "det_update", "hkv_scores", "hkv_update"}


@functools.cache
def path_of(name):
    return sources.find_kernel(name, sources.all_kernels()).path


@pytest.mark.parametrize(
    "path", sorted({path_of(name) for name in COPY_ROWS | READ_SLOTS}), ids=lambda path: path.name
)
def test_rows_and_slots_move_16_bytes_a_lane(path):
    widths = registers().widths(compiled(path, "sm_90").ptx)
    here = {name for name in COPY_ROWS | READ_SLOTS if path_of(name) == path}
    for name in here:
        assert max(widths[name].loads) == 16, name
    for name in here & COPY_ROWS:
        assert max(widths[name].stores) == 16, name


# How a kernel reads and writes slots that other threads write during the same launch. The number is
# that of its plain loads of as many bits: of what nobody writes meanwhile, such as the directory.
SHARED = {
    "det_insert": (("ld.relaxed.gpu",), 64, 2),
    "det_insert_items": (("ld.relaxed.gpu",), 64, 3),
    "det_move": (("ld.relaxed.gpu",), 64, 2),
    "hkv_insert": (("ld.acquire.gpu", "st.release.gpu", "ld.relaxed.gpu"), 64, 6),
    "hkv_insert_items": (("ld.relaxed.gpu",), 64, 7),
    "dedup_insert": (("ld.relaxed.gpu",), 32, 3),
}


@pytest.mark.cases("name")
@pytest.mark.parametrize("name", SHARED)
def test_slots_that_others_write_are_read_anew_each_time(name):
    """A compiler may move a plain load out of the loop that waits for another value."""
    accesses, bits, num_plain = SHARED[name]
    path = path_of(name)
    body = registers().bodies(compiled(path, "sm_90").ptx)[name]
    for access in accesses:
        assert re.search(rf"\b{re.escape(access)}[.\w]*\.[subf]{bits}\s", body), access
    assert len(re.findall(rf"\bld(?:\.global)?(?:\.v\d)?\.[subf]{bits}\s", body)) == num_plain


@each_file
def test_no_access_is_ordered_for_more_than_the_gpu(path):
    """A volatile access is, as machine code says by .STRONG.SYS; and a compiler keeps its own."""
    for name, body in registers().bodies(compiled(path, "sm_90").ptx).items():
        found = re.findall(r"\b(?:ld|st|atom|red|fence)\S*\.(?:volatile|sys|mmio)\b\S*", body)
        assert not found, (name, found)


# Of the kernels that wait for memory most.
OCCUPANCY = {
    "find": 5 / 8,
    "find_with_hint": 5 / 8,
    "segment_sums": 5 / 8,
    "pool_f32": 5 / 8,
    "pool_again_f32": 1 / 2,
    "combine_f32": 1 / 2,
}


@each_file
def test_registers_let_enough_threads_run_to_hide_the_latency_of_memory(path):
    for name, usage in compiled(path, "sm_90").kernels.items():
        part = registers().occupancy(usage.registers, THREADS_PER_BLOCK)
        # FTRL has two roots a column, and rounding by random bits comes on top.
        assert part >= (1 / 4 if "ftrl_stochastic" in name else 3 / 8), (name, usage)
        assert part >= 5 / 8 or name not in COPY_ROWS | READ_SLOTS, (name, usage)
        assert part >= OCCUPANCY.get(name, 0), (name, usage)


@pytest.mark.parametrize(
    "path",
    [
        path
        if path.name == "lookup.cu"
        else pytest.param(path, marks=pytest.mark.full_only("compiles kernels once more"))
        for path in FILES
        if path.parent.name != "update" or path.name in ("adam.cu", "group_adam.cu")
    ],
    ids=lambda path: path.name,
)
def test_a_wide_launch_takes_hardly_more_registers(path):
    # Where arguments were in memory they took up to 38 more.
    flags = [f"-DSOK_LAUNCH_WORDS={WIDE_LAUNCH_WORDS}"]
    wide = registers().compile_source(sources.inline_includes(path), "sm_90", flags)
    for name, usage in compiled(path, "sm_90").kernels.items():
        assert wide.kernels[name].registers <= usage.registers + 8, name


def straight_runs(body):
    """Splits the PTX of a kernel at its labels and branches."""
    return re.split(r"^\$\w+:|^.*\bbra\b.*$", body, flags=re.MULTILINE)


def test_find_reads_four_words_of_a_row_before_it_writes_one():
    """The order of loads and stores to places that may overlap is that of the source."""
    body = registers().bodies(compiled(path_of("find"), "sm_90").ptx)["find"]
    runs = [registers().accesses(run) for run in straight_runs(body)]
    for width in (1, 2, 4, 16):
        copy = [("ld", width)] * 4 + [("st", width)] * 4
        assert runs.count(copy) == 2, width  # a loop for each kind of index


@pytest.mark.cases("name")
@pytest.mark.parametrize("name", sorted(COPY_ROWS))
def test_no_copy_waits_for_a_word_between_two_stores(name):
    for run in straight_runs(registers().bodies(compiled(path_of(name), "sm_90").ptx)[name]):
        steps = registers().accesses(run)
        for width in {width for _, width in steps}:
            one = [("ld", width), ("st", width)]
            assert all(steps[i : i + 4] != 2 * one for i in range(len(steps))), (width, steps)


def test_sums_of_groups_read_four_items_before_they_add_one():
    body = registers().bodies(compiled(path_of("segment_sums"), "sm_90").ptx)["segment_sums"]
    before = [re.split(r"\badd\S*\.f32\b", run)[0] for run in straight_runs(body)]
    rows = [registers().accesses(loads).count(("ld", 16)) for loads in before]
    # With an index and weights, with an index, without; and no group of them is in pieces here.
    assert rows.count(4) == 3


# These divide numbers of 64 bits, once a row, to choose it from a matrix.
DIVIDES = {f"{name}_matrix_u{bits}" for name in ("init", "draw") for bits in (8, 16, 32, 64)}


@each_file
def test_no_loop_over_items_divides_numbers_of_64_bits(path):
    """An unrolled loop counts its turns first: with a stride that only the run knows, so."""
    for name, body in registers().bodies(compiled(path, "sm_90").ptx).items():
        divisions = re.findall(r"\b(?:div|rem)\.[su]64\b", body)
        assert not divisions or name in DIVIDES, name


@functools.cache
def on_cpu():
    """Names of the kernels in the library of the CPU."""
    done = subprocess.run(["nm", "-D", find_library()], capture_output=True, text=True, check=True)
    return set(re.findall(r"\bsok_run_(\w+)", done.stdout))


# The CPU alone fuses two that a GPU runs apart, counts first items in blocks and items by their
# labels; a GPU has tiles of items, sorts, and tells new keys apart while it inserts them.
CPU_ALONE = {"find_and_pool", "dedup_count", "dedup_number", "group_items"}
GPU_ALONE = {"dedup_number_tiles", "dedup_labels", "group_sorted", "sort_count", "sort_pass"}
GPU_ALONE |= {"hkv_insert_items", "dedup_firsts", "group_firsts"}


def summing():
    """The kernels of update rules that sum gradients themselves, which a GPU has of each format."""
    rules = [name for name in on_cpu() if re.match("update_(?!.*_stochastic_)", name)]
    return {re.sub("_([bf]+[0-9]+)$", r"_summing_\1", name) for name in rules}


@each_file
def test_the_gpu_has_the_kernels_of_the_cpu(path):
    ptx = compiled(path, "sm_90").ptx
    names = kernel_names(ptx.encode())
    assert names == sorted(re.findall(r"\.entry (\w+)", ptx))
    of_gpu = GPU_ALONE | summing()
    assert of_gpu.isdisjoint(on_cpu())
    its_own = {name for name in on_cpu() - CPU_ALONE | of_gpu if path_of(name) == path}
    assert set(names) == its_own


def test_kernels_are_found_by_name():
    # The cuda backend reads the parameters in the sources; the CPU's compiler knew them.
    kernels = sources.all_kernels()
    backend = cpu.CpuBackend()
    for name in on_cpu():
        pairs = zip(
            sources.find_kernel(name, kernels).signature,
            backend._kernels[name].signature,
            strict=True,
        )
        assert all(mine == theirs or (mine == "?" and theirs not in "#.") for mine, theirs in pairs)
    assert sources.find_kernel("rows_read_u32", kernels).kind == "row"
    assert sources.find_kernel("dedup_insert", kernels).kind == ""
    assert sources.find_kernel("find", kernels).kind == "tile"
    assert sources.find_kernel("sort_pass", kernels).kind == "team"
    with pytest.raises(AttributeError, match="No kernel 'rows_eat_u32'"):
        sources.find_kernel("rows_eat_u32", kernels)


def test_tunables_reach_both_compilers(tmp_path, monkeypatch):
    recorder = tmp_path / "cxx"
    recorder.write_text('#!/bin/sh\necho "$@" > "$0.log"\nfor last; do :; done\n: > "$last"\n')
    recorder.chmod(0o755)
    monkeypatch.setenv("CXX", str(recorder))
    monkeypatch.setenv("SOK_LITE_CACHE", str(tmp_path))
    monkeypatch.setenv("SOK_LITE_KERNEL_DEFINES", "")
    default = compile_library()
    monkeypatch.setenv("SOK_LITE_KERNEL_DEFINES", " SOK_LINE=8  SOK_TILE=2")
    assert kernel_defines() == {"SOK_LINE": 8, "SOK_TILE": 2}
    # Another library: one with other tunables must not be taken from the cache.
    assert compile_library() != default
    assert "-DSOK_LINE=8 -DSOK_TILE=2" in (tmp_path / "cxx.log").read_text()
    assert find_library() not in (default, None)
    source = 'extern "C" __global__ void k(int* p) { p[0] = 7000 + SOK_LINE; }'
    assert "7008" in registers().compile_source(source, "sm_90").ptx
