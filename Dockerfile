# The GPU image: CUDA 12, TensorFlow with CUDA, CuPy, Horovod with NCCL, and sok_lite.
# It does its work through the scripts that a checkout uses, so that what runs here is what runs there.
#
#   docker build -t sok_lite .
#   docker run --gpus all --ipc=host sok_lite bash scripts/demo.sh
#   docker run --gpus all --ipc=host sok_lite bash scripts/gpu_check.sh
#
# Without cuDNN: TensorFlow's wheels bring it, and a second one on the system's path mixes with it.
FROM nvidia/cuda:12.6.3-devel-ubuntu24.04

# What pip cannot install. nvcc, NCCL and its headers are in the base image. No MPI: the tests use the
# one that pip installs, and Horovod built with another one would meet it in one process.
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
      g++ git openssh-client python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /workspace/sok_lite
# Only the driver's folders on the library path: what is there comes before the CUDA libraries that
# TensorFlow's wheels bring, and those of the toolkit are older than some of these can use.
ENV SOK_LITE_CACHE=/opt/sok_lite \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64 \
    OMPI_ALLOW_RUN_AS_ROOT=1 \
    OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

# First what changes seldom: editing a kernel or a test does not build TensorFlow's environment again.
COPY pyproject.toml README.md LICENSE ./
COPY scripts/setup.sh scripts/build_horovod.py scripts/
COPY sok_lite/_version.py sok_lite/
RUN bash scripts/setup.sh --gpu

COPY . .
# The CPU kernels, which are in the sources.
RUN bash scripts/setup.sh --gpu
ENV PATH=/workspace/sok_lite/.venv/bin:$PATH
CMD ["bash", "scripts/gpu_check.sh"]
