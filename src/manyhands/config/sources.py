"""``data.train`` and ``data.validation``: a path, or a list of paths and sources; and what contradicts itself in them.

The first half works on the mapping of a run file before it is validated, so that every error names its place
(``data.train[1].weight``); the second half on a ``RunConfig``, as ``checks`` does. Reads no file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import ValidationError

from manyhands.config.keys import SOURCE_LISTS, hint_in_source, nearest_name, show, source_table, wrong_value
from manyhands.config.row_fields import REQUIRED, known_fields
from manyhands.config.schema import RunConfig, Source

PLACEHOLDER = "placeholder"  # in place of what was wrong, while the rest is checked
FILE_ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".arrow", ".gz")


def list_paths(data: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """(holder, place) of every path in ``data.train`` and ``data.validation``: ``holder[place]`` is the path."""
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
    """The source at a place of ``data[name]`` as a mapping that can be written to; None where there is none."""
    if isinstance(data.get(name), str):
        data[name] = [data[name]]
    items = data.get(name)
    if not isinstance(items, list) or index >= len(items):
        return None
    if isinstance(items[index], str):
        items[index] = {"path": items[index]}
    return items[index] if isinstance(items[index], dict) else None


def drop_wrong_sources(data: dict[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Takes what is wrong out of the lists of sources; returns the findings. ``origins`` says where a place was
    written.
    """
    findings: list[str] = []
    for path in SOURCE_LISTS:
        name = path.partition(".")[2]
        value = data.get(name)
        if isinstance(value, dict):
            findings.append(
                _at(path, origins)
                + f"`{path}` is a path or a list: write a single source as a list too, `{name}: [{{path: ...}}]`"
            )
            value = data[name] = [value]
        if isinstance(value, (list, tuple)):
            items = [_drop_wrong_item(item, f"{path}[{index}]", origins, findings) for index, item in enumerate(value)]
            if not items:
                findings.append(
                    _at(path, origins) + f"`{path}` is an empty list: name at least one path, or leave the key out"
                )
            data[name] = items or [PLACEHOLDER]
    return findings


def _drop_wrong_item(item: Any, path: str, origins: Mapping[str, str], findings: list[str]) -> Any:
    if isinstance(item, Source) or (isinstance(item, str) and item):
        return item
    if not isinstance(item, dict):
        findings.append(
            _at(path, origins)
            + f"`{path}`: got {show(item)}, allowed: a path, or a source with {', '.join(source_table())}"
        )
        return PLACEHOLDER
    source = dict(item)
    for name in list(source):
        key = source_table().get(name) if isinstance(name, str) else None
        place = f"{path}.{name}"
        if key is None:
            findings.append(f"{_at(place, origins)}unknown key `{place}`{hint_in_source(path, str(name))}")
            del source[name]
        elif isinstance(source[name], bool) and "`true`" not in key.allowed:  # pydantic takes True for 1
            findings.append(_at(place, origins) + wrong_value(place, key, source.pop(name)))
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
                findings.append(_at(place, origins) + wrong_value(place, key, source.pop(name)))
            else:
                findings.append(f"{_at(path, origins)}`{place}` is missing. {key.sentence}")
            if key.required:
                source[name] = PLACEHOLDER
    return source


def _at(path: str, origins: Mapping[str, str]) -> str:
    return f"{origins[path]}: " if path in origins else ""


class Asked(NamedTuple):
    """A source, where it stands, and what decides about its rows: (key that says it, value)."""

    place: str
    source: Source
    format_key: str
    format: str
    fields_key: str
    fields: Mapping[str, str]
    ignore_key: str
    ignore: tuple[str, ...]


def list_sources(config: RunConfig) -> list[Asked]:
    """Every source of training and validation rows, with ``data.format`` and ``data.fields`` where it has none of its
    own.
    """
    data, listed = config.data, []
    for name, value in (("data.train", data.train), ("data.validation", data.validation)):
        items = (value,) if isinstance(value, str) else value or ()
        for index, item in enumerate(items):
            source = Source(path=item) if isinstance(item, str) else item
            place = name if isinstance(value, str) else f"{name}[{index}]"
            format_key, format = (
                ("data.format", data.format) if source.format is None else (f"{place}.format", source.format)
            )
            fields_key, fields = (
                ("data.fields", data.fields) if source.fields is None else (f"{place}.fields", source.fields)
            )
            ignore_key, ignore = (
                ("data.ignore", data.ignore) if source.ignore is None else (f"{place}.ignore", source.ignore)
            )
            listed.append(Asked(place, source, format_key, format, fields_key, fields, ignore_key, ignore))
    return listed


def check_sources(config: RunConfig) -> Iterator[str]:
    names: dict[str, str] = {}
    for place, source, *_ in list_sources(config):
        yield from _check_hub_keys(place, source)
        if place.startswith("data.validation") and source.weight != 1:
            yield (
                f"`{place}.weight` does nothing in `data.validation`: every validation row is measured once, remove it"
            )
        if source.name is not None:
            if source.name in names:
                yield (
                    f"`{place}.name` and `{names[source.name]}.name` are both {show(source.name)}: give each another "
                    "name"
                )
            names.setdefault(source.name, place)


def _check_hub_keys(place: str, source: Source) -> Iterator[str]:
    """A folder may hold the splits of a saved data set; a file has none."""
    if source.path.startswith("hub:"):
        if not source.path.removeprefix("hub:").strip("/ "):
            yield f"`{place}.path: {source.path}` names no data set: write hub:OWNER/NAME"
        return
    is_file = source.path.lower().endswith(FILE_ENDINGS)
    asked = {
        "subset": source.subset is not None,
        "revision": source.revision is not None,
        "split": source.split != "train" and is_file,
    }
    for name in (name for name, is_asked in asked.items() if is_asked):
        yield (
            f"`{place}.{name}` does nothing with `{place}.path: {show(source.path)}`, which is no data set of the hub: "
            "remove it"
        )


def check_formats(config: RunConfig) -> Iterator[str]:
    """Formats that the task cannot train, fields that the format does not have, and columns both read and left out;
    each said once.
    """
    found = []
    for asked in list_sources(config):
        if config.task == "sft" and asked.format == "text":
            found.append(
                f"`{asked.format_key}: text` has no answers, but `task: sft` trains answers: use task: cpt or mixed, "
                "or another format"
            )
        if config.task == "cpt" and asked.format not in ("auto", "text"):
            found.append(
                f"`{asked.format_key}: {asked.format}` is a conversation, but `task: cpt` trains text: use task: sft "
                "or mixed, or text"
            )
        known = known_fields(asked.format)
        for field in asked.fields:
            if field not in known:
                near = nearest_name(field, known)
                meant = f"did you mean {near}? " if near else ""
                found.append(
                    f"`{asked.fields_key}` has the key {show(field)}, which `{asked.format_key}: {asked.format}` does "
                    f"not read: {meant}Its fields are {', '.join(known)}"
                )
        needed = {asked.fields.get(field, field) for field in REQUIRED.get(asked.format, ())} | set(
            asked.fields.values()
        )
        for column in asked.ignore:
            if column in needed:
                reader = (
                    f"`{asked.fields_key}`"
                    if column in asked.fields.values()
                    else f"`{asked.format_key}: {asked.format}`"
                )
                found.append(
                    f"`{asked.ignore_key}` leaves out the column {show(column)}, which {reader} reads: keep one"
                )
    yield from dict.fromkeys(found)
