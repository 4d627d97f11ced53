"""Short options for keys of a run file, and runs without a file: `manyhands train --model NAME --data FILE`."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.core.errors import UserError
from manyhands.core.text import report_aside

if TYPE_CHECKING:
    from manyhands.config.read import ParsedFile
    from manyhands.importers.load import LoadedRun

WHERE = "command line"
# By parameter: names on the command line, type, key of the run file, help.
SHORT: dict[str, tuple[tuple[str, ...], type, str, str]] = {
    "model": (("--model", "-m"), str, "model.name", "Model: hub name or folder"),
    "data": (("--data",), str, "data.train", "Training data: file, folder or hub:OWNER/NAME"),
    "method": (("--method",), str, "method.name", "lora, qlora or full"),
    "rank": (("--rank",), int, "method.rank", "Rank of the adapters"),
    "epochs": (("--epochs",), float, "stop.epochs", "Passes over the data"),
    "learning_rate": (("--lr",), str, "optimizer.learning_rate", "Learning rate"),
    "batch_size": (("--batch-size",), str, "batch.samples", "Samples a step, over all GPUs"),
    "max_length": (("--max-length",), int, "data.max_length", "Maximum length of a sample in tokens"),
    "output": (("--output", "-o"), str, "output.dir", "The run's folder, such as runs/NAME"),
}
# Further options that are short for a key; run_file.py has them.
NUMBERS = {"parallel.gpus": "--gpus", "data.max_samples": "--examples", "parallel.nodes": "--nodes"}
# What other tools call these options.
OTHER_NAMES = {
    **dict.fromkeys(("model-name-or-path", "model-name", "base-model"), "model"),
    **dict.fromkeys(("dataset", "dataset-name", "dataset-path", "train-file", "data-path"), "data"),
    **dict.fromkeys(("num-train-epochs", "num-epochs"), "epochs"),
    **dict.fromkeys(("learning-rate",), "lr"),
    **dict.fromkeys(("lora-r", "lora-rank"), "rank"),
    **dict.fromkeys(("max-seq-length", "max-seq-len", "cutoff-len", "sequence-len"), "max-length"),
    **dict.fromkeys(("output-dir", "out"), "output"),
}


def rename_option(word: str) -> str:
    """``model_name_or_path`` to ``model``: click's ``token_normalize_func``."""
    dashed = word.replace("_", "-")
    return OTHER_NAMES.get(dashed, word)


def takes_short_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give ``command`` the options of ``SHORT``; it takes those that are given as ``short``, by key of a run file."""
    signature = inspect.signature(command, eval_str=True)

    @functools.wraps(command)
    def call(*positional: Any, **values: Any) -> Any:
        short = {key: values.pop(name) for name, (_, _, key, _) in SHORT.items()}
        return command(*positional, **values, short={key: value for key, value in short.items() if value is not None})

    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            default=None,
            annotation=Annotated[kind | None, typer.Option(*names, help=f"{text}: {key}.")],
        )
        for name, (names, kind, key, text) in SHORT.items()
    ]
    own = [parameter for name, parameter in signature.parameters.items() if name != "short"]
    call.__signature__ = signature.replace(parameters=own[:2] + options + own[2:])  # type: ignore[attr-defined]
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in own + options}
    return call


def as_overrides(short: Mapping[str, Any], overrides: Sequence[str]) -> list[str]:
    """The options as overrides, ``overrides`` behind them. UserError where a key is given both ways."""
    given = {override.partition("=")[0].removeprefix("--") for override in overrides}
    for key in short:
        if key in given or (key == "output.dir" and "name" in given):
            option = NUMBERS.get(key) or next(names[0] for names, _, path, _ in SHORT.values() if path == key)
            raise UserError(f"{option} and {key} are both given", where=WHERE, fix="remove one")
    result = []
    for key, value in short.items():
        if key == "output.dir":
            folder = Path(value)
            result += [f"output.dir={folder.parent}", f"name={folder.name}"]
        else:
            result.append(f"{key}={_find_data(value) if key == 'data.train' else value}")
    return [*result, *overrides]


def _find_data(path: str) -> str:
    """``OWNER/NAME`` is a data set of the hub unless there is such a file or folder here."""
    is_name = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not Path(path).suffix and not Path(path).exists()
    return f"hub:{path}" if is_name else path


def make_run(short: Mapping[str, Any], overrides: Sequence[str]) -> ParsedFile:
    """The run of a command line without a run file, before its options and overrides are applied.

    The rows tell the task and their format, as for ``manyhands init``. UserError without a model or data, and where
    the rows do not tell how to read them.
    """
    from manyhands.cli.init import choose_reading, look_at_rows
    from manyhands.config.read import ParsedFile
    from manyhands.importers.translation import clean_name

    given = dict(short) | {
        key.removeprefix("--"): value for key, equals, value in (word.partition("=") for word in overrides) if equals
    }
    missing = [option for option, key in (("--model", "model.name"), ("--data", "data.train")) if key not in given]
    if missing:
        raise UserError(
            f"no run file was given, and without one {' and '.join(missing)} {'is' if missing[1:] == [] else 'are'} "
            "missing",
            where=WHERE,
            fix="give RUN.yaml first, or --model OWNER/NAME --data rows.jsonl",
        )
    model, data = str(given["model.name"]), _find_data(str(given["data.train"]))
    mapping: dict[str, Any] = {"data": {}, "name": clean_name(f"{Path(model).name}-{Path(data).stem}")}
    if not any(key == "task" or key.startswith(("data.format", "data.fields", "data.train[")) for key in given):
        reading = choose_reading(look_at_rows(Path(data), count=False), {}, ask=False)
        if not reading.is_known:
            raise UserError(
                "the column names do not show which holds the prompt and which the answer",
                where=data,
                fix="name them: data.fields.question=COLUMN data.fields.answer=COLUMN (or `manyhands init` asks); the "
                "first line of a CSV file is its header",
            )
        mapping["task"] = reading.task
        mapping["data"] |= {"format": reading.format} | ({"fields": reading.fields} if reading.fields else {})
        if reading.note:
            report_aside(reading.note)
    mapping["data"]["too_long"] = "split" if mapping.get("task") == "cpt" else "truncate"
    return ParsedFile(mapping, WHERE)


def write_down(loaded: LoadedRun) -> LoadedRun:
    """The run with the text of the run file that it means, which its folder keeps."""
    from manyhands.config.keys import commented_yaml, table

    written = loaded.config.model_dump(mode="json", exclude_unset=True)
    values = {}
    for key in table():
        section, _, leaf = key.rpartition(".")
        holder = written.get(section, {}) if section else written
        if leaf in holder:
            values[key] = holder[leaf]
    return replace(loaded, run_file=commented_yaml(values))
