"""Multimodal checkpoints fine-tuned on text alone: three methods, two strategies, two families (the second with a flat
configuration and positions of three axes); towers untouched in what is saved. And on images: from the command to what
others open.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from manyhands.cli.main import app
from manyhands.export.reference import Reference
from manyhands.export.verify import verify
from manyhands.infer.load import ModelLocation, load_model, open_answerer
from tests.e2e.runs import Place, Run, Spec
from tests.support.multimodal import write_tiny_multimodal
from tests.support.vision import processor_of, write_tiny_vision

pytestmark = pytest.mark.slow  # whole runs in processes of their own: minutes together

pytest.importorskip("bitsandbytes")
FAMILIES = {"gemma": "gemma3", "qwen": "qwen2_5_vl"}
METHODS = [("gemma", "lora"), ("gemma", "qlora"), ("gemma", "full"), ("qwen", "lora"), ("qwen", "full")]
RESUMED = ("qlora", "full")
STRATEGIES = ("ddp", "fsdp")
IDS = torch.arange(30)[None] + 40


def spec(place: Place, family: str, method: str, strategy: str, how: str, at: dict[str, int] | None = None) -> Spec:
    adapter = (f"method.name={method}", "method.dropout=0", "output.merge=true") if method != "full" else ()
    arguments = (f"model.name={place.folder / family}", f"parallel.strategy={strategy}", *adapter)
    return Spec(2, f"{family}-{method}-{how}", arguments, at, "full.yaml" if method == "full" else "run.yaml")


@pytest.fixture(scope="module")
def ran(place: Place) -> Place:
    """bfloat16 in the files, as published; every method under both strategies, and some broken off and resumed."""
    for family, kind in FAMILIES.items():
        write_tiny_multimodal(place.folder / family, "bfloat16", family=kind)
    specs = [spec(place, *each, strategy, strategy) for each in METHODS for strategy in STRATEGIES]
    for method in RESUMED:
        specs += [spec(place, "gemma", method, "fsdp", "resumed", at) for at in ({"step": 7}, None)]
    write_pictures(place.folder)
    specs += [Spec(2, "seen-resumed", SEEN, {"step": 7}), Spec(2, "seen-resumed", (*SEEN, "data.workers=1"))]
    place.many(*specs)
    return place


SEEN = (
    "model.name=eyes", "data.train=pictures.jsonl", "method.parts={vision: frozen, projector: trained, language: lora}",
    "optimizer.part_learning_rates={projector: 1e-2}", "output.merge=true", "stop.max_steps=8",
    "data.cache_features=true",
)  # fmt: skip


def write_pictures(folder: Path) -> None:
    """A model of images, and 24 rows of which a third have no image and a third two."""
    from PIL import Image

    config = write_tiny_vision(folder / "eyes", "gemma3") / "config.json"
    config.write_text(config.read_text().replace('"sliding_window": 8', '"sliding_window": 64'))  # answers see images
    colors = ("red", "green", "blue", "white")
    for color in colors:
        Image.new("RGB", (40, 30), color).save(folder / f"{color}.png")
    rows = []
    for number in range(24):
        shown = [colors[(number + place) % 4] for place in range(number % 3)]
        parts: list[Any] = [{"type": "image", "image": f"{color}.png"} for color in shown]
        asked = {"role": "user", "content": [*parts, {"type": "text", "text": f"what is number {number}"}]}
        said = {"role": "assistant", "content": " and ".join(shown) or "nothing"}
        rows.append(json.dumps({"messages": [asked, said]}) + "\n")
    (folder / "pictures.jsonl").write_text("".join(rows))


@pytest.fixture(scope="module")
def seen(ran: Place) -> Run:
    """``manyhands train`` on images in two processes, up to the verified result."""
    ended = ran.train("seen", *SEEN, "--gpus", "2")
    assert ended.code == 0, ended.output
    return ran.run("seen")


def written(run: Run, method: str) -> Path:
    return run.folder / ("model" if method == "full" else "merged")


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def is_tower(name: str, family: str) -> bool:
    return name.startswith("visual.") if family == "qwen" else not name.startswith("language_model.")


@pytest.mark.parametrize(("family", "method"), METHODS)
def test_both_strategies_train_and_evaluate_the_same(ran: Place, family: str, method: str) -> None:
    ddp, fsdp = (ran.run(f"{family}-{method}-{strategy}") for strategy in STRATEGIES)
    assert ddp.losses()[-1] < 0.95 * ddp.losses()[0]
    assert fsdp.losses() == pytest.approx(ddp.losses(), rel=1e-5)
    assert [loss for _, loss in fsdp.evaluations()] == pytest.approx([loss for _, loss in ddp.evaluations()], rel=1e-5)
    plan = ddp.read("plans/001.json")
    said = "a shrunken copy gives the same logits"
    assert family != "qwen" or (plan["packing"] and any(said in str(reason["values"]) for reason in plan["why"]))


@pytest.mark.parametrize("method", RESUMED)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(ran: Place, method: str) -> None:
    resumed, whole = ran.run(f"gemma-{method}-resumed"), ran.run(f"gemma-{method}-fsdp")
    assert resumed.course() == whole.course() and resumed.evaluations() == whole.evaluations()
    found, expected = tensors_of(written(resumed, method)), tensors_of(written(whole, method))
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("family", "method"), METHODS)
def test_the_saved_model_has_the_sources_layout_and_its_towers(
    ran: Place, family: str, method: str, strategy: str
) -> None:
    """The checkpoint saved with it contains only the text model."""
    run = ran.run(f"{family}-{method}-{strategy}")
    source, saved = tensors_of(ran.folder / family), tensors_of(written(run, method))
    assert {name: tensor.shape for name, tensor in saved.items()} == {
        name: tensor.shape for name, tensor in source.items()
    }
    towers = {name for name in source if is_tower(name, family)}
    assert len(towers) > 15 and all(torch.equal(saved[name].float(), source[name].float()) for name in towers)
    dtype = torch.bfloat16 if method == "full" else torch.float32  # merged: as the CPU computed, towers too
    assert {tensor.dtype for tensor in saved.values()} == {dtype}
    if family == "gemma" and method != "qlora":
        texts = source.keys() - towers
        changed = [name for name in texts if not torch.equal(saved[name].float(), source[name].float())]
        assert len(towers) > 20 and len(changed) == (len(texts) if method == "full" else 3 * 7)
    names: set[str] = set()
    for path in run.folder.glob("checkpoints/step-000012/*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= set(file.keys())
    texts = (".language_model.", ".lm_head.") if (family, method) == ("qwen", "full") else (".language_model.",)
    assert names and all(any(text in name for text in texts) for name in names)


@torch.no_grad()
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("method", ["lora", "full"])
def test_the_familys_own_class_opens_it_with_the_sources_eyes(ran: Place, method: str, strategy: str) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    opened: list[Any] = [
        Qwen2_5_VLForConditionalGeneration.from_pretrained(path, output_loading_info=True, dtype=torch.float32)
        for path in (ran.folder / "qwen", written(ran.run(f"qwen-{method}-{strategy}"), method))
    ]
    assert not any(info["missing_keys"] or info["unexpected_keys"] for _, info in opened)
    grid, pixels = (
        torch.tensor([[1, 4, 4]]),
        torch.randn(16, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(0)),
    )
    eyes = [model.eval().get_image_features(pixels, grid).pooler_output[0] for model, _ in opened]
    words = [model(input_ids=torch.arange(40)[None]).logits for model, _ in opened]
    assert torch.equal(*eyes) and not torch.allclose(*words, rtol=0.01)


def test_plain_transformers_opens_the_model_and_still_sees(ran: Place) -> None:
    from transformers import AutoModelForImageTextToText

    opened: list[Any] = [
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        for folder in (ran.folder / "gemma", ran.run("gemma-full-fsdp").folder / "model")
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

    run = ran.run(f"gemma-lora-{strategy}")
    base: Any = AutoModelForCausalLM.from_pretrained(ran.folder / "gemma", dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, str(run.folder / "adapter")).eval()
    adapted = {name for name, _ in model.named_parameters() if "lora_" in name}
    assert len(adapted) == 2 * 3 * 7 and all(".language_model." in name for name in adapted)
    merged: Any = AutoModelForCausalLM.from_pretrained(run.folder / "merged", dtype=torch.float32).eval()
    ours: Any = load_model(
        ModelLocation(ran.folder / "gemma", run.folder / "adapter")
    )  # as `manyhands generate` opens it
    with torch.no_grad():
        expected = merged(input_ids=IDS).logits
        for opened in (model, ours.cpu()):
            torch.testing.assert_close(opened(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("family", "method"), [each for each in METHODS if each != ("qwen", "full")])
def test_what_was_written_is_verified_by_its_hashes_and_logits(
    ran: Place, family: str, method: str, strategy: str
) -> None:
    folder = ran.run(f"{family}-{method}-{strategy}").folder
    for name in ("model",) if method == "full" else ("merged", "adapter"):
        reference, probe = Reference.read(folder / "verify" / f"{name}.json"), folder / "verify" / "probe.safetensors"
        found = verify(folder / name, reference, base=ran.folder / family, probe_path=probe)
        assert not found.findings and any("logits of" in note for note in found.notes), found


def test_images_are_trained_evaluated_and_resumed(ran: Place, seen: Run) -> None:
    plan, resumed = seen.read("plans/001.json"), ran.run("seen-resumed")
    assert plan["parts"] == {"vision": "frozen", "projector": "trained", "language": "trained"}
    assert seen.losses()[-1] < 0.9 * seen.losses()[0]
    evaluations = [loss for _, loss in seen.evaluations()]
    assert evaluations[-1] < evaluations[0]
    (sample,) = seen.rows("evaluation")[-1]["samples"]
    assert "what is number" in sample["prompt"]
    plans = [resumed.read(f"plans/{number}.json") for number in ("001", "002")]
    assert [(p["layout"]["data_workers"], p["keeps_features"]) for p in plans] == [(0, True), (1, True)]
    assert resumed.course() == seen.course() and resumed.evaluations() == seen.evaluations()
    for name in ("adapter/adapter_model.safetensors", "merged/model.safetensors"):
        found, expected = load_file(resumed.folder / name), load_file(seen.folder / name)
        assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)


def test_a_frozen_tower_keeps_its_bits_beside_a_trained_projector(ran: Place, seen: Run) -> None:
    source, merged = tensors_of(ran.folder / "eyes"), tensors_of(seen.folder / "merged")
    assert source.keys() == merged.keys()
    towers = {name for name in source if "vision_tower" in name}
    projector = {name for name in source if "multi_modal_projector" in name}
    assert len(towers) > 20 and all(torch.equal(merged[name], source[name]) for name in towers)
    assert projector and not any(torch.equal(merged[name], source[name]) for name in projector)
    saved = load_file(seen.folder / "adapter" / "adapter_model.safetensors")
    assert not any("vision_tower" in name for name in saved) and any("multi_modal_projector" in name for name in saved)


@torch.no_grad()
def test_peft_and_transformers_open_what_was_trained_on_images(ran: Place, seen: Run) -> None:
    from peft import PeftModel
    from PIL import Image
    from transformers import AutoModelForImageTextToText

    processor = processor_of(ran.folder / "eyes", "gemma3")
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what is number 1"}]}]
    text = processor.tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    images = [[Image.open(ran.folder / "red.png")]]
    inputs = processor(images=images, text=[text], add_special_tokens=False, return_tensors="pt")
    base, source, merged = (
        AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        for folder in (ran.folder / "eyes", ran.folder / "eyes", seen.folder / "merged")
    )
    adapted: Any = PeftModel.from_pretrained(base, str(seen.folder / "adapter")).eval()
    before, alone, together = (model(**inputs).logits for model in (source, merged, adapted))
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    assert (before - alone).abs().max() > 0.1


def test_an_image_is_answered_and_shown_by_the_commands(
    ran: Place, seen: Run, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ran.folder)
    call("generate", "runs/seen", "--prompt", "what is number 1", "--image", "red.png", "--max-new-tokens", "4")
    parts = [{"type": "image", "image": "red.png"}, {"type": "text", "text": "what is number 1"}]
    expected = open_answerer(seen.folder / "merged").answer([{"role": "user", "content": parts}], 4)
    assert capfd.readouterr().out.strip() == expected
    call("data", "run.yaml", *SEEN, "--html", "page.html")
    page = (ran.folder / "page.html").read_text()
    assert 'src="data:image/png;base64,' in page and ".png · 40 x 30 pixels · 4 tokens" in page


def call(*command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        app(list(command), prog_name="manyhands")
    assert not ended.value.code
