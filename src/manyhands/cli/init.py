"""``manyhands init``: writes a commented run file; prompts on a terminal, infers otherwise. Never overwrites."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.core.errors import UserError

if TYPE_CHECKING:
    from manyhands.data.read.files import Row

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DATA_SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv", ".txt")  # most likely first
LOOK_AT_ROWS = 100
COUNT_ROWS = 100_000  # of larger data only a fraction is stated
SHOW_CHARACTERS = 60
MAX_LENGTH = 2048
BYTES_PER_TOKEN = 4  # roughly, of text in any script
UNKNOWN_COLUMN = "COLUMN"
# Common column names; a guess from them is offered as a default, or reported.
QUESTIONS = (
    "question query prompt instruction input user frage anfrage eingabe demande entrée pregunta consulta entrada "
    "pergunta domanda vraag pytanie fråga spørgsmål spørsmål kysymys otázka вопрос запит питання soru سؤال प्रश्न "
    "问题 問題 提问 質問 질문"
)
ANSWERS = (
    "answer response completion output reply assistant antwort ausgabe réponse reponse respuesta salida resposta saída "
    "risposta antwoord odpowiedź svar vastaus odpověď ответ відповідь cevap yanıt جواب إجابة उत्तर 答案 回答 答え "
    "답변 답"
)


@dataclass(frozen=True)
class FirstRows:
    """The first rows, how many there are (all of them if ``is_all``), and the bytes of text in the longest."""

    rows: list[Row]
    num_rows: int
    is_all: bool
    longest_bytes: int

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row.fields))


@dataclass(frozen=True)
class Reading:
    """How to read the rows, and a note for the user."""

    format: str
    fields: dict[str, str] = field(default_factory=dict)
    note: str = ""

    @property
    def task(self) -> str:
        from manyhands.config.tasks import TASKS

        return next(task.name for task in TASKS.values() if self.format in task.formats)

    @property
    def is_known(self) -> bool:
        return UNKNOWN_COLUMN not in self.fields.values()


def init(
    model: Annotated[str | None, typer.Option("--model", help="Hub name or folder.")] = None,
    data: Annotated[Path | None, typer.Option("--data", help="Training data: file, folder or hub:OWNER/NAME.")] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option("--fields", help="Columns by role, such as question=Frage,answer=Antwort (data.fields)."),
    ] = None,
    too_long: Annotated[
        str | None, typer.Option("--too-long", help="Samples over 2,048 tokens: error, truncate or split.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not prompt: use given or inferred values.")] = False,
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write.")] = Path("run.yaml"),
) -> None:
    """Write a commented run file (prompts on a terminal)."""
    if output.exists():
        raise UserError("the file already exists", where=str(output), fix="choose another name with -o")
    if output.suffix not in (".yaml", ".yml"):
        raise UserError("a commented run file is YAML", where=str(output), fix="choose a name that ends in .yaml")
    ask = sys.stdin.isatty() and not yes
    if model is None:
        model = typer.prompt("Model (hub name or folder)", default=DEFAULT_MODEL) if ask else DEFAULT_MODEL
    if data is None:
        data = _find_data(Path.cwd())
        if ask:
            data = Path(typer.prompt("Training data (file, folder or hub:OWNER/NAME)", default=data and str(data)))
    if data is None:
        raise UserError("no training data was given or found", where=str(Path.cwd()), fix="give it with --data FILE")
    seen = look_at_rows(data)
    reading = choose_reading(seen, parse_fields(fields or []), ask)
    long = choose_too_long(too_long, seen, reading.task, ask)
    values = make_values(model, data, output, reading, long)
    from manyhands.config.keys import commented_yaml

    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(commented_yaml(values))
    except OSError as error:
        raise UserError("the file cannot be written", where=str(output), why=error.strerror or str(error)) from None
    print(f"wrote {output}: {values['model.name']} on {values['data.train']}, task {values['task']}")
    for line in describe(seen, reading, long):
        print(line)
    if reading.is_known:
        print(f"next: manyhands plan {output}")


def make_values(model: str, data: Path, output: Path, reading: Reading, too_long: str) -> dict[str, Any]:
    """The keys to set. Paths inside the run file's folder are relative to it."""
    name = _relative_to_output(Path(model), output) if Path(model).is_dir() else model
    return {
        "task": reading.task,
        "model.name": name,
        "method.name": "lora",
        "data.train": _relative_to_output(data, output),
        "data.format": reading.format,
        **({"data.fields": reading.fields} if reading.fields else {}),
        "data.max_length": MAX_LENGTH,
        "data.too_long": too_long,
        "optimizer.learning_rate": "auto",
        "stop.epochs": 1.0,
        "parallel.gpus": "auto",
    }


def look_at_rows(path: Path, *, count: bool = True) -> FirstRows:
    """The first rows of the training data; with ``count`` statistics of all. UserError if no row can be read."""
    from manyhands.data.read.sources import Source, read_rows

    rows: list[Row] = []
    num_rows = longest = 0
    try:
        for row in read_rows(Source(path=str(path))):
            num_rows += 1
            longest = max(longest, _count_bytes(row.fields))
            if len(rows) < LOOK_AT_ROWS:
                rows.append(row)
            if num_rows > (COUNT_ROWS if count else LOOK_AT_ROWS):
                break
    except UserError:
        if not rows:
            raise
        return FirstRows(rows, num_rows, False, longest)  # `manyhands data` lists the rows that cannot be read
    return FirstRows(rows, min(num_rows, COUNT_ROWS), num_rows <= COUNT_ROWS, longest)


def _count_bytes(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode("utf-8", "replace"))
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(map(_count_bytes, entries))


def parse_fields(given: Sequence[str]) -> dict[str, str]:
    """``question=Frage,answer=Antwort``, from one option or several, as data.fields."""
    pairs = [pair for text in given for pair in re.split(r",(?=\w+=)", text)]
    wrong = next((pair for pair in pairs if not re.fullmatch(r"\w+=.+", pair, re.DOTALL)), None)
    if wrong is not None:
        raise UserError(
            f"--fields takes ROLE=COLUMN, got {wrong!r}", fix="such as --fields question=Frage,answer=Antwort"
        )
    return {role: column for role, _, column in (pair.partition("=") for pair in pairs)}


def choose_reading(seen: FirstRows, given: dict[str, str], ask: bool) -> Reading:
    """Format and columns: as given, detected, asked for or guessed. UserError for columns that do not exist."""
    from manyhands.config.sources import REQUIRED
    from manyhands.config.tasks import DEFAULT_TASK
    from manyhands.data.read.formats import detect_format, settle_format

    if given:
        return Reading(settle_format(seen.rows, "auto", given, DEFAULT_TASK), given)
    try:
        return Reading(detect_format(seen.rows, task=DEFAULT_TASK))  # rows that fit both tasks are conversations
    except UserError:
        pass
    fitting = [
        form
        for form, names in REQUIRED.items()
        if all(row.fields.get(name) is not None for row in seen.rows for name in names)
    ]
    if len(fitting) > 1:
        note = f"the rows fit several formats: {', '.join(fitting)}; data.format sets the one to read"
        return Reading(_ask_one_of("Format of the rows", fitting, fitting[0]) if ask else fitting[0], note=note)
    turns = [(column, kind) for column in seen.columns if (kind := _kind_of_turns(seen.rows, column))]
    if len(turns) == 1:
        column, kind = turns[0]
        role = "messages" if kind == "messages" else "conversations"
        return Reading(kind, {role: column}, f"conversations are read from {column}")
    return _ask_columns(seen) if ask else _guess_columns(seen)


def _kind_of_turns(rows: Sequence[Row], column: str) -> str | None:
    """The format of a column of conversations; None for other columns."""
    first = next((row.fields[column] for row in rows if row.fields.get(column)), None)
    if not (isinstance(first, list) and all(isinstance(turn, dict) for turn in first)):
        return None
    kinds = {"messages": {"role", "content"}, "sharegpt": {"from", "value"}}
    return next((kind for kind, keys in kinds.items() if keys <= set(first[0])), None)


def _guess(columns: Sequence[str]) -> tuple[str | None, str | None]:
    """(question, answer) as far as the names tell; if one of two columns is known, so is the other."""
    question = next((name for name in columns if name.strip().casefold() in QUESTIONS.split()), None)
    answer = next((name for name in columns if name.strip().casefold() in ANSWERS.split() and name != question), None)
    if len(columns) == 2 and (question is None) != (answer is None):
        other = next(name for name in columns if name not in (question, answer))
        question, answer = question or other, answer or other
    return question, answer


def _guess_columns(seen: FirstRows) -> Reading:
    print("\n".join(show_columns(seen)))
    question, answer = _guess(seen.columns)
    option = "--fields question=...,answer=...)"
    note = f"before it can run: name the columns in data.fields instead of {UNKNOWN_COLUMN} (or use {option}"
    if question and answer:
        note = f"guessed from the names: {question} is the question, {answer} the answer (data.fields, or {option}"
    return Reading("question", {"question": question or UNKNOWN_COLUMN, "answer": answer or UNKNOWN_COLUMN}, note)


def _ask_columns(seen: FirstRows) -> Reading:
    print("\n".join(show_columns(seen)))
    columns = seen.columns
    question, answer = _guess(columns)
    question = _ask_one_of("Column with the question, or with text", columns, question or columns[0])
    left = [name for name in columns if name != question]
    if not left:
        return Reading("text", {"text": question})
    default = answer if answer in left else left[0]
    answer = _ask_one_of("Column with the answer (`-` if there is none and the rows are text)", [*left, "-"], default)
    if answer == "-":
        return Reading("text", {"text": question})
    return Reading("question", {"question": question, "answer": answer})


def _ask_one_of(text: str, allowed: Sequence[str], default: str) -> str:
    while True:
        said: str = typer.prompt(text, default=default).strip()
        if said in allowed:
            return said
        near = [name for name in allowed if name.casefold() == said.casefold()]
        if len(near) == 1:
            return near[0]
        print(f"choose one of: {', '.join(allowed)}")


def show_columns(seen: FirstRows) -> list[str]:
    """The columns with their values in the first two rows."""

    def show(value: Any) -> str:
        text = " ".join(str(value).split())
        return text if len(text) <= SHOW_CHARACTERS else text[: SHOW_CHARACTERS - 1] + "…"

    lines = ["unknown column names; the first rows are:"]
    for row in seen.rows[:2]:
        lines.append(f"  {Path(row.file).name}:{row.line}")
        lines += [f"    {name}: {show(value)}" for name, value in row.fields.items()]
    return lines


def choose_too_long(given: str | None, seen: FirstRows, task: str, ask: bool) -> str:
    from manyhands.config.tasks import TASKS

    allowed = ["error", "truncate", *(["split"] if TASKS[task].takes_text else [])]
    if given is not None:
        if given not in allowed:
            raise UserError(f"--too-long: got {given!r}", fix=f"choose one of {', '.join(allowed)} (task {task})")
        return given
    if not ask:
        return "error"
    about = seen.longest_bytes // BYTES_PER_TOKEN
    print(f"The longest row has about {about:,} tokens.")
    return _ask_one_of(f"Samples over {MAX_LENGTH:,} tokens ({', '.join(allowed)})", allowed, "error")


def describe(seen: FirstRows, reading: Reading, too_long: str) -> list[str]:
    """What the file does not show: how much is held out, what may be too long, what a run will refuse."""
    from manyhands.config.schema import DataSection
    from manyhands.data.read.columns import Columns
    from manyhands.data.tokenize.divide import count_held_out

    fraction = DataSection.model_fields["validation_fraction"].default
    lines = [reading.note] if reading.note else []
    rows = f"{100 * fraction:g} % of the rows"
    if seen.is_all and too_long != "split":
        held_out = count_held_out(fraction, seen.num_rows)
        rows = f"{f'{held_out:,}' if held_out else 'none'} of {seen.num_rows:,} rows"
    lines.append(f"{rows} will be held out for validation (data.validation_fraction)")
    about = seen.longest_bytes // BYTES_PER_TOKEN
    if about > MAX_LENGTH and too_long == "error":
        lines.append(
            f"a row has about {about:,} tokens: over data.max_length ({MAX_LENGTH:,}) it is an error (data.too_long)"
        )
    try:
        Columns(reading.fields).refuse(seen.rows, reading.format)
    except UserError as error:
        lines.append(f"a run will refuse these rows: {error.what}; {error.fix}")
    return lines


def _find_data(folder: Path) -> Path | None:
    """The most likely training file in a folder or its data/: one named train, or else the only one."""
    files = [file for place in (folder, folder / "data") for file in sorted(place.glob("*"))]
    rows = next((same for suffix in DATA_SUFFIXES if (same := [file for file in files if file.suffix == suffix])), [])
    named = [file for file in rows if file.stem.startswith("train")]
    chosen = named[0] if named else rows[0] if len(rows) == 1 else None
    return chosen.relative_to(folder) if chosen else None


def _relative_to_output(path: Path, output: Path) -> str:
    if str(path).startswith("hub:"):
        return str(path)
    absolute, folder = Path(os.path.abspath(path)), Path(os.path.abspath(output)).parent
    return str(absolute.relative_to(folder) if absolute.is_relative_to(folder) else absolute)
