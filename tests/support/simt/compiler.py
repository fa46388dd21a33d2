"""Compiles for the simulated GPU what NVRTC would compile for a real one.

The source is that of a kernel file with its includes in place. Four things of it are changed: an
inline PTX statement becomes a call of the function in shim.h that does the same, a struct of a
launch is passed by reference, as all lanes read the one copy that a GPU has of it, a variable that
lanes of a block share becomes a reference to what the scheduler keeps for the block, and each
kernel gets a function behind it that calls it with an array of arguments.
"""

import functools
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sok_lite.backend.build import cache_folder

FOLDER = Path(__file__).resolve().parent
# -O1 without what copies code: two lanes meet in a call where they are at one address. Nor is a
# struct of 16 bytes taken apart: its address is checked as that of one access. Lines are for error
# texts; of those in version 5 addr2line takes the wrong file.
_FLAGS = (
    "-std=c++17 -O1 -gdwarf-4 -fPIC -fno-thread-jumps -fno-tree-dominator-opts -fno-tree-ch "
    "-fno-crossjumping -fno-tree-sra -ffp-contract=off -fno-math-errno -w"
).split()
# Calls of __tsan_*, one for each access, which scheduler.cpp answers.
_REPORTS = (
    "-fsanitize=thread --param tsan-distinguish-volatile=1 "
    "--param tsan-instrument-func-entry-exit=0"
).split()
# What the real compiler is given and g++ does without.
_KNOWN_OPTIONS = {"--std=c++17", "--fmad=false"}
_KERNEL = re.compile(r'extern "C" __global__ void (\w+)\s*\(')
_ASM = re.compile(
    r'asm(?: volatile)?\(\s*"(?P<op>[\w.]+) [^"]*"\s*:'
    r'(?P<outs>[^:;]*):(?P<ins>[^:;]*?)(?::\s*"memory")?\s*\);'
)
_OF_LAUNCH = re.compile(r"const __grid_constant__ (\w+) ")
_SHARED = re.compile(r"__shared__ (\w+) (\w+);")
_OPERAND = re.compile(r'"=?[lhfr]"\(([\w.]+)\)')


class CompileError(RuntimeError):
    """A source does not compile; the compiler's own words are in the message."""


def unavailable() -> str | None:
    """Returns why nothing can be compiled for the simulated GPU here, or None."""
    if os.uname().machine != "x86_64" or os.uname().sysname != "Linux":
        return "the simulated GPU needs Linux on x86-64"
    return None if _compiler() else "no g++"


def compile_source(source: str, options: Sequence[str] = ()) -> Path:
    """Compiles a source, unless that was done before, and returns the shared library.

    Raises CompileError: g++ failed, an option is unknown, or shim.h lacks a PTX instruction.
    """
    unknown = [o for o in options if not o.startswith("-D") and o not in _KNOWN_OPTIONS]
    if unknown:
        raise CompileError(f"Unknown options of the compiler: {unknown}.")
    defines = [o for o in options if o.startswith("-D")]
    return _built([*_FLAGS, *_REPORTS, *defines], _translated(source, defines), [runtime_library()])


@functools.cache
def runtime_library() -> Path:
    """Returns the compiled scheduler, which every program is linked with: one in a process."""
    # A checked longjmp, which some systems' g++ takes by itself, refuses to go to another stack.
    flags = "-std=c++17 -O2 -fPIC -Wall -Wextra -Werror -U_FORTIFY_SOURCE".split()
    return _built(flags, (FOLDER / "scheduler.cpp").read_text(), [])


def _translated(source: str, defines: Sequence[str]) -> str:
    def call(match: re.Match[str]) -> str:
        operands = [*_OPERAND.findall(match["outs"]), *_OPERAND.findall(match["ins"])]
        return f"ptx_{match['op'].replace('.', '_')}({', '.join(operands)});"

    numbers = itertools.count()

    def reference(match: re.Match[str]) -> str:
        kind, name = match.groups()
        return f"{kind}& {name} = *({kind}*)simt_shared({next(numbers)}, sizeof({kind}));"

    source = _OF_LAUNCH.sub(r"const \1& ", _ASM.sub(call, source))
    source = _SHARED.sub(reference, source)
    if re.search(r"\basm\b", source):
        raise CompileError("An asm statement of another form than compiler.py knows.")
    # The names of kernels that macros make are known to the preprocessor alone.
    command = [*_command(), "-E", "-P", "-D__CUDACC__", *defines, "-x", "c++", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True)
    if done.returncode != 0:
        raise CompileError(done.stderr[:4000])
    names = _KERNEL.findall(done.stdout)
    shim = (FOLDER / "shim.h").read_text()
    behind = "\n".join(f"SIMT_KERNEL({name})" for name in names)
    return f'#line 1 "shim.h"\n{shim}\n#line 1 "kernel.cu"\n{source}\n{behind}\n'


def _compiler() -> str | None:
    return os.environ.get("CXX") or shutil.which("g++")


def _command() -> list[str]:
    compiler = _compiler()
    if compiler is None:
        raise CompileError("No g++ to compile kernels for the simulated GPU with.")
    return [compiler]


def _built(flags: Sequence[str], source: str, libraries: Sequence[Path]) -> Path:
    """Returns the shared library of a source, from the cache or made now."""
    digest = hashlib.sha256("\0".join([*flags, *map(str, libraries), source]).encode())
    target = cache_folder() / "simt" / f"{digest.hexdigest()[:20]}.so"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        path, built = Path(scratch) / "kernel.cpp", Path(scratch) / target.name
        path.write_text(source)
        # In two steps: a program that is linked with -fsanitize=thread gets another runtime.
        compiled = [*_command(), *flags, "-c", str(path), "-o", f"{path}.o"]
        linked = [*_command(), "-shared", f"{path}.o", *map(str, libraries), "-o", str(built)]
        for command in (compiled, linked):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise CompileError(f"{' '.join(command)}\n{done.stderr[:4000]}")
        os.replace(built, target)
    return target
