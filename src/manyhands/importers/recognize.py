"""Which tool a run file was written for, and its translation.

An importer is a module beside this one with

- ``TOOL``: its name for messages; ``KEYS``: every key that the tool knows, dotted; ``OPEN``: keys whose mappings have
  names of the user's own;
- ``MARKS``: keys of which one at least is in every file of the tool and in no native file;
- ``REFUSES_UNKNOWN``: whether the tool itself refuses keys that it does not know;
- ``expand(source, context)``, where a file may include another one: the file with the other one's keys;
- ``translate(t)``: gives every key of ``t.values`` an outcome (``Translator``).

A new importer is one module, named here. ``FILES`` are run files, ``SETTINGS`` files that only say how to distribute
one (``--accelerate-config``, ``--deepspeed``).
"""

from collections.abc import Iterable, Mapping
from importlib import import_module
from typing import Any, Protocol, cast

from manyhands.config.keys import table
from manyhands.config.read import ParsedFile
from manyhands.config.text import show
from manyhands.core.errors import UserError
from manyhands.importers import deepspeed, preferences
from manyhands.importers.transformers import keep_offloaded_states_in_32_bits
from manyhands.importers.translation import ImportContext, Translation, Translator, flatten

FILES = ("axolotl.run", "trl", "llamafactory.run", "sft_play", "synth_ai", "theworld")
SETTINGS = ("accelerate", "deepspeed")
V1 = frozenset({"model_class", "dist_config", "quant_config", "peft_config", "batching_strategy", "sample_backend"})
# Tools whose keys are explained in a native file, by the keys with which the others are read.
ASKED: Mapping[str, Mapping[str, Any]] = {
    "axolotl.run": {"adapter": "lora"},
    "llamafactory.run": {"stage": "sft", "do_train": True},
    "trl": {"use_peft": True},
}


class Importer(Protocol):
    """What a module of an importer has."""

    TOOL: str
    KEYS: frozenset[str]
    MARKS: frozenset[str]
    OPEN: frozenset[str]
    REFUSES_UNKNOWN: bool

    def translate(self, t: Translator) -> None: ...


def load_importer(name: str) -> Importer:
    return cast(Importer, import_module(f"manyhands.importers.{name}"))


def recognize(mapping: Mapping[str, Any]) -> Importer | None:
    """The tool that most keys are of; None for a native file. UserError for LLaMA-Factory's rewrite (``USE_V1=1``)."""
    if "train_dataset" in mapping and mapping.keys() & V1:
        raise UserError(
            "this is a file of LLaMA-Factory v1, which is not read",
            why="the rewrite of LLaMA-Factory is experimental",
            fix="write the run as a file of `llamafactory-cli train`, or as one of ours: `manyhands init`",
        )
    ours = flatten(mapping, frozenset(k for k, v in table().items() if v.takes_mapping))
    best, most = None, len(ours.keys() & table().keys())
    for name in FILES:
        importer = load_importer(name)
        keys = flatten(mapping, importer.OPEN).keys()
        count = len(keys & importer.KEYS)
        if count > most and {*mapping, *keys} & importer.MARKS:
            best, most = importer, count
    return best


def refuse_settings(source: ParsedFile) -> None:
    """Raises ``UserError`` for a file of ``SETTINGS`` in place of a run file."""
    for name, option in (("accelerate", "--accelerate-config"), ("deepspeed", "--deepspeed")):
        importer = load_importer(name)
        if source.mapping and all(key in importer.KEYS for key in flatten(source.mapping, importer.OPEN)):
            raise UserError(
                f"this is a file of {importer.TOOL}",
                where=source.where,
                why="it says how a run is distributed, and not what is trained",
                fix=f"give it beside a run file: manyhands train RUN.yaml {option} {source.where}",
            )


def translate(source: ParsedFile, importer: Importer, context: ImportContext) -> Translation:
    """The file as a native mapping, with an outcome for every key. Raises ``UserError`` for a file of two tools."""
    expand = getattr(importer, "expand", None)
    source = source if expand is None else expand(source, context)
    t = Translator(source, context, tool=importer.TOOL, known=importer.KEYS, open=importer.OPEN)
    _refuse_mixed(t, importer)
    importer.translate(t)
    replace_conflicting(t)
    elsewhere = frozenset().union(*(load_importer(name).KEYS for name in FILES))
    return t.finish(refuse_unknown=importer.REFUSES_UNKNOWN, elsewhere=elsewhere)


def translate_settings(
    source: ParsedFile, name: str, context: ImportContext, run: Mapping[str, Any] | None = None
) -> Translation:
    """A file of ``SETTINGS``. ``run``: the native mapping that names it. UserError if it is another tool's."""
    importer = load_importer(name)
    t = Translator(source, context, tool=importer.TOOL, known=importer.KEYS, open=importer.OPEN)
    if not source.mapping.keys() & {key.partition(".")[0] for key in importer.KEYS}:
        raise UserError(f"this is no {importer.TOOL} file: it has none of its keys", where=source.where)
    _refuse_mixed(t, importer)
    importer.translate(t)
    replace_conflicting(t, run)
    return t.finish(refuse_unknown=importer.REFUSES_UNKNOWN)


def replace_conflicting(t: Translator, run: Mapping[str, Any] | None = None) -> None:
    """Replace values that conflict with others of the file, or with the native keys of the ``run`` it distributes."""
    keep_offloaded_states_in_32_bits(t, run or {})
    deepspeed.fall_back_to_fsdp(t, run or {})


def describe_key(path: str, value: Any) -> str | None:
    """What becomes of a key with a value (None: switched on) by a tool in ``ASKED``; None if no tool knows it."""
    for name, least in ASKED.items():
        importer = load_importer(name)
        key = next((one for one in (path, path.rsplit(".", 1)[-1]) if one in importer.KEYS), None)
        if key is None:
            continue
        *sections, leaf = key.split(".")
        inner = mapping = dict(least)
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[leaf] = True if value is None else value
        done = translate(ParsedFile(mapping, ""), importer, ImportContext(gpus=1))
        outcome = next((outcome for outcome in done.outcomes if outcome.key == key), None)
        if outcome is None or outcome.kind == "not_set" or (value is None and outcome.why.startswith("got ")):
            continue
        native = ", ".join(f"`{ours}: {show(given)}`" for ours, given in outcome.native.items())
        here = f"here it is {native}" if native else outcome.why or "it has no effect here: remove it"
        return f"a key of {importer.TOOL}: {here}"
    return None


# Native keys of which a run has one: an override of one replaces what a translation has set of the others.
EXCLUSIVE = (
    ("batch.samples", "batch.packs", "batch.loss_tokens"),
    ("evaluate.every_steps", "evaluate.per_epoch"),
    ("checkpoint.every_steps", "checkpoint.per_epoch", "checkpoint.keep_last"),
    ("schedule.warmup_steps", "schedule.warmup_ratio"),
)


def drop_replaced(mapping: dict[str, Any], overrides: Iterable[str]) -> None:
    """Removes what a translation has set and overrides of other keys replace."""
    given = {override.partition("=")[0].removeprefix("--") for override in overrides}
    for key in {key for group in EXCLUSIVE if given & set(group) for key in group} - given:
        section, _, leaf = key.partition(".")
        mapping.get(section, {}).pop(leaf, None)


def exclusive_with(key: str) -> frozenset[str]:
    """The native keys of which a run has one, ``key`` among them."""
    return frozenset({key}.union(*(group for group in EXCLUSIVE if key in group)))


def _refuse_mixed(t: Translator, importer: Importer) -> None:
    """Keys that this tool does not know and that mark files of another one, are our own, or of no kind of run here."""
    for key in t.values:
        if key in importer.KEYS:
            continue
        if key.rpartition(".")[2] in preferences.KEYS:
            t.refuse(key, preferences.NOT_HERE)
            continue
        others = [other.TOOL for other in map(load_importer, FILES) if other is not importer and key in other.MARKS]
        if "." in key and key in table():
            others.append("manyhands")
        if others:
            t.refuse(key, f"a key of {others[0]}, in a file that is read as {t.tool}'s: keep to one tool's keys")
