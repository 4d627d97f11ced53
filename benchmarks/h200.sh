#!/usr/bin/env bash
# The numbers of docs/results.md on a machine of two GPUs, under ten minutes; speed is measured by `python -m benchmarks`.
#   benchmarks/h200.sh RESULTS MODEL DATA   the reference against Trainer and PEFT, real learning, equality in bfloat16
# RESULTS is a folder for raw rows; MODEL is SmolLM2-135M-Instruct; DATA is GSM8K's train.jsonl.
# Each case has its own time limit, so one that hangs costs only itself.
set -uo pipefail
results=$1
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
mkdir -p "$results" /tmp/logs

numbers() {
    local model=$1 data=$2 gpu method learn
    gpu=0
    for method in full lora; do
        CUDA_VISIBLE_DEVICES=$gpu timeout -k 10 200 python3 "$root/benchmarks/reference.py" --model "$model" --data "$data" --method $method \
            --steps 50 --output "$results/reference.jsonl" --work "/tmp/reference-$method" >"/tmp/logs/reference-$method.log" 2>&1 &
        gpu=1
    done
    wait
    tail -n 3 /tmp/logs/reference-*.log
    gpu=0
    for method in full lora; do
        # 10 % of the rows are held out, all of them evaluated
        CUDA_VISIBLE_DEVICES=$gpu timeout -k 10 240 python3 -m manyhands train "$root/examples/gsm8k-$method.yaml" \
            model.name="$model" data.train="$data" output.dir=/tmp/learn >"/tmp/logs/learn-$method.log" 2>&1 &
        gpu=1
    done
    wait
    for method in full lora; do
        tail -n 12 "/tmp/logs/learn-$method.log"
        cp "/tmp/learn/gsm8k-$method/report.json" "$results/gsm8k-$method.json"
        cp "/tmp/learn/gsm8k-$method/metrics.jsonl" "$results/gsm8k-$method.metrics.jsonl"
    done
    timeout -k 10 240 python3 -m tests.support.equality --device cuda >"$results/equality-h200.md" 2>/tmp/logs/equality.log ||
        tail -n 20 /tmp/logs/equality.log
}

numbers "${@:2}"
