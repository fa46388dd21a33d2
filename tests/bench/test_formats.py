"""files/formats.py on tiny sizes."""

import pytest

from tests.support.benchmarks import RUNS_A_BENCHMARK, run


@RUNS_A_BENCHMARK
def test_each_format_is_measured_in_a_process_of_its_own():
    pytest.importorskip("tensorflow")
    formats = ["dump", "tf.train.Checkpoint"]
    args = ("--keys", 3000, "--dim", 3, "--formats", *formats)
    results, _ = run("files formats", *args, are_positive=False)
    assert [(each["format"], each["call"]) for each in results] == [
        (name, call) for name in formats for call in ("save", "restore")
    ]
    assert {each["content"] for each in results} == {3000 * (8 + 4 * 3 * 3)}
