"""The cuda backend on the simulated GPU: what goes wrong on a GPU goes wrong here."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from sok_lite.backend import get_backend
from sok_lite.backend.base import Backend
from sok_lite.backend.sources import kernel_files
from sok_lite.engine.dedup import unique
from tests.support.helpers import new_table
from tests.support.simt import device
from tests.support.simt.backend import is_simulated, simt_backend, simt_module


@pytest.fixture
def simt(xp):
    return simt_backend()


def test_it_is_the_cuda_backend_and_nobody_elses(simt):
    assert simt.name == "cuda" and isinstance(simt, Backend) and is_simulated(simt)
    assert not is_simulated(get_backend("cpu"))
    assert simt is simt_backend()
    loaded = sys.modules.get("sok_lite.backend.cuda")
    assert loaded is None or loaded.CudaBackend is not simt_module().CudaBackend


@pytest.fixture
def compiled(xp, tmp_path, monkeypatch):
    """The options of what is compiled, in order; the cache is empty."""
    monkeypatch.setenv("SOK_LITE_CACHE", str(tmp_path))
    options_of_all, compile_program = [], xp.cuda.nvrtc.compileProgram

    def recorded(program, options):
        options_of_all.append(options)
        compile_program(program, options)

    monkeypatch.setattr(xp.cuda.nvrtc, "compileProgram", recorded)
    return options_of_all


def test_kernels_are_compiled_once_for_all_processes(compiled, tmp_path):
    """Of a file, and only where it is used."""
    for calls in (2, 3):  # the source, and the empty one that tells the build
        backend = simt_module().CudaBackend()
        flags = backend.from_host(np.array([1, 0, 1], np.int32))
        for _ in range(2):
            total = backend.from_host(np.zeros(1, np.int64))
            backend.launch("count_flags", 3, flags, total, 3)
            assert backend.to_host(total).tolist() == [2]
        assert len(compiled) == calls
    assert ["--std=c++17", "--fmad=false", "-arch=sm_90"] in compiled
    assert len(list((tmp_path / "cuda").iterdir())) == 1


def test_all_kernels_are_loaded_at_once(monkeypatch):
    """Of each file, in both forms."""
    backend, loaded = simt_module().CudaBackend(), []
    monkeypatch.setattr(
        backend._binaries, "get", lambda path, *_: f"\0.text.{path.stem}\0".encode()
    )
    monkeypatch.setattr(backend, "_kernel", lambda *kernel: loaded.append(kernel))
    backend.load_kernels()
    assert sorted(loaded) == sorted((path.stem, form) for path in kernel_files() for form in (0, 1))


@pytest.mark.full_only("compiles kernels several times")
def test_kernels_are_compiled_for_each_gpu_and_each_choice_of_tunables(compiled, monkeypatch):
    """They share a cache, and one taken for another computes something else or does not load."""
    wanted = [
        [f"-arch=sm_{capability}", f"-D{define}"]
        for capability in ("80", "90")
        for define in ("SOK_LINE=4", "SOK_LINE=8")
    ]
    for _ in range(2):
        for arch, define in wanted:
            monkeypatch.setattr(device, "compute_capability", arch[-2:])
            monkeypatch.setenv("SOK_LITE_KERNEL_DEFINES", define[2:])
            backend = simt_module().CudaBackend()
            flags = backend.from_host(np.array([1, 0, 1], np.int32))
            total = backend.from_host(np.zeros(1, np.int64))
            backend.launch("count_flags", 3, flags, total, 3)
            assert backend.to_host(total).tolist() == [2]
    # Those without options are the empty source that tells the build.
    assert [options[2:] for options in compiled if options] == wanted


@pytest.mark.parametrize(
    ("seed", "is_one"), [("abc", False), ("1.5", False), ("7", True), ("", True)]
)
def test_a_seed_that_is_no_number_is_refused(seed, is_one):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", __file__],
        env={**os.environ, "SOK_LITE_SIMT_SEED": seed},
        capture_output=True,
        text=True,
    )
    assert (done.returncode == 0) == is_one, done.stdout + done.stderr
    refused = f"SOK_LITE_SIMT_SEED must be a whole number. Received: '{seed}'. Unset it"
    assert (refused in done.stderr) != is_one


# ---------------------------------------------------------------- planted faults


def test_a_copy_to_the_host_that_does_not_wait_has_old_data(simt, monkeypatch):
    keys = simt.from_host(np.array([3, 5, 3]))
    found = unique(simt, keys)
    assert simt.to_host(found.inverse).tolist() == [0, 1, 0]
    monkeypatch.setattr(simt, "to_host", lambda array: array._view.copy())
    found = unique(simt, keys)
    assert simt.to_host(found.inverse).tolist() != [0, 1, 0]


def test_a_far_chunk_that_is_read_before_a_wait_has_old_data(simt):
    chunk = simt.far_chunk(64).view(np.int64)
    pointers = simt.from_host(np.array([simt.address(chunk)], np.uint64))
    rows = simt.from_host(np.array([0], np.uint32))
    values = simt.from_host(np.array([[7, 8]], np.uint32))
    simt.launch("rows_write_u32", 1, pointers, 0, 2, rows, values, None, 1)
    assert chunk[0] == 0
    simt.synchronize()
    assert chunk.view(np.uint32)[:2].tolist() == [7, 8]


def test_numpy_passed_for_cupy_is_refused(simt, monkeypatch):
    with pytest.raises(TypeError, match="must be a CuPy array. Received: ndarray"):
        unique(simt, np.arange(3))
    table = new_table(simt)
    monkeypatch.setattr(simt, "from_host", np.ascontiguousarray)
    with pytest.raises(TypeError, match="must be a CuPy array. Received: ndarray"):
        table.lookup([1, 2])
    with pytest.raises(ValueError, match="non-scalar numpy.ndarray"):
        simt.xp.zeros(2)[:] = np.ones(2)


def test_a_row_past_the_end_is_found(simt):
    table = new_table(simt)
    table.find_or_insert([1, 2, 3])
    beyond = simt.from_host(np.array([1 << 20], np.uint32))
    with pytest.raises(RuntimeError, match="rows_read"):
        simt.to_host(table.store.read(beyond))


def test_a_second_thread_must_activate(simt, monkeypatch):
    """As in a rank with GPU 1: a new thread is on GPU 0."""
    monkeypatch.setattr(device, "num_devices", 2)
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "1")
    backend = simt_module().CudaBackend()
    table = new_table(backend)
    values = []

    def look_up(activate):
        if activate:
            backend.activate()
        try:
            values.append(backend.to_host(table.lookup([5]).values)[0, 0])
        except (ValueError, device.CUDADriverError) as error:
            values.append(type(error))

    for activate in (True, False):
        thread = threading.Thread(target=look_up, args=(activate,))
        thread.start()
        thread.join()
    assert values[0] == 5 and values[1] in (ValueError, device.CUDADriverError)


def test_a_kernel_is_on_the_gpu_of_the_backend_whoever_asked_first(simt, monkeypatch):
    monkeypatch.setattr(device, "num_devices", 2)
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "1")
    backend = simt_module().CudaBackend()
    flags = backend.from_host(np.ones(5, np.int32))
    count = backend.from_host(np.zeros(1, np.int64))
    # Prepared by a thread that is on another GPU, for which it is compiled and loaded.
    thread = threading.Thread(target=backend.prepared, args=("count_flags", 5, flags, count, 5))
    thread.start()
    thread.join()
    backend.launch("count_flags", 5, flags, count, 5)
    assert backend.to_host(count).tolist() == [5]


def test_a_block_is_no_larger_than_its_registers_allow(simt, monkeypatch):
    monkeypatch.setattr(device, "max_threads_per_block", 800)
    backend = simt_module().CudaBackend().for_table(block_size=1024)
    flags = backend.from_host(np.ones(5000, np.int32))
    count = backend.from_host(np.zeros(1, np.int64))
    backend.launch("count_flags", 5000, flags, count, 5000)
    assert backend.to_host(count).tolist() == [5000]


def test_no_memory_is_a_memory_error_that_says_how_much(simt, monkeypatch):
    device.pool().free_all_blocks()
    monkeypatch.setattr(device, "limit", device.pool().total_bytes() + 4096)
    with pytest.raises(MemoryError, match="No 1,000,000 bytes of GPU memory for rows"):
        simt.zeros_chunk(1_000_000)


def test_tables_of_one_block_size_share_their_launches(simt):
    tuned = simt.for_table(block_size=128)
    assert tuned is not simt and simt.for_table(block_size=128) is tuned
    assert tuned.for_table(block_size=128) is tuned and simt.for_table(block_size=96) is not tuned
