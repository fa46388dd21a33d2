"""examples/quickstart.ipynb: what it shows is what it does, and what it says is true."""

import ast
import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

nbformat = pytest.importorskip("nbformat")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
AGAIN = "run: python scripts/run_notebook.py examples/quickstart.ipynb"
# Their outputs are those of arithmetic that another processor may round in another way.
ROUNDED = {"train", "weeks", "alike", "unknown"}
FOLDERS = re.compile(r"(?<![\w./:<])(?:/(?:home|root|tmp|work|usr|opt|var|mnt|Users)\b|[A-Z]:\\)")


@functools.cache
def notebook():
    return nbformat.read(NOTEBOOK, as_version=4)


def code_cells(of):
    return {cell.id: cell for cell in of.cells if cell.cell_type == "code"}


def printed(cell):
    return "".join(each.text for each in cell.outputs if each.output_type == "stream")


def shows_something(source):
    """Returns whether a cell prints or plots, or ends with a value."""
    is_value = isinstance(ast.parse(source).body[-1], ast.Expr)
    return "print(" in source or "plt.show()" in source or is_value


def numbers_of(text):
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", text)]


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


def skip_without_tensorflow():
    """Without importing it: the notebook runs in a process of its own."""
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("no TensorFlow")


# ------------------------------------------------------------------------------ what is committed


def test_it_is_valid_and_says_nothing_of_the_machine_that_ran_it():
    nbformat.validate(notebook())
    assert dict(notebook().metadata) == METADATA
    assert all(not cell.metadata for cell in notebook().cells)
    assert NOTEBOOK.stat().st_size <= 200_000
    text = NOTEBOOK.read_text()
    without_images = re.sub(r'"image/png": "[^"]*"', "", text)
    assert not FOLDERS.search(without_images), FOLDERS.search(without_images)


def test_it_is_committed_as_it_ran_from_the_top():
    cells = code_cells(notebook()).values()
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        assert bool(cell.outputs) == shows_something(cell.source), f"{cell.id}: {AGAIN}"
        kinds = {each.get("name", each.output_type) for each in cell.outputs}
        assert kinds <= {"stdout", "display_data", "execute_result"}, cell.id
        assert any("image/png" in each.get("data", {}) for each in cell.outputs) == (
            "plt.show()" in cell.source
        ), cell.id


def test_its_links_lead_to_files():
    text = "\n".join(cell.source for cell in notebook().cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links
    for target in links:
        assert (NOTEBOOK.parent / target).exists(), target


def test_it_runs_on_less_data(tmp_path):
    skip_without_tensorflow()
    pytest.importorskip("matplotlib")
    program = ["cells = {"]
    for name, cell in code_cells(notebook()).items():
        source = small(cell.source) if name == "sizes" else cell.source
        program.append(f"{name!r}: {source!r},")
    program += ["}", "for name, cell in cells.items():", "    exec(compile(cell, name, 'exec'))"]
    (tmp_path / "cells.py").write_text("\n".join(program))
    env = os.environ | {"PYTHONPATH": str(ROOT), "MPLBACKEND": "agg"}
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


# ------------------------------------------------------------------------------------ a whole run


@pytest.mark.full_only("runs the notebook, a minute and a half")
def test_a_run_shows_what_is_committed_and_what_it_says_is_true(tmp_path, monkeypatch):
    skip_without_tensorflow()
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    # Where it has no list of fonts yet, matplotlib makes one, and says so on stderr.
    pytest.importorskip("matplotlib.font_manager")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import run_notebook

    now = code_cells(run_notebook.executed(NOTEBOOK, tmp_path))
    for name, committed in code_cells(notebook()).items():
        kinds = [(each.output_type, each.get("name")) for each in now[name].outputs]
        assert kinds == [(each.output_type, each.get("name")) for each in committed.outputs], name
        if name not in ROUNDED:
            assert printed(now[name]) == printed(committed), f"{name}: {AGAIN}"
    assert not list(tmp_path.iterdir()), "it left files behind"
    check_facts({name: printed(cell) for name, cell in now.items()})
    check_facts({name: printed(cell) for name, cell in code_cells(notebook()).items()})
    look = code_cells(notebook())["look"].outputs[0].data["text/html"]
    assert now["look"].outputs[0].data["text/html"].count("<tr>") == look.count("<tr>")
    assert "<th>keys</th><td>400</td>" in look and "m, v" in look


def check_facts(outputs):
    """Compares what a run printed with counts of the data that it made, and with what it says."""
    data = {"np": np}
    for name in ("sizes", "data"):
        exec(code_cells(notebook())[name].source, data)
    user, movie, week = (data[name] for name in ("user", "movie", "week"))
    is_first = week <= 8
    assert data["joined"].min() == data["premiere"].min() == 0
    assert (data["joined"] == 0).mean() == pytest.approx(0.5, abs=0.1)
    assert (data["premiere"] == 0).mean() == pytest.approx(0.5, abs=0.1)
    genres = np.bincount(data["genre"]) / len(data["genre"])
    assert (genres**2).sum() == pytest.approx(0.2, abs=0.02)

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
    # 5 epochs of the first weeks, 1 evaluation and 3 epochs of the others; in the calls of single
    # lookups all movies, and the three that were predicted; and the predictions before saving.
    looked_up = 5 * is_first.sum() + 4 * (~is_first).sum() + whole[1] + 3
    num_validation = facts["found_total"] + facts["missed_total"] - looked_up
    assert num_validation == pytest.approx(0.1 * is_first.sum(), rel=0.1)
