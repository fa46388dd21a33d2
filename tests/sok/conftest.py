"""What the tests of SOK's API share."""

from tests.support.tf_fixtures import (
    collect_ignore_glob,
    initialised,
    mode,
    play,
    pytest_generate_tests,
    pytest_report_header,
    tables_on,
    two_launched,
    uninitialised,
)

__all__ = [
    "collect_ignore_glob",
    "initialised",
    "mode",
    "play",
    "pytest_generate_tests",
    "pytest_report_header",
    "tables_on",
    "two_launched",
    "uninitialised",
]
