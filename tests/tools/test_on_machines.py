"""A module on ranks of several machines: what is started; test_hosts.py has real machines."""

import contextlib
import sys

from tools import on_machines


def test_the_module_and_its_arguments_are_started_on_all_ranks(monkeypatch):
    started = []

    @contextlib.contextmanager
    def machines(count, folder):
        yield [f"machine {i}" for i in range(count)]

    monkeypatch.setattr(on_machines, "unavailable", lambda: None)
    monkeypatch.setattr(on_machines, "machines", machines)
    monkeypatch.setattr(on_machines, "launch", lambda tool, *rest: [tool, *rest[:-1]])
    monkeypatch.setattr(
        on_machines.subprocess, "call", lambda command, env: started.append(command)
    )
    given = ["--machines", "2", "--ranks", "3", "--tool", "mpi", "scripts.bench", "ranks", "--x"]
    on_machines.main(given)
    command = ["mpi", "machine 0", "machine 1", 3, sys.executable, "-m", "scripts.bench"]
    assert started == [[*command, "ranks", "--x"]]
