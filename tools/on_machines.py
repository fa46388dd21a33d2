"""Runs a module on ranks of several machines that namespaces of this one stand in for.

Each has a name, an address, a network and processes of its own; the files are the same. It needs
Linux, root and iproute2.

Example:
  python -m tools.on_machines --machines 2 --tool mpi scripts.bench ranks alltoall --tool mpi
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.machines import launch, machines, unavailable
from tests.support.rank_jobs import environment_of


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Runs a module on ranks of several machines.")
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each machine")
    parser.add_argument("--tool", default="horovod", choices=["horovod", "mpi"])
    parser.add_argument("module", help="by its name, such as scripts.bench")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what it is told")
    args = parser.parse_args(arguments)
    reason = unavailable()
    if reason is not None:
        parser.error(reason)
    with tempfile.TemporaryDirectory() as folder, machines(args.machines, Path(folder)) as found:
        command = launch(args.tool, *found, args.ranks, Path(folder))
        everything = environment_of("a bench", folder)
        command += [sys.executable, "-m", args.module, *args.arguments]
        return subprocess.call(command, env=everything)


if __name__ == "__main__":
    sys.exit(main())
