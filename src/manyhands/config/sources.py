"""``data.train`` and ``data.validation``: a path, or a list of paths and sources; what contradicts itself in them;
``Source.split`` and its slices of rows; and the fields of a row in each format (``data.format``).

Some functions work on the mapping of a run file before it is validated, so that every error names its place
(``data.train[1].weight``), others on a ``RunConfig``, as ``checks`` does. Reads no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError

from manyhands.config.keys import SOURCE_LISTS, hint_in_source, source_table, wrong_value
from manyhands.config.schema import RunConfig, Source
from manyhands.config.tasks import JUDGED, PAIRS, READY, TASKS, name_tasks
from manyhands.config.text import at_line, nearest_name, show

PLACEHOLDER = "placeholder"  # in place of what was wrong, while the rest is checked
FILE_ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".arrow", ".gz")
_BOUND = r"-?\d+(?:\.\d+)?%|-?\d+"
_PIECE = re.compile(rf"([^\[\]+:]+?)\s*(?:\[\s*({_BOUND})?\s*:\s*({_BOUND})?\s*\])?")


def list_paths(mapping: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(holder, place) of every path of data in a run file's mapping: ``holder[place]`` is the path."""
    evaluate = mapping.get("evaluate")
    sets = evaluate.get("data") if isinstance(evaluate, dict) else None
    yield from ((sets, name) for name in (sets if isinstance(sets, dict) else ()))
    data = mapping.get("data")
    if not isinstance(data, dict):
        return
    for name in (key.partition(".")[2] for key in SOURCE_LISTS):
        value = data.get(name)
        if isinstance(value, str):
            yield data, name
        for index, item in enumerate(value if isinstance(value, list) else ()):
            if isinstance(item, str):
                yield value, index
            elif isinstance(item, dict) and "path" in item:
                yield item, "path"


def open_source(data: dict[str, Any], name: str, index: int) -> dict[str, Any] | None:
    """The source at ``data[name][index]`` as a mapping that can be changed; None if there is none."""
    if isinstance(data.get(name), str):
        data[name] = [data[name]]
    items = data.get(name)
    if not isinstance(items, list) or index >= len(items):
        return None
    if isinstance(items[index], str):
        items[index] = {"path": items[index]}
    return items[index] if isinstance(items[index], dict) else None


def drop_wrong_sources(data: dict[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Removes what is wrong from the lists of sources; returns the findings. ``origins``: the line of each place."""
    findings: list[str] = []
    for path in SOURCE_LISTS:
        name = path.partition(".")[2]
        value = data.get(name)
        if isinstance(value, dict):
            findings.append(
                at_line(path, origins)
                + f"`{path}` is a path or a list: write a single source as a list too, `{name}: [{{path: ...}}]`"
            )
            value = data[name] = [value]
        if isinstance(value, (list, tuple)):
            items = [_drop_wrong_item(item, f"{path}[{index}]", origins, findings) for index, item in enumerate(value)]
            if not items:
                findings.append(at_line(path, origins) + f"`{path}` is an empty list: add a path, or remove the key")
            data[name] = items or [PLACEHOLDER]
    return findings


def _drop_wrong_item(item: Any, path: str, origins: Mapping[str, str], findings: list[str]) -> Any:
    if isinstance(item, Source) or (isinstance(item, str) and item):
        return item
    if not isinstance(item, dict):
        findings.append(
            at_line(path, origins)
            + f"`{path}`: got {show(item)}, allowed: a path, or a source with {', '.join(source_table())}"
        )
        return PLACEHOLDER
    source = dict(item)
    for name in list(source):
        key = source_table().get(name) if isinstance(name, str) else None
        place = f"{path}.{name}"
        if key is None:
            findings.append(f"{at_line(place, origins)}unknown key `{place}`{hint_in_source(path, str(name))}")
            del source[name]
        elif isinstance(source[name], bool) and "`true`" not in key.allowed:  # pydantic takes True for 1
            findings.append(at_line(place, origins) + wrong_value(place, key, source.pop(name)))
            if key.required:
                source[name] = PLACEHOLDER
    return _drop_invalid(source, path, origins, findings)


def _drop_invalid(source: dict[str, Any], path: str, origins: Mapping[str, str], findings: list[str]) -> dict[str, Any]:
    try:
        Source.model_validate(source)
    except ValidationError as error:
        for name in dict.fromkeys(
            str(item["loc"][0]) for item in error.errors(include_url=False, include_context=False)
        ):
            key, place = source_table()[name], f"{path}.{name}"
            if name in source:
                findings.append(at_line(place, origins) + wrong_value(place, key, source.pop(name)))
            else:
                findings.append(f"{at_line(path, origins)}`{place}` is missing. {key.sentence}")
            if key.required:
                source[name] = PLACEHOLDER
    return source


class SourceRules(NamedTuple):
    """A source, its place in the run file, and what applies to its rows: each value after the key that sets it."""

    place: str
    source: Source
    format_key: str
    format: str
    fields_key: str
    fields: Mapping[str, str]
    ignore_key: str
    ignore: tuple[str, ...]
    too_long_key: str
    too_long: str


def list_sources(config: RunConfig) -> list[SourceRules]:
    """Every source of training and validation rows; what it does not set itself is taken from ``data``."""
    data, listed = config.data, []
    for name, value in (("data.train", data.train), ("data.validation", data.validation)):
        items = (value,) if isinstance(value, str) else value or ()
        for index, item in enumerate(items):
            source = Source(path=item or PLACEHOLDER) if isinstance(item, str) else item
            place = name if isinstance(value, str) else f"{name}[{index}]"

            def rule(key: str, source: Source = source, place: str = place) -> tuple[str, Any]:
                own = getattr(source, key)
                return (f"data.{key}", getattr(data, key)) if own is None else (f"{place}.{key}", own)

            rules = (*rule("format"), *rule("fields"), *rule("ignore"), *rule("too_long"))
            listed.append(SourceRules(place, source, *rules))
    return listed


def check_sources(config: RunConfig) -> Iterator[str]:
    """Keys of sources that have no effect, and names that are given twice."""
    names: dict[str, str] = {}
    for place, source, *_ in list_sources(config):
        yield from _check_hub_keys(place, source)
        yield from _check_split(place, source)
        if place.startswith("data.validation") and source.weight != 1:
            yield (
                f"`{place}.weight` has no effect in `data.validation`, where every sample is evaluated once: remove it"
            )
        if source.name is not None:
            if source.name in names:
                yield f"`{place}.name` and `{names[source.name]}.name` are both {show(source.name)}: rename one"
            names.setdefault(source.name, place)


def _check_hub_keys(place: str, source: Source) -> Iterator[str]:
    """A folder may hold the splits of a saved dataset; a file has none."""
    if source.path.startswith("hub:"):
        if not source.path.removeprefix("hub:").strip("/ "):
            yield f"`{place}.path: {source.path}` has no dataset name: write hub:OWNER/NAME"
        names = [piece.partition("[")[0].strip() for piece in source.split.split("+")]
        if source.files is not None and names != ["train"]:
            yield f"`{place}.split: {source.split}`: rows of `{place}.files` are of the split train: write train"
        if source.files == ():
            yield f"`{place}.files` is an empty list: name files of the dataset, or remove the key"
        return
    is_file = source.path.lower().endswith(FILE_ENDINGS)
    is_set = {
        "subset": source.subset is not None,
        "revision": source.revision is not None,
        "files": source.files is not None,
        "split": is_file and source.split.partition("[")[0].strip() != "train",
    }
    for name in (name for name, given in is_set.items() if given):
        yield (
            f"`{place}.{name}` has no effect with `{place}.path: {show(source.path)}`, which is not a dataset on the "
            "hub: remove it"
        )


def _check_split(place: str, source: Source) -> Iterator[str]:
    try:
        parse_split(source.split)
    except ValueError as error:
        yield f"`{place}.split: {source.split}` cannot be read: {error}"


def check_formats(config: RunConfig) -> Iterator[str]:
    """Formats of another task, missing fields, columns both read and ignored; each finding once for all sources."""
    found = [
        finding for rules in list_sources(config) for check in FORMAT_CHECKS for finding in check(config.task, rules)
    ]
    yield from dict.fromkeys(found)


def _check_task(task: str, rules: SourceRules) -> Iterator[str]:
    takes, others = TASKS[task], name_tasks(lambda other: other.takes_text)
    if rules.too_long == "split" and not takes.takes_text:
        yield (
            f"`{rules.too_long_key}: split` is for text, which `task: {task}` does not train on: use error, truncate "
            f"or drop, or task: {others}"
        )
    if rules.format not in ("auto", *takes.formats):
        others = name_tasks(lambda other: rules.format in other.formats)
        yield (
            f"`{rules.format_key}: {rules.format}` does not fit `task: {task}` ({takes.summary}): use task: {others}, "
            f"or another format ({', '.join(takes.formats)})"
        )


def _check_fields(task: str, rules: SourceRules) -> Iterator[str]:
    known = known_fields(rules.format)
    for field in rules.fields:
        if field not in known:
            near = nearest_name(field, known)
            yield (
                f"`{rules.fields_key}` has the field {show(field)}, which `{rules.format_key}: {rules.format}` does "
                f"not have: {f'did you mean {near}? ' if near else ''}Its fields are {', '.join(known)}"
            )


def _check_ignored(task: str, rules: SourceRules) -> Iterator[str]:
    mapped = set(rules.fields.values())
    read = {rules.fields.get(field, field) for field in REQUIRED.get(rules.format, ())} | mapped
    for column in rules.ignore:
        if column in read:
            reader = f"`{rules.fields_key}`" if column in mapped else f"`{rules.format_key}: {rules.format}`"
            yield f"`{rules.ignore_key}` ignores the column {show(column)}, which {reader} reads: remove one"


def _check_roles(task: str, rules: SourceRules) -> Iterator[str]:
    if rules.source.roles and rules.format not in ("auto", *WITH_ROLES):
        yield (
            f"`{rules.place}.roles` has no effect with `{rules.format_key}: {rules.format}`, whose rows name no roles: "
            "remove it"
        )


FORMAT_CHECKS = (_check_task, _check_fields, _check_ignored, _check_roles)


# Fields that a row must have.
REQUIRED = MappingProxyType(
    {
        "messages": ("messages",),
        "sharegpt": ("conversations",),
        "alpaca": ("instruction", "output"),
        "prompt": ("prompt", "completion"),
        "question": ("question", "answer"),
        "query": ("query", "response"),
        "preference": ("chosen", "rejected"),
        "rejected_response": ("messages", "rejected_response"),
        "label": ("label",),
        "text": ("text",),
        "tokens": ("input_ids",),
        "segments": ("segments",),
    }
)
# Formats whose rows may name roles.
WITH_ROLES = ("messages", "sharegpt", "prompt", *PAIRS, *JUDGED)
# Fields that are read if a row has them.
OPTIONAL = MappingProxyType(
    {
        "messages": ("tools", "chat_template_kwargs", "weight"),
        "sharegpt": ("system", "tools", "chat_template_kwargs", "weight"),
        "alpaca": ("input", "system", "history", "weight"),
        "prompt": ("system", "tools", "chat_template_kwargs", "weight"),
        "question": ("system", "weight"),
        "query": ("system", "history", "tools", "weight"),
        "preference": (
            *("prompt", "messages", "conversations", "instruction", "input", "question", "system", "history"),
            *("tools", "chat_template_kwargs"),
        ),
        "rejected_response": ("system", "tools", "chat_template_kwargs"),
        "label": (
            *("prompt", "completion", "messages", "conversations", "instruction", "input", "output", "question"),
            *("answer", "query", "response", "system", "history", "tools", "chat_template_kwargs"),
        ),
        "text": ("weight",),
        "tokens": (
            *("labels", "completion_mask", "assistant_masks", "loss_mask", "loss_weights", "weight"),
            *("attention_mask", "position_ids", "seq_lengths", "token_type_ids", "special_tokens_mask", "length"),
        ),
        "segments": ("weight",),
    }
)
# Keys of a turn in the list of turns.
INNER = MappingProxyType(
    {
        "messages": ("role", "content"),
        "sharegpt": ("from", "value"),
        **dict.fromkeys((*PAIRS, *JUDGED), ("role", "content", "from", "value")),
    }
)
# Columns that change what a row means although no format reads them, in lower case: preferences between answers, ...
PREFERENCE = frozenset(
    {f"{name}{ending}" for name in ("chosen", "rejected") for ending in ("", "_messages", "_response")}
    | {"preferred_output", "non_preferred_output", "kto_tag"}
)
LABEL = "label"
# ... what is trained of a row, and how much (of a mask that says no more than where padding or special tokens are: no)
TRAINED = re.compile(
    r"(?!attention_mask$|special_tokens_mask$)(\w+_)?masks?|(loss|token|sample|example)_(weight|scale)s?"
)
# ... and media that the text is about: the column, and what it is called in a message.
MEDIA = MappingProxyType(
    {
        f"{name}{ending}": kind
        for name, kind in (("image", "images"), ("video", "videos"), ("audio", "audio"))
        for ending in ("", "s", "_path", "_paths", "_url", "_urls", "_file", "_files")
    }
)


IMAGES = ("images", "image")  # columns of images, read by formats of conversations and pairs if images are trained


def known_fields(format: str) -> tuple[str, ...]:
    """The fields that ``data.fields`` may map for a format; those of all formats for ``auto``."""
    formats = REQUIRED if format == "auto" else (format,)
    names = [name for one in formats for group in (REQUIRED, OPTIONAL, INNER) for name in group.get(one, ())]
    names += IMAGES if set(formats) - {"text", *JUDGED, *READY} else ()
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True)
class SplitSlice:
    """Rows ``start`` to ``stop`` of a split, as written: a number, percents (``20%``), negative from the end, or
    empty."""

    name: str
    start: str = ""
    stop: str = ""

    @property
    def is_whole(self) -> bool:
        return not self.start and not self.stop

    @property
    def needs_total(self) -> bool:
        """Whether the bounds follow from the number of rows."""
        return any(bound.endswith("%") or bound.startswith("-") for bound in (self.start, self.stop))

    def bounds(self, num_rows: int) -> tuple[int, int]:
        """(first row, row behind the last one), counted from 0. Percents are rounded to the nearest row, as
        ``datasets`` does; what is beyond the end is cut."""
        start, stop = _place(self.start or "0", num_rows), _place(self.stop or str(num_rows), num_rows)
        return start, max(start, stop)


def parse_split(text: str) -> tuple[SplitSlice, ...]:
    """The slices of a split that are joined by ``+``, in their order. ValueError says what is wrong."""
    slices = []
    for piece in text.split("+"):
        match = _PIECE.fullmatch(piece.strip())
        if match is None:
            raise ValueError(
                f"{piece.strip()!r} is no split: write a name, or a slice such as train[:20%], "
                "train[100:200] or train[-50:]"
            )
        slices.append(SplitSlice(match[1], match[2] or "", match[3] or ""))
    names = [part.name for part in slices]
    if twice := next((name for index, name in enumerate(names) if name in names[:index]), None):
        raise ValueError(f"the split {twice} is named twice: write one slice of it, or two sources")
    return tuple(slices)


def _place(bound: str, num_rows: int) -> int:
    value = round(float(bound[:-1]) * num_rows / 100) if bound.endswith("%") else int(bound)
    return min(max(0, num_rows + value) if bound.startswith("-") else value, num_rows)
