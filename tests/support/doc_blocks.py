"""The fenced blocks of a page of the documentation, and what they print."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from tests.support.own_process import run_with_tensorflow

ROOT = Path(__file__).resolve().parents[2]
TIME_LIMIT_S = 240
FENCE = re.compile(r"^```(.*)\n((?s:.*?))^```$", re.MULTILINE)
_END_OF_BLOCK = "---- end of block"


class Block(NamedTuple):
    """A fenced Python block; with no ranks it runs in the page's one process. `output` is what it
    must print, None where the page does not say."""

    line: int
    ranks: int
    code: str
    output: str | None


def blocks_of(text):
    """Returns the Python blocks of a page; raises on a fence that is neither code nor plain."""
    found: list[Block] = []
    for match in FENCE.finditer(text):
        info, body = match.groups()
        line = text.count("\n", 0, match.start()) + 2
        ranks = re.fullmatch(r"python(?: ranks=([1-9]))?", info)
        if ranks:
            found.append(Block(line, int(ranks.group(1) or 0), body, None))
        elif info == "text output":
            assert found and found[-1].output is None, f"line {line}: output of which block?"
            found[-1] = found[-1]._replace(output=body)
        else:
            known = ("", "bash", "cpp", "text", "yaml")
            assert info in known, f"line {line}: unknown fence {info!r}"
    return found


def run(command, program, tmp_path):
    """Runs a program by a launcher's command in an empty folder; returns what it printed."""
    path = tmp_path / "program.py"
    path.write_text(program)
    done = subprocess.run(
        [*command, sys.executable, str(path)],
        cwd=tmp_path,
        env=os.environ | _environment(),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-5000:]}"
    return done.stdout


def printed_by(blocks, tmp_path):
    """Returns what each of the blocks of one process prints."""
    program = program_of([("page", block) for block in blocks], "globals()")
    return parts_of(run_with_tensorflow(program, tmp_path, TIME_LIMIT_S, **_environment()))


def program_of(blocks, names):
    """Returns a program that runs blocks in turn; `parts_of` parts what it prints.

    Args:
      blocks: (the page that an error names, with the line; block).
      names: the expression whose value each block has as its global names.
    """
    parts = []
    for page, block in blocks:
        code = "\n" * (block.line - 1) + block.code
        run_it = f"exec(compile({code!r}, {page!r}, 'exec'), {names})"
        parts.append(f"{run_it}\nprint({_END_OF_BLOCK!r}, flush=True)\n")
    return "".join(parts)


def parts_of(printed):
    """Returns what each block of a program of `program_of` printed."""
    return printed.split(_END_OF_BLOCK + "\n")[:-1]


def _environment():
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "PATH": path}
