"""What the stand-in has of `cupy.cuda.nvrtc`: g++ for the simulated GPU, behind NVRTC's calls.

Its machine code is the source and the options: the libraries that g++ makes of them are in a cache
of their own, which may be emptied.
"""

import itertools
import json
from collections.abc import Sequence

from tests.support.simt import compiler, runtime

_IMAGE = b"simt"


class NVRTCError(RuntimeError):
    """What NVRTC refuses."""


class _Program:
    """What a program is made from, and what became of it."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.image = b""
        self.log = ""


_programs: dict[int, _Program] = {}
_numbers = itertools.count(1)


def getVersion() -> tuple[int, int]:
    return 99, 0  # one that NVRTC does not have


def getSupportedArchs() -> tuple[int, ...]:
    return 80, 90  # one program for both: the shim has the instructions of either


def createProgram(src: str, name: str, headers: Sequence[str], names: Sequence[str]) -> int:
    number = next(_numbers)
    _programs[number] = _Program(src)
    return number


def compileProgram(prog: int, options: Sequence[str]) -> None:
    program = _programs[prog]
    known = {f"-arch=sm_{number}" for number in getSupportedArchs()}
    chosen = [option for option in options if option not in known]
    try:
        if program.source:
            compiler.compile_source(program.source, chosen)
    except compiler.CompileError as error:
        program.log = str(error)
        raise NVRTCError("NVRTC_ERROR_COMPILATION (6)") from error
    program.image = _IMAGE + json.dumps([program.source, chosen]).encode()


def getPTX(prog: int) -> bytes:
    return b"// of the simulated GPU\n"


def getCUBIN(prog: int) -> bytes:
    return _programs[prog].image


def getProgramLog(prog: int) -> str:
    return _programs[prog].log


def destroyProgram(prog: int) -> None:
    del _programs[prog]


FUNCTIONS = (
    *(getVersion, getSupportedArchs, createProgram, compileProgram),
    *(getPTX, getCUBIN, getProgramLog, destroyProgram),
)


def loaded(image: bytes) -> runtime.Program | None:
    """Returns the program of an image; None where it is none."""
    if not image.startswith(_IMAGE):
        return None
    source, options = json.loads(image[len(_IMAGE) :])
    return runtime.Program(compiler.compile_source(source, options))
