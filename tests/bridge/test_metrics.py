"""OpenMetrics text, read by the parser of prometheus_client."""

import http.client
import os
import socket
import time
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import sok_lite as sok
from sok_lite.engine.table.remote import RemoteTable
from sok_lite.reports.openmetrics import openmetrics, samples_of

parser = pytest.importorskip("prometheus_client.openmetrics.parser")
KEY = 7_777_777_123
NAME = 'a "b" \\ c'


def parsed(text):
    """{metric: {its labels as a frozenset of pairs: value}}, and the families."""
    families = list(parser.text_string_to_metric_families(text))
    samples = {}
    for family in families:
        for sample in family.samples:
            samples.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return samples, {family.name: family for family in families}


def looked_up(name=NAME, **options):
    table = sok.DynamicVariable(2, name=name, **options)
    for first in range(0, 300, 100):
        tf.nn.embedding_lookup(table, np.arange(KEY + first, KEY + first + 150))
    return table


def test_the_numbers_are_those_of_statistics():
    options = {"var_type": "hybrid", "init_capacity": 128, "max_capacity": 128}
    table = looked_up(**options)
    numbers, (samples, families) = table.statistics(), parsed(sok.metrics.prometheus(table))
    name = table.table.name

    def value(metric, **labels):
        return samples[metric][frozenset({"table": name, "rank": "0", **labels}.items())]

    assert value("sok_table_keys") == numbers.size <= 128
    assert value("sok_table_slots") == numbers.capacity
    assert value("sok_lookup_keys_total", result="found") == numbers.found_total
    assert value("sok_lookup_keys_total", result="missed") == numbers.missed_total > 0
    assert value("sok_keys_inserted_total") == numbers.inserted_total
    assert value("sok_keys_evicted_total") == numbers.evicted_total > 0
    assert value("sok_keys_erased_total") == 0
    assert value("sok_keys_rejected_total", reason="full") == numbers.refused_total
    assert value("sok_index_probe_lines") == pytest.approx(numbers.mean_probe)
    assert value("sok_index_probe_lines_max") == numbers.longest_probe
    assert value("sok_memory_bytes", part="index", tier="near") == numbers.index_bytes
    assert sum(samples["sok_memory_bytes"].values()) == (
        numbers.index_bytes + numbers.near_bytes + numbers.far_bytes
    )
    assert value("sok_memory_reserved_bytes", tier="near") == numbers.near_reserved_bytes
    assert families["sok_memory_bytes"].unit == "bytes"
    assert all(family.documentation for family in families.values())


def test_the_text_follows_the_rules_of_prometheus():
    tables = [looked_up("one"), looked_up("two")]
    text = sok.metrics.prometheus(tables, labels={"job_name": 'c"tr'})
    assert text.endswith("\n# EOF\n")
    labels = {"table", "rank", "part", "tier", "reason", "result", "call", "content", "job_name"}
    number = 0
    for family in parsed(text)[1].values():
        assert family.name.startswith("sok_") and family.name == family.name.lower()
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter")
            assert family.name.endswith(f"_{family.unit}" if family.unit else "")
            known = labels | ({"version"} if family.name == "sok_build_info" else set())
            assert set(sample.labels) <= known and sample.labels["job_name"] == 'c"tr'
            number += 1
    assert number > 20
    assert str(KEY)[:7] not in text
    # The node exporter's collector of text files reads the older format.
    older = pytest.importorskip("prometheus_client.parser")
    found = {s.name for f in older.text_string_to_metric_families(text) for s in f.samples}
    assert found == set(parsed(text)[0])
    _, families = parsed(openmetrics(3, [('x"\\\n', samples_of(looked_up("y").table))]))
    assert {s.labels["table"] for s in families["sok_table_keys"].samples} == {'x"\\\n'}
    assert {s.labels["rank"] for s in families["sok_table_keys"].samples} == {"3"}


def test_tables_of_one_name_none_and_bad_ports_are_refused():
    tables = [sok.DynamicVariable(2, name="same") for _ in range(2)]
    with pytest.raises(ValueError, match="2 tables of the name 'same'"):
        sok.metrics.prometheus(tables)
    with pytest.raises(TypeError, match="Expected tables"):
        sok.metrics.prometheus([])
    for port, given in ((-1, tables[0]), (65_536, tables[0]), (0, [])):
        with pytest.raises((TypeError, ValueError), match="`port` must be|Expected tables"):
            sok.metrics.serve(given, port=port)


def test_a_table_that_is_somewhere_else_tells_its_size():
    class Rows(dict):
        def size(self):
            return len(self)

    table = RemoteTable(lambda: looked_up("far").table, Rows({1: b"", 2: b""}))
    samples, _ = parsed(openmetrics(0, [("far", samples_of(table))]))
    assert samples["sok_table_keys"] == {frozenset({("table", "far"), ("rank", "0")}): 2}


def numbers(metric):
    """{the labels beside the rank: value} of a metric of the process."""
    samples, _ = parsed(sok.metrics.prometheus(sok.DynamicVariable(2, name="other")))
    found = samples.get(metric, {})
    return {tuple(v for n, v in labels if n != "rank"): value for labels, value in found.items()}


@pytest.mark.parametrize("in_graph", [False, True])
def test_calls_and_their_seconds_are_counted_by_kind(in_graph):
    table = sok.DynamicVariable(2, name="t")
    optimizer = sok.OptimizerWrapper(tf.keras.optimizers.SGD(0.1))

    def step():
        with tf.GradientTape() as tape:
            rows = sok.lookup_sparse(table, tf.ragged.constant([[1, 2], [3]]), combiners="sum")
            loss = tf.reduce_sum(rows)
        optimizer.apply_gradients([(tape.gradient(loss, table), table)])

    step()
    if in_graph:
        step = tf.function(step)
        step()
    before = {name: numbers(name) for name in ("sok_calls_total", "sok_call_seconds_total")}
    begun = time.perf_counter()
    for _ in range(3):
        step()
    seconds = time.perf_counter() - begun
    now = {name: numbers(name) for name in before}
    for kind in ("lookup", "gradient", "update"):
        calls, took = (now[name][kind,] - before[name][kind,] for name in before)
        assert calls == 3 and 0 < took < seconds, kind


def test_dumps_are_counted_with_their_bytes_and_age(tmp_path):
    names = ("sok_dumps_total", "sok_dump_bytes_total", "sok_dump_seconds_total")
    table = looked_up("dumped")
    before, begun = {name: numbers(name)[()] for name in names}, time.time()
    sok.dump(tmp_path / "c", [table])
    sok.dump(tmp_path / "d", [table], background=True).wait()
    dumps, num_bytes, seconds = (numbers(name)[()] - before[name] for name in names)
    written = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    assert (dumps, num_bytes) == (2, written) and 0 < seconds < 2 * (time.time() - begun)
    assert begun <= numbers("sok_last_dump_timestamp_seconds")[()] <= time.time()
    # In an alert the start of the process stands for a dump that there was not yet.
    assert numbers("sok_process_start_time_seconds").keys() == {()}
    with pytest.raises(OSError):
        sok.dump("/proc/none", [table])
    assert numbers("sok_dumps_total")[()] == before["sok_dumps_total"] + 2


def test_the_steps_that_saves_count_are_told():
    before = time.time()
    with sok.Autosave(print) as saves:
        saves.after(41)
        saves.after(42)
    assert numbers("sok_training_step") == {(): 42}
    assert before <= numbers("sok_last_step_timestamp_seconds")[()] <= time.time()


def test_the_start_of_the_process_is_told():
    # Of the kernel: in clock ticks since the machine was started.
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    started = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    started += ticks / os.sysconf("SC_CLK_TCK")
    assert started - 1 < numbers("sok_process_start_time_seconds")[()] < time.time()


def test_labels_that_have_a_meaning_or_none_are_refused():
    table = sok.DynamicVariable(2, name="one")
    for labels, error in (
        ({"job": "ctr"}, "The label 'job' has a meaning already: .* such as 'job_name'"),
        ({"rank": "1"}, "The label 'rank' has a meaning already"),
        ({"job-name": "ctr"}, "must be of letters, digits and _"),
        ({"__name__": "ctr"}, "must be of letters, digits and _"),
        ({"day": 3}, "must be a dict of texts by name. Received: 'day': 3"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            sok.metrics.prometheus(table, labels=labels)


def fetched(server):
    """The response of a server of metrics, and its text."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    return response, response.read().decode()


def test_a_second_server_takes_another_port_and_says_which(caplog):
    table = looked_up("served")
    first = sok.metrics.serve(table, port=0, host="127.0.0.1")
    second = sok.metrics.serve(
        table, port=first.server_port, host="127.0.0.1", labels={"job_name": "b"}
    )
    try:
        (said,) = (each.message for each in caplog.records if each.name == "sok_lite")
        assert said == (
            f"Rank 0 serves its metrics on port {second.server_port}: port {first.server_port} is "
            "taken, by an earlier serve of this process."
        )
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            third = sok.metrics.serve(table, port=port, host="127.0.0.1")
        third.shutdown()
        third.server_close()
        assert caplog.records[-1].message.endswith(f"port {port} is taken, as by another job.")
        for server, job in ((first, None), (second, "b")):
            response, text = fetched(server)
            assert response.getheader("Content-Type") == sok.metrics.CONTENT_TYPE
            (keys,) = parsed(text)[1]["sok_table_keys"].samples
            assert keys.value == 350 and keys.labels.get("job_name") == job
    finally:
        for server in (first, second):
            server.shutdown()
            server.server_close()


def test_what_is_served_has_an_age_and_its_keys(tmp_path):
    sok.dump(tmp_path / "a", looked_up(NAME))
    sok.dump(tmp_path / "b", looked_up("other"))
    os.utime(tmp_path / "a" / "manifest.json", (0, time.time() - 1000))
    a, b = (sok.open_readonly(tmp_path / name) for name in "ab")
    samples, families = parsed(sok.metrics.prometheus([a, b], labels={"job_name": "s"}))
    ages, keys = (
        {dict(labels)["table"]: value for labels, value in samples[name].items()}
        for name in ("sok_served_age_seconds", "sok_served_keys")
    )
    assert 1000 <= ages[NAME] < 1000 + ages["other"] + 600 and keys == {NAME: 350, "other": 350}
    assert families["sok_served_age_seconds"].unit == "seconds"
    server = sok.metrics.serve(a, port=0, host="127.0.0.1")
    try:
        assert "sok_served_age_seconds" in fetched(server)[1]
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(ValueError, match="2 checkpoints with a table"):
        sok.metrics.prometheus([a, a])
    with pytest.raises(TypeError, match="must be live tables, or what open_readonly gave"):
        sok.metrics.prometheus([a, looked_up("live")])
