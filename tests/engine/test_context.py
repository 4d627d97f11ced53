"""Packs that several ranks divide (``parallel.context_degree``): the run is that of one rank, whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manyhands.planner.layout import change
from manyhands.planner.search import plan
from manyhands.planner.types import Plan
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


@pytest.mark.distributed
@pytest.mark.parametrize("degree", [2, 4])  # which exchange heads, and which gather keys: the model has two
def test_mlps_by_tiles_on_ranks_that_divide_packs(
    degree: int, workspace: Path, world: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = equality.run_case(world, workspace, Case("one rank", 1, PACKED), "float64", "full")
    layouts = []

    def with_tiles(*arguments: Any) -> Plan:
        made = plan(*arguments)
        layouts.append(change(made.layout, mlp_tile_tokens=16))
        return made.model_copy(update={"layout": layouts[-1]})

    monkeypatch.setattr(equality, "make_plan", with_tiles)
    keys = {"context_degree": degree, "strategy": "fsdp", "activation_checkpointing": "full"}
    case = Case("tiles", degree, PACKED | {f"parallel.{name}": value for name, value in keys.items()})
    tiled = equality.run_case(world, workspace, case, "float64", "full")
    assert equality.compare(one, tiled).within("float64")
    assert layouts[0].exchanges_heads is (degree == 2) and layouts[0].full_micro_tokens > 3 * 16


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
