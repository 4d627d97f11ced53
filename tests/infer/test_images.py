"""Prompts with images: ids and answers are those of the family's own processor and ``generate``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from manyhands.core.errors import UserError
from manyhands.data.read.messages import RowRefused
from manyhands.infer.batch import answer_file
from manyhands.infer.chat import chat
from manyhands.infer.load import open_answerer
from manyhands.infer.prompts import prompt_of
from manyhands.infer.replicas import Placement
from manyhands.infer.settings import GenerationSettings
from manyhands.launch.run.folder import RunFolder
from manyhands.model.structure import auto_class_of
from tests.launch.builders import make_config
from tests.support.tiny import write_tiny_model
from tests.support.vision import processor_of, write_tiny_vision

NEW = 6
SLOW = (
    "llava",
    "llava_onevision",
    "smolvlm",
    "internvl",
    "qwen2_5_vl",
    "lighton_ocr",
    "gemma4",
    "gemma4 experts",
    "mistral3 experts",
)
FAMILIES = ("gemma3", "qwen3_vl", "mistral3", *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW))
CPU = Placement(processes=1)


def draw_images(folder: Path) -> list[Path]:
    draw, paths = np.random.default_rng(0), [folder / "a.png", folder / "b.png"]
    for path, size in zip(paths, ((40, 30, 3), (28, 56, 3)), strict=True):
        Image.fromarray(draw.integers(0, 256, size, dtype=np.uint8)).save(path)
    return paths


def about(*images: Path, text: str = "what is it") -> list[dict[str, Any]]:
    parts = [{"type": "image", "image": str(image)} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


@torch.no_grad()
def reference(folder: Path, family: str, messages: list[dict[str, Any]]) -> tuple[list[int], torch.Tensor, list[int]]:
    """(ids of the prompt, its logits, ids of the answer) by transformers alone."""
    processor = processor_of(folder, family)
    model = auto_class_of(folder).from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    text = processor.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    images = [Image.open(part["image"]) for part in messages[0]["content"] if part["type"] == "image"]
    made = processor(
        images=[images] if family in ("gemma3", "smolvlm", "llava_onevision") else images,
        text=[text],
        add_special_tokens=False,
        return_tensors="pt",
        **({"return_mm_token_type_ids": True} if family.startswith(("qwen", "gemma")) else {}),
    )
    made.pop("pixel_attention_mask", None)
    prompt = made["input_ids"][0].tolist()
    found = model.generate(**made, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
    return prompt, model(**made, use_cache=False).logits[0], found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_and_answer_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder, (first, second) = write_tiny_vision(tmp_path / "model", family), draw_images(tmp_path)
    answerer = replace(open_answerer(folder), end_ids=frozenset())
    conversations = [about(first), about(first, second), [{"role": "user", "content": "hello"}], about(second)]
    answers = answerer.answer_all(conversations, GenerationSettings(max_new_tokens=NEW))
    ids, seen = [], []
    for number in (0, 1, 3):
        expected_ids, expected, answer = reference(folder, family, conversations[number])
        prompt = prompt_of(number, answerer.tokenizer, {}, conversations[number], images=answerer.images)
        assert list(prompt.ids) == expected_ids and list(answers[number].ids) == answer
        inputs = answerer.images.inputs(answerer.model, prompt.ids, prompt.images)
        with torch.no_grad():
            seen.append(answerer.model(torch.tensor([prompt.ids]), **inputs, use_cache=False).logits[0])
        ids.append(prompt.ids)
        torch.testing.assert_close(seen[-1], expected, rtol=1e-4, atol=1e-4)
    # SmolVLM cuts images of other sizes into other tiles: up to the first other id the image is all that differs.
    same = next((at for at, (one, other) in enumerate(zip(*ids[::2], strict=False)) if one != other), len(ids[0]))
    assert (seen[0][:same] - seen[2][:same]).abs().max() > 1e-3, "another image, other logits behind it"


def test_rows_of_a_file_have_images_by_path_and_are_answered_in_order(tmp_path: Path) -> None:
    folder = write_tiny_vision(tmp_path / "model", "gemma3")
    draw_images(tmp_path)
    rows: list[dict[str, Any]] = [
        {"prompt": "hello"},
        {"prompt": "<image>what is it", "images": ["a.png"]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "path": "b.png"}, {"type": "text", "text": "?"}]}
            ]
        },
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = GenerationSettings(max_new_tokens=NEW)
    assert answer_file(folder, file, tmp_path / "answers.jsonl", settings, placement=CPU, report=lambda _: None) == 3
    answers = [json.loads(line)["answer"] for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    hello = [{"role": "user", "content": "hello"}]
    conversations = [hello, about(tmp_path / "a.png"), about(tmp_path / "b.png", text="?")]
    assert answers == [answer.text for answer in open_answerer(folder).answer_all(conversations, settings)]
    file.write_text(json.dumps({"prompt": "<image>?", "images": ["nothing.png"]}) + "\n")
    with pytest.raises(UserError) as caught:
        answer_file(folder, file, tmp_path / "more.jsonl", settings, placement=CPU, report=lambda _: None)
    assert ":1: " in caught.value.details[0] and "nothing.png does not exist" in caught.value.details[0]


def test_images_have_the_sizes_that_the_run_was_trained_on(tmp_path: Path) -> None:
    folder = write_tiny_vision(tmp_path / "runs" / "model", "qwen3_vl")
    path = tmp_path / "large.png"
    Image.fromarray(np.zeros((112, 112, 3), dtype=np.uint8)).save(path)

    def num_tokens(folder: Path) -> int:
        answerer = open_answerer(folder)
        return len(prompt_of(0, answerer.tokenizer, {}, about(path), images=answerer.images).ids)

    as_the_processor_has_it = num_tokens(folder)
    run = RunFolder(folder.parent)
    run.create()
    run.write_config(make_config(**{"model.name": str(folder), "data.shrink_images_above": 56 * 56}))
    assert num_tokens(run.path) == as_the_processor_has_it - 16 + 4  # a token is 28 x 28 pixels
    run.write_config(make_config(**{"model.name": str(folder), "data.max_image_pixels": 112 * 112}))
    assert num_tokens(run.path) == as_the_processor_has_it
    run.write_config(make_config(**{"model.name": str(folder), "data.max_image_pixels": 112 * 112 - 1}))
    with pytest.raises(RowRefused, match=r"data\.max_image_pixels is 12,543"):
        num_tokens(run.path)


def test_a_chat_shows_an_image_to_its_next_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, (first, _) = write_tiny_vision(tmp_path / "model", "gemma3"), draw_images(tmp_path)
    answerer, settings = open_answerer(folder), GenerationSettings(max_new_tokens=NEW)
    chat(answerer, settings, lines=[f"/image {first}\n", "what is it\n", "/image gone.png\n", "and now\n"])
    said = capsys.readouterr()
    assert said.out.split("\n")[0] == answerer.answer_all([about(first)], settings)[0].text
    assert "gone.png does not exist" in said.err


def test_images_of_a_refused_turn_wait_for_the_next_until_they_are_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, (first, _) = write_tiny_vision(tmp_path / "model", "gemma3"), draw_images(tmp_path)
    answerer, settings = open_answerer(folder), GenerationSettings(max_new_tokens=NEW)
    refused = "what <image_soft_token> is it\n"  # a placeholder of the user's own
    chat(answerer, settings, lines=[f"/image {first}\n", refused, "what is it\n"])
    said = capsys.readouterr()
    assert said.out.split("\n")[1] == answerer.answer_all([about(first)], settings)[0].text
    assert "1 image waits for the next turn; /image alone drops it" in said.err
    chat(answerer, settings, lines=[f"/image {first}\n", refused, "/image\n", "what is it\n"])
    alone = answerer.answer_all([[{"role": "user", "content": "what is it"}]], settings)[0].text
    assert capsys.readouterr().out.split("\n")[1] == alone


def test_a_text_model_refuses_an_image(tmp_path: Path) -> None:
    folder, (first, _) = write_tiny_model(tmp_path / "model"), draw_images(tmp_path)
    with pytest.raises(UserError, match="the model reads text alone"):
        open_answerer(folder).answer_all([about(first)])


def refuse_file(folder: Path, file: Path, row: dict[str, Any]) -> str:
    """What is said of the only row of a file of prompts."""
    file.write_text(json.dumps(row) + "\n")
    with pytest.raises(UserError, match="1 of 1 prompts cannot be answered") as caught:
        answer_file(
            folder, file, file.with_suffix(".answers"), GenerationSettings(), placement=CPU, report=lambda _: None
        )
    return caught.value.details[0]


def test_a_row_of_prompts_is_refused_with_what_is_wrong_with_its_images(tmp_path: Path) -> None:
    folder, file = write_tiny_vision(tmp_path / "model", "gemma3"), tmp_path / "prompts.jsonl"
    draw_images(tmp_path)
    said = refuse_file(folder, file, {"messages": about(Path("a.png"), text="what <image_soft_token> is it")})
    assert "5 placeholders for images are in the prompt, and its images take 4" in said
    said = refuse_file(folder, file, {"prompt": "?", "image": "https://localhost/a.png"})
    assert "images of prompts are not fetched" in said and "image_urls" not in said


@pytest.mark.parametrize("row", [{"messages": about(Path("a.png"))}, {"prompt": "what is it", "images": ["a.png"]}])
def test_a_text_model_refuses_rows_with_images(tmp_path: Path, row: dict[str, Any]) -> None:
    said = refuse_file(write_tiny_model(tmp_path / "model"), tmp_path / "prompts.jsonl", row)
    assert ":1: the prompt has images, and text alone is read" in said


def amplify(folder: Path) -> None:
    """Larger weights of projector and head and no narrow window: answers of a random model depend on the image."""
    path, config = folder / "model.safetensors", folder / "config.json"
    weights = load_file(path)
    untied = any("lm_head" in name for name in weights)
    own = {name for name in weights if untied and ("lm_head" in name or "embed_tokens" in name)}
    for name in weights:
        weights[name] *= 30 if "projector" in name or "merger" in name else 8 if name in own else 1
    save_file(weights, path, metadata={"format": "pt"})
    config.write_text(config.read_text().replace('"sliding_window": 8', '"sliding_window": 64'))


@pytest.mark.ci
@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl"])
def test_prompts_of_an_evaluation_are_answered_with_their_images(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the model that is whole, with a cache, as by one that is sharded, without: as transformers answers them. An
    image of a later turn is not part of the prompt."""
    from manyhands.infer import sample_prompts
    from tests.keys.lab import open_lab

    folder, (first, second) = write_tiny_vision(tmp_path / "model-of-images", family), draw_images(tmp_path)
    amplify(folder)
    monkeypatch.setattr(sample_prompts, "end_token_ids", lambda *_: frozenset())
    answer = [{"role": "assistant", "content": "so"}]
    asked = [about(first), about(first, second), about(second)]
    asked[2] += answer + about(first, text="and this")
    with open_lab(tmp_path / "lab") as lab:
        sets = {"train": [about(first, text="other") + answer], "validation": [turns + answer for turns in asked]}
        keys = {"model.name": str(folder), "data.validation_fraction": 0.02, "data.max_length": 512}
        for name, rows in sets.items():
            keys[f"data.{name}"] = lab.write_rows(f"{name}.jsonl", [{"messages": turns} for turns in rows])
        rank = lab.start(keys | {"evaluate.prompts": 3, "evaluate.max_new_tokens": NEW})
        prompts = sample_prompts.SamplePrompts(rank.config, rank.plan, rank.store, rank.tokenizer, np.arange(3))
        chosen, given = prompts.chosen, (rank.model, rank.engine, rank.world, lambda *_: None)
        named = ["[image a.png] ", "[image a.png] [image b.png] ", "[image b.png] "]
        assert [prompt.text for prompt in chosen] == [f"{name}what is it" for name in named]
        references = [reference(folder, family, turns[:1]) for turns in asked]
        assert [prompt.ids for prompt in chosen] == [ids for ids, _, _ in references]
        expected = [rank.tokenizer.decode(new, skip_special_tokens=True).strip() for _, _, new in references]
        seen: list[torch.Tensor] = []
        hook = rank.model.register_forward_hook(lambda _model, _inputs, output: seen.append(output.logits[0, -1]))
        assert [text for _, text in prompts.answer(*given)] == expected
        hook.remove()
        own = rank.engine.next_token_logits
        monkeypatch.setattr(rank.engine, "next_token_logits", lambda *ids: seen.append(own(*ids)[0]) or seen[-1])
        monkeypatch.setattr(type(rank.engine), "is_local", False)
        assert [text for _, text in prompts.answer(*given)] == expected
        new = [tuple(new) for _, _, new in references]
        assert len(set(new)) == 3, "another image, another answer"
        chosen_ids = [int(logits.argmax()) for logits in seen]
        assert chosen_ids == [token for answer in (*new, *new) for token in answer]
        for place, (_, logits, _) in enumerate([*references, *references]):
            torch.testing.assert_close(seen[place * NEW], logits[-1], rtol=1e-4, atol=1e-4)
