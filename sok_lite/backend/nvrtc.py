"""Compiles kernels for a GPU by NVRTC, through CuPy. It needs no GPU.

CuPy has compilers of its own. `cupy.RawModule`, which also keeps what it compiled, adds -ftz=true
behind all options and the last one wins: results below 1.2e-38 would be 0, and those of the CPU are
not. `compile_using_nvrtc` asks a GPU for its architecture even where it is told one.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

# --fmad=false: the CPU does not fuse multiply and add either, and results must be the same.
FLAGS = ("--std=c++17", "--fmad=false")


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
