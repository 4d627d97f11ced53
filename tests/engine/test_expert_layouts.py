"""A mixture of experts trains alike on one process and on several, under each strategy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.engine.test_layouts import RAGGED, merged
from tests.support.equality import Case, Fault, compare, run_case, write_workspace
from tests.support.experts import write_mxfp4_model
from tests.support.ranks import Ranks
from tests.support.tiny import tiny_plan, tiny_run, write_tiny_model

KEYS = {"data.packing": True, "batch.micro_tokens": 512, "stop.max_steps": 6}
ROWS = {"data.packing": False, "stop.max_steps": 3, "parallel.strategy": "single"}
BALANCE = {"moe.balance": 0.5}
RUN_STEPS = "tests.engine.strategy_ranks:run_steps"


def write_mixture(folder: Path) -> None:
    write_workspace(folder, "qwen3_moe", num_hidden_layers=2, num_experts=8)


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize("method", ["full", "lora", "qlora", "lora beside MXFP4"])
def test_several_processes_are_as_one(world: Ranks, tmp_path: Path, method: str) -> None:
    """DDP and hybrid of the others are in ``test_a_run_goes_on_in_any_layout``."""
    layouts: list[tuple[str, int, dict[str, int]]] = [("fsdp", 2, {})]
    if method == "lora beside MXFP4":
        method = "lora"
        layouts += [("ddp", 2, {}), ("hsdp", 4, {"parallel.shard_degree": 2})]
        write_workspace(tmp_path)
        write_mxfp4_model(tmp_path / "model")
    else:
        write_mixture(tmp_path)
    one = run_case(world, tmp_path, Case("one", 1, {"parallel.strategy": "single"} | KEYS), "float32", method)
    if method != "qlora":  # whose rows of 16,384 values are longer than half of these experts
        layouts.append(("fsdp", 4, {"parallel.expert_degree": 2}))
    for strategy, size, more in layouts:
        keys = {"parallel.strategy": strategy, "parallel.activation_checkpointing": "full"} | KEYS | more
        several = run_case(world, tmp_path, Case(strategy, size, keys), "float32", method)
        assert compare(one, several).within("float32"), strategy
        assert several.figures == one.figures, strategy


@pytest.mark.ci
@pytest.mark.distributed
def test_balance_and_load_are_the_same_for_any_micro_batches_and_ranks(world: Ranks, tmp_path: Path) -> None:
    """Rows of one micro-batch are the reference: the routers' loss is a document's, and mistakes that other tools make
    with it are seen.
    """
    write_mixture(tmp_path)

    def run(strategy: str, size: int, keys: dict[str, object], fault: Fault = "") -> Case:
        return Case(f"{strategy} {size}", size, {**ROWS, **BALANCE, "parallel.strategy": strategy, **keys}, fault)

    rows, halves = {"batch.micro_samples": 8}, {"batch.micro_samples": 2, "batch.accumulation": 2}
    packs = {"data.packing": True, "batch.micro_tokens": 256}
    recomputed = packs | {"parallel.activation_checkpointing": "full"}
    one = run_case(world, tmp_path, run("single", 1, rows), "float32", "full")
    plain = run_case(world, tmp_path, run("single", 1, rows | {"moe.balance": 0.0}), "float32", "full")
    assert not compare(one, plain).within("float32") and one.figures[0].keys() == {"idle_experts", "largest_load"}
    for case in (
        run("single", 1, {"batch.micro_samples": 2, "batch.accumulation": 4}),
        run("single", 1, recomputed),
        run("ddp", 2, halves),
        run("fsdp", 2, recomputed),
        run("fsdp", 4, packs),
        run("hsdp", 4, recomputed | {"parallel.shard_degree": 2}),
        run("fsdp", 2, recomputed | {"parallel.expert_degree": 2}),
    ):
        curve = run_case(world, tmp_path, case, "float32", "full")
        assert compare(one, curve).within("float32"), case
        assert curve.figures == one.figures, case
    for case in (
        run("ddp", 2, halves, "by ranks"),
        run("single", 1, packs, "mean of means"),
        run("single", 1, rows, "padding"),
    ):
        assert not compare(one, run_case(world, tmp_path, case, "float32", "full")).within("float32"), case.fault


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize("method", ["full", "lora", "qlora", "lora on a shared expert's gate"])
def test_a_run_goes_on_in_any_layout(world: Ranks, tmp_path: Path, method: str) -> None:
    """Seven experts: no number of ranks here divides them. A factor B of one row leaves ranks without any."""
    on_gate = method.endswith("gate")
    folder = write_tiny_model(
        tmp_path / "model", "qwen2_moe" if on_gate else "qwen3_moe", num_hidden_layers=2, num_experts=7
    )
    targets = {"target_modules": ["shared_expert_gate", "v_proj", "experts.down_proj"]} if on_gate else {}
    config = tiny_run(folder, method.partition(" ")[0], **targets)
    layouts = {
        "single": {"world_size": 1},
        "ddp": {"world_size": 2},
        "fsdp": {"world_size": 2},
        "hsdp": {"world_size": 4, "shard_degree": 2},
    }

    def steps(strategy: str, num_steps: int, *folders: Path | None) -> list[tuple[float, float]]:
        plan = tiny_plan(folder, strategy=strategy, **layouts[strategy])
        size = plan.layout.world_size
        documents = merged(RAGGED) if size == 1 else RAGGED
        return world.run(RUN_STEPS, plan, config, documents, num_steps, *folders, world_size=size)[0]

    whole = steps("single", 4)
    for strategy in layouts:
        saved = tmp_path / strategy / "step-000002"
        np.testing.assert_allclose(steps(strategy, 2, None, saved), whole[:2], rtol=1e-5)
        for other in layouts if strategy in ("single", "fsdp") else ("single",):
            rest = steps(other, 2, saved)
            np.testing.assert_allclose(rest, whole[2:], rtol=2e-4, err_msg=f"{strategy}, then {other}")
            assert not np.allclose(rest, whole[:2], rtol=2e-4)
