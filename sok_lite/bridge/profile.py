"""`profile`: how long the stages of lookups and steps take, while somebody wants to know.

Functions of this package are put behind a clock for the time of a `with` block, each where it is
called from, and are put back after it. So a step that nobody profiles does nothing for it.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from sok_lite.backend import Backend
from sok_lite.bridge import host_call
from sok_lite.bridge.job import other_ranks
from sok_lite.engine import (
    batch_pooling,
    lookup,
    owner_lookup,
    sent_keys,
    static_lookup,
    step,
    update,
)
from sok_lite.engine.table import single_lookup
from sok_lite.reports.profile import Profile

# Takes the arguments of a call, and gives its tables; None: they are those of the stage around it.
TablesOf = Callable[..., Any]


class Stage(NamedTuple):
    """A function and what its time counts as.

    Attributes:
      name: of the stage.
      owner: the module or class in which callers look it up.
      attribute: its name there.
      tables_of: takes the arguments of a call and gives its tables; None: nobody knows.
    """

    name: str
    owner: Any
    attribute: str
    tables_of: TablesOf | None = None


def _of_batch(backend: Any, comm: Any, batch: Any, *_: Any, **__: Any) -> Any:
    return batch.tables


def _of_parts(backend: Any, parts: Any, *_: Any, **__: Any) -> Any:
    return [table for table, *_ in parts]


def _of_batched(backend: Any, keys: Any, rows: Any, lookup: Any, *_: Any, **__: Any) -> Any:
    return lookup.tables


def _of_request(backend: Any, keys: Any, rows: Any, request: Any) -> Any:
    return [request.table]


def _of_step(step_taken: Any, *_: Any, **__: Any) -> Any:
    return step_taken.updates.tables


# What a stage does itself is what is left when those within it have been taken off: of "lookup" and
# "gradient" it is Python around them, and of "call" the conversions of tensors too.
STAGES = (
    Stage("call", host_call, "on_device"),
    Stage("lookup", lookup, "forward", _of_batch),
    Stage("deduplicate", sent_keys, "dedup"),
    Stage("exchange keys", sent_keys, "send_keys"),
    Stage("find and insert", owner_lookup, "look_up_batch", _of_batched),
    Stage("find and insert", single_lookup, "look_up", _of_request),
    Stage("exchange rows", lookup, "return_rows"),
    Stage("pool", lookup, "pool_returned"),
    Stage("gradient", lookup, "backward", _of_parts),
    Stage("gradient of pooling", lookup, "gradients_at_owners"),
    Stage("exchange gradients", batch_pooling, "send_sums"),
    Stage("deduplicate", lookup, "dedup"),
    Stage("sum gradients", lookup, "group"),
    Stage("sum gradients", lookup, "segment_sums"),
    Stage("prepare step", step.HeldStep, "prepare", _of_step),
    Stage("step", step.HeldStep, "commit", _of_step),
    Stage("find rows of step", update, "resolve_rows"),
    Stage("insert in step", update, "look_up_batch", _of_batched),
    Stage("lookup, static", static_lookup, "forward", _of_batch),
    Stage("gradient, static", static_lookup, "backward", _of_parts),
)

_open = threading.Lock()


@contextmanager
def profile() -> Iterator[Profile]:
    """Measures the stages of lookups and steps on this rank, of all threads, in a `with` block.

    `print(p)` shows them as a table, `p.report()` gives the numbers and `p.save("trace.json")` a
    trace for https://ui.perfetto.dev. The tables of one call are looked up together, by the same
    kernels: their time is that of all. On a GPU each stage waits for its kernels meanwhile, which
    makes a step slower. Without a profile a step does nothing for it. Other ranks need not call it.

    Yields:
      A Profile; it may be asked within the block too.

    Raises:
      RuntimeError: another profile goes on.
    """
    if not _open.acquire(blocking=False):
        raise RuntimeError("A profile goes on already, and there can be one. End it first.")
    comm = other_ranks()
    found = Profile(0 if comm is None else comm.rank)
    before = [(stage, vars(stage.owner)[stage.attribute]) for stage in STAGES]
    try:
        for stage, function in before:
            setattr(stage.owner, stage.attribute, _timed(found, stage, function))
        yield found
    finally:
        for stage, function in before:
            setattr(stage.owner, stage.attribute, function)
        found.end()
        _open.release()


def _timed(found: Profile, stage: Stage, function: Callable[..., Any]) -> Callable[..., Any]:
    tables_of = stage.tables_of

    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        tables = None if tables_of is None else list(tables_of(*args, **kwargs))
        backend = tables[0].backend if tables else _backend_of(args)

        def call() -> Any:
            try:
                return function(*args, **kwargs)
            finally:
                if backend is not None:
                    backend.synchronize()

        names = None if tables is None else tuple(dict.fromkeys(each.name for each in tables))
        return found.timed(stage.name, names, call)

    return timed


def _backend_of(args: tuple[Any, ...]) -> Backend | None:
    """Returns the backend that a call computes with: its first argument, or of that."""
    first = args[0] if args else None
    backend = first if isinstance(first, Backend) else getattr(first, "backend", None)
    return backend if isinstance(backend, Backend) else None
