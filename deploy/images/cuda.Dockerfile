# syntax=docker/dockerfile:1
# rayfleet on NVIDIA GPUs:   docker build -f deploy/images/cuda.Dockerfile -t rayfleet:cuda .
# PyTorch's wheels include the CUDA libraries; the host provides the driver (nvidia-container-toolkit):
# 580 or newer for the wheels of the public index, which are built for CUDA 13. For drivers from 525:
#   make lock ARGS="--torch-index https://download.pytorch.org/whl/cu128"
#   docker build -f deploy/images/cuda.Dockerfile -t rayfleet:cuda \
#     --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu128 \
#     --build-arg TORCH_LOCK=deploy/supply/cu128.txt .
ARG PYTHON=3.11-slim-bookworm
# Digest of that tag (sha256:...), set for releases, see deploy/supply/base.env.
ARG PYTHON_DIGEST=""

FROM python:${PYTHON}${PYTHON_DIGEST:+@${PYTHON_DIGEST}} AS build
# Packages are verified against the hashes in the locks that `make lock` writes.
ARG TORCH_INDEX=""
ARG TORCH_LOCK=deploy/supply/cuda.txt
# Optional attention backends, such as EXTRA_PACKAGES="flash-attn-4[cu13]==4.0.0b36"; not covered by the locks.
ARG EXTRA_PACKAGES=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/venv/bin:$PATH
WORKDIR /opt/rayfleet
RUN python -m venv /opt/venv
# Layers that rarely change first: dependencies, then the project.
COPY deploy/supply/common.txt /opt/locks/common.txt
COPY ${TORCH_LOCK} /opt/locks/torch.txt
RUN pip install --require-hashes --only-binary :all: \
    ${TORCH_INDEX:+--extra-index-url "${TORCH_INDEX}"} \
    -r /opt/locks/common.txt -r /opt/locks/torch.txt
COPY pyproject.toml README.md LICENSE constraints.txt ./
# hadolint ignore=SC2086
RUN test -z "${EXTRA_PACKAGES}" || pip install -c constraints.txt ${EXTRA_PACKAGES}
COPY kernels kernels
COPY worker worker
COPY router router
COPY cluster cluster
COPY deploy deploy
RUN pip install --no-deps --no-build-isolation -e . && pip check \
    && python -m compileall -q /opt/rayfleet

FROM python:${PYTHON}${PYTHON_DIGEST:+@${PYTHON_DIGEST}}
ARG PYTHON
ARG PYTHON_DIGEST
LABEL org.opencontainers.image.base.name="docker.io/library/python:${PYTHON}" \
    org.opencontainers.image.base.digest="${PYTHON_DIGEST}"
# Triton compiles its launchers with gcc; KubeRay's probes use wget.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 rayfleet \
    && useradd --uid 1000 --gid 1000 --no-create-home --home-dir /tmp/rayfleet rayfleet \
    && install -d -o 1000 -g 1000 /models
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/rayfleet /opt/rayfleet
# Only /tmp and /models are written to, so the root file system can be read-only. Compiled kernels are
# reused if a volume is mounted at /models.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp/rayfleet \
    XDG_CACHE_HOME=/tmp/rayfleet/cache \
    HF_HOME=/models/huggingface \
    TRITON_CACHE_DIR=/models/triton \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /opt/rayfleet
USER 1000:1000
EXPOSE 8000
ENTRYPOINT ["rayfleet"]
CMD ["serve", "--host", "0.0.0.0"]
