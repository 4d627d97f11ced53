"""Which parts of a model of text and images are loaded and trained, by what was asked and what the data has."""

from __future__ import annotations

import pytest

from manyhands.config.checks import check
from manyhands.core.errors import UserError
from manyhands.planner.search import plan
from manyhands.planner.text import explain
from tests.planner.examples import data_facts, facts, model_facts, run_config, tower_facts

WITHOUT, WITH = data_facts(), data_facts(num_images=700)


def whole(data=WITH):
    return facts(model_facts(is_multimodal=True, num_tower_parameters=1000, tower=tower_facts()), data=data)


def parts_of(asked=None, data=WITH, **keys):
    return plan(run_config(**({"method__parts": asked} if asked else {}), **keys), whole(data)).parts


@pytest.mark.parametrize(
    ("method", "data", "expected"),
    [
        ("lora", WITHOUT, ("left_out", "left_out", "trained")),
        ("full", WITHOUT, ("left_out", "left_out", "trained")),
        ("lora", WITH, ("frozen", "frozen", "trained")),
        ("qlora", WITH, ("frozen", "frozen", "trained")),
        ("full", WITH, ("frozen", "trained", "trained")),
    ],
)
def test_parts_without_a_word_follow_the_data_and_the_method(method, data, expected):
    assert tuple(parts_of(data=data, method__name=method).values()) == expected


@pytest.mark.parametrize(
    ("data", "keys", "message"),
    [
        (data_facts(num_validation_images=3), {}, "validation data has images, and the training data has none"),
        (WITH, {"model__master_dtype": "bfloat16", "method__name": "full"}, "a part of the model is frozen"),
        (WITH, {"parallel__strategy": "zero2", "parallel__gpus": 2}, "DeepSpeed does not train models of text"),
    ],
)
def test_what_images_do_not_go_with_is_refused_by_the_plan(data, keys, message):
    with pytest.raises(UserError) as caught:
        parts_of(data=data, **keys)
    assert message in f"{caught.value} {caught.value.why}"


def test_a_tower_that_no_file_describes_is_not_planned_for():
    model = model_facts(is_multimodal=True)
    with pytest.raises(UserError, match=r"what images pass through .* is not known"):
        plan(run_config(model__init="random"), facts(model, data=WITH))
    assert plan(run_config(model__init="random"), facts(model)).parts["vision"] == "left_out"


@pytest.mark.parametrize(
    ("both", "gpus", "attention"), [(True, 1, "varlen"), (False, 1, "sdpa"), (True, 0, "blockwise")]
)
def test_images_read_in_both_directions_need_no_mask_on_a_gpu(both, gpus, attention):
    """Packed or not."""
    tower = tower_facts().model_copy(update={"bidirectional": both})
    given = facts(model_facts(is_multimodal=True, tower=tower, head_dim=64), data=WITH, gpus=gpus)
    made = plan(run_config(data__packing=False), given)
    assert made.attention == attention
    said = " ".join(explain(each) for each in made.why)
    assert ("read in both directions" in said) == (attention == "varlen")


def test_each_part_is_as_asked():
    asked = {"vision": "frozen", "projector": "trained", "language": "lora"}
    assert parts_of(asked) == {"vision": "frozen", "projector": "trained", "language": "trained"}
    asked = {"vision": "trained", "projector": "trained", "language": "frozen"}
    assert parts_of(asked) == asked


def test_a_part_counts_once_whatever_is_trained():
    every, some = (
        plan(run_config(method__name="full", method__parts={"vision": state}), whole())
        for state in ("trained", "frozen")
    )
    assert every.num_parameters == every.num_trained == some.num_parameters > some.num_trained


def test_a_projector_is_no_module_to_save():
    tower = tower_facts().model_copy(update={"modules": {"projector": ("model.multi_modal_projector",)}})
    model = model_facts(is_multimodal=True, num_tower_parameters=1000, tower=tower)
    with pytest.raises(UserError, match="is the model's projector") as caught:
        plan(run_config(method__modules_to_save=["multi_modal_projector"]), facts(model, data=WITH))
    assert "method.parts.projector: trained" in caught.value.fix


def test_a_text_model_has_no_parts():
    assert plan(run_config(), facts()).parts == {}


def test_the_language_part_is_the_method_where_none_is_named():
    assert run_config(method__parts={"language": "qlora"}).method.name == "qlora"
    assert run_config(method__parts={"language": "frozen"}).method.name == "full"
    assert run_config(method__parts={"projector": "trained"}).method.name == "lora"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method__parts": {"vision": "lora"}}, "`method.parts.vision` cannot be lora: use auto, left_out, frozen or"),
        ({"method__parts": {"language": "trained"}}, "use full, lora or qlora"),
        ({"method__parts": {"language": "full"}, "method__name": "lora"}, "contradicts `method.name: lora`"),
        ({"method__parts": {"language": "frozen"}, "method__name": "lora"}, "remove method.name"),
    ],
)
def test_parts_that_no_model_has_are_refused(keys, message):
    assert any(message in finding for finding in check(run_config(**keys)))


@pytest.mark.parametrize(
    ("asked", "given", "message"),
    [
        ({"vision": "trained"}, facts(), "method.parts.vision: trained needs a model of text and images"),
        ({}, facts(data=WITH), "700 images in the training data, and the model reads text alone"),
        ({"projector": "trained"}, whole(WITHOUT), "no training sample has an image"),
        ({"language": "frozen"}, whole(WITHOUT), "nothing would be trained"),
        ({"vision": "left_out"}, whole(), "every image passes through vision tower and projector"),
        ({"projector": "frozen", "language": "frozen"}, whole(), "no part of the model is trained"),
    ],
)
def test_parts_that_contradict_the_model_or_the_data_are_refused(asked, given, message):
    with pytest.raises(UserError) as caught:
        plan(run_config(method__parts=asked), given)
    assert message in str(caught.value)


def rates_of(rates, **parts):
    modules = {"vision": ("model.visual",), "projector": ("model.visual.merger",)}
    tower = tower_facts().model_copy(update={"modules": modules})
    given = facts(model_facts(is_multimodal=True, num_tower_parameters=1000, tower=tower), data=WITH)
    return plan(run_config(method__parts=parts, optimizer__part_learning_rates=rates), given).rated_parts


def test_parts_with_a_rate_are_told_apart_from_within():
    """A projector may be inside of its tower; the language model is what is left, so other parts come before it."""
    parts = {"vision": "trained", "projector": "trained"}
    assert rates_of({"vision": 1e-5}, **parts) == {"vision": ("model.visual",)}
    assert list(rates_of({"projector": 1e-3, "language": 1e-4}, **parts)) == ["projector", "vision", "language"]
    assert rates_of({"language": 1e-4}) == {"language": ("*",)}
    with pytest.raises(UserError, match=r"part_learning_rates\.vision has nothing to train"):
        rates_of({"vision": 1e-5})
