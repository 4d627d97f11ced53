"""What becomes of each key of another tool's file: a list of outcomes, and the run file that they add up to.

An importer (one module beside this one) names its tool and the keys that the tool knows, and translates with a
``Translator``. Every key of a file ends with one outcome; a key without one is unknown to the tool and reported or
refused here. Pure: whatever a translation may ask of the world comes in as ``ImportContext``. Knows no torch.
"""

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from manyhands.config.read import ParsedFile
from manyhands.config.text import nearest_name, show
from manyhands.core.errors import UserError
from manyhands.importers.names import find_key

Kind = Literal["mapped", "no_op", "not_set", "ignored", "substituted", "refused", "contradicts"]
KINDS: tuple[Kind, ...] = get_args(Kind)
STOPS = ("refused", "contradicts")  # with one of these there is no run
UNKNOWN_GPUS = (
    "the file counts batches per GPU and names no number of GPUs, and none is known here: add parallel.gpus=N"
)


@dataclass(frozen=True)
class ImportContext:
    """What a translation may ask beside the file itself; None where nobody can say.

    ``gpus``: asked for on the command line. ``first_gpus``: what the run's first start multiplied by.
    ``count_gpus``: those of this machine.
    ``first_row``: of a data file or data set. ``model_config``: config.json of a model, here or on the hub.
    ``other_gpus``: what this machine's GPUs are, where they are none of the kind that is named.
    ``hub_file``: a file of a data set on the hub, fetched; it raises UserError where the hub has none.
    ``strict``: refuse substitutions. ``micro``, ``accumulation``: samples per GPU and micro-batches per step of the run
    file that a settings file belongs to. ``deepspeed``: whether the package is installed.
    ``variables``: of the environment, by which trackers name their projects.
    """

    folder: Path = Path()
    gpus: int | None = None
    first_gpus: int | None = None
    count_gpus: Callable[[], int] | None = None
    first_row: Callable[[str], Mapping[str, Any] | None] | None = None
    model_config: Callable[[str], Mapping[str, Any] | None] | None = None
    hub_file: Callable[[str, str], Path | None] | None = None
    other_gpus: Callable[[str], str | None] | None = None
    strict: bool = False
    micro: int | None = None
    accumulation: int | None = None
    deepspeed: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)

    def columns(self, path: str) -> tuple[str, ...] | None:
        """Names of the columns of a data file or data set."""
        row = self.first_row(path) if self.first_row else None
        return None if row is None else tuple(row)


@dataclass(frozen=True)
class KeyOutcome:
    """What becomes of one key (dotted, as in the file), and why. ``native``: the keys of ours that it sets."""

    key: str
    kind: Kind
    why: str = ""
    native: Mapping[str, Any] = field(default_factory=dict)
    line: int | None = None
    value: Any = None
    file: str | None = None

    @property
    def place(self) -> str:
        """``line 12, `sequence_len```: where the user finds it; with its file if that is another one."""
        return (f"{self.file}, " if self.file else "") + (f"line {self.line}, " if self.line else "") + f"`{self.key}`"


@dataclass(frozen=True)
class Translation:
    """A foreign file as a native mapping. ``origins``: of each native key, the place in the foreign file.

    ``gpus``: the number of GPUs that per-GPU numbers were multiplied by, None if there were none to multiply.
    ``tool_defaults``: native keys that hold a default of the tool, with the reason. ``micro``, ``accumulation``:
    samples per GPU and micro-batches per step, where the file has them as numbers. ``replaces``: native keys of the run
    file that the values of a settings file replace.
    """

    tool: str
    where: str
    mapping: dict[str, Any]
    outcomes: tuple[KeyOutcome, ...]
    origins: Mapping[str, str]
    tool_defaults: Mapping[str, str]
    gpus: int | None = None
    micro: int | None = None
    accumulation: int | None = None
    replaces: frozenset[str] = frozenset()

    def findings(self) -> list[str]:
        """What keeps the file from being run, each with its place."""
        return [f"{outcome.place}: {outcome.why}" for outcome in self.outcomes if outcome.kind in STOPS]

    def refuse(self, imported: bool = True) -> None:
        """UserError with all refusals and contradictions. ``imported``: for `manyhands import`."""
        found = self.findings()
        if not found:
            return
        details = found[:20] + ([f"and {len(found) - 20} more"] if len(found) > 20 else [])
        count = "1 reason" if len(found) == 1 else f"{len(found)} reasons"
        raise UserError(
            f"this {self.tool} file cannot be run as it is, for {count}",
            where=self.where,
            details=details,
            fix="change these keys" + "; `manyhands import FILE` lists what becomes of every key" * imported,
        )


class Translator:
    """Collects the outcomes of one file's keys. Values are read by dotted key (``lora.r``); lists count as values.

    ``known``: every key that the tool knows, for the nearest name of one that it does not. ``open``: keys whose
    mappings have names of the user's own (their inner keys need no outcome of their own).
    """

    def __init__(
        self,
        source: ParsedFile,
        context: ImportContext,
        *,
        tool: str,
        known: Collection[str],
        open: Collection[str] = (),
    ) -> None:
        self.source, self.context, self.tool = source, context, tool
        self.known, self.open = frozenset(known), frozenset(open)
        self.values = flatten(source.mapping, self.open)
        self.mapping: dict[str, Any] = {}
        self.origins: dict[str, str] = {}
        self.tool_defaults: dict[str, str] = {}
        self._outcomes: dict[str, KeyOutcome] = {}
        self._set_by: dict[str, str] = {}
        self.gpus: int | None = None  # used or named so far
        self.micro: int | None = None
        self.accumulation: int | None = None
        self.aliases: Mapping[str, str] = {}
        self.replaces: set[str] = set()

    # reading

    def _own(self, key: str) -> str:
        """The tool's own key for a name that ``aliases`` has: keys of transformers that it calls otherwise."""
        return self.aliases.get(key, key)

    def has(self, key: str) -> bool:
        """Whether the file sets the key to anything but null or an empty text."""
        return self.values.get(self._own(key)) not in (None, "")

    def is_null(self, key: str) -> bool:
        """Whether the file sets the key to null, which some tools tell from a key that is not there."""
        return self.values.get(self._own(key), "") is None

    def get(self, key: str, default: Any = None) -> Any:
        """The key's value as it is written, ``default`` if it is not set."""
        return self.values[self._own(key)] if self.has(key) else default

    def number(self, key: str, default: float | None = None) -> float | None:
        """A number, also one that is written as text (``2e-5`` is text in YAML 1.1); refused if it is none."""
        value = self.get(key)
        if value is None:
            return default
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            self.refuse(key, f"got {show(value)}, allowed: a number")
            return default
        return int(number) if number.is_integer() and not isinstance(value, float) else number

    def integer(self, key: str, default: int | None = None) -> int | None:
        """A whole number, also as text; refused if it is none."""
        number = self.number(key)
        if number is None:
            return default
        if int(number) != number:
            self.refuse(key, f"got {show(self.get(key))}, allowed: a whole number")
            return default
        return int(number)

    def count(self, key: str, default: int) -> int:
        """A whole number above 0; refused, and ``default``, if it is another."""
        number = self.integer(key, default)
        if number is None or number < 1:
            self.refuse(key, f"got {show(number)}, allowed: a whole number above 0")
            return default
        return number

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false, also as text; refused if it is neither."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "false"):
            return str(value).lower() == "true"
        self.refuse(key, f"got {show(value)}, allowed: true or false")
        return default

    def place(self, key: str) -> str:
        key = self._own(key)
        return KeyOutcome(key, "mapped", line=self.source.lines.get(key), file=self.source.files.get(key)).place

    # outcomes

    def map(self, key: str, native: str | Mapping[str, Any], value: Any = ..., why: str = "") -> None:
        """The key sets ``native``: one key, to ``value`` (its own if not given), or several with their values."""
        if not self.has(key) or value is None:  # None: it could not be read, which is an outcome already
            return
        values = {native: self.get(key) if value is ... else value} if isinstance(native, str) else dict(native)
        self._note(key, "mapped", why, values)
        for name, one in values.items():
            self._set(name, one, key)

    def switch(self, key: str, native: str | Mapping[str, Any], value: Any = True) -> None:
        """The key sets ``native`` where it is on, and nothing where it is off."""
        if self.flag(key):
            self.map(key, native, value)
        self.no_op(key)

    def map_or_default(self, key: str, native: str, value: Any) -> None:
        """``native`` is ``value`` in any case: what the key says, or else the tool's default."""
        self.map(key, native, value)
        self.set_tool_default(native, value, f"{self.tool}'s default")

    def no_op(self, keys: str | Iterable[str], why: str = "") -> None:
        """True here whatever is written, or without effect on training."""
        for key in (keys,) if isinstance(keys, str) else keys:
            self._note(key, "no_op", why)

    def ignore(self, key: str, why: str) -> None:
        """Not acted upon, with a note: trackers, uploads, names that the tool itself ignores."""
        self._note(key, "ignored", why)

    def substitute(self, key: str, native: Mapping[str, Any], why: str) -> None:
        """Something else is done, with a note; refused if the caller is strict."""
        if self.context.strict:
            self.refuse(key, f"{why}: refused under --strict")
            return
        self._note(key, "substituted", why, native)
        for name, one in native.items():
            self._set(name, one, key)

    def replace(self, native: str, instead: Mapping[str, Any], why: str) -> None:
        """What has set ``native`` cannot be had with the rest of the file: ``substitute`` for it."""
        for key, outcome in list(self._outcomes.items()):
            if native not in outcome.native:
                continue
            if self.context.strict:
                self._outcomes[key] = replace(outcome, kind="refused", why=f"{why}: refused under --strict")
                continue
            kept = {name: value for name, value in outcome.native.items() if name != native}
            self._outcomes[key] = replace(outcome, kind="substituted", why=why, native=kept | dict(instead))
            for name, value in instead.items():
                self._set_by[name], self.origins[name] = key, outcome.place
                self._write(name, value)

    def refuse(self, key: str, why: str) -> None:
        """The key asks for what cannot be done; ``why`` also says what to write."""
        self._note(key, "refused", why)

    def contradict(self, key: str, why: str) -> None:
        """The key disagrees with another one, or with itself; ``why`` has the sum."""
        self._note(key, "contradicts", why)

    def only(self, key: str, allowed: Sequence[Any], why: str) -> None:
        """``no_op`` for one of these values (or none), refused with ``why`` for any other."""
        value = self.get(key)
        if not self.has(key) or value in allowed:
            self.no_op(key)
        else:
            self.refuse(key, f"`{value}`: {why}" if not isinstance(value, bool) else why)

    def set_tool_default(self, native: str, value: Any, why: str) -> None:
        """A default of the tool that is not ours: set unless the file has set the key."""
        if native not in self._set_by:
            self._write(native, value)
            self.tool_defaults[native] = why

    def first_row(self) -> Mapping[str, Any] | None:
        """The first row of the first training source, None if nobody can say."""
        sources = self.mapping.get("data", {}).get("train")
        first = sources[0] if isinstance(sources, list) and sources else sources
        path = first.get("path") if isinstance(first, Mapping) else first
        return self.context.first_row(path) if self.context.first_row and isinstance(path, str) else None

    def num_gpus(self) -> int | None:
        """GPUs to multiply by: the first start's, the file's, those asked for, or this machine's. None if unknown."""
        if self.gpus is None:
            self.gpus = self.context.first_gpus or self.context.gpus
        if self.gpus is None and self.context.count_gpus is not None:
            self.gpus = max(1, self.context.count_gpus())
        return self.gpus

    def set_gpus(self, count: int) -> None:
        """The number of GPUs that the file itself names: it decides the batch, not on how many GPUs this start runs."""
        self.gpus = self.context.first_gpus or count

    def merge(self, other: Translation, key: str) -> None:
        """Adds the result of another file that ``key`` names (a DeepSpeed JSON); outcomes keep its path."""
        file = other.where if other.where != self.source.where else None
        for outcome in other.outcomes:
            name = f"{key} > {outcome.key}"
            self._outcomes[name] = replace(outcome, key=name, file=outcome.file or file)
            for native, value in outcome.native.items():
                self._set(native, value, key)
        for name, why in other.tool_defaults.items():
            self.set_tool_default(name, look_up(other.mapping, name), why)

    def finish(self, *, refuse_unknown: bool = False, elsewhere: Collection[str] = ()) -> Translation:
        """The translation, once every key was looked at. A key without an outcome is one that the tool does not know:
        refused where it means what a key of the tool does, or is close to one and no key of ``elsewhere`` (other tools'
        keys, which are not misspelt), or where the tool itself refuses unknown keys; else reported.
        """
        refused = any(one.kind in STOPS for one in self._outcomes.values())  # what depends on it was not looked at
        for key in self.values:
            if key in self._outcomes:
                continue
            if key in self.known:
                if self.has(key) and not refused:
                    raise AssertionError(f"{self.tool}: `{key}` has no outcome")
                self._note(key, "not_set", "")
                continue
            ours = find_key(key)  # of what other tools call `lora_rank` it may be `lora_r`
            near = next((name for name in sorted(self.known) if ours and find_key(name) == ours), None)
            if near is None and key not in elsewhere:
                near = _nearest_key(key, self.known)
            if near:
                self.refuse(key, f"{self.tool} has no such key: did you mean `{near}`?")
            elif refuse_unknown:
                self.refuse(key, f"{self.tool} has no such key and refuses it: remove it")
            else:
                self.ignore(key, f"{self.tool} has no such key and ignores it")
        _number_names(self.mapping.get("data", {}))
        order = {key: index for index, key in enumerate(self.values)}
        outcomes = sorted(self._outcomes.values(), key=lambda one: order.get(one.key.split(" > ")[0], len(order)))
        return Translation(
            self.tool,
            self.source.where,
            self.mapping,
            tuple(outcomes),
            self.origins,
            self.tool_defaults,
            self.gpus,
            self.micro,
            self.accumulation,
            frozenset(self.replaces),
        )

    def _note(self, key: str, kind: Kind, why: str, native: Mapping[str, Any] | None = None) -> None:
        key = self._own(key)
        before = self._outcomes.get(key)
        if before is not None and before.kind in STOPS:  # the first reason against it stays
            return
        if before is not None and kind not in STOPS:  # one key may set several of ours in turn
            native = {**before.native, **(native or {})}
            why = "; ".join(dict.fromkeys(part for part in (before.why, why) if part))
            kind = max(before.kind, kind, key=("no_op", "not_set", "ignored", "mapped", "substituted").index)
        if key in self.values:
            line, file = self.source.lines.get(key), self.source.files.get(key)
            self._outcomes[key] = KeyOutcome(key, kind, why, native or {}, line, self.values[key], file)
        elif kind in STOPS:  # a key that is missing
            self._outcomes[key] = KeyOutcome(key, kind, why, native or {})

    def _set(self, native: str, value: Any, key: str) -> None:
        first = self._set_by.get(native)
        if first is not None and first != key and look_up(self.mapping, native) != value:
            ours = show(look_up(self.mapping, native))
            self.contradict(key, f"asks for `{native}: {show(value)}`, but {self.place(first)} for {ours}: remove one")
            return
        self.tool_defaults.pop(native, None)
        self._set_by[native] = key
        self.origins[native] = self.place(key)
        self._write(native, value)

    def _write(self, native: str, value: Any) -> None:
        *sections, leaf = native.split(".")
        target = self.mapping
        for section in sections:
            target = target.setdefault(section, {})
        target[leaf] = value


def _number_names(data: Mapping[str, Any]) -> None:
    """Numbers sources of one name, as other tools allow, from the second on: each has statistics of its own."""
    seen: set[str] = set()
    for key in ("train", "validation"):
        sources = data.get(key)
        for source in sources if isinstance(sources, list) else ():
            name = source.get("name") if isinstance(source, dict) else None
            if isinstance(name, str):
                source["name"] = next(
                    one for one in (name, *(f"{name}-{n}" for n in range(2, len(seen) + 3))) if one not in seen
                )
                seen.add(source["name"])


def _nearest_key(key: str, known: Collection[str]) -> str | None:
    """The known key that is meant: sooner one with the same first word (``lora_rank``: lora_r, not local_rank)."""
    first = key.partition("_")[0]
    alike = sorted(name for name in known if name.partition("_")[0] == first)
    return nearest_name(key, alike) or nearest_name(key, sorted(known))


def clean_name(text: str) -> str:
    """A run's name from a file's stem or another tool's name."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:100] or "run"


def split_output(folder: Any) -> dict[str, str]:
    """Ours for the folder of one run: its last part is the run's name."""
    above, _, name = str(folder).rstrip("/").rpartition("/")
    return {"output.dir": above or ".", "name": clean_name(name)}


def flatten(mapping: Mapping[str, Any], open: Collection[str] = (), prefix: str = "") -> dict[str, Any]:
    """Dotted key to value; a mapping below a key of ``open``, and an empty one, is a value."""
    flat: dict[str, Any] = {}
    for name, value in mapping.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in open:
            flat |= flatten(value, open, f"{key}.")
        else:
            flat[key] = value
    return flat


def check_product(t: Translator, total_key: str, parts: Iterable[tuple[str, int]]) -> None:
    """Refuses ``total_key`` where it is not the product of these (name, number) parts: ``1 x 8 x 16 = 128, not 64``."""
    total, parts = t.integer(total_key), list(parts)
    product = math.prod(number for _, number in parts)
    if total is not None and total != product:
        sum_ = " × ".join(str(number) for _, number in parts)
        names = " × ".join(name for name, _ in parts)
        t.contradict(total_key, f"{names} is {sum_} = {product}, not {total}: correct one of them")


def look_up(mapping: Mapping[str, Any], native: str) -> Any:
    """The value of a dotted key, None without one."""
    value: Any = mapping
    for part in native.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value
