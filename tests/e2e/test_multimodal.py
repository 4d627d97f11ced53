"""A multimodal checkpoint fine-tuned on text alone: three methods, two strategies; towers untouched in what is
saved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from manyhands.export.reference import Reference
from manyhands.export.verify import verify
from manyhands.infer.load import Found, load_model
from tests.e2e.runs import Place, Run, Spec
from tests.support.multimodal import write_tiny_multimodal

pytestmark = pytest.mark.slow  # whole runs in processes of their own: minutes together

pytest.importorskip("bitsandbytes")
METHODS = ("lora", "qlora", "full")
RESUMED = ("qlora", "full")
STRATEGIES = ("ddp", "fsdp")
IDS = torch.arange(30)[None] + 40


def spec(place: Place, method: str, strategy: str, name: str, break_at: dict[str, int] | None = None) -> Spec:
    adapter = (f"method.name={method}", "method.dropout=0", "output.merge=true") if method != "full" else ()
    arguments = (f"model.name={place.folder / 'gemma'}", f"parallel.strategy={strategy}", *adapter)
    return Spec(2, name, arguments, break_at, "full.yaml" if method == "full" else "run.yaml")


@pytest.fixture(scope="module")
def ran(place: Place) -> Place:
    """bfloat16 in the files, as published; every method under both strategies, and some broken off and resumed."""
    write_tiny_multimodal(place.folder / "gemma", "bfloat16")
    specs = [spec(place, method, strategy, f"g-{method}-{strategy}") for method in METHODS for strategy in STRATEGIES]
    for method in RESUMED:
        name = f"g-{method}-resumed"
        specs += [spec(place, method, "fsdp", name, {"step": 7}), spec(place, method, "fsdp", name)]
    place.many(*specs)
    return place


def written(run: Run, method: str) -> Path:
    return run.folder / ("model" if method == "full" else "merged")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("method", METHODS)
def test_both_strategies_train_and_evaluate_the_same(ran: Place, method: str) -> None:
    ddp, fsdp = (ran.run(f"g-{method}-{strategy}") for strategy in STRATEGIES)
    assert ddp.losses()[-1] < 0.95 * ddp.losses()[0]
    assert fsdp.losses() == pytest.approx(ddp.losses(), rel=1e-5)
    assert [loss for _, loss in fsdp.evaluations()] == pytest.approx([loss for _, loss in ddp.evaluations()], rel=1e-5)


@pytest.mark.parametrize("method", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(ran: Place, method: str) -> None:
    resumed, whole = ran.run(f"g-{method}-resumed"), ran.run(f"g-{method}-fsdp")
    assert resumed.course() == whole.course() and resumed.evaluations() == whole.evaluations()
    found, expected = tensors_of(written(resumed, method)), tensors_of(written(whole, method))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("method", METHODS)
def test_the_saved_model_has_the_sources_layout_and_its_towers(ran: Place, method: str, strategy: str) -> None:
    source, saved = tensors_of(ran.folder / "gemma"), tensors_of(written(ran.run(f"g-{method}-{strategy}"), method))
    assert {name: tensor.shape for name, tensor in saved.items()} == {
        name: tensor.shape for name, tensor in source.items()
    }
    towers = {name for name in source if not name.startswith("language_model.")}
    assert len(towers) > 20 and all(torch.equal(saved[name].float(), source[name].float()) for name in towers)
    dtype = torch.bfloat16 if method == "full" else torch.float32  # merged: as the CPU computed, towers too
    assert {tensor.dtype for tensor in saved.values()} == {dtype}
    changed = [name for name in source.keys() - towers if not torch.equal(saved[name].float(), source[name].float())]
    assert len(changed) == (len(source.keys() - towers) if method == "full" else 3 * 7) or method == "qlora"


@pytest.mark.parametrize("method", METHODS)
def test_checkpoints_hold_no_tower(ran: Place, method: str) -> None:
    names: set[str] = set()
    for path in ran.run(f"g-{method}-fsdp").folder.glob("checkpoints/step-000012/*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    assert names and all(".language_model." in name for name in names)


def test_plain_transformers_opens_the_model_and_still_sees(ran: Place) -> None:
    from transformers import AutoModelForImageTextToText

    opened: list[Any] = [
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        for folder in (ran.folder / "gemma", ran.run("g-full-fsdp").folder / "model")
    ]
    assert not any(info["missing_keys"] or info["unexpected_keys"] for _, info in opened)
    image = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before, after = (model.eval().get_image_features(image).pooler_output for model, _ in opened)
    assert torch.equal(before, after)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_peft_puts_the_adapter_on_the_text_alone(ran: Place, strategy: str) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = ran.run(f"g-lora-{strategy}")
    base: Any = AutoModelForCausalLM.from_pretrained(ran.folder / "gemma", dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, str(run.folder / "adapter")).eval()
    adapted = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert len(adapted) == 2 * 3 * 7 and all(".language_model." in name for name in adapted)
    merged: Any = AutoModelForCausalLM.from_pretrained(run.folder / "merged", dtype=torch.float32).eval()
    ours: Any = load_model(Found(ran.folder / "gemma", run.folder / "adapter"))  # as `manyhands generate` opens it
    with torch.no_grad():
        expected = merged(input_ids=IDS).logits
        for opened in (model, ours.cpu()):
            torch.testing.assert_close(opened(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("method", "names"), [("full", ("model",)), ("lora", ("merged", "adapter")), ("qlora", ("merged", "adapter"))]
)
def test_what_was_written_is_verified_by_its_hashes_and_logits(ran: Place, method: str, names: tuple[str, ...]) -> None:
    for strategy in STRATEGIES:
        folder = ran.run(f"g-{method}-{strategy}").folder
        for name in names:
            reference, probe = (
                Reference.read(folder / "verify" / f"{name}.json"),
                folder / "verify" / "probe.safetensors",
            )
            found = verify(folder / name, reference, base=ran.folder / "gemma", probe_path=probe)
            assert not found.findings and any("logits of" in note for note in found.notes), found
