"""What ranks do by themselves, as a job of one rank."""

from contextlib import contextmanager

import pytest

from sok_lite.bridge import job
from sok_lite.comm import SingleCommunicator


@contextmanager
def lone_rank():
    """Makes this process the only rank for as long as the `with` block lasts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "_communicator", SingleCommunicator())
        yield
