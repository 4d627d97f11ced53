"""Which arguments a run may give its chat template. Shared by the checks of a run file and by rendering; knows no
template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date as Date
from typing import Any

# What the row, the tokenizer or rendering itself decides: parameters of apply_chat_template, and names it gives every
# template.
RESERVED = frozenset({
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message", "tokenize",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs", "self",
    "strftime_now", "raise_exception", "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
})  # fmt: skip


def find_argument_faults(arguments: Mapping[str, Any], date: str) -> Iterator[str]:
    """One sentence for each name that ``data.chat_template_kwargs`` may not hold, and one for a date that is none."""
    for name in arguments:
        if name in RESERVED:
            yield f"`data.chat_template_kwargs.{name}` is decided by the row and the tokenizer: remove it"
        elif not name.isidentifier():
            yield f"`data.chat_template_kwargs` has {name!r}, which no template can name: use letters, digits and _"
    try:
        Date.fromisoformat(date)
    except ValueError:
        yield f"`data.date: {date}` is no day of the calendar: give one as year-month-day, such as 2026-01-31"
