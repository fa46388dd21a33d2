"""Makes TensorFlow for GPUs small enough to carry: pieces of 54 MiB, for scripts/gpu_check.sh.

For a machine with a GPU that has no network and takes no larger files. What the pieces have is what
that machine lacks: TensorFlow, CUDA's runtime that it was built with, and packages that it imports.
It downloads nothing, needs no GPU, and takes about ten minutes and 5 GB of disk:

  pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \\
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 \\
    --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 -d wheels \\
    'tensorflow==2.21.*' nvidia-cuda-runtime-cu12 keras optree namex astunparse gast google-pasta \\
    termcolor protobuf flatbuffers
  python -m tools.slim_tensorflow wheels pieces

Bring the pieces into one folder there, and call `bash scripts/gpu_check.sh tensorflow FOLDER`.

Of TensorFlow's libraries it takes away names for debuggers and the code for GPUs other than --gpu,
and of its headers those that kernels/ops/stream/stream_of.cpp does not include. Of NVIDIA's
packages it keeps the libraries. TensorFlow looks for cuBLAS and the like before it uses a GPU, and
calls them for matrix products and convolutions, which the check has none of: where no wheel has
one, a library of its name without any function stands in.
"""

import argparse
import hashlib
import json
import lzma
import mmap
import os
import shutil
import struct
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sok_lite.backend.sources import kernel_folder

# What TensorFlow 2.21 opens before it has a GPU, beside CUDA's runtime: without one of them it has
# none. It looks for all in the folder of the runtime, but for cuSOLVER not in that of its wheel.
OPENED = (
    *("libcublas.so.12", "libcublasLt.so.12", "libcudnn.so.9", "libcufft.so.11"),
    *("libcusolver.so.11", "libcusparse.so.12"),
)
_RUNTIME = Path("nvidia", "cuda_runtime", "lib")
# Imported, at most, and called where a profile is read or a model is converted; a tenth of what is
# left. A module of its name without anything stands in.
UNUSED = (
    "tensorflow/python/profiler/internal/_pywrap_profiler_plugin.so",
    "tensorflow/compiler/mlir/stablehlo/stablehlo_extension.so",
)
# Bytes that are compressed by themselves: less, and the pieces are larger; more, and fewer threads
# unpack them.
BLOCK = 16 << 20
# Code of x86-64 is a twentieth smaller behind the first.
_FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6}]

# A file of GPU code is a header (magic, version, its length, the length of what follows) and
# entries, each with a header of its own: kind, its length, that of the code, and the architecture.
_MAGIC, _MACHINE_CODE = 0xBA55ED50, 2


def unpack(wheels: list[Path], folder: Path) -> None:
    """Unpacks wheels as pip would, but for scripts and headers outside of the package."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    for rest in folder.glob("*.data"):
        shutil.rmtree(rest)


def keep_headers(folder: Path) -> int:
    """Removes TensorFlow's headers but those that the stream's source includes; returns how many.

    By the flags of `tf.sysconfig.get_compile_flags`, which would import TensorFlow.
    """
    include = folder / "tensorflow" / "include"
    source = kernel_folder() / "ops" / "stream" / "stream_of.cpp"
    flags = ["-std=c++17", "-DNDEBUG", "-D_GLIBCXX_USE_CXX11_ABI=1", "-DEIGEN_MAX_ALIGN_BYTES=64"]
    command = [os.environ.get("CXX", "g++"), "-M", *flags, f"-I{include}", str(source)]
    words = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    used = {Path(os.path.normpath(word)) for word in words if word.startswith(str(include))}
    for path in [*include.rglob("*")]:
        if path.is_file() and path not in used:
            path.unlink()
    return len(used)


def zero_other_gpus(path: Path, gpu: int) -> tuple[int, int]:
    """Fills the code of a library for other GPUs with zeros, which take no space when compressed.

    Lengths and places stay, so that the driver finds its way to the code that is left.

    Returns:
      How many bytes are left, and how many are zeros now.

    Raises:
      ValueError: a part of it has no machine code for this GPU.
    """
    place = _section(path, ".nv_fatbin")
    if place is None:
        return 0, 0
    kept = zeroed = 0
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        at, end = place
        while at < end - 16:
            magic, _, length, size = struct.unpack_from("<IHHQ", data, at)
            if magic != _MAGIC:
                at += 8
                continue
            first, last, has_gpu = at + length, at + length + size, False
            while first < last:
                kind, _, length, size = struct.unpack_from("<HHIQ", data, first)
                (of,) = struct.unpack_from("<I", data, first + 28)
                if (kind, of) == (_MACHINE_CODE, gpu):
                    has_gpu, kept = True, kept + size
                else:
                    data[first + length : first + length + size] = bytes(size)
                    zeroed += size
                first += length + size
            if not has_gpu:
                raise ValueError(
                    f"{path.name} has a part without machine code of sm_{gpu}. Give a --gpu that "
                    "TensorFlow was built for: `cuobjdump --list-elf` lists them."
                )
            at = (last + 7) // 8 * 8
    return kept, zeroed


def _section(path: Path, name: str) -> tuple[int, int] | None:
    """Returns where a section of a library begins and ends in its file; None: there is none."""
    command = ["readelf", "--section-headers", "--wide", str(path)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        words = line.partition("]")[2].split()
        if words[:1] == [name]:
            first, size = int(words[3], 16), int(words[4], 16)
            return first, first + size
    return None


def slim(folder: Path, gpu: int) -> None:
    """Makes an unpacked TensorFlow as small as it can be on that GPU."""
    print(f"{keep_headers(folder)} headers are left", flush=True)
    for name in UNUSED:
        (folder / name).unlink()
        (folder / name).with_suffix(".py").touch()
    for path in sorted((folder / "tensorflow").rglob("*.so*")):
        subprocess.run(["strip", "--strip-unneeded", str(path)], check=True)
        kept, zeroed = zero_other_gpus(path, gpu)
        if kept:
            mib = f"{kept >> 20} MiB of code for sm_{gpu}, {zeroed >> 20} MiB for others are zeros"
            print(f"{path.name}: {mib}", flush=True)
    # No package either: it would hide the one of that name that the machine has, with CUDA 13.
    for path in [*(folder / "nvidia").rglob("*")]:
        if path.is_file() and ".so" not in path.name:
            path.unlink()
    (folder / _RUNTIME).mkdir(parents=True, exist_ok=True)
    for name in OPENED:
        if not [*(folder / "nvidia").rglob(name)]:
            command = [os.environ.get("CXX", "g++"), "-shared", "-x", "c++", os.devnull]
            target = folder / _RUNTIME / name
            subprocess.run([*command, f"-Wl,-soname,{name}", "-o", str(target)], check=True)


def write_pieces(folder: Path, target: Path, most: int, **facts: str) -> list[Path]:
    """Writes a folder as a compressed archive in pieces, and a list of them.

    `read_pieces` of scripts/gpu_tensorflow.py reads them. Each piece is whole by itself, so that
    several can be decompressed at once.

    Args:
      most: bytes of a piece.
      facts: what else the list is to say.

    Returns:
      The pieces. Beside them is `pieces.json`.
    """
    target.mkdir(parents=True, exist_ok=True)
    pieces: list[bytearray] = [bytearray()]
    with tempfile.TemporaryFile(dir=target) as file:
        with tarfile.open(fileobj=file, mode="w") as archive:
            archive.add(folder, ".", filter=_without_owner)
        size = file.tell()
        for block in _compressed(file.fileno(), size):
            if len(block) > most:
                raise ValueError(f"A piece has to have {len(block):,} bytes at least.")
            if len(pieces[-1]) + len(block) > most:
                pieces.append(bytearray())
            pieces[-1] += block
    paths = []
    for number, piece in enumerate(pieces):
        paths.append(target / f"tensorflow-{number}.tar.xz")
        paths[-1].write_bytes(piece)
    sums = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    text = json.dumps({**facts, "pieces": sums}, indent=1) + "\n"
    (target / "pieces.json").write_text(text)
    return paths


def _without_owner(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


def _compressed(file: int, size: int) -> Iterator[bytes]:
    """Yields the blocks of a file, compressed."""

    def one(first: int) -> bytes:
        return lzma.compress(os.pread(file, BLOCK, first), filters=_FILTERS)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(one, range(0, size, BLOCK))


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", type=Path, help="a folder with the wheels")
    parser.add_argument("pieces", type=Path, help="a folder for the pieces")
    parser.add_argument("--gpu", type=int, default=90, help="compute capability: 90, an H100's")
    parser.add_argument("--mib", type=int, default=54, help="the most of a piece; 54")
    args = parser.parse_args()
    for package in ("nvidia_cuda_runtime_cu12", "tensorflow"):
        names = [path.name for path in args.wheels.glob(f"{package}-*.whl")]
        if len(names) != 1:
            parser.error(f"Expected one wheel of {package} in {args.wheels}. Received: {names}.")
    version, python = names[0].split("-")[1:3]
    with tempfile.TemporaryDirectory(dir=args.pieces.parent) as folder:
        unpack(sorted(args.wheels.glob("*.whl")), Path(folder))
        slim(Path(folder), args.gpu)
        facts = {"tensorflow": version, "python": python, "gpu": str(args.gpu)}
        paths = write_pieces(Path(folder), args.pieces, args.mib << 20, **facts)
    total = sum(path.stat().st_size for path in paths)
    print(f"{len(paths)} pieces, {total / (1 << 20):.0f} MiB, for {python} and sm_{args.gpu}")


if __name__ == "__main__":
    main()
