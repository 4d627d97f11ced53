"""Contradictions in what a run file says about its rows: sources, formats, fields, tasks. Pure, as ``checks``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from manyhands.config.keys import nearest_name, show
from manyhands.config.row_fields import REQUIRED, known_fields
from manyhands.config.schema import RunConfig, Source

FILE_ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".arrow", ".gz")


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
            yield f"`{place}.weight` does nothing in `data.validation`: every validation row is measured once, remove it"
        if source.name is not None:
            if source.name in names:
                yield f"`{place}.name` and `{names[source.name]}.name` are both {show(source.name)}: give each another name"
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
        yield f"`{place}.{name}` does nothing with `{place}.path: {show(source.path)}`, which is no data set of the hub: remove it"


def check_formats(config: RunConfig) -> Iterator[str]:
    """Formats that the task cannot train, fields that the format does not have, and columns both read and left out;
    each said once.
    """
    found = []
    for asked in list_sources(config):
        if config.task == "sft" and asked.format == "text":
            found.append(
                f"`{asked.format_key}: text` has no answers, but `task: sft` trains answers: use task: cpt or mixed, or another format"
            )
        if config.task == "cpt" and asked.format not in ("auto", "text"):
            found.append(
                f"`{asked.format_key}: {asked.format}` is a conversation, but `task: cpt` trains text: use task: sft or mixed, or text"
            )
        known = known_fields(asked.format)
        for field in asked.fields:
            if field not in known:
                near = nearest_name(field, known)
                meant = f"did you mean {near}? " if near else ""
                found.append(
                    f"`{asked.fields_key}` has the key {show(field)}, which `{asked.format_key}: {asked.format}` does not read: "
                    f"{meant}Its fields are {', '.join(known)}"
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
