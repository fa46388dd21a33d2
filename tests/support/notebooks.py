"""The notebooks in examples/: their cells, what these printed, and the data that they made."""

import functools
import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.ipynb"))


@functools.cache
def notebook(name):
    """Returns a notebook as it is committed; without nbformat the test is skipped."""
    return pytest.importorskip("nbformat").read(EXAMPLES / f"{name}.ipynb", as_version=4)


def code_cells(of):
    """Returns the code cells of a notebook by their ids."""
    return {cell.id: cell for cell in of.cells if cell.cell_type == "code"}


def printed(of):
    """Returns what each code cell of a notebook printed, by its id."""
    return {
        name: "".join(each.text for each in cell.outputs if each.output_type == "stream")
        for name, cell in code_cells(of).items()
    }


def data_of(name):
    """Returns what the cells `sizes` and `data` of a notebook make, which need NumPy alone."""
    data = {"np": np}
    for cell in ("sizes", "data"):
        exec(code_cells(notebook(name))[cell].source, data)
    return data


def numbers_of(text):
    """Returns the numbers in a text, in their order, with commas or without."""
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*\.?\d*", text)]


def skip_without_tensorflow():
    """Without importing it: notebooks run in processes of their own."""
    if importlib.util.find_spec("tensorflow") is None:
        pytest.skip("no TensorFlow")
