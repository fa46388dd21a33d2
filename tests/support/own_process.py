"""Programs that limit the process they run in."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path


def run_limited(program, *args, timeout=400, **environment):
    """Runs a program in a process of its own and returns the words that it printed.

    Args:
      timeout: seconds after which it is killed.
      environment: variables that it has beside those of this process.
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, args)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, f"exit status {done.returncode}: {done.stderr}"
    return done.stdout.split()
