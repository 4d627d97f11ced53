"""What vision tower, projector and images take: counted by hand, and laws that hold whatever the constants are."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.facts.gpu_kinds import load_kinds
from manyhands.facts.types import Facts
from manyhands.planner.candidates import CHECKPOINTING
from manyhands.planner.efficiency import largest_samples
from manyhands.planner.memory.images import (
    kept_by_images,
    memory_by_part,
    num_units,
    outer_gathered,
    tower_at_work,
    with_images,
)
from manyhands.planner.memory.input import EstimateInput, describe_images
from manyhands.planner.memory.terms import estimate_terms
from manyhands.planner.search import base_input, plan
from manyhands.planner.time.clock import lay_out
from manyhands.planner.time.input import TimeInput
from manyhands.planner.time.rates import load_fitted, rates_of_kind
from manyhands.planner.time.terms import towers_s
from manyhands.planner.time.work import MeanStep, MicroBatchGroup
from tests.planner.examples import data_facts, facts, gemma_4b_with_images, model_facts, run_config, tower_facts
from tests.support.plans import change_input, explain_why

IMAGES = data_facts(num_images=1000, max_image_units=1, mean_image_units=1.0, max_image_tokens=256)
FROZEN, TRAINED = "frozen", "trained"
FEW = settings(max_examples=20, deadline=None, derandomize=True)


def seen(tower: Any = None, data: Any = IMAGES, **more: Any) -> Facts:
    tower = tower or tower_facts()
    outer = tower.num_parameters + tower.num_projector_parameters
    model = model_facts(hidden=64, inner=128, is_multimodal=True, num_tower_parameters=outer, tower=tower)
    return facts(model, data=data, **more)


def estimated(parts: tuple[str, str, str], given: Facts | None = None, **changes: Any) -> EstimateInput:
    asked = dict(zip(("vision", "projector", "language"), parts, strict=True))
    config = run_config(method__parts=asked, parallel__device="cpu", model__dtype="float32")
    return change_input(
        base_input(config, given or seen()), **({"micro_tokens": 64, "full_micro_tokens": 64} | changes)
    )


def test_weights_gradients_and_states_of_each_part_are_counted_once() -> None:
    """In float32: a frozen weight 4 bytes, a trained one 16, whichever way the language model is trained."""
    tower, text = tower_facts(), seen().model.num_parameters
    vision, projector = tower.num_parameters, tower.num_projector_parameters
    for asked in product((FROZEN, TRAINED), (FROZEN, TRAINED), (FROZEN, "full")):
        if asked == (FROZEN, FROZEN, FROZEN):
            continue
        s = estimated(asked)
        states = [size for size, state in zip((vision, projector, text), asked, strict=True) if state != FROZEN]
        assert s.num_trained == sum(states), asked
        terms = estimate_terms(s)
        assert terms["weights"] == 4 * (vision + projector + text), asked
        assert terms["optimizer"] == 8 * sum(states), asked
    lora = estimated((FROZEN, TRAINED, "lora"))
    assert lora.num_trained == lora.num_adapter_parameters + projector
    assert estimate_terms(lora)["optimizer"] == 8 * lora.num_trained


def test_activations_of_images_are_as_counted_by_hand() -> None:
    """64 tokens hold 32 squares of 2 placeholders, of 4 patches each."""
    tower = tower_facts()
    s = estimated((FROZEN, FROZEN, "lora"))
    assert num_units(s) == 32
    pixels, features = 32 * tower.unit_values * 4, 64 * 4 * 64
    assert kept_by_images(s) == pixels + features
    assert tower_at_work(s, s.images, backward=False) == 32 * 4 * 4 * (2 * 8 + 2 * 32)
    projected = estimated((FROZEN, TRAINED, "lora"))
    assert kept_by_images(projected) == pixels + features + 128 * 4 * 8 + 2 * features
    trained = estimated((TRAINED, TRAINED, "lora"))
    blocks = 3 * 128 * (4 * (8 * 8 + 2 * 32) + 4 * 2)
    assert kept_by_images(trained) == kept_by_images(projected) + blocks
    again = change_input(trained, activation_checkpointing="full")
    assert kept_by_images(again) == kept_by_images(projected) + 3 * 128 * 4 * 8
    unpacked = change_input(s, micro_tokens=None, micro_samples=3)
    assert num_units(unpacked) == 3


def test_no_micro_batch_has_more_patches_than_the_plan_counts() -> None:
    """Packs of whatever samples, some of which have many patches and few tokens (images that are cut to a strip), and
    rows; placeholders alone would not bound them. The micro-batch that is tried first has as many as any.
    """
    tower, draw, most = tower_facts(patches=1, tokens=0.25), np.random.default_rng(0), 0
    lengths = draw.integers(20, 400, 300)
    units = np.where(draw.random(300) < 0.5, draw.integers(1, 300, 300), 0)
    lengths[7], units[7] = 30, 1500  # planted: twelve times the patches that its tokens could stand for
    per_token, longest = float((units / lengths).max()), int(lengths.max())
    of_images = {"num_images": 300, "max_image_units": int(units.max()), "max_units_per_token": per_token}
    data = data_facts(300, longest=longest, mean_image_units=float(units.mean()), **of_images)
    for capacity in (400, 777, 4096):
        s = estimated((FROZEN, FROZEN, "lora"), seen(tower, data), micro_tokens=capacity, full_micro_tokens=capacity)
        for _ in range(20):
            step = draw.choice(300, size=int(draw.integers(1, 64)), replace=False)
            laid = lay_out(s.layout, np.append(step, 7), lengths, units * float(draw.choice([0.0, 0.3, 30.0])))
            found = max(int(units[part].sum()) for micro in laid.micro_batches for part in micro)
            assert found <= num_units(s)
            most = max(most, found / num_units(s))
        drawn = SimpleNamespace(lengths=lengths, image_units=units)
        tried = [int(units[samples].sum()) for samples in largest_samples(s.layout, drawn)]
        assert units[7] <= max(tried) <= num_units(s) and tried[0] < max(tried)
    assert most * per_token > 4, "the bound of tokens that are all placeholders would have been passed"
    rows = change_input(s, micro_tokens=None, micro_samples=4)
    assert num_units(rows) == 6000 and sum(sorted(units)[-4:]) <= 6000


def test_a_frozen_language_model_keeps_less_for_its_backward_pass() -> None:
    """Gradients pass through it to the projector: no input of a linear layer is needed."""
    full, frozen = (estimate_terms(estimated((FROZEN, TRAINED, text))) for text in ("full", FROZEN))
    assert frozen["activations"] < full["activations"] and frozen["gradients"] < full["gradients"]


towers = st.builds(
    tower_facts,
    hidden=st.integers(1, 20).map(lambda n: 64 * n),
    inner=st.integers(1, 40).map(lambda n: 128 * n),
    layers=st.integers(1, 40),
    patches=st.sampled_from([1, 16, 256, 4096]),
    tokens=st.sampled_from([0.25, 1.0, 64.0, 256.0]),
    projector=st.integers(1, 10**7),
)
asked_parts = st.tuples(*(st.sampled_from([FROZEN, TRAINED]),) * 2, st.sampled_from(["full", "lora", "qlora"]))
shared = st.fixed_dictionaries(
    {
        "activation_checkpointing": st.sampled_from(CHECKPOINTING),
        "reshard_after_forward": st.booleans(),
        "full_micro_tokens": st.integers(1, 64).map(lambda n: 256 * n),
        "strategy": st.sampled_from(["ddp", "fsdp"]),
    }
)


def total(s: EstimateInput) -> int:
    return sum(estimate_terms(s).values())


@FEW
@given(tower=towers, parts=asked_parts, layout=shared)
def test_laws_of_memory(tower: Any, parts: Any, layout: Any) -> None:
    given = seen(tower)
    s = estimated(parts, given, world_size=4, **layout)
    assert total(s) >= total(replace(s, images=None))
    if not s.trains_everything and parts[0] == FROZEN:
        # a part that is trained takes more than a frozen one, and never less memory on more GPUs
        assert total(replace(s, images=replace(s.images, vision=TRAINED))) > total(s)
    assert total(change_input(s, full_micro_tokens=2 * s.layout.full_micro_tokens)) >= total(s)
    if s.layout.strategy == "fsdp":
        assert total(change_input(s, world_size=8)) <= total(s)
    by_part = memory_by_part(s)
    weights = sum(sizes.get("weights", 0) for sizes in by_part.values())
    assert weights <= estimate_terms(s)["weights"] + 8
    if parts[0] == FROZEN:
        assert by_part["vision"].keys() == {"weights"}
        deeper = replace(s.images, tower=tower.model_copy(update={"num_layers": tower.num_layers + 5}))
        assert kept_by_images(replace(s, images=deeper)) == kept_by_images(s), "a frozen tower keeps nothing"


def seconds(s: EstimateInput, samples: float = 8.0) -> float:
    fitted, kind = load_fitted(), next(kind for kind in load_kinds() if kind.name == "H200")
    work = MeanStep((MicroBatchGroup(1.0, 4096.0, 1e6, 1e6),), 4096.0 * 8, samples)
    return towers_s(TimeInput(s, work, rates_of_kind(kind, fitted), fitted, "varlen", num_local=1))


@FEW
@given(tower=towers, layout=shared)
def test_laws_of_time(tower: Any, layout: Any) -> None:
    given = seen(tower)
    frozen, trained = (estimated((state, TRAINED, "lora"), given, **layout) for state in (FROZEN, TRAINED))
    assert 2.5 * seconds(frozen) < seconds(trained) < 4.5 * seconds(frozen)
    assert seconds(frozen, 16.0) == pytest.approx(2 * seconds(frozen))
    assert seconds(replace(frozen, images=None)) == 0


def test_images_of_many_patches_attend_to_more() -> None:
    tower = tower_facts(patches=1, tokens=0.25)
    few, many = (
        describe_images(
            {"vision": FROZEN, "projector": FROZEN, "language": TRAINED},
            seen(tower).model,
            data_facts(num_images=1000, max_image_units=units, mean_image_units=float(units)),
        )
        for units in (256, 4096)
    )
    assert (few.mean_patches, many.mean_patches) == (256, 4096)


def test_the_plan_of_a_4b_model_says_what_each_part_takes() -> None:
    given = facts(gemma_4b_with_images(), gpus=1, data=IMAGES)
    made = plan(run_config(method__parts={"language": "frozen"}), given)
    assert made.parts == {"vision": "frozen", "projector": "trained", "language": "frozen"}
    (parts,), (images,) = explain_why(made, "parts"), explain_why(made, "images")
    assert parts == "parts: vision frozen, projector trained, language frozen"
    assert "squares of 4,096) per micro-batch; vision weights 0.8 GiB; projector weights" in images
    assert not made.layout.trains_everything and made.memory.terms["optimizer"] == 8 * (1152 * 2560 + 1152)
    everything = plan(run_config(method__parts={"vision": "trained", "language": "full"}), given)
    assert everything.layout.trains_everything
    assert everything.memory.terms["optimizer"] == 8 * (given.model.num_parameters + given.model.num_tower_parameters)


def test_gradients_of_a_tower_come_when_its_blocks_have_let_go_of_what_they_kept() -> None:
    """Recomputed, the tower ends its backward pass with all gradients and one block; casts of the others are gone."""
    s = change_input(estimated((TRAINED, TRAINED, FROZEN)), activation_checkpointing="full", compute_dtype="bfloat16")
    tower, standing = s.images.tower, {"weights": 0, "gathered": 0}
    moment = {"gradients": 0, "unreduced": 0, "dequantized": 0, "activations": 0, "logits": 0, "reduction": 0}
    gradients = s.outer_trained * s.gradient_bytes
    _, (loss, end_of_text, forward, begin, end) = with_images(s, standing, (moment, moment | {"gradients": gradients}))
    assert (loss["gradients"], end_of_text["gradients"], forward["gradients"], begin["gradients"]) == (0, 0, 0, 0)
    assert end["gradients"] == gradients
    patches = num_units(s) * tower.patches_per_unit
    assert begin["activations"] - end["activations"] == (tower.num_layers - 1) * patches * 2 * tower.hidden_size
    kept = change_input(s, activation_checkpointing="none")
    assert outer_gathered(kept) - outer_gathered(s) == 2 * (tower.num_layers - 1) * tower.num_block_parameters
