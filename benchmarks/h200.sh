#!/usr/bin/env bash
# Numbers of docs/results.md on GPUs; the speed of one row beside its peers is measured by `python -m benchmarks`.
#   benchmarks/h200.sh numbers RESULTS MODEL DATA   two GPUs, ten minutes: the reference against Trainer and PEFT, real
#                                                   learning, equality in bfloat16
#   benchmarks/h200.sh gsm8k RESULTS MODEL DATA     one GPU, seven minutes: exact match before and after, beside lm-eval
#   benchmarks/h200.sh unmeasured RESULTS [NAME...]  one GPU: rows that were not measured yet, all or those named
#   benchmarks/h200.sh survive RESULTS NAME...       two or four GPUs, nine minutes each: what saving and faults cost
#   benchmarks/h200.sh eight RESULTS [NAME...]       eight GPUs, two calls of ten minutes: rows, speed-up, other numbers of
#                                                   GPUs on the way, equality; GPUS=2 SHAPE=tiny tries it on a CPU
# RESULTS is a folder for raw rows; MODEL is SmolLM2-135M-Instruct; DATA is GSM8K's train.jsonl.
# Each case has its own time limit, so one that hangs costs only itself.
set -uo pipefail
command=$1 results=$(mkdir -p "$2" && cd "$2" && pwd)
root=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH=$root/src:$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
mkdir -p /tmp/logs

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
    timeout -k 10 240 python3 -m tests.support.equality --device cuda >"$results/equality-h200.jsonl" 2>/tmp/logs/equality.log ||
        tail -n 20 /tmp/logs/equality.log
}

gsm8k() {
    local model data work folder
    model=$(realpath "$1") data=$(realpath "$2") work=$(mktemp -d)
    mkdir "$work/tasks" && cd "$work" || exit
    head -n 6726 "$data" >train.jsonl
    tail -n +6727 "$data" >test.jsonl
    cat >tasks/held_out.yaml <<'TASK'
task: gsm8k_held_out
dataset_path: json
dataset_kwargs: {data_files: {test: test.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{answer.split('####')[-1].strip()}}"
generation_kwargs: {until: [], max_gen_toks: 256, do_sample: false}
filter_list: [{name: last-number, filter: [{function: regex, group_select: -1, regex_pattern: "(-?[$0-9.,]{2,})|(-?[0-9]+)"}, {function: take_first}]}]
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true, regexes_to_ignore: [",", "\\$", "\\.$"]}]
TASK
    timeout -k 10 200 python3 -m manyhands train "$root/examples/gsm8k-full.yaml" name=gsm8k model.name="$model" data.train=train.jsonl \
        data.validation=test.jsonl data.validation_fraction=0 parallel.gpus=1 >"$results/train.log" 2>&1
    timeout -k 10 240 python3 -m manyhands eval runs/gsm8k --data test.jsonl --metrics loss,exact_match --extract number \
        --batch-size 256 --output "$results/eval" >"$results/eval.log" 2>&1
    tail -n 4 "$results/eval.log"
    for folder in "$model" runs/gsm8k/model; do
        timeout -k 10 150 python3 -m lm_eval run --model hf --model_args "pretrained=$folder,dtype=bfloat16" --tasks gsm8k_held_out \
            --include_path tasks --apply_chat_template --batch_size 256 >"$results/lm-eval-$(basename "$folder").log" 2>&1
        grep exact_match "$results/lm-eval-$(basename "$folder").log"
    done
}

unmeasured() {
    local case="python3 -m manyhands.bench.case --output $results/rows.jsonl" vision="python3 -m benchmarks.vision --output $results/rows.jsonl"
    measure 70b-fp8 200 $case --row 70b-lora --steps 8 --warm 3 --label fp8-alone --profile $results/70b-fp8.txt kernels.linear=fp8 model.frozen_dtype=fp8
    # on four GPUs, two samples of 8,192 each; the optimizer's states are 263 GiB of pinned host memory
    measure 70b-full-x4 480 torchrun --nproc_per_node=4 -m manyhands.bench.case --output "$results/rows.jsonl" --row 8b-full --shape llama70b \
        --rows 2 --steps 3 --warm 1 --label 70b-full --profile "$results/70b-full.txt" model.master_dtype=bfloat16 parallel.offload=optimizer
    measure 8b-lora 60 $case --row 8b-lora --label today
    measure 8b-fp8 60 $case --row 8b-lora --label fp8-alone kernels.linear=fp8 model.frozen_dtype=fp8
    local host="$case --row 8b-full --warm 1 --limit 16 model.master_dtype=bfloat16 parallel.offload=all"  # pins 80 GiB first
    measure 8b-full-16 200 $host --rows 3 --steps 4 --label 16-GiB batch.micro_tokens=24576
    measure 8b-full-16-unclipped 200 $host --rows 3 --steps 4 --label 16-GiB-unclipped batch.micro_tokens=24576 optimizer.max_grad_norm=0
    measure 8b-full-16-32k 200 $host --rows 4 --steps 4 --label 16-GiB-32k batch.micro_tokens=32768
    # FSDP2 alone: no block's weights come ahead, and the norm is a pass over gradients in host memory
    measure 8b-full-16-without 200 ${host/manyhands.bench.case/benchmarks.without_prefetch} --rows 3 --steps 4 \
        --label 16-GiB-without-prefetch batch.micro_tokens=24576
    measure 8b-full-16-accumulated 280 $host --rows 8 --steps 3 --label 16-GiB-accumulated batch.micro_tokens=32768
    measure 8b-qlora 80 $case --row 8b-qlora --label today
    measure 8b-lora-45 60 $case --row 8b-lora --limit 45 --label 45-GiB
    measure 8b-lora-selective 60 $case --row 8b-lora --label selective parallel.activation_checkpointing=selective
    measure 8b-qlora-65 80 $case --row 8b-qlora --limit 65 --label 65-GiB
    measure 8b-qlora-selective 80 $case --row 8b-qlora --label selective parallel.activation_checkpointing=selective
    local long="$case --row 8b-lora --rows 1 --warm 1"
    measure 32k 90 $long --length 32768 --steps 6 --label today
    measure 32k-fp8 90 $long --length 32768 --steps 6 --label fp8 kernels.linear=fp8
    measure 128k-fp8 260 $long --length 131072 --steps 2 --label fp8 kernels.linear=fp8
    measure trl-vision 90 python3 -m benchmarks.peer_trl_vision --output "$results/rows.jsonl"
    measure vision 80 $vision --case qwen3vl4b-lora-images --label today
    measure everything-recompute 80 $vision --case gemma4b-everything-recompute --label today
    measure answers 240 python3 -m benchmarks.generate --shape llama8b --prompts 1024 --gpus 1 --output "$results/generate.jsonl"
    mkdir -p /tmp/checkpoint
    measure checkpoint 250 python3 -m benchmarks.checkpoint --gib 24 --device cuda --folder /tmp/checkpoint
    local survive="python3 -m benchmarks.survive --output $results/survive.jsonl --folder /tmp/survive --every 60 --budget 515"
    # losses are equal bit for bit with that key alone
    measure survive-1b 530 $survive --shape llama1b --steps 40 --seconds 240 --parts undisturbed,kills kernels.deterministic=true
    measure survive-3b 530 $survive --shape llama3b --samples 4 --steps 40 --seconds 180 --parts undisturbed,kills
    measure survive-saved 300 $survive --shape llama1b --steps 130 --save-every 60 --parts undisturbed,checkpoint
    measure kept 200 python3 -m benchmarks.foresight measure --output "$results/foresight.jsonl" --budget 190 --kept \
        --case qwen06b,lora,1x16x4096,mix,activation_checkpointing=none
    measure foresight 560 python3 -m benchmarks.foresight measure --output "$results/foresight.jsonl" \
        --have "$root"/benchmarks/results/h200-foresight-*.jsonl --budget 540 --calibrate --only 1
    measure foresight-x2 560 python3 -m benchmarks.foresight measure --output "$results/foresight.jsonl" \
        --have "$root"/benchmarks/results/h200-foresight-*.jsonl --budget 540 --calibrate  # also of two GPUs
    measure layouts 560 python3 -m benchmarks.layouts measure --output "$results/layouts.jsonl" --have "$root"/benchmarks/results/h200-*.jsonl --budget 540
}

survive() {  # a checkpoint of 3B full takes 39 GB of the disk, of 8B full 96 GB
    local survive="python3 -m benchmarks.survive --output $results/survive.jsonl --folder ${SURVIVE_FOLDER:-/tmp/survive} --every 60 --budget 515"
    local kills="--parts undisturbed,kills --undisturbed-steps 90 --seconds 180"
    measure 8b-lora-x2 530 $survive --gpus 2 --shape llama8b --method lora --steps 40 --save-every 15 --seconds 180
    measure 3b-full-x2 530 $survive --gpus 2 --shape llama3b --steps 40 $kills
    measure 8b-full-x4 530 $survive --gpus 4 --shape llama8b --samples 16 --steps 30 --warm 12 --seconds 190 --parts undisturbed,kills \
        kernels.deterministic=true
    measure 8b-full-x4-saved 530 $survive --gpus 4 --shape llama8b --samples 16 --steps 150 --save-every 70 --parts undisturbed,checkpoint
    measure 3b-full-x4-resized 530 $survive --gpus 4 --shape llama3b --samples 16 --steps 45 --parts undisturbed,resize
}

eight() {
    local gpus=${GPUS:-8} small=${SHAPE:+--shape $SHAPE --length 64} n
    local case="-m manyhands.bench.case --output $results/rows.jsonl"
    local lora="$case --row 8b-lora-ddp --steps 8 --warm 3 $small --label speed-up" ranks="torchrun --standalone --nproc_per_node"
    # one GPU and all of them alone on the machine; what lies between does not share a GPU
    measure speed-up-1 90 python3 $lora
    measure speed-up-"$gpus" 90 $ranks "$gpus" $lora parallel.strategy=ddp
    if ((gpus == 8)); then
        CUDA_VISIBLE_DEVICES=0,1 measure speed-up-2 90 $ranks 2 $lora parallel.strategy=ddp &
        CUDA_VISIBLE_DEVICES=2,3,4,5 measure speed-up-4 90 $ranks 4 $lora parallel.strategy=ddp &
        wait
    fi
    for n in 8b-full 8b-full-fp8 70b-lora; do
        measure $n 150 $ranks "$gpus" $case --row $n --steps 8 --warm 3 $small --label eight
    done
    # Qwen3-32B full as the second example of Synth's guide: 64 samples of 4,096 tokens a step, sharded, recomputed
    measure 32b-full 240 $ranks "$gpus" $case --row 8b-full ${small:---shape qwen32b --length 4096} --rows 8 --steps 3 --warm 1 --label 32b-full \
        parallel.strategy=fsdp parallel.reshard_after_forward=true parallel.activation_checkpointing=full
    measure resized 200 python3 -m benchmarks.survive --output "$results/survive.jsonl" --folder "${SURVIVE_FOLDER:-/tmp/survive}" --gpus "$gpus" \
        ${small:---shape smollm135m --length 1024} --samples 64 --steps 24 --undisturbed-steps 24 --budget 190 --parts undisturbed,resize \
        kernels.deterministic=true parallel.compile=false
    ((gpus < 8)) || measure equality 240 python3 -m tests.support.equality --device "${DEVICE:-cuda}" --processes 8 --methods full lora
}

measure() {
    local name=$1 limit=$2 begin=$SECONDS
    [[ -z ${names:-} || " $names " == *" $name "* ]] || return 0
    PYTHONFAULTHANDLER=1 timeout -s ABRT -k 10 "$limit" "${@:3}" >"$results/$name.log" 2>&1  # says where it was
    echo "$name: exit code $?, $((SECONDS - begin)) s"
    tail -n 2 "$results/$name.log" | cut -c1-300
}

case $command in
numbers | gsm8k) "$command" "${@:3}" ;;
unmeasured | survive | eight) cd "$root" && names="${*:3}" && "$command" ;;
*) echo "benchmarks/h200.sh: no command $command" >&2 && exit 2 ;;
esac
