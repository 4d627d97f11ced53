"""A translation for people and programs: the native run file with each key's origin, outcomes, JSON."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from manyhands.config.keys import table
from manyhands.config.read import dump_yaml
from manyhands.config.text import show
from manyhands.core.units import count_of
from manyhands.importers.translation import KINDS, KeyOutcome, Translation, look_up

SAID = ("substituted", "ignored")  # what a start prints in full
WORDS: Mapping[str, str] = {
    "mapped": "mapped",
    "no_op": "already so here",
    "not_set": "not set",
    "ignored": "ignored",
    "substituted": "substituted",
    "refused": "refused",
    "contradicts": "contradictory",
}
WIDTH = 46  # of a key and its value, before the comment


def native_yaml(translation: Translation) -> str:
    """The native run file: each key with the place that it comes from, or the default of the tool that it holds."""
    gpus = "" if translation.gpus is None else f", batch sizes for {count_of(translation.gpus, 'GPU')}"
    lines = [f"# From {translation.where} ({translation.tool}){gpus}."]
    lines += ["# `manyhands plan FILE` shows what it would do, `manyhands train FILE` runs it."]
    mapping = translation.mapping
    order = list(dict.fromkeys(path.split(".")[0] for path in table()))
    for section in sorted(mapping, key=order.index):
        value = mapping[section]
        if not isinstance(value, dict):
            lines += _entry(translation, section, value, "")
            continue
        lines += ["", f"{section}:"]
        for leaf in value:
            lines += _entry(translation, f"{section}.{leaf}", value[leaf], "  ")
    return "\n".join(lines) + "\n"


def _entry(translation: Translation, native: str, value: Any, indent: str) -> list[str]:
    """One key with its comment: on its line, or above it if the value has several lines."""
    why = translation.tool_defaults.get(native)
    comment = f"# {why}" if why else f"# {translation.origins.get(native, '')}".rstrip(" #")
    leaf = native.rpartition(".")[2]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    is_flat = not any(isinstance(item, (dict, list)) for item in inner)
    style: dict[str, Any] = {"default_flow_style": False, "width": 100, "sort_keys": False}
    if is_flat:
        flow = dump_yaml(value, **(style | {"default_flow_style": True, "width": 10**9})).removesuffix("\n...\n")
        text = f"{leaf}: {flow.strip()}"
    else:
        text = dump_yaml({leaf: value}, **style)
    lines = [f"{indent}{line}" for line in text.rstrip("\n").split("\n")]
    if len(lines) > 1:
        return [*([f"{indent}{comment}"] if comment else []), *lines]
    return [f"{lines[0]:<{WIDTH - 1}} {comment}".rstrip()]  # without the space # is part of a long value


def summarize(translation: Translation) -> list[str]:
    """What a start prints: the counts, and each key that is not acted upon as it is written."""
    counts = Counter(outcome.kind for outcome in translation.outcomes)
    parts = [f"{counts[kind]} {WORDS[kind]}" for kind in KINDS if counts[kind]]
    lines = [f"{translation.where}: read as {translation.tool}'s; keys: {', '.join(parts)}"]
    if translation.gpus is not None:
        lines.append(f"  batch sizes per GPU are multiplied by {count_of(translation.gpus, 'GPU')}")
    return lines + [
        f"  {WORDS[outcome.kind]}: {_line(outcome)}" for outcome in translation.outcomes if outcome.kind in SAID
    ]


def describe(translation: Translation) -> str:
    """Every key of the file with what becomes of it, then the defaults of the tool that are carried over."""
    lines = [summarize(translation)[0]]
    for kind in reversed(KINDS):
        outcomes = [outcome for outcome in translation.outcomes if outcome.kind == kind]
        if outcomes and kind != "not_set":
            lines += ["", f"{WORDS[kind]}:", *(f"  {_line(outcome)}" for outcome in outcomes)]
    if defaults := translation.tool_defaults:
        lines += ["", f"defaults of {translation.tool} that are not ours:"]
        lines += [f"  {key}: {show(look_up(translation.mapping, key))}  ({why})" for key, why in defaults.items()]
    return "\n".join(lines)


def _line(outcome: KeyOutcome) -> str:
    native = ", ".join(f"{key}: {show(value)}" for key, value in outcome.native.items())
    arrow = f" -> {native}" if native else ""
    why = f" ({outcome.why})" if outcome.why and native else f": {outcome.why}" if outcome.why else ""
    return f"{outcome.place}{arrow}{why}"


def as_json(translation: Translation) -> dict[str, Any]:
    """The translation as plain values: ``tool``, ``file``, ``gpus``, ``outcomes``, ``tool_defaults``, ``native``."""
    return {
        "tool": translation.tool,
        "file": translation.where,
        "gpus": translation.gpus,
        "outcomes": [
            {
                "key": outcome.key,
                "line": outcome.line,
                "outcome": outcome.kind,
                "why": outcome.why,
                "value": outcome.value,
                "native": dict(outcome.native),
            }
            for outcome in translation.outcomes
        ],
        "tool_defaults": dict(translation.tool_defaults),
        "native": translation.mapping,
    }
