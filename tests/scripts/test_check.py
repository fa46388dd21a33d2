"""scripts/check.py: what its stages run, how they are run, counted and told."""

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts import check
from tests.support.repository import git_in

ROOT = Path(__file__).resolve().parents[2]


def stage(name, program, limit=60, **fields):
    return check.Stage(name, [sys.executable, "-c", program], limit, **fields)


# ------------------------------------------------------------------------ the stages


@pytest.mark.parametrize("level", [0, 1], ids=["quick", "full"])
def test_every_test_file_is_in_a_stage(level):
    stages = check.quick_and_full_stages("2.16", True)[level]
    whole = [s for s in stages if not s.is_part]
    paths = [word for s in whole for word in s.command if word.startswith("tests/")]
    assert all((ROOT / path).exists() for path in paths)
    for file in (ROOT / "tests").rglob("test_*.py"):
        name = str(file.relative_to(ROOT))
        assert any(name == path or name.startswith(f"{path}/") for path in paths), name


def test_tests_that_start_ranks_themselves_run_without_ranks():
    """Ranks skip them."""
    files = (ROOT / "tests" / "ranks").glob("test_*.py")
    skipped = [file for file in files if "a rank does not launch ranks" in file.read_text()]
    assert sorted(str(file.relative_to(ROOT)) for file in skipped) == check.JOBS


def test_the_levels_have_the_same_stages_and_quick_says_which_are_parts():
    quick, full = check.quick_and_full_stages("2.16", True)
    assert [s.name for s in quick] == [s.name for s in full]
    assert not any(s.is_part for s in full)
    assert {s.name for s in quick if s.is_part} == {
        "tests, 2 ranks, mpirun",
        "tests, TensorFlow 2.16",
    }
    assert all(("--quick" in q.command) == ("pytest" in q.command) for q in quick)
    parts = {s.name for s in quick if s.is_part}
    assert {s.name for s in full if {"--quick", "--unchanged"} <= {*s.command}} == parts
    without, _ = check.quick_and_full_stages("2.16", False)
    assert {s.name for s in quick} - {s.name for s in without} == {"tests, TensorFlow 2.16"}


@pytest.mark.parametrize(
    ("log", "code", "counts"),
    [
        ("=== 100 passed, 5 skipped in 2.00s ===", 0, (100, 0, 5)),
        ("3 failed, 7 passed, 2 errors in 61.20s (0:01:01)", 1, (7, 3, 0)),
        ("[0]<stdout>:41 passed in 1.0s\n[1]<stdout>:40 passed, 1 skipped in 1.0s", 0, (41, 0, 1)),
        ("[0]<stdout>:1 failed in 1.0s\n[1]<stdout>:2 failed, 9 passed in 1.0s", 1, (9, 2, 0)),
        # What has no closing line is one test; what broke off after good ones failed all the same.
        ("fine", 0, (1, 0, 0)),
        ("", 2, (0, 1, 0)),
        ("12 passed in 1.00s", 1, (12, 1, 0)),
        # A test's own words are no closing line.
        ("he said 12 passed in 1.00s", 0, (1, 0, 0)),
    ],
)
def test_tests_are_counted_by_the_closing_line(log, code, counts):
    assert check.counts_of(log, code) == counts


def test_lanes_take_the_next_stage_when_they_are_free(capsys, tmp_path):
    """One stage that ends after the two others: these share a lane."""
    done = tmp_path / "done"
    waits = f"import os, time\nwhile not os.path.exists({str(done)!r}): time.sleep(0.05)"
    stages = [stage("long", waits), stage("a", "print(1)"), stage("b", f"open({str(done)!r}, 'w')")]
    results = {r.stage.name: r for r in check.Runner(stages).run()}
    assert results["a"].lane == results["b"].lane != results["long"].lane
    assert [r.code for r in results.values()] == [0, 0, 0]
    assert results["a"].log == "1\n"
    printed = capsys.readouterr().out
    assert "=== a\n1\n--- a: ok, " in printed


def test_a_stage_that_fails_or_whose_program_is_missing_keeps_no_other_from_running():
    stages = [stage("bad", "raise SystemExit(3)"), check.Stage("gone", ["no-such-program"], 60)]
    results = check.Runner([*stages, *(stage(f"good {i}", "") for i in range(4))]).run()
    codes = {r.stage.name: r.code for r in results}
    assert codes == {"bad": 3, "gone": 127, **{f"good {i}": 0 for i in range(4)}}
    (gone,) = (r for r in results if r.stage.name == "gone")
    assert "no-such-program" in check.what_failed(gone)


def run_main(monkeypatch, stages, *arguments, oldest="1"):
    monkeypatch.setattr(check, "quick_and_full_stages", lambda *_: (stages, stages))
    monkeypatch.setattr(check.signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["check.py", *arguments])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True))
    monkeypatch.setenv("SOK_LITE_OLDEST", oldest)
    code = check.main()
    return code, sys.stdout.buffer.getvalue().decode()


@pytest.mark.parametrize(("oldest", "is_written"), [("1", True), ("0", False)])
def test_full_without_a_stage_is_not_full(repository, monkeypatch, oldest, is_written):
    monkeypatch.setattr(check, "ROOT", repository)
    (repository / ".git" / "info" / "exclude").write_text("pyproject.toml\n")
    shutil.copy(ROOT / "pyproject.toml", repository)
    code, text = run_main(monkeypatch, [stage("one", "")], "--full", oldest=oldest)
    assert code == 0 and check.LAST_FULL.exists() == is_written, text


# Prints the number of a process that it has started, and makes a file if it is told to. A shell:
# even on a busy machine it has done so long before the limit of a stage.
SLEEPER = 'sleep 600 & echo $!; if [ -n "$1" ]; then touch "$1"; fi; wait'


def ends(pid):
    """Waits for the end of a process, which closes its files before it is gone."""
    for _ in range(1200):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.1)
    return False


def test_a_stage_that_takes_too_long_is_ended_with_what_it_started_and_has_failed():
    """Also where it answers the signal by an end without an error."""
    answers = f"trap 'exit 0' TERM; {SLEEPER}"
    stages = [check.Stage(text, ["sh", "-c", text], 5) for text in (SLEEPER, answers)]
    for result in check.Runner(stages).run():
        assert result.code != 0 and result.failed == 1
        assert "stopped after its limit of 5 s" in result.log
        assert ends(int(result.log.split()[0]))


def test_a_check_that_is_told_to_end_says_where_it_was(tmp_path):
    begun = [tmp_path / "slow", tmp_path / "slow too"]
    program = f"""
import signal, sys
from scripts import check
check.quick_and_full_stages = lambda *_: ([
    check.Stage("slow", ["sh", "-c", {SLEEPER!r}, "sh", {str(begun[0])!r}], 600),
    check.Stage("slow too", ["sh", "-c", {SLEEPER!r}, "sh", {str(begun[1])!r}], 600),
    check.Stage("never", [sys.executable, "-c", ""], 600),
], [])
sys.argv = ["check.py"]
sys.exit(check.main())
"""
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    # Of two lanes either may say first what it begins.
    heads = {process.stdout.readline() for _ in begun}
    assert heads == {"... slow\n", "... slow too\n"}
    while not all(file.exists() for file in begun):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "--- slow: FAILED" in text and "--- slow too: FAILED" in text
    assert "... never" not in text and "did not run: never" in text
    assert re.search(r"^0 passed, 3 failed, 0 skipped in \d+ s$", text, re.MULTILINE)
    pids = {*re.findall(r"^(\d+)$", text, re.MULTILINE)}
    assert len(pids) == 2 and all(ends(int(pid)) for pid in pids)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "x").write_text("")
    git = git_in(tmp_path, monkeypatch)
    for words in ("init -q", "add .", "commit -qm first"):
        git(*words.split())
    monkeypatch.setattr(check, "ROOT", tmp_path)
    monkeypatch.setattr(check, "LAST_FULL", tmp_path / "tests" / "last_full.json")
    return tmp_path


def test_the_commit_of_a_full_run_is_written(repository, monkeypatch):
    text = check.write_last_full(check.clean_commit(), 3000.4, 12)
    head = git_in(repository, monkeypatch)("rev-parse", "HEAD")
    record = json.loads(check.LAST_FULL.read_text())
    assert (record["commit"], record["seconds"], record["passed"]) == (head, 3000, 12)
    assert "tests/last_full.json" in text and "commit it" in text
    assert check.last_full() == f"{head[:12]}, {record['date']}"
    check.LAST_FULL.write_text('{"commit": "0123456789abcdef", "date": "2026-01-01"}')
    assert check.last_full().startswith("0123456789ab, 2026-01-01, a commit that is not here")


@pytest.mark.parametrize("what", ["no git", "a change", "a commit"])
def test_what_is_no_clean_commit_all_the_time_is_not_written(repository, monkeypatch, what):
    commit = check.clean_commit()
    if what == "no git":
        monkeypatch.setenv("PATH", os.devnull)
    elif what == "a change":
        (repository / "tests" / "x").write_text("changed")
    else:
        git_in(repository, monkeypatch)("commit", "-qm", "second", "--allow-empty")
    assert "was not written" in check.write_last_full(commit, 1.0, 1)
    assert not check.LAST_FULL.exists() and "none is known" in check.last_full()
    assert (check.clean_commit() is None) == (what != "a commit")
