"""What the tests of the simulated GPU share."""

import numpy as np
import pytest

from tests.support.simt import backend, device


@pytest.fixture
def xp(monkeypatch):
    """The stand-in of CuPy, with one device and nothing on its stream."""
    reason = backend.unavailable()
    if reason is not None:
        pytest.skip(f"no simulated GPU: {reason}")
    from tests.support.simt.cupy_stand_in import cupy

    device.wait()
    monkeypatch.setattr(device, "num_devices", 1)
    monkeypatch.setattr(device, "limit", device.limit)
    monkeypatch.setattr(device, "random", np.random.default_rng(0))
    yield cupy
    device.use_device(0)
