"""`sok-lite compile`: compiles this machine's kernels before a job has to wait for them."""

import argparse
import os
from concurrent.futures import ThreadPoolExecutor

from sok_lite.backend import default_backend
from sok_lite.backend.build import find_library
from sok_lite.backend.gpu_binaries import GpuBinaries
from sok_lite.backend.sources import kernel_files
from sok_lite.cli.errors import FINE, WrongUse
from sok_lite.cli.progress import progress_bar
from sok_lite.native import library

HELP = "compile the kernels ahead of time, so that the first job does not wait for them"
EXAMPLES = "sok-lite compile --gpu 90"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gpu",
        metavar="CAPABILITY",
        action="append",
        help="compute capability to compile for, such as 90 for an H100; needs no GPU, so that an "
        "image can bring its kernels (repeatable; default: the GPUs of this machine, or its CPU)",
    )


def run(args: argparse.Namespace) -> int:
    for capability in args.gpu or ():
        if not capability.isdecimal() or int(capability) < 10:
            raise WrongUse(
                f"--gpu takes a compute capability without its point, such as 90 for 9.0. "
                f"Received: {capability!r}"
            )
    print(f"TensorFlow's operations are in {library.find_library()}")
    if not args.gpu and default_backend() == "cpu":
        print(f"the CPU kernels are in {find_library()}")
        return FINE
    import cupy

    capabilities = set(args.gpu or ())
    if not capabilities:
        count = cupy.cuda.runtime.getDeviceCount()
        capabilities = {cupy.cuda.Device(number).compute_capability for number in range(count)}
    binaries = GpuBinaries(cupy.cuda.nvrtc)
    wanted = [
        (path, capability, is_wide)
        for capability in sorted(capabilities)
        for path in kernel_files()
        for is_wide in binaries.forms
    ]
    with (
        progress_bar("compile", len(wanted), args.progress) as add,
        ThreadPoolExecutor(os.cpu_count()) as pool,  # NVRTC does not hold Python's lock
    ):
        for _ in pool.map(lambda one: binaries.get(*one), wanted):
            add(1)
    print(
        f"the kernels for GPUs of compute capability {', '.join(sorted(capabilities))} are in "
        f"{binaries.folder}"
    )
    return FINE
