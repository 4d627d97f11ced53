"""A run file and overrides to a ``RunConfig``, or one ``UserError`` with all faults. Knows no data or machine."""

import math
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from manyhands.config.checks import check
from manyhands.config.keys import sections, table, wrong_value
from manyhands.config.read import NO_TEXT, ParsedFile, parse_or_text, read_run_file
from manyhands.config.schema import RunConfig
from manyhands.config.sources import drop_wrong_sources, list_paths, list_sources, open_source
from manyhands.config.text import at_line, show
from manyhands.core.errors import UserError
from manyhands.importers.hints import hint, nearest
from manyhands.importers.names import find_value
from manyhands.importers.recognize import (
    drop_replaced,
    exclusive_with,
    recognize,
    refuse_settings,
    translate,
    translate_settings,
)
from manyhands.importers.translation import ImportContext, Translation, clean_name, flatten, look_up

PATH_KEYS = ("model.name", "model.chat_template", "method.adapter", "data.image_folder")
HOME_KEYS = (*PATH_KEYS, "data.cache", "output.dir")
IN_SOURCE = re.compile(r"(data\.(?:train|validation))\[(\d+)\]\.(\w+)")
MAX_FINDINGS = 20


@dataclass(frozen=True)
class LoadedRun:
    """A run as it was asked for. ``translation`` and ``text``: the other tool's file that it came from, and that
    file's content; None for a native file. ``settings``: what other tools said about its distribution. ``run_file``:
    the text of the run file that a command line without one means.
    """

    config: RunConfig
    translation: Translation | None = None
    text: str | None = None
    settings: tuple[Translation, ...] = ()
    run_file: str | None = None

    @property
    def translations(self) -> tuple[Translation, ...]:
        """Of the run file, and of what says how it is distributed."""
        return (() if self.translation is None else (self.translation,)) + self.settings


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """``load_run`` without its translation."""
    return load_run(path, overrides).config


def load_run(
    path: str | os.PathLike[str] | ParsedFile,
    overrides: Sequence[str] = (),
    *,
    context: ImportContext | None = None,
    settings: Mapping[str, Path | ParsedFile] | None = None,
    read: Callable[[ParsedFile, ImportContext], Translation | None] | None = None,
) -> LoadedRun:
    """Reads a YAML, TOML or JSON run file (or takes a file's keys), ours or another tool's, and applies
    ``section.key=value`` overrides of our keys, the later one winning.

    Override values are read as YAML (``1e-4``, ``[q_proj, v_proj]``); keys that take any string take the text as given.
    ``name`` defaults to the file's stem. Relative paths that exist in the run file's folder are resolved against it.
    ``context``: what a translation may ask. ``settings``: files of other tools that say how to distribute the run
    (``accelerate``, ``deepspeed``), or their content. ``read``: in place of recognizing whose keys they are. Raises
    ``UserError`` with all findings at once.
    """
    source = path if isinstance(path, ParsedFile) else read_run_file(Path(path))
    context = replace(context or ImportContext(), folder=Path(os.path.abspath(source.where)).parent)
    files = {kind: read_run_file(file) if isinstance(file, Path) else file for kind, file in (settings or {}).items()}
    context = _with_overrides(context, overrides, files)
    translation = (read or translate_file)(source, context)
    mapping = deepcopy(translation.mapping if translation else source.mapping)
    origins = dict(translation.origins) if translation else {k: f"line {line}" for k, line in source.lines.items()}
    if translation is not None:
        drop_replaced(mapping, overrides)
        context = replace(context, micro=translation.micro, accumulation=translation.accumulation)
    asked = deepcopy(mapping)
    _apply_overrides(asked, overrides, {})
    said = [translate_settings(file, kind, context, asked) for kind, file in files.items()]
    for one in said:
        merge_settings(mapping, origins, one, translation.tool_defaults if translation else ())
    foreign = dict(origins) if translation or settings else {}
    findings = _apply_overrides(mapping, overrides, origins)
    if "name" not in mapping:
        mapping["name"] = clean_name(Path(source.where).stem)
    resolve_paths(mapping, context.folder)
    config = _validate(mapping, source.where, origins, findings, foreign)
    return LoadedRun(config, translation, source.text if translation else None, tuple(said))


def translate_file(source: ParsedFile, context: ImportContext) -> Translation | None:
    """Another tool's file as a native mapping, None for a native one. Raises ``UserError`` with all that is refused."""
    importer = recognize(source.mapping)
    if importer is None:
        refuse_settings(source)
        return None
    translation = translate(source, importer, context)
    translation.refuse()
    return translation


def merge_settings(
    mapping: dict[str, Any], origins: dict[str, str], settings: Translation, defaults: Collection[str] = ()
) -> None:
    """Adds a settings file. ``defaults``: run file keys that hold a tool's default. UserError for contradictions."""
    settings.refuse(imported=False)
    flat, found = flatten(mapping), []
    for native, value in flatten(settings.mapping).items():
        if native in settings.tool_defaults and flat.keys() & exclusive_with(native):
            continue
        if native in flat and flat[native] not in (value, "auto") and native not in {*defaults, *settings.replaces}:
            place = f" ({origins[native]})" if native in origins else ""
            found.append(
                f"{settings.origins.get(native, native)} asks for `{native}: {show(value)}`, the run file for "
                f"{show(flat[native])}{place}: keep one"
            )
            continue
        *sections, leaf = native.split(".")
        target = _open_section(mapping, *sections)
        if target is not None:
            target[leaf] = value
            origins[native] = f"{settings.where}, {settings.origins.get(native, native)}"
    if found:
        raise UserError(f"{settings.tool}'s file contradicts the run file", where=settings.where, details=found)


def _with_overrides(context: ImportContext, overrides: Sequence[str], files: Mapping[str, ParsedFile]) -> ImportContext:
    """What overrides and settings say of GPUs and data before they are applied."""
    given = {key: value for key, _, value in (override.partition("=") for override in overrides)}
    gpus, train = given.get("parallel.gpus", ""), given.get("data.train")
    if gpus.isdecimal():
        context = replace(context, gpus=int(gpus) or context.gpus)
    elif "accelerate" in files:  # its processes are what a run file's per-GPU numbers are multiplied by
        asked = look_up(translate_settings(files["accelerate"], "accelerate", context).mapping, "parallel.gpus")
        context = replace(context, gpus=asked or context.gpus)
    look = context.first_row
    return context if train is None or look is None else replace(context, first_row=lambda _: look(train))


def config_from_mapping(
    mapping: Mapping[str, Any], where: str = "the given configuration", origins: Mapping[str, str] | None = None
) -> RunConfig:
    """Validates nested keys. ``UserError`` with all findings. ``origins``: of native keys in another tool's file."""
    return _validate(deepcopy(dict(mapping)), where, origins or {}, [], origins or {})


def _apply_overrides(mapping: dict[str, Any], overrides: Sequence[str], origins: dict[str, str]) -> list[str]:
    """Writes the overrides into ``mapping``; returns the findings."""
    findings = []
    for override in overrides:
        path, equals, text = override.partition("=")
        path = path.strip().removeprefix("--")
        if not equals:
            example = f"{path}=VALUE" if path in table() else "section.key=value, such as batch.samples=32"
            findings.append(f"command line: {show(override)} is not an override; write {example}")
        elif NO_TEXT.search(override):
            findings.append(f"command line: {override[:60]!a} is not UTF-8 text")
        elif path in sections():
            findings.append(
                f"command line: `{path}` is a section; write {path}.key=value, `manyhands config {path}` lists its keys"
            )
        elif path in table():
            section, _, leaf = path.rpartition(".")
            target = _open_section(mapping, section) if section else mapping
            if target is not None:  # otherwise the file's section is not a mapping, which is reported
                value = parse_or_text(text)
                is_quoted = isinstance(value, str) and text.lstrip()[:1] in "'\""
                target[leaf] = value if is_quoted or table()[path].keeps(value) else text
                origins[path] = "command line"
        else:
            findings += _override_inside(mapping, path, text, origins)
    return findings


def _override_inside(mapping: dict[str, Any], path: str, text: str, origins: dict[str, str]) -> list[str]:
    """``data.train[1].weight=2``, ``data.fields.prompt=frage``: one entry of a list or mapping."""
    in_source = IN_SOURCE.fullmatch(path)
    base, _, leaf = path.rpartition(".")
    if in_source:
        base, index, leaf = in_source[1], int(in_source[2]), in_source[3]
        data = _open_section(mapping, "data")
        target = None if data is None else open_source(data, base.partition(".")[2], index)
        if target is None:
            return [f"command line: `{path}`: `{base}` has no source {index} (the first is 0)"]
    elif base in table() and table()[base].takes_mapping:
        target = _open_section(mapping, *base.split("."))
        if target is None:
            return []
    else:
        return [f"command line: {_unknown(path, parse_or_text(text))}"]
    target[leaf] = parse_or_text(text)
    origins[path] = "command line"
    return []


def _open_section(mapping: dict[str, Any], *names: str) -> dict[str, Any] | None:
    """The mapping at these names, created if missing; None if something else is there."""
    for name in names:
        if mapping.get(name) is None:
            mapping[name] = {}
        mapping = mapping[name]
        if not isinstance(mapping, dict):
            return None
    return mapping


def resolve_paths(mapping: dict[str, Any], folder: Path) -> None:
    """Makes paths absolute that exist in the run file's folder, so that the run is the same from every folder."""
    for path in PATH_KEYS:
        section, _, leaf = path.partition(".")
        if isinstance(keys := mapping.get(section), dict):
            _resolve_path(keys, leaf, folder, must_be_folder=path == "model.name")
    for holder, place in list_paths(mapping):
        _resolve_path(holder, place, folder)
    converters = keys.get("converters") if isinstance(keys := mapping.get("model"), dict) else None
    if isinstance(converters, list):
        for index, reference in enumerate(converters):
            file, _, name = str(reference).rpartition(":")
            if file.endswith(".py") and (folder / file).is_file():
                converters[index] = f"{os.path.normpath(folder / file)}:{name}"


def _resolve_path(holder: Any, place: Any, folder: Path, must_be_folder: bool = False) -> None:
    value = holder.get(place) if isinstance(holder, dict) else holder[place]
    if not isinstance(value, str) or not value or value.startswith("hub:"):
        return
    try:
        candidate = folder / Path(value).expanduser()
        if candidate.is_dir() if must_be_folder else candidate.exists():
            holder[place] = os.path.normpath(candidate)
    except (OSError, ValueError, RuntimeError):  # a chat template is not a file name
        return


def _validate(
    mapping: dict[str, Any], where: str, origins: Mapping[str, str], findings: list[str], foreign: Mapping[str, str]
) -> RunConfig:
    """``foreign``: where another tool's file set a native key; findings name that place too."""
    findings = findings + _drop_unknown(mapping, origins)
    try:
        config = RunConfig.model_validate(mapping)
    except ValidationError as error:
        findings += _drop_invalid(mapping, error, origins)
        try:
            config = RunConfig.model_validate(mapping)
        except ValidationError:  # too broken for the checks of contradictions
            raise _error(_in_line_order(findings, origins), where) from None
    findings += [_name_origins(finding, foreign) for finding in (*check(config), *_check_paths(config))]
    if findings:
        raise _error(_in_line_order(findings, origins), where)
    return config


def _in_line_order(findings: list[str], origins: Mapping[str, str]) -> list[str]:
    """By the line that a finding begins with, else that of the first key it names; the rest last."""

    def line_of(finding: str) -> float:
        places = [finding.partition(":")[0], *(origins.get(key, "") for key in re.findall(r"`([^`: ]+)", finding))]
        return next((int(found[1]) for place in places if (found := re.search(r"\bline (\d+)", place))), math.inf)

    return sorted(findings, key=line_of)


def _name_origins(finding: str, foreign: Mapping[str, str]) -> str:
    """The finding, and where the native keys that it names were set in another tool's file."""
    named = dict.fromkeys(re.findall(r"`([a-z_]+(?:\.[a-z_0-9]+)+)", finding))
    places = [f"{key} is {foreign[key]}" for key in named if key in foreign]
    return f"{finding} ({'; '.join(places)})" if places else finding


def _check_paths(config: RunConfig) -> list[str]:
    """Paths that cannot be looked up: ``~name`` of an unknown user, names that are too long, missing permissions."""
    places = {path: attrgetter(path)(config) for path in HOME_KEYS}
    places |= {f"{asked.place}.path": asked.source.path for asked in list_sources(config)}
    findings = []
    for path, value in places.items():
        if not isinstance(value, str) or (path == "model.chat_template" and "{" in value):
            continue
        try:
            Path(value).expanduser().exists()
        except RuntimeError:
            user = Path(value).parts[0]
            fix = f"write the full path, or ./{user} for a folder of that name"
            findings.append(f"`{path}: {show(value)}`: the user {user[1:]!r} has no home folder here: {fix}")
        except OSError as error:
            findings.append(f"`{path}: {show(value)}`: this path cannot be used ({error.strerror}): choose another one")
    return findings


def _error(findings: list[str], where: str) -> UserError:
    more = len(findings) - MAX_FINDINGS
    details = findings[:MAX_FINDINGS] + ([f"and {more} more"] if more > 0 else [])
    file = "the command line" if where == "command line" else "the run file"
    what = f"{file} has an error" if len(findings) == 1 else f"{file} has {len(findings)} errors"
    return UserError(
        what, where=where, details=details, fix="correct the keys above; `manyhands config KEY` explains a key"
    )


def _drop_unknown(mapping: dict[str, Any], origins: Mapping[str, str]) -> list[str]:
    """Removes unknown keys, and booleans where a number or text belongs (pydantic takes True for 1)."""
    findings = []
    for name in list(mapping):
        if name not in sections():
            if isinstance(mapping[name], dict) and mapping[name] and name not in table():
                findings += _list_keys(mapping.pop(name), str(name), origins)
            else:
                findings += _drop_wrong_key(mapping, name, str(name), origins)
            continue
        keys = mapping[name]
        if keys is None:  # `batch:` with nothing below
            keys = mapping[name] = {}
        if not isinstance(keys, dict):
            findings.append(at_line(name, origins) + f"`{name}` is a section with keys, got {show(keys)}")
            mapping[name] = {}
            continue
        for leaf in list(keys):
            findings += _drop_wrong_key(keys, leaf, f"{name}.{leaf}", origins)
    if isinstance(mapping.get("data"), dict):
        findings += drop_wrong_sources(mapping["data"], origins)
    for name in ("model", "data"):  # so that each missing required key is named, not its section
        mapping.setdefault(name, {})
    return findings


def _list_keys(keys: dict[str, Any], name: str, origins: Mapping[str, str]) -> list[str]:
    """An unknown section: each of its keys, and what it is called here."""
    meant = nearest(name)
    known = f": did you mean `{meant}`?" if meant in sections() else ""
    findings = [f"{at_line(name, origins)}unknown section `{name}`{known}"]
    for leaf in keys:
        path, meant_path = f"{name}.{leaf}", f"{meant}.{leaf}"
        instead = f": write `{meant_path}`" if meant_path in table() else hint(path)
        findings.append(f"{at_line(path, origins)}unknown key `{path}`{instead}")
    return findings


def _drop_wrong_key(keys: dict[str, Any], leaf: str, path: str, origins: Mapping[str, str]) -> list[str]:
    key = table().get(path) if isinstance(leaf, str) and "." not in leaf else None
    if key is None:
        value = keys.pop(leaf)
        finding = at_line(path, origins) + _unknown(path, value)
        if path in table():  # `batch.samples: 8` at the top
            section, _, inner = path.partition(".")
            finding += f": keys are nested, write `{section}:` and below it `{inner}: {show(value)}`"
        return [finding]
    if isinstance(keys[leaf], bool) and "`true`" not in key.allowed:
        value = keys.pop(leaf)
        if key.required:
            keys[leaf] = "placeholder"
        return [_wrong_value(path, value, origins)]
    return []


def _drop_invalid(mapping: dict[str, Any], error: ValidationError, origins: Mapping[str, str]) -> list[str]:
    """Pydantic's findings in words, one for each key; removes the keys so that the rest can still be checked."""
    findings: dict[str, str] = {}
    for item in error.errors(include_url=False, include_context=False):
        parts = [str(part) for part in item["loc"][:2]]
        path = next((p for p in (".".join(parts), parts[0]) if p in table()), ".".join(parts))
        if path in findings or path not in table():
            continue
        section, _, leaf = path.rpartition(".")
        keys = mapping[section] if section else mapping
        if item["type"] == "missing":
            findings[path] = f"`{path}` is missing. {table()[path].sentence}"
        else:
            findings[path] = _wrong_value(path, keys.pop(leaf), origins)
        if table()[path].required:
            keys[leaf] = "placeholder"
    return list(findings.values())


def _wrong_value(path: str, value: Any, origins: Mapping[str, str]) -> str:
    return at_line(path, origins) + wrong_value(path, table()[path], value, find_value(path, show(value)))


def _unknown(path: str, value: object = None) -> str:
    return f"unknown key `{path}`" + ("" if path in table() else hint(path, value))
