"""LLaMA-Factory's chat formats by name: what each writes, and which of it is trained."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.data.chat.render import render
from manyhands.data.read.formats import Conversation
from manyhands.data.read.messages import RowRefused
from manyhands.importers.llamafactory.templates import CHAT_FORMATS, make_chat_template
from tests.support.tiny import tiny_tokenizer

TURNS = [("user", "Hi"), ("assistant", "Yes."), ("user", "Why?"), ("assistant", "So.")]
BRIEF = ("system", "Be brief.")
TOKENS = (
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>",
    "<end_of_turn>", "<think>", "</think>",
)  # fmt: skip
QWEN = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
# What LLaMA-Factory writes; what is trained stands in braces.
EXPECTED = [
    (
        "llama3",
        [BRIEF, *TURNS],
        "BOS<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n{Yes.<|eot_id|>}"
        "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n{So.<|eot_id|>}",
    ),
    (
        "qwen",
        TURNS[:2],
        f"<|im_start|>system\n{QWEN}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n{Yes.<|im_end|>}\n",
    ),
    ("qwen3_nothink", TURNS[:2], "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{Yes.<|im_end|>}\n"),
    (
        "qwen3",
        TURNS,
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{<think>\n\n</think>\n\nYes.<|im_end|>}\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n{<think>\n\n</think>\n\nSo.<|im_end|>}\n",
    ),
    ("gemma", [BRIEF, *TURNS[:2]],
     "BOS<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n{Yes.<end_of_turn>}\n"),
    ("llama2", [BRIEF, *TURNS],
     "BOS[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]{Yes.EOS}BOS[INST] Why? [/INST]{So.EOS}"),
    ("alpaca", [BRIEF, *TURNS[:2]], "Be brief.### Instruction:\nHi\n\n### Response:\n{Yes.EOS}\n\n"),
]  # fmt: skip


def tokenizer_with(template: str) -> Any:
    tokenizer = tiny_tokenizer(("EOS", "BOS", *TOKENS))
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.chat_template = "BOS", "EOS", template
    return tokenizer


def messages(turns: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize(("name", "turns", "marked"), EXPECTED, ids=[name for name, _, _ in EXPECTED])
def test_the_text_and_the_mask(name: str, turns: list[tuple[str, str]], marked: str) -> None:
    tokenizer = tokenizer_with(make_chat_template(CHAT_FORMATS[name]))
    rendered = render(Conversation(messages(turns)), tokenizer)
    assert tokenizer.decode(rendered.ids) == marked.replace("{", "").replace("}", "")
    assert tokenizer.decode(rendered.ids[rendered.trained]) == "".join(
        part.split("}")[0] for part in marked.split("{")[1:]
    )


def test_without_thinking_the_empty_thought_is_the_prompt_s_and_thoughts_are_cut_out() -> None:
    tokenizer = tokenizer_with(make_chat_template(CHAT_FORMATS["qwen3"], thinks=False))
    turns = [("user", "Hi"), ("assistant", "<think>\nwell\n</think>\n\nYes.")]
    rendered = render(Conversation(messages(turns)), tokenizer)
    assert tokenizer.decode(rendered.ids[rendered.trained]) == "Yes.<|im_end|>"
    asked = tokenizer.apply_chat_template(messages(turns[:1]), tokenize=False, add_generation_prompt=True)
    assert asked.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert "well" not in tokenizer.decode(rendered.ids)


def test_thoughts_of_the_last_answer_only() -> None:
    tokenizer = tokenizer_with(make_chat_template(CHAT_FORMATS["qwen3"], last_thought_only=True))
    thought = [(role, f"<think>\nwell\n</think>\n\n{text}" if role == "assistant" else text) for role, text in TURNS]
    rendered = render(Conversation(messages(thought)), tokenizer, train_on="last")
    assert tokenizer.decode(rendered.ids).count("well") == 1
    assert tokenizer.decode(rendered.ids[rendered.trained]) == "<think>\nwell\n</think>\n\nSo.<|im_end|>"


def test_another_system_prompt_or_none() -> None:
    for prompt in ("Speak 'Latin' in {C:\\new}.\n\"{{ x }}\"", ""):
        tokenizer = tokenizer_with(make_chat_template(CHAT_FORMATS["qwen"], default_system=prompt))
        text = tokenizer.apply_chat_template(messages(TURNS), tokenize=False)
        assert QWEN not in text and ("system" in text) is bool(prompt) and prompt in text


@pytest.mark.parametrize("name", CHAT_FORMATS)
def test_every_format_can_be_masked_and_refuses_other_roles(name: str) -> None:
    tokenizer = tokenizer_with(make_chat_template(CHAT_FORMATS[name]))
    rendered = render(Conversation(messages([BRIEF, *TURNS])), tokenizer)
    trained = tokenizer.decode(rendered.ids[rendered.trained])
    assert "Yes." in trained and "So." in trained and "Hi" not in trained and "Why?" not in trained
    with pytest.raises(RowRefused, match="there is no other role"):
        render(Conversation(messages([TURNS[0], ("tool", "21"), TURNS[1]])), tokenizer)
