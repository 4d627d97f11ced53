"""Effects of ``kernels.*``: which functions compute; the loss stays what it was."""

from __future__ import annotations

import io

import pytest
import torch

from manyhands.convert.fused_modules import FusedAttention, FusedMlp
from manyhands.planner.search import plan
from manyhands.worker.rank import Rank
from tests.keys.lab import Lab
from tests.keys.work import forward
from tests.planner.examples import facts, llama_1b


def lora(lab: Lab) -> None:
    """fused replaces the modules that hold adapters; reference never does, and auto not on a CPU."""
    ranks = {asked: lab.start({"kernels.lora": asked}) for asked in ("fused", "reference", "auto")}
    fused = {
        asked: sum(isinstance(m, (FusedAttention, FusedMlp)) for m in rank.model.modules())
        for asked, rank in ranks.items()
    }
    assert fused == {"fused": 2, "reference": 0, "auto": 0}
    assert forward(ranks["fused"]).item() == pytest.approx(forward(ranks["reference"]).item(), rel=1e-5)
    assert [
        "fused_modules"
        in plan(lab.config({"kernels.lora": asked, "parallel.device": "auto"}), facts(gpus=1)).converters
        for asked in ("auto", "reference")
    ] == [
        True,
        False,
    ]


def loss(lab: Lab) -> None:
    ranks = {asked: lab.start({"kernels.loss": asked}) for asked in ("fused", "reference", "auto")}
    losses = [forward(rank).item() for rank in ranks.values()]
    assert losses == pytest.approx(losses[:1] * 3, rel=1e-5)
    assert [rank.loss_model.how_loss.split(",")[0] for rank in ranks.values()] == [
        "fused with the head",
        "in chunks",
        "in chunks",
    ]


def lines_with(words: str, rank: Rank) -> list[str]:
    assert isinstance(rank.terminal, io.StringIO)
    return [line for line in rank.terminal.getvalue().splitlines() if words in line]


def attention(lab: Lab) -> None:
    """Packs on GPUs look for faster kernels, and the log says what was found; reference does not look.

    tests/convert/test_attention_kernels.py has what then runs.
    """
    said = {}
    for asked in ("auto", "reference"):
        made = plan(
            lab.config({"kernels.attention": asked, "parallel.device": "auto"}), facts(model=llama_1b(), gpus=1)
        )
        assert made.attention == "varlen"
        rank = lab.start()
        rank.plan = rank.plan.model_copy(update={"converters": made.converters})
        rank.build()
        said[asked] = lines_with("attention: packs by", rank)
    assert len(said["auto"]) == 1 and "varlen (the device is cpu)" in said["auto"][0]
    assert said["reference"] == []


def linear(lab: Lab) -> None:
    """fp8 moves what is trained by its rounding, which the log states; an evaluation before step 1 is not moved."""
    for method in ("lora", "full"):
        ran = {asked: lab.run({"kernels.linear": asked, "method.name": method}) for asked in ("fp8", "compute_dtype")}
        assert ran["fp8"].losses != ran["compute_dtype"].losses
        assert ran["fp8"].losses == pytest.approx(ran["compute_dtype"].losses, rel=1e-2)
        assert len({ran[asked].rows("evaluation")[0]["loss"] for asked in ran}) == 1
    rank = lab.start({"kernels.linear": "fp8"})
    lab.check(rank)
    assert isinstance(rank.terminal, io.StringIO)
    assert "7 layers in fp8" in rank.terminal.getvalue() and "fp8 moves the loss of" in rank.terminal.getvalue()


def optimizer(lab: Lab) -> None:
    """With a bfloat16 copy of the weights, auto looks for the fused AdamW and the log says what was found; reference
    does not look.

    tests/engine/test_masters.py has what then runs.
    """
    said = {}
    for asked in ("auto", "reference"):
        made = plan(
            lab.config({"method.name": "full", "kernels.optimizer": asked, "parallel.device": "auto"}), facts(gpus=1)
        )
        rank = lab.start({"method.name": "full", "model.dtype": "bfloat16"})
        rank.plan = rank.plan.model_copy(update={"fuse_optimizer": made.fuse_optimizer})
        rank.build()
        said[asked] = lines_with("optimizer:", rank)
    assert len(said["auto"]) == 1 and "torch's own AdamW (the device is cpu)" in said["auto"][0]
    assert said["reference"] == []


def nf4(lab: Lab) -> None:
    """For weights in NF4 one launch is looked for, and the log says what was found; reference does not look.

    tests/kernels/test_nf4.py has what then runs.
    """
    said = {}
    for method, asked in (("qlora", "auto"), ("qlora", "reference"), ("lora", "auto")):
        rank = lab.start({"method.name": method, "kernels.nf4": asked})
        said[method, asked] = [line.partition("nf4: ")[2] for line in lines_with("nf4: ", rank)]
    assert said == {
        ("qlora", "auto"): ["weights dequantized by bitsandbytes (the device is cpu)"],
        ("qlora", "reference"): ["weights dequantized by bitsandbytes (as configured)"],
        ("lora", "auto"): [],
    }


def deterministic(lab: Lab) -> None:
    """torch refuses what sums in no fixed order, also within cuBLAS; else it is left as it is."""
    try:
        lab.start({"kernels.deterministic": False})
        assert not torch.are_deterministic_algorithms_enabled()
        lab.start({"kernels.deterministic": True})
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
    asked = {"parallel.device": "auto", "kernels.deterministic": True}
    assert plan(lab.config(asked), facts(gpus=1)).environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert "CUBLAS_WORKSPACE_CONFIG" not in plan(lab.config({"parallel.device": "auto"}), facts(gpus=1)).environment
