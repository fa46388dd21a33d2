"""Launching kernels: argument checks, worker threads, forks."""

import os

import numpy as np
import pytest

from sok_lite.backend import build, get_backend, local_ranks
from sok_lite.backend.base import LaunchArgs
from sok_lite.backend.cpu import CpuBackend, default_num_threads
from sok_lite.engine.segments import segment_sum
from tests.support.own_process import run_program
from tests.support.pooled import gather_rows


def gather(backend, n, dim=5):
    x = np.arange(n * dim, dtype=np.float32).reshape(n, dim)
    index = np.random.default_rng(0).permutation(n).astype(np.int32)
    out = gather_rows(backend, backend.from_host(x), backend.from_host(index))
    np.testing.assert_array_equal(backend.to_host(out), x[index])


@pytest.mark.parametrize("n", [0, 1, 31, 33, 1000, 4097, 100_003])
def test_every_item_is_worked_on_once(backend, n):
    gather(backend, n)


@pytest.mark.parametrize("num_parts", [1, 2, 26, 148, 300, 1400])
def test_a_launch_of_several_parts_does_each_with_its_own_arguments(backend, num_parts):
    """Above 119 parts of 3 arguments a GPU's launch is a wide one, above 1,019 there are two."""
    rng = np.random.default_rng(num_parts)
    sizes = rng.choice([0, 1, 31, 33, 200], num_parts, p=[0.2, 0.2, 0.2, 0.2, 0.2])
    sizes[rng.integers(num_parts)] = 5000  # more than all others are worth
    labels = [rng.integers(0, 7, size).astype(np.int32) for size in sizes]
    lasts = [backend.xp.full(7, -1, np.int32) for _ in sizes]
    arrays = [backend.from_host(each) for each in labels]
    if isinstance(backend, CpuBackend):
        backend = CpuBackend(num_threads=3)
        backend.grain = 1
    parts = [
        LaunchArgs(len(each), (each, last, len(each)))
        for each, last in zip(arrays, lasts, strict=True)
    ]
    launches = backend.packed("last_occurrence", [part for part in parts if part.num_items])
    assert len(launches) == (1 if backend.name == "cpu" or num_parts < 1400 else 2)
    backend.launch_tables("last_occurrence", parts)
    for each, last in zip(labels, lasts, strict=True):
        where = [np.flatnonzero(each == label) for label in range(7)]
        assert backend.to_host(last).tolist() == [max(at, default=-1) for at in where]


def test_parts_may_share_arrays_and_a_counter_of_one_is_not_that_of_another(backend):
    flags = [backend.xp.ones(size, np.int32) for size in (3, 0, 70, 1)]
    for chosen, expected in (([0, 1, 2, 3, 0], [6, 0, 70, 1]), ([0] * 3, [9, 0, 0, 0])):
        counts = backend.xp.zeros((4, 1), np.int64)
        parts = [LaunchArgs(len(flags[i]), (flags[i], counts[i], len(flags[i]))) for i in chosen]
        backend.launch_tables("count_flags", parts)
        assert backend.to_host(counts).reshape(-1).tolist() == expected


def test_parts_of_no_items_are_no_launch(backend, monkeypatch):
    nothing = backend.xp.zeros(0, np.int32)
    monkeypatch.setattr(backend, "packed", lambda *_: pytest.fail("a launch"))
    backend.launch_tables("count_flags", [])
    backend.launch_tables("count_flags", [LaunchArgs(0, (nothing, None, 0))] * 3)
    backend.prepared("count_flags", 0, nothing, None, 0)()


def test_where_no_thread_can_be_started_the_caller_does_the_work():
    program = """
import resource
from sok_lite.backend.cpu import CpuBackend
from tests.backend.test_backend import gather

backend = CpuBackend(num_threads=4)
backend.grain = 1
gather(CpuBackend(num_threads=1), 100)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
room = used + (4 << 20)  # a thread's stack takes 8 MB
resource.setrlimit(resource.RLIMIT_AS, (room, room))
gather(backend, 100)
"""
    run_program(program)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_writes_to_memory_of_its_own():
    chunk = get_backend("cpu").zeros_chunk(100)
    child = os.fork()
    if child == 0:
        chunk[:] = 7
        os._exit(0)
    os.waitpid(child, 0)
    assert not chunk.any()


def test_what_does_not_fit_a_kernel_is_refused_by_its_place(backend):
    """Arguments of a launch alone, and of one part of several."""
    xp, library = backend.xp, {"cpu": "NumPy", "cuda": "CuPy"}[backend.name]
    x, index = xp.zeros((3, 2), np.uint32), xp.zeros(3, np.int32)
    good = (x, 2, index, x.copy(), 3)
    array = rf"must be a {library} array.*Received: "
    wrong = [
        (1, 2.5, "an int of 64 bits. Received: 2.5"),
        (1, 1 << 63, "an int of 64 bits. Received: 9223372036854775808"),
        (4, None, "an int of 64 bits. Received: None"),
        (2, [0, 0, 0], f"{array}list"),
        (0, 7, f"{array}int"),
        (2, x, "array of int32. Received: uint32"),
        (2, index.astype(np.int64), "array of int32. Received: int64"),
        (2, xp.zeros(6, np.int32)[::2], "C-contiguous array of int32.*strides"),
        (3, xp.zeros((2, 3), np.uint32).T, "C-contiguous array of uint32.*strides"),
    ]
    if backend.name == "cuda":
        wrong.append((2, np.zeros(3, np.int32), f"{array}ndarray"))
    for i, argument, message in wrong:
        arguments = (*good[:i], argument, *good[i + 1 :])
        with pytest.raises(TypeError, match=f"Argument {i} .*{message}"):
            backend.launch("dense_gather_u32", 3, *arguments)
        parts = [LaunchArgs(3, each) for each in (good, arguments, good)]
        with pytest.raises(TypeError, match=f"Argument {i} .*{message}"):
            backend.launch_tables("dense_gather_u32", parts)
    chunks, rows = xp.zeros(1, np.uint64), xp.zeros(1, np.uint32)
    with pytest.raises(TypeError, match="Argument 4 .* a float of 32 bits. Received: 'x'"):
        backend.launch_tables("rows_fill", [LaunchArgs(1, (chunks, 0, 1, rows, "x", 1))])
    with pytest.raises(TypeError, match="takes 5 arguments. Received: 2"):
        backend.launch("dense_gather_u32", 3, x, 2)
    with pytest.raises(AttributeError, match="no_such_kernel"):
        backend.launch("no_such_kernel", 3)


def test_arrays_of_unusual_kinds_are_read_as_any(tmp_path):
    backend = get_backend("cpu")
    x = np.arange(12, dtype=np.uint32).reshape(4, 3)
    index = np.array([2, 0, 3], np.int32)
    in_file = np.memmap(tmp_path / "x", np.uint32, "w+", shape=(4, 3))
    in_file[:] = x
    read_only = x.copy()
    read_only.flags.writeable = False
    for each in (x, in_file, read_only, x[:4], np.frombuffer(x.tobytes(), np.uint32)):
        out = np.zeros((3, 3), np.uint32)
        backend.launch("dense_gather_u32", 3, each, 3, index, out, 3)
        np.testing.assert_array_equal(out, x[index])
    count = np.zeros(1, np.longlong)  # an equal dtype, but another object
    backend.launch("count_flags", 3, np.ones(3, np.int32), count, 3)
    assert count[0] == 3 and count.dtype == np.int64


def test_the_smallest_numbers_are_not_taken_for_zero(backend):
    x = np.float32([[1e-45, 3e-39], [1e-45, -1e-39]])
    inverse = backend.from_host(np.zeros(2, np.int32))
    total = backend.to_host(segment_sum(backend, backend.from_host(x), inverse, 1))
    np.testing.assert_array_equal(total, x[:1] + x[1:])
    assert total.all()


def test_ranks_of_one_machine_share_its_cores(monkeypatch):
    monkeypatch.delenv("SOK_LITE_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "4")
    assert default_num_threads() == 2
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", "100")
    assert default_num_threads() == 1
    monkeypatch.setenv("SOK_LITE_NUM_THREADS", "5")
    assert default_num_threads() == 5


def test_a_number_of_threads_that_cannot_be_is_refused_by_its_name(monkeypatch):
    for text in ("abc", "0", "-1", "1e9", "1000000000", "257", "2.5", "²", "9" * 5000):
        monkeypatch.setenv("SOK_LITE_NUM_THREADS", text)
        with pytest.raises(ValueError, match="SOK_LITE_NUM_THREADS must be a whole number from 1"):
            CpuBackend()
    for text, expected in [(" 3 ", 3), ("256", 256), ("007", 7)]:
        monkeypatch.setenv("SOK_LITE_NUM_THREADS", text)
        assert CpuBackend().num_threads == expected
    monkeypatch.delenv("SOK_LITE_NUM_THREADS")
    share = default_num_threads()
    for text in ("", "  "):
        monkeypatch.setenv("SOK_LITE_NUM_THREADS", text)
        assert default_num_threads() == share


def test_a_rank_knows_its_place_on_its_machine(monkeypatch):
    for name in (*local_ranks._RANK, *local_ranks._SIZE):
        monkeypatch.delenv(name, raising=False)
    assert (local_ranks.local_rank(), local_ranks.local_size()) == (0, 1)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "4")
    assert (local_ranks.local_rank(), local_ranks.local_size()) == (3, 4)


def test_unknown_backends_are_refused():
    with pytest.raises(ValueError, match="'cpu' or 'cuda'. Received: 'gpu'"):
        get_backend("gpu")


def test_a_variable_that_names_no_backend_is_refused(monkeypatch):
    monkeypatch.setenv("SOK_LITE_BACKEND", "gpu")
    with pytest.raises(ValueError, match="SOK_LITE_BACKEND must be 'cpu'.*Received: 'gpu'"):
        get_backend()
    monkeypatch.setenv("SOK_LITE_BACKEND", " cpu ")
    assert get_backend() is get_backend("cpu")
    # A name in the call counts, whatever the environment has.
    monkeypatch.setenv("SOK_LITE_BACKEND", "gpu")
    assert get_backend("cpu").name == "cpu"


def test_more_memory_than_there_is_raises():
    with pytest.raises(MemoryError, match="bytes of memory for rows"):
        get_backend("cpu").zeros_chunk(1 << 60)


# What gcc may use under -march=x86-64-v3 beyond SSE4, as the x86-64 psABI lists it, in the words of
# /proc/cpuinfo: lzcnt is "abm" there.
V3_FLAGS = {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}


def test_the_faster_library_is_for_processors_with_all_it_may_use(monkeypatch):
    for missing in (None, *V3_FLAGS):
        monkeypatch.setattr(build, "_cpu_flags", lambda missing=missing: V3_FLAGS - {missing})
        assert build.has_x86_64_v3() == (missing is None)
