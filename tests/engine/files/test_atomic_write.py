"""A reader finds the old or the new, and what is not ours stays."""

import errno
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sok_lite.engine.files import atomic_write
from tests.support.failing_calls import FailingCalls

ROOT = Path(__file__).parents[3]
# Writes half of a folder, and waits.
PROGRAM = """
import os, sys
from sok_lite.engine.files import atomic_write
with atomic_write.replacing(sys.argv[1]) as new:
    os.mkdir(new)
    print("writing", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture(params=[True, False], ids=["exchanged", "moved aside"])
def system(request, monkeypatch):
    """One that can exchange two folders, or cannot."""
    if not request.param:
        monkeypatch.setattr(atomic_write, "_exchange", lambda one, other: False)


def folder_of(path, text):
    path.mkdir(exist_ok=True)
    (path / "file").write_text(text)


def started(path):
    command = [sys.executable, "-c", PROGRAM, str(path)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout.readline() == "writing\n"
    return process


def test_a_folder_is_there_at_every_moment(tmp_path, monkeypatch):
    """Where the system can exchange two: looked at between any two calls of it."""
    if not atomic_write._exchange(str(tmp_path), str(tmp_path)):
        pytest.skip("this file system exchanges no names")
    path, seen = tmp_path / "a", []
    folder_of(path, "old")

    def looking(call):
        def wrapped(*arguments, **options):
            seen.append((path / "file").read_text())
            done = call(*arguments, **options)
            seen.append((path / "file").read_text())
            return done

        return wrapped

    with atomic_write.replacing(str(path)) as new:
        folder_of(Path(new), "new")
        for name in ("rename", "replace", "unlink", "rmdir"):
            monkeypatch.setattr(os, name, looking(getattr(os, name)))
    assert seen and set(seen) <= {"old", "new"}


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("has_old", [True, False])
def test_whatever_fails_it_is_the_old_or_the_new(tmp_path, has_old):
    for number in itertools.count(1):
        path, failed = tmp_path / str(number) / "a", False
        path.parent.mkdir()
        if has_old:
            folder_of(path, "old")
        with pytest.MonkeyPatch.context() as patch:
            calls = FailingCalls(patch, number, errno.EIO)
            try:
                with atomic_write.replacing(str(path)) as new:
                    os.mkdir(new)
                    folder_of(Path(new), "new")
            except OSError:
                failed = True
        text = (path / "file").read_text() if path.exists() else None
        assert text in ("new", ("old" if has_old else None) if failed else "new")
        if calls.count < number:
            break
    assert number > 4 and not failed and os.listdir(path.parent) == ["a"]
    with pytest.raises(OSError, match="full"), atomic_write.replacing(str(path)) as new:
        folder_of(Path(new), "newer")
        raise OSError("full")
    assert (path / "file").read_text() == "new" and os.listdir(path.parent) == ["a"]


@pytest.mark.parametrize(("last", "text"), [(1, "old"), (2, "new")])
def test_an_interrupt_between_two_renames_leaves_one_of_the_two(tmp_path, monkeypatch, last, text):
    monkeypatch.setattr(atomic_write, "_exchange", lambda one, other: False)
    path, rename, calls = tmp_path / "a", os.rename, []
    folder_of(path, "old")

    def rename_and_stop(first, second):
        rename(first, second)
        calls.append(first)
        if len(calls) == last:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", rename_and_stop)
    with pytest.raises(KeyboardInterrupt), atomic_write.replacing(str(path)) as new:
        folder_of(Path(new), "new")
    assert os.listdir(tmp_path) == ["a"] and (path / "file").read_text() == text


def test_a_file_keeps_its_mode_and_its_link(tmp_path):
    (tmp_path / "there").write_bytes(b"old")
    (tmp_path / "there").chmod(0o600)
    (tmp_path / "link").symlink_to("there")
    atomic_write.write_file(tmp_path / "link", b"new")
    assert (tmp_path / "there").read_bytes() == b"new" and (tmp_path / "link").is_symlink()
    assert (tmp_path / "there").stat().st_mode & 0o777 == 0o600
    atomic_write.write_file("/dev/null", b"new")
    assert not Path("/dev/null").is_file()
    reader, writer = os.pipe()
    atomic_write.write_file(f"/dev/fd/{writer}", b"new")
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert pipe.read() == b"new"


def test_what_a_killed_process_has_left_goes_and_nothing_else(tmp_path):
    path = tmp_path / "a"
    killed, living = started(path), started(path)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    of_living = {each.name for each in tmp_path.iterdir() if str(living.pid) in lock_in(each)}
    assert len(of_living) == 1 and len(os.listdir(tmp_path)) == 2
    others = {"a.part", ".a.part-mine", f".a.part-{16 * '0'}", ".b.part-" + 16 * "0"}
    for name in others:
        folder_of(tmp_path / name, "of another program")
    (tmp_path / f".a.part-{16 * '0'}" / "a.lock").write_text("of another program")
    with atomic_write.replacing(str(path)) as new:
        folder_of(Path(new), "new")
    assert set(os.listdir(tmp_path)) == {"a"} | others | of_living
    living.communicate("go on\n")
    assert living.returncode == 0 and os.listdir(path) == []
    assert set(os.listdir(tmp_path)) == {"a"} | others


def lock_in(folder):
    return next(folder.glob("*.lock")).read_text()
