"""Estimates what a training step of one rank takes on a GPU, from counts: nothing runs on a GPU.

The step looks ids up, one a row, sums their gradients and updates by Adam; all keys are known and
drawn from Zipf's distribution. It prints one line `RESULT {json}` a step, and tables in Markdown
whose heads say of each number where it comes from:

  counted    on the simulated GPU: launches, operations, waits, DLPack views of TensorFlow's memory
  measured   on this machine: Python of the engine, by `scripts.bench engine packing`; or where it
             says so
  computed   by formulas: distinct keys, and bytes (tools/gpu_step_work.py)
  estimate   from all of these and what is assumed of a GPU (tools/gpu_step_facts.py), from its
             hopeful to its cautious end

The model: a launch takes the GPU a fixed time and that of its bytes or of its scattered lines,
whichever is longer. The host takes the time of Python, of each launch and of each wait, and through
TensorFlow that of TensorFlow. In the hopeful case the GPU works beside the host, in the cautious
one after it.

It runs in a checkout only, with g++ on x86-64 Linux.

Examples:
  python -m tools.estimate_gpu_step
  python -m tools.estimate_gpu_step --batch 8192 --dim 16 --parts
  python -m tools.estimate_gpu_step --touched 512 --tables 2 --dim 16
"""

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from scripts.bench.common.measuring import result
from tests.support.simt.backend import unavailable
from tools.gpu_step_counts import (
    Counts,
    engine_counts,
    python_seconds,
    tensorflow_counts,
    touched,
)
from tools.gpu_step_facts import (
    H100,
    HKV_DIM,
    HKV_FINDS,
    HKV_SOURCE,
    MEASURED,
    MEASURED_SOURCE,
    PUBLISHED,
    PUBLISHED_SOURCE,
    Gpu,
)
from tools.gpu_step_work import (
    OF_TENSORFLOW,
    Launch,
    Sizes,
    gpu_launches,
    least_bytes,
    source_of,
    traffic_of,
)
from tools.scaling_model import step_seconds
from tools.scaling_work import Job

ENDS = (True, False)
END_NAMES = {True: "hopeful", False: "cautious"}

# ----------------------------------------------------------------- the model


def gpu_seconds(launches: Iterable[Launch], sizes: Sizes, gpu: Gpu, is_hopeful: bool) -> float:
    """Returns what the GPU works in launches."""
    stream = gpu.bandwidth.at(is_hopeful) * gpu.efficiency.at(is_hopeful)
    fixed, rate = gpu.kernel.at(is_hopeful), gpu.accesses.at(is_hopeful)
    seconds = 0.0
    for launch in launches:
        traffic = traffic_of(launch, sizes)
        seconds += gpu_launches(launch) * fixed
        seconds += max(traffic.bytes / stream, traffic.accesses / rate)
    return seconds


def host_seconds(counts: Counts, python: float, gpu: Gpu, is_hopeful: bool) -> float:
    """Returns what the host takes, beside waiting for work of the GPU.

    Args:
      python: seconds of Python of the engine, as measured here.
    """
    waits = counts.waits + (counts.views or 0)
    seconds = (
        python * gpu.python.at(is_hopeful)
        + counts.all_launches * gpu.launch.at(is_hopeful)
        + waits * gpu.wait.at(is_hopeful)
    )
    if counts.views is not None:
        seconds += gpu.bridge.at(is_hopeful) + gpu.framework.at(is_hopeful)
    return seconds


class Estimate(NamedTuple):
    """Seconds of a step, and of the GPU's work in it."""

    step: float
    gpu: float


def on_gpu(counts: Counts) -> list[Launch]:
    """Returns all that runs on the GPU: through TensorFlow, what that does as well."""
    if counts.views is None:
        return list(counts.launches)
    return [*counts.launches, *(Launch(name, False) for name in OF_TENSORFLOW)]


def estimate(counts: Counts, python: float, sizes: Sizes, gpu: Gpu, is_hopeful: bool) -> Estimate:
    """Returns what a step takes; arguments as of `host_seconds`."""
    working = gpu_seconds(on_gpu(counts), sizes, gpu, is_hopeful)
    host = host_seconds(counts, python, gpu, is_hopeful)
    return Estimate(step_seconds({"host": host, "GPU": working}, is_hopeful), working)


def bytes_moved(counts: Counts, sizes: Sizes) -> float:
    """Returns the bytes that all launches of a step read and write."""
    return sum(traffic_of(launch, sizes).bytes for launch in on_gpu(counts))


# ----------------------------------------------------------------- words


def say(name: str, counts: Counts, sizes: Sizes, python: float) -> None:
    """Prints the RESULT of a step; `name`: who calls it."""
    fields: dict[str, Any] = {"case": f"step, {name}", "tables": sizes.tables}
    fields |= {"batch": sizes.batch, "dim": sizes.dim, "distinct": sizes.distinct}
    fields |= {"mb_at_least": sum(least_bytes(sizes).values()) / 1e6}
    fields |= {"mb_moved": bytes_moved(counts, sizes) / 1e6}
    for is_hopeful in ENDS:
        found, end = estimate(counts, python, sizes, H100, is_hopeful), END_NAMES[is_hopeful]
        fields |= {f"gpu_ms_{end}": 1e3 * found.gpu, f"ms_{end}": 1e3 * found.step}
    result(**fields)


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Returns a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def spread(seconds: Iterable[float], unit: float = 1e-3) -> str:
    """Returns both ends of a time, such as "0.13 to 0.4"; in milliseconds, or another unit."""
    return " to ".join(f"{float(f'{each / unit:.2g}'):g}" for each in seconds)


def megabytes(size: float) -> str:
    """Returns a number of bytes in MB, with three digits."""
    return f"{float(f'{size / 1e6:.3g}'):,g}"


def table_of_counts(named: dict[str, Counts]) -> str:
    """Returns what a step asks for."""
    rows = [
        [
            *(f"{name}: counted", each.kernels, each.operations, each.copies),
            *(each.all_launches, each.waits),
            *("-" if number is None else number for number in (each.views, each.results)),
        ]
        for name, each in named.items()
    ]
    heads = ("a step", "our kernels", "CuPy operations", "copies to the GPU", "in all", "waits")
    return table([*heads, "DLPack views", "results"], rows)


def table_of_bytes(all_sizes: Sequence[Sizes], named: dict[str, Counts]) -> str:
    """Returns the bytes of steps."""
    rows = [
        [
            *(f"{sizes.batch:,}, {sizes.dim}", f"{sizes.distinct:,.0f}"),
            megabytes(sum(least_bytes(sizes).values())),
            *(megabytes(bytes_moved(counts, sizes)) for counts in named.values()),
        ]
        for sizes in all_sizes
    ]
    heads = ("MB: batch, dim", "distinct rows (computed)", "at least (computed)")
    return table([*heads, *(f"by our launches, {name} (computed)" for name in named)], rows)


def table_of_times(
    all_sizes: Sequence[Sizes], named: dict[str, Counts], python: float, gpu: Gpu
) -> str:
    """Returns the estimates of steps, beside what was measured and published."""
    heads = ["ms: batch, dim", "GPU (measured)", "step (measured)"]
    for name in named:
        heads += [f"GPU, {name} (estimate)", f"step, {name} (estimate)"]
    theirs, *_ = PUBLISHED
    measured = {(each.batch, each.dim): each for each in MEASURED}
    rows = []
    for sizes in all_sizes:
        found = measured.get((sizes.batch, sizes.dim)) if sizes.tables == 26 else None
        row = [f"{sizes.batch:,}, {sizes.dim}", *(("-", "-") if found is None else found.words())]
        for counts in named.values():
            ends = [estimate(counts, python, sizes, gpu, end) for end in ENDS]
            row += [spread(each.gpu for each in ends), spread(each.step for each in ends)]
        share = sum(least_bytes(sizes).values()) / sum(least_bytes(theirs.sizes).values())
        rows.append([*row, f"{theirs.milliseconds * share:.2g}"])
    return table([*heads, f"{theirs.name}, by least traffic (computed)"], rows)


def table_of_peers(counts: Counts, python: float, gpu: Gpu) -> str:
    """Returns published times of peers beside the estimates of ours for the same work."""
    rows = []
    for name, published, sizes in PUBLISHED:
        ends = [estimate(counts, python, sizes, gpu, end) for end in ENDS]
        ours = [spread(each.gpu for each in ends), spread(each.step for each in ends)]
        work = f"{sizes.tables} x {sizes.batch:,} ids, dim {sizes.dim}"
        written = megabytes(bytes_moved(counts, sizes))
        rows.append([name, work, published, written, *ours])
    heads = ["system", "step", "ms (published)", "ours: MB (computed)"]
    return table([*heads, "ours: ms of the GPU (estimate)", "ours: ms, engine (estimate)"], rows)


def table_of_lookups(all_sizes: Sequence[Sizes], counts: Counts, gpu: Gpu) -> str:
    """Returns what lookups of distinct ids take beside HierarchicalKV's published rate."""
    batches = {
        sizes.batch: sizes._replace(dim=HKV_DIM, distinct=sizes.items) for sizes in all_sizes
    }
    forward = [each for each in counts.launches if each.name.startswith(("find", "pool_"))]
    rows = [
        [
            f"{sizes.tables} x {batch:,}, {HKV_DIM}",
            f"{1e3 * sizes.items / HKV_FINDS:.2g}",
            spread(gpu_seconds(forward, sizes, gpu, end) for end in ENDS),
        ]
        for batch, sizes in batches.items()
    ]
    theirs = "HierarchicalKV, by its rate of find: ms (computed)"
    return table(("lookup: ids, dim", theirs, "ours: ms of find and pool (estimate)"), rows)


def table_of_parts(counts: Counts, sizes: Sizes, gpu: Gpu) -> str:
    """Returns what each launch of a step moves, and where it is written."""
    rows = []
    for launch in on_gpu(counts):
        traffic = traffic_of(launch, sizes)
        rows.append(
            [
                launch.name if launch.is_of_items else f"{launch.name}, of numbers",
                source_of(launch),
                megabytes(traffic.bytes),
                f"{traffic.accesses / 1e3:,.0f}",
                spread((gpu_seconds([launch], sizes, gpu, end) for end in ENDS), unit=1e-6),
            ]
        )
    heads = ("launch (counted)", "source", "MB (computed)", "1,000 lines (computed)")
    return table([*heads, "us of the GPU (estimate)"], rows)


def table_of_touched(tables: int, ids: int, dim: int) -> str:
    """Returns the bytes that kernels touch on the simulated GPU beside those of the formulas."""
    rows = [
        (launch.name, source_of(launch), f"{found:,}", f"{computed:,.0f}")
        for launch, found, computed in touched(tables, ids, dim)
    ]
    return table(("kernel", "source", "bytes (counted)", "bytes (computed)"), rows)


def table_of_givens(gpu: Gpu) -> str:
    """Returns what is assumed of a GPU."""
    rows = []
    for name, given in gpu.givens().items():
        ends = [f"{end:.3g}" for end in (given.hopeful, given.cautious)]
        rows.append([name, *ends, given.unit, given.kind, given.source])
    return table((gpu.name, "hopeful", "cautious", "unit", "kind", "source"), rows)


def parsed_arguments() -> argparse.Namespace:
    """Returns the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tables", type=int, default=26, help="(%(default)s)")
    add("--keys", type=float, default=1e6, help="of each table (%(default)g)")
    add("--batch", type=int, nargs="+", default=[8192, 65536], help="ids of each (8192 65536)")
    add("--dim", type=int, nargs="+", default=[16, 128], help="elements of a row (16 128)")
    add("--zipf", type=float, default=1.05, help="exponent (%(default)s)")
    add("--python-us", type=float, help="microseconds of Python; left out: measured")
    add("--no-tensorflow", action="store_true", help="leave out the step through TensorFlow")
    add("--parts", action="store_true", help="say what each launch moves")
    add("--touched", type=int, metavar="IDS", help="only compare formulas with lines touched")
    args = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        parser.error(f"no simulated GPU: {reason}")
    return args


def main() -> None:
    args = parsed_arguments()
    if args.touched:
        for dim in args.dim:
            print(f"{args.tables} tables, {args.touched} ids of each, dim {dim}:\n")
            print(table_of_touched(args.tables, args.touched, dim))
        return
    named = {"engine": engine_counts(args.tables)}
    if not args.no_tensorflow:
        named["TensorFlow"] = tensorflow_counts(args.tables)
    python = args.python_us / 1e6 if args.python_us else python_seconds(args.tables)
    sizes = [
        Sizes.of(Job(args.tables, args.tables * args.keys, dim, batch=batch, exponent=args.zipf))
        for batch in args.batch
        for dim in args.dim
    ]
    for each in sizes:
        for name, counts in named.items():
            say(name, counts, each, python)
    of_python = "given" if args.python_us else "measured on this machine"
    print(f"\n{args.tables} tables, {args.keys:,.0f} keys of each, Zipf({args.zipf}).\n")
    print(table_of_counts(named))
    print(table_of_bytes(sizes, named))
    print(f"Python of the engine: {1e3 * python:.2f} ms a step ({of_python}).")
    print(f"Measured: {MEASURED_SOURCE}.\n")
    print(table_of_times(sizes, named, python, H100))
    print(table_of_peers(named["engine"], python, H100))
    print(f"Published: {PUBLISHED_SOURCE}.\n")
    print(table_of_lookups(sizes, named["engine"], H100))
    print(f"Published: {HKV_SOURCE}.\n")
    if args.parts:
        *_, counts = named.values()
        for each in sizes:
            print(f"{each.tables} x {each.batch:,} ids, dim {each.dim}:\n")
            print(table_of_parts(counts, each, H100))
    print(table_of_givens(H100))


if __name__ == "__main__":
    main()
