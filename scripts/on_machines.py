"""Runs a program on ranks of several machines that namespaces of this one stand in for.

Each has a name, an address, a network and processes of its own; the files are the same. It needs
Linux, root and iproute2.

Example:
  python scripts/on_machines.py --machines 2 --tool mpi scripts/bench_alltoall.py --tool mpi
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.support.machines import launch, machines, unavailable
from tests.support.rank_jobs import environment_of


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs a program on ranks of several machines.")
    parser.add_argument("--machines", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="of each machine")
    parser.add_argument("--tool", default="horovod", choices=["horovod", "mpi"])
    parser.add_argument("program", nargs=argparse.REMAINDER, help="a Python file, its arguments")
    args = parser.parse_args()
    reason = unavailable()
    if reason is not None:
        parser.error(reason)
    with tempfile.TemporaryDirectory() as folder, machines(args.machines, Path(folder)) as found:
        command = launch(args.tool, *found, args.ranks, Path(folder))
        everything = environment_of("a bench", folder)
        return subprocess.call([*command, sys.executable, *args.program], env=everything)


if __name__ == "__main__":
    sys.exit(main())
