"""The cuda backend on the simulated GPU: what goes wrong on a GPU goes wrong here."""

import threading

import numpy as np
import pytest

from sok_lite.engine.dedup import unique
from tests.support.helpers import new_table
from tests.support.simt import device
from tests.support.simt.backend import simt_backend, simt_module


@pytest.fixture
def simt(xp):
    return simt_backend()


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


def test_no_memory_is_a_memory_error_that_says_how_much(simt, monkeypatch):
    device.pool().free_all_blocks()
    monkeypatch.setattr(device, "limit", device.pool().total_bytes() + 4096)
    with pytest.raises(MemoryError, match="No 1,000,000 bytes of GPU memory for rows"):
        simt.zeros_chunk(1_000_000)
