"""The benchmark scripts run, on tiny sizes, and say what they should. No time is asserted."""

import json
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from sok_lite.backend.tunables import TUNABLES
from tests.support.helpers import need_nvrtc
from tests.support.simt import backend as simt

# With TensorFlow and without it, one of them is in quick.
RUNS_A_BENCHMARK = pytest.mark.full_only("runs a whole benchmark")
ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"


@pytest.fixture(scope="module", autouse=True)
def scripts_on_path():
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))


def run(script, *args, are_positive=True):
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, "SOK_LITE_NUM_THREADS": "2"},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [
        json.loads(line.removeprefix("RESULT "))
        for line in done.stdout.splitlines()
        if line.startswith("RESULT ")
    ]
    for fields in results:
        numbers = [value for value in fields.values() if isinstance(value, (int, float))]
        assert len(numbers) > 2
        assert all(np.isfinite(value) and (value > 0 or not are_positive) for value in numbers), (
            fields
        )
    return results, done.stdout


SMALL = "--backends cpu --capacity 4096 --batch 200 --rounds 1 --mark-keys 2000".split()


def test_every_operation_of_both_tables_is_measured():
    from bench_tables import MARKS, OPS, TRAFFIC

    results, text = run("bench_tables.py", *SMALL, "--dims", 3, 8, "--loads", 0.5, 1.0)
    cases = {(r["case"], r.get("table"), r.get("dim"), r.get("load_factor")) for r in results}
    for table, loads in (("hbm", [0.5]), ("hybrid", [0.5, 1.0])):
        ops = set(TRAFFIC) - ({"insert_and_evict"} if table == "hbm" else set())
        expected = {(op, table, dim, load) for op in ops for dim in (3, 8) for load in loads}
        expected |= {(op, table, 64, None) for op in MARKS}
        assert {case for case in cases if case[1] == table} == expected
    assert {case[0] for case in cases} == {*OPS, "copy", "random_read", "gather"}
    assert "hbm cannot hold load factor 1.0" in text
    for r in results:
        if r["case"] in TRAFFIC:
            # Compulsory bytes cannot be read faster than the caches of this machine give them.
            assert r["share_of_limit"] < 100
            assert r["keys_in_table"] >= 0.98 * r["load_factor"] * r["capacity"]


@RUNS_A_BENCHMARK
def test_a_subset_can_be_chosen():
    args = "--tables hbm --dims 8 --loads 0.5 --ops find".split()
    results, text = run("bench_tables.py", *SMALL, *args)
    assert [r["case"] for r in results] == ["copy", "random_read", "find"]
    assert "hybrid" not in text
    find = results[-1]
    # 8 bytes of key, 4 of row number, a line of 64.
    assert find["bytes_per_second"] == pytest.approx(76 * find["keys_per_second"], rel=1e-3)


@pytest.mark.parametrize("count", [0, 1, 31, 1000])
def test_the_keys_of_the_benchmarks_are_distinct(backend, count):
    from bench_tables import distinct_keys

    first = backend.to_host(distinct_keys(backend, 0, count))
    second = backend.to_host(distinct_keys(backend, count, 1000))
    assert np.unique(np.concatenate([first, second])).size == count + 1000
    np.testing.assert_array_equal(second[:1], backend.to_host(distinct_keys(backend, count, 1)))


def test_a_filled_table_gives_known_and_new_keys(backend):
    import argparse

    from bench_tables import NEW_SHARE, Bench

    args = argparse.Namespace(batch=100, near_share=1.0, table_options=[])
    bench = Bench(backend, "hbm", 4, 4096, 0.5, args)
    assert (bench.table.capacity, bench.table.size) == (4096, 2048)
    seen = set()
    for _ in range(15):
        keys = bench.known(100)
        assert bool(bench.table.contains(keys).all())
        seen |= set(backend.to_host(keys).tolist())
    assert len(seen) == 1500
    for _ in range(3):
        keys = bench.mixed(100)
        assert np.unique(backend.to_host(keys)).size == 100
        held = backend.to_host(bench.table.contains(keys))
        assert held.sum() == 100 - int(100 * NEW_SHARE)
        bench.table.find_or_insert(keys)
        bench.remove_new(keys, 2048)
        np.testing.assert_array_equal(backend.to_host(bench.table.contains(keys)), held)


@pytest.mark.parametrize("n", [1, 31, 33, 1000])
def test_the_kernels_that_measure_the_limits_copy_what_they_should(backend, n):
    from bench_limits import limits_of

    limits, xp = limits_of(backend), backend.xp
    memory = backend.from_host(np.random.default_rng(0).integers(0, 1 << 60, (50, 6)).astype("u8"))
    rows = np.random.default_rng(1).integers(0, 50, n).astype(np.uint32)
    out = xp.zeros((n, 6), np.uint64)
    lane_bits = 0 if backend.name == "cpu" else 2
    limits.launch("limit_gather", 4 * n, memory, 3, lane_bits, backend.from_host(rows), out, n)
    np.testing.assert_array_equal(backend.to_host(out), backend.to_host(memory)[rows])
    copied = xp.zeros_like(out)
    limits.launch("limit_copy", 3 * n, out, copied, 3 * n)
    np.testing.assert_array_equal(backend.to_host(copied), backend.to_host(out))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_kernels_that_measure_the_limits_compile_for_a_gpu(arch):
    need_nvrtc()
    from bench_limits import READS, SOURCE
    from kernel_registers import compile_source

    from sok_lite.backend import sources

    compiled = compile_source(sources.inlined(SOURCE), arch)
    assert compiled.error is None
    wanted = {f"limit_read_{width}_{lanes}" for width in READS for lanes in READS[width]}
    assert set(compiled.kernels) == {*wanted, "limit_copy", "limit_gather"}
    assert not any(usage.spill_bytes for usage in compiled.kernels.values())


@RUNS_A_BENCHMARK
def test_the_limits_are_measured():
    args = "--backends cpu --footprints-gb 0.001 0.002 --reads 1000 --rounds 1".split()
    results, _ = run("bench_limits.py", *args)
    assert [r["case"] for r in results] == ["copy"] + ["random_read"] * 8 + ["gather"] * 5
    assert {r["footprint_bytes"] for r in results if r["case"] == "random_read"} == {
        1048 << 10,
        2097 << 10,
    }


@RUNS_A_BENCHMARK
def test_the_engine_around_the_tables_is_measured():
    results, _ = run(
        "bench_engine.py", *"--backends cpu --keys 2000 --batch 400 --dim 4 --rounds 1".split()
    )
    assert {"unique", "group", "combine_grad", "update_adam"} <= {r["case"] for r in results}


@RUNS_A_BENCHMARK
def test_every_rule_of_an_optimizer_is_measured_beside_its_traffic():
    from sok_lite.engine import optimizers

    args = "--backends cpu --rows 300 --dims 3 8 --dtypes float32 bfloat16 --rounds 1"
    results, _ = run("bench_optimizers.py", *args.split(), are_positive=False)
    names = set(optimizers.__all__) - {"UpdateRule", "AdamW"}  # AdamW's kernel is Adam's
    assert {r["rule"] for r in results} == {*names, "Adam amsgrad", "RMSprop centered"}
    assert len(results) == 8 * (len(names) + 2)
    assert all(r["ms"] > 0 and r["share_of_copy"] > 0 for r in results)
    traffic = {(r["rule"], r["dtype"], r["dim"]): r["bytes_per_row"] for r in results}
    # Value, m and v read and written, gradient and row number read.
    assert traffic["Adam", "float32", 8] == 8 * (2 * (4 + 4 + 4) + 4) + 4
    assert traffic["Adam amsgrad", "bfloat16", 3] == 3 * (2 * (2 + 4 + 4 + 4) + 4) + 4
    assert traffic["SGD", "bfloat16", 8] == 8 * (2 * 2 + 4) + 4


@RUNS_A_BENCHMARK
@pytest.mark.parametrize("beside", [[], ["--beside"]], ids=["alone", "beside"])
def test_launches_are_measured(beside):
    results, _ = run(
        "bench_launch.py",
        *"--threads 1 2 --idle-us 5 20 --parts 3 --items 200 --rows 500 --rounds 2".split(),
        *beside,
        are_positive=not beside,  # there may be no time for other work
    )
    launches = [r for r in results if r["case"] == "launch"]
    assert len(launches) == 4 * len([r for r in results if r["case"] == "joined"]) == 20
    assert {(r["threads"], r["idle_us"]) for r in launches} == {(1, 5), (1, 20), (2, 5), (2, 20)}
    assert all(("turns_beside" in r) == bool(beside) for r in launches)


@RUNS_A_BENCHMARK
def test_allocations_of_rows_are_counted_as_a_gpu_makes_them():
    pytest.importorskip("cupy", reason="CuPy is not installed")
    import bench_slabs

    from sok_lite.backend.cuda import CudaBackend

    assert bench_slabs.CountingBackend.chunk_bytes == CudaBackend.chunk_bytes
    results, _ = run("bench_slabs.py", "--rows", 20_000, "--dim", 8, "--batches", 100, 7_000)
    assert [r["batch"] for r in results] == [100, 7_000]
    assert all(r["rows"] == 20_000 and r["row_bytes"] == 3 * 8 * 4 for r in results)
    assert results[0]["allocations"] >= results[1]["allocations"] == 3 * 3


@RUNS_A_BENCHMARK
def test_what_is_packed_for_a_gpu_is_timed_without_one():
    pytest.importorskip("cupy", reason="CuPy is not installed")
    results, _ = run("bench_packing.py", *"--tables 1 3 --ids 20 --rounds 2".split())
    assert [r["tables"] for r in results] == [1, 3]
    assert results[0]["launches"] == results[1]["launches"]
    assert all(r["packing_us"] < r["step_us"] for r in results)


def table_of(text, first):
    """Returns the rows of the Markdown table whose header begins with `first`, without that."""
    lines = text[text.index(f"| {first} |") :].split("\n\n")[0].strip().splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


@pytest.fixture
def no_peer(monkeypatch, tmp_path):
    monkeypatch.setenv("SOK_LITE_PEERS", str(tmp_path))


@RUNS_A_BENCHMARK
def test_one_table_is_measured_through_tensorflow(no_peer):
    args = "--keys 500 --batch 64 --dim 3 --rounds 1 --cases lookup-function-zipf insert".split()
    results, text = run("bench_lookup.py", *args)
    assert [(r["case"], set(r["median_ms"])) for r in results] == [
        ("lookup-function-zipf", {"sok_lite", "dense"}),
        ("insert", {"sok_lite"}),
    ]
    assert "TFRA is not measured" in text
    assert [row[0] for row in table_of(text, "median ms")] == ["lookup-function-zipf", "insert"]
    assert [row[0] for row in table_of(text, "work")] == ["lookup, zipf, against dense"]


@RUNS_A_BENCHMARK
def test_many_tables_are_measured_by_themselves_and_over_ranks(no_peer):
    results, text = run("bench_many_tables.py", "--quick", "--threads", 1)
    cases = ["lookup-32", "train-32", "train-32x4"]
    assert [r["case"] for r in results] == cases
    contenders = {"sok_lite, 1 thread", "dense, 1 thread"}
    if "2 ranks are not measured" not in text:
        contenders.add("sok_lite, 2 ranks, 1 thread")
    assert all(set(r["median_ms"]) == contenders for r in results)
    assert [row[0] for row in table_of(text, "median ms")] == cases


@RUNS_A_BENCHMARK
def test_the_lines_of_a_program_are_measured_with_our_dynamic_embedding(no_peer):
    cases = ["accum-eager-uniform", "train-function-many"]
    args = "--keys 500 --batch 64 --dim 3 --tables 2 --many-keys 50 --many-batch 8 --rounds 2"
    results, text = run("bench_dynamic_embedding.py", *args.split(), "--runs", 2, "--cases", *cases)
    assert [r["case"] for r in results] == cases
    assert [(r["tables"], r["keys"], r["batch"]) for r in results] == [(1, 500, 64), (2, 50, 8)]
    assert all(set(r["median_ms"]) == {"sok_lite"} for r in results)
    assert "TFRA is not measured" in text
    assert [row[0] for row in table_of(text, "median ms")] == cases


def test_of_several_runs_the_lowest_median_counts():
    from bench_dynamic_embedding import lowest

    runs = [{"median_ms": {"a": 3.0, "b": 1.0}}, {"median_ms": {"a": 2.0, "b": 4.0}}]
    assert lowest(runs) == {"median_ms": {"a": 2.0, "b": 1.0}}


@RUNS_A_BENCHMARK
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_work_of_each_rank_is_counted(ranks):
    pytest.importorskip("tensorflow")
    args = "--tables 2 --keys 100 --dim 3 --cases lookup-64 train-64".split()
    if ranks == 1:
        (lookup, train), _ = run("bench_ranks.py", *args)
        assert lookup["items"] == train["items"] == 128  # 64 rows of two tables
        assert "keys_owned" not in lookup
        assert 0 < train["keys_owned"] < 128
        return
    from bench_turns import find_horovodrun

    horovodrun = find_horovodrun()
    if horovodrun is None:
        pytest.skip("no horovodrun: scripts/setup.sh installs Horovod")
    done = subprocess.run(
        [
            horovodrun,
            "--gloo",
            "-np",
            str(ranks),
            sys.executable,
            SCRIPTS / "bench_ranks.py",
            *args,
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in re.findall(r"RESULT (.*)", done.stdout)]
    lookup, train = results
    assert [each["case"] for each in results] == ["lookup-64", "train-64"]
    for each in results:
        assert each["items"] == 64  # 32 rows of two tables
        # Of a message: a tag, the number of tables, and how many keys each has.
        words = each["keys_for_others"] + 2 + 2
        assert each["send_keys_bytes"] == pytest.approx(8 * words, rel=1e-3)
        assert each["keys_for_others"] < each["distinct_keys"] == each["keys_asked"]
    assert [each["collectives"] for each in results] == [2, 3]
    assert "send_grads_bytes" not in lookup
    assert train["keys_owned"] < train["keys_asked"]
    # A section of 16 bytes begins for each table.
    assert 0 <= train["send_grads_bytes"] - 12 * train["keys_for_others"] <= 2 * 15


@pytest.mark.full_only("starts three jobs")
def test_two_pinned_ranks_are_timed_beside_one():
    pytest.importorskip("tensorflow")
    cases = ["step", "dense, cpu", "waits"]
    args = ["--batches", 64, "--rounds", 1, "--calls", 1, "--cases", *cases]
    done = subprocess.run(
        [sys.executable, SCRIPTS / "bench_pinned.py", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "no horovodrun" in done.stderr:
        pytest.skip("no horovodrun: scripts/setup.sh installs Horovod")
    assert done.returncode == 0, done.stdout + done.stderr
    *results, of_one, of_both = [
        json.loads(line) for line in re.findall(r"RESULT (.*)", done.stdout)
    ]
    assert [each["case"] for each in results] == cases
    one, both, two = results[0]["median_ms"]
    assert results[2]["median_ms"][one] == 0 < results[2]["median_ms"][two]
    for each, (ratio, beside) in product(results[:2], [(of_one, one), (of_both, both)]):
        assert ratio["beside"] == beside
        assert ratio[each["case"]] == pytest.approx(
            each["median_ms"][beside] / each["median_ms"][two], abs=1e-3
        )


@RUNS_A_BENCHMARK
def test_a_request_is_measured():
    results, _ = run("bench_request.py", "--tables", 3, "--keys", 50, "--rounds", 3)
    assert [r["case"] for r in results] == ["dense", "known", "any", "ragged", "engine"]


@RUNS_A_BENCHMARK
def test_exported_models_are_measured():
    args = "--keys 2000 --dim 32 --batch 300 --rounds 2".split()
    results, _ = run("bench_serving.py", *args)
    from bench_serving import EXPORTS

    sizes = {fields["case"]: fields.get("bytes") for fields in results}
    assert [sizes[case] for case in EXPORTS] == sorted(map(sizes.get, EXPORTS), reverse=True)
    assert {"live", "StaticHashTable", "MutableHashTable", "searchsorted"} <= set(sizes)


@RUNS_A_BENCHMARK
def test_the_demo_is_measured():
    args = "--cases demo --demo-rows 3000 --demo-rounds 1".split()
    ((fields,), _) = run("bench_many_tables.py", *args)
    rate = 1024e3 / fields["median_ms"]["sok_lite"]
    assert fields["samples_per_second"] == {"sok_lite": pytest.approx(rate, rel=1e-3)}


@pytest.mark.parametrize(
    ("is_time", "ours", "ratio", "reached"),
    [
        (True, 6.0, "3.00x its time", "no"),
        (True, 2.6, "1.30x its time", "yes"),
        (False, 1.25, "1.60x as fast", "yes"),
        (False, 1.6, "1.25x as fast", "no"),
    ],
)
def test_a_mark_says_whether_it_is_reached(is_time, ours, ratio, reached):
    from bench_turns import Mark

    mark = Mark("work", "case", "a", "b", 1.3, is_time)
    row = mark.row({"a": ours, "b": 2.0})
    assert row == ["work", f"a: {ours:.3g} ms", "b: 2 ms", ratio, "1.3x", reached]
    assert mark.row({"a": ours}) is None and mark.row({"b": 2.0}) is None


def test_the_rows_of_many_tables_have_the_mean_that_was_asked_for():
    from bench_lookup import zipf_positions
    from bench_many_tables import make_lengths

    rng = np.random.default_rng(0)
    for count in (2, 1024):
        lengths = make_lengths(rng, count, 10)
        assert lengths.size == count and lengths.sum() == 10 * count
        assert lengths.min() >= 1 and lengths.max() <= 19
    assert make_lengths(rng, 7, 1).tolist() == [1] * 7
    positions = zipf_positions(rng, 50, 1.3, (200, 500))
    counts = np.bincount(positions.ravel(), minlength=50)
    assert positions.shape == (200, 500) and counts.size == 50
    # The k-th comes k^1.3 times as seldom as the first.
    expected = 1e5 * np.arange(1, 51) ** -1.3 / (np.arange(1, 51) ** -1.3).sum()
    np.testing.assert_allclose(counts, expected, atol=6 * np.sqrt(expected.max()))


@pytest.mark.full_only("starts a system in each of its processes")
def test_a_system_that_dies_ends_the_benchmark(tmp_path):
    peer = tmp_path / "bin" / "python"
    peer.parent.mkdir()
    peer.write_text("#!/bin/sh\necho no TFRA here >&2\nexit 3\n")
    peer.chmod(0o755)
    done = subprocess.run(
        [sys.executable, SCRIPTS / "bench_lookup.py", "--threads", "1", "--peers", tmp_path],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert "no TFRA here" in done.stderr
    assert "A process of tfra, 1 thread died; its words are above." in done.stderr


@RUNS_A_BENCHMARK
def test_growth_is_measured():
    results, text = run("bench_growth.py", "--quick")
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


@RUNS_A_BENCHMARK
def test_compiling_is_measured_without_a_gpu():
    need_nvrtc()
    files = ["slots.cu", "update/sgd.cu"]
    results, text = run("bench_compile.py", "--files", *files)
    assert [r["file"] for r in results] == files
    assert all(r["cached_s"] < r["compile_s"] for r in results)
    assert "NOTE CuPy" in text


@RUNS_A_BENCHMARK
def test_the_launches_of_the_main_calls_are_counted():
    reason = simt.unavailable()
    if reason is not None:
        pytest.skip(f"no simulated GPU: {reason}")
    args = "--keys 64 --dim 3 --ranks 2 4".split()
    results, text = run("count_launches.py", *args, are_positive=False)
    counts = {r["case"]: r for r in results}
    steps = [f"training step of {what}" for what in ("1 hbm", "26 hbm")]
    on_ranks = [f"{steps[1]}, {size} ranks" for size in (2, 4)]
    assert {case.partition(":")[0] for case in counts} == {"hbm", "hybrid", *steps, *on_ranks}
    one, many = (counts[step] for step in steps)
    # One launch serves all tables of a call.
    assert one["kernels"] > 3 and many["kernels"] == one["kernels"]
    assert one["waits"] > 0
    assert text.count("\n| ") == 1 + len(results) - len(on_ranks)
    # A trip of keys, rows and gradients, however many ranks there are.
    for case in on_ranks:
        assert counts[case]["collectives"] == 3
        assert one["kernels"] < counts[case]["kernels"] < 3 * one["kernels"]
    two, four = (counts[case] for case in on_ranks)
    assert 0 < two["waits"] == four["waits"]


def test_a_power_law_has_the_distinct_keys_that_were_asked_for():
    from bench_workloads import keys_for_unique, power_law_keys

    num_keys = keys_for_unique(20_000, 7_000, 1.05)
    keys = power_law_keys(num_keys, 20_000, 1.05, np.random.default_rng(0))
    assert 0 <= keys.min() <= keys.max() < num_keys
    # The standard deviation of the number of distinct keys is below sqrt(7,000), 84.
    assert abs(np.unique(keys).size - 7_000) < 420
    # Key 0 comes 2^1.05 times as often as key 1, and about 1,600 times.
    assert np.mean(keys == 0) / np.mean(keys == 1) == pytest.approx(2**1.05, rel=0.2)


@RUNS_A_BENCHMARK
def test_the_dynamicemb_workload_runs_on_both_tables():
    results, _ = run(
        "bench_tables.py",
        *SMALL,
        *"--workload dynamicemb --lookups 3000 --unique 1000".split(),
    )
    assert [r["table"] for r in results] == ["hbm", "hybrid"]
    for r in results:
        assert abs(r["unique"] - 1000) < 150
        assert r["step_ms"] == pytest.approx(r["forward_ms"] + r["backward_ms"], rel=1e-2)


@RUNS_A_BENCHMARK
def test_the_sweep_runs_each_choice_and_names_the_best():
    import bench_sweep

    names = ["default", "SOK_LINE=8", "max_bucket_size=32"]
    done = subprocess.run(
        ["bash", SCRIPTS / "gpu_check.sh", "--sweep", "--quick", "--choices", *names],
        capture_output=True,
        text=True,
        env={**os.environ, "SOK_LITE_BACKEND": "cpu", "SOK_LITE_PYTHON": sys.executable},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = [
        json.loads(line.removeprefix("RESULT "))
        for line in done.stdout.splitlines()
        if line.startswith("RESULT ")
    ]
    assert "random_read" in {r["case"] for r in results}
    best = [r for r in results if r["case"] == "best"]
    measured = [r for r in results if "load_factor" in r and r["case"] != "best"]
    chosen = [choice for choice in bench_sweep.cpu_choices() if choice.name in names]
    for r in best:
        same = [
            other
            for other in measured
            if (other["case"], other["table"], other["dim"], other["load_factor"])
            == (r["op"], r["table"], r["dim"], r["load_factor"])
        ]
        choices = [choice for choice in chosen if r["table"] in choice.tables]
        assert len(same) == r["choices"] == len(choices)
        assert r["keys_per_second"] == max(other["keys_per_second"] for other in same)
        assert r["over_default"] >= 1
        for choice in choices:
            assert any(
                other.get("defines", {}) == choice.defines
                and other.get("table_options", []) == list(choice.options)
                for other in same
            )
    assert {(r["table"], r["dim"], r["load_factor"]) for r in best} == {
        (table, dim, load)
        for dim in (8, 64)
        for table, load in (("hbm", 0.5), ("hybrid", 0.5), ("hybrid", 1.0))
    }


def test_every_tunable_of_the_sweep_is_one_of_the_kernels():
    import bench_sweep

    for choice in (*bench_sweep.gpu_choices(), *bench_sweep.cpu_choices()):
        assert all(value in TUNABLES[name].values for name, value in choice.defines.items())


PEER = """
Warming up
* GPU: 1 x Some Card: 9.0
* Key-Values per OP = 1048576
### One mode:

* dim = 8, capacity = 1 Million-KV, HBM = 4 GB, HMEM = 0 GB

|    \u03bb | find | find_or_insert* |
|-----:|-----:|----------------:|
| 0.50 | 1.500 | 2.000 |
| 1.00 | 0.250 |  0.125 |

|    \u03bb | contains |
|-----:|---------:|
| 0.50 |    3.000 |

### Another mode:

* dim = 64, capacity = 128 Million-KV, HBM = 16 GB, HMEM = 16 GB

|    \u03bb | find |
|-----:|-----:|
| 0.75 | 0.500 |
"""


def test_the_figures_of_hkv_are_read():
    from bench_peer import parse_hkv, peer_of

    unit = 1.073741824
    mega = 1 << 20
    expected = [
        (8, mega, 0.5, "find", 1.5 * unit),
        (8, mega, 0.5, "find_or_insert*", 2 * unit),
        (8, mega, 1.0, "find", 0.25 * unit),
        (8, mega, 1.0, "find_or_insert*", 0.125 * unit),
        (8, mega, 0.5, "contains", 3 * unit),
        (64, 128 * mega, 0.75, "find", 0.5 * unit),
    ]
    cases = parse_hkv(PEER)
    assert [tuple(case) for case in cases] == [pytest.approx(case) for case in expected]
    keys = [case.key for case in cases]
    assert peer_of(keys, 8, mega, 0.5, "contains") == (8, mega, 0.5, "contains")
    assert peer_of(keys, 8, 2 * mega, 0.5, "contains") is None
    assert parse_hkv("") == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("| \u03bb | find |\n| 0.5 | 1.0 |\n", "without a configuration"),
        ("dim = 8, capacity = 1 Million\n| \u03bb | find |\n| 0.5 |\n", "A row with 1 cells"),
        ("dim = 8, capacity = 1 Million\n| \u03bb | find |\n| 0.5 | x |\n", "could not convert"),
    ],
)
def test_a_table_that_is_not_understood_is_an_error(text, message):
    from bench_peer import parse_hkv

    with pytest.raises(ValueError, match=message):
        parse_hkv(text)


@RUNS_A_BENCHMARK
def test_a_peer_runs_in_turns_with_our_tables(tmp_path):
    peer = tmp_path / "peer"
    peer.write_text(f'#!/bin/sh\necho turn >> "$0.log"\ncat <<END\n{PEER}\nEND\n')
    peer.chmod(0o755)
    args = "--backends cpu --tables hbm hybrid --dims 8 --loads 0.5 1.0 --batch 32768 --rounds 1"
    results, text = run(
        "bench_tables.py",
        *args.split(),
        *("--hkv-ops", "find", "find_or_insert*", "insert_or_assign", "--capacity", 1 << 20),
        *("--turns", 1, "--peer", "hkv", "--peer-bin", peer),
    )
    assert (tmp_path / "peer.log").read_text() == "turn\n"
    ratios = {(r["table"], r["load_factor"], r["op"]): r for r in results if r["case"] == "ratio"}
    assert set(ratios) == {
        ("hbm", 0.5, "find"),
        ("hbm", 0.5, "find_or_insert*"),
        ("hybrid", 0.5, "find"),
        ("hybrid", 0.5, "find_or_insert*"),
        ("hybrid", 1.0, "find"),
        ("hybrid", 1.0, "find_or_insert*"),
    }
    for (table, load, op), r in ratios.items():
        (own,) = [
            other
            for other in results
            if other.get("keys_are") == "best_of_two"
            and (other["table"], other["load_factor"], other["case"]) == (table, load, op)
        ]
        ours = own["keys_per_second"] / 1e9
        assert r["ours_giga_keys_per_second"] == pytest.approx(ours, rel=2e-3)
        peers = {"find": {0.5: 1.5, 1.0: 0.25}, "find_or_insert*": {0.5: 2, 1.0: 0.125}}
        assert r["ratio"] == pytest.approx(ours / (peers[op][load] * 1.0737), rel=2e-3)
    assert "has no insert_or_assign for dim 8" in text


def test_a_peer_that_fails_is_an_error(tmp_path):
    peer = tmp_path / "peer"
    peer.write_text("#!/bin/sh\necho no memory >&2\nexit 3\n")
    peer.chmod(0o755)
    done = subprocess.run(
        [sys.executable, SCRIPTS / "bench_tables.py", *SMALL, "--peer", "hkv", "--peer-bin", peer],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "ended with 3: no memory" in done.stderr


@RUNS_A_BENCHMARK
@pytest.mark.parametrize("mode", [(), ("--function",)], ids=["eager", "tf.function"])
def test_steps_by_a_rule_and_steps_of_its_own_are_measured(mode):
    pytest.importorskip("tf_keras")
    args = ("--tables", 1, 2, "--rows", 50, "--dim", 3, "--rounds", 1, *mode)
    results, _ = run("bench_fallback_step.py", *args)
    families = ("Keras 3", "tf_keras", "legacy", "TF1")
    assert {(r["family"], r["tables"]) for r in results} == {
        (f, n) for f in families for n in (1, 2)
    }


@RUNS_A_BENCHMARK
def test_fit_of_tables_is_timed_beside_dense_layers():
    pytest.importorskip("tensorflow")
    args = "--features 2 --keys 50 --dim 2 --batch 16 --steps 2 --rounds 1 --calls 2".split()
    results, _ = run("bench_keras.py", *args)
    layers = ["tables", "a layer for each table", "keras.layers.Embedding"]
    assert [each["layer"] for each in results[:3]] == layers
    served = [(each["way"], each["batch"]) for each in results[3:]]
    assert served == [("model", 1), ("served", 1), ("model", 16), ("served", 16)]


@pytest.mark.full_only("trains the click model")
def test_training_by_gradients_of_16_bits_is_measured():
    pytest.importorskip("tensorflow")
    args = "--rows 600 --batch 400 --dim 2 --seeds 1 --cases bfloat16".split()
    results, _ = run("bench_gradient_dtype.py", *args, are_positive=False)
    assert [each["case"] for each in results] == ["bfloat16"]


@RUNS_A_BENCHMARK
def test_the_calls_of_a_kv_variable_are_timed_beside_a_dense_one():
    pytest.importorskip("tensorflow")
    args = "--keys 500 --batch 40 --dim 3 --rounds 1 --partitions 1 2".split()
    results, _ = run("bench_kv_variable.py", *args)
    works = ("lookup", "predict", "train-adam", "train-ftrl", "save", "restore")
    assert [(r["case"], r["partitions"]) for r in results] == [
        (w, n) for w in works for n in (1, 2)
    ]
    assert all(("checkpoint_mb" in r) == (r["case"] in ("save", "restore")) for r in results)


@RUNS_A_BENCHMARK
def test_dumps_and_what_they_cost_training_are_measured():
    args = "--keys 20000 --batch 400 --dim 4 --rounds 1 --steps 3".split()
    results, _ = run("bench_dump.py", *args)
    cases = ["disk", "disk, read", "dump", "load", "background"]
    cases += ["step, no dump", "step, while it is written"]
    assert [fields["case"] for fields in results] == cases
    assert results[4]["copied"] > 20_000 * (8 + 3 * 16)
