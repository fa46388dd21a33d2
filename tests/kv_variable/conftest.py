"""What the tests of TFPlus' face share."""

from tests.tensorflow.conftest import collect_ignore_glob, initialised

__all__ = ["collect_ignore_glob", "initialised"]
