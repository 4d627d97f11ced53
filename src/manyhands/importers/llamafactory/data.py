"""Data sets of LLaMA-Factory: names in ``dataset_info.json`` become sources of ``data.train``.

An entry names a file, a folder or a set on the hub, the form of its rows (alpaca, sharegpt, openai) and their columns.
Entries that say nothing of columns have the default ones; where they name some, the others are not read at all.
"""

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
ELSEWHERE = MappingProxyType({"ms_hub_url": "ModelScope", "om_hub_url": "Modelers", "script_url": "a Python script",
                              "cloud_file_name": "a cloud bucket"})  # fmt: skip
LINES = "LLaMA-Factory takes each line of a .txt file as a text; here texts are separated by blank lines"


class _Refused(Exception):
    """Why an entry cannot be used."""


@dataclass(frozen=True)
class DatasetInfo:
    """A dataset_info.json: entries, lines of keys, and its folder as spelt, or its data set on the hub (``repo``)."""

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
    stage: str = "sft"


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
            sources.items.append(_Entry(name, entry, info).translate(t, wanted, sources))
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


class _Entry:
    """One data set of the list: its keys as a source of ours."""

    def __init__(self, name: str, entry: Mapping[str, Any], info: DatasetInfo) -> None:
        self.name, self.entry, self.info = name, entry, info
        for key in entry:
            near = nearest_name(key, ENTRY_KEYS)
            if key not in ENTRY_KEYS and near:
                raise self.refusal(key, f"LLaMA-Factory has no such key: did you mean `{near}`?")
        self.columns = self._read_table("columns", (*COLUMNS, *OTHER_COLUMNS), COLUMNS)
        self.tags = self._read_table("tags", tuple(TAGS), TAGS)

    def refusal(self, key: str, why: str) -> _Refused:
        """``key``: of this entry; "" is the entry itself."""
        return _Refused(f"{self.info.place(f'{self.name}.{key}' if key else self.name)}: {why}")

    def _read_table(self, key: str, known: Sequence[str], defaults: Mapping[str, str]) -> dict[str, str | None]:
        """``columns`` or ``tags``: the defaults if there is none, else only what it says."""
        given = self.entry.get(key)
        if given is None:
            return {one: defaults.get(one) for one in known}
        if not isinstance(given, Mapping):
            raise self.refusal(key, f"got {show(given)}, allowed: a mapping of names")
        for one in given:
            if one not in known:
                near = nearest_name(str(one), known)
                fix = f"did you mean `{near}`?" if near else f"the known ones are {', '.join(known)}"
                raise self.refusal(f"{key}.{one}", f"LLaMA-Factory has no such key: {fix}")
        return {one: given.get(one) for one in known}

    def translate(self, t: Translator, wanted: Wanted, sources: Sources) -> dict[str, Any]:
        columns = self.columns
        self._refuse_kinds(wanted.stage)
        source: dict[str, Any] = {"name": self.name, **self._locate()}
        if wanted.is_text and columns["images"]:
            raise self.refusal("columns.images", "stage pt trains text alone here: write stage sft")
        if wanted.is_text:
            form, read = "text", self._read_text()
            if source["path"].endswith(".txt"):
                sources.differences.append(LINES)
        elif wanted.stage == "dpo":
            form, read = self._read_pair()
        else:
            form, read = self._read_turns()
            if wanted.stage == "kto":
                form, read = "label", read | {"label": columns["kto_tag"]}
        if not wanted.is_text:
            sources.has_tools |= bool(columns["tools"])
            if columns["images"]:
                sources.has_images, read = True, {**read, "images": columns["images"]}
        source["format"] = form
        if form in WITH_ROLES and (roles := self._read_roles()):
            source["roles"] = roles
        if renamed := {ours: theirs for ours, theirs in read.items() if theirs and theirs != ours}:
            source["fields"] = renamed
        if unread := _find_unread(t, form, read, source["path"]):
            source["ignore"] = unread
        return source | self._limit(wanted, str(source.get("split", "train")))

    def _refuse_kinds(self, stage: str) -> None:
        is_ranking, is_judged = bool(self.entry.get("ranking")), bool(self.columns.get("kto_tag"))
        has_pairs = is_ranking or any(self.columns.get(one) for one in PREFERENCES[:2])
        if stage == "dpo" and not (is_ranking and self.columns.get("chosen") and self.columns.get("rejected")):
            raise self.refusal("ranking", "stage dpo trains pairs: choose a data set with ranking: true and columns "
                               "for chosen and rejected")  # fmt: skip
        if stage == "kto" and (not is_judged or is_ranking):
            raise self.refusal("columns", "stage kto trains judged answers: choose a data set with the column kto_tag")
        if stage not in ("dpo", "kto") and (has_pairs or is_judged):
            key = "ranking" if is_ranking else "columns"
            raise self.refusal(key, "this is data of preferences: write stage dpo (pairs) or kto (judged answers), or "
                               "choose a data set of conversations")  # fmt: skip
        if stage == "kto" and self.columns.get("images"):
            raise self.refusal("columns.images", "judged answers are trained on text alone: choose a data set of text, "
                               "or pairs and stage dpo")  # fmt: skip
        if media := [one for one in MEDIA if self.columns.get(one)]:
            raise self.refusal(f"columns.{media[0]}", f"these rows come with {' and '.join(media)}, and only text and "
                               "images can be trained: choose a data set of these")  # fmt: skip

    def _locate(self) -> dict[str, Any]:
        """Path, subset and split, in LLaMA-Factory's order of precedence."""
        entry = self.entry
        if entry.get("hf_hub_url"):
            found: dict[str, Any] = {"path": f"hub:{entry['hf_hub_url']}"}
            if entry.get("folder"):
                found["files"] = [f"{str(entry['folder']).strip('/')}/**"]
            return found | {
                key: str(entry[key]) for key in ("subset", "split") if entry.get(key) not in (None, "train")
            }
        for key, what in ELSEWHERE.items():
            if entry.get(key):
                raise self.refusal(key, f"rows are not read from {what}: download them, and name the file as "
                                   "file_name, or a set on the Hugging Face hub as hf_hub_url")  # fmt: skip
        file, repo = entry.get("file_name"), self.info.repo
        if not isinstance(file, str) or not file:
            raise self.refusal("", "it names neither file_name nor hf_hub_url")
        return {"path": f"hub:{repo}", "files": [file]} if repo else {"path": os.path.join(self.info.folder, file)}

    def _read_text(self) -> dict[str, str | None]:
        """Stage pt: the text is the column ``prompt``, and ``query`` below it."""
        prompt = self.columns["prompt"]
        if self.entry.get("formatting", "alpaca") != "alpaca" or self.columns["query"] or not prompt:
            raise self.refusal("", "stage pt reads the first question of a conversation as its text: name the column "
                               'of the text alone, as "columns": {"prompt": "text"}')  # fmt: skip
        return {"text": prompt}

    def _read_turns(self) -> tuple[str, dict[str, str | None]]:
        """The format, and the column of each of its fields."""
        form, columns, tags = self.entry.get("formatting", "alpaca"), self.columns, self.tags
        if form == "alpaca":
            if columns["tools"]:
                raise self.refusal("columns.tools", "tools are read with conversations (sharegpt) only")
            question = columns["prompt"] or columns["query"]
            if not question or not columns["response"]:
                missing = "response" if question else "prompt"
                raise self.refusal("columns", f"it names no `{missing}`: a question and an answer are needed")
            given = columns["query"] if columns["prompt"] else None
            fields = {"instruction": question, "input": given, "output": columns["response"]}
            return "alpaca", fields | {one: columns[one] for one in ("system", "history")}
        if form not in ("sharegpt", "openai"):
            raise self.refusal("formatting", f"got {show(form)}, allowed: alpaca, sharegpt, openai")
        if not columns["messages"]:
            raise self.refusal("columns", "it names no `messages`, the column of the conversation")
        if form == "openai" and tags["role_tag"] != "from" and not columns["system"]:
            fields = {"messages": columns["messages"], "role": tags["role_tag"], "content": tags["content_tag"]}
            return "messages", fields | {"tools": columns["tools"]}
        fields = {"conversations": columns["messages"], "from": tags["role_tag"], "value": tags["content_tag"]}
        return "sharegpt", fields | {one: columns[one] for one in ("system", "tools")}

    def _read_pair(self) -> tuple[str, dict[str, str | None]]:
        """The same of a data set with ``ranking``."""
        columns, answers = self.columns, {one: self.columns[one] for one in PREFERENCES[:2]}
        if self.entry.get("formatting", "alpaca") != "alpaca":
            return "preference", self._read_turns()[1] | answers
        question = columns["prompt"] or columns["query"]
        if not question:
            raise self.refusal("columns", "it names no `prompt`: a question is needed")
        given = columns["query"] if columns["prompt"] else None
        fields = {"instruction": question, "input": given, "system": columns["system"], "history": columns["history"]}
        return "preference", fields | answers

    def _read_roles(self) -> dict[str, str]:
        """Roles by those names of ``tags`` that are not known here."""
        roles = {}
        for tag, names in SPEAKERS.items():
            given = self.tags.get(tag)
            if given is None or given in names:
                continue
            if tag not in ROLES:
                said = f"{show(given)} is not known here: the rows must say {' or '.join(names)}"
                raise self.refusal(f"tags.{tag}", said)
            roles[given] = ROLES[tag]
        return roles

    def _limit(self, wanted: Wanted, split: str) -> dict[str, Any]:
        """``num_samples`` draws rows, ``max_samples`` takes the first ones."""
        number = self.entry.get("num_samples")
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise self.refusal("num_samples", f"got {show(number)}, allowed: a number of rows")
        if number is not None:
            return {"max_samples": min(number, wanted.limit or number)}
        if wanted.limit is None:
            return {}
        if "[" in split or "+" in split:
            raise self.refusal("split", f"{split} chooses rows, and max_samples takes the first {wanted.limit:,} of "
                               "them: write one of the two")  # fmt: skip
        return {"split": f"{split}[:{wanted.limit}]"}


def _find_unread(t: Translator, form: str, read: Mapping[str, str | None], path: str) -> list[str]:
    """Columns that our format would read of a row that has them, and that LLaMA-Factory does not."""
    unread = {name for name in OPTIONAL[form] if not read.get(name)} - set(read.values())
    known = t.context.columns(path)
    if known is not None and form != "text":
        unread |= set(IMAGES) - set(read.values())
    return sorted(name for name in unread if known is None or name in known)
