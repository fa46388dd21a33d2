"""Memory, stream and devices of the simulated GPU behave as CUDA's and as CuPy's pool."""

import threading

import numpy as np
import pytest

from sok_lite.backend.nvrtc import Nvrtc
from tests.support.helpers import run_threads
from tests.support.simt import device, runtime
from tests.support.simt.compiler import compile_source

WRITE = r"""
extern "C" __global__ void put(long long* to, long long value) { *to = value; }
extern "C" __global__ void scale(float* x, float by) { *x *= by; }
"""


@pytest.fixture
def module(xp):
    module = xp.cuda.Module()
    module.load(Nvrtc(xp.cuda.nvrtc).compiled(WRITE, ["-arch=sm_90"]).binary)
    return module


@pytest.fixture
def put(module):
    return module.get_function("put")


# ---------------------------------------------------------------- memory


def test_new_memory_has_a_pattern_until_it_is_written(xp):
    x = xp.empty(1000, np.uint8)
    assert (x.get() == device.POISON).all()
    assert x.data.ptr % 512 == 0


def test_memory_is_poisoned_when_it_is_freed_and_not_before_its_turn(xp, put):
    x = xp.zeros(4, np.int64)
    content = x._view
    put((1,), (1,), (x, np.int64(7)))
    copied = x + 0
    del x
    assert copied.get().tolist() == [7, 0, 0, 0]
    assert (content.view(np.uint8) == device.POISON).all()


def test_a_kernel_finds_the_address_of_freed_memory_invalid(xp, put):
    x = xp.zeros(4, np.int64)
    address = np.uint64(x.data.ptr)
    del x
    put((1,), (1,), (address, np.int64(7)))
    with pytest.raises(runtime.SimtError, match="put"):
        device.wait()
    y = xp.zeros(4, np.int64)
    assert y.data.ptr != address  # nobody gets it for a while
    assert y.get().tolist() == [0] * 4  # what failed is over


def test_a_kernel_that_is_waiting_still_finds_it(xp, put):
    x = xp.zeros(4, np.int64)
    put((1,), (1,), (np.uint64(x.data.ptr), np.int64(7)))
    del x
    device.wait()


def test_a_kernel_may_touch_what_was_asked_for_and_no_more(xp, put):
    x = xp.zeros(5, np.uint8)  # the pool gives 512 bytes
    put((1,), (1,), (x, np.int64(7)))
    with pytest.raises(runtime.SimtError, match="5 bytes of memory of device 0"):
        device.wait()


def test_memory_is_limited(xp, monkeypatch):
    pool = xp.get_default_memory_pool()
    size = pool.free_bytes() + (1 << 20)  # no free block is as large
    monkeypatch.setattr(device, "limit", pool.total_bytes() + size + 4096)
    x = xp.empty(size, np.uint8)
    with pytest.raises(xp.cuda.memory.OutOfMemoryError, match=f"allocating {size + 2048:,} bytes"):
        xp.empty(size + 2048, np.uint8)
    assert issubclass(xp.cuda.memory.OutOfMemoryError, MemoryError)
    del x
    assert xp.empty(size + 2048, np.uint8).size > size  # free blocks go back to CUDA first


def test_the_pool_asks_cuda_once(xp):
    pool = xp.get_default_memory_pool()
    pool.free_all_blocks()
    used, total = pool.used_bytes(), pool.total_bytes()
    size = 10_000_000  # no free block is as large
    with device.counted() as counts:
        x = xp.empty(size, np.uint8)
        del x
        x = xp.empty(size - 1024, np.uint8)  # a part of the same
        y = xp.empty(600, np.uint8)  # the rest of it
    assert (counts["cudaMalloc"], counts["from the pool"]) == (1, 2)
    rounded = -(-size // 512) * 512
    assert pool.used_bytes() - used == rounded and pool.total_bytes() - total == rounded
    for first_goes_first in (True, False):
        if first_goes_first:
            del x, y
        else:
            x, y = xp.empty(size - 1024, np.uint8), xp.empty(600, np.uint8)
            del y, x
        with device.counted() as counts:
            x = xp.empty(size, np.uint8)  # the two are one again
        assert counts["from the pool"] == 1
        del x
    with device.counted() as counts:
        pool.free_all_blocks()
    assert counts["cudaFree"] >= 1 and counts["waits"] == 1  # as cudaFree does
    assert pool.total_bytes() == total


def test_pinned_memory_is_the_hosts_and_kernels(xp, put):
    memory = xp.cuda.PinnedMemoryPointer(xp.cuda.PinnedMemory(16), 0)
    numbers = np.frombuffer(memory, np.int64, 2)
    numbers.fill(0)
    put((1,), (1,), (np.uint64(numbers.ctypes.data), np.int64(7)))
    assert numbers.tolist() == [0, 0]  # nobody has waited
    device.wait()
    assert numbers.tolist() == [7, 0]
    address = np.uint64(numbers.ctypes.data)
    del memory, numbers
    put((1,), (1,), (address, np.int64(7)))
    with pytest.raises(runtime.SimtError):
        device.wait()


def test_pointers_say_whose_they_are(xp, monkeypatch):
    monkeypatch.setattr(device, "num_devices", 2)
    facts = xp.cuda.runtime.pointerGetAttributes
    with xp.cuda.Device(1):
        x = xp.zeros(10)
    assert facts(x.data.ptr + 8).type == xp.cuda.runtime.memoryTypeDevice
    assert facts(x.data.ptr).device == 1
    pinned = xp.cuda.PinnedMemory(16)
    assert facts(pinned.ptr).type == xp.cuda.runtime.memoryTypeHost
    assert facts(np.zeros(3).ctypes.data).type == xp.cuda.runtime.memoryTypeUnregistered


def test_memory_of_somebody_else_is_taken_as_it_is(xp):
    x = xp.arange(6)
    memory = xp.cuda.UnownedMemory(x.data.ptr, x.nbytes, x)
    y = xp.ndarray((3, 2), np.int64, xp.cuda.MemoryPointer(memory, 0))
    y[1] = 0
    assert x.get().tolist() == [0, 1, 0, 0, 4, 5]


# ---------------------------------------------------------------- the stream


def test_launches_run_in_order_and_only_when_something_waits(xp, put):
    x = xp.zeros(1, np.int64)
    device.wait()
    put((1,), (1,), (x, np.int64(1)))
    put((1,), (1,), (x, np.int64(2)))
    x *= 10
    assert x._view.tolist() == [0]
    xp.cuda.get_current_stream().synchronize()
    assert x._view.tolist() == [20]


def test_what_a_kernel_did_wrong_comes_out_of_the_next_wait_and_is_over(xp, put):
    x = xp.zeros(1, np.int64)
    put((1,), (1,), (np.uint64(64), np.int64(1)))
    x += 1  # dropped, as all that is behind it
    with pytest.raises(runtime.SimtError, match=r"put: .*0x40"):
        x.get()
    assert x.get().tolist() == [0]


def test_threads_share_the_stream(xp):
    x = xp.zeros(1, np.int64)

    def add(number):
        for _ in range(200):
            y = xp.ones(1, np.int64)
            y += 1
            assert y.get().tolist() == [2]

    run_threads(add)
    assert x.get().tolist() == [0]


# ---------------------------------------------------------------- launches


def test_what_is_known_of_a_launch_is_counted_when_it_has_run(xp, put):
    x = xp.zeros(1, np.int64)
    device.wait()
    with device.counted() as counts:
        put((2,), (33,), (x, np.int64(1)))
    assert counts["kernels"] == 1 and "warps" not in counts
    with device.counted() as counts, device.launched() as launches:
        assert x._view[0] == 1  # what was launched before has run
        put((1,), (1,), (x, np.int64(2)))
        put((3,), (32,), (x, np.int64(2)))
    assert launches == [("put", (1, 1, 0)), ("put", (3, 3, 0))]
    names = ("kernels", "warps", "busy warps", "longest chain")
    assert [counts[name] for name in names] == [2, 1 + 3, 1 + 3, 0]
    assert x._view[0] == 2


def test_limits_of_a_launch(xp, put):
    x = xp.zeros(1, np.int64)
    one = np.int64(1)
    with pytest.raises(device.CUDADriverError, match="INVALID_VALUE"):
        put((1,), (1025,), (x, one))
    with pytest.raises(device.CUDADriverError, match="INVALID_VALUE"):
        put((2**31,), (1,), (x, one))
    with pytest.raises(TypeError, match="Expected tuple"):
        put(1, 1, (x, one))
    with device.counted() as counts:
        put((0,), (1,), (x, one))  # CuPy makes it one block
    assert counts["kernels"] == 1
    assert x.get().tolist() == [1]


def test_arguments_are_read_as_wide_as_the_parameter_is(xp, put):
    x = xp.zeros(1, np.int64)
    for number in (7, np.int64(7), np.array([7])):
        x[:] = 0
        put((1,), (1,), (x, number))
        assert x.get().tolist() == [7]
    put((1,), (1,), (x, np.int32(7)))  # what lies behind it comes along
    assert x.get()[0] & 0xFFFFFFFF == 7 and x.get()[0] != 7
    with pytest.raises(TypeError, match="You are trying to pass a numpy.ndarray of shape"):
        put((1,), (1,), (x, np.arange(3)))
    with pytest.raises(TypeError, match="Unsupported type"):
        put((1,), (1,), (x, "7"))
    put((1,), (1,), (np.arange(1), np.int64(3)))  # its content is taken for an address
    with pytest.raises(runtime.SimtError):
        device.wait()


def test_a_python_float_is_no_f32(xp, module):
    scale = module.get_function("scale")
    x = xp.ones(1, np.float32)
    scale((1,), (1,), (x, np.float32(3)))
    assert x.get().tolist() == [3]
    scale((1,), (1,), (x, 3.0))  # the low half of a double
    assert x.get().tolist() == [0]


def test_a_kernel_that_is_not_there(xp, module):
    with pytest.raises(device.CUDADriverError, match="NOT_FOUND"):
        module.get_function("puts")
    with pytest.raises(device.CUDADriverError, match="INVALID_IMAGE"):
        xp.cuda.Module().load(b"no program")
    with pytest.raises(TypeError, match="Expected bytes"):
        xp.cuda.Module().load(str(compile_source(WRITE)))


# ---------------------------------------------------------------- devices


def test_a_thread_begins_on_device_0(xp, monkeypatch):
    monkeypatch.setattr(device, "num_devices", 2)
    xp.cuda.Device(1).use()
    x = xp.zeros(3)
    seen = []

    def other():
        seen.append(xp.cuda.Device().id)
        for work in (lambda: x + 1, lambda: x.get(), lambda: x.fill(0), lambda: xp.take(x, 1)):
            with pytest.raises(ValueError, match="different from the current device"):
                work()
        xp.cuda.Device(1).use()
        seen.append((x + 1).tolist())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [0, [1, 1, 1]]
    with pytest.raises(device.CUDARuntimeError, match="InvalidDevice"):
        xp.cuda.Device(2).use()


def test_a_kernel_belongs_to_the_device_it_was_loaded_on(xp, put, monkeypatch):
    monkeypatch.setattr(device, "num_devices", 2)
    with xp.cuda.Device(1):
        x = xp.zeros(1, np.int64)
        with pytest.raises(device.CUDADriverError, match="INVALID_HANDLE"):
            put((1,), (1,), (x, np.int64(1)))
