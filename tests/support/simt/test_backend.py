"""The cuda backend on the simulated GPU: kernels on disk, devices of threads, errors."""

import threading
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from sok_lite.backend.base import LaunchArgs
from tests.support.helpers import new_table
from tests.support.simt import device
from tests.support.simt.backend import simt_backend, simt_module


@pytest.fixture
def simt(xp):
    return simt_backend()


def test_kernels_are_compiled_once_for_each_gpu_and_each_choice_of_tunables(
    xp, tmp_path, monkeypatch
):
    """For all processes; what was compiled for another would compute something else."""
    monkeypatch.setenv("SOK_LITE_CACHE", str(tmp_path))
    compiled, compile_program = [], xp.cuda.nvrtc.compileProgram

    def recorded(program, options):
        compiled.append(options)
        compile_program(program, options)

    monkeypatch.setattr(xp.cuda.nvrtc, "compileProgram", recorded)
    wanted = [("80", "SOK_LINE=4"), ("90", "SOK_LINE=4"), ("90", "SOK_LINE=8")]
    for capability, define in 2 * wanted:
        monkeypatch.setattr(device, "compute_capability", capability)
        monkeypatch.setenv("SOK_LITE_KERNEL_DEFINES", define)
        backend = simt_module().CudaBackend()
        flags = backend.from_host(np.array([1, 0, 1], np.int32))
        for _ in range(2):
            total = backend.from_host(np.zeros(1, np.int64))
            backend.launch("count_flags", 3, flags, total, 3)
            assert backend.to_host(total).tolist() == [2]
    # Those without options are the empty source that tells the build.
    usual = ["--std=c++17", "--fmad=false"]
    expected = [[*usual, f"-arch=sm_{number}", f"-D{define}"] for number, define in wanted]
    assert [options for options in compiled if options] == expected
    assert len(list((tmp_path / "cuda").iterdir())) == 3  # the file of the kernel, and no other


# A kernel of one thread an item, of a row of lanes, of a tile of lanes, and of a block.
LAUNCHES = [
    ("dedup_insert", 1000, (None, None, 0, 0, 2000, 1, 0, None, None, 1000)),
    ("rows_fill", 1000, (None, 4, 8, None, 0.5, 1000)),
    ("det_update", 1000, (None, 31, None, -1, -2, None, None, None, 1000)),
    ("sort_count", 3, (None, 1, 9, None, 1000)),
]


@pytest.mark.parametrize(
    ("defines", "threads", "blocks"),
    [
        ("", 256, [4, 125, 16, 3]),
        ("SOK_ROW_LANES=8 SOK_THREADS_PER_BLOCK=128 SOK_TILE=2", 128, [8, 63, 16, 3]),
        ("SOK_LINE=8", 256, [4, 125, 32, 3]),  # a tile is as many lanes as a line has slots
    ],
)
def test_launches_have_the_lanes_that_the_tunables_say(xp, monkeypatch, defines, threads, blocks):
    monkeypatch.setenv("SOK_LITE_KERNEL_DEFINES", defines)
    backend = simt_module().CudaBackend()
    backend._max_blocks = 1000
    module = SimpleNamespace(get_function=lambda name: mock.Mock(ptr=0))
    monkeypatch.setattr(backend, "_compile", lambda *_: module)
    for (kernel, *launch), expected in zip(LAUNCHES, blocks, strict=True):
        (action,) = backend.packed(kernel, [LaunchArgs(*launch)])
        assert action.args[:2] == ((expected,), (threads,)), kernel


def in_a_thread(call, *arguments):
    thread = threading.Thread(target=call, args=arguments)
    thread.start()
    thread.join()


@pytest.fixture
def second(xp, monkeypatch):
    """The backend of a rank with GPU 1: a new thread is on GPU 0."""
    monkeypatch.setattr(device, "num_devices", 2)
    monkeypatch.setenv("HOROVOD_LOCAL_RANK", "1")
    return simt_module().CudaBackend()


def test_a_second_thread_must_activate(second):
    table, values = new_table(second), []

    def look_up(activate):
        if activate:
            second.activate()
        try:
            values.append(second.to_host(table.lookup([5]).values)[0, 0])
        except (ValueError, device.CUDADriverError) as error:
            values.append(type(error))

    for activate in (True, False):
        in_a_thread(look_up, activate)
    assert values[0] == 5 and values[1] in (ValueError, device.CUDADriverError)


def test_a_kernel_is_on_the_gpu_of_the_backend_whoever_asked_first(second):
    """A thread on another GPU did, and for that it is compiled and loaded."""
    flags = second.from_host(np.ones(5, np.int32))
    count = second.from_host(np.zeros(1, np.int64))
    in_a_thread(second.prepared, "count_flags", 5, flags, count, 5)
    second.launch("count_flags", 5, flags, count, 5)
    assert second.to_host(count).tolist() == [5]


def test_no_memory_is_a_memory_error_that_says_how_much(simt, monkeypatch):
    device.pool().free_all_blocks()
    monkeypatch.setattr(device, "limit", device.pool().total_bytes() + 4096)
    with pytest.raises(MemoryError, match="No 1,000,000 bytes of GPU memory for rows"):
        simt.zeros_chunk(1_000_000)
