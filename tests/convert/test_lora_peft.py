"""Every option of adapters against PEFT, the oracle: PEFT opens the file, and gives the same logits and gradients."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel

from manyhands.config.schema import MethodSection
from manyhands.convert.adapter import PEFT_PREFIX, adapter_parameters, read_adapter
from manyhands.convert.lora import adapted_layers, apply_lora
from manyhands.convert.new_tokens import token_modules
from manyhands.convert.trainable import fully_trained_modules
from manyhands.core.errors import UserError
from manyhands.export.adapter import export_adapter
from tests.support.adapters import load_adapter_state
from tests.support.layouts import random_adapter
from tests.support.tiny import tiny_model

IDS = torch.tensor([[5, 258, 17, 256, 3, 40, 258, 9]])
TOKENS = (256, 258)

CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "plain": ("llama", {}, ()),
    "plain, tied": ("gemma3", {}, ()),
    "rslora": ("llama", {"rslora": True}, ()),
    "dora": ("llama", {"dora": True}, ()),
    "dora with biases": ("starcoder2", {"dora": True, "rslora": True}, ()),
    "regular expression": ("llama", {"target_modules": (r"re:.*layers\.[02]\..*(q|v)_proj",)}, ()),
    "head": ("qwen3", {"modules_to_save": ("lm_head",)}, ()),
    "tied embeddings": ("llama", {"modules_to_save": ("embed_tokens",)}, ()),
    "tied head": ("gemma3", {"modules_to_save": ("lm_head",)}, ()),
    "norms and a layer": (
        "qwen3",
        {"modules_to_save": ("*_layernorm", "model.layers.1.mlp.up_proj", "model.norm")},
        (),
    ),
    "tokens": ("qwen3", {}, TOKENS),
    "tokens, tied": ("llama", {}, TOKENS),
    "tokens, tied and scaled": ("gemma3", {}, TOKENS),
    "tokens and head": ("qwen3", {"modules_to_save": ("lm_head",), "dora": True}, TOKENS),
}


def adapt(
    family: str, keys: dict[str, Any], tokens: tuple[int, ...], dtype: str = "float32"
) -> tuple[Any, MethodSection]:
    model = tiny_model(family, dtype)
    method = MethodSection(name="lora", rank=4, alpha=8.0, **keys)
    apply_lora(model, method, 0, tokens)
    return model, method


def open_peft(family: str, folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # missing and unexpected keys are warnings
        return PeftModel.from_pretrained(tiny_model(family), str(folder), is_trainable=True)


def loss_of(model: Any) -> torch.Tensor:
    logits = model(IDS, use_cache=False).logits
    return F.cross_entropy(logits[0, :-1], IDS[0, 1:])


@pytest.mark.parametrize("case", CASES)
def test_peft_opens_it_with_the_same_logits_and_gradients(tmp_path: Path, case: str) -> None:
    family, keys, tokens = CASES[case]
    ours, method = adapt(family, keys, tokens)
    load_adapter_state(ours, random_adapter(ours, start=True))
    export_adapter(tmp_path / "adapter", ours, method, "", rank=0)
    theirs = open_peft(family, tmp_path / "adapter")
    base = tiny_model(family)(IDS).logits
    with torch.no_grad():
        logits = ours(IDS, use_cache=False).logits
        assert not torch.allclose(logits, base, atol=0.05)
        torch.testing.assert_close(logits, theirs(IDS, use_cache=False).logits, rtol=1e-5, atol=1e-5)
    loss_of(ours).backward()
    loss_of(theirs).backward()
    named = {_plain(name): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    mine = {name: p.grad for name, p in adapter_parameters(ours).items()}
    assert mine.keys() == named.keys()
    assert {n for n, p in ours.named_parameters() if p.requires_grad} >= {
        n.removeprefix(PEFT_PREFIX) for n in mine if "token_ad" not in n
    }
    for name, gradient in mine.items():
        torch.testing.assert_close(
            gradient, named[name], rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def _plain(name: str) -> str:
    """PEFT's name in memory -> in its files."""
    name = name.replace(".modules_to_save.default", "").removesuffix(".default")
    return name.replace(".lora_magnitude_vector.default.weight", ".lora_magnitude_vector").replace(".default", "")


@pytest.mark.parametrize("case", CASES)
def test_training_starts_at_the_base_model_in_half_precision_too(case: str) -> None:
    family, keys, tokens = CASES[case]
    for dtype in ("float32", "bfloat16"):
        model, _ = adapt(family, keys, tokens, dtype)
        with torch.no_grad():
            found, expected = model(IDS).logits, tiny_model(family, dtype)(IDS).logits
        assert found.dtype == expected.dtype
        if tokens:  # their logits are a product of their own, which rounds in its own way
            torch.testing.assert_close(found, expected)
        else:
            assert torch.equal(found, expected)
        loss_of(model).backward()
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("case", ["dora", "tied embeddings", "tokens and head"])
def test_an_adapter_that_peft_wrote_is_read(tmp_path: Path, case: str) -> None:
    family, keys, tokens = CASES[case]
    ours, method = adapt(family, keys, tokens)
    load_adapter_state(ours, random_adapter(ours, start=True))
    export_adapter(tmp_path / "ours", ours, method, "", rank=0)
    theirs = open_peft(family, tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    again, _ = adapt(family, keys, tokens)
    read_adapter(again, tmp_path / "theirs")
    with torch.no_grad():
        assert torch.equal(again(IDS, use_cache=False).logits, ours(IDS, use_cache=False).logits)


def test_dora_with_dropout_is_peft_s(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    ours, _ = adapt("llama", {"dora": True, "dropout": 0.5}, ())
    load_adapter_state(ours, random_adapter(ours, start=True))
    state = {name: p.detach().clone() for name, p in adapter_parameters(ours).items()}
    config = LoraConfig(
        r=4, lora_alpha=8.0, lora_dropout=0.5, target_modules="all-linear", use_dora=True, task_type="CAUSAL_LM"
    )
    theirs = get_peft_model(tiny_model("llama"), config)
    set_peft_model_state_dict(theirs, state)
    losses = []
    for model in (ours, theirs):
        torch.manual_seed(3)
        losses.append(loss_of(model.train()).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_tied_weights_stay_one_parameter() -> None:
    model, _ = adapt("llama", {"modules_to_save": ("lm_head",)}, ())
    assert model.lm_head.weight is model.model.embed_tokens.weight and len(fully_trained_modules(model)) == 2
    model, _ = adapt("llama", {}, TOKENS)
    assert list(token_modules(model)) == ["model.embed_tokens"]


def test_embeddings_and_head_are_found_by_the_names_of_the_model_s_files() -> None:
    model, _ = adapt("gpt_neox", {"modules_to_save": ("embed_in", "embed_out")}, ())
    assert sorted(fully_trained_modules(model)) == ["gpt_neox.embed_in", "lm_head"]
    model, _ = adapt("gpt_neox", {"modules_to_save": ("embed_tokens", "lm_head")}, ())
    assert sorted(fully_trained_modules(model)) == ["gpt_neox.embed_in", "lm_head"]


def test_what_is_trained_whole_is_not_adapted() -> None:
    model, _ = adapt("llama", {"modules_to_save": ("model.layers.0.mlp",)}, ())
    assert len(adapted_layers(model)) == 18 and not any("layers.0.mlp" in name for name in adapted_layers(model))
    assert model.model.layers[0].mlp.up_proj.weight.requires_grad


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"modules_to_save": ("model",)}, "complete blocks"),
        ({"modules_to_save": ("score",)}, "no module"),
        ({"target_modules": ("re:(",)}, "regular expression"),
        ({"target_modules": ("re:q_proj",)}, "no layer matches"),  # from beginning to end, as PEFT reads it
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(keys: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        adapt("llama", keys, ())


@pytest.mark.ci
@pytest.mark.parametrize("case", ["dora", "norms and a layer"])
def test_compiled_blocks_are_whole_graphs_with_the_same_gradients(case: str) -> None:
    family, keys, tokens = CASES[case]
    gradients = []
    for compiled in (False, True):
        model, _ = adapt(family, keys, tokens)
        load_adapter_state(model, random_adapter(model, start=True))
        for layer in model.model.layers if compiled else ():
            layer.compile(backend="aot_eager", fullgraph=True)
        loss_of(model).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=lambda text, name=name: f"{name}: {text}")
