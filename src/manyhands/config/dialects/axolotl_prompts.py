"""Prompts of an Axolotl data set as a chat template: those of a `type` by name, and those that a file writes itself
(`type: {format: ...}`). Part of the dialect ``axolotl.py``.

A row has an instruction, perhaps an input and a system prompt, and an answer, which the end-of-text token ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from string import Formatter
from types import MappingProxyType
from typing import Any

from manyhands.config.keys import nearest_name, show

# `type: {...}`: keys and defaults.
OWN_PROMPT = MappingProxyType(
    {
        "system_prompt": "",
        "system_format": "{system}",
        "field_system": "system",
        "field_instruction": "instruction",
        "field_input": "input",
        "field_output": "output",
        "format": "{instruction} {input} ",
        "no_input_format": "{instruction} ",
    }
)
_FIELDS = MappingProxyType({"format": ("instruction", "input"), "no_input_format": ("instruction",),
                            "system_format": ("system",)})  # fmt: skip
_COLUMNS = ("instruction", "input", "output", "system")
_INSTRUCT = "### Instruction:\n{instruction}\n\n"
_TASK = "Below is an instruction that describes a task"


@dataclass(frozen=True)
class Prompt:
    """What is written around the fields of a row, in Python's format language. ``answer`` precedes each answer."""

    with_input: str
    without_input: str
    system: str = "{system}"
    default_system: str = ""
    default_without_input: str | None = None
    answer: str = ""

    def template(self) -> str:
        """Jinja text of the same effect."""
        plain = self.default_system if self.default_without_input is None else self.default_without_input
        given = "(message.input is defined and message.input)"
        both = {"instruction": "message.instruction", "input": "message.input"}
        return (
            "{%- if bos_token and bos_token != eos_token %}{{- bos_token }}{% endif -%}"
            "{%- for message in messages %}{%- if message.role == 'system' %}"
            f"{{{{- {_expression(self.system, {'system': 'message.content'})} }}}}"
            "{%- elif message.role == 'user' %}{%- if loop.first %}"
            f"{{{{- {self._default(self.default_system)} if {given} else {self._default(plain)} }}}}"
            "{% endif -%}"
            f"{{%- if {given} %}}"
            f"{{{{- {_expression(self.with_input, both)} }}}}"
            "{%- else %}"
            f"{{{{- {_expression(self.without_input, {'instruction': 'message.content'})} }}}}"
            "{% endif -%}{%- elif message.role == 'assistant' %}"
            f"{{{{- {_quote(self.answer)} ~ message.content ~ eos_token }}}}"
            "{%- else %}{{- raise_exception('these prompts have no role ' ~ message.role) }}"
            "{%- endif %}{%- endfor %}"
        )

    def _default(self, text: str) -> str:
        return f"({_expression(self.system, {'system': _quote(text)})})" if text else "''"


# The text of Axolotl's `jeopardy` is that of alpaca; each answer begins with "what is".
JEOPARDY = Prompt(
    _INSTRUCT + "### Input:\n{input}\n\n### Response:\n",
    _INSTRUCT + "### Response:\n",
    "{system}\n\n",
    f"{_TASK}, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.",
    f"{_TASK}. Write a response that appropriately completes the request.",
    "what is ",
)


def read_own_prompt(asked: Mapping[str, Any]) -> tuple[Prompt, dict[str, str]]:
    """The prompt and the renamed columns of `type: {...}`. ValueError says what is wrong."""
    for name, value in asked.items():
        if name not in OWN_PROMPT:
            near = nearest_name(str(name), OWN_PROMPT)
            raise ValueError(f"there is no `{name}` among prompts of one's own" + (f": did you mean `{near}`?" if near
                             else f": they have {', '.join(OWN_PROMPT)}"))  # fmt: skip
        if value is not None and not isinstance(value, str):
            raise ValueError(f"`{name}`: got {show(value)}, allowed: a text")
    given = {**OWN_PROMPT, **{str(name): value for name, value in asked.items() if value is not None}}
    for name, allowed in _FIELDS.items():
        _check_format(name, given[name], allowed)
    prompt = Prompt(given["format"], given["no_input_format"], given["system_format"], given["system_prompt"])
    columns = {field: given[f"field_{field}"] for field in _COLUMNS if given[f"field_{field}"] != field}
    return prompt, columns


def _check_format(name: str, text: str, allowed: tuple[str, ...]) -> None:
    try:
        parts = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"`{name}: {text}`: {error}") from None
    for _, field, spec, conversion in parts:
        if field is not None and (field not in allowed or spec or conversion):
            raise ValueError(f"`{name}`: it may hold {' and '.join(f'{{{one}}}' for one in allowed)}, not {{{field}}}")


def _expression(text: str, variables: Mapping[str, str]) -> str:
    """A format text as a Jinja expression."""
    parts = []
    for literal, field, _, _ in Formatter().parse(text):
        parts += [_quote(literal)] if literal else []
        parts += [variables[field]] if field is not None else []
    return " ~ ".join(parts) or "''"


def _quote(text: str) -> str:
    return "'" + text.encode("unicode_escape").decode("ascii").replace("'", "\\'") + "'"
