"""What is loaded is what the files hold, and nothing is loaded where they do not fit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.engine.native import NativeEngine
from manyhands.model.checks import check_loss, check_packing
from manyhands.model.loss import LossModel
from tests.support.building import load_model, on_meta
from tests.support.tiny import FAMILIES, VOCAB_SIZE, tiny_plan, tiny_run, tiny_tokenizer, write_tiny_model

CPU = torch.device("cpu")
IDS = torch.arange(40)[None] % 256


def load(folder: Path, method: str = "full", **plan_keys: str) -> torch.nn.Module:
    plan, config = tiny_plan(folder, **plan_keys), tiny_run(folder, method)
    loss_model, load = on_meta(plan, config)
    assert all(p.is_meta for p in loss_model.parameters())
    load(loss_model.model, CPU)
    return loss_model.model


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_logits_are_bit_equal_to_from_pretrained(tiny_folders: dict[str, Path], family: str, method: str) -> None:
    reference = AutoModelForCausalLM.from_pretrained(tiny_folders[family], attn_implementation="sdpa")
    model = load(tiny_folders[family], method).eval()
    with torch.no_grad():
        assert torch.equal(model(IDS, use_cache=False).logits, reference(IDS, use_cache=False).logits)
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == reference.config.tie_word_embeddings


def test_weights_are_cast_to_the_masters_dtype_while_loading(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "gemma3", "bfloat16")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = load(folder, master_dtype="float32").eval()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    with torch.no_grad():
        assert torch.equal(model(IDS, use_cache=False).logits, reference(IDS, use_cache=False).logits)


def test_frozen_weights_keep_their_dtype_and_adapters_have_masters(tiny_folders: dict[str, Path]) -> None:
    model = load(tiny_folders["qwen3"], "lora", frozen_dtype="bfloat16", compute_dtype="bfloat16")
    assert {p.dtype for n, p in model.named_parameters() if "lora_" in n} == {torch.float32}
    assert {p.dtype for n, p in model.named_parameters() if "lora_" not in n} == {torch.bfloat16}
    assert [n for n, p in model.named_parameters() if p.requires_grad] == [
        n for n, _ in model.named_parameters() if "lora_" in n
    ]


@pytest.mark.parametrize("change", ["missing", "unexpected", "shape"])
def test_files_that_do_not_fit_are_refused_by_name(tmp_path: Path, change: str) -> None:
    folder = write_tiny_model(tmp_path, "qwen3", with_tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    if change == "missing":
        del tensors[name]
    elif change == "unexpected":
        name = "model.layers.3.mlp.up_proj.weight"
        tensors[name] = torch.zeros(2)
    else:
        tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError) as error:
        load(folder)
    assert name in str(error.value) and change in str(error.value) and len(error.value.details) == 1


def test_a_folder_without_weights_and_a_broken_file_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama", with_tokenizer=False)
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="weights file is broken"):
        load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no weights") as error:
        load(folder)
    assert "model.safetensors" in str(error.value)


def test_tied_names_with_two_different_tensors_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama", with_tokenizer=False)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors")
    load(folder)  # equal is fine
    tensors["lm_head.weight"] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="tied"):
        load(folder)


def test_random_weights_follow_the_family_and_the_seed(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "gemma3", with_tokenizer=False)
    (folder / "model.safetensors").unlink()

    def draw(seed: int) -> torch.nn.Module:
        plan, config = tiny_plan(folder), tiny_run(folder)
        config = config.model_copy(update={"seed": seed, "model": config.model.model_copy(update={"init": "random"})})
        return load_model(plan, config)

    first, again, other = draw(1).state_dict(), draw(1).state_dict(), draw(2).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    weight = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(first[weight], other[weight])
    assert not torch.equal(first[weight], first["model.layers.1.mlp.up_proj.weight"])
    assert first[weight].std().item() == pytest.approx(0.08, rel=0.05)
    assert first["model.norm.weight"].abs().max() == 0  # gemma multiplies by 1 + weight


@pytest.mark.gpu
def test_random_weights_in_host_memory_begin_as_those_on_the_gpu(tmp_path: Path) -> None:
    """``parallel.offload`` places the weights, and changes no loss."""
    gpu = torch.device("cuda", 0)
    plan = tiny_plan(write_tiny_model(tmp_path, "llama", with_tokenizer=False))
    config = tiny_run(tmp_path)
    config = config.model_copy(update={"model": config.model.model_copy(update={"init": "random"})})

    def draw(home: torch.device) -> dict[str, torch.Tensor]:
        loss_model, load = on_meta(plan, config, device=gpu)
        load(loss_model.model, home)
        return dict(loss_model.model.named_parameters())

    offloaded, plain = draw(CPU), draw(gpu)
    assert {p.device.type for p in offloaded.values()} == {"cpu"}
    assert all(torch.equal(offloaded[name], weight.cpu()) for name, weight in plain.items())


def test_attention_dropout_comes_from_the_run_only(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama", with_tokenizer=False, attention_dropout=0.1)
    assert load(folder).config.attention_dropout == 0


def test_the_tiny_tokenizer_reads_every_byte_and_matches_the_vocabulary() -> None:
    tokenizer = tiny_tokenizer()
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hé  – <hi>\n"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHé  – <hi>\n<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    assert len(tokenizer) == VOCAB_SIZE and tokenizer.eos_token == "<|im_end|>"


@pytest.mark.ci
@pytest.mark.real
def test_the_real_model_is_loaded_bit_for_bit_and_passes_the_checks() -> None:
    folder = os.environ.get("MANYHANDS_SMOLLM2")
    if not folder:
        pytest.skip("MANYHANDS_SMOLLM2 names no folder")
    model = load(Path(folder), master_dtype="float32").eval()
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        assert torch.equal(model(IDS, use_cache=False).logits, reference(IDS, use_cache=False).logits)
    del reference
    engine = NativeEngine(LossModel(model), World(0, 0, 1, CPU))
    assert check_loss(engine, engine.loss_model, CPU) < 1e-5
    assert check_packing(engine, engine.loss_model, CPU) < 1e-4
