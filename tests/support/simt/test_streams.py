"""Several streams of the simulated GPU: what CUDA orders is in order, and all else is found.

Two pieces of work that touch the same bytes with nothing between them are told of, by name,
whichever of them ran first here. Between TensorFlow's stream and ours faults are planted in
tests/bridge/test_on_gpu.py.
"""

import numpy as np
import pytest

from tests.support.simt import device
from tests.support.simt.streams import Race


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


ORDERS = {
    "a wait for the stream": lambda xp, first: first.synchronize(),
    "a wait for the device": lambda xp, first: xp.cuda.Device().synchronize(),
}


@pytest.mark.parametrize("order", ORDERS)
def test_what_a_wait_orders_is_no_race(xp, kernels, two, order):
    x, y = ones(xp), ones(xp)
    on(two[0], kernels, "put", x, np.int64(5))
    ORDERS[order](xp, two[0])
    on(two[1], kernels, "copy", y, x)
    two[1].synchronize()
    assert y._view[0] == 5
    device.wait()


def test_the_null_stream_and_others_wait_for_each_other(xp, kernels):
    first, second = xp.cuda.Stream(), xp.cuda.Stream()
    x, y = ones(xp), ones(xp)
    on(first, kernels, "put", x, np.int64(5))
    kernels("copy", y, x)
    on(second, kernels, "put", x, np.int64(7))
    second.synchronize()
    assert (x._view[0], y._view[0]) == (7, 5)


NO_ORDERS = {
    "nothing": lambda xp, second: None,
    "a wait for the other stream": lambda xp, second: second.synchronize(),
    "the null stream, which waits for neither": lambda xp, second: xp.zeros(1),
}


@pytest.mark.parametrize("order", NO_ORDERS)
@pytest.mark.parametrize("waits_first", [0, 1])
def test_what_nothing_orders_is_a_race(xp, kernels, two, order, waits_first):
    x, y = ones(xp), ones(xp)
    on(two[0], kernels, "put", x, np.int64(5))
    NO_ORDERS[order](xp, two[1])
    on(two[1], kernels, "copy", y, x)
    with pytest.raises(Race) as error:
        two[waits_first].synchronize()
        two[1 - waits_first].synchronize()
    text = str(error.value)
    names = [f"{name} on stream {s.ptr:#x}" for name, s in zip(("put", "copy"), two, strict=True)]
    assert all(name in text for name in names)
    assert f"8 bytes at {x.data.ptr:#x}, of 32 bytes of memory of device 0" in text


@pytest.mark.parametrize("is_ordered", [True, False])
def test_memory_is_not_freed_while_another_stream_uses_it(xp, kernels, two, is_ordered):
    """CuPy gives it out again at once, to whoever is on the stream for which it was allocated."""
    x = ones(xp)
    on(two[0], kernels, "put", x, np.int64(5))
    if is_ordered:
        two[0].synchronize()
        del x
        device.wait()
    else:
        del x
        with pytest.raises(Race, match=r"free on the null stream|put on stream"):
            device.wait()
