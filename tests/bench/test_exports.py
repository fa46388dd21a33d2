"""serving/exports.py: each export, the larger first."""

from tests.support.benchmarks import RUNS_A_BENCHMARK, run


@RUNS_A_BENCHMARK
def test_exported_models_are_measured():
    args = "--keys 2000 --dim 32 --batch 300 --rounds 2".split()
    results, _ = run("serving exports", *args)
    from scripts.bench.serving.exports import EXPORTS

    sizes = {fields["case"]: fields.get("bytes") for fields in results}
    assert [sizes[case] for case in EXPORTS] == sorted(map(sizes.get, EXPORTS), reverse=True)
    assert {"live", "StaticHashTable", "MutableHashTable", "searchsorted"} <= set(sizes)
