#!/usr/bin/env bash
# Trains on all AMD (ROCm) GPUs of this machine, as run_nvidia_all.sh does on NVIDIA's: torch names both cuda.
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_nvidia_all.sh" "$@"
