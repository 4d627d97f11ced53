"""A mixture of experts trains alike on one process and on two, under each strategy."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.equality import Case, compare, run_case, write_workspace
from tests.support.ranks import Ranks

KEYS = {"data.packing": True, "batch.micro_tokens": 512, "stop.max_steps": 6}


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_two_processes_are_as_one(world: Ranks, tmp_path: Path, method: str) -> None:
    write_workspace(tmp_path, "qwen3_moe", num_hidden_layers=2, num_experts=8)
    one = run_case(world, tmp_path, Case("one", 1, {"parallel.strategy": "single"} | KEYS), "float32", method)
    for strategy in ("ddp", "fsdp"):
        keys = {"parallel.strategy": strategy, "parallel.activation_checkpointing": "full"} | KEYS
        two = run_case(world, tmp_path, Case(strategy, 2, keys), "float32", method)
        assert compare(one, two).within("float32"), strategy
