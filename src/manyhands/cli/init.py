"""``manyhands init``: a commented run file, asked for on a terminal and inferred elsewhere. Never overwrites."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from manyhands.errors import UserError

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt")  # the likelier ones first
LOOK_AT_ROWS = 100


def init(
    model: Annotated[str | None, typer.Option("--model", help="Hub name or folder.", show_default=False)] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="File or folder of training rows, or hub:OWNER/NAME.", show_default=False)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: take what was given or can be inferred.")] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("run.yaml"),
) -> None:
    """Write a commented run file; asks where there is a terminal."""
    if output.exists():
        raise UserError("the file exists already and is not overwritten", where=str(output), fix="choose another name with -o")
    if output.suffix not in (".yaml", ".yml"):
        raise UserError("a commented run file is YAML", where=str(output), fix="choose a name that ends in .yaml")
    ask = sys.stdin.isatty() and not yes
    found = _find_data(Path.cwd())
    if model is None:
        model = typer.prompt("Model (hub name or folder)", default=DEFAULT_MODEL) if ask else DEFAULT_MODEL
    if data is None and ask:
        data = Path(typer.prompt("Training rows (a file, a folder or hub:OWNER/NAME)", default=str(found) if found else None))
    data = data or found
    if data is None:
        raise UserError("no training data was given, and no data file is here", where=str(Path.cwd()), fix="give it with --data FILE")
    values = infer_values(model, data, output)
    _write_new(output, values)
    print(f"wrote {output}: {values['model.name']} on {values['data.train']}, task {values['task']}")
    print(f"next: manyhands plan {output}")


def infer_values(model: str, data: Path, output: Path) -> dict[str, Any]:
    """The keys that differ from run to run. Paths are written as seen from the run file's folder where they lie in it."""
    task, field_format = look_at_rows(data)
    name = _seen_from(Path(model), output) if Path(model).is_dir() else model
    return {
        "task": task,
        "model.name": name,
        "method.name": "lora",
        "data.train": _seen_from(data, output),
        "data.format": field_format,
        "data.max_length": 2048,
        "optimizer.learning_rate": "auto",
        "stop.epochs": 1.0,
        "parallel.gpus": "auto",
    }


def look_at_rows(path: Path) -> tuple[str, str]:
    """Task and format of training data, from its first rows. Raises ``UserError`` if they are neither text nor conversations."""
    from itertools import islice

    from manyhands.data.formats import detect_format
    from manyhands.data.sources import Source, read_rows

    rows = list(islice(read_rows(Source(path=str(path))), LOOK_AT_ROWS))
    found = detect_format(rows, task="sft")  # rows that are both are conversations
    return ("cpt" if found == "text" else "sft"), found


def _find_data(folder: Path) -> Path | None:
    """The likeliest training file in a folder or its data/: one named train, else the only one."""
    files = [
        file for place in (folder, folder / "data") if place.is_dir() for file in sorted(place.iterdir()) if file.suffix in DATA_SUFFIXES
    ]
    rows = next((same for suffix in DATA_SUFFIXES if (same := [file for file in files if file.suffix == suffix])), [])
    named = [file for file in rows if file.stem.startswith("train")]
    chosen = named[0] if named else rows[0] if len(rows) == 1 else None
    return chosen.relative_to(folder) if chosen else None


def _seen_from(path: Path, output: Path) -> str:
    if str(path).startswith("hub:"):
        return str(path)
    absolute, folder = Path(os.path.abspath(path)), Path(os.path.abspath(output)).parent
    return str(absolute.relative_to(folder) if absolute.is_relative_to(folder) else absolute)


def _write_new(output: Path, values: dict[str, Any]) -> None:
    from manyhands.config.explain import commented_yaml

    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(commented_yaml(values))
    except OSError as error:
        raise UserError("the file cannot be written", where=str(output), why=error.strerror or str(error)) from None
