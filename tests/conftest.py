"""What every test module shares: the backends, and the switch for long variants."""

import faulthandler
import os
import signal
import zlib

import pytest

from sok_lite.backend import cuda_unavailable, get_backend
from tests.support.simt import backend as simt
from tests.support.simt import runtime

# One switch for everything that takes long: SOK_LITE_LONG=1.
LONG = os.environ.get("SOK_LITE_LONG", "") not in ("", "0")
# Another number: all tests in other orders of the simulated GPU's lanes.
try:
    SIMT_SEED = int(os.environ.get("SOK_LITE_SIMT_SEED") or 0)
except ValueError as error:
    raise pytest.UsageError(
        "SOK_LITE_SIMT_SEED must be a whole number. Received: "
        f"{os.environ['SOK_LITE_SIMT_SEED']!r}. Unset it for the usual orders."
    ) from error


def pytest_configure(config):
    """Lets a run that is told to end say first where each of its threads is.

    Whoever stops a run that takes too long sends SIGTERM: `timeout` of scripts/test.sh, horovodrun,
    CI. The log then shows whether it hung, and where. (mpirun shows nothing of it.) One test alone
    that takes longer than `faulthandler_timeout` of pyproject.toml says so while it goes on.
    """
    # Not file descriptor 2: while a test runs pytest keeps what is written there to itself.
    log = open(os.dup(2), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGTERM, file=log, all_threads=True, chain=True)
    config.add_cleanup(lambda: (faulthandler.unregister(signal.SIGTERM), log.close()))


@pytest.fixture(params=["cpu", "simt", "cuda"])
def backend(request):
    """Each backend in turn; simt is the cuda backend on a simulated GPU. One that cannot run here
    is skipped, with the reason."""
    if request.param == "simt":
        reason = simt.unavailable()
        if reason is not None:
            pytest.skip(f"no simulated GPU: {reason}")
        # A test has an order of its own, the same in every run: what fails fails again alone.
        runtime.set_seed(zlib.crc32(request.node.nodeid.encode()) + SIMT_SEED)
        return simt.simt_backend()
    if request.param == "cuda":
        reason = cuda_unavailable()
        if reason is not None:
            pytest.skip(f"no cuda backend: {reason}")
    return get_backend(request.param)
