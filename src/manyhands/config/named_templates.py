"""Chat templates by name (``model.chat_template: llama3``): files of ``chat_templates``, as the formats are defined.

Texts alone: no tools, no thoughts. Where a model's own template does more, the tokenizer that comes with the model has
it. Imports no Jinja.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

# Stands for what the tokenizer puts in front of every text (BOS, or nothing).
BEGIN_OF_TEXT = "{#- as the tokenizer begins a text -#}"


def read_template(name: str) -> str:
    """The text of a file of ``chat_templates``."""
    path = Path(__file__).with_name("chat_templates") / f"{name}.jinja"
    return path.read_text(encoding="utf-8").rstrip("\n")


@dataclass(frozen=True)
class NamedTemplate:
    """``tokens`` must be tokens of the tokenizer."""

    text: str
    tokens: tuple[str, ...] = ()

    @property
    def needs_end(self) -> bool:
        """Whether the tokenizer's end-of-text token ends answers."""
        return re.search(r"[-~] eos_token", self.text) is not None


_TOKENS = {
    "alpaca": "",
    "alpaca-chat": "",
    "alpaca-phi": "",
    "alpaca-plain": "",
    "chatml": "<|im_start|> <|im_end|>",
    "chatml-no-bos": "<|im_start|> <|im_end|>",
    "cohere": "<|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|>",
    "deepseek-v2": "<｜User｜> <｜Assistant｜>",
    "deepseek-v3": "<｜User｜> <｜Assistant｜>",
    "exaone": "[|system|] [|user|] [|assistant|] [|endofturn|]",
    "falcon-h1": "<|im_start|> <|im_end|>",
    "gemma": "<start_of_turn> <end_of_turn>",
    "gemma4": "<|turn> <turn|>",
    "jamba": "<|bom|> <|eom|> <|system|> <|user|> <|assistant|>",
    "llama3": "<|start_header_id|> <|end_header_id|> <|eot_id|>",
    "llama3.1": "<|start_header_id|> <|end_header_id|> <|eot_id|>",
    "llama3.2-vision": "<|start_header_id|> <|end_header_id|> <|eot_id|>",
    "llama4": "<|header_start|> <|header_end|> <|eot|>",
    "metharme": "",
    "mistral": "[INST] [/INST]",
    "mistral-v1": "",
    "mistral-tekken": "[INST] [/INST]",
    "mistral-v7": "[INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT]",
    "phi3": "<|user|> <|assistant|> <|end|>",
    "phi3.5": "<|user|> <|assistant|> <|end|>",
    "phi4": "<|im_start|> <|im_end|> <|im_sep|>",
    "qwen2-vl": "<|im_start|> <|im_end|>",
    "qwen2.5": "<|im_start|> <|im_end|>",
    "vicuna": "",
    "zephyr": "",
}
TEMPLATES = {name: NamedTemplate(read_template(name), tuple(tokens.split())) for name, tokens in _TOKENS.items()}


def fill_template(name: str, fields: tuple[str, ...], pieces: Mapping[str, str], **values: Any) -> str:
    """The text of a file that other tools' formats share, behind what sets its variables.

    Args:
        fields: arguments of the macros that ``pieces`` become.
        pieces: text in Python's format language, by the macro that writes it: ``{}`` is the first field, ``{bos}`` and
            ``{eos}`` are the tokenizer's tokens.
        values: texts and booleans.
    """
    inserted = {"": fields[0], "bos": "(bos_token or '')", "eos": "(eos_token or '')"}
    lines = [f"{{%- set {variable} = {_quote(value)} %}}" for variable, value in values.items()]
    for macro, piece in pieces.items():
        parts = []
        for literal, field, _, _ in Formatter().parse(piece):
            parts += [_quote(literal)] if literal else []
            parts += [inserted.get(field, field)] if field is not None else []
        written = " ~ ".join(parts) or "''"
        lines.append(f"{{%- macro {macro}({', '.join(fields)}) %}}{{{{- {written} }}}}{{%- endmacro %}}")
    return "\n".join([*lines, read_template(name)])


def _quote(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # texts and booleans of JSON are Jinja's
