# The image: TensorFlow, Horovod and sok_lite; for GPUs also CUDA 12, CuPy and NCCL.
# It does its work through the scripts that a checkout uses, so that what runs here is what runs there.
#
#   docker build -t sok_lite .
#   docker run --gpus all --ipc=host sok_lite bash scripts/demo.sh
#   docker run --gpus all --ipc=host sok_lite bash scripts/gpu_check.sh
#
# Without CUDA:
#
#   docker build -t sok_lite:cpu --build-arg BASE=ubuntu:24.04 --build-arg SETUP= .
#   docker run --ipc=host sok_lite:cpu bash scripts/demo.sh
#
# Without cuDNN: TensorFlow's wheels bring it, and a second one on the system's path mixes with it.
ARG BASE=nvidia/cuda:12.6.3-devel-ubuntu24.04
FROM $BASE
ARG SETUP=--gpu

# What pip cannot install. nvcc, NCCL and its headers are in the image of CUDA. No MPI: the tests use the
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
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY scripts/setup.sh scripts/build_horovod.py scripts/
COPY sok_lite/_version.py sok_lite/
RUN bash scripts/setup.sh $SETUP

COPY . .
# The CPU kernels, which are in the sources.
RUN bash scripts/setup.sh $SETUP
ENV PATH=/workspace/sok_lite/.venv/bin:$PATH
CMD ["bash", "scripts/gpu_check.sh"]
