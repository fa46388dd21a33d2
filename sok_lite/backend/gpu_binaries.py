"""The kernels as a GPU loads them: compiled by NVRTC once per machine, and kept on disk."""

import re
from pathlib import Path
from typing import Any

from sok_lite.backend.build import cache_folder
from sok_lite.backend.disk_cache import DiskCache
from sok_lite.backend.nvrtc import FLAGS, Nvrtc
from sok_lite.backend.sources import inlined
from sok_lite.backend.tunables import kernel_defines

# Words of arguments of a narrow launch, and of a wide one: with CUDA 12.1 and newer there is space
# for 32,764 bytes, in the words of the CUDA C++ Programming Guide on parameters of __global__.
LAUNCH_WORDS, WIDE_LAUNCH_WORDS = 480, 4080
_WIDE_SINCE = (12, 1)

# A section of machine code, or an entry of PTX.
_KERNEL = re.compile(rb"\0\.text\.(\w+)(?=\0)|\.entry (\w+)\(")


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
