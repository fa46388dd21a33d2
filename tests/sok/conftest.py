"""What the tests of SOK's face share."""

from tests.support.tf_fixtures import (
    HAS_TENSORFLOW,
    collect_ignore_glob,
    initialised,
    mode,
    play,
    pytest_generate_tests,
    tables_on,
    uninitialised,
)

__all__ = [
    "collect_ignore_glob",
    "initialised",
    "mode",
    "play",
    "pytest_generate_tests",
    "tables_on",
    "uninitialised",
]


def pytest_report_header():
    return None if HAS_TENSORFLOW else "no TensorFlow: tests/sok is left out"
