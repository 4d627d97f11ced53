"""QLoRA from the run file to the verified adapter and merged model: resumed bit for bit, sharded or not, nothing frozen
saved.
"""

from __future__ import annotations

import pytest
from safetensors import safe_open

from tests.e2e.runs import Place, Spec

pytestmark = pytest.mark.slow  # whole runs in processes of their own: minutes together

pytest.importorskip("bitsandbytes")
QLORA = ("method.name=qlora", "method.dropout=0", "output.merge=true")
FSDP = ("parallel.strategy=fsdp",)


@pytest.fixture(scope="module")
def ran(place: Place) -> Place:
    broken = [Spec(2, name, QLORA + more, {"step": 7}) for name, more in (("q-resumed", FSDP), ("q-gathered", FSDP))]
    whole = [Spec(1, "q-one", QLORA), Spec(2, "q-ddp", QLORA), Spec(2, "q-fsdp", QLORA + FSDP)]
    place.many(*whole, *broken, Spec(2, "q-resumed", QLORA + FSDP), Spec(1, "q-gathered", QLORA))
    return place


def test_every_strategy_trains_the_same(ran: Place) -> None:
    one = ran.run("q-one")
    assert one.losses()[-1] < 0.9 * one.losses()[0]
    for name in ("q-ddp", "q-fsdp", "q-gathered"):
        run = ran.run(name)
        assert run.losses() == pytest.approx(one.losses(), rel=1e-5)
        assert [norm for *_, norm in run.course()] == pytest.approx([norm for *_, norm in one.course()], rel=1e-5)
        assert [loss for _, loss in run.evaluations()] == pytest.approx(
            [loss for _, loss in one.evaluations()], rel=1e-5
        )


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(ran: Place) -> None:
    resumed, whole = ran.run("q-resumed"), ran.run("q-fsdp")
    assert resumed.course() == whole.course() and resumed.evaluations() == whole.evaluations()
    for file in ("adapter/adapter_model.safetensors", "merged/model.safetensors"):
        assert (resumed.folder / file).read_bytes() == (whole.folder / file).read_bytes(), file


def test_checkpoints_hold_the_trained_state_alone(ran: Place) -> None:
    names = set()
    for path in ran.run("q-fsdp").folder.glob("checkpoints/step-000012/*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    assert names and all(".lora_" in name for name in names)


def test_adapter_and_merged_model_are_reopened_and_compared_by_logits(ran: Place) -> None:
    """The adapter beside a model that transformers itself quantises with bitsandbytes."""
    for name, opener, more in (("adapter", "PeftModel", ()), ("merged", "AutoModelForCausalLM", ("--merge",))):
        output = ran.folder / f"q-{name}"
        ended = ran.call("-m", "manyhands", "export", str(ran.run("q-fsdp").folder), "--output", str(output), *more)
        assert ended.code == 0 and opener in ended.output and "logits of" in ended.output, ended.output
        file = "adapter_model.safetensors" if name == "adapter" else "model.safetensors"
        assert (output / file).read_bytes() == (ran.run("q-fsdp").folder / name / file).read_bytes()
