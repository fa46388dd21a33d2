"""Memory of the simulated GPU is checked as no GPU checks it, and launches run late."""

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


def test_launches_run_when_something_waits_and_nothing_runs_behind_a_wrong_one(xp, kernels):
    x = xp.zeros(1, np.int64)
    device.wait()
    kernels("put", x, np.int64(2))
    x *= 10
    assert x._view.tolist() == [0]
    xp.cuda.get_current_stream().synchronize()
    assert x._view.tolist() == [20]
    small = xp.zeros(5, np.uint8)  # the pool gives 512 bytes, of which a kernel may touch 5
    kernels("put", small, np.int64(7))
    x += 1
    with pytest.raises(runtime.SimtError, match="5 bytes of memory of device 0"):
        x.get()
    assert x.get().tolist() == [20]
