"""The data of an Axolotl run: data sets, lengths, what is held out. Each key of an entry has its own outcome."""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from manyhands.config.text import names, nearest_name, show
from manyhands.importers.axolotl import keys, rl
from manyhands.importers.axolotl.templates import JEOPARDY, map_template, read_own_prompt
from manyhands.importers.transformers import map_held_out
from manyhands.importers.translation import Translator, flatten

# By `type` of an entry: ours for the same rows; `template`: the chat template whose text is that of the type.
TYPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "alpaca": {"format": "alpaca", "template": "alpaca"},
        "alpaca:instruct": {"format": "alpaca", "template": "alpaca"},
        "alpaca_instruct": {"format": "alpaca", "template": "alpaca"},
        "alpaca:chat": {"format": "alpaca", "template": "alpaca-chat"},
        "alpaca_chat": {"format": "alpaca", "template": "alpaca-chat"},
        "alpaca:phi": {"format": "alpaca", "template": "alpaca-phi"},
        "gpteacher": {"format": "alpaca", "template": "alpaca", "fields": {"output": "response"}},
        "oasst": {
            "format": "alpaca",
            "template": "alpaca",
            "fields": {"instruction": "INSTRUCTION", "output": "RESPONSE"},
        },
        "chat_template": {"format": "messages"},
        "sharegpt": {"format": "sharegpt"},
        "sharegpt:chat": {"format": "sharegpt"},
        "sharegpt.load_role": {"format": "sharegpt", "fields": {"from": "role"}},
        "sharegpt.load_ultrachat": {"format": "messages"},
        "completion": {"format": "text"},
        "jeopardy": {
            "format": "alpaca",
            "template": JEOPARDY,
            "fields": {"instruction": "question", "input": "category", "output": "answer"},
        },
        "input_output": {"format": "segments"},
    }
)
# What `conversation` of `type: sharegpt` called the chat template (names of FastChat): ours of the same text.
CONVERSATIONS = MappingProxyType(
    {"chatml": "chatml-no-bos", "llama-3": "llama3", "llama3": "llama3", "vicuna_v1.1": "vicuna", "gemma": "gemma"}
)
# Roles of rows that are known here, as Axolotl's `roles` has them: its own to those of a row.
KNOWN_ROLES: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "system": names("system"),
        "user": names("user human"),
        "assistant": names("assistant gpt chatgpt model bot ai"),
        "tool": names("tool function observation tool_response function_response ipython"),
    }
)
TRAIN_KEYS = ("train", "trainable", "trained", "training", "train_on", "loss", "loss_mask")  # of a message
_FILE = re.compile(r"\.(jsonl?|ndjson|csv|tsv|parquet|txt|arrow)(\.gz|\.zst)?$", re.IGNORECASE)
_FORMATS = ("json", "csv", "parquet", "arrow", "text")  # of datasets: `path: json` with data_files
# Of `type: completion`, which ``CompletionPromptTokenizingStrategy`` cuts at 64 x sequence_len tokens.
BEYOND = "Axolotl leaves out what a text has beyond 64 x `sequence_len` tokens: here all of it is trained"
# Tokens of a row of a stream, at least: by these its rows are counted before one is read.
STREAM_TOKENS = MappingProxyType({"text": 128, "other": 32})


def map_data(t: Translator) -> None:
    """Sources, lengths, what is held out, the chat template."""
    for key in ("datasets", "test_datasets", "pretraining_dataset"):
        _open_entries(t, key)
    trained = "pretraining_dataset" if t.has("pretraining_dataset") else "datasets"
    if trained != "datasets" and t.has("datasets"):
        t.contradict("datasets", f"{t.place(trained)} is set too: keep one")
    elif not t.has(trained):
        t.refuse("datasets", "it is missing: write a list of data sets")
    formats = _map_sources(t, trained, "data.train")
    if t.has("test_datasets"):
        formats |= _map_sources(t, "test_datasets", "data.validation")
    for key in ("datasets", "pretraining_dataset", "test_datasets"):
        for place in [place for place in t.values if place.startswith(f"{key}[")]:
            t.no_op(place)
        t.no_op(key)
    task = "cpt" if formats == {"text"} else "mixed" if "text" in formats else "sft"
    if not rl.asked(t):
        t.set_tool_default("task", task, "by the types of the data sets")
    _map_lengths(t, task)
    _map_validation(t)
    entries = _entries_by_template(t)
    map_template(t, entries)
    why = "" if "" in entries else "no data set of conversations uses it"
    t.no_op("tokenizer_use_mistral_common", "" if "" in entries else "tekken.json is read where it is all there is")
    for key in ("chat_template", "chat_template_jinja", "chat_template_kwargs", "eot_tokens"):
        t.no_op(key, why if t.has(key) else "")
    t.no_op("train_on_inputs")
    if t.flag("dataset_exact_deduplication"):
        t.map("dataset_exact_deduplication", "data.deduplicate", True, "by token ids; Axolotl compares whole rows")
    for key in ("sample_packing_sequentially", "curriculum_sampling"):
        t.switch(key, "data.order", "as_given")
    t.no_op("dataset_exact_deduplication")


def _open_entries(t: Translator, key: str) -> None:
    """Makes every key of every entry one of ``t.values``; entries that are no mappings are refused."""
    asked = t.get(key)
    entries = [asked] if isinstance(asked, dict) else asked or []
    if not isinstance(entries, list):
        t.refuse(key, f"got {show(asked)}, allowed: a list of data sets, each with path and type")
        return
    opened: dict[str, Any] = {}
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict):
            t.refuse(key, f"got {show(entry)}, allowed: a data set with path and type")
            continue
        for name, value in entry.items():
            place = f"{key}[{index}].{name}"
            named = name == "roles" and isinstance(value, dict) and value
            opened |= flatten(value, prefix=f"{place}.") if named else {place: value}
    before = list(t.values)[: list(t.values).index(key) + 1] if key in t.values else []
    t.values = {name: t.values[name] for name in before} | opened | t.values


def _map_sources(t: Translator, key: str, native: str) -> set[str]:
    """The list of our sources; returns the formats that they have."""
    count = 1 + max((int(name[len(key) + 1 : name.index("]")]) for name in t.values if name.startswith(f"{key}[")),
                    default=-1)  # fmt: skip
    sources, formats = [], set()
    for index in range(count):
        source = _Entry(t, f"{key}[{index}]", "test" if key == "test_datasets" else "train").translate()
        sources.append(source)
        formats.add(str(source.get("format")))
    if sources:
        t.map(key, native, sources)
    elif t.has(key):
        t.refuse(key, f"got {show(t.get(key))}, allowed: a list of data sets, each with path and type")
    return formats


def _entries_by_template(t: Translator) -> dict[str, list[str]]:
    """Entries (``datasets[0]``) by the chat template that their type stands for; empty for conversations."""
    found: dict[str, list[str]] = {}
    for key in t.values:
        if re.fullmatch(r"(test_)?datasets\[\d+\]\.type", key):
            kind = t.get(key)
            ours = _read_own_type(kind) if isinstance(kind, dict) else TYPES.get(str(kind), {})
            if rl.asked(t):
                ours = rl.read_type(rl.asked(t), kind) or {}
            if ours.get("format") in ("alpaca", "messages", "sharegpt", "preference", "label"):
                found.setdefault(ours.get("template", ""), []).append(key.removesuffix(".type"))
    return found


def _read_own_type(kind: Mapping[str, Any]) -> Mapping[str, Any]:
    """`type: {...}` as one of ``TYPES``; empty where it cannot be read, which its entry says."""
    try:
        template, columns = read_own_prompt(kind)
    except ValueError:
        return {}
    return {"format": "alpaca", "template": template, "fields": columns}


class _Entry:
    """One data set: reads its keys and gives them their outcomes."""

    def __init__(self, t: Translator, place: str, default_split: str) -> None:
        self.t, self.place, self.default_split = t, place, default_split
        self.source: dict[str, Any] = {}

    def key(self, name: str) -> str:
        return f"{self.place}.{name}"

    def get(self, name: str, default: Any = None) -> Any:
        return self.t.get(self.key(name), default)

    def set(self, name: str, **values: Any) -> None:
        """The key sets these keys of the source."""
        self.source |= values
        self.t.map(self.key(name), {}, why=", ".join(f"{key}: {show(value)}" for key, value in values.items()))

    def refuse(self, name: str, why: str) -> None:
        self.t.refuse(self.key(name), why)

    def translate(self) -> dict[str, Any]:
        if "path" not in self.source:
            self._map_path()
        if rl.asked(self.t):
            rl.map_entry(self, rl.asked(self.t))
        else:
            self._map_type()
            self._map_messages()
        for name in ("shards", "shards_idx", "input_transform", "input_format", "field_human", "field_model",
                     "logprobs_field", "skip"):  # fmt: skip
            if self.get(name) not in (None, 0):
                self.refuse(name, "not available: remove it")
        self._map_conversation()
        for place in [place for place in self.t.values if place.startswith(f"{self.place}.")]:
            name = place.removeprefix(f"{self.place}.").split(".")[0]
            if name in keys.ENTRY:
                self.t.no_op(place)
            elif near := nearest_name(name, keys.ENTRY):
                self.t.refuse(place, f"Axolotl has no such key: did you mean `{near}`?")
            else:
                self.t.ignore(place, "Axolotl has no such key and ignores it")
        return self.source

    def _map_path(self) -> None:
        """A hub name, unless it is a file or folder; files of a hub set are its ``data_files``."""
        path, files = self.get("path"), self.get("data_files")
        files = [files] if isinstance(files, str) else files or []
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            self.refuse("data_files", f"got {show(files)}, allowed: the name of a file, or a list of names")
            files = []
        if not isinstance(path, str):
            self.refuse("path", "it is missing: write a hub name, a file or a folder")
            return
        if re.match(r"(s3|gs|gcs|adl|abfs|az|oci|https?)://", path):
            self.refuse("path", f"{show(path)}: copy it to this machine and name the file")
        elif path in _FORMATS and files:
            if len(files) > 1:
                self.refuse("data_files", "write one entry for each file, with the file as its path")
            self.source["path"] = files[0]
            self.t.map(self.key("path"), {}, why=f"the format of {files[0]}")
            self.set("data_files", path=files[0])
        elif _is_local(path, self.t):
            if len(files) > 1:
                self.refuse("data_files", "write one entry for each file, with the file as its path")
            self.set("path", path=f"{path.rstrip('/')}/{files[0]}" if files else path)
            self.t.map(self.key("data_files"), {}, why="a file of the folder `path`")
        else:
            self.set("path", path=f"hub:{path}")
            if files:
                self.set("data_files", files=files)
        for name, ours in (("name", "subset"), ("revision", "revision")):
            if self.get(name) is not None:
                self.set(name, **{ours: str(self.get(name))})
        if self.get("split") is not None:
            self.set("split", split=str(self.get("split")))
        elif self.default_split != "train" and not files and not _FILE.search(self.source.get("path", "")):
            self.source["split"] = self.default_split

    def _map_type(self) -> None:
        kind = self.get("type")
        if self.place.startswith("pretraining_dataset") and kind in (None, "pretrain"):
            kind = "completion"
        if isinstance(kind, dict):
            try:
                read_own_prompt(kind)
            except ValueError as error:
                self.refuse("type", str(error))
                return
            ours = _read_own_type(kind)
            fields = {"fields": dict(ours["fields"])} if ours["fields"] else {}
            self.set("type", format="alpaca", **fields)
            return
        if kind is None:
            self.source["format"] = "tokens"
            self.t.no_op(self.key("type"), "rows with input_ids, attention_mask and labels")
            if self.key("type") not in self.t.values:
                self.refuse("type", "it is missing: write alpaca, chat_template, completion, ...")
            return
        kind = str(kind)
        if kind.startswith("sharegpt") and kind not in TYPES:
            self.refuse("type", "Axolotl itself refuses it: write `type: chat_template`, `field_messages: "
                        "conversations` and `message_property_mappings: {role: from, content: value}`")  # fmt: skip
        elif kind not in TYPES:
            self.refuse("type", f"{show(kind)} is not available: write one of {', '.join(TYPES)}")
        else:
            ours = dict(TYPES[kind])
            column = self.get("field") or self.get("text_column")
            if ours["format"] == "text" and column not in (None, "text"):
                name = "field" if self.get("field") else "text_column"
                self.set(name, fields={"text": column})
            fields = {"fields": dict(ours["fields"])} if "fields" in ours else {}
            self.set("type", format=ours["format"], **fields)
            if kind == "completion" and not self.place.startswith("pretraining_dataset"):
                self.t.map(self.key("type"), {}, why=BEYOND)
            if kind.startswith("sharegpt"):
                why = "read as `type: chat_template`, as Axolotl advises: today it refuses this type"
                self.t.substitute(self.key("type"), {}, why)
                self._map_sharegpt(ours["format"])

    def _map_sharegpt(self, format: str) -> None:
        """The column of turns, by the older name, too; which turns are trained."""
        column = self.get("field_messages") or self.get("field")
        default = "messages" if format == "messages" else "conversations"
        if column not in (None, default):
            name = "field_messages" if self.get("field_messages") else "field"
            self.set(name, fields=self.source.get("fields", {}) | {default: str(column)})
        self._map_trained_turns()

    def _map_conversation(self) -> None:
        """``conversation``: of `type: sharegpt` the chat template; of `alpaca_chat` the style of its prompts."""
        asked, kind = self.get("conversation"), str(self.get("type"))
        if asked is None or not kind.startswith(("sharegpt", "alpaca")):
            self.t.no_op(self.key("conversation"), "only `type: sharegpt` reads it" if asked is not None else "")
        elif kind.startswith("sharegpt") and str(asked) in CONVERSATIONS:
            self.t.map(self.key("conversation"), "model.chat_template", CONVERSATIONS[str(asked)])
        elif not kind.startswith("sharegpt"):
            self.refuse("conversation", "write the style as the type: alpaca, alpaca:chat or alpaca:phi")
        else:
            self.refuse("conversation", f"{show(asked)} is not built in: name a `chat_template`")

    def _map_messages(self) -> None:
        """Columns and keys of messages; which turns are trained; a chat template of the entry's own."""
        if self.get("type") != "chat_template":
            return
        turns = self.get("field_messages")
        names = self._property_names()
        column = str(turns or "messages")
        fields: dict[str, str] = {}
        if (names.get("role", "role"), names.get("content", "content")) == ("from", "value"):
            self.source["format"] = "sharegpt"
            fields = {"conversations": column} if column != "conversations" else {}
        else:
            fields = {"messages": column} if column != "messages" else {}
            fields |= {ours: names[ours] for ours in ("role", "content") if names.get(ours, ours) != ours}
        if self.get("field_tools") not in (None, "tools"):
            fields["tools"] = str(self.get("field_tools"))
        thinking = self.get("field_thinking")
        if thinking not in (None, "reasoning_content"):
            key = str(self.get("template_thinking_key", "reasoning_content"))
            if key != thinking:
                self.refuse(
                    "field_thinking", f"{show(thinking)}: name the thought of a message {key}, as the template does"
                )
        for name in ("field_messages", "message_field_role", "message_field_content", "field_tools"):
            self.t.map(self.key(name), {}, why=f"format: {self.source['format']}")
        if fields:
            self.source["fields"] = fields
        self._map_trained_turns()

    def _property_names(self) -> dict[str, str]:
        """message_property_mappings, or the older message_field_role and message_field_content."""
        asked = self.get("message_property_mappings") or {}
        names = {str(ours): str(theirs) for ours, theirs in asked.items()} if isinstance(asked, dict) else {}
        more = [name for name in names if name not in ("role", "content")]
        if more:
            self.refuse("message_property_mappings", f"{show(more[0])}: only role and content may have other names")
        else:
            self.t.map(self.key("message_property_mappings"), {}, why="names of role and content")
        for name, key in (("role", "message_field_role"), ("content", "message_field_content")):
            if self.get(key) is not None:
                names.setdefault(name, str(self.get(key)))
        return names

    def _map_trained_turns(self) -> None:
        renamed, roles = self._map_roles(), self.get("roles_to_train")
        named = [str(role) for role in (roles if isinstance(roles, list) else [roles] if roles else [])]
        if any(renamed.get(role, role) not in KNOWN_ROLES["assistant"] for role in named):
            self.refuse("roles_to_train", f"{show(roles)}: only assistant turns are trained, or all tokens with "
                        "`train_on_inputs: true`")  # fmt: skip
        elif roles == []:
            self.refuse("roles_to_train", "no turn would be trained: remove it")
        for name in ("train_on_eos", "train_on_eot"):
            if self.get(name) not in (None, "turn"):
                self.refuse(name, f"{show(self.get(name))}: the end of each trained turn is trained: write turn")
        trained = self.get("message_field_training")
        if trained in TRAIN_KEYS:
            self.t.no_op(self.key("message_field_training"), "a key of a message that is read")
        elif trained is not None:
            self.refuse(
                "message_field_training", f"{show(trained)}: write one of {', '.join(TRAIN_KEYS)} into the rows"
            )
        if self.get("message_field_training_detail") is not None:
            self.refuse("message_field_training_detail", "parts of a turn are not trained apart: remove it")
        if self.get("drop_system_message"):
            self.set("drop_system_message", drop_system=True)
        if self.get("split_thinking"):
            self.refuse("split_thinking", "thoughts inside of the content are not taken out: write them as "
                        "reasoning_content")  # fmt: skip

    def _map_roles(self) -> dict[str, str]:
        """``roles``: names in rows by role. Records known ones as no-op; returns the source's own."""
        places = [place for place in self.t.values if place.startswith(f"{self.key('roles')}.")]
        renamed: dict[str, str] = {}
        for place in places:
            role, names = place.removeprefix(f"{self.key('roles')}."), self.t.get(place)
            names = names if isinstance(names, list) else [names]
            own = {name: role for name in names if str(name).casefold() not in KNOWN_ROLES.get(role, ())}
            both = next((name for name in own if renamed.get(name, role) != role), None)
            if role not in KNOWN_ROLES:
                self.t.refuse(place, f"templates have no role {show(role)}: write one of {', '.join(KNOWN_ROLES)}")
            elif not all(isinstance(name, str) for name in names):
                self.t.refuse(place, f"got {show(self.t.get(place))}, allowed: a list of the names that rows have")
            elif both is not None:
                self.t.contradict(place, f"{show(both)} is a name of {renamed[both]} too: remove one")
            elif own:
                renamed |= own
                self.t.map(place, {}, why=f"roles: {show(own)}")
            else:
                self.t.no_op(place, "these names are known")
        if renamed:
            self.source["roles"] = renamed
        if not places and self.get("roles"):
            self.refuse("roles", f"got {show(self.get('roles'))}, allowed: a mapping of role to a list of names")
        return renamed


def limit_stream(t: Translator) -> None:
    """``streaming`` and ``pretraining_dataset``: as many rows as ``max_steps`` can take, fetched before training."""
    key = "pretraining_dataset" if t.has("pretraining_dataset") else "streaming"
    if key == "streaming" and not t.flag("streaming"):
        t.no_op("streaming")
        return
    steps, length = t.integer("max_steps"), t.integer("sequence_len", 512) or 512
    batch, data = t.mapping.get("batch", {}), t.mapping.get("data", {})
    if not steps:
        t.refuse(key, "a stream has no end: write `max_steps`, as Axolotl wants it")
    for source in data.get("train", []) if steps else ():
        a_row = STREAM_TOKENS["text" if source.get("format") == "text" else "other"]
        num_rows = steps * (batch.get("samples") or -(-batch.get("packs", 1) * length // a_row))
        split = source.get("split", "train")
        if str(source.get("path", "")).startswith("hub:") and "[" not in split:
            source["split"] = f"{split}[:{num_rows}]"
        told = f"the first {num_rows:,} rows of the stream"
        if not batch.get("samples"):
            told += f", one for every {a_row} tokens that {steps:,} steps take"
        t.substitute(key, {}, f"{told}: they are fetched before training, shuffled as a whole, and repeated if they "
                     "end first; texts are cut without an overlap")  # fmt: skip
    t.no_op("streaming")


def _is_local(path: str, t: Translator) -> bool:
    """Whether a path is a file or folder rather than a hub name: by its look, or because it is there."""
    if path.startswith((".", "/", "~")) or _FILE.search(path) or path.count("/") > 1:
        return True
    try:
        return (t.context.folder / path).exists()
    except OSError:
        return False


def _map_lengths(t: Translator, task: str) -> None:
    t.map_or_default("sequence_len", "data.max_length", t.integer("sequence_len", 512))
    length = t.integer("sequence_len")
    t.only("eval_sequence_len", (length,), "training and evaluation have one length: remove it")
    ways = {"drop": "drop", "truncate": "truncate", "raise": "error"}
    asked = t.get("excess_length_strategy")
    if task == "cpt":
        t.set_tool_default("data.too_long", "split", "Axolotl cuts text into samples of `sequence_len`")
        t.no_op("excess_length_strategy", "text is cut into samples")
    elif asked is not None and str(asked).lower() not in ways:
        t.refuse("excess_length_strategy", f"got {show(asked)}, allowed: drop, truncate or raise")
    elif asked is not None:
        t.map("excess_length_strategy", "data.too_long", ways[str(asked).lower()])
    elif t.has("processor_type"):
        t.set_tool_default("data.too_long", "error", "Axolotl neither cuts nor drops samples where there are images")
    else:
        t.set_tool_default("data.too_long", "drop", "Axolotl's default")
    if task == "mixed":
        for source in (*t.mapping["data"].get("train", ()), *t.mapping["data"].get("validation", ())):
            source |= {"too_long": "split"} if source.get("format") == "text" else {}
    t.map("min_sample_len", "data.min_length", t.integer("min_sample_len") or None)
    t.no_op("min_sample_len")


def _map_validation(t: Translator) -> None:
    if t.has("test_datasets"):
        if t.number("val_set_size"):
            t.contradict("val_set_size", f"{t.place('test_datasets')} is set too: keep one")
        t.no_op("val_set_size", "`test_datasets` is set")
        return
    if not map_held_out(t, "val_set_size", least_rows=2):
        t.map_or_default("val_set_size", "data.validation_fraction", 0.0)
