"""The lock of a table as native code takes it: tests/support/locks.cpp, compiled."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sok_lite.backend.sources import kernel_folder

SOURCE = Path(__file__).with_name("locks.cpp")
SLEEPING = 1 << 30  # kLockSleeping of kernels/table_lock.h


def compile_locks(target, flags):
    """Compiles it with further flags of g++."""
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the lock's functions")
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", *flags]
    words = ["-I", str(kernel_folder()), str(SOURCE), "-o", str(target)]
    subprocess.run([*command, *words], check=True)
