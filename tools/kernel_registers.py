"""Prints what the GPU's compiler made of every kernel: registers, local memory, widths, occupancy.

Compiles the kernels to machine code with NVRTC, which needs no GPU. One line a kernel: registers of
a thread on each architecture; the most bytes of local memory that hold its arrays (stack) and the
registers it had no room for (spilled); the widest load and store of a lane in bytes, with how many
instructions have that width; and the part of an SM's threads that the registers let run at a time
on sm_90 (occupancy). tests/backend/test_kernels.py says what must be so. The tunables come from
SOK_LITE_KERNEL_DEFINES, as for the backends.

Example:
  SOK_LITE_KERNEL_DEFINES="SOK_TILE=8" python -m tools.kernel_registers --archs sm_90
"""

import argparse
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import cupy

from sok_lite.backend.gpu_binaries import FLAGS, CompileError, Nvrtc
from sok_lite.backend.sources import inline_includes, kernel_files
from sok_lite.backend.tunables import THREADS_PER_BLOCK, kernel_defines

ARCHS = ("sm_80", "sm_90", "sm_100")
# An instruction of PTX such as "ld.global.v4.u32": space, how many elements, bits of an element.
_ACCESS = re.compile(
    r"^\s*(?:@!?%p\d+ )?(ld|st)((?:\.\w+(?:::\w+)*)*)\.[a-z]+(\d+)\s", re.MULTILINE
)
# Not memory of the device, or not a lane's own: parameters, a thread's stack, constants.
_OTHER_SPACES = {"param", "local", "const", "shared"}


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


class Widths(NamedTuple):
    """Instructions of a kernel that read and write the device's memory, by bytes of a lane."""

    loads: Counter[int]
    stores: Counter[int]


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


def compile_source(source: str, arch: str, flags: Sequence[str] = ()) -> Compiled:
    """Compiles a source for an architecture.

    Args:
      source: CUDA C++ without includes.
      arch: such as "sm_90".
      flags: further flags of NVRTC.
    """
    defines = [f"-D{name}={value}" for name, value in kernel_defines().items()]
    options = [*FLAGS, f"-arch={arch}", "--ptxas-options=-v", *defines, *flags]
    try:
        compiled = Nvrtc(cupy.cuda.nvrtc).compile(source, options)
    except CompileError as error:
        return Compiled(str(error), "", {})
    return Compiled(None, compiled.ptx, parse_usage(compiled.log))


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


def bodies(ptx: str) -> dict[str, str]:
    """Returns the instructions of each kernel."""
    # A kernel ends with a brace of its own line; functions it does not inline follow.
    parts = ptx.split(".entry ")[1:]
    return {part[: part.index("(")]: part[: part.index("\n}")] for part in parts}


def accesses(body: str) -> list[tuple[str, int]]:
    """Returns the loads and stores of instructions in their order: "ld" or "st", and bytes.

    Those of rows are among them though they do not say ".global": their addresses come from
    memory, and a compiler cannot know of what kind these are.
    """
    found = []
    for kind, modifiers, bits in _ACCESS.findall(body):
        words = modifiers.split(".")
        if _OTHER_SPACES & {word.split("::")[0] for word in words}:
            continue
        count = next((int(word[1:]) for word in words if re.fullmatch(r"v\d", word)), 1)
        found.append((kind, count * int(bits) // 8))
    return found


def widths(ptx: str) -> dict[str, Widths]:
    """Returns how wide the loads and stores of each kernel are."""
    kernels = {}
    for name, body in bodies(ptx).items():
        found = Widths(Counter(), Counter())
        for kind, num_bytes in accesses(body):
            (found.loads if kind == "ld" else found.stores)[num_bytes] += 1
        kernels[name] = found
    return kernels


def occupancy(registers: int, threads_per_block: int) -> float:
    """Returns the part of an SM's 64 warps that can be there at a time on sm_90.

    The limits are those of the table of compute capabilities in the CUDA C++ Programming Guide:
    65,536 registers, 2,048 threads (64 warps) and 32 blocks an SM. An SM has four parts that share
    its registers evenly, and a warp gets its registers in units of 256, as cuda_occupancy.h of the
    CUDA toolkit counts. Kernels here have no shared memory.
    """
    warps_per_block = -(-threads_per_block // 32)
    registers_per_warp = -(-registers * 32 // 256) * 256
    warps = min(64, 65_536 // 4 // registers_per_warp * 4)
    blocks = min(32, warps // warps_per_block)
    return blocks * warps_per_block / 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--archs", nargs="*", default=ARCHS)
    args = parser.parse_args()
    threads = kernel_defines().get("SOK_THREADS_PER_BLOCK", THREADS_PER_BLOCK)

    print(
        f"{'kernel':32s}"
        + "".join(f"{arch:>8s}" for arch in args.archs)
        + "   stack spilled        load       store occupancy"
    )
    for path in kernel_files():
        found = {
            arch: compile_source(inline_includes(path), arch) for arch in {*args.archs, "sm_90"}
        }
        for arch, compiled in found.items():
            if compiled.error is not None:
                raise SystemExit(f"{path.name} for {arch}:\n{compiled.error}")
        all_widths = widths(found["sm_90"].ptx)
        for name in sorted(found["sm_90"].kernels):
            usages = [found[arch].kernels[name] for arch in args.archs]
            registers = "".join(f"{usage.registers:8d}" for usage in usages)
            stack = max(usage.stack_bytes for usage in usages)
            spilled = max(usage.spill_bytes for usage in usages)
            wide = "".join(f"{_widest(counts):>12s}" for counts in all_widths[name])
            part = occupancy(found["sm_90"].kernels[name].registers, threads)
            print(f"{name:32s}{registers}{stack:8d}{spilled:8d}{wide}{part:10.0%}")


def _widest(counts: Counter[int]) -> str:
    if not counts:
        return "-"
    return f"{max(counts)} ({counts[max(counts)]}/{counts.total()})"


if __name__ == "__main__":
    main()
