"""LoftQ's factors are the same, bit for bit, for any number of ranks and any sharding, and the ranks share the work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.loftq_ranks import begin
from tests.support.ranks import Ranks
from tests.support.tiny import tiny_plan, tiny_run, write_tiny_model

pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.distributed

WIDE = {"hidden_size": 96, "intermediate_size": 352}  # 2 or 3 rows of codes in the MLP, 1 in the attention
WAYS: dict[str, dict[str, Any]] = {
    "ddp 2": {"strategy": "ddp", "world_size": 2},
    "fsdp 2": {"strategy": "fsdp", "world_size": 2},
    "fsdp 4": {"strategy": "fsdp", "world_size": 4},
    "hybrid 4": {"strategy": "hsdp", "world_size": 4, "shard_degree": 2},
    "fsdp 2, all in host memory": {"strategy": "fsdp", "world_size": 2, "offload": "all"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("loftq"), "llama", "bfloat16", with_tokenizer=False, **WIDE)


@pytest.mark.ci
@pytest.mark.parametrize("init", ["pretrained", "random"])
@pytest.mark.parametrize("way", WAYS)
def test_factors_do_not_depend_on_the_ranks(world: Ranks, folder: Path, way: str, init: str) -> None:
    config = tiny_run(folder, "qlora", rank=40)  # more than the keys' 32 outputs
    config = config.model_copy(update={"model": config.model.model_copy(update={"init": init})})
    dtypes = {"compute_dtype": "bfloat16", "frozen_dtype": "bfloat16"}
    one = begin(tiny_plan(folder, **dtypes), config)
    assert (
        0.3 < one["share"] < 1 and len(one["factors"]) == 42 and all(factor.any() for factor in one["factors"].values())
    )
    plan = tiny_plan(folder, **(dtypes | WAYS[way]))
    found = world.run("tests.engine.loftq_ranks:begin", plan, config, world_size=plan.layout.world_size)
    for result in found:
        assert result["share"] == pytest.approx(one["share"], rel=1e-6)
        for name, factor in one["factors"].items():
            assert np.array_equal(result["factors"][name], factor), name
    counts = [len(result["read"]) for result in found]
    assert sorted(name for result in found for name in result["read"]) == sorted(one["read"])  # each weight by one rank
    assert max(counts) - min(counts) <= 1
