"""Runs notebooks and writes them with their outputs, so that equal runs give equal files.

  python -m tools.run_notebook examples/quickstart.ipynb

It needs nbclient, nbformat and ipykernel, which the extra `test` brings. A cell that raises ends it
with the cell's error, and the file stays as it was.
"""

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

# The same on every machine: neither a version of Python nor the name of an environment.
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(path: Path, folder: Path) -> Any:
    """Returns a notebook with the outputs of a run in a folder, by a kernel of this environment.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised.
    """
    # Else TensorFlow says on stderr that these are on, on processors that have what they need, and
    # rounds in another way there.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook,
        timeout=600,  # seconds a cell, on a busy machine too
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,  # what a cell prints is one output, however it arrived
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    notebook.metadata = nbformat.from_dict(_METADATA)
    nbformat.validate(notebook)
    return notebook


def main(paths: list[str]) -> None:
    """Runs the notebooks of the command line, one after another."""
    for path in map(Path, paths):
        with tempfile.TemporaryDirectory() as folder:
            notebook = executed(path, Path(folder))
        nbformat.write(notebook, path)


if __name__ == "__main__":
    main(sys.argv[1:])
