"""Greedy generation: where it stops, and that the two ways agree."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.config.schema import RunConfig
from manyhands.core.world import World
from manyhands.data.store.streams import make_sample
from manyhands.infer.decode import complete, end_of_turn, end_token_ids, greedy
from manyhands.infer.sample_prompts import SamplePrompt, SamplePrompts
from manyhands.infer.settings import GenerationSettings
from tests.export.tiny import make_model, make_tokenizer
from tests.support.tiny import tiny_tokenizer


def test_greedy_follows_the_most_likely_token_until_an_end() -> None:
    calls: list[list[int]] = []

    def count_up(ids: torch.Tensor) -> torch.Tensor:
        calls.append(ids[0].tolist())
        return torch.nn.functional.one_hot(ids[:, -1] + 1, 10).float()

    assert greedy(count_up, [3, 4], 20, {8}) == [5, 6, 7]
    assert calls == [[3, 4], [3, 4, 5], [3, 4, 5, 6], [3, 4, 5, 6, 7]]
    assert greedy(count_up, [0], 2, set()) == [1, 2]


def test_ranks_that_see_a_tie_differently_take_the_same_token() -> None:
    def tie(ids: torch.Tensor) -> torch.Tensor:
        return torch.ones(10)

    assert greedy(tie, [1], 3, {9}, agree=lambda token: torch.full_like(token, 4)) == [4, 4, 4]


def test_cached_generation_equals_whole_forwards_and_leaves_the_model_as_it_was() -> None:
    model, tokenizer = make_model().train(), make_tokenizer()
    model.set_attn_implementation("eager")
    text = complete(model, tokenizer, [[8, 9, 10]], GenerationSettings(max_new_tokens=12), {2})[0].text
    assert model.training and model.config._attn_implementation == "eager"
    model.eval()
    ids = greedy(lambda ids: model(input_ids=ids, use_cache=False).logits[:, -1], [8, 9, 10], 12, {2})
    assert text == tokenizer.decode(ids, skip_special_tokens=True).strip()
    assert len(ids) == 12


def test_an_end_token_is_not_part_of_the_answer() -> None:
    model, tokenizer = make_model(), make_tokenizer()
    ids = greedy(lambda ids: model(input_ids=ids, use_cache=False).logits[:, -1], [8, 9, 10], 5, set())
    end = next(i for i in range(1, 5) if ids[i] not in ids[:i])
    answer = complete(model, tokenizer, [[8, 9, 10]], GenerationSettings(max_new_tokens=12), {ids[end]})[0]
    assert answer.ids == tuple(ids[:end]) and answer.text == tokenizer.decode(ids[:end]).strip()


@pytest.mark.parametrize(
    ("generation", "config", "expected"), [(7, 5, {7, 4}), ([7, 9], 5, {7, 9, 4}), (None, 5, {5, 4}), (None, None, {4})]
)
def test_every_token_that_ends_a_turn_is_found(
    tmp_path: Path, generation: object, config: object, expected: set[int]
) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}))
    assert end_token_ids(tmp_path, make_tokenizer()) == expected  # 4 is <|im_end|>, from the chat template


@pytest.mark.parametrize(
    ("closing", "expected"),
    [
        ("<|im_end|>", ["<|im_end|>"]),
        ("<|im_end|></s>", ["<|im_end|>"]),
        ("{{ '</s>' if loop.last else '<|im_end|>' }}", ["</s>", "<|im_end|>"]),
        ("\nw1\n</s>", ["</s>"]),
        ("\n", []),
    ],
)
def test_the_template_says_how_the_last_turn_closes_and_how_those_before_it(closing: str, expected: list[str]) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|> {{ m['role'] }} {{ m['content'] }} " + closing + "{% endfor %}"
    )
    assert end_of_turn(tokenizer) == tuple(tokenizer.convert_tokens_to_ids(expected))


@pytest.mark.parametrize("header", ["", "<|im_start|>"])
def test_ends_are_told_apart_by_tokens_whose_spellings_end_alike(header: str) -> None:
    """The first question follows ``<|im_start|>``, the second ``<|im_end|>``: both end in ``|>``."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "<|im_start|>{% for m in messages %}" + header + "{{ m['role'] }} {{ m['content'] }}"
        "{{ '</s>' if loop.last else '<|im_end|>' }}{% endfor %}"
    )
    assert end_of_turn(tokenizer) == (2, 4)


def test_a_template_that_refuses_a_third_message_says_how_the_last_turn_closes() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% if messages | length > 2 %}{{ raise_exception('one question only') }}{% endif %}"
        "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} <|im_end|>{% endfor %}"
    )
    assert end_of_turn(tokenizer) == (4,)


def test_without_a_template_the_tokenizers_end_counts(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = None
    assert end_token_ids(tmp_path, tokenizer) == {2}


def test_a_prompt_is_shown_without_special_tokens_that_have_no_name() -> None:
    named = tiny_tokenizer()
    tokenizer = type(named)(tokenizer_object=named.backend_tokenizer, eos_token="<|endoftext|>")
    text = "<|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n7"
    ids = np.array(tokenizer.encode(text), dtype=np.int32)
    sample = make_sample(ids, np.arange(len(ids)) == len(ids) - 1)
    held_out = SimpleNamespace(sample=lambda row: sample)
    store: Any = SimpleNamespace(train=SimpleNamespace(num_images=None), validation=held_out)
    config = RunConfig.model_validate({"name": "a", "model": {"name": "b"}, "data": {"train": "c.jsonl"}})
    [prompt] = SamplePrompts(config, None, store, tokenizer, np.arange(1)).chosen  # type: ignore[arg-type]
    assert prompt.text == "What is 3 + 4?"


def test_answers_in_training_end_where_the_run_ends_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files name the base's end alone."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    fields = {"name": "a", "model": {"name": "b", "special_tokens": {"eos": "w9"}}, "data": {"train": "c.jsonl"}}
    tokenizer = make_tokenizer()
    tokenizer.eos_token = "w9"
    config, plan = RunConfig.model_validate(fields), SimpleNamespace(model_folder=str(tmp_path))
    store: Any = SimpleNamespace(train=SimpleNamespace(num_images=None))
    prompts = SamplePrompts(config, plan, store, tokenizer, np.arange(0))  # type: ignore[arg-type]
    prompts.chosen = [SamplePrompt([1], "one")]
    monkeypatch.setattr(SamplePrompts, "_answer_here", lambda self, model, prompt, ends: sorted(ends))
    engine: Any = SimpleNamespace(is_local=True)
    [(_, ends)] = prompts.answer(None, engine, World(0, 0, 1, torch.device("cpu")), lambda *_: None)
    assert ends == [4, 5, tokenizer.eos_token_id]
