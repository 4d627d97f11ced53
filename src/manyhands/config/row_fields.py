"""What the fields of a row are called, format by format: the names that ``data.fields`` may give others for.

Shared by the checks of a run file and the reading of rows. Knows no row.
"""

from __future__ import annotations

from types import MappingProxyType

# Fields that a row of the format must have.
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
# Fields that are read where a row has them.
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
# Keys of one turn inside the list of turns.
INNER = MappingProxyType({"messages": ("role", "content"), "sharegpt": ("from", "value")})
# Columns that change what a row means where nothing reads them, in lower case: one answer is better than another, ...
PREFERENCE = frozenset(
    {f"{name}{ending}" for name in ("chosen", "rejected") for ending in ("", "_messages", "_response")}
    | {"preferred_output", "non_preferred_output", "kto_tag"}
)
LABEL = "label"
# ... or the text is about something else that the row holds: the name, and what it is called in a sentence.
MEDIA = MappingProxyType(
    {
        f"{name}{ending}": kind
        for name, kind in (("image", "images"), ("video", "videos"), ("audio", "audio"))
        for ending in ("", "s", "_path", "_paths", "_url", "_urls", "_file", "_files")
    }
)


def known_fields(format: str) -> tuple[str, ...]:
    """Every name that ``data.fields`` may map for a format; all names of all formats for ``auto``."""
    formats = REQUIRED if format == "auto" else (format,)
    names = [name for one in formats for group in (REQUIRED, OPTIONAL, INNER) for name in group.get(one, ())]
    return tuple(dict.fromkeys(names))
