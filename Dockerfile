# The same image by a container engine, for whoever may not load an archive: the base of spec.json, the portable archive,
# the spec's settings. The file system is that of runtime.oci.tar; bytes of layers and config are the engine's own, so the
# digests are not, and no receipt speaks of it. `oci-builder build` makes the archives that are qualified.
#
#   docker build -t nemo-rl-v070-b200:r1 -f Dockerfile dist        (dist holds runtime.tar.gz; podman and buildah alike)
#
# tests/test_dockerfile.py holds every line against spec.json and compares the file systems.
ARG BASE=docker.io/nvidia/cuda:13.0.2-devel-ubuntu22.04@sha256:1c517d4fb96528c8999e14e6e6b16d7e2ff9ae8d194fd788d60fdc88e693e982
FROM ${BASE}

# An archive that is added from the context is unpacked: names, modes, owners, times and links are the archive's.
ADD runtime.tar.gz /

ENV NEMO_RL_PREBUILT_ENV_ROOT="/opt/nrl-runtime/envs" \
    PATH="/opt/nrl-runtime/envs/base/bin:/opt/nrl-runtime/bin:/usr/local/cuda/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
    PYTHONPATH="/opt/nrl-runtime/source" \
    PYTHONNOUSERSITE="1" \
    PYTHONDONTWRITEBYTECODE="1" \
    NO_VCS_VERSION="1" \
    CUDA_HOME="/usr/local/cuda" \
    CUDA_PATH="/usr/local/cuda" \
    CPLUS_INCLUDE_PATH="/usr/local/cuda/include/cccl" \
    NVTE_CUDA_INCLUDE_DIR="/usr/local/cuda/include" \
    TORCH_CUDA_ARCH_LIST="10.0" \
    CUDNN_HOME="/opt/nrl-runtime/envs/base/lib/python3.13/site-packages/nvidia/cudnn" \
    CUDNN_PATH="/opt/nrl-runtime/envs/base/lib/python3.13/site-packages/nvidia/cudnn" \
    NVRTC_HOME="/opt/nrl-runtime/envs/base/lib/python3.13/site-packages/nvidia/cu13" \
    CURAND_HOME="/opt/nrl-runtime/envs/base/lib/python3.13/site-packages/nvidia/cu13" \
    LD_LIBRARY_PATH="/opt/nrl-runtime/envs/base/lib/python3.13/site-packages/nvidia/cudnn/lib:/opt/nrl-runtime/envs/base/lib/python3.13/site-packages/nvidia/cu13/lib" \
    HF_HUB_OFFLINE="1" \
    TRANSFORMERS_OFFLINE="1" \
    HF_DATASETS_OFFLINE="1" \
    FLASHINFER_NO_DOWNLOAD="1" \
    VLLM_NO_USAGE_STATS="1" \
    DO_NOT_TRACK="1" \
    RAY_USAGE_STATS_ENABLED="0" \
    RAY_ENABLE_UV_RUN_RUNTIME_ENV="0" \
    WANDB_MODE="offline" \
    UV_OFFLINE="1" \
    PIP_NO_INDEX="1"

LABEL org.opencontainers.image.created="2025-12-01T00:00:00Z" \
      org.opencontainers.image.title="nemo-rl-v070-b200" \
      org.opencontainers.image.version="v070-r1" \
      org.opencontainers.image.ref.name="docker.io/library/nemo-rl-v070-b200:r1" \
      org.opencontainers.image.base.name="docker.io/nvidia/cuda:13.0.2-devel-ubuntu22.04" \
      org.opencontainers.image.base.digest="sha256:6b6617592b94e7dcc6ffbe6d00720eed27bc6e3b4f06b26b93b4070c31f57391" \
      io.github.oci-builder.prefix="/opt/nrl-runtime" \
      org.opencontainers.image.licenses="Apache-2.0"

CMD ["/bin/bash"]
