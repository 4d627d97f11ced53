"""Batches of prompts: every row gets the tokens that it gets alone, whatever is beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from manyhands.core.errors import UserError
from manyhands.families import measured_types
from manyhands.infer.decode import TextStream, attend_grouped, can_pad, complete, sample
from manyhands.infer.settings import GenerationSettings
from tests.export.tiny import make_model, make_tokenizer
from tests.support.tiny import tiny_model

LENGTHS = (5, 23, 2, 11)  # some longer than the windows of 8
ALL_FAMILIES = measured_types()


def make_prompts(vocab: int = 250, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(8, vocab, (length,), generator=generator).tolist() for length in lengths]


def alone(model: Any, prompts: list[list[int]], settings: GenerationSettings, ends: set[int]) -> list[Any]:
    return [complete(model, make_tokenizer(), [p], settings, ends, [n])[0] for n, p in enumerate(prompts)]


@pytest.mark.ci
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_batch_of_unequal_prompts_gives_each_the_tokens_it_gets_alone(family: str) -> None:
    model = tiny_model(family).eval()
    settings = GenerationSettings(max_new_tokens=12)
    prompts = make_prompts(min(model.config.get_text_config().vocab_size, 250))
    expected = alone(model, prompts, settings, set())
    if can_pad(model.config):
        assert complete(model, make_tokenizer(), prompts, settings, set()) == expected
    else:
        with pytest.raises(ValueError, match="padding is not exact"):
            complete(model, make_tokenizer(), prompts, settings, set())
        same = [prompt[:2] for prompt in prompts]  # of equal lengths they may
        assert complete(model, make_tokenizer(), same, settings, set()) == alone(model, same, settings, set())
    reference = model.generate(  # transformers' own loop
        torch.tensor([prompts[0]]), do_sample=False, max_new_tokens=12, eos_token_id=None, repetition_penalty=1.0
    )
    assert reference[0, len(prompts[0]) :].tolist() == list(expected[0].ids)


@pytest.mark.parametrize("masked", [False, True])
def test_grouped_attention_is_that_of_sdpa(masked: bool) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    torch.manual_seed(0)
    query, key, value = (torch.randn(3, heads, n, 16) for heads, n in ((8, 1), (2, 11), (2, 11)))
    mask = torch.rand(3, 1, 1, 11) > 0.4 if masked else None
    module = torch.nn.Module()
    module.num_key_value_groups = 4  # type: ignore[assignment]
    expected, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    found, _ = attend_grouped(module, query, key, value, mask, scaling=0.3)
    assert found.shape == expected.shape == (3, 1, 8, 16)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_it_is_what_new_tokens_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    from manyhands.infer import decode

    calls: list[torch.Size] = []
    attend = decode.scaled_dot_product_attention

    def record(query: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        calls.append(query.shape)
        return attend(query, *rest, **more)

    monkeypatch.setattr(decode, "scaled_dot_product_attention", record)
    model = make_model()
    complete(model, make_tokenizer(), [[9, 8, 7], [5]], GenerationSettings(max_new_tokens=5), set())
    assert calls == [(2, 2, 2, 16)] * 2 * 4  # layers, and tokens after the first
    assert model.config._attn_implementation == "sdpa"


def test_rows_that_end_early_leave_the_batch_and_change_nothing() -> None:
    model, prompts = make_model(), make_prompts(lengths=(5, 23, 2, 11, 7, 9))
    free = alone(model, prompts, GenerationSettings(max_new_tokens=30), set())
    ends = {free[i].ids[k] for i, k in ((0, 1), (1, 2), (2, 4), (3, 8))}  # rows stop at different steps
    sizes: list[int] = []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    found = complete(model, make_tokenizer(), prompts, GenerationSettings(max_new_tokens=30), ends)
    hook.remove()
    assert found == alone(model, prompts, GenerationSettings(max_new_tokens=30), ends)
    assert {answer.finish_reason for answer in found} == {"stop", "length"}
    assert sizes[0] == 6 and sizes[-1] < 4


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_sampled_answers_depend_on_seed_and_number_alone(penalty: float) -> None:
    model, prompts = make_model(), make_prompts()
    settings = GenerationSettings(max_new_tokens=16, temperature=0.9, top_p=0.9, top_k=40, repetition_penalty=penalty)
    together = complete(model, make_tokenizer(), prompts, settings, {2})
    assert together == alone(model, prompts, settings, {2})
    backwards = complete(model, make_tokenizer(), prompts[::-1], settings, {2}, [3, 2, 1, 0])
    assert backwards == together[::-1]
    assert complete(model, make_tokenizer(), prompts, settings, {2}, [4, 5, 6, 7]) != together


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (5, 1.0), (0, 0.6), (12, 0.7), (0, 0.01)])
def test_the_distribution_is_that_of_transformers_warpers(top_k: int, top_p: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(1, 40) * 2
    warpers = LogitsProcessorList([TemperatureLogitsWarper(0.7)])
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    expected = warpers(None, logits.clone()).softmax(-1)[0].double()
    draws = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000  # every quantile once
    settings = GenerationSettings(temperature=0.7, top_k=top_k, top_p=top_p)
    tokens = sample(logits.expand(len(draws), -1), draws, settings)
    found = torch.bincount(tokens, minlength=40) / len(draws)
    assert (found - expected).abs().max() < 2e-4
    assert sample(logits, torch.tensor([1 - 2**-53], dtype=torch.float64), settings)[0] in expected.nonzero()


def test_the_penalty_is_transformers_and_does_not_see_the_padding() -> None:
    model, prompts = make_model(), make_prompts()
    settings = GenerationSettings(max_new_tokens=10, repetition_penalty=1.5)
    found = complete(model, make_tokenizer(), prompts, settings, {0})  # the id of the padding is an end token
    for prompt, answer in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        for _ in range(10):
            logits = model(input_ids=ids).logits[:, -1]
            token = RepetitionPenaltyLogitsProcessor(1.5)(ids, logits).argmax(-1, keepdim=True)
            ids = torch.cat([ids, token], 1)
        expected = ids[0, len(prompt) :].tolist()
        assert list(answer.ids) == (expected[: expected.index(0)] if 0 in expected else expected)


def test_an_answer_ends_before_a_stop_string_that_spans_tokens() -> None:
    model, tokenizer, prompts = make_model(), make_tokenizer(), make_prompts()
    plain = complete(model, tokenizer, prompts, GenerationSettings(max_new_tokens=12), set())
    words = plain[0].text.split()
    stop = f"{words[4][-1]} {words[5]}"
    shown = dict.fromkeys(range(len(prompts)), "")
    found = complete(
        model,
        tokenizer,
        prompts,
        GenerationSettings(max_new_tokens=12, stop=(stop,)),
        set(),
        on_text=lambda n, text: shown.__setitem__(n, shown[n] + text),
    )
    assert found[0].text == plain[0].text[: plain[0].text.index(stop)].strip() and stop not in found[0].text
    assert found[0].finish_reason == "stop" and len(found[0].ids) < 12
    for n in range(len(prompts)):
        expected = plain[n].text.split(stop)[0].strip()
        assert found[n].text == expected == shown[n]


class Bytes:
    """A tokenizer of bytes, for characters of several tokens."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def test_a_stream_shows_whole_characters() -> None:
    stream, text = TextStream(Bytes()), "a é 漢字 🙂 z"
    pieces = [stream.add(byte) for byte in text.encode()]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize(
    ("values", "option"),
    [
        ({"max_new_tokens": 0}, "--max-new-tokens"),
        ({"temperature": -1}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"temperature": 1, "top_p": 0}, "--top-p"),
        ({"top_k": 5}, "--top-k"),
        ({"repetition_penalty": 0}, "--repetition-penalty"),
        ({"stop": [""]}, "--stop"),
    ],
)
def test_settings_that_cannot_be_or_would_do_nothing_are_refused(values: dict[str, Any], option: str) -> None:
    with pytest.raises(UserError) as caught:
        GenerationSettings(**values)
    assert caught.value.where == option
