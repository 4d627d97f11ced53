"""Chat templates of an Axolotl run, by name; prompts of a data set as a chat template, those of a `type` by name and
those that a file writes itself (`type: {format: ...}`); and which tokens of a conversation are trained.

Names stand for templates of ours of the same effect on text, or for the model's own template. A row of a prompt has an
instruction, perhaps an input and a system prompt, and an answer, which the end-of-text token ends.
"""

import re
from collections.abc import Mapping
from string import Formatter
from types import MappingProxyType
from typing import Any

from manyhands.config.named_templates import fill_template
from manyhands.config.text import nearest_name, show
from manyhands.importers.axolotl.model import IMAGE_TEMPLATES
from manyhands.importers.translation import Translator

# Chat templates by Axolotl's name: ours of the same effect on conversations (rendered with both and compared).
TEMPLATES = MappingProxyType(
    {
        "alpaca": "alpaca-plain",
        "aya": "cohere",
        "chatml": "chatml-no-bos",
        "cohere": "cohere",
        "deepseek_v2": "deepseek-v2",
        "deepseek_v3": "deepseek-v3",
        "exaone": "exaone",
        "falcon_h1": "falcon-h1",
        "gemma": "gemma",
        "gemma3": "gemma",
        "gemma3n": "gemma",
        "gemma4": "gemma4",
        "gemma4_unified": "gemma4",
        "jamba": "jamba",
        "llama3": "llama3",
        "llama3_2_vision": "llama3.2-vision",
        "llama4": "llama4",
        "metharme": "metharme",
        "mistral_v1": "mistral-v1",
        "nemotron_h": "chatml-no-bos",
        "phi_3": "phi3",
        "phi_35": "phi3.5",
        "qwen2_vl": "qwen2-vl",
        "qwen_25": "qwen2.5",
    }
)
# Ours that differ, and how.
_NEAR = MappingProxyType(
    {
        "mistral_v2v3": ("mistral", "a system prompt goes into the first question, in Axolotl into the last"),
        "mistral_v3_tekken": (
            "mistral-tekken",
            "a system prompt goes into the first question, in Axolotl into the last",
        ),
        "pixtral": ("mistral-tekken", "a system prompt goes into the first question, in Axolotl into the last"),
        "mistral_v7_tekken": ("mistral-v7", "conversations without a system prompt get none"),
    }
)
# Those that are the models' own: what the names of such models have.
OWN_TEMPLATES = MappingProxyType(
    {
        "qwen3": "qwen3|plano",
        "qwen3_5": r"qwen3\.5",
        "command_a": "command",
        "command_a_tool_use": "command",
        "command_a_rag": "command",
        "exaone4": "exaone-4",
        "llava": "llava",
    }
)
# What ends a turn under these names, as `eot_tokens` has it.
ENDS = MappingProxyType(
    {
        **dict.fromkeys(("gemma", "gemma3", "gemma3n"), "<end_of_turn>"),
        **dict.fromkeys(("gemma4", "gemma4_unified"), "<turn|>"),
        **dict.fromkeys(("chatml", "qwen2_vl", "qwen_25", "qwen3", "qwen3_5", "falcon_h1"), "<|im_end|>"),
        **dict.fromkeys(("phi_3", "phi_35"), "<|end|>"),
        "llama3": "<|eot_id|>",
        "llama4": "<|eot|>",
    }
)
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


def map_template(t: Translator, entries: Mapping[str, list[str]]) -> None:
    """The chat template and what is trained. ``entries``: data sets by their type's template, "" for none."""
    chats = entries.get("", [])
    for name, places in entries.items():
        for place in places if name else ():
            t.map(f"{place}.type", "model.chat_template", name)
    if len(entries) > 1:
        place = next(places[0] for name, places in list(entries.items())[1:])
        t.refuse(f"{place}.type", "data sets with different prompts cannot be mixed: a run has one chat template")
    if t.flag("train_on_inputs") and entries:  # text is trained whole
        why = "all tokens; in Axolotl the contents of all turns, without what opens them" if chats else ""
        t.map("train_on_inputs", "data.train_on", "all", why)
    if not chats:
        return
    if t.flag("tokenizer_use_mistral_common"):
        t.map("tokenizer_use_mistral_common", "model.chat_template", "tekken", "that of the version in tekken.json")
    for chat in chats:
        for name in ("chat_template", "chat_template_jinja"):
            key = f"{chat}.{name}"
            if t.has(key):
                _name_template(t, key, str(t.get(key)), f"{chat}.chat_template_jinja")
    if not all(t.has(f"{chat}.chat_template") or t.has(f"{chat}.chat_template_jinja") for chat in chats):
        for key in ("chat_template", "chat_template_jinja"):
            if t.has(key):
                _name_template(t, key, str(t.get(key)), "chat_template_jinja")
    if t.has("chat_template_kwargs"):
        t.map("chat_template_kwargs", "data.chat_template_kwargs")
    _check_ends(t, chats)


def _name_template(t: Translator, key: str, name: str, text_key: str) -> None:
    native = "model.chat_template"
    if key.endswith("chat_template_jinja"):
        t.map(key, native, name)
    elif name == "jinja":
        if t.has(text_key):
            t.no_op(key, f"the text of `{text_key}`")
        else:
            t.refuse(key, f"the template's text is missing: write it in `{text_key}`")
    elif name == "tokenizer_default" or name.startswith("tokenizer_default_fallback_"):
        t.no_op(key, "the tokenizer's own template")
    elif t.has("processor_type") and name in IMAGE_TEMPLATES:
        t.substitute(key, {}, f"the model's own template is used, which {name} was made after and which places images")
    elif t.has("processor_type"):
        t.refuse(key, f"{show(name)} has no place for images: write tokenizer_default")
    elif name in TEMPLATES:
        t.map(key, native, TEMPLATES[name])
    elif name in _NEAR:
        t.substitute(key, {native: _NEAR[name][0]}, _NEAR[name][1])
    elif name in OWN_TEMPLATES and re.search(OWN_TEMPLATES[name], str(t.get("base_model")).lower()):
        t.substitute(key, {}, f"{name} is not built in: the model's own template is used, which it was made after")
    else:
        t.refuse(key, f"{show(name)} is not built in: write its text in `chat_template_jinja`, or tokenizer_default")


def _check_ends(t: Translator, chats: list[str]) -> None:
    """``eot_tokens``: what ends a turn is trained with it; that is found in the template here."""
    asked, name = t.get("eot_tokens"), str(t.get("chat_template", "tokenizer_default"))
    if asked is None:
        return
    end = ENDS.get(name)
    if not isinstance(asked, list):
        t.refuse("eot_tokens", f"got {show(asked)}, allowed: a list of tokens")
    elif end is not None and asked != [end]:
        t.refuse("eot_tokens", f"{show(asked)}: turns of {name} end with {end}, which is trained: remove it")
    else:
        t.no_op("eot_tokens", "the end that the template writes after a trained turn is trained")


def _make_prompt(
    with_input: str, without_input: str, system: str, default: str, default_without: str, answer: str = ""
) -> str:
    """Jinja text as Axolotl writes rows. ``default``, ``default_without``: system prompts with and without input."""
    fields = ("instruction", "input", "system")
    pieces = {"write_with_input": with_input, "write_without_input": without_input, "write_system": system}
    return fill_template(
        "axolotl", fields, pieces, default_with_input=default, default_without_input=default_without, answer=answer
    )


# The text of Axolotl's `jeopardy` is that of alpaca; each answer begins with "what is".
JEOPARDY = _make_prompt(
    _INSTRUCT + "### Input:\n{input}\n\n### Response:\n",
    _INSTRUCT + "### Response:\n",
    "{system}\n\n",
    f"{_TASK}, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.",
    f"{_TASK}. Write a response that appropriately completes the request.",
    "what is ",
)


def read_own_prompt(asked: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """The chat template and the renamed columns of `type: {...}`. ValueError says what is wrong."""
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
    default = given["system_prompt"]
    template = _make_prompt(given["format"], given["no_input_format"], given["system_format"], default, default)
    columns = {field: given[f"field_{field}"] for field in _COLUMNS if given[f"field_{field}"] != field}
    return template, columns


def _check_format(name: str, text: str, allowed: tuple[str, ...]) -> None:
    try:
        parts = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"`{name}: {text}`: {error}") from None
    for _, field, spec, conversion in parts:
        if field is not None and (field not in allowed or spec or conversion):
            raise ValueError(f"`{name}`: it may hold {' and '.join(f'{{{one}}}' for one in allowed)}, not {{{field}}}")
