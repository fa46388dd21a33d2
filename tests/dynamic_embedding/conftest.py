"""What the tests of TFRA's face share: both Kerases, and the layers made for each."""

import importlib.util

import pytest

# The modules import TensorFlow at their head; without it there is nothing to collect.
HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
collect_ignore_glob = [] if HAS_TENSORFLOW else ["test_*.py"]


@pytest.fixture(params=["keras", "tf_keras"])
def keras(request):
    """Each Keras in turn."""
    return pytest.importorskip(request.param)


@pytest.fixture
def layers(keras):
    """The layers of that Keras."""
    from sok_lite import dynamic_embedding as de

    return de.keras.layers_for(keras)
