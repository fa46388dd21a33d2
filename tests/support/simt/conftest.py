"""What the tests of the simulated GPU share."""

import numpy as np
import pytest

from sok_lite.backend.gpu_binaries import Nvrtc
from tests.support.simt import backend, device, runtime, streams

KERNELS = r"""
extern "C" __global__ void put(long long* to, long long value) { *to = value; }
extern "C" __global__ void copy(long long* to, const long long* from) { *to = *from; }
"""


@pytest.fixture(autouse=True)
def usual_limits():
    """Skips without a simulated GPU. What a test sets is as usual after it."""
    reason = backend.unavailable()
    if reason is not None:
        pytest.skip(f"no simulated GPU: {reason}")
    yield
    runtime.set_limits()
    runtime.set_stale_loads(0)
    runtime.set_seed(0)


@pytest.fixture
def xp(monkeypatch):
    """The stand-in of CuPy, with one device and nothing on its stream."""
    from tests.support.simt.cupy_stand_in import cupy

    device.wait()
    monkeypatch.setattr(device, "num_devices", 1)
    monkeypatch.setattr(device, "limit", device.limit)
    monkeypatch.setattr(device, "random", np.random.default_rng(0))
    yield cupy
    device.use_device(0)


@pytest.fixture
def kernels(xp):
    """Returns a function that launches a kernel of one thread, on the thread's stream."""
    module = xp.cuda.Module()
    module.load(Nvrtc(xp.cuda.nvrtc).compile(KERNELS, ["-arch=sm_90"]).binary)
    yield lambda name, *arguments: module.get_function(name)((1,), (1,), arguments)
    with pytest.MonkeyPatch.context() as patch:  # what a test has left runs, right or wrong
        patch.setattr(streams, "_note", lambda *_: None)
        device.wait()
