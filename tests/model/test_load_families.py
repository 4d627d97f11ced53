"""Every family is loaded as transformers loads it, whatever its files call their tensors; what would be missed is
refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from manyhands.convert.lora import adapted_layers
from manyhands.core.errors import UserError
from manyhands.model.checks import check_loss, check_packing, check_padding
from manyhands.model.loss import LossModel
from manyhands.model.structure import find_blocks, left_out
from manyhands.model.weights import quantized_layers
from tests.support.building import load_model, on_meta
from tests.support.families import MEASURED
from tests.support.multimodal import write_tiny_multimodal
from tests.support.tiny import tiny_plan, tiny_run, write_tiny_model

CPU = torch.device("cpu")
IDS = torch.arange(40)[None] % 256
RENAMED, CONVERTED = ("gpt_neox",), ("mixtral", "qwen3_moe")


def load(folder: Path, method: str = "full", said: list[str] | None = None, **plan_keys: Any) -> Any:
    plan, config = tiny_plan(folder, **plan_keys), tiny_run(folder, method)
    return load_model(plan, config, (said if said is not None else []).append).eval()


def assert_loaded_alike(model: Any, reference: Any) -> None:
    """Bit-equal logits, and every buffer that transformers has, persistent or not."""
    with torch.no_grad():
        assert torch.equal(model(IDS, use_cache=False).logits, reference(IDS, use_cache=False).logits)
    towers = tuple(f"{name}." for name in left_out(model))
    expected = {name: buffer for name, buffer in reference.named_buffers() if not name.startswith(towers or ("-",))}
    found = dict(model.named_buffers())
    assert found.keys() == expected.keys() and all(
        torch.equal(found[name], buffer) for name, buffer in expected.items()
    )


@pytest.mark.parametrize("family", [*MEASURED, *RENAMED, *CONVERTED])
def test_logits_and_buffers_are_those_of_from_pretrained(tmp_path: Path, family: str) -> None:
    folder = write_tiny_model(tmp_path, family, with_tokenizer=False)
    found = load(folder)  # eager where sdpa would drop a soft-cap
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=found.config._attn_implementation)
    assert_loaded_alike(found, plain.eval())


def test_missing_experts_are_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "mixtral", with_tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    gone = [name for name in tensors if ".layers.1." in name and "experts" in name]
    save_file({name: tensor for name, tensor in tensors.items() if name not in gone}, folder / "model.safetensors")
    with pytest.raises(UserError, match="do not fit") as error:
        load(folder)
    assert any("layers.1.mlp.experts" in line for line in error.value.details)


def test_files_of_the_base_model_alone_fit(tmp_path: Path) -> None:
    """Some publishers leave the prefix of the base model out."""
    folder = write_tiny_model(tmp_path, "llama", with_tokenizer=False)
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert_loaded_alike(load(folder), reference)


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_multimodal_model_is_loaded_without_its_tower(tmp_path: Path, method: str, dtype: str) -> None:
    folder, said = write_tiny_multimodal(tmp_path, dtype), []
    model = load(folder, method, said)
    assert type(model).__name__ == "Gemma3ForConditionalGeneration" and "model.vision_tower" in said[0]
    assert not any("vision" in name or "projector" in name for name, _ in model.named_parameters())
    assert len(find_blocks(model)) == 3 and all(".language_model.layers." in name for name in find_blocks(model))
    if method == "qlora":
        assert len(quantized_layers(model)) == len(adapted_layers(model)) == 3 * 7
        return
    assert_loaded_alike(
        model, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    )


@pytest.mark.parametrize("attention", ["sdpa", "blockwise"])
def test_text_of_a_multimodal_model_is_packed_as_if_alone(tmp_path: Path, attention: str) -> None:
    loss_model = LossModel(load(write_tiny_multimodal(tmp_path), attention=attention).train())
    assert check_loss(loss_model, loss_model, CPU) < 1e-5
    assert check_packing(loss_model, loss_model, CPU) < 1e-5
    assert check_padding(loss_model, loss_model, CPU) < 1e-5


def test_blocks_of_a_whole_multimodal_model_are_the_texts(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_tiny_multimodal(tmp_path))
    assert len(find_blocks(model)) == 3 and all(".language_model.layers." in name for name in find_blocks(model))


def test_text_that_needs_a_tower_is_refused_where_it_meets_it(tmp_path: Path) -> None:
    model = load(write_tiny_multimodal(tmp_path))
    with pytest.raises(UserError, match=r"passes through model\.vision_tower"):
        model(IDS, pixel_values=torch.zeros(1, 3, 28, 28))


def test_a_multimodal_model_from_new_weights_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_multimodal(tmp_path)
    config = tiny_run(folder)
    with pytest.raises(UserError, match="cannot start from new weights"):
        on_meta(
            tiny_plan(folder), config.model_copy(update={"model": config.model.model_copy(update={"init": "random"})})
        )


def test_a_router_loss_is_refused_under_full_training(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "qwen3_moe", with_tokenizer=False, output_router_logits=True)
    with pytest.raises(UserError, match="router loss"):
        load(folder)
