"""Images in files of Axolotl and TRL: which parts are trained, which keys act, and what is said of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manyhands.importers.shared import is_projector, row_has_images
from tests.importers.test_axolotl import change, outcome, refused, section
from tests.importers.test_trl import read

# What every published file for images has.
RITUAL = {"processor_type": "AutoProcessor", "skip_prepare_dataset": True, "remove_unused_columns": False}
FROZEN = {"vision": "frozen", "projector": "frozen"}
ROW = {"messages": [{"role": "user", "content": [{"type": "image"}]}], "images": ["a.png"]}


def trl(row: dict[str, Any] = ROW, vision: bool = True, **keys: Any) -> Any:
    config = {"vision_config": {"depth": 2}} if vision else {}
    keys = {"model_name_or_path": "org/model", "dataset_name": "./rows.jsonl", **keys}
    return read(keys, first_row=lambda _: row, model_config=lambda _: config)


def parts_of(mapping: Any) -> Any:
    return mapping.get("method", {}).get("parts")


def test_the_lines_that_images_need_in_axolotl_are_read(tmp_path: Path) -> None:
    done = change(tmp_path, **RITUAL, lora_target_linear=None, lora_target_modules=r"model.layers.[\d]+.(q|v)_proj")
    assert refused(done) == {} and parts_of(done.mapping) == FROZEN
    data = section(done, "data")
    assert data["images"] is True and data["too_long"] == "error"
    assert section(done, "method")["target_modules"] == [r"re:model.layers.[\d]+.(q|v)_proj"]
    assert {outcome(done, key)[0] for key in ("skip_prepare_dataset", "remove_unused_columns")} == {"no_op"}
    alone = change(tmp_path, skip_prepare_dataset=True, image_size=512)
    assert "skip_prepare_dataset" in refused(alone) and outcome(alone, "image_size")[0] == "no_op"
    assert parts_of(alone.mapping) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"vision": "trained", "projector": "trained", "language": "full"}),
        ({"freeze_mm_modules": True}, FROZEN),
        ({"unfrozen_parameters": [r"model.multi_modal_projector.*"]}, {**FROZEN, "projector": "trained",
                                                                       "language": "frozen"}),
        ({"unfrozen_parameters": ["model.visual.merger", "lm_head"]}, {**FROZEN, "projector": "trained"}),
        ({"adapter": "lora", "lora_modules_to_save": ["multi_modal_projector", "lm_head"]},
         {**FROZEN, "projector": "trained"}),
    ],
)  # fmt: skip
def test_parts_that_axolotl_trains(changes: dict[str, Any], expected: dict[str, str], tmp_path: Path) -> None:
    done = change(tmp_path, **RITUAL, **({"adapter": None} | changes))
    assert parts_of(done.mapping) == expected
    method = section(done, "method")
    if "unfrozen_parameters" in changes:
        refused_tower = refused(done)
        whole = expected.get("language") == "frozen"
        assert method["name"] == ("full" if whole else "patterns") and not refused_tower.keys() - {
            "unfrozen_parameters"
        }
    if "lora_modules_to_save" in changes:
        assert method["modules_to_save"] == ["lm_head"]


@pytest.mark.parametrize(
    ("changes", "key", "kind", "told"),
    [
        ({"image_size": 512}, "image_size", "substituted", "made smaller in proportion"),
        ({"image_size": "big"}, "image_size", "refused", "allowed: pixels of a side"),
        ({"image_resize_algorithm": "bilinear"}, "image_resize_algorithm", "ignored", "bicubic"),
        ({"processor_type": "VoxtralProcessor"}, "processor_type", "refused", "write AutoProcessor"),
        ({"processor_kwargs": {"max_pixels": 9}}, "processor_kwargs", "refused", "preprocessor_config.json"),
        ({"role_boundaries": [{"role": "user"}]}, "role_boundaries", "ignored", "follows from the chat template"),
        ({"chat_template": "qwen2_vl"}, "chat_template", "substituted", "the model's own template"),
        ({"chat_template": "chatml"}, "chat_template", "refused", "has no place for images"),
        ({"lora_target_linear": None, "lora_target_modules": ["q_proj"]}, "lora_target_modules", "substituted",
         "adapters are for the language model alone"),
        ({"adapter": None, "unfrozen_parameters": ["model.vision_tower.layers"]}, "unfrozen_parameters", "refused",
         "a vision tower is trained as a whole"),
    ],
)  # fmt: skip
def test_keys_of_images_in_axolotl(changes: dict[str, Any], key: str, kind: str, told: str, tmp_path: Path) -> None:
    found, why = outcome(change(tmp_path, **{**RITUAL, **changes}), key)
    assert found == kind and told in why


def test_the_size_of_images_is_a_number_of_pixels(tmp_path: Path) -> None:
    assert section(change(tmp_path, **RITUAL, image_size=[640, 480]), "data")["shrink_images_above"] == 640 * 480


def test_trl_trains_every_part_of_a_model_of_images_unless_it_has_adapters() -> None:
    assert parts_of(trl().mapping) == {"vision": "trained", "projector": "trained", "language": "full"}
    assert parts_of(trl(use_peft=True).mapping) == FROZEN
    beside = trl(use_peft=True, lora_modules_to_save=["model.connector", "lm_head"]).mapping
    assert parts_of(beside) == {**FROZEN, "projector": "trained"} and beside["method"]["modules_to_save"] == ["lm_head"]
    assert parts_of(trl(vision=False).mapping) is None and parts_of(trl({"text": "so"}).mapping) is None
    targets = trl(use_peft=True, lora_target_modules="all-linear")
    assert {one.key: one.kind for one in targets.outcomes}["lora_target_modules"] == "substituted"


def test_the_lines_that_images_need_in_trl_are_read() -> None:
    keys = {"max_length": None, "remove_unused_columns": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
    done = trl(**keys)
    assert done.findings() == [] and done.mapping["data"]["max_length"] == 1_000_000
    assert {one.key: one.kind for one in done.outcomes}["dataset_kwargs"] == "no_op"


def test_what_a_row_and_a_module_are() -> None:
    part = {"type": "image", "image": "a.png"}
    assert row_has_images({"image": "a.png"}) and row_has_images({"prompt": [{"role": "user", "content": [part]}]})
    assert not any(map(row_has_images, ({"images": []}, {"messages": [{"role": "user", "content": "image"}]}, {})))
    assert is_projector("visual.merger.mlp.0") and is_projector("model.connector") and not is_projector("lm_head")
