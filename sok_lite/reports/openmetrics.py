"""Table statistics as OpenMetrics text, for Prometheus and others.

Names and units follow https://prometheus.io/docs/practices/naming. Labels are tables, ranks, or one
of a few words, never keys: each label value is a time series of its own.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sok_lite._version import __version__
from sok_lite.engine.files.readonly import ReadonlyTables
from sok_lite.engine.table import EmbeddingTable
from sok_lite.engine.work_counters import (
    BEGAN,
    DUMPS,
    GRADIENTS,
    INPUT_WAITS,
    LOOKUPS,
    SENT_GRADIENTS,
    SENT_KEYS,
    SENT_ROWS,
    STEPS,
    UPDATES,
)
from sok_lite.reports.tables import memory_of

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_OF_PROCESS = "since the process began"
_SINCE = "since the table was made, cleared or wholly loaded"


class Family(NamedTuple):
    """A metric."""

    name: str  # without "_total"
    kind: str  # "gauge" or "counter"
    unit: str  # suffix of the name, or ""
    help: str


_KEYS = Family("sok_table_keys", "gauge", "", "Keys with a row.")
_PENDING = Family("sok_keys_pending", "gauge", "", "Keys that were seen and have no row yet.")
_SLOTS = Family("sok_table_slots", "gauge", "", "Places for keys in the index.")
_LOOKED_UP = Family(
    "sok_lookup_keys",
    "counter",
    "",
    "Keys that lookups asked for, repeated ones each time on one rank and once a call from each "
    f"of several ranks, {_SINCE}.",
)
_INSERTED = Family("sok_keys_inserted", "counter", "", f"Keys that got a row, {_SINCE}.")
_EVICTED = Family(
    "sok_keys_evicted", "counter", "", f"Keys that lost their row to another key, {_SINCE}."
)
_ERASED = Family("sok_keys_erased", "counter", "", f"Keys that were erased or expired, {_SINCE}.")
_REJECTED = Family(
    "sok_keys_rejected", "counter", "", f"Times that a key got no row, by reason, {_SINCE}."
)
_MEMORY = Family(
    "sok_memory_bytes",
    "gauge",
    "bytes",
    "Memory in use: the index, rows, optimizer states, texts that are kept.",
)
_RESERVED = Family(
    "sok_memory_reserved_bytes", "gauge", "bytes", "Memory set aside for rows and states."
)
_REHASHES = Family(
    "sok_index_rehashes", "counter", "", f"Segments of the index written anew, {_SINCE}."
)
_PROBES = Family(
    "sok_index_probe_lines", "gauge", "", "Lines of slots that a search reads, mean over keys."
)
_LONGEST = Family(
    "sok_index_probe_lines_max", "gauge", "", "Lines of slots that a search reads, at most."
)
# Over all tables of the process: tables of one call share its time and messages.
_CALLS = Family("sok_calls", "counter", "", f"Calls from TensorFlow, by kind, {_OF_PROCESS}.")
_CALL_SECONDS = Family(
    "sok_call_seconds",
    "counter",
    "seconds",
    f"Time in calls from TensorFlow, with the wait for other ranks, by kind, {_OF_PROCESS}.",
)
_SENT = Family(
    "sok_sent_bytes", "counter", "bytes", f"Bytes that went to other ranks, {_OF_PROCESS}."
)
_DUMPS = Family("sok_dumps", "counter", "", f"Dumps that were finished, {_OF_PROCESS}.")
_DUMP_SECONDS = Family(
    "sok_dump_seconds", "counter", "seconds", "Time of those, from their begin to the checkpoint."
)
_DUMP_BYTES = Family("sok_dump_bytes", "counter", "bytes", "Bytes of the files of this rank.")
_LAST_DUMP = Family(
    "sok_last_dump_timestamp_seconds", "gauge", "seconds", "When the last one was finished."
)
_STEP = Family(
    "sok_training_step",
    "gauge",
    "",
    "Steps of training over all runs, as saves count them.",
)
_BATCHES = Family(
    "sok_input_batches", "counter", "", f"Batches that training has taken, {_OF_PROCESS}."
)
_INPUT_WAIT = Family(
    "sok_input_wait_seconds",
    "counter",
    "seconds",
    f"Time that training has waited for those batches, {_OF_PROCESS}.",
)
_LAST_STEP = Family(
    "sok_last_step_timestamp_seconds", "gauge", "seconds", "When the last one of them ended."
)
# Labeled like the last dump, which it replaces in alerts until there is one.
START = Family(
    "sok_process_start_time_seconds", "gauge", "seconds", "When the process imported sok_lite."
)
# A gauge, because readers of the older text format do not know type "info".
_BUILD = Family("sok_build_info", "gauge", "", "1, with the version of sok_lite.")


_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
# Our labels, and those that Prometheus adds to scraped samples: it renames conflicting ones.
_TAKEN = {"table", "rank", "result", "reason", "part", "tier", "call", "content", "version"}
_TAKEN |= {"job", "instance"}


class Sample(NamedTuple):
    """A number of a metric, with its labels besides table and rank."""

    family: Family
    value: float
    labels: dict[str, str]


def samples_of(table: EmbeddingTable) -> list[Sample]:
    """Returns the current numbers of a table on this rank. It reads the index, and no row."""
    if table.var_type == "remote":
        return [Sample(_KEYS, table.size, {})]
    numbers = table.statistics()
    far = "file" if table.store.has_far_file else "far"
    reserved = {"near": numbers.near_reserved_bytes, far: numbers.far_reserved_bytes}
    rejected = {
        "full": numbers.refused_total,
        "not_admitted": numbers.not_admitted_total,
        "no_row": numbers.not_updated_total,
    }
    looked_up = {"found": numbers.found_total, "missed": numbers.missed_total}
    # "rows far" is in the far tier; the index is near, and texts are in Python's memory.
    used = memory_of(table).items()
    memory = [
        ((*name.split(), "host" if name == "texts" else "near")[:2], size) for name, size in used
    ]
    return [
        Sample(_KEYS, numbers.size, {}),
        Sample(_PENDING, 0 if table.pending is None else table.pending.size, {}),
        Sample(_SLOTS, numbers.capacity, {}),
        *(Sample(_LOOKED_UP, count, {"result": name}) for name, count in looked_up.items()),
        Sample(_INSERTED, numbers.inserted_total, {}),
        Sample(_EVICTED, numbers.evicted_total, {}),
        Sample(_ERASED, numbers.erased_total, {}),
        *(Sample(_REJECTED, count, {"reason": name}) for name, count in rejected.items()),
        *(Sample(_MEMORY, size, {"part": part, "tier": tier}) for (part, tier), size in memory),
        *(Sample(_RESERVED, size, {"tier": tier}) for tier, size in reserved.items()),
        Sample(_REHASHES, numbers.rehashes_total, {}),
        Sample(_PROBES, numbers.mean_probe, {}),
        Sample(_LONGEST, numbers.longest_probe, {}),
    ]


def samples_of_process() -> list[Sample]:
    """Returns the current numbers of this process."""
    calls = {"lookup": LOOKUPS, "gradient": GRADIENTS, "update": UPDATES}
    sent = {"keys": SENT_KEYS, "rows": SENT_ROWS, "gradients": SENT_GRADIENTS}
    last = [] if DUMPS.last is None else [Sample(_LAST_DUMP, DUMPS.last, {})]
    if STEPS.number is not None:
        last += [Sample(_STEP, STEPS.number, {}), Sample(_LAST_STEP, STEPS.last, {})]
    INPUT_WAITS.is_read = True
    timed = (_BATCHES, INPUT_WAITS.number), (_INPUT_WAIT, INPUT_WAITS.seconds)
    waits = [Sample(family, value, {}) for family, value in timed if INPUT_WAITS.number]
    return [
        *(Sample(_CALLS, work.number, {"call": name}) for name, work in calls.items()),
        *(Sample(_CALL_SECONDS, work.seconds, {"call": name}) for name, work in calls.items()),
        *(Sample(_SENT, work.num_bytes, {"content": name}) for name, work in sent.items()),
        Sample(_DUMPS, DUMPS.number, {}),
        Sample(_DUMP_SECONDS, DUMPS.seconds, {}),
        Sample(_DUMP_BYTES, DUMPS.num_bytes, {}),
        *last,
        *waits,
        Sample(START, BEGAN, {}),
    ]


def checked_labels(labels: Mapping[str, str] | None) -> dict[str, str]:
    """Returns a program's labels. TypeError, ValueError: an invalid or reserved one."""
    for name, text in dict(labels or {}).items():
        if not isinstance(name, str) or not isinstance(text, str):
            raise TypeError(
                f"`labels` must be a dict of texts by name. Received: {name!r}: {text!r}."
            )
        if not _LABEL.fullmatch(name) or name.startswith("__"):
            raise ValueError(
                "A label's name must be of letters, digits and _, and begin with neither a digit "
                f"nor __. Received: labels={{{name!r}: {text!r}}}."
            )
        if name in _TAKEN:
            raise ValueError(
                f"The label {name!r} has a meaning already: Prometheus sets job and instance, and "
                f"sok_lite the others of {', '.join(sorted(_TAKEN))}. Take another name, such as "
                "'job_name'."
            )
    return dict(labels or {})


def openmetrics(
    rank: int,
    of_tables: Sequence[tuple[str, Sequence[Sample]]],
    of_process: Sequence[Sample] = (),
    more: Mapping[str, str] | None = None,
) -> str:
    """Returns the text of a rank: numbers by table name, of the process, and labels for all."""
    of_all = {"rank": str(rank), **(more or {})}
    lines: dict[Family, list[str]] = {}
    for name, samples in of_tables:
        for family, value, labels in samples:
            line = _line(family, {"table": name, **of_all, **labels}, value)
            lines.setdefault(family, []).append(line)
    for family, value, labels in of_process:
        lines.setdefault(family, []).append(_line(family, {**of_all, **labels}, value))
    lines[_BUILD] = [_line(_BUILD, {"version": __version__, **of_all}, 1)]
    text = [line for family, found in lines.items() for line in [*_heads(family), *found]]
    return "\n".join([*text, "# EOF"]) + "\n"


def _heads(family: Family) -> list[str]:
    name, kind, unit, said = family
    units = [f"# UNIT {name} {unit}"] if unit else []
    return [f"# TYPE {name} {kind}", *units, f"# HELP {name} {_escape(said)}"]


def _line(family: Family, labels: dict[str, str], value: float) -> str:
    name = f"{family.name}_total" if family.kind == "counter" else family.name
    inside = ",".join(f'{label}="{_escape(text)}"' for label, text in labels.items())
    return f"{name}{{{inside}}} {value}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


# ---- checkpoints that a process serves by `open_readonly` --------------------------------------

_SERVED_KEYS = Family(
    "sok_served_keys", "gauge", "", "Keys with a row in the checkpoint that is open."
)
_SERVED_AGE = Family(
    "sok_served_age_seconds",
    "gauge",
    "seconds",
    "Time since the checkpoint that is open was published.",
)


def served_in(tables: Any) -> list[ReadonlyTables]:
    """Returns the checkpoints in an argument of `sok_lite.metrics`; [] for live tables."""
    items = [tables] if isinstance(tables, ReadonlyTables) else tables
    if not isinstance(items, (list, tuple)):
        return []
    served = [item for item in items if isinstance(item, ReadonlyTables)]
    if served and len(served) < len(items):
        raise TypeError(
            "`tables` must be live tables, or what open_readonly gave. Received: both. Ask for "
            "their metrics one by one."
        )
    return served


def prometheus_of_served(
    served: Sequence[ReadonlyTables], labels: Mapping[str, str] | None = None
) -> str:
    """Returns the numbers of open checkpoints; raises as `sok_lite.metrics.prometheus`."""
    more = checked_labels(labels)
    counts = Counter(name for tables in served for name in tables)
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        raise ValueError(
            "Tables must have different names, by which their metrics are told apart. Received: "
            f"{counts[repeated[0]]} checkpoints with a table {repeated[0]!r}. Ask for their "
            "metrics one by one, with other `labels`."
        )
    of_tables = [
        (name, [Sample(_SERVED_KEYS, len(table), {}), Sample(_SERVED_AGE, tables.age, {})])
        for tables in served
        for name, table in tables.items()
    ]
    return openmetrics(0, of_tables, [Sample(START, BEGAN, {})], more)
