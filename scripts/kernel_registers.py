"""Prints the registers and spilled bytes of every kernel, as the GPU's assembler reports them.

Compiles the kernels to machine code with NVRTC, which needs no GPU. One line a kernel: registers of
a thread on each architecture, and the most bytes of local memory that hold its arrays (stack) and
the registers it had no room for (spilled; tests/engine/test_kernels.py lets none pass). The
tunables come from SOK_LITE_KERNEL_DEFINES, as for the backends.

Example:
  SOK_LITE_KERNEL_DEFINES="SOK_TILE=8" python3 scripts/kernel_registers.py --archs sm_90
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from sok_lite.backend.sources import inlined, kernel_defines, kernel_files

ARCHS = ("sm_80", "sm_90", "sm_100")
# The flags of sok_lite/backend/cuda.py, which cannot be imported without a GPU.
FLAGS = ("--std=c++17", "--fmad=false")


class Usage(NamedTuple):
    """What one thread of a kernel takes.

    Attributes:
      registers: of 32 bits.
      stack_bytes: local memory for arrays that registers cannot hold.
      spill_bytes: local memory for registers that had no room, stores and loads.
    """

    registers: int
    stack_bytes: int
    spill_bytes: int


class Compiled(NamedTuple):
    """What NVRTC made of a source.

    Attributes:
      error: the compiler's words; None where it was content.
      ptx: the intermediate code; "" after an error.
      kernels: the kernels by name.
    """

    error: str | None
    ptx: str
    kernels: dict[str, Usage]


def compile_source(nvrtc: Any, source: str, arch: str, flags: Sequence[str] = ()) -> Compiled:
    """Compiles a source for an architecture.

    Args:
      nvrtc: the module `cupy_backends.cuda.libs.nvrtc`.
      source: CUDA C++ without includes.
      arch: such as "sm_90".
      flags: further flags of NVRTC.
    """
    program = nvrtc.createProgram(source, "kernel.cu", [], [])
    defines = [f"-D{name}={value}" for name, value in kernel_defines().items()]
    options = [*FLAGS, f"-arch={arch}", "--ptxas-options=-v", *defines, *flags]
    try:
        nvrtc.compileProgram(program, options)
        ptx = nvrtc.getPTX(program)
        log = nvrtc.getProgramLog(program)
    except nvrtc.NVRTCError:
        return Compiled(nvrtc.getProgramLog(program), "", {})
    finally:
        nvrtc.destroyProgram(program)
    return Compiled(None, ptx.decode() if isinstance(ptx, bytes) else ptx, parse_usage(log))


def parse_usage(log: str) -> dict[str, Usage]:
    """Returns the kernels of a log of ptxas -v by name."""
    kernels = {}
    for part in log.split("Compiling entry function '")[1:]:
        numbers = [
            int(match.group(1))
            for pattern in (
                r"Used (\d+) registers",
                r"(\d+) bytes stack frame",
                r"(\d+) bytes spill stores",
                r"(\d+) bytes spill loads",
            )
            if (match := re.search(pattern, part))
        ]
        if len(numbers) != 4:
            raise ValueError(f"The assembler's report has another format: {part}")
        registers, stack, stores, loads = numbers
        kernels[part[: part.index("'")]] = Usage(registers, stack, stores + loads)
    return kernels


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--archs", nargs="*", default=ARCHS)
    args = parser.parse_args()
    from cupy_backends.cuda.libs import nvrtc

    print(f"{'kernel':32s}" + "".join(f"{arch:>8s}" for arch in args.archs) + "   stack spilled")
    for path in kernel_files():
        found = {arch: compile_source(nvrtc, inlined(path), arch) for arch in args.archs}
        for arch, compiled in found.items():
            if compiled.error is not None:
                raise SystemExit(f"{path.name} for {arch}:\n{compiled.error}")
        for name in sorted(found[args.archs[0]].kernels):
            usages = [compiled.kernels[name] for compiled in found.values()]
            registers = "".join(f"{usage.registers:8d}" for usage in usages)
            stack = max(usage.stack_bytes for usage in usages)
            spilled = max(usage.spill_bytes for usage in usages)
            print(f"{name:32s}{registers}{stack:8d}{spilled:8d}")


if __name__ == "__main__":
    main()
