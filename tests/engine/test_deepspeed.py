"""DeepSpeed's stages train what one process trains, save what every layout reads, and leave nothing of their own."""

from __future__ import annotations

import builtins
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from manyhands.checkpoint.manifest import read_manifest
from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError, require_extras
from manyhands.core.world import World
from manyhands.engine import deepspeed_compat
from manyhands.engine.apply import apply
from manyhands.facts.types import NewTokens
from manyhands.model.structure import find_decoder
from tests.engine.test_layouts import RAGGED
from tests.support import equality
from tests.support.building import on_meta
from tests.support.equality import Case, Curve
from tests.support.ranks import ranks
from tests.support.tiny import tiny_plan, tiny_run, write_tiny_model

STEPS = "tests.engine.zero_ranks:run_steps"
KEYS = {"data.packing": True, "batch.micro_tokens": 512, "parallel.activation_checkpointing": "full"}
installed = pytest.mark.usefixtures("deepspeed")


@pytest.fixture(scope="module")
def deepspeed() -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is an extra: pip install 'manyhands[deepspeed]'")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = tmp_path_factory.mktemp("models")
    return str(write_tiny_model(model, "llama", with_tokenizer=False, num_hidden_layers=2))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("equality")
    equality.write_workspace(folder, "llama", num_hidden_layers=2)
    return folder


def on_two_ranks(*arguments: Any) -> Any:
    """In fresh processes: DeepSpeed keeps the process group that it was given first."""
    with ranks(2) as world:
        return world.run(STEPS, *arguments, world_size=2)[0]


def run_file(folder: str, method: str, weight_decay: float = 0.1) -> RunConfig:
    config = tiny_run(folder, method)
    return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"weight_decay": weight_decay})})


FAST = {
    ("zero2", "bfloat16", "full", "none"),
    ("zero3", "float32", "lora", "all"),
    ("zero1", "bfloat16", "full", "none"),
}
CURVES = [
    pytest.param(*values, marks=[] if values in FAST else [pytest.mark.slow])
    for strategy in ("zero1", "zero2", "zero3")
    for dtype, method, offload in (
        ("float32", "full", "none"),
        ("bfloat16", "full", "none"),
        ("bfloat16", "full", "optimizer"),
        ("float32", "lora", "none"),
        ("float32", "lora", "all"),
        ("bfloat16", "qlora", "none"),
        ("float32", "patterns", "none"),
    )
    for values in [(strategy, dtype, method, offload)]
    if (strategy == "zero3" or (offload != "all" and method != "patterns")) and (strategy, method) != ("zero3", "qlora")
]


@pytest.fixture(scope="module")
def fsdp(workspace: Path) -> Callable[[str, str], Curve]:
    """What FSDP2 trains on two ranks; that it is what one process trains is asked elsewhere."""

    @functools.cache
    def run(dtype: str, method: str) -> Curve:
        with ranks(2) as world:
            case = Case("fsdp", 2, KEYS | {"parallel.strategy": "fsdp"})
            return equality.run_case(world, workspace, case, dtype, method)

    return run


@pytest.mark.ci
@installed
@pytest.mark.distributed
@pytest.mark.parametrize(("strategy", "dtype", "method", "offload"), CURVES)
def test_twenty_clipped_steps_are_those_of_fsdp(
    workspace: Path, fsdp: Callable[[str, str], Curve], strategy: str, dtype: str, method: str, offload: str
) -> None:
    expected = fsdp(dtype, method)
    assert any(norm > equality.CLIP for norm in expected.norms) and any(n < equality.CLIP for n in expected.norms)
    keys = KEYS | {"parallel.strategy": strategy, "parallel.offload": offload}
    with ranks(2) as world:
        found = equality.run_case(world, workspace, Case(strategy, 2, keys), dtype, method)
    # in bfloat16 too: masters, sums and what is rounded when are the same
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    assert found.norms == pytest.approx(expected.norms, rel=1e-6)


@pytest.mark.ci
@installed
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "method", "offload"),
    [
        ("zero2", "full", "none"),
        ("zero3", "lora", "none"),
        pytest.param("zero1", "full", "optimizer", marks=pytest.mark.slow),
        pytest.param("zero3", "full", "all", marks=pytest.mark.slow),
        pytest.param("zero2", "lora", "optimizer", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_go_to_and_come_from_every_other_layout(
    folder: str, strategy: str, method: str, offload: str, tmp_path: Path
) -> None:
    config = run_file(folder, method)
    zero = tiny_plan(folder, strategy=strategy, world_size=2, offload=offload)
    fsdp, ddp = (tiny_plan(folder, strategy=name, world_size=2) for name in ("fsdp", "ddp"))
    whole = on_two_ranks(fsdp, config, RAGGED, 4, None, None, tmp_path / "whole")
    native, saved = tmp_path / "native", tmp_path / "step-000002"
    on_two_ranks(fsdp, config, RAGGED, 2, None, native)
    np.testing.assert_allclose(on_two_ranks(zero, config, RAGGED, 2, None, saved), whole[:2], rtol=1e-5)
    assert {path.suffix for path in saved.iterdir()} == {".json", ".safetensors"}  # no pickle
    assert read_manifest(saved).tensors == read_manifest(native).tensors
    for other in (fsdp, ddp):
        np.testing.assert_allclose(on_two_ranks(other, config, RAGGED, 2, saved), whole[2:], rtol=2e-4)
    rest = on_two_ranks(zero, config, RAGGED, 2, native, None, tmp_path / "model")
    np.testing.assert_allclose(rest, whole[2:], rtol=2e-4)
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "whole"))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-3, atol=1e-3)


@installed
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["zero2", "zero3"])
def test_new_weights_are_those_of_every_layout(folder: str, strategy: str) -> None:
    config = run_file(folder, "full")
    config = config.model_copy(update={"model": config.model.model_copy(update={"init": "random"})})
    keys = {"world_size": 2, "compute_dtype": "bfloat16"}
    expected = on_two_ranks(tiny_plan(folder, strategy="fsdp", **keys), config, RAGGED, 2)
    found = on_two_ranks(tiny_plan(folder, strategy=strategy, **keys), config, RAGGED, 2)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@installed
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "dtype", "offload"),
    [
        ("zero2", "bfloat16", "optimizer"),
        pytest.param("zero2", "bfloat16", "none", marks=pytest.mark.slow),
        pytest.param("zero1", "float32", "none", marks=pytest.mark.slow),
        pytest.param("zero1", "bfloat16", "none", marks=pytest.mark.slow),
        pytest.param("zero1", "bfloat16", "optimizer", marks=pytest.mark.slow),
        pytest.param("zero3", "bfloat16", "none", marks=pytest.mark.slow),
        pytest.param("zero3", "float32", "optimizer", marks=pytest.mark.slow),
    ],
)
def test_dropped_gradients_leave_nothing_behind(folder: str, strategy: str, dtype: str, offload: str) -> None:
    plan = tiny_plan(folder, strategy=strategy, world_size=2, compute_dtype=dtype, offload=offload)
    with ranks(2) as world:
        run = "tests.engine.zero_ranks:run_dropped"
        first, plain, later = world.run(run, plan, run_file(folder, "full"), RAGGED, world_size=2)[0]
    assert plain > 0 and [first, later] == pytest.approx([plain, plain], rel=1e-12)


@installed
@pytest.mark.slow
@pytest.mark.distributed
def test_embeddings_that_grow_are_those_of_fsdp(folder: str) -> None:
    size = 2 + json.loads((Path(folder) / "config.json").read_text())["vocab_size"]
    grown = NewTokens(ids=(3, size - 1), fresh_ids=(3, size - 1), vocab_size=size)
    found, expected = (
        on_two_ranks(tiny_plan(folder, strategy=name, world_size=2, new_tokens=grown), run_file(folder, "full"),
                     RAGGED, 2)
        for name in ("zero2", "fsdp")
    )  # fmt: skip
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any, **options: Any) -> Any:
        if name == "deepspeed":
            raise ModuleNotFoundError("No module named 'deepspeed'", name="deepspeed")
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    monkeypatch.setenv("LOCAL_RANK", "0")  # set by the call, so it is put back
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    with pytest.raises(UserError) as caught:
        deepspeed_compat.open_deepspeed(World(0, 0, 1, torch.device("cpu")))
    monkeypatch.setattr("manyhands.core.errors.has_deepspeed", lambda: False)
    require_extras("fsdp")
    with pytest.raises(UserError, match="need DeepSpeed"):
        require_extras("zero2")
    assert "manyhands[deepspeed]" in str(caught.value.fix) and "No module named" in str(caught.value.why)


@pytest.mark.ci
@installed
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["zero2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_activations_in_host_memory_change_no_step(folder: str, strategy: str) -> None:
    keys: Any = {"strategy": strategy, "world_size": 2, "activation_checkpointing": "full"}
    plans = (tiny_plan(folder, **keys, offload_activations=moves) for moves in (False, True))
    kept, moved = (on_two_ranks(plan, run_file(folder, "full"), RAGGED, 2) for plan in plans)
    assert moved == kept


@installed
def test_activations_go_to_host_memory_as_planned(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("manyhands.engine.deepspeed.apply_zero", lambda *_: None)
    plan = tiny_plan(folder, strategy="zero2", world_size=2, activation_checkpointing="full", offload_activations=True)
    loss_model, load = on_meta(plan, run_file(folder, "full"), resumes=True)
    apply(loss_model, plan, World(0, 0, 2, torch.device("cpu")), load, run_file(folder, "full"))
    assert find_decoder(loss_model.model)._forward_pre_hooks
