"""Chat templates by name: each as its family's public definition has it, masked as any other, and only with its tokens
there.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyhands.config.keys import table
from manyhands.config.named_templates import TEMPLATES
from manyhands.config.schema import ModelSection
from manyhands.core.errors import UserError
from manyhands.data.chat.render import render
from manyhands.data.read.files import Row
from manyhands.data.read.formats import Conversation, to_conversation
from manyhands.data.tokenize.tokenizer import load_tokenizer, read_chat_template, tokenizer_digest
from manyhands.export.files import write_tokenizer as copy_tokenizer
from tests.support.tiny import tiny_tokenizer

TURNS = [("user", "Hi"), ("assistant", "Yes."), ("user", "Why?"), ("assistant", "So.")]
BRIEF = ("system", "Be brief.")
PREAMBLE = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
)
# What the public definitions give for BRIEF and TURNS. The assistant's own text, its end included, stands in braces.
EXPECTED = {
    "alpaca": "Be brief.\n\n### Instruction:\nHi\n\n### Response:\n{Yes.EOS}\n\n"
    "### Instruction:\nWhy?\n\n### Response:\n{So.EOS}",
    "alpaca-chat": "SYSTEM: Be brief.\nUSER: Hi\nASSISTANT:{Yes.EOS}\nUSER: Why?\nASSISTANT:{So.EOS}",
    "alpaca-phi": "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n{Yes.EOS}\n"
    "<|user|>\nWhy?<|end|>\n<|assistant|>\n{So.EOS}",
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
    "cohere": "BOS<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{Yes.<|END_OF_TURN_TOKEN|>}"
    "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>Why?<|END_OF_TURN_TOKEN|>"
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{So.<|END_OF_TURN_TOKEN|>}",
    "deepseek-v2": "BOSBe brief.\n\n<｜User｜>Hi<｜Assistant｜>{Yes.EOS}<｜User｜>Why?<｜Assistant｜>{So.EOS}",
    "deepseek-v3": "BOSBe brief.<｜User｜>Hi<｜Assistant｜>{Yes.EOS}<｜User｜>Why?<｜Assistant｜>{So.EOS}",
    "exaone": "[|system|]Be brief.[|endofturn|]\n[|user|]Hi\n[|assistant|]{Yes.[|endofturn|]}\n"
    "[|user|]Why?\n[|assistant|]{So.[|endofturn|]}\n",
    "gemma4": "BOS<|turn>system\nBe brief.<turn|>\n<|turn>user\nHi<turn|>\n<|turn>model\n{Yes.<turn|>}\n"
    "<|turn>user\nWhy?<turn|>\n<|turn>model\n{So.<turn|>}\n",
    "jamba": "BOS<|bom|><|system|> Be brief.<|eom|><|bom|><|user|> Hi<|eom|><|bom|><|assistant|>{ Yes.<|eom|>}"
    "<|bom|><|user|> Why?<|eom|><|bom|><|assistant|>{ So.<|eom|>}",
    "llama4": "BOS<|header_start|>system<|header_end|>\n\nBe brief.<|eot|><|header_start|>user<|header_end|>\n\nHi"
    "<|eot|><|header_start|>assistant<|header_end|>\n\n{Yes.<|eot|>}<|header_start|>user<|header_end|>\n\nWhy?<|eot|>"
    "<|header_start|>assistant<|header_end|>\n\n{So.<|eot|>}",
    "mistral-v1": "BOS [INST] Be brief.\n\nHi [/INST]{ Yes.EOS} [INST] Why? [/INST]{ So.EOS}",
    "mistral-tekken": "BOS[INST]Be brief.\n\nHi[/INST]{Yes.EOS}[INST]Why?[/INST]{So.EOS}",
    "vicuna": "BOSBe brief. USER: Hi ASSISTANT:{ Yes.EOS}USER: Why? ASSISTANT:{ So.EOS}",
    "zephyr": "BOS<|system|>\nBe brief.EOS\n<|user|>\nHiEOS\n<|assistant|>\n{Yes.EOS}\n"
    "<|user|>\nWhy?EOS\n<|assistant|>\n{So.EOS}\n",
}
EXPECTED["alpaca-plain"] = "BOS" + EXPECTED["alpaca"]
EXPECTED["metharme"] = "BOS<|system|>Be brief.<|user|>Hi<|model|>{Yes.}<|user|>Why?<|model|>{So.EOS}"
EXPECTED["chatml-no-bos"] = EXPECTED["qwen2-vl"] = EXPECTED["qwen2.5"] = EXPECTED["chatml"].removeprefix("BOS")
EXPECTED["falcon-h1"] = EXPECTED["chatml"]
EXPECTED["phi3.5"] = EXPECTED["phi3"].removeprefix("BOS")
DATES = "Cutting Knowledge Date: December 2023\nToday Date: 01 Jan 2026\n\n"
EXPECTED["llama3.1"] = EXPECTED["llama3.2-vision"] = EXPECTED["llama3"].replace("Be brief.", DATES + "Be brief.")
# What stands in front of a conversation without a system message.
DEFAULTS = {
    "alpaca": PREAMBLE,
    "alpaca-chat": f"SYSTEM: {PREAMBLE.strip()}\n",
    "alpaca-phi": f"<|system|>\n{PREAMBLE.strip()}<|end|>\n",
    "exaone": "[|system|][|endofturn|]\n",
    "jamba": "<|bom|><|system|> <|eom|>",
    "llama3.1": f"<|start_header_id|>system<|end_header_id|>\n\n{DATES}<|eot_id|>",
    "llama3.2-vision": f"<|start_header_id|>system<|end_header_id|>\n\n{DATES}<|eot_id|>",
    "metharme": "<|system|>Enter RP mode. You shall reply to the user while staying in character. Your responses must "
    "be detailed, creative, immersive, and drive the scenario forward.",
    "qwen2-vl": "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n",
    "qwen2.5": "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n",
    "vicuna": "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
    "detailed, and polite answers to the user's questions. ",
}
DAY = {"date_string": "01 Jan 2026"}


def messages(*turns: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": content} for role, content in turns]


def write_tokenizer(folder: Path, *tokens: str, begins: bool = False) -> Path:
    """``begins``: it puts BOS in front of every text."""
    tokenizer = tiny_tokenizer(("EOS", "BOS", *tokens))
    tokenizer.bos_token, tokenizer.eos_token = "BOS", "EOS"
    tokenizer.save_pretrained(folder)
    if begins:
        path = folder / "tokenizer.json"
        fields = json.loads(path.read_text())
        number = next(token["id"] for token in fields["added_tokens"] if token["content"] == "BOS")
        single = [{"SpecialToken": {"id": "BOS", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        fields["post_processor"] = {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": {"BOS": {"id": "BOS", "ids": [number], "tokens": ["BOS"]}},
        }
        path.write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_public_definition_and_the_mask(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, *TEMPLATES[name].tokens), name)
    marked = EXPECTED[name]
    text = marked.replace("{", "").replace("}", "")
    conversation = messages(BRIEF, *TURNS)
    assert tokenizer.apply_chat_template(conversation, tokenize=False, **DAY) == text
    opened = marked[: marked.rindex("{")]
    opened = opened.replace("{", "").replace("}", "")
    assert tokenizer.apply_chat_template(conversation[:-1], tokenize=False, add_generation_prompt=True, **DAY) == opened
    rendered = render(Conversation(messages=conversation), tokenizer)
    assert rendered.ids.tolist() == tokenizer.encode(text, add_special_tokens=False)
    answers = [part.split("}")[0] for part in marked.split("{")[1:]]
    assert tokenizer.decode(rendered.ids[rendered.trained]) == "".join(answers)


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_a_system_message_and_without_roles_unknown_to_it(name: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, *TEMPLATES[name].tokens), name)
    text = tokenizer.apply_chat_template(messages(*TURNS), tokenize=False, **DAY)
    default = DEFAULTS.get(name, "")
    assert text.removeprefix("BOS").startswith(default) and text.count("Yes.") == 1
    assert "Be brief" not in text and "system" not in text.replace(default, "").lower()
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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("alpaca", "{paired}\n\n### Instruction:\nAdd.\n\n### Input:\n1 and 2\n\n### Response:\n3EOS"),
        ("alpaca-chat", "SYSTEM: {paired}\nUSER: Add.\n1 and 2\nASSISTANT:3EOS"),
        ("alpaca-phi", "<|system|>\n{paired}<|end|>\n<|user|>\nAdd.<|end|>1 and 2<|assistant|>3EOS"),
        ("chatml", "BOS<|im_start|>user\nAdd.\n1 and 2<|im_end|>\n<|im_start|>assistant\n3<|im_end|>\n"),
    ],
)
def test_rows_with_an_input_get_the_classic_instructions(name: str, expected: str, tmp_path: Path) -> None:
    """Of a tokenizer without a template: only templates that tell input from instruction show them apart."""
    paired = PREAMBLE.strip().replace("task.", "task, paired with an input that provides further context.")
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, *TEMPLATES[name].tokens), name)
    row = Row({"instruction": "Add.", "input": "1 and 2", "output": "3"}, "f", 1)
    rendered = render(to_conversation(row, "alpaca"), tokenizer)
    assert tokenizer.decode(rendered.ids) == expected.replace("{paired}", paired)
    assert tokenizer.decode(rendered.ids[rendered.trained]) in ("3EOS", "3<|im_end|>")


@pytest.mark.parametrize("name", ["alpaca", "alpaca-chat", "alpaca-phi"])
def test_prompts_begin_as_the_tokenizer_begins_a_text(name: str, tmp_path: Path) -> None:
    """Also in the exported folder, whose template states it for its tokenizer."""
    for begins in (False, True):
        folder = write_tokenizer(tmp_path / f"model-{begins}", *TEMPLATES[name].tokens, begins=begins)
        rendered = render(Conversation(messages=messages(BRIEF, *TURNS)), load_tokenizer(folder, name))
        target = tmp_path / f"out-{begins}"
        target.mkdir()
        copy_tokenizer(folder, target, ModelSection(name="x", chat_template=name))
        exported = load_tokenizer(target)
        assert exported.apply_chat_template(messages(BRIEF, *TURNS), tokenize=False) == exported.decode(rendered.ids)
        assert exported.decode(rendered.ids).count("BOS") == begins == exported.decode(rendered.ids).startswith("BOS")


def test_a_begin_of_text_token_that_is_a_marker_or_the_end_is_not_written_twice(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, "<|im_start|>", "<|im_end|>"), "chatml")
    for token in ("<|im_start|>", tokenizer.eos_token):
        tokenizer.bos_token = token
        assert tokenizer.apply_chat_template(messages(*TURNS), tokenize=False).startswith("<|im_start|>user")


def test_names_are_listed_and_misspelt_ones_led_to_them() -> None:
    described = table()["model.chat_template"].sentence
    assert all(name in described for name in TEMPLATES) and EXPECTED.keys() == TEMPLATES.keys()
    with pytest.raises(UserError, match="no such chat template: chat-ml") as refused:
        read_chat_template("chat-ml", Path())
    assert "did you mean chatml?" in refused.value.fix and "mistral-tekken" in refused.value.fix


def test_special_tokens_that_are_asked_for_are_the_templates_too(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, "</turn>")
    tokenizer = load_tokenizer(folder, "zephyr", special_tokens={"eos": "</turn>", "bos": "<begin>"})
    rendered = render(Conversation(messages=messages(*TURNS)), tokenizer)
    assert tokenizer.decode(rendered.ids[rendered.trained]) == "Yes.</turn>So.</turn>"
    assert tokenizer.decode(rendered.ids[:1]) == "<begin>" and len(tokenizer) == len(load_tokenizer(folder)) + 1
    assert tokenizer_digest(folder) != tokenizer_digest(folder, special_tokens={"eos": "</turn>"})


def test_tokens_that_are_added_and_their_digest_do_not_depend_on_the_order_of_the_keys(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, "</turn>")
    asked = {"eos": "<end>", "bos": "<begin>"}, {"bos": "<begin>", "eos": "<end>"}
    first, second = (load_tokenizer(folder, special_tokens=tokens).get_vocab() for tokens in asked)
    assert first == second and len({tokenizer_digest(folder, special_tokens=tokens) for tokens in asked}) == 1
    other = tokenizer_digest(folder, new_tokens=("eos", "<end>"))
    assert other != tokenizer_digest(folder, special_tokens={"eos": "<end>"}), "two tokens are not one that ends"


def test_a_begin_token_that_the_tokenizer_writes_itself_cannot_be_replaced_unseen(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, "<begin>", begins=True)
    with pytest.raises(UserError, match="its own begin-of-text token in front of every text"):
        load_tokenizer(folder, special_tokens={"bos": "<begin>"})
    assert load_tokenizer(folder).decode(load_tokenizer(folder).encode("a")) == "BOSa"
