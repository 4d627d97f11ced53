"""A new family is one file: what a ``Family`` says of it is all that is needed to read, plan and train it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (  # noqa: F401  (used by fused attention in the place of ToyAttention)
    ALL_ATTENTION_FUNCTIONS,
    LlamaAttention,
    LlamaForCausalLM,
    LlamaMLP,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from manyhands import families
from manyhands.convert.fused_modules import FusedAttention, FusedMlp
from manyhands.facts.model import read_model_facts
from manyhands.families import Family, KnownModule, find
from manyhands.importers.load import config_from_mapping
from manyhands.launch.run.prepare import gather_facts
from manyhands.planner.search import plan as make_plan
from tests.support.layouts import build, pack
from tests.support.tiny import TINY, tiny_tokenizer

NUM_LAYERS = 2


class ToyConfig(LlamaConfig):
    model_type = "toy"
    tie_word_embeddings: bool = True
    toy_act: str = "gelu_pytorch_tanh"


class ToyAttention(LlamaAttention):
    pass


class ToyMLP(LlamaMLP):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.act_fn = torch.nn.GELU(approximate="tanh")


class ToyForCausalLM(LlamaForCausalLM):
    config_class = ToyConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn, layer.mlp = ToyAttention(config, index), ToyMLP(config)


TOY = Family(
    name="Toy",
    model_types=("toy",),
    tied=True,
    head_dim=16,
    packs=True,
    known_modules=(
        KnownModule("attention", "ToyAttention", package=__name__),
        KnownModule("mlp", "ToyMLP", package=__name__, activation_field="toy_act"),
    ),
)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The family, as if its file stood in ``families/``, and its classes, as if transformers had them."""
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, TOY))
    AutoConfig.register("toy", ToyConfig, exist_ok=True)
    AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM, exist_ok=True)


@pytest.fixture
def folder(tmp_path: Path, toy: None) -> Path:
    """A model whose config.json leaves out what is the family's default."""
    config = ToyConfig(**TINY | {"num_hidden_layers": NUM_LAYERS})
    ToyForCausalLM(config).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    for key in ("tie_word_embeddings", "head_dim", "toy_act", "architectures"):
        fields.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    rows = [{"prompt": "the cat", "completion": " ".join(["sat"] * (1 + i % 5))} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_a_toy_family_is_read_planned_and_trained(folder: Path) -> None:
    config = config_from_mapping(
        {
            "name": "toy",
            "model": {"name": str(folder)},
            "data": {"train": str(folder / "rows.jsonl"), "cache": str(folder / "cache"), "max_length": 64},
            "method": {"name": "lora", "rank": 4, "alpha": 8},
            "kernels": {"lora": "fused"},
            "batch": {"samples": 4},
            "optimizer": {"learning_rate": 1e-2},
            "output": {"dir": str(folder / "runs")},
        }
    )
    lines: list[str] = []
    facts = gather_facts(config, report=lines.append)
    assert facts.model.tied_embeddings and facts.model.head_dim == 16 and facts.model.num_layers == NUM_LAYERS
    assert facts.model.packs and "verified" in facts.model.packing_reason and not any("probe" in line for line in lines)
    plan = make_plan(config, facts)
    engine = build(plan, config)
    kinds = [type(module) for module in engine.model.modules()]
    assert kinds.count(FusedAttention) == kinds.count(FusedMlp) == NUM_LAYERS
    engine.make_optimizer(plan, config)
    batch = pack([([1, 2, 3, 4, 5, 6], [True] * 6), ([9, 8, 7], [True] * 3)])
    losses = []
    for _ in range(3):
        loss, weight = engine.forward(batch)["lm"]
        (loss / weight).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_without_its_file_it_is_read_wrongly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the test above rests on the family."""
    monkeypatch.setattr(families, "FAMILIES", tuple(family for family in families.FAMILIES if family is not TOY))
    assert find("toy") is families.UNKNOWN and "ToyMLP" not in families.known_modules()
    assert not read_model_facts(folder, "toy", "random").tied_embeddings
