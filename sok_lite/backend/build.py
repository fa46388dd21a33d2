"""The CPU kernel library: from the wheel, or compiled here from the sources.

A wheel has it in `sok_lite/lib`. In a checkout g++ compiles it on first use, into a cache keyed by
sources and flags, so an edited kernel never runs from an old library. The library of TensorFlow's
operations (sok_lite/native) is found and compiled likewise.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sok_lite.backend.sources import kernel_files, kernel_folder, runtime_files
from sok_lite.backend.tunables import kernel_defines

# -fno-trapping-math: without it, g++ does not vectorize loops with branches, as in Lion and
# AdagradDA; no kernel uses floating-point exception flags. -ffp-contract=off: a fused multiply-add
# would round differently from the GPU and other CPUs.
FLAGS = (
    "-std=c++17 -O3 -fPIC -shared -pthread -fvisibility=hidden -ffp-contract=off -fno-math-errno "
    "-fno-trapping-math -Wall -Wextra -Werror"
).split()

V3_FLAGS = ("-march=x86-64-v3",)  # for processors with AVX2, FMA and F16C
# The library must load beside an older libstdc++, and not expose its own copy to TensorFlow.
_LINK_FLAGS = ("-static-libstdc++", "-static-libgcc")
_EXPORTS = "cpu_exports.map"

_log = logging.getLogger("sok_lite")


def find_library() -> Path:
    """Returns the CPU kernel library: SOK_LITE_CPU_LIBRARY, the wheel's, or one compiled here.

    ValueError: SOK_LITE_CPU_LIBRARY is not the path of a CPU kernel library. RuntimeError: there is
    none and it cannot be compiled.
    """
    named = os.environ.get("SOK_LITE_CPU_LIBRARY")
    if named:
        path = Path(named).absolute()  # a bare name would be searched elsewhere
        try:
            library = ctypes.CDLL(str(path))
            _ = library.sok_launch, library.sok_rule_scalars
        except (OSError, AttributeError) as error:
            raise ValueError(
                "SOK_LITE_CPU_LIBRARY must be the path of a CPU kernel library. Received: "
                f"{named!r} ({error}). Unset it to use the library of this installation."
            ) from error
        return path
    return shipped_library() or compile_library(_processor_flags())


def find_rules() -> Path:
    """Returns a library with the formulas of update rules, which GPU steps need too: the CPU kernel
    library if it exists, otherwise a small one. Raises as `find_library`."""
    if built_library() is not None:
        return find_library()
    source = kernel_folder() / "cpu_rules.cpp"
    files = [source, kernel_folder() / "update" / "scalars.h"]
    flags = _flags([])
    return compile_sources(
        target_of("libsok_lite_rules", flags, files), flags, [source], "formulas of update rules"
    )


def built_library() -> Path | None:
    """Returns the library of `find_library` if it exists already."""
    named = os.environ.get("SOK_LITE_CPU_LIBRARY")
    if named:
        return Path(named)
    library = shipped_library() or _target_of_kernels(_flags(_processor_flags()))
    return library if library.is_file() else None


def shipped_library() -> Path | None:
    """Returns the wheel's library for this processor, or None."""
    if kernel_defines():
        return None  # the wheel's have the default tunables
    names = ["libsok_lite_cpu_v3.so"] if has_x86_64_v3() else []
    return shipped_file(*names, "libsok_lite_cpu.so")


def shipped_file(*names: str) -> Path | None:
    """Returns the first of these libraries that the wheel has, or None."""
    folder = Path(__file__).resolve().parent.parent / "lib"
    return next((folder / name for name in names if (folder / name).is_file()), None)


def compile_library(extra_flags: Sequence[str] = ()) -> Path:
    """Compiles all kernels, in a minute or two unless cached; returns the shared library's path.

    RuntimeError: no working C++ compiler, a compile error (quoted in the message), or an unusable
    cache folder.
    """
    flags = _flags(extra_flags)
    return compile_sources(_target_of_kernels(flags), flags, _sources(), "CPU kernels")


def compile_sources(
    target: Path,
    flags: Sequence[str],
    sources: Sequence[Path],
    what: str,
    needs: str | None = None,
) -> Path:
    """Compiles sources into a shared library, unless it exists; returns its path.

    Args:
      what: the library in messages.
      needs: the soname of a library to link, which the process will have loaded.

    Raises:
      RuntimeError: as `compile_library`.
    """
    try:
        if not target.is_file():
            _compile([*flags, "-I", str(kernel_folder())], sources, target, what, needs)
    except OSError as error:
        raise RuntimeError(
            "Compiled kernels need a folder that can be written to. Received: "
            f"{str(target.parent)!r} ({error}). Set SOK_LITE_CACHE to another folder."
        ) from error
    return target


def _compile(
    flags: Sequence[str], sources: Sequence[Path], target: Path, what: str, needs: str | None
) -> None:
    command = compiler()
    if command is None:
        raise RuntimeError(
            f"The {what} are not built and there is no C++ compiler to build them with. "
            "Install sok_lite from a wheel, or install g++ (Debian/Ubuntu: apt-get install g++)."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    if needs is None and len(sources) > 1:
        _log.warning("Compiling the %s, which takes a minute or two, once: %s", what, target)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        objects = [Path(scratch) / f"{number}.o" for number in range(len(sources))]
        commands = [
            [command, *flags, "-c", "-x", "c++", str(source), "-o", str(made)]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run_compiler, commands))
        linked = [*map(str, objects)]
        if needs is not None:
            # An empty library of that name stands in for it.
            empty = Path(scratch) / needs
            named = ["-shared", f"-Wl,-soname,{needs}", "-o", str(empty)]
            _run_compiler([command, "-x", "c++", os.devnull, *named])
            linked += ["-Wl,--no-as-needed", str(empty)]
        # Renamed once complete: several ranks may compile at once.
        built = Path(scratch) / target.name
        exports = f"-Wl,--version-script={kernel_folder() / _EXPORTS}"
        _run_compiler([command, *flags, *_LINK_FLAGS, exports, *linked, "-o", str(built)])
        os.replace(built, target)


def _run_compiler(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise RuntimeError(
            "CXX must be the name or the path of a C++ compiler, without options. Received: "
            f"{command[0]!r}, which cannot be run ({error}). Unset it to use g++."
        ) from error
    if done.returncode != 0:
        raise RuntimeError(f"Compiling failed:\n{' '.join(command)}\n{done.stderr[:4000]}")


def _target_of_kernels(flags: Sequence[str]) -> Path:
    patterns = ("**/*.cuh", "*.h", "update/*.h")
    headers = [path for pattern in patterns for path in kernel_folder().glob(pattern)]
    return target_of("libsok_lite_cpu", flags, [*_sources(), *headers])


def target_of(name: str, flags: Sequence[str], files: Sequence[Path]) -> Path:
    """Returns the cache path of a library compiled with these flags from these files."""
    digest = hashlib.sha256(" ".join([platform.machine(), *flags, *_LINK_FLAGS]).encode())
    for path in sorted([*files, kernel_folder() / _EXPORTS]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return cache_folder() / "kernels" / f"{name}-{digest.hexdigest()[:16]}.so"


def _sources() -> list[Path]:
    return [*kernel_files(), *runtime_files()]


def _flags(extra_flags: Sequence[str]) -> list[str]:
    defines = (f"-D{name}={value}" for name, value in kernel_defines().items())
    return [*FLAGS, *extra_flags, *defines]


def _processor_flags() -> list[str]:
    return [*V3_FLAGS] if has_x86_64_v3() else []


def compiler() -> str | None:
    """Returns this machine's C++ compiler, or None."""
    return os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")


def cache_folder() -> Path:
    """Returns the folder for compiled files on this machine."""
    root = os.environ.get("SOK_LITE_CACHE")
    if not root:
        root = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "sok_lite")
    return Path(os.path.expanduser(root))


def has_x86_64_v3() -> bool:
    """Whether this processor runs code compiled with -march=x86-64-v3."""
    # "abm" is Linux' name for lzcnt, which older processors execute as another instruction.
    return {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"} <= _cpu_flags()


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    for line in text.splitlines():
        if line.startswith("flags"):
            return set(line.split(":", 1)[1].split())
    return set()
