"""examples/quickstart.ipynb: what it shows is what it does, and what it says is true."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.support.notebooks import (
    EXAMPLES,
    code_cells,
    data_of,
    notebook,
    numbers_of,
    printed,
    skip_without_tensorflow,
)

NAME = "quickstart"


def small(source):
    """Returns the cell of sizes with data 20 times smaller, one epoch and two later weeks."""
    lines = []
    for line in source.splitlines():
        name, _, value = line.partition(" = ")
        if name in ("NUM_USERS", "NUM_MOVIES", "NUM_RATINGS"):
            line = f"{name} = {int(value) // 20}"
        line = {"EPOCHS": "EPOCHS = 1", "NUM_WEEKS": "NUM_WEEKS = 10"}.get(name, line)
        lines.append(line)
    return "\n".join(lines)


def test_it_runs_on_less_data(tmp_path):
    skip_without_tensorflow()
    pytest.importorskip("matplotlib")
    program = ["cells = {"]
    for name, cell in code_cells(notebook(NAME)).items():
        source = small(cell.source) if name == "sizes" else cell.source
        program.append(f"{name!r}: {source!r},")
    program += ["}", "for name, cell in cells.items():", "    exec(compile(cell, name, 'exec'))"]
    (tmp_path / "cells.py").write_text("\n".join(program))
    env = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "MPLBACKEND": "agg"}
    env["PYTHONWARNINGS"] = "ignore:FigureCanvasAgg is non-interactive"
    done = subprocess.run(
        [sys.executable, "cells.py"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    assert "Warning" not in done.stderr, done.stderr[-4000:]
    assert "the loaded model predicts the same: True" in done.stdout
    assert re.search(r"\nepoch .*\n +1 .*\nrows after training: \d+ users", done.stdout)
    assert [each.name for each in tmp_path.iterdir()] == ["cells.py"], "it left files behind"


def test_what_it_says_is_true():
    check_facts(printed(notebook(NAME)))


def test_it_shows_a_table_as_it_is():
    check_look(code_cells(notebook(NAME))["look"])


def check_look(cell):
    shown = cell.outputs[0].data["text/html"]
    assert "<th>keys</th><td>400</td>" in shown and "m, v" in shown and shown.count("<tr>") == 9


def check_facts(outputs):
    """Compares what a run printed with counts of the data that it made, and with what it says."""
    data = data_of(NAME)
    user, movie, week = (data[name] for name in ("user", "movie", "week"))
    is_first = week <= 8

    def sizes(rows):
        return [len(set(user[rows])), len(set(movie[rows]))]

    first, whole = sizes(is_first), sizes(week <= 16)
    lines = outputs["arrivals"].splitlines()
    assert numbers_of(lines[1]) == [1, 8, *first, is_first.sum()]
    assert numbers_of(lines[2]) == [1, 16, *whole, len(week)]
    assert len(set(zip(user, movie, strict=True))) == len(week)
    assert numbers_of(outputs["model"]) == [0, 0]

    *epochs, rows = outputs["train"].splitlines()[1:]
    assert numbers_of(rows) == first
    table = np.array([numbers_of(line) for line in epochs])
    assert table[:, 0].tolist() == [1, 2, 3, 4, 5]
    assert (np.diff(table[:, 1]) < 0).all() and (np.diff(table[:, 2]) > 0).all()
    assert table[-1, 4] > 0.88
    assert "the same: True" in outputs["save"]

    # Of the loaded model nothing was trained, so it has the rows that it was saved with.
    trained, stopped = (numbers_of(line) for line in outputs["weeks"].splitlines()[1:])
    assert trained[1:] == whole and stopped[2:] == first
    assert trained[0] > 0.86 and stopped[1] < 0.78

    movies = re.findall(r"^(movie_\d+)  (?:.*)\((\w+)\)$", outputs["alike"], re.MULTILINE)
    arrival = [data["premiere"][int(name[6:])] for name, _ in movies]
    assert len(movies) == 2 and arrival[1] >= 8
    for name, genre in re.findall(r"(movie_\d+)  The .*?(\w+)\)?$", outputs["alike"], re.MULTILINE):
        assert data["GENRES"][data["genre"][int(name[6:])]] == genre
    assert numbers_of(outputs["alike"])[-1] > 85

    known, *unknown, rows = outputs["unknown"].splitlines()
    assert "True " in known and all("False" in line for line in unknown)
    assert len({line.split()[-1] for line in unknown}) == 1
    assert rows == f"rows before and after: {whole[1]} {whole[1]}"

    facts = dict(line.split() for line in outputs["statistics"].splitlines())
    facts = {name: int(text.replace(",", "")) for name, text in facts.items()}
    assert facts["size"] == facts["inserted_total"] == whole[1] and facts["evicted_total"] == 0
