"""When a plan launches blocks as CUDA graphs, what it says about them, and where it refuses to."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.core.errors import UserError
from manyhands.facts.types import LinearShape
from manyhands.planner.search import plan
from manyhands.planner.types import Plan
from tests.planner.examples import data_facts, facts, llama_8b, model_facts, run_config
from tests.support.plans import explain_why

SMALL = model_facts(hidden=576, inner=1536, layers=30, heads=9, kv_heads=3, vocab=49152)
STACKS = {
    "mlp.experts.gate_up_proj": LinearShape(4 * 2 * 576, 576, 4, 2),
    "mlp.experts.down_proj": LinearShape(4 * 576, 576, 4, 2),
}
DENSE = {name: shape for name, shape in SMALL.block_linear_shapes.items() if "mlp" not in name}
MIXTURE = SMALL.model_copy(update={"model_type": "qwen3_moe", "block_linear_shapes": DENSE | STACKS})
WAITING = "experts compute in {}, or have adapters of a rank above 64"
LORA = {"method__name": "lora", "batch__samples": 16}


def make_plan(gpus: int = 1, model: Any = SMALL, data: Any = None, **keys: Any) -> Plan:
    return plan(run_config(**LORA | keys), facts(model, gpus=gpus, data=data or data_facts()))


@pytest.mark.parametrize("gpus", [1, 2])
def test_small_models_with_adapters_have_graphs(gpus: int) -> None:
    made, without = make_plan(gpus), make_plan(gpus, parallel__cuda_graphs=False)
    assert made.layout.cuda_graphs and not made.layout.dynamic and not without.layout.cuda_graphs
    assert made.layout.pack_tokens == made.layout.micro_tokens  # every pack has one size
    assert made.step_s is not None and without.step_s is not None and made.step_s < 0.95 * without.step_s
    (line,) = explain_why(made, "cuda_graphs")
    assert line == (
        "CUDA graphs: each block, as launching kernels one by one takes longer than running them; "
        f"packs are padded to {made.layout.pack_tokens:,} tokens"
    )
    assert not explain_why(without, "cuda_graphs")


def test_large_models_have_none() -> None:
    assert not make_plan(model=llama_8b()).layout.cuda_graphs


@pytest.mark.parametrize("asked", ["auto", True, False])
def test_small_models_in_full_have_graphs_on_one_gpu(asked: bool | str) -> None:
    made = make_plan(method__name="full", parallel__cuda_graphs=asked)
    assert made.layout.cuda_graphs == bool(asked)


@pytest.mark.parametrize(("asked", "has_graphs"), [("auto", False), (True, True)])
def test_mixtures_with_adapters_have_graphs_if_asked_for(asked: bool | str, has_graphs: bool) -> None:
    assert make_plan(model=MIXTURE, method__rank=4, parallel__cuda_graphs=asked).layout.cuda_graphs == has_graphs


def test_samples_of_one_length_need_no_padding() -> None:
    data = data_facts(mean=512.0, longest=512, num_validation_tokens=20 * 512)
    made = make_plan(data=data)
    assert made.layout.cuda_graphs and "padded" not in explain_why(made, "cuda_graphs")[0]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gpus": 0}, "there is no GPU"),
        ({"parallel__compile": False}, "blocks are not compiled"),
        ({"method__name": "patterns", "method__train": ["*norm*"]}, "weights that patterns select are trained"),
        ({"method__name": "full", "gpus": 2}, "weights are sharded and gathered for each block"),
        ({"gpus": 2, "parallel__strategy": "fsdp"}, "weights are sharded and gathered for each block"),
        ({"gpus": 2, "parallel__context_degree": 2}, "context parallelism communicates inside blocks"),
        ({"parallel__activation_checkpointing": "full"}, "activations are recomputed"),
        ({"task": "preference"}, "batches of preference tasks vary in shape"),
        ({"method__dropout": 0.1}, "adapters have dropout"),
        ({"model": MIXTURE, "method__name": "full"}, "experts are trained in full"),
        ({"model": MIXTURE, "method__rank": 128}, WAITING.format("bfloat16")),
        ({"model": MIXTURE, "model__dtype": "float32"}, WAITING.format("float32")),
        ({"model": MIXTURE, "gpus": 2, "parallel__expert_degree": 2}, "ranks exchange tokens inside blocks"),
        (
            {"model": SMALL.model_copy(update={"num_mixer_layers": 3})},
            "the model has recurrent layers (linear attention, state space or convolution)",
        ),
        (
            {"model": SMALL.model_copy(update={"attention_softcap": 50.0})},
            "attention is computed in plain PyTorch or with a mask",
        ),
        ({"data__packing": False}, "samples differ in length and are not packed"),
    ],
)
def test_what_cannot_be_recorded_is_refused_if_asked_for(changes: dict[str, Any], why: str) -> None:
    assert not make_plan(**changes).layout.cuda_graphs  # auto goes without
    with pytest.raises(UserError) as caught:
        make_plan(**changes, parallel__cuda_graphs=True)
    assert caught.value.where == "parallel.cuda_graphs" and caught.value.why == why
