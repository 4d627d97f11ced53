"""Chat templates by name, for base models, which have none. Knows no tokenizer but what a template needs of one.

Written from the families' public definitions of their formats. Where a format has no place for a system message it
leads the first user turn, as in Gemma 3. Tools are shown by none of them. A tokenizer's begin-of-text token comes first
where it has one that is neither its end nor a marker of the format: base models have seen it at the head of every text.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    + "{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"
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
_ALPACA = (
    _BOS.replace("MARKER", "''")
    + """{%- if messages[0].role == 'system' %}
{%- set system, turns = messages[0].content, messages[1:] %}
{%- else %}
{%- set system = 'Below is an instruction that describes a task. '
    ~ 'Write a response that appropriately completes the request.' %}
{%- set turns = messages %}
{%- endif %}
{{- system ~ '\\n\\n' }}
{%- for message in turns %}"""
    + _ALTERNATE
    + """
{%- if message.role == 'user' %}
{{- '### Instruction:\\n' ~ message.content ~ '\\n\\n' }}
{%- else %}
{{- '### Response:\\n' ~ message.content ~ eos_token ~ ('' if loop.last else '\\n\\n') }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '### Response:\\n' }}
{%- endif %}"""
)
_IM, _PHI = ("<|im_start|>", "<|im_end|>"), ("<|user|>", "<|assistant|>", "<|end|>")
TEMPLATES: dict[str, NamedTemplate] = {
    "alpaca": NamedTemplate(_ALPACA, needs_end=True),
    "chatml": NamedTemplate(
        _marked("<|im_start|>", "\\n", "'<|im_end|>\\n'", "('system', 'user', 'assistant', 'tool')", "'<|im_start|>'"),
        _IM,
    ),
    "gemma": NamedTemplate(_GEMMA, ("<start_of_turn>", "<end_of_turn>")),
    "llama3": NamedTemplate(_LLAMA3, ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "mistral": NamedTemplate(_MISTRAL, ("[INST]", "[/INST]"), needs_end=True),
    "mistral-v7": NamedTemplate(
        _MISTRAL_V7, ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), needs_end=True
    ),
    "phi3": NamedTemplate(_marked("<|", "|>\\n", "'<|end|>\\n'"), _PHI),
    "phi4": NamedTemplate(
        _marked("<|im_start|>", "<|im_sep|>", "'<|im_end|>'", marker="'<|im_start|>'"), (*_IM, "<|im_sep|>")
    ),
    "zephyr": NamedTemplate(_marked("<|", "|>\\n", "eos_token ~ '\\n'"), needs_end=True),
}
