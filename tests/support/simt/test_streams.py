"""Several streams of the simulated GPU: what CUDA orders is in order, and all else is found.

Two pieces of work that touch the same bytes with nothing between them are told of, by name,
whichever of them ran first here.
"""

import gc

import numpy as np
import pytest

from sok_lite.backend.nvrtc import Nvrtc
from sok_lite.engine.segments import segment_sum
from tests.support.helpers import new_table
from tests.support.simt import device, runtime, streams
from tests.support.simt.backend import simt_backend
from tests.support.simt.streams import Race

KERNELS = r"""
extern "C" __global__ void put(long long* to, long long value) { *to = value; }
extern "C" __global__ void copy(long long* to, const long long* from) { *to = *from; }
extern "C" __global__ void put_through(long long** to) { **to = 7; }
"""


@pytest.fixture
def kernels(xp):
    """Returns a function that launches a kernel of one thread, on the thread's stream."""
    module = xp.cuda.Module()
    module.load(Nvrtc(xp.cuda.nvrtc).compiled(KERNELS, ["-arch=sm_90"]).binary)
    yield lambda name, *arguments: module.get_function(name)((1,), (1,), arguments)
    with pytest.MonkeyPatch.context() as patch:  # what a test has left runs, right or wrong
        patch.setattr(streams, "_note", lambda *_: None)
        device.wait()


@pytest.fixture
def two(xp):
    """Two streams that the null stream does not wait for."""
    return xp.cuda.Stream(non_blocking=True), xp.cuda.Stream(non_blocking=True)


def on(stream, kernels, *launch):
    with stream:
        kernels(*launch)


def ones(xp):
    x = xp.ones(4, np.int64)
    device.wait()
    return x


# ---------------------------------------------------------------- what has an order


def by_an_event(xp, first, second):
    second.wait_event(first.record())


def by_an_event_of_its_own(xp, first, second):
    event = xp.cuda.Event(disable_timing=True)
    event.record(first)
    second.wait_event(event)


def by_a_third_stream(xp, first, second):
    third = xp.cuda.Stream(non_blocking=True)
    third.wait_event(first.record())
    second.wait_event(third.record())


def by_a_wait_for_the_stream(xp, first, second):
    first.synchronize()


def by_a_wait_for_the_event(xp, first, second):
    first.record().synchronize()


def by_a_wait_for_the_device(xp, first, second):
    xp.cuda.Device().synchronize()


ORDERS = [value for name, value in sorted(globals().items()) if name.startswith("by_")]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_what_is_ordered_is_no_race(xp, kernels, two, order):
    x, y = ones(xp), ones(xp)
    on(two[0], kernels, "put", x, np.int64(5))
    order(xp, *two)
    on(two[1], kernels, "copy", y, x)
    two[1].synchronize()
    assert y._view[0] == 5
    device.wait()


def not_at_all(xp, first, second):
    pass


def not_by_an_event_of_before(xp, first, second):
    second.wait_event(first.before)


def not_by_an_event_that_was_never_recorded(xp, first, second):
    second.wait_event(xp.cuda.Event())


def not_by_an_event_of_itself(xp, first, second):
    second.wait_event(second.record())


def not_by_a_stream_that_waits_the_other_way(xp, first, second):
    first.wait_event(second.record())


def not_by_a_wait_for_the_other_stream(xp, first, second):
    second.synchronize()


def not_by_the_null_stream(xp, first, second):
    xp.zeros(1)


NO_ORDERS = [value for name, value in sorted(globals().items()) if name.startswith("not_")]


@pytest.mark.parametrize("order", NO_ORDERS, ids=lambda order: order.__name__)
@pytest.mark.parametrize("waits_first", [0, 1])
def test_what_is_not_is_a_race(xp, kernels, two, order, waits_first):
    x, y = ones(xp), ones(xp)
    two[0].before = two[0].record()
    on(two[0], kernels, "put", x, np.int64(5))
    order(xp, *two)
    on(two[1], kernels, "copy", y, x)
    with pytest.raises(Race) as error:
        two[waits_first].synchronize()
        two[1 - waits_first].synchronize()
    text = str(error.value)
    names = [f"{name} on stream {s.ptr:#x}" for name, s in zip(("put", "copy"), two, strict=True)]
    assert all(name in text for name in names)
    assert f"8 bytes at {x.data.ptr:#x}, of 32 bytes of memory of device 0" in text


def test_streams_run_as_late_as_they_may(xp, kernels, two):
    x, y = ones(xp), ones(xp)
    on(two[0], kernels, "put", x, np.int64(5))
    on(two[1], kernels, "put", y, np.int64(6))
    two[1].synchronize()
    assert (x._view[0], y._view[0]) == (1, 6)
    two[0].synchronize()
    assert x._view[0] == 5


def test_the_null_stream_and_others_wait_for_each_other(xp, kernels):
    x, y = ones(xp), ones(xp)
    one, other = xp.cuda.Stream(), xp.cuda.Stream()
    on(one, kernels, "put", x, np.int64(5))
    kernels("copy", y, x)  # waits for all of them
    on(other, kernels, "put", y, np.int64(6))  # and they for it
    assert other != one and xp.cuda.Stream.null == xp.cuda.get_current_stream()
    other.synchronize()
    assert (x._view[0], y._view[0]) == (5, 6)
    on(one, kernels, "put", x, np.int64(7))
    on(other, kernels, "copy", y, x)  # but not for each other
    with pytest.raises(Race):
        device.wait()


def test_a_stream_of_somebody_else_is_the_same_stream(xp, kernels, two):
    x, y = ones(xp), ones(xp)
    on(two[0], kernels, "put", x, np.int64(5))
    with xp.cuda.ExternalStream(two[0].ptr) as same:
        kernels("copy", y, x)
        assert xp.cuda.get_current_stream() == two[0] == same
    assert xp.cuda.get_current_stream() == xp.cuda.Stream.null
    same.synchronize()
    assert y._view[0] == 5
    with pytest.raises(device.CUDARuntimeError, match="InvalidResourceHandle"):
        xp.cuda.ExternalStream(5)


# ---------------------------------------------------------------- what counts as touching


def test_two_may_read_the_same(xp, kernels, two):
    x, y, z = ones(xp), ones(xp), ones(xp)
    on(two[0], kernels, "copy", y, x)
    on(two[1], kernels, "copy", z, x)
    device.wait()


def test_two_may_write_parts_of_one_array(xp, kernels, two):
    x = ones(xp)
    on(two[0], kernels, "put", x[:1], np.int64(5))
    on(two[1], kernels, "put", x[1:], np.int64(6))
    with two[0]:
        x[2:] = 7
    device.wait()
    assert x._view.tolist() == [5, 6, 7, 7]


@pytest.mark.parametrize("number", range(4))
def test_operations_of_cupy_touch_arrays_as_kernels_do(xp, kernels, two, number):
    x, y = ones(xp), ones(xp)
    on(two[0], kernels, "put", x, np.int64(5))
    with two[1]:
        work = [lambda: y + x, lambda: x.fill(3), lambda: x.get(), lambda: x.__setitem__(0, y[1])]
        with pytest.raises(Race, match=r"put on|on stream"):
            work[number]()
            device.wait()


def test_a_kernel_touches_what_it_finds_in_memory(xp, kernels, two):
    x, pointer = ones(xp), xp.zeros(1, np.uint64)
    pointer.fill(x.data.ptr)
    device.wait()
    on(two[0], kernels, "put_through", pointer)
    on(two[1], kernels, "put", x, np.int64(5))
    with pytest.raises(Race, match="put_through"):
        device.wait()


def test_memory_is_not_freed_while_another_stream_uses_it(xp, kernels, two):
    """CuPy gives it out again at once, to whoever is on the stream for which it was allocated."""
    for is_ordered in (True, False):
        x = ones(xp)
        on(two[0], kernels, "put", x, np.int64(5))
        if is_ordered:
            xp.cuda.Stream.null.wait_event(two[0].record())
            del x
            device.wait()
        else:
            del x
            with pytest.raises(Race, match=r"free on the null stream|put on stream"):
                device.wait()


def test_other_memory_at_the_same_address_is_other_memory(xp, kernels, two):
    x = ones(xp)
    on(two[0], kernels, "put", x, np.int64(5))
    two[1].synchronize()
    streams.run()  # nobody has waited for it
    streams.forget(x.data.ptr, x.nbytes)
    on(two[1], kernels, "put", x, np.int64(6))
    device.wait()


def test_nothing_is_noted_while_there_is_one_stream(xp, kernels):
    gc.collect()
    device.wait()
    assert not streams.is_noted()
    stream = xp.cuda.Stream()
    x = ones(xp)
    on(stream, kernels, "put", x, np.int64(5))
    assert streams.is_noted()
    stream.synchronize()
    assert streams._accesses == {}  # all is before whatever can come
    on(stream, kernels, "put", x, np.int64(6))
    del stream  # what is on it still runs
    device.wait()
    assert not streams.is_noted() and x._view[0] == 6


def test_a_race_is_over_when_it_was_told(xp, kernels, two):
    x = ones(xp)
    for _ in range(2):
        for stream in two:
            on(stream, kernels, "put", x, np.int64(5))
        with pytest.raises(Race):
            device.wait()
        device.wait()
    assert issubclass(Race, runtime.SimtError)


# ---------------------------------------------------------------- planted in the engine


@pytest.mark.parametrize("waits", [True, False])
def test_keys_that_another_stream_still_writes(xp, two, waits):
    """As TensorFlow writes them, where nobody waits for its stream."""
    backend, theirs = simt_backend(), two[0]
    table = new_table(backend)
    with theirs:
        keys = xp.arange(3, 50)
    if waits:
        theirs.synchronize()
        table.find_or_insert(keys)
        return
    with pytest.raises(Race, match="arange on stream"):
        table.find_or_insert(keys)
        device.wait()  # it is told when both have run


@pytest.mark.parametrize("waits", [True, False])
def test_sums_that_another_stream_reads_too_early(xp, two, waits):
    """As TensorFlow reads them, where a call returns without waiting for ours."""
    backend, theirs = simt_backend(), two[0]
    rows, inverse = xp.ones((40, 4), np.float32), xp.zeros(40, np.int32)
    sums = segment_sum(backend, rows, inverse, 1)
    if waits:
        backend.synchronize()
    with theirs:
        read = sums + 0
    if waits:
        theirs.synchronize()
        assert read._view.tolist() == [[40.0] * 4]
        return
    with pytest.raises(Race, match="segment_add_pieces on the null stream.*add on stream"):
        device.wait()


@pytest.mark.parametrize("waits", [True, False])
def test_a_table_that_is_used_on_two_streams(xp, two, waits):
    """Where CuPy works on TensorFlow's stream in one call and on the null stream in another."""
    backend, theirs = simt_backend(), two[0]
    table = new_table(backend)
    backend.synchronize()  # its zeros were written on the null stream
    with xp.cuda.ExternalStream(theirs.ptr):
        table.find_or_insert(np.arange(20))
        table.insert_or_assign(np.arange(20), np.ones((20, 4), np.float32))
    if waits:
        theirs.synchronize()
        assert backend.to_host(table.lookup([3]).values).tolist() == [[1.0] * 4]
        return
    # What is read is a race, and before that it may be no address of a row.
    with pytest.raises(runtime.SimtError):
        table.lookup([3])
        device.wait()
