"""Where the kernel sources are, and which file holds which kernel."""

import re
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
_INCLUDE = re.compile(r'^#include "([\w./]+)"$', re.MULTILINE)


def kernel_folder() -> Path:
    """Returns the folder of the kernel sources: inside the wheel, or beside the package."""
    for folder in (_PACKAGE / "kernels", _PACKAGE.parent / "kernels"):
        if (folder / "platform.cuh").is_file():
            return folder
    raise FileNotFoundError(
        f"No kernel sources. Expected {_PACKAGE / 'kernels'} or {_PACKAGE.parent / 'kernels'} "
        "to hold platform.cuh. Install sok_lite again, from a wheel or a whole checkout."
    )


def kernel_files() -> list[Path]:
    """Returns every .cu file, sorted by name."""
    return sorted(kernel_folder().rglob("*.cu"))


def inlined(path: Path) -> str:
    """Returns the source of a file with its includes written in place, each once.

    NVRTC is given no include path, so that a kernel compiles the same on every machine.
    System includes (only in the CPU half of platform.cuh) stay as they are.
    """
    seen: set[str] = set()

    def expand(text: str) -> str:
        def replace(match: re.Match[str]) -> str:
            name = match.group(1)
            if name in seen:
                return ""
            seen.add(name)
            return expand((kernel_folder() / name).read_text())

        return _INCLUDE.sub(replace, text)

    return expand(path.read_text())
