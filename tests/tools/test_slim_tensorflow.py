"""tools/slim_tensorflow.py: code for other GPUs is gone, and pieces become what they were."""

import json
import os
import struct
import subprocess

import pytest

from scripts.gpu_tensorflow import read_pieces
from sok_lite.backend.build import compiler
from tools import slim_tensorflow
from tools.slim_tensorflow import write_pieces, zero_other_gpus


def gpu_code(*entries):
    """Returns a file of GPU code, as nvcc lays it out, of entries (kind, architecture, code)."""
    parts = [
        struct.pack("<HHIQ", kind, 1, 64, len(code)) + bytes(12) + struct.pack("<I", arch)
        + bytes(32) + code
        for kind, arch, code in entries
    ]  # fmt: skip
    whole = b"".join(parts)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(whole)) + whole


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
def test_code_for_other_gpus_is_zeros_and_all_else_is_where_it_was(tmp_path):
    ptx, machine = 1, 2
    parts = [
        gpu_code((ptx, 90, b"p" * 40), (machine, 80, b"o" * 24), (machine, 90, b"k" * 32)),
        gpu_code((machine, 90, b"K" * 8), (machine, 100, b"O" * 16)),
    ]
    numbers = ",".join(str(byte) for byte in b"".join(parts))
    source, library = tmp_path / "code.cpp", tmp_path / "libcode.so"
    section = '__attribute__((section(".nv_fatbin"), aligned(8), used))'
    source.write_text(f"extern const unsigned char code[];\n{section} "
                      f"const unsigned char code[] = {{{numbers}}};\nint other = 7;\n")  # fmt: skip
    subprocess.run([compiler(), "-shared", "-fPIC", source, "-o", library], check=True)
    before = library.read_bytes()
    assert zero_other_gpus(library, 90) == (40, 80)
    expected = before
    for gone in (b"p" * 40, b"o" * 24, b"O" * 16):
        expected = expected.replace(gone, bytes(len(gone)))
    assert library.read_bytes() == expected != before
    with pytest.raises(ValueError, match="libcode.so has a part without machine code of sm_80"):
        zero_other_gpus(library, 80)


def test_pieces_become_the_folder_again_and_a_wrong_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(slim_tensorflow, "BLOCK", 1000)
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    files = {"inner/random.so": os.urandom(9000), "text.py": b"x = 1\n" * 500, "empty": b""}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    made = write_pieces(folder, tmp_path / "pieces", 4000, python="cp312")
    assert len(made) > 2 and all(path.stat().st_size <= 4000 for path in made)
    listed = json.loads((tmp_path / "pieces" / "pieces.json").read_text())
    assert listed["python"] == "cp312" and [*listed["pieces"]] == [path.name for path in made]
    read_pieces(tmp_path / "pieces", listed["pieces"], tmp_path / "again")
    assert {name: (tmp_path / "again" / name).read_bytes() for name in files} == files
    made[1].write_bytes(made[0].read_bytes())
    with pytest.raises(SystemExit, match=r"tensorflow-1.tar.xz is not what pieces.json lists"):
        read_pieces(tmp_path / "pieces", listed["pieces"], tmp_path / "again")
    made[1].unlink()
    with pytest.raises(SystemExit, match=r"pieces lacks tensorflow-1.tar.xz. Bring all pieces"):
        read_pieces(tmp_path / "pieces", listed["pieces"], tmp_path / "again")
