#!/usr/bin/env bash
# The measurements of docs/results.md on a machine of two GPUs, in two parts of under ten minutes each.
#   bench/h200.sh speed RESULTS PEERS      ours beside TRL, side by side: one GPU each, then both GPUs each
#   bench/h200.sh numbers RESULTS MODEL DATA   the reference against Trainer and PEFT, real learning, equality in bfloat16
# RESULTS is a folder for raw rows; PEERS holds peer_trl.py and shapes.py; MODEL is SmolLM2-135M-Instruct; DATA is GSM8K's train.jsonl.
# Each case has its own time limit, so one that hangs costs only itself.
set -uo pipefail
part=$1 results=$2
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$root/src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
mkdir -p "$results" /tmp/logs

# on GPUS PORT LIMIT NAME COMMAND...: runs a command as one process for each GPU named
on() {
    local gpus=$1 port=$2 limit=$3 name=$4 begin=$SECONDS
    shift 4
    local count
    count=$(tr ',' '\n' <<<"$gpus" | wc -l)
    CUDA_VISIBLE_DEVICES=$gpus timeout -k 10 "$limit" torchrun --nproc_per_node="$count" --master_port="$port" "$@" >"/tmp/logs/$name.log" 2>&1
    local code=$?
    echo "$name: exit $code after $((SECONDS - begin)) s"
    if [ $code -ne 0 ]; then
        tail -n 25 "/tmp/logs/$name.log"
        cp "/tmp/logs/$name.log" "$results/$name.failed.log"
    fi
}

ours() { on "$1" "$2" "$3" "ours-$4" "$root/bench/ours.py" --output "$results/ours.jsonl" --label "$4" --work "/tmp/bench-$2" "${@:5}"; }
peer() { OUT=$results on "$1" "$2" "$3" "peer-$4" "$peers/peer_trl.py" --label "$4" --liger --steps 25 --warm 5 --len 4096 "${@:5}"; }

speed() {
    peers=$1
    ours 0 29501 200 lora --shape llama8b --rows 2 &
    peer 1 29502 200 trl-lora --model llama8b --mode lora --bs 2 &
    wait
    ours 0 29501 150 lora-recompute --shape llama8b --rows 2 parallel.recompute=block &
    peer 1 29502 150 trl-lora-recompute --model llama8b --mode lora --bs 2 --ckpt &
    wait
    ours 0 29501 120 full-1b --shape llama1b --method full --rows 4 &
    peer 1 29502 120 trl-full-1b --model llama1b --mode full --bs 4 &
    wait
    ours 0,1 29501 150 lora-ddp --shape llama8b --rows 2
    ours 0,1 29501 170 full-fsdp --shape llama8b --method full --rows 2
    peer 0,1 29502 170 trl-full-fsdp --model llama8b --mode full --bs 2 --ckpt --fsdp
}

numbers() {
    local model=$1 data=$2 gpu method learn
    gpu=0
    for method in full lora; do
        CUDA_VISIBLE_DEVICES=$gpu timeout -k 10 200 python3 "$root/bench/reference.py" --model "$model" --data "$data" --method $method \
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
    timeout -k 10 240 python3 -m manyhands.testing.equality --device cuda >"$results/equality-h200.md" 2>/tmp/logs/equality.log ||
        tail -n 20 /tmp/logs/equality.log
}

"$part" "${@:3}"
