"""Programs that limit the process they run in."""

import subprocess
import sys
import textwrap
from pathlib import Path


def run_limited(program, *args):
    """Runs a program in a process of its own and returns the words that it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
