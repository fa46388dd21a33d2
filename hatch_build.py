"""Builds the wheel: hatchling packs it, with the kernels compiled for any processor and newer ones.

What this machine has compiled of the same sources is taken and not compiled again, whether it was
for a wheel, by scripts/setup.sh or at a first use in a checkout. `pip install -v .` shows what is
said here.
"""

import os
import platform
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# With it hatchling lets pip build the whole wheel before it knows what to download, and call that
# "Preparing metadata".
os.environ.pop("PIP_BUILD_TRACKER", None)
from hatchling.build import *  # noqa: F403


class Kernels(BuildHookInterface):
    """Compiles the libraries of a wheel, and names the wheel after the machine that runs them."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before the wheel is packed, also one that stands for an editable installation."""
        if version == "editable":
            return
        os.environ.pop("SOK_LITE_KERNEL_DEFINES", None)  # a wheel has the default tunables
        from sok_lite.backend import build
        from sok_lite.native import library

        wanted: dict[str, tuple[str, Callable[[], Path]]] = {
            "libsok_lite_cpu.so": ("kernels", build.compile_library)
        }
        if platform.machine() == "x86_64":
            wanted["libsok_lite_cpu_v3.so"] = (
                "kernels for processors with AVX2",
                lambda: build.compile_library(build.V3_FLAGS),
            )
        wanted["libsok_lite_ops.so"] = ("operations of TensorFlow", library.compile_library)
        for number, (name, (what, compiled)) in enumerate(wanted.items(), 1):
            start = time.monotonic()
            self.app.display_info(f"sok_lite, {number} of {len(wanted)}: {what}")
            try:
                path = compiled()
            except RuntimeError as error:
                self.app.abort(str(error))
            self.app.display_info(f"  {time.monotonic() - start:.0f} s: {path}")
            build_data["force_include"][str(path)] = f"sok_lite/lib/{name}"
        # A C ABI called through ctypes: one wheel serves every Python and every TensorFlow.
        system = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-{system}"
