"""A profile: times of stages within stages add up, and the trace is what viewers read."""

import gzip
import json
import threading
import time

import pytest

from sok_lite.reports import profile as profile_module
from sok_lite.reports.profile import Profile


def nested(profile, *stages):
    """Goes into stages, each within the one before."""
    if stages:
        (name, tables), *others = stages
        profile.timed(name, tables, lambda: nested(profile, *others))


def test_a_stage_within_another_counts_by_itself(monkeypatch):
    ticks = iter([0.0, 1.0, 3.0, 7.0, 15.0, 31.0])  # begin; out, in, in's end, out's end; end
    monkeypatch.setattr(profile_module.time, "perf_counter", lambda: next(ticks))
    profile = Profile()
    nested(profile, ("out", ("a", "b")), ("in", None))
    profile.end()
    monkeypatch.undo()
    # "out" lasts from 1 to 15, of which "in" takes 3 to 7.
    found = {each.stage: each for each in profile.report()}
    assert (found["out"].seconds, found["in"].seconds, profile.seconds) == (10.0, 4.0, 31.0)
    assert found["in"].tables == ("a", "b")  # those of the stage around it
    assert [each.stage for each in profile.report()] == ["out", "in"]


def test_calls_and_the_longest_are_counted():
    profile = Profile()
    for seconds in (0.0, 0.02, 0.0):
        profile.timed("s", (), lambda seconds=seconds: time.sleep(seconds))
    (found,) = profile.report()
    assert found.calls == 3 and 0.02 <= found.longest <= found.seconds


def test_a_stage_that_raises_counts_and_its_error_comes_through():
    profile = Profile()
    with pytest.raises(ZeroDivisionError):
        profile.timed("out", (), lambda: profile.timed("in", (), lambda: 1 / 0))
    assert {each.stage for each in profile.report()} == {"out", "in"}
    nested(profile, ("next", None))
    assert [each.tables for each in profile.report() if each.stage == "next"] == [()]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_the_trace_has_chromes_events(tmp_path, name):
    profile = Profile(rank=3)
    begin = time.time()
    nested(profile, ("out", ("t",)), ("in", None))
    thread = threading.Thread(target=nested, args=(profile, ("other", ())))
    thread.start()
    thread.join()
    profile.save(tmp_path / name)
    data = (tmp_path / name).read_bytes()
    trace = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    assert trace["displayTimeUnit"] == "ms"
    events = {each["name"]: each for each in trace["traceEvents"] if each["ph"] == "X"}
    heads = [each for each in trace["traceEvents"] if each["ph"] == "M"]
    assert {each["pid"] for each in trace["traceEvents"]} == {3}
    assert {"name": "rank 3"} in [each["args"] for each in heads]
    inner, outer = events["in"], events["out"]
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 1  # microseconds
    assert inner["args"] == {"tables": "t"} and inner["tid"] == outer["tid"]
    assert events["other"]["tid"] != inner["tid"]
    assert abs(outer["ts"] / 1e6 - begin) < 3600  # by the clock of the machine


def test_a_long_profile_keeps_counting_and_a_trace_that_opens(monkeypatch):
    monkeypatch.setattr(profile_module, "MOST_EVENTS", 5)
    profile = Profile()
    for _ in range(8):
        nested(profile, ("s", ()))
    assert profile.report()[0].calls == 8 and profile.num_left_out == 3
    assert len([each for each in profile._trace() if each["ph"] == "X"]) == 5


def test_the_text_has_a_line_for_each_stage():
    profile = Profile()
    nested(profile, ("find", tuple(f"table{i}" for i in range(26))))
    profile.end()
    first, head, line = str(profile).splitlines()
    assert first.endswith(" s in tables, on rank 0")
    assert head.split() == "stage tables calls seconds share mean ms max ms".split()
    assert line.startswith("find") and "26 tables: table0, table1" in line and "100%" in line
    assert str(Profile()).startswith("0.0000 of 0.0000 s")
