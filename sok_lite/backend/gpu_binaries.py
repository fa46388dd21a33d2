"""GPU kernels: compiled by NVRTC once per machine, and cached on disk.

NVRTC is called through CuPy, and needs no GPU. CuPy's own compilers do not fit: `cupy.RawModule`
appends -ftz=true after all options, so results below 1.2e-38 would be 0, unlike on the CPU, and
`compile_using_nvrtc` asks a GPU for its architecture even if it is given one.

Cached files are keyed by everything that decides the result, written under another name and then
renamed, and begin with a checksum: a file truncated by a full disk or a crash is made again. There
is no lock: ranks that miss a file all compile it, each on its own core, and the last one stays. Not
every shared disk releases the locks of a killed process.
"""

import hashlib
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sok_lite.backend.build import cache_folder
from sok_lite.backend.sources import inline_includes
from sok_lite.backend.tunables import kernel_defines

# Argument words of a launch. Wide ones need CUDA 12.1, which permits 32,764 bytes of arguments
# (CUDA C++ Programming Guide, parameters of __global__).
LAUNCH_WORDS, WIDE_LAUNCH_WORDS = 480, 4080
_WIDE_SINCE = (12, 1)

# A section of machine code, or an entry of PTX.
_KERNEL = re.compile(rb"\0\.text\.(\w+)(?=\0)|\.entry (\w+)\(")

# --fmad=false: the CPU does not fuse multiply and add, and results must be equal bit for bit.
FLAGS = ("--std=c++17", "--fmad=false")


def kernel_names(binary: bytes) -> list[str]:
    """Returns the names of the kernels of a compiled file."""
    return sorted({(code or ptx).decode() for code, ptx in _KERNEL.findall(binary)})


class GpuBinaries:
    """Compiles kernel files for GPUs of any compute capability, without needing a GPU.

    Args:
      binding: cupy.cuda.nvrtc.
      runtime: cupy.cuda.runtime; None: the driver is as new as NVRTC.

    Attributes:
      has_wide: whether there are wide launches.
      defines: the macros of SOK_LITE_KERNEL_DEFINES.
    """

    def __init__(self, binding: Any, runtime: Any = None) -> None:
        self.has_wide = binding.getVersion() >= _WIDE_SINCE and (
            runtime is None or divmod(runtime.driverGetVersion() // 10, 100) >= _WIDE_SINCE
        )
        self.folder = cache_folder() / "cuda"
        self.defines = kernel_defines()
        self._nvrtc = Nvrtc(binding)
        self._kept = DiskCache(self.folder)

    @property
    def forms(self) -> tuple[bool, ...]:
        """The possible values of `is_wide` of `get`."""
        return (False, True) if self.has_wide else (False,)

    def get(self, path: Path, capability: str, is_wide: bool) -> bytes:
        """Returns the compiled kernels of a .cu file for a compute capability such as "90".

        RuntimeError: NVRTC does not know such an old GPU, or rejects the source.
        """
        source = inline_includes(path)
        defines = [f"-D{name}={value}" for name, value in self.defines.items()]
        if is_wide:
            defines.append(f"-DSOK_LAUNCH_WORDS={WIDE_LAUNCH_WORDS}")
        flags = [*FLAGS, self._nvrtc.architecture(capability), *defines]
        return self._kept.get(
            [source, *flags, self._nvrtc.build], lambda: self._nvrtc.compile(source, flags).binary
        )


class CompileError(RuntimeError):
    """A compile error, with the compiler's message."""


class Compiled(NamedTuple):
    """A compiled source."""

    binary: bytes  # machine code (a cubin), or PTX for a virtual architecture
    ptx: str
    log: str  # the compiler's messages


class Nvrtc:
    """NVRTC through `cupy.cuda.nvrtc`, which this file does not import."""

    def __init__(self, binding: Any) -> None:
        self._nvrtc = binding
        self._build = ""

    @property
    def version(self) -> str:
        """NVRTC's version, such as "12.9"."""
        return ".".join(map(str, self._nvrtc.getVersion()))

    @property
    def build(self) -> str:
        """The exact build: the version, and the comment at the head of all its PTX."""
        if not self._build:
            lines = self.compile("", ()).ptx.splitlines()
            comment = [line for line in lines if line.startswith("//")]
            self._build = "\n".join([self.version, *comment])
        return self._build

    def architecture(self, capability: str) -> str:
        """Returns the -arch flag for a compute capability such as "90".

        A GPU that NVRTC knows gets machine code. A newer one gets PTX of the newest that it knows,
        which the driver compiles. RuntimeError: NVRTC does not know such an old GPU.
        """
        known = self._nvrtc.getSupportedArchs()
        mine = int(capability)
        if mine in known:
            return f"-arch=sm_{mine}"
        older = [each for each in known if each < mine]
        if not older:
            raise RuntimeError(
                f"NVRTC {self.version} compiles for GPUs of compute capability {min(known) / 10} "
                f"and newer. Received: {mine / 10}. Use an older CuPy, or backend 'cpu'."
            )
        return f"-arch=compute_{max(older)}"

    def compile(self, source: str, flags: Sequence[str]) -> Compiled:
        """Compiles CUDA C++ without includes, to machine code with -arch=sm_; or CompileError."""
        nvrtc = self._nvrtc
        program = nvrtc.createProgram(source, "kernel.cu", [], [])
        try:
            nvrtc.compileProgram(program, list(flags))
            ptx = nvrtc.getPTX(program)
            is_machine_code = any(flag.startswith("-arch=sm_") for flag in flags)
            binary = nvrtc.getCUBIN(program) if is_machine_code else ptx
            return Compiled(binary, ptx.decode(), nvrtc.getProgramLog(program))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise CompileError(
                f"NVRTC {self.version} refused a kernel ({error}):\n{log}"
            ) from error
        finally:
            nvrtc.destroyProgram(program)


class DiskCache:
    """A cache in a folder; one that cannot be used gives a warning, and nothing is cached."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_warned = False

    def get(self, facts: Sequence[str], make: Callable[[], bytes]) -> bytes:
        """Returns the cached result for the facts that decide it, or makes and caches it."""
        digest = hashlib.sha256()
        for fact in facts:
            part = fact.encode()
            digest.update(len(part).to_bytes(8, "little") + part)
        path = self._folder / digest.hexdigest()[:40]
        data = self._read(path)
        if data is None:
            data = make()
            self._write(path, data)
        return data

    def _read(self, path: Path) -> bytes | None:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(error)
            return None
        checksum, data = content[:32], content[32:]
        return data if hashlib.sha256(data).digest() == checksum else None

    def _write(self, path: Path, data: bytes) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._folder) as scratch:
                written = Path(scratch) / path.name
                written.write_bytes(hashlib.sha256(data).digest() + data)
                os.replace(written, path)
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"Compiled kernels cannot be kept in {str(self._folder)!r} ({error}): each process "
            "compiles them anew, which takes seconds. Set SOK_LITE_CACHE to a folder that can be "
            "written to.",
            RuntimeWarning,
            stacklevel=2,
        )
