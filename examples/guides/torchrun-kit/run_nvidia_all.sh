#!/usr/bin/env bash
# Trains on all NVIDIA GPUs of this machine: bash run_nvidia_all.sh [RUN.yaml] [section.key=value ...]
# Without a run file it is configs/hf_standalone.yaml. A machine without a usable GPU is an error, never a CPU run; the
# plan shows the environment variables that the processes get.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${MANYHANDS_PYTHON:-$here/.venv/bin/python}
[ -x "$python" ] || python=python3
run=$here/configs/hf_standalone.yaml
if [ $# -gt 0 ] && [[ $1 != *=* && $1 != -* ]]; then
    run=$1
    shift
fi
# torch names the GPUs of both makers cuda.
exec "$python" -m manyhands train "$run" parallel.device=cuda "$@"
