"""``python -m tests.engine.tiles_peak TOKENS TILE``: what one step of a tiny Llama with a huge MLP, its blocks computed
again, takes of a CPU's memory. TILE 0: the MLP as a whole.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from manyhands.engine.activations import checkpoint_blocks
from manyhands.engine.tiles import tile_mlps


def build(tile: int, inner: int = 4096) -> Any:
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "vocab_size": 32}
    model = LlamaForCausalLM(LlamaConfig(intermediate_size=inner, **shape)).train()
    checkpoint_blocks(model, ["full", "full"], compiled=False)
    if tile:
        tile_mlps(model, tile)
    return model


def step(model: Any, num_tokens: int) -> None:
    model.model(input_ids=torch.zeros(1, num_tokens, dtype=torch.long), use_cache=False)[0].sum().backward()


def peak_bytes(num_tokens: int, tile: int) -> int:
    """The most that tensors of one step held at a time, by torch's profiler."""
    model = build(tile)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step(model, num_tokens)
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.load(open(file.name, encoding="utf-8"))["traceEvents"]
    sizes = [(event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"]
    held = most = 0
    for _, size in sorted(sizes, key=lambda pair: pair[0]):
        held += size
        most = max(most, held)
    return most


if __name__ == "__main__":
    made = build(int(sys.argv[2]))
    step(made, 128)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(made, int(sys.argv[1]))
    print(f"{(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 2**10:,.0f} MiB")
