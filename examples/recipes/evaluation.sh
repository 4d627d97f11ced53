#!/usr/bin/env bash
# A trained model beside its base: loss and scores of answers on rows that it has not seen.
#
#   bash examples/recipes/evaluation.sh [RUN] [DATA]
set -euo pipefail
run=${1:-runs/chat-lora}
data=${2:-data/test.jsonl}

manyhands eval "$run" --data "$data" --metrics loss,perplexity,accuracy,exact_match,rougeL --max-new-tokens 64
# The part after "In short: " alone, as --extract gsm8k takes what follows ####.
manyhands eval "$run" --data "$data" --metrics exact_match --extract 'In short: (.*)' --max-new-tokens 64 --no-base
