"""Files of PyTorch (.pt): a dict of tensors, of which `keys` and `values` are a table.

Nothing in a file is executed: only tensors, texts and numbers are read (`weights_only`). The
package torch is needed. It maps files, but takes what it writes as a whole: a table that is written
must fit into memory.
"""

import zipfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sok_lite.cli.file_source import Stored
from sok_lite.cli.named import ABOUT, about_text, named_columns, package, reader, shape_of
from sok_lite.cli.wrapped import only_one, read_plain
from sok_lite.engine.files.shard import open_file
from sok_lite.engine.files.source import Source

_DTYPES = frozenset(
    "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 bfloat16 float32 float64".split()
)


def detect(path: str) -> bool:
    """Returns whether a file is an archive as PyTorch makes it."""
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive:
            return any(name.endswith("/data.pkl") for name in archive.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _torch() -> Any:
    return package("torch", "Files of PyTorch", "torch>=2.3")


def _open(path: str) -> tuple[dict[str, Stored], Any]:
    torch = _torch()
    tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    if not isinstance(tensors, dict):
        raise TypeError(f"it must have a dict of tensors. Received: {type(tensors).__name__}")
    found = {
        column: _stored(torch, tensor)
        for column, tensor in tensors.items()
        if isinstance(column, str) and isinstance(tensor, torch.Tensor) and _is_column(tensor)
    }
    return found, tensors.get(ABOUT)


sources = reader(_open, Exception, check=_torch)


def _is_column(tensor: Any) -> bool:
    return tensor.dim() in (1, 2) and _dtype(tensor) in _DTYPES


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _stored(torch: Any, tensor: Any) -> Stored:
    is_bfloat16 = tensor.dtype == torch.bfloat16

    def read(piece_rows: int) -> Iterator[np.ndarray]:
        for first in range(0, tensor.shape[0], piece_rows):
            part = tensor[first : first + piece_rows].detach().contiguous()
            if is_bfloat16:
                yield part.view(torch.int16).numpy().view(np.uint16)
            else:
                yield part.numpy()

    return Stored(_dtype(tensor), tuple(tensor.shape), read)


def write(path: str, sources: Sequence[Source]) -> None:
    """Writes a table as a dict of tensors.

    Raises:
      OSError: the file cannot be written. ValueError: the source is corrupt. WrongUse: there are
        several, or torch is not installed.
    """
    source = only_one(sources, "a file of PyTorch")
    torch = _torch()
    tensors: dict[str, Any] = {ABOUT: about_text(source)}
    for name, column in named_columns(source):
        whole = torch.from_numpy(np.empty(shape_of(source, column), column.dtype))
        if name == "values" and source.dtype == "bfloat16":
            whole = whole.to(torch.bfloat16)
        first = 0
        for piece in read_plain(source, column.name):
            whole[first : first + len(piece)] = torch.from_numpy(np.array(piece))
            first += len(piece)
        tensors[name] = whole
    with open(path, "xb") as file:
        torch.save(tensors, file)
