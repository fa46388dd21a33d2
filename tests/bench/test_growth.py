"""memory/growth.py on tiny sizes."""

from tests.support.benchmarks import RUNS_A_BENCHMARK, run


@RUNS_A_BENCHMARK
def test_growth_is_measured():
    results, text = run("memory growth", "--quick")
    cases = [(fields["case"], fields["table"]) for fields in results]
    for table in ("hbm", "hybrid"):
        for case in ("new", "known", "mixed", "memory"):
            assert cases.count((case, table)) == 1
        sizes = [
            fields["keys"]
            for fields in results
            if (fields["case"], fields["table"]) == ("lookup", table)
        ]
        assert sizes == sorted(sizes) and sizes[0] >= 1 << 12 and sizes[-1] >= 1 << 15
    assert text.count("MARK ") == 6
