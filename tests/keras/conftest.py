"""What the tests of Keras share: each Keras in turn, and its classes."""

import pytest

from tests.support.tf_fixtures import collect_ignore_glob  # noqa: F401


@pytest.fixture(params=["keras", "tf_keras"])
def keras(request):
    """Each Keras in turn."""
    return pytest.importorskip(request.param)


@pytest.fixture
def sk(keras):
    """The layers of that Keras."""
    import sok_lite.keras

    return sok_lite.keras.classes_for(keras)
