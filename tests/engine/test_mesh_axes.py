"""An axis of the mesh that nothing in the package knows: two ranks along ``context`` divide the tokens of each
micro-batch, and the run is the run of one rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.launch.run.prepare import gather_facts
from manyhands.planner.layout import Mesh, change
from manyhands.planner.search import plan as make_plan
from manyhands.training.step import StepWork
from manyhands.worker.rank import Rank
from tests.support import equality
from tests.support.equality import Case, Curve
from tests.support.ranks import Ranks

PACKED = {"data.packing": True, "batch.micro_tokens": 256}
FAMILY, DTYPE = equality.FAMILY["float64"], "float64"


def divide_tokens(rank: Rank, works: Iterator[StepWork]) -> Iterator[StepWork]:
    """Keeps the labels of this rank's stretch of every micro-batch."""
    mesh = rank.plan.layout.mesh
    own = mesh.coordinates(rank.world.rank)["context"]

    def keep(batch: dict[str, Any]) -> dict[str, Any]:
        labels = batch["labels"]
        stretch = torch.arange(labels.shape[1]) * mesh.context // labels.shape[1]
        return batch | {"labels": labels.masked_fill(stretch != own, -100)}

    for work in works:
        yield replace(work, micro_batches=(keep(batch) for batch in work.micro_batches))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("axes")
    equality.write_workspace(folder, FAMILY, num_hidden_layers=2)
    return folder


@pytest.fixture(scope="module")
def reference(workspace: Path, world: Ranks) -> Curve:
    return equality.run_case(world, workspace, Case("one rank", 1, PACKED), DTYPE, "full")


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        ("ddp", Mesh(context=2)),
        ("fsdp", Mesh(context=2)),
        ("ddp", Mesh(replicate=2, context=2)),
        ("fsdp", Mesh(shard=2, context=2)),
        ("hsdp", Mesh(replicate=2, context=2)),
    ],
)
def test_ranks_that_divide_a_sample_are_one_data_rank(
    strategy: Any, mesh: Mesh, workspace: Path, reference: Curve, world: Ranks
) -> None:
    case = Case("context", mesh.data_parallel_degree, PACKED)
    config = equality.base_config(workspace, DTYPE, "full", case, "cpu")
    plan = make_plan(config, gather_facts(config, saves=False, identify=False, report=lambda _: None))
    plan = plan.model_copy(update={"layout": change(plan.layout, strategy=strategy, mesh=mesh)})
    arguments = (config.model_dump_json(), plan.model_dump_json(), "", divide_tokens)
    curves = world.run("tests.support.equality:run_rank", *arguments, world_size=mesh.world_size)
    assert {curve.losses for curve in curves} == {curves[0].losses}
    assert equality.compare(reference, curves[0]).within(DTYPE)
