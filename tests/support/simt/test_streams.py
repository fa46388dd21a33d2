"""Several streams of the simulated GPU: what CUDA orders is in order, and all else is found.

Two pieces of work that touch the same bytes with nothing between them are told of, by name,
whichever of them ran first here.
"""

import numpy as np
import pytest

from sok_lite.backend.gpu_binaries import Nvrtc
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


# ---------------------------------------------------------------- what counts as touching


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


# ---------------------------------------------------------------- planted in the engine


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
