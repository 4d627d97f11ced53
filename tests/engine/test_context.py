"""Packs that several ranks divide (``parallel.context_degree``): the run is that of one rank, whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support import equality
from tests.support.equality import Case
from tests.support.ranks import Ranks

PACKED = {"data.packing": True, "batch.micro_tokens": 256, "stop.max_steps": 4, "stop.epochs": 1}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    equality.write_workspace(folder, equality.FAMILY["float64"], num_hidden_layers=2)
    return folder


LAYOUTS = [
    ("full", 2, {"context_degree": 2, "strategy": "ddp"}),
    ("full", 4, {"context_degree": 4, "strategy": "fsdp"}),
    ("full", 4, {"context_degree": 2, "strategy": "fsdp", "activation_checkpointing": "full"}),
    ("full", 4, {"context_degree": 2, "strategy": "hsdp", "shard_degree": 2}),
    ("lora", 4, {"context_degree": 2, "strategy": "ddp"}),
]


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize(("method", "size", "keys"), LAYOUTS)
def test_ranks_that_divide_packs_train_as_one(
    method: str, size: int, keys: dict[str, Any], workspace: Path, world: Ranks
) -> None:
    one = equality.run_case(world, workspace, Case("one rank", 1, PACKED), "float64", method)
    case = Case("divided", size, PACKED | {f"parallel.{name}": value for name, value in keys.items()})
    divided = equality.run_case(world, workspace, case, "float64", method)
    assert equality.compare(one, divided).within("float64")
