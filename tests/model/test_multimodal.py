"""Every family of text and images that is trained on text: loaded without its towers, its loss its own, packed as if
alone.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from manyhands.convert.lora import adapted_layers
from manyhands.core.errors import UserError
from manyhands.facts.model import TEXT_TENSOR, read_model_facts
from manyhands.families import find, measured_types
from manyhands.model.checks import check_packing, pack_documents
from manyhands.model.load import build_meta
from manyhands.model.loss import IGNORED, LossModel
from manyhands.model.probe import probe
from manyhands.model.structure import LeftOut, auto_class_of, find_blocks, inside, leave_out_towers, left_out
from manyhands.model.weights import quantized_layers
from tests.model.test_load_families import CPU, assert_loaded_alike, load
from tests.support.building import on_meta
from tests.support.multimodal import TRAINED, write_tiny_multimodal
from tests.support.tiny import tiny_plan, tiny_run

LENGTHS = (23, 2, 41)


def documents() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randint(0, 250, (1, length), generator=draw) for length in LENGTHS]  # no image's token


def own_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The family's own mean over all targets of one document, as a sum."""
    return model(input_ids=ids, labels=ids, use_cache=False).loss.double() * (ids.shape[1] - 1)


def loss_of(loss_model: LossModel, batch: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return loss_model(batch)["lm"][0].double()


@pytest.mark.parametrize("family", TRAINED)
def test_text_is_loaded_without_towers_and_its_loss_is_the_familys_own(tmp_path: Path, family: str) -> None:
    folder, said = write_tiny_multimodal(tmp_path, family=family), []
    model, whole = (
        load(folder, said=said),
        auto_class_of(folder).from_pretrained(folder, attn_implementation="sdpa").eval(),
    )
    assert type(model) is type(whole) and any("are not loaded" in line and "(tower)" in line for line in said)
    assert find(family).towers[0] in left_out(model)
    assert inside(find(family).projectors[0], left_out(model))
    assert_loaded_alike(model, whole)
    names, parts = {name for name, _ in whole.named_parameters()}, left_out(model)
    assert (
        {name for name, _ in model.named_parameters()} == {name for name in names if not inside(name, parts)} != names
    )
    facts = read_model_facts(folder, family, "pretrained")
    assert list(find_blocks(model)) == [f"{facts.decoder}.layers.{index}" for index in range(3)]
    text, everything = (  # files hold some buffers too
        sum(p.numel() for p in m.parameters()) + sum(b.numel() for n, b in m.named_buffers() if n in m.state_dict())
        for m in (model, whole)
    )
    assert (facts.num_parameters, facts.num_tower_parameters) == (text, everything - text)
    assert {f"{name}.weight" for name in adapted_layers(load(folder, "lora"))} <= facts.parameter_shapes.keys()
    with torch.no_grad():
        expected = sum(own_loss(whole, ids) for ids in documents())
    alone = [
        {"input_ids": ids, "labels": ids.roll(-1, 1).index_fill(1, torch.tensor(ids.shape[1] - 1), IGNORED)}
        for ids in documents()
    ]
    loss_model = LossModel(model)
    assert sum(loss_of(loss_model, batch) for batch in alone).item() == pytest.approx(expected.item(), rel=1e-6)
    batch = pack_documents(documents()) | {"labels": torch.cat([each["labels"] for each in alone], dim=1)}
    assert loss_of(loss_model, batch).item() == pytest.approx(expected.item(), rel=1e-6)


def test_files_that_hold_the_text_alone_are_loaded_too(tmp_path: Path) -> None:
    weights = write_tiny_multimodal(tmp_path) / "model.safetensors"
    save_file({n: t for n, t in load_file(weights).items() if TEXT_TENSOR.search(n)}, weights, {"format": "pt"})
    facts = read_model_facts(tmp_path, "tiny", "pretrained")
    assert facts.is_multimodal and facts.num_tower_parameters == 0
    assert sum(p.numel() for p in load(tmp_path).parameters()) == facts.num_parameters


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma4", "idefics3"])
def test_adapters_and_nf4_reach_the_text_alone(tmp_path: Path, family: str) -> None:
    model = load(write_tiny_multimodal(tmp_path, family=family), "qlora")
    inside = [
        name for name, _ in model.named_modules() if any(name.startswith(f"{block}.") for block in find_blocks(model))
    ]
    assert quantized_layers(model) and adapted_layers(model).keys() == quantized_layers(model).keys() <= set(inside)


@pytest.mark.parametrize("attention", ["sdpa", "blockwise"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma4", "idefics3", "qwen3_5"])
def test_packs_of_the_loaded_model_are_as_if_alone(tmp_path: Path, family: str, attention: str) -> None:
    """Positions of three axes among them, and states of linear attention."""
    loss_model = LossModel(load(write_tiny_multimodal(tmp_path, family=family), attention=attention).train())
    assert check_packing(loss_model, loss_model, CPU) < 1e-5


@pytest.mark.parametrize("family", ["llava_next", "qwen2_5_vl", "gemma4", "qwen3_5", "paligemma"])
def test_the_probe_says_the_same_of_a_shrunken_copy(tmp_path: Path, family: str) -> None:
    from transformers import AutoConfig

    verdict = probe(AutoConfig.from_pretrained(write_tiny_multimodal(tmp_path, family=family)))
    assert (verdict["trains"], verdict["packs"]) == (family in TRAINED, family in TRAINED), verdict
    assert family in TRAINED or "reads its prompt in both directions" in verdict["reason"]


def test_what_reads_text_in_both_directions_is_refused_unpacked_too(tmp_path: Path) -> None:
    folder = write_tiny_multimodal(tmp_path, family="paligemma")
    with pytest.raises(UserError, match="PaliGemmaForConditionalGeneration reads its prompt in both directions"):
        on_meta(tiny_plan(folder), tiny_run(folder))


def test_blocks_that_text_passes_by_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="attend to images only") as caught:
        read_model_facts(write_tiny_multimodal(tmp_path, family="mllama"), "mllama", "pretrained")
    assert "cross_attention_layers" in caught.value.why


def test_a_library_that_a_tower_needs_is_named(tmp_path: Path) -> None:
    """Gemma 3n's vision tower is timm's."""
    from transformers import AutoConfig
    from transformers.utils import is_timm_available

    if is_timm_available():
        pytest.skip("timm is there")
    AutoConfig.for_model("gemma3n").save_pretrained(tmp_path)
    config = tiny_run(tmp_path)
    new = config.model_copy(
        update={"model": config.model.model_copy(update={"init": "random"})}
    )  # no weights are looked for
    with pytest.raises(UserError, match="cannot build a language model of gemma3n") as caught:
        build_meta(tiny_plan(tmp_path), new)
    assert "timm" in caught.value.why


def test_text_that_asks_a_tower_for_something_is_refused_and_whoever_only_looks_is_not() -> None:
    """Gemma 3n looks for tokens of images and sound by their embedders' offsets."""
    part = copy.deepcopy(LeftOut("model.embed_vision"))
    assert not hasattr(part, "vocab_offset") and getattr(part, "vocab_offset", 7) == 7
    with pytest.raises(UserError, match=r"passes through model\.embed_vision\.vocab_offset"):
        _ = part.vocab_offset


def test_what_is_packed_without_a_probe_is_measured_here() -> None:
    assert set(measured_types(multimodal=True)) <= set(TRAINED)


def test_a_text_model_keeps_all_its_parts() -> None:
    from tests.support.tiny import tiny_model

    model = tiny_model("llama")
    assert leave_out_towers(model) == [] and left_out(model) == []
