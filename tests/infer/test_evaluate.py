"""``manyhands eval``: losses beside a few lines of plain transformers, answers judged alone, the base beside it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from manyhands.config.schema import PreferenceSection
from manyhands.core.errors import UserError
from manyhands.export.adapter import export_adapter
from manyhands.infer.compare import (
    _recorded,
    choose_data,
    compare,
    describe,
    explain_no_validation,
    output_folder,
    render_page,
    to_json,
    write_files,
)
from manyhands.infer.evaluate import Evaluator, judge_pairs, last_turn, sum_losses
from manyhands.infer.load import find_parts, open_answerer
from manyhands.infer.replicas import DeviceSlot, Placement
from manyhands.infer.settings import GenerationSettings
from manyhands.launch.run.folder import RunFolder
from tests.export.tiny import METHOD, adapt
from tests.launch.builders import make_config
from tests.support.plans import make_plan
from tests.support.tiny import tiny_model, write_tiny_model
from tests.support.zygote import forking

QUESTIONS = ("alpha?", "beta, and what follows?", "gamma delta", "what is <b>bold</b>?")
SETTINGS = GenerationSettings(max_new_tokens=10)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("evaluate")
    write_tiny_model(root / "base", "llama")
    export_adapter(root / "adapter", adapt(tiny_model("llama")), METHOD, str(root / "base"), rank=0)
    return root


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where data.cache is by default


def test_why_there_are_no_validation_samples() -> None:
    """The default holds a fraction out, of ten samples and more."""
    assert explain_no_validation(make_config(data={"train": "a.jsonl"}), 2).endswith(
        "and of so few samples (2), or copies of a few, none was held out"
    )
    none = make_config(data={"train": "a.jsonl", "validation_fraction": 0.0})
    assert explain_no_validation(none, 2) == "data.validation is not set and data.validation_fraction is 0"


def write_data(path: Path, answers: list[str]) -> str:
    rows = [{"question": q, "answer": a} for q, a in zip(QUESTIONS, answers, strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def reference_loss(folder: Path, base: Path, answers: list[str]) -> tuple[float, float]:
    """(mean over loss tokens, share that is the arg max) by the chat template, one sample after another."""
    answerer = open_answerer(folder, str(base))
    total = correct = count = 0.0
    for question, answer in zip(QUESTIONS, answers, strict=True):
        asked = [{"role": "user", "content": question}]
        prompt = answerer.encode(asked)
        whole = answerer.tokenizer.apply_chat_template(
            [*asked, {"role": "assistant", "content": answer}], tokenize=False
        )
        ids = torch.tensor([answerer.tokenizer.encode(whole.removesuffix("\n"), add_special_tokens=False)])
        logits = answerer.model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        labels = ids[0, len(prompt) :]
        total += cross_entropy(logits, labels, reduction="sum").item()
        correct += (logits.argmax(-1) == labels).sum().item()
        count += len(labels)
    return total / count, correct / count


def test_losses_are_means_over_loss_tokens_and_the_base_stands_beside(place: Path, tmp_path: Path) -> None:
    answers = ["one", "two three four", "five", "six seven eight nine ten"]
    found = compare(place / "adapter", data=write_data(tmp_path / "rows.jsonl", answers), base=str(place / "base"))
    for name in ("measured", "base"):
        folder = place / ("adapter" if name == "measured" else "base")
        loss, accuracy = reference_loss(folder, place / "base", answers)
        figures = found.columns[name]
        assert figures["loss"] == pytest.approx(loss, rel=1e-5) and figures["accuracy"] == pytest.approx(accuracy)
        assert figures["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert found.columns["measured"] != found.columns["base"]
    assert found.scores.num_samples == 4
    lines = describe(found).splitlines()
    assert lines[1].split() == ["base", "model", "this", "model"] and lines[2].startswith("loss")
    assert list(compare(place / "base", data=str(tmp_path / "rows.jsonl"), metrics=["loss"]).columns) == ["measured"]


def test_the_answer_alone_is_judged(place: Path, tmp_path: Path) -> None:
    own = [open_answerer(place / "base").answer([{"role": "user", "content": q}], 10) for q in QUESTIONS]
    assert all(own)
    given = [own[0], own[1] + " and more", QUESTIONS[2], own[3]]  # the third: what the prompt says, not the answer
    data = write_data(tmp_path / "rows.jsonl", given)
    metrics = ["exact_match", "loss", "rougeL", "f1"]
    found = compare(place / "base", data=data, metrics=metrics, settings=SETTINGS)
    assert list(found.columns["measured"]) == metrics and found.columns["measured"]["exact_match"] == 0.5
    judged = found.scores.answers
    assert [one.scores["exact_match"] for one in judged] == [1, 0, 0, 1]
    assert [one.answer for one in judged] == own and [one.reference for one in judged] == given
    assert all(q in one.prompt for q, one in zip(QUESTIONS, judged, strict=True))
    few = compare(place / "base", data=data, metrics=["exact_match"], settings=SETTINGS, limit=1)
    assert few.columns["measured"]["exact_match"] == 1 and len(few.scores.answers) == 1
    page = render_page(found)
    assert "<b>bold" not in page and "&lt;b&gt;bold" in page and page.count("<article>") == 4
    written = write_files(found, tmp_path / "out")
    assert [path.name for path in written] == ["figures.json", "samples.jsonl", "samples.html"]
    assert json.loads(written[0].read_text())["exact_match"] == 0.5 == to_json(found)["exact_match"]
    assert [json.loads(line)["answer"] for line in written[1].read_text().splitlines()] == own


def test_what_is_extracted_is_compared(place: Path, tmp_path: Path) -> None:
    own = open_answerer(place / "base").answer([{"role": "user", "content": QUESTIONS[0]}], 10)
    letter = next(character for character in own if character.isalpha())
    data = write_data(tmp_path / "rows.jsonl", [f"so it is {letter}", "1", "2", "3"])
    options: dict[str, Any] = dict(data=data, metrics=["exact_match"], settings=SETTINGS, limit=1)
    assert compare(place / "base", **options).columns["measured"]["exact_match"] == 0
    assert compare(place / "base", **options, extract=f"({letter})").columns["measured"]["exact_match"] == 1


@pytest.mark.slow
def test_the_number_of_copies_changes_no_bit(place: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "rows.jsonl", ["one", "two three four", "five", "six seven eight nine ten"])
    options: dict[str, Any] = dict(data=data, metrics=["loss", "accuracy", "exact_match", "f1"], settings=SETTINGS)
    one = compare(place / "base", **options)
    with forking():
        two = compare(place / "base", **options, placement=Placement(processes=2))
    assert one.columns == two.columns and one.scores.answers == two.scores.answers


def test_the_batch_size_that_is_asked_for_bounds_the_answers(place: Path, tmp_path: Path) -> None:
    data = write_data(tmp_path / "rows.jsonl", ["one", "two", "three", "four"])
    found = compare(place / "base", data=data, metrics=["loss"], with_base=False)
    given: dict[str, Any] = dict(found=find_parts(place / "base"), data=found.data, settings=SETTINGS, num_replicas=1)
    assert Evaluator(DeviceSlot(), placement=Placement(batch_size=3), **given).capacity.max_rows == 3


def test_a_divided_model_gives_the_same_sums(place: Path, tmp_path: Path) -> None:
    from manyhands.data.store.store import TokenStore

    data = write_data(tmp_path / "rows.jsonl", ["one", "two", "three", "four"])
    found = compare(place / "base", data=data, metrics=["loss"])
    samples, model = TokenStore.open(found.data.folder).train, open_answerer(place / "base").model
    expected = sum_losses(model, samples, np.arange(4))
    model.hf_device_map = {"": 0}
    assert sum_losses(model, samples, np.arange(4)) == pytest.approx(expected, rel=1e-6)


def test_the_last_turn_is_what_is_asked() -> None:
    sample = {"tokens": np.arange(10, 19), "mask": np.array([0, 0, 1, 1, 0, 0, 1, 1, 0], dtype=bool)}
    turn = last_turn(sample)
    assert turn is not None and (turn[0].tolist(), turn[1].tolist()) == ([10, 11, 12, 13, 14, 15], [16, 17])
    assert last_turn({"tokens": np.arange(3), "mask": np.ones(3, dtype=bool)}) is None
    assert last_turn({"tokens": np.arange(3), "mask": np.zeros(3, dtype=bool)}) is None


@pytest.mark.parametrize(("loss", "margins"), [("sigmoid", [0.1, -0.3]), ("cpo", [0.2, -0.2]), ("simpo", [0.3, -0.05])])
def test_pairs_are_judged_by_the_rewards_of_the_loss(loss: str, margins: list[float]) -> None:
    """Two pairs, of each answer its log-probability and its tokens; beta is 0.1."""
    pairs = np.array([[[-2.0, 2], [-4.0, 1]], [[-5.0, 5], [-3.0, 6]]])
    before = np.array([[[-2.0, 2], [-3.0, 1]], [[-5.0, 5], [-6.0, 6]]]) if loss == "sigmoid" else None
    found = judge_pairs(PreferenceSection(loss=loss), pairs, before)
    assert found == pytest.approx({"preference_accuracy": 0.5, "reward_margin": sum(margins) / 2})


def test_what_the_run_recorded_before_and_after(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.create()
    run.write_config(make_config())
    row = {"kind": "evaluation", "perplexity": 2.0, "accuracy": 0.5, "num_samples": 1, "num_tokens": 2}
    row |= {"num_loss_tokens": 1, "seconds": 1.0, "samples": [], "terms": {}}
    rows = [row | {"step": step, "loss": loss} for step, loss in ((0, 3.0), (5, 2.0), (9, 2.9))]
    rows[-1]["terms"] = {"lm": 2.5, "balance": 4.0}  # eval measures the first alone
    run.metrics.write_text("".join(json.dumps(one) + "\n" for one in rows))
    run.report_json.write_text(json.dumps({"measured": {"steps": 9}}))
    columns, step = _recorded(run, None)
    assert step == 9 and {name: figures["loss"] for name, figures in columns.items()} == {"before": 3.0, "after": 2.5}
    assert _recorded(run, 100) == ({}, None)  # other samples than the run's


def test_a_file_may_lack_a_column_that_the_run_leaves_out(place: Path, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.create()
    data = {"train": "a.jsonl", "ignore": ("score",), "cache": str(tmp_path / "cache")}
    config = make_config(task="cpt", data=data, evaluate={"data": {"other": "gone.jsonl"}})
    run.write_config(config)
    run.write_plan(make_plan(config_digest=config.digest, model_folder=str(place / "base")))
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "w1 w2 w3"}\n')
    found = choose_data(find_parts(place / "base"), run, run.path, str(file), None)
    assert found.open().num_samples == 1


def test_what_cannot_be_evaluated_is_explained(place: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no samples to evaluate on") as refused:
        compare(place / "base")
    assert refused.value.fix == "give a file: --data FILE"
    (tmp_path / "text.jsonl").write_text('{"text": "only a text"}\n')
    with pytest.raises(UserError, match="no sample has a prompt"):
        compare(place / "base", data=str(tmp_path / "text.jsonl"), metrics=["exact_match"])
    assert compare(place / "base", data=str(tmp_path / "text.jsonl"), metrics=["loss"]).scores.num_loss_tokens > 5
    with pytest.raises(UserError):
        compare(place / "base", data=str(tmp_path / "missing.jsonl"))
    assert output_folder(Path("runs/a"), "x/my rows.jsonl") == Path("runs/a/eval/my-rows")
