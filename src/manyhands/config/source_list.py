"""``data.train`` and ``data.validation`` as a run file writes them: a path, or a list of paths and sources.

Knows the schema of one source; reads no file. Works on the plain mapping, before it is validated, so that every error
is named by its place (``data.train[1].weight``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from manyhands.config.keys import SOURCE_LISTS, nearest_in_source, show, source_table, wrong_value
from manyhands.config.schema import Source

PLACEHOLDER = "placeholder"  # stands for what was wrong, while the rest is checked


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
            near = nearest_in_source(str(name))
            meant = (
                f": did you mean `{path}.{near}`? {source_table()[near].sentence}"
                if near
                else f"; a source has {', '.join(source_table())}"
            )
            findings.append(f"{_at(place, origins)}unknown key `{place}`{meant}")
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
