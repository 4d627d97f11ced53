"""What images pass through, by part: counted by headers, and equal to the modules of the loaded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyhands.facts.model import read_model_facts
from manyhands.facts.towers import part_of
from manyhands.families import UNKNOWN, block_shapes, find
from manyhands.model.structure import auto_class_of, find_blocks
from tests.support.vision import write_tiny_vision

FAMILIES = ("gemma3", "qwen2_5_vl", "qwen3_vl", "llava", "llava_onevision", "smolvlm", "idefics3", "internvl", "gemma4")
FAMILIES += ("llama4", "lfm2_vl", "kimi_k25", "muse_glimmer", "exaone4_5")


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_are_counted_as_the_loaded_model_has_them(tmp_path: Path, family: str) -> None:
    folder = write_tiny_vision(tmp_path, family)
    tower = read_model_facts(folder, family, "pretrained").tower
    model, known = auto_class_of(folder).from_pretrained(folder), find(family)
    sizes = {
        part: sum(
            p.numel()
            for name, p in model.state_dict().items()
            if part_of(name, known) == part
            and "lm_head" not in name
            and "language_model" not in name
            and "text_model" not in name
        )
        for part in ("vision", "projector")
    }
    assert (tower.num_parameters, tower.num_projector_parameters) == (sizes["vision"], sizes["projector"])
    (outer,) = {id(model.get_submodule(name)): name for name in known.towers if "audio" not in name}.values()
    inner = sum(
        p.numel()
        for name in known.projectors
        if name.startswith(f"{outer}.")
        for p in model.get_submodule(name).parameters()
    )
    assert sizes["vision"] == sum(p.numel() for p in model.get_submodule(outer).state_dict().values()) - inner
    assert (tower.num_layers, tower.hidden_size, tower.num_heads) == (2, 32, 2)
    assert sum(shape.size for shape in tower.block_linear_shapes.values()) < tower.num_block_parameters
    widest = {"llama4": (128,), "exaone4_5": (64,)}.get(
        family, (48, 96)
    )  # an MLP's, or queries, keys and values at once
    assert max(map(max, tower.block_linear_shapes.values())) in widest


@pytest.mark.parametrize(
    ("family", "patches", "values", "tokens"),
    [
        ("gemma3", 4, 3 * 28 * 28, 4.0),
        ("llava", 4, 3 * 28 * 28, 4.0),
        ("idefics3", 4, 3 * 28 * 28, 1.0),
        ("internvl", 4, 3 * 28 * 28, 1.0),
        ("qwen2_5_vl", 1, 3 * 2 * 14 * 14, 0.25),
        ("gemma4", 1, 3 * 4 * 4, 1 / 9),
        ("gemma4_unified", 1, 3 * 12 * 12, 1.0),
        ("llama4", 4, 3 * 28 * 28, 1.0),
        ("cohere2_vision", 4, 3 * 28 * 28, 1.0),
        ("lfm2_vl", 1, 3 * 14 * 14, 0.25),
        ("kimi_k25", 1, 3 * 14 * 14, 0.25),
        ("muse_glimmer", 1, 3 * 2 * 14 * 14, 0.25),
        ("exaone4_5", 1, 3 * 2 * 14 * 14, 0.25),
    ],
)
def test_a_unit_is_a_patch_or_a_square(tmp_path: Path, family: str, patches: int, values: int, tokens: float) -> None:
    tower = read_model_facts(write_tiny_vision(tmp_path, family), family, "pretrained").tower
    assert (tower.patches_per_unit, tower.unit_values, tower.tokens_per_unit) == (patches, values, tokens)


@pytest.mark.parametrize("family", ["exaone4_5", "gemma4_unified", "lfm2_vl", "muse_glimmer"])
def test_blocks_of_the_text_have_the_shapes_of_the_loaded_model(tmp_path: Path, family: str) -> None:
    """As a plan without weights counts them."""
    model = auto_class_of(write_tiny_vision(tmp_path, family)).from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["text_config"]
    for index, block in enumerate(find_blocks(model).values()):
        expected = {name: tuple(parameter.shape) for name, parameter in block.named_parameters()}
        assert block_shapes(find(config["model_type"]), config, index) == expected


def test_a_text_model_has_no_tower_and_parts_are_told_by_name() -> None:
    assert part_of("audio_tower.layers.0.weight", UNKNOWN) == "audio"
    assert part_of("model.image_newline", find("llava_onevision")) == "projector"
    assert part_of("model.some_connector.weight", UNKNOWN) == "projector"
    assert part_of("visual.merger.mlp.0.weight", find("qwen2_5_vl")) == "projector"
    assert part_of("visual.deepstack_merger_list.0.norm.weight", find("qwen3_vl")) == "projector"
    assert part_of("visual.blocks.0.norm1.weight", find("qwen3_vl")) == "vision"
