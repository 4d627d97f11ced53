"""``manyhands generate --input``: each prompt answered once, in order, whatever interrupts it and however many work."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from manyhands.core.errors import UserError
from manyhands.infer import batch as batch_module
from manyhands.infer.answer_file import AnswerFile
from manyhands.infer.batch import answer_file
from manyhands.infer.load import open_answerer
from manyhands.infer.prompts import PromptOptions, PromptTokens
from manyhands.infer.replicas import Placement, group_size
from manyhands.infer.settings import GenerationSettings
from manyhands.infer.worker import BatchCapacity, PromptQueue, Worker, measure_capacity
from manyhands.model.structure import block_linears
from tests.export.tiny import make_model, save_source
from tests.support.experts import expert_model
from tests.support.zygote import forking

SETTINGS = GenerationSettings(max_new_tokens=6)
USER = {"role": "user", "content": "w1"}


def make_rows(number: int) -> list[dict[str, Any]]:
    """Prompts of mixed lengths, some of them conversations; each with an id of its own."""
    rows: list[dict[str, Any]] = []
    for n in range(number):
        text = " ".join(f"w{(7 * n + k) % 248}" for k in range(1 + (n * n) % 19))
        turns = [{"role": "user", "content": "w3 w4"}, {"role": "assistant", "content": "w5"}]
        row = {"prompt": text} if n % 3 else {"messages": [*turns, {"role": "user", "content": text}]}
        rows.append({"id": f"row-{n}", **row})
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def one_by_one(folder: Path, rows: list[dict[str, Any]]) -> list[str]:
    answerer = open_answerer(folder)
    given = (row.get("messages") or [{"role": "user", "content": row["prompt"]}] for row in rows)
    return [answerer.answer(messages, SETTINGS.max_new_tokens) for messages in given]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("model") / "base", make_model())


def test_each_row_comes_back_in_order_with_the_answer_it_has_alone(model: Path, tmp_path: Path) -> None:
    rows = make_rows(23)
    prompts, output = write_rows(tmp_path / "prompts.jsonl", rows), tmp_path / "out" / "answers.jsonl"
    lines: list[str] = []
    assert answer_file(model, prompts, output, SETTINGS, report=lines.append) == 23
    found = read(output)
    assert [row["id"] for row in found] == [row["id"] for row in rows]
    assert [row["answer"] for row in found] == one_by_one(model, rows)
    assert all(row["finish_reason"] in ("stop", "length") and row["answer_tokens"] <= 6 for row in found)
    assert os.listdir(output.parent) == ["answers.jsonl"] and "23 answers in" in lines[-1]
    with pytest.raises(UserError, match="the file of answers exists"):
        answer_file(model, prompts, output, SETTINGS)
    answer_file(model, prompts, output, SETTINGS, overwrite=True, report=lines.append)
    assert read(output) == found


@pytest.mark.ci
def test_the_number_of_processes_and_the_batch_change_nothing(model: Path, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", make_rows(14))
    sampled = GenerationSettings(max_new_tokens=6, temperature=1.0, top_p=0.9, seed=3)
    found = []
    for number, placement in enumerate((Placement(), Placement(batch_size=1), Placement(processes=2, batch_size=3))):
        output = tmp_path / f"{number}.jsonl"
        with forking():
            answer_file(model, prompts, output, sampled, placement=placement, report=lambda _: None)
        found.append(read(output))
    assert found[0] == found[1] == found[2]
    assert len({row["answer"] for row in found[0]}) > 10


def test_what_was_answered_before_a_kill_is_not_answered_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(12)
    prompts, output = write_rows(tmp_path / "prompts.jsonl", rows), tmp_path / "answers.jsonl"
    asked: list[int] = []

    class Dying(Worker):
        def run(self, task: list[PromptTokens]) -> Any:
            if len(asked) >= 7:
                raise KeyboardInterrupt
            asked.extend(prompt.number for prompt in task)
            return super().run(task)

    monkeypatch.setattr(batch_module, "Worker", Dying)
    few = Placement(batch_size=4)
    with pytest.raises(KeyboardInterrupt):
        answer_file(model, prompts, output, SETTINGS, placement=few, report=lambda _: None)
    assert not output.exists() and len(asked) == 8
    partial = tmp_path / "answers.jsonl.partial"
    partial.write_bytes(partial.read_bytes()[:-9])  # the last line was not whole
    with pytest.raises(UserError, match="to something else") as refused:
        answer_file(model, prompts, output, GenerationSettings(max_new_tokens=5), report=lambda _: None)
    assert refused.value.details == ("max_new_tokens: 6 -> 5",)
    done, asked[:] = set(asked[:7]), []
    monkeypatch.setattr(
        Dying, "run", lambda self, task: [asked.extend(p.number for p in task), Worker.run(self, task)][1]
    )
    lines: list[str] = []
    answer_file(model, prompts, output, SETTINGS, report=lines.append)
    assert "7 of them answered already" in lines[0]
    assert not done & set(asked) and len(asked) == 5
    assert [row["answer"] for row in read(output)] == one_by_one(model, rows) and not partial.exists()


def kill_and_resume(model: Path, tmp_path: Path, num_prompts: int, kills: int, processes: int) -> dict[str, Any]:
    """Ends the command by SIGKILL after a growing share of the answers, then lets it finish."""
    rows = make_rows(num_prompts)
    prompts, output = write_rows(tmp_path / "prompts.jsonl", rows), tmp_path / "answers.jsonl"
    partial = tmp_path / "answers.jsonl.partial"
    request = {
        "folder": str(model),
        "input": str(prompts),
        "output": str(output),
        "settings": {"max_new_tokens": SETTINGS.max_new_tokens},
        "placement": {"processes": processes, "batch_size": 64},
    }
    command = [sys.executable, "-m", "manyhands.infer", "generate", json.dumps(request)]
    had = []
    for kill in range(1, kills + 1):
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            while process.poll() is None:
                num_lines = partial.read_bytes().count(b"\n") if partial.exists() else 0
                if num_lines > num_prompts * kill // (kills + 1):
                    process.send_signal(signal.SIGKILL)
                    break
                time.sleep(0.02)
            assert process.wait() == -signal.SIGKILL, "it was done before it could be killed"
        had.append(partial.read_bytes().count(b"\n") - 1)
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    found = read(output)
    assert [row["id"] for row in found] == [row["id"] for row in rows]
    assert [row["answer"] for row in found] == one_by_one(model, rows)
    return {"prompts": num_prompts, "answered at the kills": had}


@pytest.mark.slow
def test_killed_twice_and_resumed(model: Path, tmp_path: Path) -> None:
    with forking():
        found = kill_and_resume(model, tmp_path, 1000, kills=2, processes=2)
    assert 0 < found["answered at the kills"][0] < found["answered at the kills"][1] < 1000


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "w1"}, "neither prompt nor messages (it has text)"),
        ({"prompt": "w1", "messages": []}, "prompt and messages"),
        ({"prompt": " "}, "the prompt is empty"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"prompt": "w1 " * 3000}, "tokens, and the model has room for 2,042"),
        ({"prompt": "w1", "answer": "a", "reference": "b"}, "answer and reference"),
        ({"prompt": "w1", "tools": {"name": "f"}}, "tools must be a list"),
        ({"prompt": "w1", "system": 5}, "system must be a string"),
        ({"messages": [{"role": "system", "content": "w2"}, USER], "system": "w3"}, "two system prompts"),
    ],
)
def test_rows_that_cannot_be_answered_are_named_before_anything_is(
    model: Path, tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    prompts = write_rows(tmp_path / "p.jsonl", [{"prompt": "w1"}, row])
    with pytest.raises(UserError, match="1 of 2 prompts cannot be answered") as refused:
        answer_file(model, prompts, tmp_path / "a.jsonl", SETTINGS)
    assert said in refused.value.details[0] and refused.value.details[0].startswith(f"{prompts}:2: ")
    assert not list(tmp_path.glob("a.jsonl*"))


@pytest.mark.parametrize(("text", "said"), [("{", "is not JSON"), ("[1]", "is not a JSON object"), ("", "no prompts")])
def test_a_file_of_prompts_that_is_none(model: Path, tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(UserError, match=said):
        answer_file(model, tmp_path / "p.jsonl", tmp_path / "a.jsonl", SETTINGS)


def test_system_prompt_and_tools_reach_the_template(model: Path, tmp_path: Path) -> None:
    answerer = open_answerer(model)
    answerer.tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t['name'] }} {% endfor %}" + answerer.tokenizer.chat_template
    )
    from manyhands.infer.prompts import encode_rows

    rows = [{"prompt": "w1"}, {"prompt": "w1", "tools": [{"name": "w9"}]}]
    rows.append({"messages": [{"role": "system", "content": "w7"}, USER]})
    rows += [{"prompt": "w1", "system": "w5"}, {"messages": [USER], "system": ""}]
    file = write_rows(tmp_path / "p.jsonl", rows)
    options = PromptOptions(system="w6", tools=({"name": "w8"},))
    found = [answerer.tokenizer.decode(p.ids) for p in encode_rows(file, answerer.tokenizer, {}, options)]
    assert [text.split()[0] for text in found] == ["w8", "w9", "w8", "w8", "w8"]
    assert ["system w6" in text for text in found] == [True, True, False, False, True]
    assert "system w7" in found[2] and "system w5" in found[3]


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    first = AnswerFile(tmp_path / "a.jsonl", {"model": 1}, 2)
    with pytest.raises(UserError, match="another process is writing"):
        AnswerFile(tmp_path / "a.jsonl", {"model": 1}, 2)
    first.add(1, {"answer": "é"})
    first.add(0, {"answer": "b"})
    first.finish([{"prompt": "p", "answer": "known"}, {"prompt": "q"}])
    assert read(tmp_path / "a.jsonl") == [
        {"prompt": "p", "reference": "known", "answer": "b"},
        {"prompt": "q", "answer": "é"},
    ]


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "notes.partial"
    other.write_text("my notes\nof the week\n")
    with pytest.raises(UserError, match="holds something else"):
        AnswerFile(tmp_path / "notes", {"seed": 1}, 1)
    assert other.read_text() == "my notes\nof the week\n"
    other.write_text('{"iden')  # a kill within the first line
    AnswerFile(tmp_path / "notes", {"seed": 1}, 1).close()


def test_a_folder_is_no_file_of_answers(tmp_path: Path) -> None:
    for overwrite in (False, True):
        with pytest.raises(UserError, match="is a folder"):
            AnswerFile(tmp_path, {"seed": 1}, 1, overwrite=overwrite)


def test_other_fields_of_a_row_come_back_whatever_they_hold(tmp_path: Path) -> None:
    row = {"prompt": "a", "note": "half \ud83d of a pair", "name": "é\u2028"}
    file = AnswerFile(tmp_path / "a.jsonl", {"seed": 1}, 1)
    file.add(0, {"answer": "b"})
    file.finish([row])
    assert [json.loads(line) for line in (tmp_path / "a.jsonl").read_bytes().split(b"\n") if line] == [
        row | {"answer": "b"}
    ]


def test_half_of_a_surrogate_pair_is_named_by_its_line(model: Path, tmp_path: Path) -> None:
    from manyhands.infer.prompts import encode_rows

    file = tmp_path / "prompts.jsonl"
    strange = '{"messages": [{"role": "user", "content": [{"type": []}]}]}'
    file.write_text(f'{{"prompt": "a"}}\n{{"prompt": "\\ud800"}}\n{{"prompt": "a", "tools": "["}}\n{strange}\n')
    with pytest.raises(UserError, match="3 of 4 prompts cannot be answered") as caught:
        encode_rows(file, open_answerer(model).tokenizer, {}, PromptOptions())
    assert ":2: " in caught.value.details[0] and "surrogate pair" in caught.value.details[0]
    assert "a part of type []" in caught.value.details[2]


@pytest.mark.parametrize(
    "line", [b'"x"', b"3", b"{}", b'{"number": "0"}', b'{"number": []}', b'{"number": 9}', b"[" * 5000]
)
def test_answers_behind_a_damaged_line_are_made_again(tmp_path: Path, line: bytes) -> None:
    partial = tmp_path / "a.jsonl.partial"
    partial.write_bytes(
        b'{"identity": {"model": 1}, "num_prompts": 3}\n{"number": 0, "answer": "a"}\n%s\n{"number": 1}\n' % line
    )
    file = AnswerFile(tmp_path / "a.jsonl", {"model": 1}, 3)
    assert file.answered == {0}
    file.close()
    partial.write_bytes(b'{"identity": 3, "num_prompts": 3}\n')
    with pytest.raises(UserError, match="answers so far are to something else"):
        AnswerFile(tmp_path / "a.jsonl", {"model": 1}, 3)


def test_prompts_that_change_on_the_way_get_no_answers_of_others(model: Path, tmp_path: Path) -> None:
    prompts = write_rows(tmp_path / "prompts.jsonl", make_rows(3))

    def change(text: str) -> None:
        write_rows(prompts, make_rows(4)[1:])

    with pytest.raises(UserError, match="the prompts have changed"):
        answer_file(model, prompts, tmp_path / "answers.jsonl", SETTINGS, report=change)
    assert not (tmp_path / "answers.jsonl").exists()


@pytest.mark.parametrize("model_type", ["gemma4_text", "gemma4", "qwen3_moe"])
def test_a_token_s_cache_is_that_of_every_block(model_type: str) -> None:
    """Of Gemma 4, whose layers differ, without transformers' warning that one value stands for all."""
    differs = model_type.startswith("gemma4")
    model = expert_model(model_type, **{"num_global_key_value_heads": 2} if differs else {})
    logger, said = logging.getLogger("transformers"), io.StringIO()
    logger.addHandler(handler := logging.StreamHandler(said))
    try:
        found = measure_capacity(model).token_bytes
    finally:
        logger.removeHandler(handler)
    keys = [layer.out_features for name, layer in block_linears(model).items() if name.endswith("k_proj")]
    assert found == 2 * 4 * sum(keys) and (len(set(keys)) > 1) == differs
    assert said.getvalue() == ""


def test_batches_are_of_like_lengths_the_longest_first_and_fit() -> None:
    capacity = BatchCapacity(
        9000, token_bytes=1, prompt_token_bytes=0, row_bytes=0, max_rows=8, max_tokens=None, pads=True
    )
    prompts = [PromptTokens(n, (1,) * length) for n, length in enumerate((3, 300, 2, 30, 31, 30, 1, 2))]
    queue = PromptQueue(prompts, 20)
    batches = []
    while (batch := queue.take(capacity)) is not None:
        batches.append([len(prompt.ids) for prompt in batch])
    assert batches == [[300], [31, 30, 30], [3, 2, 2, 1]]
    queue = PromptQueue(prompts, 20, num_replicas=2)
    assert [len(queue.take(capacity) or ()) for _ in range(4)] == [1, 3, 2, 1]
    exact = BatchCapacity(9000, 1, 0, 0, 8, None, pads=False)  # no batch of unequal lengths
    queue = PromptQueue(prompts, 20)
    assert [len(queue.take(exact) or ()) for _ in range(6)] == [1, 1, 2, 1, 2, 1]


def test_a_model_takes_as_few_gpus_as_hold_it() -> None:
    gib = 1 << 30
    assert [group_size(size * gib, 80 * gib, 8) for size in (1, 60, 61, 140)] == [1, 1, 2, 3]
    with pytest.raises(UserError, match="do not fit on 2 GPUs") as refused:
        group_size(140 * gib, 80 * gib, 2)
    assert "use 3 GPUs" in refused.value.fix
