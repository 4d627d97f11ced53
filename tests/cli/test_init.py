"""``manyhands init``: the file is always written, whatever the columns are called; what a run will do with the rows is
said.
"""

from __future__ import annotations

import json
import os
import pty
import select
import sys
from pathlib import Path

import pytest
import typer

from manyhands.cli.init import choose_reading, look_at_rows, parse_fields
from manyhands.core.errors import EXIT_INTERRUPTED, EXIT_USAGE, UserError
from manyhands.importers.load import load_config
from tests.cli.conftest import call
from tests.support.tiny import write_tiny_model

SOURCE = Path(__file__).parents[2] / "src"
GERMAN = "Nr;Frage;Antwort;Quelle\n" + "".join(f"{n};Was ist {n} und {n}?;Das ist {2 * n}.;Buch\n" for n in range(30))


@pytest.mark.parametrize(
    ("row", "task", "field_format"),
    [
        ({"messages": []}, "sft", "messages"),
        ({"conversations": []}, "sft", "sharegpt"),
        ({"instruction": "a", "output": "b", "text": "c"}, "sft", "alpaca"),
        ({"prompt": "a", "completion": "b"}, "sft", "prompt"),
        ({"question": "a", "answer": "b"}, "sft", "question"),
        ({"text": "a"}, "cpt", "text"),
    ],
)
def test_init_infers_the_task_and_writes_a_file_that_loads(tmp_path, monkeypatch, row, task, field_format):
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/train.jsonl").write_text("\n" + json.dumps(row) + "\n")
    result = call("init", "-o", "my.yaml")
    assert result.exit_code == 0, result.output
    config = load_config("my.yaml")
    assert (config.task, config.data.format, config.name) == (task, field_format, "my")
    assert Path(config.data.train) == tmp_path / "data" / "train.jsonl"
    assert "train: data/train.jsonl" in Path("my.yaml").read_text()


def test_init_never_overwrites(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"text": "a"}\n')
    Path("run.yaml").write_text("mine")
    result = call("init", "--data", "rows.jsonl", "--yes")
    assert result.exit_code == EXIT_USAGE and "the file already exists" in result.stderr
    assert Path("run.yaml").read_text() == "mine"


def test_init_takes_what_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.txt").write_text("words")
    assert call("init", "--data", "rows.txt", "--model", "org/other", "--yes").exit_code == 0
    config = load_config("run.yaml")
    assert (config.model.name, config.task) == ("org/other", "cpt")


@pytest.mark.parametrize(
    ("text", "said"), [("not json", "broken JSON"), ("[1]", "a JSON list"), ("", "empty"), ("\n", "no rows")]
)
def test_init_refuses_rows_it_cannot_read(tmp_path, text, said):
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(UserError) as raised:
        look_at_rows(path)
    assert said in str(raised.value)


def test_init_without_data_says_what_to_give(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = call("init")
    assert result.exit_code == EXIT_USAGE and "--data" in result.stderr


@pytest.mark.ci
def test_init_asks_on_a_terminal(tmp_path):
    """The second question is answered with Ctrl-C first, which leaves nothing behind."""
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    assert _on_a_terminal(tmp_path, [("Model", "org/asked\n"), ("Training data", "\x03")]) == EXIT_INTERRUPTED
    assert not (tmp_path / "run.yaml").exists()
    answers = [("Model", "org/asked\n"), ("Training data", "\n"), ("Samples over", "split\n")]
    assert _on_a_terminal(tmp_path, answers) == 0
    config = load_config(tmp_path / "run.yaml")
    assert config.model.name == "org/asked" and config.data.train == str(tmp_path / "rows.jsonl")
    assert (config.task, config.data.too_long) == ("cpt", "split")


@pytest.mark.ci
def test_init_shows_columns_of_another_language_and_asks(tmp_path):
    (tmp_path / "fragen.csv").write_text(GERMAN)
    answers = [("Model", "org/asked\n"), ("Training data", "\n"), ("the question", "nonsense\n")]
    answers += [("choose one of: Nr, Frage", "\n"), ("the answer", "antwort\n"), ("Samples over", "truncate\n")]
    assert _on_a_terminal(tmp_path, answers) == 0
    data = load_config(tmp_path / "run.yaml").data
    assert (data.format, data.too_long) == ("question", "truncate")
    assert data.fields == {"question": "Frage", "answer": "Antwort"}


def test_init_writes_a_file_for_columns_of_another_language_that_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("fragen.csv").write_text(GERMAN)
    model = write_tiny_model(tmp_path / "model")
    given = ["--fields", "question=Frage,answer=Antwort", "--too-long", "truncate"]
    for name, options in {"guessed": [], "given": given}.items():
        result = call("init", "--data", "fragen.csv", "--model", model, "-o", f"{name}.yaml", *options)
        assert result.exit_code == 0, result.output
        assert "3 of 30 rows will be held out for validation" in result.output
        assert ("Was ist 1 und 1?" in result.output and "guessed from the names" in result.output) == (
            name == "guessed"
        )
        shown = call("data", f"{name}.yaml", f"data.cache={tmp_path / 'cache'}", "--rows", 1)
        assert shown.exit_code == 0 and "⟦Das ist " in shown.output
        assert "30 samples" not in shown.output.replace("tokenized 30 samples", "")
        assert "columns of fragen that are not read: Nr, Quelle" in " ".join(shown.output.split())
        assert "validation  3 samples" in shown.output and "none of them in the training set" in shown.output
    assert load_config("given.yaml").data.too_long == "truncate"


def test_init_writes_a_file_where_nothing_can_be_guessed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("Ping,Pong,Pung\na,b,c\nd,e,f\n")
    result = call("init")
    assert result.exit_code == 0 and "Ping: a" in result.output and "next:" not in result.output
    assert "before it can run: name the columns in data.fields" in result.output
    assert load_config("run.yaml").data.fields == {"question": "COLUMN", "answer": "COLUMN"}
    for wrong, said in [
        ("question=Pang,answer=Pong", "no row has the field Pang"),
        ("question", "ROLE=COLUMN"),
        ("who=Ping", "no format"),
    ]:
        result = call("init", "--fields", wrong, "-o", "other.yaml")
        assert result.exit_code == EXIT_USAGE and said in result.stderr and not Path("other.yaml").exists()
    result = call("init", "--too-long", "split", "--fields", "question=Ping,answer=Pong", "-o", "other.yaml")
    assert result.exit_code == EXIT_USAGE


@pytest.mark.parametrize(
    ("row", "answers", "reading"),
    [
        ({"問題": "a", "答え": "b", "id": 1}, ["", ""], ("question", {"question": "問題", "answer": "答え"})),
        ({"x": "a", "Respuesta": "b"}, ["", ""], ("question", {"question": "x", "answer": "Respuesta"})),
        ({"body": "a", "id": 1}, ["body", "-"], ("text", {"text": "body"})),
        ({"body": "a"}, ["body"], ("text", {"text": "body"})),
        ({"dialog": [{"role": "user", "content": "a"}], "id": 1}, [], ("messages", {"messages": "dialog"})),
        ({"talk": [{"from": "human", "value": "a"}]}, [], ("sharegpt", {"conversations": "talk"})),
        ({"prompt": "a", "completion": "b", "question": "a", "answer": "b"}, ["question"], ("question", {})),
    ],
)
def test_what_is_asked_is_what_is_written(tmp_path, monkeypatch, row, answers, reading):
    left = list(answers)
    monkeypatch.setattr(typer, "prompt", lambda text, default: left.pop(0) or default)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    found = choose_reading(look_at_rows(tmp_path / "rows.jsonl"), {}, ask=True)
    assert (found.format, found.fields) == reading and not left


def test_init_says_what_a_run_will_refuse(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("kto.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b " * 9000, "label": True}) + "\n")
    said = call("init", "--data", "kto.jsonl").output
    assert "a run will refuse these rows: this is preference data: the column label would not be used" in said
    assert "about 4,500 tokens" in said and "none of 1 rows will be held out" in said


def test_init_counts_what_it_can(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "ab"}\n' * 150 + '{"text": "\u65e5"}\n')
    seen = look_at_rows(path)
    assert (len(seen.rows), seen.num_rows, seen.is_all, seen.longest_bytes) == (100, 151, True, 3)
    path.write_text('{"text": "ab"}\n' * 5 + "broken\n")
    assert not look_at_rows(path).is_all
    assert parse_fields(["question=a,b,answer=c", "system=d"]) == {"question": "a,b", "answer": "c", "system": "d"}


def _on_a_terminal(folder: Path, answers: list[tuple[str, str]]) -> int:
    """The exit code of ``manyhands init`` in a folder, on a terminal; answers each question as it comes."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(folder)
        os.execve(
            sys.executable, [sys.executable, "-m", "manyhands", "init"], {**os.environ, "PYTHONPATH": str(SOURCE)}
        )
    shown = ""
    for question, answer in answers:
        while question not in shown:
            shown += os.read(terminal, 4096).decode()
        os.write(terminal, answer.encode())
    try:
        while True:
            if not select.select([terminal], [], [], 10)[0]:
                os.write(
                    terminal, answers[-1][1].encode()
                )  # Ctrl-C between the prompt and its reading can be lost: press it again
            elif not os.read(terminal, 4096):
                break
    except OSError:  # the terminal closes with its program
        pass
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
