"""A step on a GPU, estimated: its counts are the simulated GPU's, its arithmetic is as by hand."""

import importlib.util
import itertools

import numpy as np
import pytest

from tests.support.benchmarks import RUNS_A_BENCHMARK, run, table_of
from tests.support.call_counts import counts_of
from tests.support.simt import backend as simt
from tools.estimate_gpu_step import Counts, bytes_moved, estimate, gpu_seconds
from tools.gpu_step_counts import distinct_keys, engine_counts, engine_step
from tools.gpu_step_facts import H100, Gpu
from tools.gpu_step_work import (
    KERNELS,
    OF_TENSORFLOW,
    OPERATIONS,
    ROOT,
    Launch,
    Sizes,
    least_bytes,
    source_of,
    traffic_of,
)
from tools.scaling_machine import Given
from tools.scaling_work import Job

LINE = 64
KINDS = {"published", "measured", "counted", "derived", "assumed"}
# No two alike: tables, batch, dim, states, distinct.
AWKWARD = (Sizes(1, 1, 1, 0, 1), Sizes(3, 7, 5, 2, 11), Sizes(2, 33, 17, 1, 40))


@pytest.fixture
def simulated():
    if simt.unavailable() is not None:
        pytest.skip(f"no simulated GPU: {simt.unavailable()}")


def plain(**given):
    """A GPU on which everything takes no time but what is given, with equal ends."""
    ends = dict.fromkeys(H100.givens(), 0.0) | {"bandwidth": 1e300, "efficiency": 1.0}
    ends |= {"accesses": 1e300, **given}
    return Gpu("plain", **{name: Given(x, x, "", "assumed", "") for name, x in ends.items()})


def both(counts, python, sizes, gpu):
    hopeful, cautious = (estimate(counts, python, sizes, gpu, end) for end in (True, False))
    assert hopeful.gpu == cautious.gpu  # the ends of `plain` are equal
    return hopeful.gpu, hopeful.step, cautious.step


# ---- bytes


@pytest.mark.parametrize("sizes", AWKWARD)
def test_the_least_traffic_is_that_of_touching_everything_once(sizes):
    """Memory is laid out address by address, and lines and bytes are counted."""
    row = sizes.dim * 4
    lines = [set() for _ in range(2 + sizes.states)]  # of the index, of rows, of each state
    for key, column in itertools.product(range(int(sizes.distinct)), range(len(lines))):
        begin = key * 4096
        size = 16 if column == 0 else row
        lines[column] |= {at // LINE for at in range(begin, begin + size)}
    index, rows, *states = (LINE * len(each) for each in lines)
    dense = 0
    for _ in range(sizes.tables):
        for _ in range(sizes.batch):
            dense += 8 + row + row  # an id, its result and the gradient of that
    expected = dense + index + rows + 2 * (rows + sum(states))
    assert sum(least_bytes(sizes).values()) == expected


def test_traffic_by_hand():
    sizes = Sizes(tables=3, batch=7, dim=5, states=2, distinct=11)  # 21 items, rows of 20 bytes
    # 21 keys, 21 row numbers; a line of each of 11 keys is read and written
    assert traffic_of(Launch("find", True), sizes) == (21 * 8 + 21 * 4 + 22 * 64, 22)
    # 21 splits, row numbers and results; 11 rows of one line
    assert traffic_of(Launch("pool_f32", True), sizes) == (21 * (8 + 4 + 20) + 11 * 64, 11)
    # 42 heads of 4 bytes fill three lines, fewer than there are keys
    assert traffic_of(Launch("dedup_insert", True), sizes) == (21 * (8 + 4) + 2 * 3 * 64, 6)
    # row numbers and gradients; rows and two states, read and written
    assert traffic_of(Launch("update_adam_bf16", True), sizes) == (11 * 24 + 66 * 64, 66)
    # offsets; order and rows of 21 items; their gradients, 11 sums, a piece in 32 items and the
    # label where it begins
    pieces = 21 / 32
    dense = 11 * 8 + 21 * (4 + 4) + 20 * (21 + 11 + pieces)
    found = traffic_of(Launch("segment_sums", True), sizes)
    assert found == pytest.approx((dense + 64 * pieces, 21 + pieces))
    assert traffic_of(Launch("fill of int32", False), sizes) == (42 * 4, 0)
    assert traffic_of(Launch("fill", False, is_of_items=False), sizes) == (0, 0)


def test_wide_rows_have_several_lines():
    sizes = Sizes(1, 1, 17, 2, 1)  # 68 bytes
    assert traffic_of(Launch("update_adam_f32", True), sizes).accesses == 2 * 3 * 2


def test_what_has_no_formula_is_named():
    with pytest.raises(KeyError, match="'brand_new'.*KERNELS"):
        traffic_of(Launch("brand_new", True), AWKWARD[0])
    with pytest.raises(KeyError, match="'sort of int8'.*OPERATIONS"):
        traffic_of(Launch("sort of int8", False), AWKWARD[0])


# ---- times


def test_times_by_hand():
    sizes = Sizes(tables=3, batch=7, dim=5, states=2, distinct=11)
    # An operation of 8 launches for 116 bytes an item, 2,436 in all, and 1,660 and 22 lines.
    launches = (
        Launch("argsort of int64", False),
        Launch("find", True),
        Launch("fill", False, False),
    )
    counts = Counts(launches, waits=3)
    assert bytes_moved(counts, sizes) == 2436 + 1660
    # 10 launches of the GPU; 4,096 bytes at half of 1,024 a second
    gpu = plain(bandwidth=1024.0, efficiency=0.5, kernel=0.25, launch=0.125, wait=2.0, python=3.0)
    working, host = 10 * 0.25 + 8.0, 3.0 * 1.5 + 10 * 0.125 + 3 * 2.0
    assert both(counts, 1.5, sizes, gpu) == (working, max(working, host), working + host)
    # Its lines take longer than its bytes: 22 lines at 2 a second instead of 1,660 / 512
    slow = plain(bandwidth=1024.0, efficiency=0.5, accesses=2.0)
    assert gpu_seconds(launches, sizes, slow, True) == pytest.approx(2436 / 512 + 11)


def test_times_through_tensorflow_by_hand():
    sizes = Sizes(tables=3, batch=7, dim=5, states=2, distinct=11)
    counts = Counts((Launch("fill", False, False),), waits=3, views=5, results=1)
    # ids, gradients of 21 results, distinct keys twice, gradients of 11 rows: each read and written
    assert bytes_moved(counts, sizes) == 2 * (21 * 8 + 21 * 20 + 2 * 11 * 8 + 11 * 20)
    gpu = plain(wait=2.0, bridge=0.25, framework=0.5, launch=1.0, kernel=0.125)
    host = 8 * 2.0 + 0.25 + 0.5 + 1.0
    # TensorFlow launches five by itself, which its own time has.
    assert both(counts, 0.0, sizes, gpu) == (6 * 0.125, host, host + 6 * 0.125)


def test_what_is_assumed_has_a_source_and_two_ends():
    for name, given in H100.givens().items():
        assert given.kind in KINDS and given.source, name
        is_rate = given.unit.endswith("/s") or name == "efficiency"
        worst, best = sorted((given.cautious, given.hopeful), reverse=not is_rate)
        assert (given.cautious, given.hopeful) == (worst, best)


# ---- counts


@pytest.mark.usefixtures("simulated")
def test_a_step_is_counted_whatever_its_size():
    counts = engine_counts(tables=1)
    step = engine_step(tables=2, ids=70, dim=8, keys=90)
    expected = counts_of(simt.simt_backend(), step.whole)
    found = (counts.kernels, counts.operations, counts.waits)
    assert found == expected[:3]
    assert counts.kernels > 10 and counts.views is None
    assert counts.all_launches == len(counts.launches) + 7  # a sort is eight
    sizes = Sizes.of(Job(2, 2e6, 16, batch=100))
    for launch in counts.launches:
        assert traffic_of(launch, sizes).bytes > 0 or not launch.is_of_items


@pytest.mark.usefixtures("simulated")
def test_distinct_keys_are_those_of_the_step():
    step = engine_step(tables=3, ids=50, dim=4, keys=60)
    keys = simt.simt_backend().to_host(step._batches[step._count].keys).reshape(3, 50).tolist()
    expected = sum(len(set(each)) for each in keys)
    assert 3 < expected < 150
    assert distinct_keys(step, 3) == expected
    step.whole()
    assert sum(step._gradients.sizes) == expected


def test_the_expected_number_of_distinct_keys_is_that_of_draws():
    rng, chances = np.random.default_rng(1), np.arange(1, 1001) ** -1.05
    draws = rng.choice(1000, size=(200, 137), p=chances / chances.sum())
    mean = np.mean([np.unique(each).size for each in draws])
    found = Sizes.of(Job(tables=5, keys=5000, batch=137)).distinct
    assert found == pytest.approx(5 * mean, rel=0.02)


# ---- where it is written


@pytest.mark.parametrize("name", [*OPERATIONS, *OF_TENSORFLOW])
def test_an_operation_is_where_its_formula_says(name):
    path, _, line = source_of(Launch(name, False)).partition(":")
    text = (OPERATIONS | OF_TENSORFLOW)[name].source[1]
    assert text in (ROOT / path).read_text().splitlines()[int(line) - 1]


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_is_where_its_formula_says(name):
    kernel = f"{name}f32" if name.endswith("_") else name
    path, _, line = source_of(Launch(kernel, True)).partition(":")
    assert f"KERNEL({name}" in (ROOT / path).read_text().splitlines()[int(line) - 1]


# ---- whole runs


@RUNS_A_BENCHMARK
@pytest.mark.usefixtures("simulated")
def test_formulas_are_what_kernels_touch():
    """Lines of the simulated GPU's memory; some formulas say how much it is at most."""
    at_most = {"recall_rows", "segment_sums", "segment_add_pieces"}
    for dim in (16, 40):
        args = f"--touched 512 --tables 2 --dim {dim}".split()
        _, text = run("tools.estimate_gpu_step", *args)
        rows = table_of(text, "kernel")
        assert len(rows) > 10
        for kernel, _, *numbers in rows:
            found, computed = (int(number.replace(",", "")) for number in numbers)
            assert found < 1.08 * computed + 256, (kernel, found, computed)
            least = 0.6 if kernel in at_most else 0.95
            assert found > least * computed, (kernel, found, computed)


@RUNS_A_BENCHMARK
@pytest.mark.usefixtures("simulated")
def test_all_tables_are_printed():
    args = "--tables 2 --keys 2000 --batch 100 300 --dim 16 --parts".split()
    if importlib.util.find_spec("cupy") is None:
        args += ["--python-us", "1000"]
    results, text = run("tools.estimate_gpu_step", *args)
    assert len(results) == 4
    for fields in results:
        assert fields["mb_at_least"] < fields["mb_moved"]
        assert fields["gpu_ms_cautious"] < fields["ms_cautious"]
    engine, through = table_of(text, "a step")
    assert engine[0] == "engine: counted" and through[0] == "TensorFlow: counted"
    assert int(engine[5]) < int(through[5]) and int(through[6]) > 0
    for first, length in (("MB: batch, dim", 2), ("ms: batch, dim", 2), ("system", 2)):
        assert len(table_of(text, first)) == length
    for row in table_of(text, "ms: batch, dim"):
        for hopeful, cautious in (cell.split(" to ") for cell in row[3:-1]):
            assert 0 < float(hopeful) < float(cautious)
    names = {row[0] for row in table_of(text, "launch (counted)")}
    assert {"find", "update_adam_f32", "argsort of int64", *OF_TENSORFLOW} <= names
