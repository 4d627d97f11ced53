"""Data sets of LLaMA-Factory: names in ``dataset_info.json`` become sources of ``data.train``.

An entry names a file, a folder or a set on the hub, the form of its rows (alpaca, sharegpt, openai) and their columns.
Entries that say nothing of columns have the default ones; where they name some, the others are not read at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from manyhands.config.read import read_run_file
from manyhands.config.sources import IMAGES, OPTIONAL, WITH_ROLES
from manyhands.config.text import nearest_name, show
from manyhands.core.errors import UserError
from manyhands.importers.translation import Translator

INFO = "dataset_info.json"
ENTRY_KEYS = (
    "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name", "file_name", "formatting", "ranking",
    "subset", "split", "folder", "num_samples", "columns", "tags",
)  # fmt: skip
PREFERENCES, MEDIA = ("chosen", "rejected", "kto_tag"), ("videos", "audios")
COLUMNS = MappingProxyType({"prompt": "instruction", "query": "input", "response": "output",
                            "messages": "conversations"})  # fmt: skip
OTHER_COLUMNS = ("history", "system", "tools", "images", *PREFERENCES, *MEDIA)
TAGS = MappingProxyType({"role_tag": "from", "content_tag": "value", "user_tag": "human", "assistant_tag": "gpt",
                         "observation_tag": "observation", "function_tag": "function_call",
                         "system_tag": "system"})  # fmt: skip
# Who speaks, as our formats sharegpt and messages know it.
SPEAKERS = MappingProxyType(
    {
        "user_tag": ("human", "user"),
        "assistant_tag": ("gpt", "chatgpt", "assistant", "model", "bot"),
        "observation_tag": ("observation", "tool", "tool_response", "function_response"),
        "function_tag": ("function_call", "tool_call"),
        "system_tag": ("system",),
    }
)
ROLES = MappingProxyType({"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool",
                          "system_tag": "system"})  # fmt: skip
LINES = "LLaMA-Factory takes each line of a .txt file as a text; here texts are separated by blank lines"


class _Refused(Exception):
    """Why an entry cannot be used."""


@dataclass(frozen=True)
class DatasetInfo:
    """A dataset_info.json: its entries, the lines of its keys, and the folder as the run file spells it, or the data
    set on the hub that has it (``repo``).
    """

    entries: Mapping[str, Any]
    where: str
    folder: str
    lines: Mapping[str, int] = field(default_factory=dict)
    online: bool = False
    repo: str | None = None

    def place(self, key: str) -> str:
        line = self.lines.get(key)
        return f"{self.where}, " + (f"line {line}, " if line else "") + f"`{key}`"


@dataclass(frozen=True)
class Wanted:
    """What applies to every source of a run. ``limit``: at most so many rows, the first ones."""

    is_text: bool
    limit: int | None = None


@dataclass
class Sources:
    """Sources in our keys, whether rows carry tools or images, and what is not quite the same."""

    items: list[dict[str, Any]] = field(default_factory=list)
    has_tools: bool = False
    has_images: bool = False
    differences: list[str] = field(default_factory=list)


def read_info(t: Translator) -> DatasetInfo | None:
    """The file in the folder ``dataset_dir``; None where that is refused."""
    asked = t.get("dataset_dir", "data")
    if isinstance(asked, Mapping):
        return DatasetInfo(asked, t.source.where, "", {key.removeprefix("dataset_dir."): line for key, line in
                                                       t.source.lines.items()})  # fmt: skip
    asked = str(asked)
    key = "dataset_dir" if t.has("dataset_dir") else "dataset"
    if asked == "ONLINE":
        return DatasetInfo({}, "the hub", "", online=True)
    if asked.startswith("REMOTE:"):
        return _read_remote(t, key, asked.removeprefix("REMOTE:"))
    found = find_file(t, os.path.join(asked, INFO))
    if found is None:
        places = " nor in ".join(dict.fromkeys((str(t.context.folder / asked), str(Path.cwd() / asked))))
        t.refuse(key, f"there is no {INFO} in {places}: write the folder that has it as dataset_dir")
        return None
    path, root = found
    try:
        read = read_run_file(path)
    except UserError as error:
        t.refuse(key, f"{error.where or path}: {error.why or error.what}")
        return None
    return DatasetInfo(read.mapping, str(path), os.path.join(root, asked), read.lines)


def _read_remote(t: Translator, key: str, name: str) -> DatasetInfo | None:
    """The list of a data set on the hub, fetched."""
    try:
        file = t.context.hub_file(name, INFO) if t.context.hub_file else None
        read = read_run_file(file) if file else None
    except UserError as error:
        t.refuse(key, f"{INFO} of {name} cannot be read: {error.why or error.what}")
        return None
    if read is None:
        fix = f"hf download {name} --repo-type dataset --local-dir data"
        t.refuse(key, f"{INFO} of {name} on the hub is out of reach: run `{fix}`, and write dataset_dir: data")
        return None
    return DatasetInfo(read.mapping, f"{name}/{INFO}", "", read.lines, repo=name)


def find_file(t: Translator, name: str) -> tuple[Path, str] | None:
    """A file that a run file names: beside it, in the working folder, or in one above the run file, as in a checkout
    of the tool. With the folder to put before names like it: none where relative ones are found anyway.
    """
    for root in (t.context.folder, Path.cwd()):
        if os.path.isfile(root / name):
            return root / name, ""
    above = next((root for root in t.context.folder.absolute().parents if os.path.isfile(root / name)), None)
    return None if above is None else (above / name, str(above))


def split_names(value: Any) -> list[str]:
    """Names that are separated by commas, or a list of them."""
    parts = value if isinstance(value, list) else str("" if value is None else value).split(",")
    return [str(part).strip() for part in parts if str(part).strip()]


def make_sources(t: Translator, key: str, info: DatasetInfo, wanted: Wanted) -> Sources | None:
    """The data sets that ``key`` names; None where one of them is refused."""
    sources = Sources()
    for name in split_names(t.get(key) or ""):
        try:
            if info.online:
                entry: Any = {"hf_hub_url": name}
            elif name in info.entries:
                entry = info.entries[name]
            else:
                raise _Refused(_unknown_name(name, info))
            if not isinstance(entry, Mapping):
                raise _Refused(f"{info.place(name)}: got {show(entry)}, allowed: a mapping such as "
                               f'{{"file_name": "rows.json"}}')  # fmt: skip
            sources.items.append(_make_source(t, name, entry, info, wanted, sources))
        except _Refused as refused:
            t.refuse(key, str(refused))
            return None
    return sources


def _unknown_name(name: str, info: DatasetInfo) -> str:
    near = nearest_name(name, info.entries)
    listed = list(info.entries)
    more = f", and {len(listed) - 20} more" if len(listed) > 20 else ""
    meant = f"did you mean {near}? It has " if near else "it has "
    return f"{info.where} has no data set {show(name)}: {meant}{', '.join(listed[:20])}{more}"


def _make_source(
    t: Translator, name: str, entry: Mapping[str, Any], info: DatasetInfo, wanted: Wanted, sources: Sources
) -> dict[str, Any]:
    for key in entry:
        near = nearest_name(key, ENTRY_KEYS)
        if key not in ENTRY_KEYS and near:
            raise _Refused(f"{info.place(f'{name}.{key}')}: LLaMA-Factory has no such key: did you mean `{near}`?")
    columns = _read_table(entry, "columns", (*COLUMNS, *OTHER_COLUMNS), COLUMNS, name, info)
    tags = _read_table(entry, "tags", tuple(TAGS), TAGS, name, info)
    _refuse_kinds(entry, columns, name, info)
    source: dict[str, Any] = {"name": name, **_locate(entry, name, info)}
    if wanted.is_text and columns["images"]:
        raise _Refused(f"{info.place(f'{name}.columns.images')}: stage pt trains text alone here: write stage sft")
    if wanted.is_text:
        form, read = "text", _read_text(entry, columns, name, info)
        if source["path"].endswith(".txt"):
            sources.differences.append(LINES)
    else:
        form, read = _read_turns(entry, columns, tags, name, info)
        sources.has_tools |= bool(columns["tools"])
        if columns["images"]:
            sources.has_images, read = True, {**read, "images": columns["images"]}
    source["format"] = form
    if form in WITH_ROLES and (roles := _read_roles(tags, name, info)):
        source["roles"] = roles
    renamed = {ours: theirs for ours, theirs in read.items() if theirs and theirs != ours}
    if renamed:
        source["fields"] = renamed
    unread = _find_unread(t, form, read, source["path"])
    if unread:
        source["ignore"] = unread
    return source | _limit(entry, wanted, name, info, source)


def _read_table(
    entry: Mapping[str, Any], key: str, known: Sequence[str], defaults: Mapping[str, str], name: str, info: DatasetInfo
) -> dict[str, str | None]:
    """``columns`` or ``tags``: the defaults if there is none, else only what it says."""
    given = entry.get(key)
    if given is None:
        return {one: defaults.get(one) for one in known}
    if not isinstance(given, Mapping):
        raise _Refused(f"{info.place(f'{name}.{key}')}: got {show(given)}, allowed: a mapping of names")
    for one in given:
        if one not in known:
            near = nearest_name(str(one), known)
            fix = f"did you mean `{near}`?" if near else f"it knows {', '.join(known)}"
            raise _Refused(f"{info.place(f'{name}.{key}.{one}')}: LLaMA-Factory has no such key: {fix}")
    return {one: given.get(one) for one in known}


def _refuse_kinds(entry: Mapping[str, Any], columns: Mapping[str, str | None], name: str, info: DatasetInfo) -> None:
    if entry.get("ranking") or any(columns.get(one) for one in PREFERENCES):
        key = "ranking" if entry.get("ranking") else "columns"
        raise _Refused(f"{info.place(f'{name}.{key}')}: data of preferences (DPO, KTO, rewards) cannot be trained "
                       "here: choose a data set of conversations")  # fmt: skip
    media = [one for one in MEDIA if columns.get(one)]
    if media:
        raise _Refused(f"{info.place(f'{name}.columns.{media[0]}')}: these rows come with {' and '.join(media)}, and "
                       "only text and images can be trained: choose a data set of these")  # fmt: skip


def _locate(entry: Mapping[str, Any], name: str, info: DatasetInfo) -> dict[str, Any]:
    """Path, subset and split, in LLaMA-Factory's order of precedence."""
    if entry.get("hf_hub_url"):
        found: dict[str, Any] = {"path": f"hub:{entry['hf_hub_url']}"}
        if entry.get("folder"):
            found["files"] = [f"{str(entry['folder']).strip('/')}/**"]
        return found | {key: str(entry[key]) for key in ("subset", "split") if entry.get(key) not in (None, "train")}
    for key, what in (
        ("ms_hub_url", "ModelScope"),
        ("om_hub_url", "Modelers"),
        ("script_url", "a Python script"),
        ("cloud_file_name", "a cloud bucket"),
    ):
        if entry.get(key):
            raise _Refused(f"{info.place(f'{name}.{key}')}: rows are not read from {what}: download them, and name the "
                           "file as file_name, or a set on the Hugging Face hub as hf_hub_url")  # fmt: skip
    file = entry.get("file_name")
    if not isinstance(file, str) or not file:
        raise _Refused(f"{info.place(name)}: it names neither file_name nor hf_hub_url")
    return {"path": f"hub:{info.repo}", "files": [file]} if info.repo else {"path": os.path.join(info.folder, file)}


def _read_text(
    entry: Mapping[str, Any], columns: Mapping[str, str | None], name: str, info: DatasetInfo
) -> dict[str, str | None]:
    """Stage pt: the text is the column ``prompt``, and ``query`` below it."""
    if entry.get("formatting", "alpaca") != "alpaca" or columns["query"] or not columns["prompt"]:
        raise _Refused(f"{info.place(name)}: stage pt reads the first question of a conversation as its text: name the "
                       'column of the text alone, as "columns": {"prompt": "text"}')  # fmt: skip
    return {"text": columns["prompt"]}


def _read_turns(
    entry: Mapping[str, Any],
    columns: Mapping[str, str | None],
    tags: Mapping[str, str | None],
    name: str,
    info: DatasetInfo,
) -> tuple[str, dict[str, str | None]]:
    """The format, and the column of each of its fields."""
    form = entry.get("formatting", "alpaca")
    if form == "alpaca":
        if columns["tools"]:
            raise _Refused(f"{info.place(f'{name}.columns.tools')}: tools are read with conversations (sharegpt) only")
        question = columns["prompt"] or columns["query"]
        if not question or not columns["response"]:
            missing = "response" if question else "prompt"
            raise _Refused(f"{info.place(f'{name}.columns')}: it names no `{missing}`: a question and an answer are "
                           "needed")  # fmt: skip
        given = columns["query"] if columns["prompt"] else None
        fields = {"instruction": question, "input": given, "output": columns["response"]}
        return "alpaca", fields | {one: columns[one] for one in ("system", "history")}
    if form not in ("sharegpt", "openai"):
        raise _Refused(f"{info.place(f'{name}.formatting')}: got {show(form)}, allowed: alpaca, sharegpt, openai")
    if not columns["messages"]:
        raise _Refused(f"{info.place(f'{name}.columns')}: it names no `messages`, the column of the conversation")
    if form == "openai" and tags["role_tag"] != "from" and not columns["system"]:
        fields = {"messages": columns["messages"], "role": tags["role_tag"], "content": tags["content_tag"]}
        return "messages", fields | {"tools": columns["tools"]}
    fields = {"conversations": columns["messages"], "from": tags["role_tag"], "value": tags["content_tag"]}
    return "sharegpt", fields | {one: columns[one] for one in ("system", "tools")}


def _read_roles(tags: Mapping[str, str | None], name: str, info: DatasetInfo) -> dict[str, str]:
    """Roles by those names of ``tags`` that are not known here."""
    roles = {}
    for tag, names in SPEAKERS.items():
        given = tags.get(tag)
        if given is None or given in names:
            continue
        if tag not in ROLES:
            raise _Refused(f"{info.place(f'{name}.tags.{tag}')}: {show(given)} is not known here: the rows must say "
                           f"{' or '.join(names)}")  # fmt: skip
        roles[given] = ROLES[tag]
    return roles


def _find_unread(t: Translator, form: str, read: Mapping[str, str | None], path: str) -> list[str]:
    """Columns that our format would read of a row that has them, and that LLaMA-Factory does not."""
    unread = {name for name in OPTIONAL[form] if not read.get(name)} - set(read.values())
    known = t.context.columns(path)
    if known is not None and form != "text":
        unread |= set(IMAGES) - set(read.values())
    return sorted(name for name in unread if known is None or name in known)


def _limit(
    entry: Mapping[str, Any], wanted: Wanted, name: str, info: DatasetInfo, source: Mapping[str, Any]
) -> dict[str, Any]:
    """``num_samples`` draws rows, ``max_samples`` takes the first ones."""
    number = entry.get("num_samples")
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        raise _Refused(f"{info.place(f'{name}.num_samples')}: got {show(number)}, allowed: a number of rows")
    if number is not None:
        return {"max_samples": min(number, wanted.limit or number)}
    if wanted.limit is None:
        return {}
    split = str(source.get("split", "train"))
    if "[" in split or "+" in split:
        raise _Refused(f"{info.place(f'{name}.split')}: {split} chooses rows, and max_samples takes the first "
                       f"{wanted.limit:,} of them: write one of the two")  # fmt: skip
    return {"split": f"{split}[:{wanted.limit}]"}
