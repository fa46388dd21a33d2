"""Times of the stages of lookups and steps: as a table of text, and as a trace.

A stage within another one counts by itself: the seconds of all stages add up to all the time that
was spent in tables.
"""

import gzip
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from sok_lite.engine.files.beside import write_file

# Later ones count, and are not in the trace: a viewer cannot open a file of a gigabyte.
MOST_EVENTS = 200_000


class StageTime(NamedTuple):
    """The time of a stage.

    Attributes:
      stage: such as "find and insert".
      tables: that were in the same calls. Kernels work on all of them together.
      calls: how many there were.
      seconds: of all calls, without the stages within.
      longest: seconds of the longest call.
    """

    stage: str
    tables: tuple[str, ...]
    calls: int
    seconds: float
    longest: float


class _Event(NamedTuple):
    stage: str
    tables: tuple[str, ...]
    thread: int
    begin: float  # of time.perf_counter
    seconds: float  # with the stages within


class Profile:
    """The times of a `with` block: print it, call `report()` for the numbers, `save` a trace.

    Attributes:
      seconds: of the whole block; 0 while it goes on.
      rank: of this process, which a trace is told apart by.
      num_left_out: stages that are in no trace, since there were too many.
    """

    def __init__(self, rank: int = 0) -> None:
        self.seconds, self.rank, self.num_left_out = 0.0, rank, 0
        self._begin, self._begin_unix = time.perf_counter(), time.time()
        self._times: dict[tuple[str, tuple[str, ...]], StageTime] = {}
        self._events: list[_Event] = []
        self._lock = threading.Lock()
        self._here = threading.local()

    # ---------------------------------------------------------------- while it goes on

    def timed(self, stage: str, tables: tuple[str, ...] | None, call: Callable[[], Any]) -> Any:
        """Calls a function and notes its time.

        Args:
          tables: None: those of the stage around it.
        """
        # Of each stage that this thread is in: its tables, seconds of the stages within.
        stack: list[tuple[tuple[str, ...], list[float]]] = self._here.__dict__.setdefault("in", [])
        if tables is None:
            tables = stack[-1][0] if stack else ()
        within = [0.0]
        stack.append((tables, within))
        begin = time.perf_counter()
        try:
            return call()
        finally:
            seconds = time.perf_counter() - begin
            stack.pop()
            if stack:
                stack[-1][1][0] += seconds
            self._note(_Event(stage, tables, threading.get_ident(), begin, seconds), within[0])

    def _note(self, event: _Event, within: float) -> None:
        key, own = (event.stage, event.tables), event.seconds - within
        with self._lock:
            _, _, calls, seconds, longest = self._times.get(key, StageTime(*key, 0, 0.0, 0.0))
            self._times[key] = StageTime(*key, calls + 1, seconds + own, max(longest, own))
            if len(self._events) < MOST_EVENTS:
                self._events.append(event)
            else:
                self.num_left_out += 1

    def end(self) -> None:
        """Says that the block is over."""
        self.seconds = time.perf_counter() - self._begin

    # ---------------------------------------------------------------- what was found

    def report(self) -> list[StageTime]:
        """Returns the time of each stage and its tables, the longest first."""
        with self._lock:
            return sorted(self._times.values(), key=lambda each: -each.seconds)

    def __str__(self) -> str:
        found = self.report()
        total = sum(each.seconds for each in found)
        rows = [("stage", "tables", "calls", "seconds", "share", "mean ms", "max ms")]
        rows += [
            (
                each.stage,
                _shorten(each.tables),
                f"{each.calls:,}",
                f"{each.seconds:.4f}",
                f"{each.seconds / total:.0%}" if total else "-",
                f"{1e3 * each.seconds / each.calls:.3f}",
                f"{1e3 * each.longest:.3f}",
            )
            for each in found
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"{total:.4f} of {self.seconds:.4f} s in tables, on rank {self.rank}"]
        for row in rows:
            texts = [text.ljust(width) for text, width in zip(row[:2], widths, strict=False)]
            numbers = [text.rjust(width) for text, width in zip(row[2:], widths[2:], strict=True)]
            lines.append("  ".join([*texts, *numbers]))
        return "\n".join(lines)

    __repr__ = __str__

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a trace, which https://ui.perfetto.dev and chrome://tracing show.

        It is JSON of Chrome's trace events. Times count from 1970 by the clock of the machine: the
        `traceEvents` of several ranks can be put into one file.

        Args:
          path: of the file, which is replaced; where it ends in ".gz", it is compressed.

        Raises:
          ValueError: the path is no local one. OSError: it cannot be written.
        """
        data = json.dumps({"traceEvents": self._trace(), "displayTimeUnit": "ms"}).encode()
        packed = gzip.compress(data) if os.fspath(path).endswith(".gz") else data
        write_file(path, packed)

    def _trace(self) -> list[dict[str, Any]]:
        with self._lock:
            events = list(self._events)
        threads = {each: i for i, each in enumerate(dict.fromkeys(e.thread for e in events))}
        heads = [_metadata(self.rank, 0, "process_name", f"rank {self.rank}")]
        heads += [_metadata(self.rank, i, "thread_name", f"thread {i}") for i in threads.values()]
        since = 1e6 * (self._begin_unix - self._begin)
        return heads + [
            {
                "name": each.stage,
                "cat": "sok_lite",
                "ph": "X",
                "ts": since + 1e6 * each.begin,
                "dur": 1e6 * each.seconds,
                "pid": self.rank,
                "tid": threads[each.thread],
                "args": {"tables": ", ".join(each.tables)},
            }
            for each in events
        ]


def _metadata(pid: int, tid: int, name: str, text: str) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": pid, "tid": tid, "args": {"name": text}}


def _shorten(tables: Sequence[str]) -> str:
    """Returns the names of tables, in few letters."""
    text = ", ".join(tables)
    return text if len(text) <= 40 else f"{len(tables)} tables: {text[:24]}..."
