"""NumPy's files of several arrays: `keys`, `values` and other columns by their names."""

import zipfile
from collections.abc import Sequence

import numpy as np

from sok_lite.cli.plain import plain_columns, read_plain
from sok_lite.cli.wrapped import only_one
from sok_lite.engine.files.source import Source


def write(path: str, sources: Sequence[Source]) -> None:
    """Writes one table, array after array. Rows of bfloat16 become float32."""
    source = only_one(sources, "an npz file")
    with zipfile.ZipFile(path, "x", zipfile.ZIP_STORED) as archive:
        for name, dtype, dim in plain_columns(source):
            shape = (source.num_keys,) if dim is None else (source.num_keys, dim)
            # A "/" would be a folder in the archive, and NumPy's names end with ".npy".
            with archive.open(f"{name.replace('/', '%2F')}.npy", "w", force_zip64=True) as file:
                descr = np.lib.format.dtype_to_descr(dtype)
                about = {"descr": descr, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, about)
                for piece in read_plain(source, name):
                    file.write(np.ascontiguousarray(piece).data)
