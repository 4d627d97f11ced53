"""Compiled blocks are kept on the disk with their backward pass: the next start, or a restart, traces none anew."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.engine.activations import CONTEXTS, _checkpoint_in_training
from manyhands.engine.apply import _compile
from manyhands.kernels.lora import Layer, lora_linears


class Block(nn.Module):
    """Of a model with fused adapters: its layers are an autograd function of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16), requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(4, 16)), nn.Parameter(torch.randn(16, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (y,) = lora_linears(x, [Layer((self.weight,), None, self.a, self.b, 0.5)])
        return x + nn.functional.silu(y)


def train_once(mode: str) -> dict[str, Any]:
    torch.manual_seed(0)
    block: Any = Block()
    if mode != "none":
        block.forward = functools.partial(_checkpoint_in_training, block, block.forward, CONTEXTS[mode])
    _compile([block], None)
    block(torch.randn(3, 16)).sum().backward()
    caches = torch._dynamo.utils.counters["aot_autograd"]
    assert block.a.grad is not None
    return {"caches": dict(caches), "gradient": block.a.grad.tolist()}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective", "except_attention"])
def test_the_second_process_finds_forward_and_backward_pass_of_the_first(tmp_path: Path, mode: str) -> None:
    root = Path(__file__).parents[2]
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": f"{root / 'src'}:{root}"}
    found = []
    for _ in range(2):
        command = [sys.executable, "-m", "tests.engine.test_graph_cache", mode]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=300)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    first, second = found
    assert first["caches"]["autograd_cache_saved"] == second["caches"]["autograd_cache_hit"] == 1
    assert "autograd_cache_bypass" not in first["caches"]
    assert first["gradient"] == second["gradient"]


if __name__ == "__main__":
    print(json.dumps(train_once(sys.argv[1])))
