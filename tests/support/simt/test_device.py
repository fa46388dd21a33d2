"""Memory and the stream of the simulated GPU behave as CUDA's and as CuPy's pool."""

import numpy as np
import pytest

from tests.support.simt import device, runtime


def test_a_kernel_finds_the_address_of_freed_memory_invalid(xp, kernels):
    x = xp.zeros(4, np.int64)
    address = np.uint64(x.data.ptr)
    del x
    kernels("put", address, np.int64(7))
    with pytest.raises(runtime.SimtError, match="put: .*(no memory of the device|behind the end)"):
        device.wait()
    y = xp.zeros(4, np.int64)
    assert y.data.ptr != address  # nobody gets it for a while
    assert y.get().tolist() == [0] * 4  # what failed is over


def test_a_kernel_may_touch_what_was_asked_for_and_no_more(xp, kernels):
    x = xp.zeros(5, np.uint8)  # the pool gives 512 bytes
    kernels("put", x, np.int64(7))
    with pytest.raises(runtime.SimtError, match="5 bytes of memory of device 0"):
        device.wait()


def test_launches_run_when_something_waits_and_what_one_did_wrong_is_over_then(xp, kernels):
    x = xp.zeros(1, np.int64)
    device.wait()
    kernels("put", x, np.int64(2))
    x *= 10
    assert x._view.tolist() == [0]
    xp.cuda.get_current_stream().synchronize()
    assert x._view.tolist() == [20]
    kernels("put", np.uint64(64), np.int64(1))
    x += 1  # dropped, as all that is behind it
    with pytest.raises(runtime.SimtError, match=r"put: .*0x40"):
        x.get()
    assert x.get().tolist() == [20]
