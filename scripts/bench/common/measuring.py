"""What the benchmarks share: the clock, the RESULT line, and which backends this machine has."""

import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from sok_lite.backend import Backend, cuda_unavailable, get_backend
from sok_lite.backend.tunables import kernel_defines


class Timing(NamedTuple):
    """Seconds of a call.

    Attributes:
      host: by the host's clock, from before the call to the end of its kernels.
      device: between CUDA events around the call; None on the CPU.
    """

    host: float
    device: float | None


def time_call(backend: Backend, call: Callable[..., Any], *args: Any) -> Timing:
    """Times one call."""
    if backend.name != "cuda":
        start = time.perf_counter()
        call(*args)
        return Timing(time.perf_counter() - start, None)
    import cupy

    first, last = cupy.cuda.Event(), cupy.cuda.Event()
    backend.synchronize()
    start = time.perf_counter()
    first.record()
    call(*args)
    last.record()
    backend.synchronize()
    host = time.perf_counter() - start
    return Timing(host, cupy.cuda.get_elapsed_time(first, last) / 1e3)


def median(timings: Sequence[Timing]) -> Timing:
    """Returns the medians of each clock."""
    return _of_each(statistics.median, timings)


def fastest(timings: Sequence[Timing]) -> Timing:
    """Returns the least times of each clock."""
    return _of_each(min, timings)


def _of_each(choose: Callable[[list[float]], float], timings: Sequence[Timing]) -> Timing:
    device = [timing.device for timing in timings if timing.device is not None]
    return Timing(choose([timing.host for timing in timings]), choose(device) if device else None)


def timed(
    backend: Backend,
    call: Callable[..., Any],
    rounds: int,
    prepare: Callable[[], Any] | None = None,
    undo: Callable[[Any], Any] | None = None,
    warm_ups: int = 2,
    choose: Callable[[Sequence[Timing]], Timing] = median,
) -> Timing:
    """Returns the time of one of several calls.

    Args:
      rounds: calls that count.
      prepare: runs before each call, not timed; the call is then given what it returned.
      undo: runs after each call with the same, not timed.
      warm_ups: calls before that do not count.
      choose: `median` or `fastest`.
    """
    timings = []
    for number in range(warm_ups + rounds):
        given = prepare() if prepare else None
        timing = time_call(backend, call, *([given] if prepare else []))
        if undo:
            undo(given)
        if number >= warm_ups:
            timings.append(timing)
    return choose(timings)


def rounded(value: Any) -> Any:
    """Returns a float with 4 significant digits and anything else as it is."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def result(**fields: Any) -> dict[str, Any]:
    """Prints one RESULT line and returns its fields. The tunables are among them where set."""
    if kernel_defines():
        fields["defines"] = kernel_defines()
    fields = {name: rounded(value) for name, value in fields.items() if value is not None}
    print("RESULT " + json.dumps(fields), flush=True)
    return fields


@functools.cache
def note(text: str) -> None:
    """Prints why something is not measured; the same words once."""
    print("NOTE " + text, flush=True)


def backends(names: Sequence[str]) -> Iterator[Backend]:
    """Yields the backends of these names that this machine has, and says which it has not."""
    for name in names:
        if name == "cuda" and cuda_unavailable():
            note(f"cuda is left out: {cuda_unavailable()}.")
        else:
            yield get_backend(name)


def num_threads(backend: Backend) -> int | None:
    """Returns the threads of a CPU backend, None for a GPU."""
    return getattr(backend, "num_threads", None)
