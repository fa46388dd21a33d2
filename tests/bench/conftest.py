"""What the tests of benchmarks share."""

import pytest


@pytest.fixture
def no_peer(monkeypatch, tmp_path):
    """No environment of TFRA is found."""
    monkeypatch.setenv("SOK_LITE_PEERS", str(tmp_path))
