"""Several streams of the simulated GPU: what CUDA orders is in order, and all else is a Race."""

import numpy as np
import pytest

from tests.support.simt import device
from tests.support.simt.streams import Race

# What is between a write on the first stream and a read on the second, and whether it orders them.
BETWEEN = {
    "a wait for the stream": (lambda xp, first, second: first.synchronize(), True),
    "a wait for the device": (lambda xp, first, second: xp.cuda.Device().synchronize(), True),
    "nothing": (lambda xp, first, second: None, False),
    "a wait for the other stream": (lambda xp, first, second: second.synchronize(), False),
    "the null stream, which waits for neither": (lambda xp, first, second: xp.zeros(1), False),
}


def on(stream, kernels, *launch):
    with stream:
        kernels(*launch)


def ones(xp):
    x = xp.ones(4, np.int64)
    device.wait()
    return x


@pytest.mark.parametrize("between", BETWEEN)
def test_what_nothing_orders_is_a_race(xp, kernels, between):
    first, second = (xp.cuda.Stream(non_blocking=True) for _ in range(2))
    x, y = ones(xp), ones(xp)
    on(first, kernels, "put", x, np.int64(5))
    orders, is_ordered = BETWEEN[between]
    orders(xp, first, second)
    on(second, kernels, "copy", y, x)
    if is_ordered:
        second.synchronize()
        assert y._view[0] == 5
        return
    with pytest.raises(Race) as error:
        first.synchronize()
        second.synchronize()
    for name, stream in (("put", first), ("copy", second)):
        assert f"{name} on stream {stream.ptr:#x}" in str(error.value)
    assert f"8 bytes at {x.data.ptr:#x}, of 32 bytes of memory of device 0" in str(error.value)


def test_the_null_stream_and_others_wait_for_each_other(xp, kernels):
    first, second = xp.cuda.Stream(), xp.cuda.Stream()
    x, y = ones(xp), ones(xp)
    on(first, kernels, "put", x, np.int64(5))
    kernels("copy", y, x)
    on(second, kernels, "put", x, np.int64(7))
    second.synchronize()
    assert (x._view[0], y._view[0]) == (7, 5)


def test_memory_is_not_freed_while_another_stream_uses_it(xp, kernels):
    """CuPy gives it out again at once, to whoever is on the stream for which it was allocated."""
    x = ones(xp)
    on(xp.cuda.Stream(non_blocking=True), kernels, "put", x, np.int64(5))
    del x
    with pytest.raises(Race, match=r"free on the null stream|put on stream"):
        device.wait()
