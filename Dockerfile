# The images: TensorFlow, Horovod and sok_lite, a user who is not root, and nothing that only tests or builds.
#
#   docker build --target cpu -t sok_lite:cpu .
#   docker build --target gpu -t sok_lite:gpu .     CUDA 12, CuPy, Horovod with NCCL
#   docker build --target mpi -t sok_lite:mpi .     gpu, and Open MPI and an SSH server, for Kubeflow's MPI Operator
#   docker build --target mpi --build-arg RUNTIME=cpu -t sok_lite:mpi-cpu .
#
# docs/install.md says how they are used, and how the locks docker/*.txt are made anew.
ARG RUNTIME=gpu

# ---- environments: compilers stay here, and only /opt/venv goes on --------------------------------------------------
FROM ubuntu:24.04 AS build-cpu
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-venv
ENV PATH=/opt/venv/bin:$PATH SOK_LITE_CACHE=/tmp/cache
WORKDIR /build
RUN python3 -m venv /opt/venv
# First what changes seldom: editing a kernel does not build Horovod again.
COPY docker/cpu.txt ./
RUN pip install --no-cache-dir --no-deps --require-hashes -r cpu.txt
COPY scripts/build_horovod.py ./
RUN python build_horovod.py && pip uninstall -y cmake ninja
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY kernels kernels
COPY sok_lite sok_lite
RUN pip install --no-cache-dir --no-deps .

# nvcc and NCCL's headers are in this image of CUDA. Without cuDNN: TensorFlow's wheels bring it, and a second one on
# the system's path mixes with it.
FROM nvidia/cuda:12.6.3-devel-ubuntu24.04 AS build-gpu
RUN apt-get update && apt-get install -y --no-install-recommends g++ python3-dev python3-venv
ENV PATH=/opt/venv/bin:$PATH SOK_LITE_CACHE=/tmp/cache
WORKDIR /build
RUN python3 -m venv /opt/venv
COPY docker/gpu.txt ./
RUN pip install --no-cache-dir --no-deps --require-hashes -r gpu.txt
COPY scripts/build_horovod.py ./
RUN python build_horovod.py --gpu && pip uninstall -y cmake ninja
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY kernels kernels
COPY sok_lite sok_lite
RUN pip install --no-cache-dir --no-deps .

# ---- what runs ------------------------------------------------------------------------------------------------------
FROM ubuntu:24.04 AS cpu
RUN apt-get update && apt-get install -y --no-install-recommends openssh-client python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --shell /bin/bash --uid 10001 sok
COPY --from=build-cpu /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /home/sok
# By number: Kubernetes' runAsNonRoot knows no names.
USER 10001:10001
CMD ["sok-lite", "doctor"]

# NCCL and CUDA's runtime, which Horovod is linked with, are in this image of CUDA.
FROM nvidia/cuda:12.6.3-runtime-ubuntu24.04 AS gpu
RUN apt-get update && apt-get install -y --no-install-recommends openssh-client python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --shell /bin/bash --uid 10001 sok
COPY --from=build-gpu /opt/venv /opt/venv
# Only the driver's folders on the library path: what is there comes before the CUDA libraries that TensorFlow's wheels
# bring, and those of the image are older than some of these can use.
ENV PATH=/opt/venv/bin:$PATH \
    LD_LIBRARY_PATH=/usr/local/nvidia/lib:/usr/local/nvidia/lib64
WORKDIR /home/sok
USER 10001:10001
CMD ["sok-lite", "doctor"]

# A worker of an MPIJob: the SSH server runs as the user, on a port above 1024, with the keys that the operator mounts.
FROM ${RUNTIME} AS mpi
USER root
# The server's package makes host keys, which all containers would share.
RUN apt-get update && apt-get install -y --no-install-recommends openmpi-bin openssh-server \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*
COPY docker/mpi.txt /tmp/
RUN pip install --no-cache-dir --no-deps --require-hashes -r /tmp/mpi.txt
COPY docker/ssh_config /etc/ssh/ssh_config.d/sok_lite.conf
COPY docker/sshd_config /home/sok/.sshd_config
USER 10001:10001
EXPOSE 2222
CMD ["/usr/sbin/sshd", "-De", "-f", "/home/sok/.sshd_config"]
