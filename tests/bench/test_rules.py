"""optimizers/rules.py: every rule, with the bytes that it must move."""

from tests.support.benchmarks import RUNS_A_BENCHMARK, run


@RUNS_A_BENCHMARK
def test_every_rule_of_an_optimizer_is_measured_beside_its_traffic():
    from sok_lite.engine import optimizers

    args = "--backends cpu --rows 300 --dims 3 8 --dtypes float32 bfloat16 --rounds 1"
    results, _ = run("optimizers rules", *args.split(), are_positive=False)
    names = set(optimizers.__all__) - {"UpdateRule", "AdamW"}  # AdamW's kernel is Adam's
    assert {r["rule"] for r in results} == {*names, "Adam amsgrad", "RMSprop centered"}
    assert len(results) == 8 * (len(names) + 2)
    assert all(r["ms"] > 0 and r["share_of_copy"] > 0 for r in results)
    traffic = {(r["rule"], r["dtype"], r["dim"]): r["bytes_per_row"] for r in results}
    # Value, m and v read and written, gradient and row number read.
    assert traffic["Adam", "float32", 8] == 8 * (2 * (4 + 4 + 4) + 4) + 4
    assert traffic["Adam amsgrad", "bfloat16", 3] == 3 * (2 * (2 + 4 + 4 + 4) + 4) + 4
    assert traffic["SGD", "bfloat16", 8] == 8 * (2 * 2 + 4) + 4
