"""The notebooks in examples/: what each shows is what it does.

What each says is checked in a test of its name: `check_facts` compares what a run printed with
counts of the data, made here.
"""

import ast
import importlib
import re

import pytest

from tests.support.notebooks import (
    EXAMPLES,
    NAMES,
    code_cells,
    notebook,
    printed,
    skip_without_tensorflow,
)

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
AGAIN = "run: python -m tools.run_notebook examples/{}.ipynb"
# Their outputs are those of arithmetic that another processor may round in another way.
ROUNDED = {
    "continuous_training": {"auc", "next", "same"},
    "from_tfra_or_sok": {"tfra", "keras", "train"},
    "larger_than_memory": {"model", "limit", "admission", "share"},
    "quickstart": {"train", "weeks", "alike", "unknown"},
}
FOLDERS = re.compile(r"(?<![\w./:<])(?:/(?:home|root|tmp|work|usr|opt|var|mnt|Users)\b|[A-Z]:\\)")


def shows_something(source):
    """Returns whether a cell prints or plots, not only in a function, or ends with a value."""
    *_, last = statements = ast.parse(source).body
    if isinstance(last, ast.Expr):
        return True
    called = {
        ast.unparse(call.func)
        for statement in statements
        if not isinstance(statement, ast.FunctionDef)
        for call in ast.walk(statement)
        if isinstance(call, ast.Call)
    }
    return bool(called & {"print", "plt.show"})


# ------------------------------------------------------------------------------ what is committed


@pytest.mark.parametrize("name", NAMES)
def test_it_is_valid_and_says_nothing_of_the_machine_that_ran_it(name):
    nbformat = pytest.importorskip("nbformat")
    path = EXAMPLES / f"{name}.ipynb"
    nbformat.validate(notebook(name))
    assert dict(notebook(name).metadata) == METADATA
    assert all(not cell.metadata for cell in notebook(name).cells)
    assert path.stat().st_size <= 200_000
    without_images = re.sub(r'"image/png": "[^"]*"', "", path.read_text())
    assert not FOLDERS.search(without_images), FOLDERS.search(without_images)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_committed_as_it_ran_from_the_top(name):
    cells = code_cells(notebook(name)).values()
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    num_plots = 0
    for cell in cells:
        assert bool(cell.outputs) == shows_something(cell.source), (
            f"{cell.id}: {AGAIN.format(name)}"
        )
        kinds = {each.get("name", each.output_type) for each in cell.outputs}
        assert kinds <= {"stdout", "display_data", "execute_result"}, cell.id
        has_plot = any("image/png" in each.get("data", {}) for each in cell.outputs)
        plots = re.search(r"^(plt\.show|plot)\(", cell.source, re.MULTILINE)
        assert has_plot == bool(plots), cell.id
        num_plots += has_plot
    assert num_plots <= 6


@pytest.mark.parametrize("name", NAMES)
def test_its_links_lead_to_files(name):
    cells = [cell.source for cell in notebook(name).cells if cell.cell_type == "markdown"]
    links = re.findall(r"\]\(([^)\s]+)\)", "\n".join(cells))
    assert links
    for target in links:
        assert (EXAMPLES / target).exists(), target


# ------------------------------------------------------------------------------------ a whole run


@pytest.mark.full_only("runs each notebook, one to two minutes")
@pytest.mark.parametrize("name", NAMES)
def test_a_run_shows_what_is_committed_and_what_it_says_is_true(name, tmp_path):
    skip_without_tensorflow()
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    # Where it has no list of fonts yet, matplotlib makes one, and says so on stderr.
    pytest.importorskip("matplotlib.font_manager")
    from tools import run_notebook

    made = run_notebook.executed(EXAMPLES / f"{name}.ipynb", tmp_path)
    now, then = printed(made), printed(notebook(name))
    for cell, committed in code_cells(notebook(name)).items():
        kinds = [(each.output_type, each.get("name")) for each in code_cells(made)[cell].outputs]
        assert kinds == [(each.output_type, each.get("name")) for each in committed.outputs], cell
        if cell not in ROUNDED[name]:
            assert now[cell] == then[cell], f"{cell}: {AGAIN.format(name)}"
    assert not list(tmp_path.iterdir()), "it left files behind"
    facts = importlib.import_module(f"tests.examples.test_{name}")
    facts.check_facts(now)
    if name == "quickstart":
        facts.check_look(code_cells(made)["look"])
