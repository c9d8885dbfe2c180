# syntax=docker/dockerfile:1
# rayfleet on NVIDIA GPUs:   docker build -f deploy/images/cuda.Dockerfile -t rayfleet:cuda .
# PyTorch's wheels bring the CUDA libraries; the host brings the driver (nvidia-container-toolkit):
# 580 or newer for those of the public index, which are built for CUDA 13. TORCH_INDEX names another
# of PyTorch's own (cu128 and the like, for drivers from 525 on).
ARG PYTHON=3.11-slim-bookworm

FROM python:${PYTHON} AS build
ARG TORCH_INDEX=""
# Optional attention backends, such as EXTRA_PACKAGES="flashinfer-python".
ARG EXTRA_PACKAGES=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/venv/bin:$PATH
WORKDIR /opt/rayfleet
RUN python -m venv /opt/venv
COPY constraints.txt ./
RUN pip install ${TORCH_INDEX:+--index-url "${TORCH_INDEX}"} "$(grep '^torch==' constraints.txt)"
# What changes seldom comes first: the dependencies of an empty project, then the project.
COPY pyproject.toml README.md LICENSE ./
# hadolint ignore=SC2086
RUN mkdir cluster router worker kernels \
    && pip install -c constraints.txt -e ".[tracing]" ${EXTRA_PACKAGES}
COPY kernels kernels
COPY worker worker
COPY router router
COPY cluster cluster
COPY deploy deploy
RUN pip install --no-deps -e . && python -m compileall -q /opt/rayfleet

FROM python:${PYTHON}
# Triton compiles its launchers with gcc; KubeRay's probes use wget.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends g++ wget \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 rayfleet \
    && useradd --uid 1000 --gid 1000 --no-create-home --home-dir /tmp/rayfleet rayfleet \
    && install -d -o 1000 -g 1000 /models
COPY --from=build /opt/venv /opt/venv
COPY --from=build /opt/rayfleet /opt/rayfleet
# Nothing but /tmp and /models is written to: the root may be mounted read-only.
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp/rayfleet \
    XDG_CACHE_HOME=/tmp/rayfleet/cache \
    HF_HOME=/models/huggingface \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /opt/rayfleet
USER 1000:1000
EXPOSE 8000
ENTRYPOINT ["rayfleet"]
CMD ["serve", "--host", "0.0.0.0"]
