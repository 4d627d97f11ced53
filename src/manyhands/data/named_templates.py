"""Chat templates by name (``model.chat_template: llama3``), as Jinja text of our own after the formats' definitions.

Texts alone: no tools, no thoughts. Where a model's own template does more, the tokenizer that comes with the model has
it. Pure.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from manyhands.config.data_schema import BEGIN_OF_TEXT

_BOS = "{%- if bos_token and bos_token not in (eos_token, MARKER) %}{{- bos_token }}{% endif -%}"
_ROLES = (
    "{%- if message.role not in ROLES %}{{- raise_exception('this template has no role ' ~ message.role) }}{% endif -%}"
)
_ALTERNATE = """
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('user and assistant turns must take turns, beginning with user') }}
{%- endif %}"""
_FIRST_SYSTEM = """
{%- if messages[0].role == 'system' %}
{%- set system, turns = messages[0].content ~ '\\n\\n', messages[1:] %}
{%- else %}
{%- set system, turns = '', messages %}
{%- endif %}"""


@dataclass(frozen=True)
class NamedTemplate:
    """``tokens`` must be tokens of the tokenizer; ``needs_end`` says that the tokenizer's end-of-text token ends
    answers.
    """

    text: str
    tokens: tuple[str, ...] = ()
    needs_end: bool = False


def _marked(
    before: str, between: str, after: str, roles: str = "('system', 'user', 'assistant')", marker: str = "''"
) -> str:
    """Turns of one shape: a header with the role, the content, an end."""
    return (
        _BOS.replace("MARKER", marker)
        + "{%- for message in messages %}"
        + _ROLES.replace("ROLES", roles)
        + f"{{{{- '{before}' ~ message.role ~ '{between}' ~ message.content ~ {after} }}}}"
        + "{%- endfor %}{%- if add_generation_prompt %}"
        + f"{{{{- '{before}assistant{between}' }}}}"
        + "{%- endif %}"
    )


_LLAMA3 = (
    "{{- bos_token }}{%- for message in messages %}"
    + _ROLES.replace("ROLES", "('system', 'user', 'assistant', 'ipython')")
    + "{{- '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' ~ message.content | trim ~ '<|eot_id|>' }}"
    + "{%- endfor %}{%- if add_generation_prompt %}"
    + "{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
)
_GEMMA = f"""{{{{- bos_token }}}}{_FIRST_SYSTEM}
{{%- for message in turns %}}{_ALTERNATE}
{{{{- '<start_of_turn>' ~ ('model' if message.role == 'assistant' else 'user') ~ '\\n' }}}}
{{{{- (system if loop.first else '') ~ message.content | trim ~ '<end_of_turn>\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}
{{{{- '<start_of_turn>model\\n' }}}}
{{%- endif %}}"""
_MISTRAL = f"""{{{{- bos_token }}}}{_FIRST_SYSTEM}
{{%- for message in turns %}}{_ALTERNATE}
{{%- if message.role == 'user' %}}
{{{{- '[INST] ' ~ (system if loop.first else '') ~ message.content ~ '[/INST]' }}}}
{{%- else %}}
{{{{- ' ' ~ message.content ~ eos_token }}}}
{{%- endif %}}
{{%- endfor %}}"""
_MISTRAL_V7 = (
    "{{- bos_token }}{%- for message in messages %}"
    + _ROLES.replace("ROLES", "('system', 'user', 'assistant')")
    + """{%- if message.role == 'user' %}
{{- '[INST]' ~ message.content ~ '[/INST]' }}
{%- elif message.role == 'system' %}
{{- '[SYSTEM_PROMPT]' ~ message.content ~ '[/SYSTEM_PROMPT]' }}
{%- else %}
{{- message.content ~ eos_token }}
{%- endif %}
{%- endfor %}"""
)


def _join(piece: str, content: str = "message.content") -> str:
    """The expression of a piece of text, in which ``{}`` is the content and ``{name}`` a variable: ``'Q: ' ~ name``."""
    parts = [part for part in re.split(r"(\{[^}]*\})", piece) if part]
    return " ~ ".join((part[1:-1] or content) if part.startswith("{") else _quote(part) for part in parts)


def _quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def _pieces(
    system: str,
    user: str,
    opening: str,
    end: str,
    *,
    prefix: str = "",
    default: str = "",
    gap: str = "",
    trims: tuple[str, ...] = (),
) -> str:
    """Turns of pieces of text; ``opening`` and ``end`` stand around an answer, which begins behind ``gap``.

    ``default``: the whole piece in front of conversations without a system prompt. ``trims``: the roles whose contents
    lose the blanks around them.
    """
    text = f"{{{{- {_join(prefix)} }}}}" if prefix else ""
    if default:
        text += f"{{%- if messages[0].role != 'system' %}}{{{{- {_join(default)} }}}}{{%- endif %}}"
    text += "{%- for message in messages %}"
    pieces = {"system": system, "user": user, "assistant": opening + gap + "{}" + end}
    for word, (role, piece) in zip(("if", "elif", "elif"), pieces.items(), strict=True):
        first = " and loop.first" if role == "system" else ""
        content = "(message.content | trim)" if role in trims else "message.content"
        text += f"{{%- {word} message.role == '{role}'{first} %}}{{{{- {_join(piece, content)} }}}}"
    text += "{%- else %}{{- raise_exception('this template has no role ' ~ message.role ~ ' here') }}{%- endif %}"
    return text + f"{{%- endfor %}}{{%- if add_generation_prompt %}}{{{{- {_join(opening)} }}}}{{%- endif %}}"


def _headed(header: str, end: str, *, model: str = "assistant", user_end: str | None = None, **more: Any) -> str:
    """Turns whose ``header`` differs in the name of the role alone (ROLE)."""
    system, user, opening = (header.replace("ROLE", role) for role in ("system", "user", model))
    return _pieces(f"{system}{{}}{end}", f"{user}{{}}{end if user_end is None else user_end}", opening, end, **more)


_IM, _PHI = ("<|im_start|>", "<|im_end|>"), ("<|user|>", "<|assistant|>", "<|end|>")
_IM_HEADER = "<|im_start|>ROLE\n"


def _chatml(default: str = "", prefix: str = "") -> NamedTemplate:
    text = f"<|im_start|>system\n{default}<|im_end|>\n" if default else ""
    return NamedTemplate(_headed(_IM_HEADER, "<|im_end|>\n", prefix=prefix, default=text), _IM)


def _instructed(system: str, user: str, paired: str, opening: str, between: str) -> str:
    """Prompts around an instruction: ``paired`` with an input, which rows of the format alpaca bring as
    ``message.input``, beside ``message.instruction``. A conversation without a system prompt gets the classic one. They
    are texts and no model's own template: BOS stands in front where the tokenizer itself puts it there.
    """
    task = f"({_quote(_TASK_WITH_INPUT)} if messages[0].input else {_quote(_TASK)})"
    text = BEGIN_OF_TEXT + "{%- if messages[0].role == 'system' %}"
    text += "{%- set system, turns = messages[0].content, messages[1:] %}"
    text += (
        f"{{%- else %}}{{%- set system, turns = {task}, messages %}}{{%- endif %}}{{{{- {_join(system, 'system')} }}}}"
    )
    text += f"{{%- for message in turns %}}{_ALTERNATE}{{%- if message.role == 'assistant' %}}"
    text += f"{{{{- {_join(opening + '{}{eos_token}')} ~ ('' if loop.last else {_quote(between)}) }}}}"
    text += f"{{%- elif message.input %}}{{{{- {_join(paired, 'message.instruction')} }}}}"
    text += f"{{%- else %}}{{{{- {_join(user)} }}}}{{%- endif %}}{{%- endfor %}}"
    return text + (f"{{%- if add_generation_prompt %}}{{{{- {_join(opening)} }}}}{{%- endif %}}" if opening else "")


_TASK, _TASK_WITH_INPUT = (
    f"Below is an instruction that describes a task{more}. Write a response that appropriately completes the request."
    for more in ("", ", paired with an input that provides further context")
)
_INSTRUCTION = "### Instruction:\n{}\n\n"
_ALPACA = _instructed(
    "{}\n\n", _INSTRUCTION, _INSTRUCTION + "### Input:\n{message.input}\n\n", "### Response:\n", "\n\n"
)
_ALPACA_CHAT = _instructed("SYSTEM: {}\n", "USER: {}\n", "USER: {}\n{message.input}\n", "ASSISTANT:", "\n")
_ALPACA_PHI = _instructed(
    "<|system|>\n{}<|end|>\n",
    "<|user|>\n{}<|end|>\n<|assistant|>\n",
    "<|user|>\n{}<|end|>{message.input}<|assistant|>",
    "",
    "\n",
)
_ASSISTANT = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions."
)
_HEADER_ID = "<|start_header_id|>ROLE<|end_header_id|>\n\n"
_DATES = (
    "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: "
    "{(date_string if date_string is defined else strftime_now('%d %b %Y'))}\n\n"
)


def _dated(trims: tuple[str, ...]) -> str:
    header, end = _HEADER_ID.replace("ROLE", "user"), "<|eot_id|>"
    opening = _HEADER_ID.replace("ROLE", "assistant")
    before = {"prefix": "{bos_token}", "default": _DATES + end}
    return _pieces(_DATES + "{}" + end, header + "{}" + end, opening, end, trims=trims, **before)


_EVERY_ROLE = ("system", "user", "assistant")
_JAMBA = _pieces(
    "<|bom|><|system|> {}<|eom|>",
    "<|bom|><|user|> {}<|eom|>",
    "<|bom|><|assistant|>",
    "<|eom|>",
    prefix="{bos_token}",
    default="<|bom|><|system|> <|eom|>",
    gap=" ",
)
_COHERE_TURN = "<|START_OF_TURN_TOKEN|><|%s_TOKEN|>"
_COHERE_END = "<|END_OF_TURN_TOKEN|>"
_COHERE = _pieces(
    f"{_COHERE_TURN % 'SYSTEM'}{{}}{_COHERE_END}",
    f"{_COHERE_TURN % 'USER'}{{}}{_COHERE_END}",
    _COHERE_TURN % "CHATBOT",
    _COHERE_END,
    prefix="{bos_token}",
    trims=("user", "assistant"),
)
_MISTRAL_V1 = _MISTRAL.replace("'[INST] '", "' [INST] '").replace("'[/INST]'", "' [/INST]'")
_MISTRAL_TEKKEN = _MISTRAL.replace("'[INST] '", "'[INST]'").replace("' ' ~ message.content", "message.content")


_ALPACA_PLAIN = (
    "{{- bos_token }}{%- for message in messages %}"
    "{%- if message.role == 'system' and loop.first %}{{- message.content }}"
    "{%- elif message.role == 'user' %}{{- '### Instruction:\\n' ~ message.content }}"
    "{%- elif message.role == 'assistant' %}{{- '### Response:\\n' ~ message.content ~ eos_token }}"
    "{%- else %}{{- raise_exception('this template has no role ' ~ message.role ~ ' here') }}{%- endif %}"
    "{{- '' if loop.last else '\\n\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '\\n\\n### Response:\\n' }}{%- endif %}"
)
_ROLE_PLAY = (
    "Enter RP mode. You shall reply to the user while staying in character. Your responses must be detailed, creative, "
    "immersive, and drive the scenario forward."
)
_METHARME = (
    _pieces(
        "<|system|>{}",
        "<|user|>{}",
        "<|model|>",
        "",
        prefix="{bos_token}",
        default="<|system|>" + _ROLE_PLAY,
        trims=("user", "assistant"),
    )
    + "{%- if not add_generation_prompt %}{{- eos_token }}{%- endif %}"
)


_HEADER_MARKS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_BAR_MARKS = ("<｜User｜>", "<｜Assistant｜>")
TEMPLATES: dict[str, NamedTemplate] = {
    "alpaca": NamedTemplate(_ALPACA, needs_end=True),
    "alpaca-chat": NamedTemplate(_ALPACA_CHAT, needs_end=True),
    "alpaca-phi": NamedTemplate(_ALPACA_PHI, needs_end=True),
    "alpaca-plain": NamedTemplate(_ALPACA_PLAIN, needs_end=True),
    "chatml": NamedTemplate(
        _marked("<|im_start|>", "\\n", "'<|im_end|>\\n'", "('system', 'user', 'assistant', 'tool')", "'<|im_start|>'"),
        _IM,
    ),
    "chatml-no-bos": _chatml(),
    "cohere": NamedTemplate(_COHERE, ("<|START_OF_TURN_TOKEN|>", _COHERE_END, "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>")),
    "deepseek-v2": NamedTemplate(
        _pieces("{}\n\n", "<｜User｜>{}", "<｜Assistant｜>", "{eos_token}", prefix="{bos_token}"),
        _BAR_MARKS,
        needs_end=True,
    ),
    "deepseek-v3": NamedTemplate(
        _pieces("{}", "<｜User｜>{}", "<｜Assistant｜>", "{eos_token}", prefix="{bos_token}"),
        _BAR_MARKS,
        needs_end=True,
    ),
    "exaone": NamedTemplate(
        _headed("[|ROLE|]", "[|endofturn|]\n", user_end="\n", default="[|system|][|endofturn|]\n"),
        ("[|system|]", "[|user|]", "[|assistant|]", "[|endofturn|]"),
    ),
    "falcon-h1": _chatml(prefix="{bos_token}"),
    "gemma": NamedTemplate(_GEMMA, ("<start_of_turn>", "<end_of_turn>")),
    "gemma4": NamedTemplate(
        _headed("<|turn>ROLE\n", "<turn|>\n", model="model", prefix="{bos_token}", trims=_EVERY_ROLE),
        ("<|turn>", "<turn|>"),
    ),
    "jamba": NamedTemplate(
        _JAMBA,
        ("<|bom|>", "<|eom|>", "<|system|>", "<|user|>", "<|assistant|>"),
    ),
    "llama3": NamedTemplate(_LLAMA3, _HEADER_MARKS),
    "llama3.1": NamedTemplate(_dated(_EVERY_ROLE), _HEADER_MARKS),
    "llama3.2-vision": NamedTemplate(_dated(("system",)), _HEADER_MARKS),
    "llama4": NamedTemplate(
        _headed("<|header_start|>ROLE<|header_end|>\n\n", "<|eot|>", prefix="{bos_token}", trims=("system",)),
        ("<|header_start|>", "<|header_end|>", "<|eot|>"),
    ),
    "metharme": NamedTemplate(_METHARME, needs_end=True),
    "mistral": NamedTemplate(_MISTRAL, ("[INST]", "[/INST]"), needs_end=True),
    "mistral-v1": NamedTemplate(_MISTRAL_V1, needs_end=True),
    "mistral-tekken": NamedTemplate(_MISTRAL_TEKKEN, ("[INST]", "[/INST]"), needs_end=True),
    "mistral-v7": NamedTemplate(
        _MISTRAL_V7, ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), needs_end=True
    ),
    "phi3": NamedTemplate(_marked("<|", "|>\\n", "'<|end|>\\n'"), _PHI),
    "phi3.5": NamedTemplate(_headed("<|ROLE|>\n", "<|end|>\n"), _PHI),
    "phi4": NamedTemplate(
        _marked("<|im_start|>", "<|im_sep|>", "'<|im_end|>'", marker="'<|im_start|>'"), (*_IM, "<|im_sep|>")
    ),
    "qwen2-vl": _chatml("You are a helpful assistant."),
    "qwen2.5": _chatml("You are Qwen, created by Alibaba Cloud. You are a helpful assistant."),
    "vicuna": NamedTemplate(
        _pieces(
            "{} ", "USER: {} ", "ASSISTANT:", "{eos_token}", prefix="{bos_token}", default=_ASSISTANT + " "
        ).replace("'ASSISTANT:' ~ message", "'ASSISTANT: ' ~ message"),
        needs_end=True,
    ),
    "zephyr": NamedTemplate(_marked("<|", "|>\\n", "eos_token ~ '\\n'"), needs_end=True),
}
