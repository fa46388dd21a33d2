"""The kernels as a GPU loads them: compiled by NVRTC once per machine, and kept on disk.

NVRTC is called through CuPy, and needs no GPU. CuPy has compilers of its own. `cupy.RawModule`,
which also keeps what it compiled, adds -ftz=true behind all options and the last one wins: results
below 1.2e-38 would be 0, and those of the CPU are not. `compile_using_nvrtc` asks a GPU for its
architecture even where it is told one.

Files on disk are keyed by everything that decides the result. A file is written under another name
and then renamed, so no reader sees half of one, and begins with the checksum of the rest: a file
that a full disk or a crash has cut short is made again. There is no lock: of several ranks that
miss the same file each makes it, on a core of its own in the time that it would have waited, and
the last one stays. A lock would save only work, and not every shared disk has locks that a killed
process releases.
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
from sok_lite.backend.sources import inlined
from sok_lite.backend.tunables import kernel_defines

# Words of arguments of a narrow launch, and of a wide one: with CUDA 12.1 and newer there is space
# for 32,764 bytes, in the words of the CUDA C++ Programming Guide on parameters of __global__.
LAUNCH_WORDS, WIDE_LAUNCH_WORDS = 480, 4080
_WIDE_SINCE = (12, 1)

# A section of machine code, or an entry of PTX.
_KERNEL = re.compile(rb"\0\.text\.(\w+)(?=\0)|\.entry (\w+)\(")

# --fmad=false: the CPU does not fuse multiply and add either, and results must be the same.
FLAGS = ("--std=c++17", "--fmad=false")


def kernel_names(binary: bytes) -> list[str]:
    """Returns the names of the kernels of a file that was compiled."""
    return sorted({(code or ptx).decode() for code, ptx in _KERNEL.findall(binary)})


class GpuBinaries:
    """Makes them, for GPUs of any compute capability. It needs no GPU.

    Args:
      binding: the module `cupy.cuda.nvrtc`.
      runtime: the module `cupy.cuda.runtime`; None: the driver is as new as NVRTC.

    Attributes:
      has_wide: whether there are wide launches.
      folder: where they are kept.
      defines: the macros that SOK_LITE_KERNEL_DEFINES sets.
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
        """Returns the possible values of `is_wide` of `get`."""
        return (False, True) if self.has_wide else (False,)

    def get(self, path: Path, capability: str, is_wide: bool) -> bytes:
        """Returns the kernels of a file for a GPU.

        Args:
          path: of a .cu file.
          capability: of the GPU, such as "90".
          is_wide: for wide launches, or narrow ones.

        Raises:
          RuntimeError: NVRTC knows no GPU as old as that, or refuses the source.
        """
        source = inlined(path)
        defines = [f"-D{name}={value}" for name, value in self.defines.items()]
        if is_wide:
            defines.append(f"-DSOK_LAUNCH_WORDS={WIDE_LAUNCH_WORDS}")
        flags = [*FLAGS, self._nvrtc.architecture(capability), *defines]
        return self._kept.get(
            [source, *flags, self._nvrtc.build], lambda: self._nvrtc.compiled(source, flags).binary
        )


class CompileError(RuntimeError):
    """A source does not compile; the compiler's own words are in the message."""


class Compiled(NamedTuple):
    """The result of compiling a source.

    Attributes:
      binary: what a GPU's driver loads: machine code (a cubin), or PTX where the flags name a
        virtual architecture.
      ptx: the intermediate code.
      log: the compiler's words.
    """

    binary: bytes
    ptx: str
    log: str


class Nvrtc:
    """NVRTC, of one process.

    Args:
      binding: the module `cupy.cuda.nvrtc`. This file does not import it: who compiles has it, and
        it can be another one.
    """

    def __init__(self, binding: Any) -> None:
        self._nvrtc = binding
        self._build = ""

    @property
    def version(self) -> str:
        """NVRTC's version, such as "12.9"."""
        return ".".join(map(str, self._nvrtc.getVersion()))

    @property
    def build(self) -> str:
        """An identifier of this build of NVRTC: the comment at the head of all its PTX.

        The version does not: patches of a release share it.
        """
        if not self._build:
            lines = self.compiled("", ()).ptx.splitlines()
            comment = [line for line in lines if line.startswith("//")]
            self._build = "\n".join([self.version, *comment])
        return self._build

    def architecture(self, capability: str) -> str:
        """Returns the flag for a GPU of a compute capability, such as "90".

        It is machine code where NVRTC knows the GPU: nothing is left to compile when it is loaded.
        For a newer GPU it is the PTX of the newest one that is known, which the driver compiles.

        Raises:
          RuntimeError: NVRTC knows no GPU as old as that.
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

    def compiled(self, source: str, flags: Sequence[str]) -> Compiled:
        """Compiles a source without includes.

        Args:
          source: CUDA C++.
          flags: of NVRTC; with an -arch=sm_ the binary is machine code, else PTX.

        Raises:
          CompileError: NVRTC refused it.
        """
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
    """Files in a folder. If the folder cannot be used there is a warning, and nothing is cached.

    Args:
      folder: where the files are; made when the first one is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_warned = False

    def get(self, facts: Sequence[str], make: Callable[[], bytes]) -> bytes:
        """Returns the cached result for some facts, or that of `make`, which is then cached.

        Args:
          facts: everything that decides the result.
          make: called if there is no valid file; its errors are passed on.
        """
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
