"""QLoRA whose factors begin at what NF4 loses: trained under any strategy, resumed, verified beside 4 bits, and merged
onto them.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import Place, Spec

pytestmark = pytest.mark.slow  # whole runs in processes of their own

pytest.importorskip("bitsandbytes")
LOFTQ = ("method.name=qlora", "method.init=loftq", "method.dropout=0", "output.merge=true")
FSDP = ("parallel.strategy=fsdp",)


@pytest.fixture(scope="module")
def ran(place: Place) -> Place:
    place.many(
        Spec(1, "l-one", LOFTQ),
        Spec(2, "l-fsdp", LOFTQ + FSDP),
        Spec(
            2, "l-kept", LOFTQ + FSDP + ("parallel.reshard_after_forward=false",)
        ),  # still gathered by the checks when the factors begin
        Spec(2, "l-resumed", LOFTQ + FSDP, {"step": 7}),
        Spec(2, "l-resumed", LOFTQ + FSDP),
        Spec(1, "l-zero", LOFTQ[:1] + LOFTQ[2:]),
    )
    return place


def test_every_strategy_trains_the_same_and_not_as_from_zero(ran: Place) -> None:
    one = ran.run("l-one")
    assert one.losses()[-1] < 0.9 * one.losses()[0]
    for name in ("l-fsdp", "l-kept"):
        assert ran.run(name).losses() == pytest.approx(one.losses(), rel=1e-5)
    assert abs(ran.run("l-zero").losses()[0] / one.losses()[0] - 1) > 1e-4


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(ran: Place) -> None:
    resumed, whole = ran.run("l-resumed"), ran.run("l-fsdp")
    assert resumed.course() == whole.course() and resumed.evaluations() == whole.evaluations()
    for file in ("adapter/adapter_model.safetensors", "merged/model.safetensors"):
        assert (resumed.folder / file).read_bytes() == (whole.folder / file).read_bytes(), file


def test_adapter_and_merged_model_are_reopened_and_compared_by_logits(ran: Place) -> None:
    """In fresh processes: PEFT puts the adapter beside a model that transformers quantises, and begins no factors of
    its own.
    """
    for name, opener, more in (("adapter", "PeftModel", ()), ("merged", "AutoModelForCausalLM", ("--merge",))):
        output = ran.folder / f"l-{name}"
        ended = ran.call("-m", "manyhands", "export", str(ran.run("l-fsdp").folder), "--output", str(output), *more)
        assert ended.code == 0 and opener in ended.output and "logits of" in ended.output, ended.output
        assert "factors: LoftQ" not in ended.output
        file = "adapter_model.safetensors" if name == "adapter" else "model.safetensors"
        assert (output / file).read_bytes() == (ran.run("l-fsdp").folder / name / file).read_bytes()


def test_the_merged_model_is_nearer_to_the_source_than_from_zero(ran: Place) -> None:
    """Merged onto the weights in 4 bits, whose loss the factors make smaller; onto those in 16 it would be added to
    them.
    """
    source = load_file(ran.folder / "model" / "model.safetensors")
    distance = {}
    for name in ("l-one", "l-zero"):
        merged = load_file(ran.run(name).folder / "merged" / "model.safetensors")
        names = [key for key in source if key.endswith("_proj.weight")]
        distance[name] = float(
            torch.stack([(merged[key].float() - source[key].float()).square().sum() for key in names]).sum()
        )
    assert distance["l-one"] < 0.95 * distance["l-zero"]
