"""docs/vision.md says of every model type whether its images are trained, by what, and why not: as the code has it."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from manyhands import families
from manyhands.families import FAMILIES
from manyhands.families.refused import IMAGES_REFUSED, INFERRED

PAGE = Path(__file__).parents[2] / "docs" / "vision.md"
HEAD = "| model types | images | description, or reason |\n|---|---|---|\n"


def make_table() -> str:
    rows = [(family.model_types, "yes", f"{family.name}'s own file") for family in FAMILIES if family.images]
    rows.append((INFERRED, "yes", "inferred from the model's own files"))
    alike = defaultdict(list)
    for model_type, reason in IMAGES_REFUSED.items():
        alike[reason].append(model_type)
    rows += sorted((tuple(sorted(types)), "no", reason) for reason, types in alike.items())
    return HEAD + "".join(f"| {', '.join(f'`{kind}`' for kind in types)} | {yes} | {by} |\n" for types, yes, by in rows)


def test_the_page_has_the_table_of_the_code() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    begin = lines.index(HEAD.splitlines()[0])
    assert lines[begin : begin + len(make_table().splitlines())] == make_table().splitlines()
    assert not lines[begin + len(make_table().splitlines())].startswith("|")


def test_every_model_type_of_transformers_is_in_it_once() -> None:
    from transformers.models.auto import modeling_auto

    known = {
        *modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    named = [*families.types_with_images(), *INFERRED, *IMAGES_REFUSED]
    assert len(named) == len(set(named)) and set(named) == known


def test_a_refused_type_is_refused_by_its_reason_and_others_are_inferred() -> None:
    config = {"vision_config": {}, "image_token_id": 7}
    for model_type, reason in IMAGES_REFUSED.items():
        refused = config | {"model_type": model_type}
        assert families.find(refused).images is None and families.why_no_images(refused) == reason
    for model_type in (*INFERRED, "unheard_of"):
        images = families.find(config | {"model_type": model_type}).images
        assert images is not None and images.inferred and images.token_field == "image_token_id"
    assert "it takes text alone" in families.why_no_images({"model_type": "unheard_of"})
    assert "image_token_id" in families.why_no_images({"model_type": "unheard_of", "vision_config": {}})
