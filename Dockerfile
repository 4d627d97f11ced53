# manyhands in a container, for the CPU or for NVIDIA GPUs:
#
#   docker build -t manyhands .
#   docker build -t manyhands:cuda --build-arg BASE=nvidia/cuda:13.0.1-runtime-ubuntu24.04 .
#   docker run --rm --gpus all --ipc=host -v "$PWD:/work" manyhands:cuda train run.yaml
#
# torch's wheel brings the CUDA libraries, so that the base needs nothing but Python 3.11 or newer, or apt to install it.
# --ipc=host: processes that prepare batches, and NCCL, use shared memory. The hub's cache is in the home
# folder of the container's user (HF_HOME): mount a volume there to keep it.

ARG BASE=python:3.11-slim
FROM ${BASE}

# build-essential: Triton and torch.compile build small modules at run time.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential ca-certificates git \
    && if ! command -v python3 > /dev/null; then \
        apt-get install --yes --no-install-recommends python3 python3-dev python3-venv; \
    fi \
    && rm -rf /var/lib/apt/lists/*

# torch alone and first: this layer is the largest and changes least.
# EXTRAS: those of pyproject.toml, by commas.
ARG EXTRAS=peft,qlora,serve
ENV PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /opt/manyhands
COPY constraints.txt ./
RUN python3 -m venv /opt/venv \
    && pip install -c constraints.txt "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml setup.py README.md LICENSE ./
COPY docs/changelog.md docs/
COPY src src
RUN pip install -c constraints.txt ".[${EXTRAS}]" && manyhands --version

WORKDIR /work
ENTRYPOINT ["manyhands"]
CMD ["--help"]
