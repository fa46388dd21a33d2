"""Programs of C++ that tests compile."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sok_lite.backend.sources import kernel_folder

SOURCE = Path(__file__).parent / "locks.cpp"


def compiler():
    found = os.environ.get("CXX") or shutil.which("g++")
    if found is None:
        pytest.skip("no g++")
    return found


def compile_locks(target, flags):
    """Compiles tests/support/locks.cpp."""
    command = [compiler(), "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", *flags]
    words = ["-I", str(kernel_folder()), str(SOURCE), "-o", str(target)]
    subprocess.run([*command, *words], check=True)
