"""The kernels as a GPU loads them: compiled by NVRTC once per machine, and kept on disk."""

import re
from pathlib import Path
from typing import Any

from sok_lite.backend.build import cache_folder
from sok_lite.backend.disk_cache import DiskCache
from sok_lite.backend.nvrtc import FLAGS, Nvrtc
from sok_lite.backend.sources import inlined
from sok_lite.backend.tunables import kernel_defines

# A section of machine code, or an entry of PTX.
_KERNEL = re.compile(rb"\0\.text\.(\w+)(?=\0)|\.entry (\w+)\(")


def kernel_names(binary: bytes) -> list[str]:
    """Returns the names of the kernels of a file that was compiled."""
    return sorted({(code or ptx).decode() for code, ptx in _KERNEL.findall(binary)})


class GpuBinaries:
    """Makes them, for GPUs of any compute capability. It needs no GPU.

    Args:
      binding: the module `cupy.cuda.nvrtc`.

    Attributes:
      folder: where they are kept.
      defines: the macros that SOK_LITE_KERNEL_DEFINES sets.
    """

    def __init__(self, binding: Any) -> None:
        self.folder = cache_folder() / "cuda"
        self.defines = kernel_defines()
        self._nvrtc = Nvrtc(binding)
        self._kept = DiskCache(self.folder)

    def get(self, path: Path, capability: str, in_memory: bool) -> bytes:
        """Returns the kernels of a file for a GPU.

        Args:
          path: of a .cu file.
          capability: of the GPU, such as "90".
          in_memory: whether they take their arguments by memory, or with the launch.

        Raises:
          RuntimeError: NVRTC knows no GPU as old as that, or refuses the source.
        """
        source = inlined(path)
        defines = [f"-D{name}={value}" for name, value in self.defines.items()]
        if in_memory:
            defines.append("-DSOK_ARGUMENTS_IN_MEMORY")
        flags = [*FLAGS, self._nvrtc.architecture(capability), *defines]
        return self._kept.get(
            [source, *flags, self._nvrtc.build],
            lambda: self._nvrtc.compiled(source, flags).binary,
        )
