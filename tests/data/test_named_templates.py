"""Chat templates by name: each as its family's public definition has it, masked as any other, and only with its tokens
there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from manyhands.config.keys import table
from manyhands.core.errors import UserError
from manyhands.data.formats import Conversation
from manyhands.data.render import render
from manyhands.data.tokenizer import TEMPLATES, load_tokenizer, read_chat_template
from tests.support.tiny import tiny_tokenizer

TURNS = [("user", "Hi"), ("assistant", "Yes."), ("user", "Why?"), ("assistant", "So.")]
BRIEF = ("system", "Be brief.")
PREAMBLE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
)
# What the public definitions give for BRIEF and TURNS. The assistant's own text, its end included, stands in braces.
EXPECTED = {
    "alpaca": "BOSBe brief.\n\n### Instruction:\nHi\n\n### Response:\n{Yes.EOS}\n\n"
    "### Instruction:\nWhy?\n\n### Response:\n{So.EOS}",
    "chatml": "BOS<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{Yes.<|im_end|>}\n"
    "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n{So.<|im_end|>}\n",
    "gemma": "BOS<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n{Yes.<end_of_turn>}\n"
    "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n{So.<end_of_turn>}\n",
    "llama3": "BOS<|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{Yes.<|eot_id|>}"
    "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{So.<|eot_id|>}",
    "mistral": "BOS[INST] Be brief.\n\nHi[/INST]{ Yes.EOS}[INST] Why?[/INST]{ So.EOS}",
    "mistral-v7": "BOS[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]{Yes.EOS}[INST]Why?[/INST]{So.EOS}",
    "phi3": "BOS<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n{Yes.<|end|>}\n"
    "<|user|>\nWhy?<|end|>\n<|assistant|>\n{So.<|end|>}\n",
    "phi4": "BOS<|im_start|>system<|im_sep|>Be brief.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
    "<|im_start|>assistant<|im_sep|>{Yes.<|im_end|>}<|im_start|>user<|im_sep|>Why?<|im_end|>"
    "<|im_start|>assistant<|im_sep|>{So.<|im_end|>}",
    "zephyr": "BOS<|system|>\nBe brief.EOS\n<|user|>\nHiEOS\n<|assistant|>\n{Yes.EOS}\n"
    "<|user|>\nWhy?EOS\n<|assistant|>\n{So.EOS}\n",
}


def messages(*turns: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": content} for role, content in turns]


def write_tokenizer(folder: Path, *tokens: str) -> Path:
    tokenizer = tiny_tokenizer(("EOS", "BOS", *tokens))
    tokenizer.bos_token, tokenizer.eos_token = "BOS", "EOS"
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_public_definition_and_the_mask(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, *TEMPLATES[name].tokens), name)
    marked = EXPECTED[name]
    text = marked.replace("{", "").replace("}", "")
    conversation = messages(BRIEF, *TURNS)
    assert tokenizer.apply_chat_template(conversation, tokenize=False) == text
    opened = marked[: marked.rindex("{")]
    opened = opened.replace("{", "").replace("}", "")
    assert tokenizer.apply_chat_template(conversation[:-1], tokenize=False, add_generation_prompt=True) == opened
    rendered = render(Conversation(messages=conversation), tokenizer)
    assert rendered.ids.tolist() == tokenizer.encode(text, add_special_tokens=False)
    answers = [part.split("}")[0] for part in marked.split("{")[1:]]
    assert tokenizer.decode(rendered.ids[rendered.trained]) == "".join(answers)


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_a_system_message_and_without_roles_unknown_to_it(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, *TEMPLATES[name].tokens), name)
    text = tokenizer.apply_chat_template(messages(*TURNS), tokenize=False)
    assert "Be brief" not in text and "system" not in text.lower() and text.count("Yes.") == 1
    assert (PREAMBLE in text) == (name == "alpaca")
    with pytest.raises(Exception, match=r"role|turns"):
        tokenizer.apply_chat_template(
            messages(("user", "Hi"), ("critic", "No."), ("assistant", "Yes.")), tokenize=False
        )


@pytest.mark.parametrize("name", [name for name, template in TEMPLATES.items() if template.tokens])
def test_tokens_that_are_not_there_are_named_and_can_be_added(name: str, tmp_path: Path) -> None:
    folder, needed = write_tokenizer(tmp_path), TEMPLATES[name].tokens
    with pytest.raises(UserError, match=f"the chat template {name} needs tokens") as refused:
        load_tokenizer(folder, name)
    assert all(token in refused.value.why for token in needed) and "model.new_tokens" in refused.value.fix
    tokenizer = load_tokenizer(folder, name, new_tokens=needed)
    assert render(Conversation(messages=messages(*TURNS)), tokenizer).trained.any()


def test_a_begin_of_text_token_that_is_a_marker_or_the_end_is_not_written_twice(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, "<|im_start|>", "<|im_end|>"), "chatml")
    for token in ("<|im_start|>", tokenizer.eos_token):
        tokenizer.bos_token = token
        assert tokenizer.apply_chat_template(messages(*TURNS), tokenize=False).startswith("<|im_start|>user")


def test_names_are_listed_and_misspelt_ones_led_to_them() -> None:
    described = table()["model.chat_template"].sentence
    assert all(name in described for name in TEMPLATES) and EXPECTED.keys() == TEMPLATES.keys()
    with pytest.raises(UserError, match="no such chat template: chat-ml") as refused:
        read_chat_template("chat-ml")
    assert "did you mean chatml?" in refused.value.fix and "mistral-v7" in refused.value.fix
