"""The fields of a row in each format (``data.format``), and columns that change what a row means.

Shared by the checks of a run file and by reading rows.
"""

from __future__ import annotations

from types import MappingProxyType

# Fields that a row must have.
REQUIRED = MappingProxyType(
    {
        "messages": ("messages",),
        "sharegpt": ("conversations",),
        "alpaca": ("instruction", "output"),
        "prompt": ("prompt", "completion"),
        "question": ("question", "answer"),
        "text": ("text",),
    }
)
# Fields that are read if a row has them.
OPTIONAL = MappingProxyType(
    {
        "messages": ("tools", "weight"),
        "sharegpt": ("system", "tools", "weight"),
        "alpaca": ("input", "system", "history", "weight"),
        "prompt": ("system", "tools", "weight"),
        "question": ("system", "weight"),
        "text": ("weight",),
    }
)
# Keys of a turn in the list of turns.
INNER = MappingProxyType({"messages": ("role", "content"), "sharegpt": ("from", "value")})
# Columns that change what a row means although no format reads them, in lower case: preferences between answers, ...
PREFERENCE = frozenset(
    {f"{name}{ending}" for name in ("chosen", "rejected") for ending in ("", "_messages", "_response")}
    | {"preferred_output", "non_preferred_output", "kto_tag"}
)
LABEL = "label"
# ... and media that the text is about: the column, and what it is called in a message.
MEDIA = MappingProxyType(
    {
        f"{name}{ending}": kind
        for name, kind in (("image", "images"), ("video", "videos"), ("audio", "audio"))
        for ending in ("", "s", "_path", "_paths", "_url", "_urls", "_file", "_files")
    }
)


def known_fields(format: str) -> tuple[str, ...]:
    """The fields that ``data.fields`` may map for a format; those of all formats for ``auto``."""
    formats = REQUIRED if format == "auto" else (format,)
    names = [name for one in formats for group in (REQUIRED, OPTIONAL, INNER) for name in group.get(one, ())]
    return tuple(dict.fromkeys(names))
