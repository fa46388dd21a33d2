"""The kernel sources: their folder, and the file and signature of each kernel."""

import re
from pathlib import Path
from typing import NamedTuple

_PACKAGE = Path(__file__).resolve().parent.parent
# Groups: kind, name, the ## of a name that a macro completes, parameters.
_KERNEL = re.compile(r"\bSOK_(ROW_|TILE_|TEAM_)?KERNEL\((\w+)(##\w+)?\)[\s\\]*\(([^()]*)\)")
# By parameter type, as SokCode in kernels/parts.cuh.
_LETTERS = {
    "i64*": "q",
    "u64*": "Q",
    "i32*": "i",
    "u32*": "I",
    "u16*": "H",
    "u8*": "B",
    "f32*": "f",
    "f64*": "d",
    "i64": "#",
    "f32": ".",
}
_INCLUDE = re.compile(r'#include "([\w./]+)"')


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


def runtime_files() -> list[Path]:
    """Returns the C++ files of the CPU library besides its kernels, sorted by name."""
    return sorted(kernel_folder().glob("*.cpp"))


def inline_includes(path: Path) -> str:
    """Returns a source with its includes expanded in place, each once, and #line directives.

    NVRTC gets no include path, so a kernel compiles the same on every machine. System includes
    (only in platform_cpu.cuh) stay.
    """
    folder = kernel_folder()
    seen: set[str] = set()

    def expand(file: Path) -> str:
        name = file.relative_to(folder).as_posix() if file.is_relative_to(folder) else file.name
        lines = [f'#line 1 "{name}"']
        for number, line in enumerate(file.read_text().splitlines(), 1):
            match = _INCLUDE.fullmatch(line)
            if match is None:
                lines.append(line)
            elif match.group(1) not in seen:
                seen.add(match.group(1))
                lines += [expand(folder / match.group(1)), f'#line {number + 1} "{name}"']
            else:
                lines.append("")
        return "\n".join(lines)

    return expand(path) + "\n"


class KernelSource(NamedTuple):
    """A kernel's definition in a .cu file."""

    name: str
    is_prefix: bool  # a macro appends the rest: the names of several kernels
    kind: str  # GPU threads per item: "" one, "row" or "tile" several, "team" a block
    signature: str  # a letter per parameter; "?" for a pointer whose type a macro chooses
    path: Path


def all_kernels() -> list[KernelSource]:
    found = []
    for path in kernel_files():
        for kind, name, macro, parameters in _KERNEL.findall(path.read_text()):
            kind = kind.rstrip("_").lower()
            found.append(KernelSource(name, bool(macro), kind, _signature(parameters), path))
    return found


def _signature(parameters: str) -> str:
    plain = parameters.replace("\\", " ").replace("const ", " ")
    types = [parameter.split()[0] for parameter in plain.split(",")]
    # The first parameter is the range of items.
    return "".join(_LETTERS.get(name, "?") for name in types[1:])


def find_kernel(name: str, kernels: list[KernelSource]) -> KernelSource:
    """Returns the source of a kernel. AttributeError: there is none."""
    fits = [k for k in kernels if name == k.name or (k.is_prefix and name.startswith(k.name))]
    if not fits:
        raise AttributeError(f"No kernel {name!r} in {kernel_folder()}.")
    # The longest: init_normal_ and not init_ for init_normal_f32.
    return max(fits, key=lambda kernel: len(kernel.name))
