"""Preparation end to end: sets, policies on length, refusals, and a cache that is whole or not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands.core.errors import UserError
from manyhands.data.store.store import TokenStore
from manyhands.data.store.streams import prompt_of
from manyhands.data.tokenize import prepare as prepare_module
from manyhands.data.tokenize.cache import UNFINISHED, remove
from manyhands.data.tokenize.prepare import prepare
from tests.data.conftest import run

QUESTIONS: list[dict[str, Any]] = [
    {"question": f"what is {n}?", "answer": f"it is {n + 1}" + " indeed" * (n % 5)} for n in range(200)
]


def decoded(sample_set, folder: Path) -> list[str]:
    from manyhands.data.tokenize.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(folder)
    return [tokenizer.decode(sample_set.sample(index)["tokens"].tolist()) for index in range(sample_set.num_samples)]


def test_rows_are_held_out_counted_and_cached(write_rows, make_config, model_folder: Path) -> None:
    config = make_config(write_rows(QUESTIONS), batch={"loss_tokens": 100})
    facts, store, lines = run(config, model_folder)
    assert (facts.num_samples, facts.num_validation_samples) == (180, 20)
    train, validation = decoded(store.train, model_folder), decoded(store.validation, model_folder)
    assert len(set(train) | set(validation)) == 200 and not set(train) & set(validation)
    assert facts.num_tokens == store.train.lengths.sum() and facts.num_loss_tokens == store.train.num_loss_tokens.sum()
    assert facts.num_loss_tokens == sum(int(store.train.sample(index)["mask"][1:].sum()) for index in range(180))
    assert facts.max_length == max(store.train.lengths.max(), store.validation.lengths.max())
    assert facts.num_loss_tokens / 200 < facts.steps_of_epochs[0] <= facts.num_loss_tokens / 100 + 1
    assert any(line.startswith("tokenized 200 samples") for line in lines)
    again, _, lines = run(config, model_folder)
    assert again == facts and lines[0].startswith("tokens cached: 180 samples")
    line = store.line(0)
    assert f"what is {line - 1}?" in train[0]


def test_a_missing_chat_template_is_said(write_rows, make_config, model_folder: Path, plain_folder: Path) -> None:
    config = make_config(write_rows([{"prompt": f"count {n}", "completion": f" to {n + 1}"} for n in range(60)]))
    assert any("no chat template" in line for line in run(config, plain_folder)[2])
    assert not any("no chat template" in line for line in run(config, model_folder)[2])


def test_what_changes_tokens_changes_the_folder_and_nothing_else_does(
    write_rows, make_config, model_folder: Path, plain_folder: Path
) -> None:
    path = write_rows(QUESTIONS)
    digests = {}
    for name, arguments in {
        "same": {},
        "same, other batch": {"batch": {"samples": 8}, "packing": False},
        "seed": {"seed": 1},
        "length": {"max_length": 1000},
        "rows": {"max_samples": 10},
        "fraction": {"validation_fraction": 0.2},
        "template": {
            "model": {"chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"}
        },
    }.items():
        digests[name] = run(make_config(path, **arguments), model_folder)[0].digest
    assert digests.pop("same, other batch") == digests["same"]
    assert len(set(digests.values())) == len(digests)
    with path.open("a") as file:
        file.write('{"question": "a", "answer": "b"}\n')
    assert run(make_config(path), model_folder)[0].digest not in digests.values()


def test_max_rows_keeps_the_held_out_rows(write_rows, make_config, model_folder: Path) -> None:
    path = write_rows(QUESTIONS)
    _, whole, _ = run(make_config(path), model_folder)
    facts, some, _ = run(make_config(path, max_samples=30), model_folder)
    assert (facts.num_samples, facts.num_dropped, facts.num_validation_samples) == (30, 150, 20)
    assert decoded(some.validation, model_folder) == decoded(whole.validation, model_folder)
    assert set(decoded(some.train, model_folder)) < set(decoded(whole.train, model_folder))


def test_few_rows_and_a_validation_file(write_rows, make_config, model_folder: Path) -> None:
    for num_samples, asked, wanted, note in [
        (40, {}, 4, "4 samples held out for validation, a tenth of 40"),
        (11, {}, 1, "1 sample held out for validation, a tenth of 11"),
        (200, {}, 20, ""),
        (40, {"validation_fraction": 0.25}, 10, ""),
        (
            11,
            {"validation_fraction": 0.9},
            5,
            "only 5 samples held out for validation instead of 10: half of the 11 there are",
        ),
        (40, {"validation_fraction": 3}, 3, ""),
        (40, {"validation_fraction": 1}, 1, ""),
        (11, {"validation_fraction": 100}, 5, "only 5 samples held out for validation instead of 100: half of the 11"),
        (1, {"validation_fraction": 5}, 0, "half of 1 sample is less than one"),
        (9, {}, 0, "no sample is held out for validation"),
        (1, {}, 0, "no sample is held out for validation"),
    ]:
        facts, _, lines = run(make_config(write_rows(QUESTIONS[:num_samples]), **asked), model_folder)
        assert (facts.num_samples, facts.num_validation_samples) == (num_samples - wanted, wanted)
        assert note in "\n".join(lines) and ("held out" in "\n".join(lines)) == bool(note)
    facts, store, _ = run(
        make_config(write_rows(QUESTIONS[:7], "a.jsonl"), validation=str(write_rows(QUESTIONS[7:10], "b.jsonl"))),
        model_folder,
    )
    assert (facts.num_samples, facts.num_validation_samples) == (7, 3)
    assert ["what is 7?" in text for text in decoded(store.validation, model_folder)] == [True, False, False]
    assert (
        run(make_config(write_rows(QUESTIONS[:1], "one.jsonl"), validation_fraction=0), model_folder)[
            0
        ].num_validation_samples
        == 0
    )


def test_samples_of_both_sets_are_counted_and_named(write_rows, make_config, model_folder: Path) -> None:
    train = write_rows(QUESTIONS[:50], "a.jsonl")
    both = make_config(train, validation=str(write_rows([*QUESTIONS[48:55], {**QUESTIONS[3], "id": 7}], "b.jsonl")))
    facts, _, lines = run(both, model_folder)
    assert facts.num_repeated == 3 and facts.num_validation_samples == 8
    named = "b.jsonl:1 is a.jsonl:49, b.jsonl:2 is a.jsonl:50, b.jsonl:8 is a.jsonl:4"
    assert f"3 of 8 validation samples are trained too (the same tokens): {named}" in lines
    assert (
        run(make_config(train, validation=str(write_rows(QUESTIONS[50:55], "c.jsonl"))), model_folder)[0].num_repeated
        == 0
    )
    for rows in (QUESTIONS[:50], QUESTIONS[10:13]):
        with pytest.raises(UserError, match="every validation sample is a training sample too") as caught:
            run(make_config(train, validation=str(write_rows(rows, "d.jsonl"))), model_folder)
        assert caught.value.where == "data.validation" and "d.jsonl:1 is a.jsonl:" in caught.value.details[0]


def test_samples_of_the_same_tokens_are_held_out_together(write_rows, make_config, model_folder: Path) -> None:
    facts, store, _ = run(make_config(write_rows([QUESTIONS[n % 70] for n in range(200)])), model_folder)
    assert facts.num_repeated == 0 and 20 <= facts.num_validation_samples <= 22
    assert not set(decoded(store.train, model_folder)) & set(decoded(store.validation, model_folder))
    facts, _, lines = run(make_config(write_rows(QUESTIONS[:1] * 40, "same.jsonl")), model_folder)
    assert (facts.num_samples, facts.num_validation_samples) == (40, 0)
    assert "no sample is held out for validation: each has so many copies that they are over a tenth of all" in lines


def test_the_number_that_is_held_out_is_the_one_that_is_named(write_rows, make_config, model_folder: Path) -> None:
    """Of four rows with four copies each none is held out, as its copies would be trained."""
    first, second = write_rows(QUESTIONS[:64], "a.jsonl"), write_rows(QUESTIONS[64:68] * 4, "b.jsonl")
    config = make_config(first)
    both = config.data.model_copy(update={"train": (str(first), str(second))})
    facts, _, lines = run(config.model_copy(update={"data": both}), model_folder)
    assert facts.num_validation_samples == 6
    assert any(line.startswith("only 6 samples held out for validation instead of 8: others have") for line in lines)


def test_too_long_rows(write_rows, make_config, model_folder: Path) -> None:
    rows = [*QUESTIONS[:50], {"question": "a", "answer": "word " * 300}, {"question": "word " * 300, "answer": "b"}]
    path = write_rows(rows)
    with pytest.raises(UserError, match=r"2 rows are longer than data.max_length") as caught:
        run(make_config(path, max_length=100), model_folder)
    (detail,) = caught.value.details
    assert "train.jsonl:51:" in detail and detail.endswith("(1 more: 52)")
    assert "truncate" in str(caught.value) and "the longest row has" in str(caught.value)
    with pytest.raises(UserError, match="1 row cannot be trained") as caught:
        run(make_config(path, max_length=100, too_long="truncate"), model_folder)
    assert "train.jsonl:52: no loss token is left after cutting at 100 tokens: raise data.max_length" in str(
        caught.value
    )
    facts, _, lines = run(
        make_config(write_rows(rows[:51], "b.jsonl"), max_length=100, too_long="truncate"), model_folder
    )
    assert facts.num_truncated == 1 and facts.max_length == 100 and "1 sample cut at 100 tokens" in lines
    with pytest.raises(UserError, match="task: cpt"):
        run(make_config(path, too_long="split"), model_folder)


def test_long_text_is_split_and_no_target_is_lost(tmp_path: Path, make_config, plain_folder: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("Hello there, " * 400 + "\n\n\n" + "Fine.\nBye\n\nHi")
    facts, store, lines = run(
        make_config(path, task="cpt", max_length=64, too_long="split", validation_fraction=0), plain_folder
    )
    tokenizer_ids = [store.train.sample(index)["tokens"] for index in range(store.train.num_samples)]
    whole, _, _ = run(make_config(path, task="cpt", max_length=100_000, validation_fraction=0), plain_folder)
    assert whole.num_samples == 3 and facts.num_split == 1 and facts.num_loss_tokens == whole.num_loss_tokens
    assert facts.max_length == 64 and all(a[-1] == b[0] for a, b in pairwise(tokenizer_ids[:-2]))
    assert "1 document split" in "\n".join(lines)


def test_refused_rows_are_listed_with_file_line_and_reason(write_rows, make_config, model_folder: Path) -> None:
    bad = [{"question": "a"}, {"question": "a", "answer": 5}]
    with pytest.raises(UserError, match="30 rows cannot be trained") as caught:
        run(make_config(write_rows(QUESTIONS[:100] + bad * 15)), model_folder)
    first, second = caught.value.details
    assert first.endswith(
        "train.jsonl:101: no field answer (fields found: question) (14 more: 103, 105, 107, 109, ...)"
    )
    assert second.endswith("train.jsonl:102: answer must be a string, this is int (14 more: 104, 106, 108, 110, ...)")


def test_task_format_and_template_must_fit(write_rows, make_config, model_folder: Path, plain_folder: Path) -> None:
    messages = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 3
    for rows in (messages, QUESTIONS):
        with pytest.raises(UserError, match="no chat template") as caught:
            run(make_config(write_rows(rows)), plain_folder)
        assert "model.chat_template" in str(caught.value)
    with pytest.raises(UserError, match="task cpt cannot use rows of the format messages"):
        run(make_config(write_rows(messages), task="cpt"), model_folder)
    with pytest.raises(UserError, match="task sft cannot use rows of the format text"):
        run(make_config(write_rows([{"text": "a"}] * 3)), model_folder)
    prompts = [{"prompt": f"Hello {n}", "completion": " Bye"} for n in range(4)]
    facts, store, _ = run(make_config(write_rows(prompts)), plain_folder)
    assert decoded(store.train, plain_folder)[0].endswith(" Bye</s>") and facts.num_samples == 4
    template = write_rows([], "t.jinja")
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}")
    _, store, _ = run(make_config(write_rows(messages), model={"chat_template": str(template)}), plain_folder)
    assert decoded(store.train, plain_folder)[0] == "user: a</s>assistant: b</s>"
    with pytest.raises(UserError, match="no such chat template"):
        run(make_config(write_rows(messages), model={"chat_template": "none.jinja"}), plain_folder)
    with pytest.raises(UserError, match="has no tokenizer"):
        run(make_config(write_rows(messages)), template.parent)


KILLED = """
import sys, os
from pathlib import Path
from manyhands.config.schema import RunConfig
from manyhands.data.tokenize import prepare
from manyhands.data.store import segment
append = segment.SegmentWriter.append
def slow(self, *arguments):
    append(self, *arguments)
    if self.num_samples == 100:
        self._files["tokens"].flush()
        print("half", flush=True)
        sys.stdin.read()
segment.SegmentWriter.append = slow
prepare.prepare(RunConfig.model_validate_json(sys.argv[1]), sys.argv[2])
print("done", flush=True)
"""


def start_half(config, folder: Path) -> subprocess.Popen[str]:
    """Another process that stands still in the middle of its preparation, until its input is closed."""
    command = [sys.executable, "-c", KILLED, config.model_dump_json(), str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "half\n"
    return process


@pytest.mark.ci
def test_a_killed_preparation_leaves_nothing_that_counts(
    write_rows, make_config, model_folder: Path, monkeypatch
) -> None:
    config = make_config(write_rows(QUESTIONS))
    process = start_half(config, model_folder)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    cache = Path(config.data.cache)
    (left,) = cache.iterdir()
    assert left.name.startswith(UNFINISHED) and next(left.rglob("tokens.bin")).stat().st_size > 0
    facts, _, lines = run(config, model_folder)
    assert facts.num_samples == 180 and "tokenized 200 samples" in lines[0]
    assert left.exists()  # too young to be taken for abandoned
    for path in (*left.rglob("*"), left):
        os.utime(path, (time.time() - 7200,) * 2)
    run(make_config(Path(config.data.train), seed=5), model_folder)
    assert not left.exists()


@pytest.mark.ci
def test_two_preparations_at_once(write_rows, make_config, model_folder: Path) -> None:
    config = make_config(write_rows(QUESTIONS))
    process = start_half(config, model_folder)
    facts, store, _ = run(config, model_folder)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and output.endswith("done\n")
    assert [path.name for path in Path(config.data.cache).iterdir()] == [facts.digest]
    assert store.train.num_samples == 180


def flip_a_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-3] ^= 4
    path.write_bytes(raw)


DAMAGES = {
    "cut short": lambda folder: os.truncate(folder / "tokens.bin", 100),
    "another token": lambda folder: flip_a_bit(folder / "tokens.bin"),
    "another mask": lambda folder: flip_a_bit(folder / "mask.bin"),
    "other rows": lambda folder: flip_a_bit(folder / "train.npy"),
    "other bounds": lambda folder: flip_a_bit(folder / "tokens_offsets.npy"),
    "no rows": lambda folder: np.save(folder / "train.npy", np.empty(0, np.int64)),
    "another seed": lambda folder: (folder / "meta.json").write_text(
        (folder / "meta.json").read_text().replace('"seed": 0', '"seed": 1')
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_made_again(damage: str, write_rows, make_config, model_folder: Path) -> None:
    config = make_config(write_rows(QUESTIONS))
    facts, _, _ = run(config, model_folder)
    folder = Path(facts.folder)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    DAMAGES[damage](folder)
    again, _, lines = run(config, model_folder)
    assert again == facts and "made again" in lines[0]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole


def test_damaged_tokens_are_not_taken_over_by_another_choice_of_rows(
    write_rows, make_config, model_folder: Path
) -> None:
    path = write_rows(QUESTIONS)
    facts, _, _ = run(make_config(path), model_folder)
    flip_a_bit(Path(facts.folder) / "tokens.bin")
    _, _, lines = run(make_config(path, max_samples=30), model_folder)
    assert not any("tokens cached" in line for line in lines) and any(
        line.startswith("tokenized 200 samples") for line in lines
    )


def test_a_file_that_changes_while_it_is_read_is_refused(
    write_rows, make_config, model_folder: Path, monkeypatch
) -> None:
    path = write_rows(QUESTIONS)
    tokenize = prepare_module.tokenize_parts

    def change(*arguments):
        os.utime(path, (1, 1))
        return tokenize(*arguments)

    monkeypatch.setattr(prepare_module, "tokenize_parts", change)
    with pytest.raises(UserError, match="changed while it was read"):
        run(make_config(path), model_folder)
    assert list((path.parent / "cache").iterdir()) == []


def test_no_room_for_the_cache(write_rows, make_config, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="token cache cannot be written"):
        run(make_config(write_rows(QUESTIONS), cache=str(tmp_path / "file" / "cache")), model_folder)


@pytest.mark.ci
@pytest.mark.real
def test_gsm8k(make_config, smollm2: Path) -> None:
    path = os.environ.get("MANYHANDS_GSM8K", "")
    if not Path(path).is_file():
        pytest.skip("MANYHANDS_GSM8K names no train.jsonl of GSM8K")
    start = time.perf_counter()
    facts, store, lines = run(make_config(Path(path)), smollm2)
    print(f"\n{lines} in {time.perf_counter() - start:.1f} s with loading the tokenizer")
    assert facts.num_samples + facts.num_validation_samples == 7473 and facts.num_validation_samples == 149
    assert store.meta["num_straddling_tokens"] == 0
    for index in range(0, facts.num_samples, 500):
        sample = store.train.sample(index)
        ids, trained = sample["tokens"], sample["mask"]
        first = int(np.argmax(trained))
        assert trained[first:-1].all() and not trained[-1]  # the answer and its marker, not the line end behind it
        assert prompt_of(sample).tolist() == ids[:first].tolist()


def test_a_damaged_store_that_another_process_has_made_again_is_kept(
    write_rows, make_config, model_folder: Path, monkeypatch
) -> None:
    """Two runs find the same damage; the slower one must not remove what the faster one has published."""
    config = make_config(write_rows(QUESTIONS))
    facts, _, _ = run(config, model_folder)
    folder = Path(facts.folder)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    flip_a_bit(folder / "tokens.bin")
    open_store, seen = TokenStore.open, []

    def open_and_mend(path: Path, *, check_tokens: bool = False) -> TokenStore:
        try:
            return open_store(path, check_tokens=check_tokens)
        except UserError:
            if not seen:  # the other run is done just after this one has seen the damage
                seen.append(path)
                (folder / "tokens.bin").write_bytes(whole["tokens.bin"])
            raise

    monkeypatch.setattr(TokenStore, "open", staticmethod(open_and_mend))
    again, _, lines = run(config, model_folder)
    assert seen and again == facts and "made again" not in lines[0] and lines[0].startswith("tokens cached")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_a_store_that_another_start_removes_is_not_called_damaged(write_rows, make_config, model_folder, monkeypatch):
    config, lines, open_store = make_config(write_rows(QUESTIONS)), [], TokenStore.open
    folder = Path(prepare(config, model_folder, lines.append).folder)
    lines.clear()
    monkeypatch.setattr(TokenStore, "open", staticmethod(lambda *a, **k: (remove(folder), open_store(*a, **k))[1]))
    with pytest.raises(UserError):  # it is removed each time it is opened
        prepare(config, model_folder, lines.append)
    assert lines[-1].startswith("tokenized") and not any("damaged" in line for line in lines)
