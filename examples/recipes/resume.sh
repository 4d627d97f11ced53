#!/usr/bin/env bash
# A run that is interrupted after its first checkpoint, on two GPUs (or two CPU processes), and resumed on one: the samples
# of each step, and the batch, are those of a run that was not interrupted.
#
#   bash examples/recipes/resume.sh [RUN.yaml] [key=value ...]
set -euo pipefail
run=${1:-examples/recipes/chat-lora.yaml}
settings=("${@:2}")

# Stands for any interruption: Ctrl-C, SIGTERM, the end of a job's time, a machine that dies.
manyhands train "$run" "${settings[@]}" checkpoint.every_steps=1 parallel.gpus=2 &
train=$!
until compgen -G "${FOLDER:-runs/chat-lora}/checkpoints/*/manifest.json" > /dev/null || ! kill -0 $train 2> /dev/null; do
    sleep 0.2
done
kill -TERM $train 2> /dev/null || true
wait $train || echo "interrupted with exit code $?: the state is saved"

# The same run: only keys of how the work is done (parallel.*, batch.micro_*, log.*) may differ.
manyhands train "$run" "${settings[@]}" checkpoint.every_steps=1 parallel.gpus=1
