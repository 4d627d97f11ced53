#!/usr/bin/env bash
# An OpenAI-compatible endpoint on this machine, one question, and the end. vLLM serves where it is installed.
#
#   bash examples/recipes/serving.sh [RUN] [PORT]
set -euo pipefail
run=${1:-runs/chat-lora}
port=${2:-8000}

manyhands serve "$run" --port "$port" &
server=$!
trap 'kill $server 2> /dev/null || true; wait $server || true' EXIT
until curl --silent --fail "http://127.0.0.1:$port/health" > /dev/null; do
    kill -0 $server || exit 1
    sleep 0.5
done
curl --silent --fail-with-body "http://127.0.0.1:$port/v1/chat/completions" -H 'content-type: application/json' \
    -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 64}'
echo
