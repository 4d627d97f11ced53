"""A plan needs no more of a model than its config.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.facts import hub
from tests.support.tiny import write_tiny_model

ROWS = {
    "messages": {"messages": [{"role": "user", "content": "a" * 40}, {"role": "assistant", "content": "b" * 40}]},
    "prompt": {"prompt": "a" * 40, "completion": "b" * 40},
    "text": {"text": "a\nb" * 40},
    "ids": {"input_ids": list(range(10)), "labels": list(range(10))},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("config-alone")
    write_tiny_model(folder / "model")
    (folder / "config").mkdir()
    shutil.copyfile(folder / "model" / "config.json", folder / "config" / "config.json")
    for name, row in ROWS.items():
        (folder / f"{name}.jsonl").write_text((json.dumps(row) + "\n") * 12)
    return folder


def plan(folder: Path, rows: str, **keys: object) -> mh.Plan:
    run = {
        "model": {"name": str(folder / "config")},
        "task": "cpt" if rows == "text" else "sft",
        "data": {"train": str(folder / f"{rows}.jsonl"), "cache": str(folder / "cache")},
        "parallel": {"device": "cpu"},
        "output": {"dir": str(folder / "runs")},
    }
    return mh.plan(run, keys)


@pytest.mark.parametrize("rows", ROWS)
def test_a_plan_needs_config_json_alone(folder, rows, capsys):
    from_config = plan(folder, rows)
    said = capsys.readouterr().err
    assert "there are no weights" in said and "4 characters to a token" in said and "across" not in said
    whole = plan(folder, rows, **{"model.name": str(folder / "model")})
    assert from_config.num_steps == whole.num_steps
    terms = [made.memory.terms["weights"] for made in (from_config, whole)]
    assert terms[0] == terms[1] > 0 and from_config.layout.strategy == whole.layout.strategy


def test_lengths_are_a_token_for_four_characters(folder):
    [batch] = [why.values for why in plan(folder, "messages").why if why.code == "batch"]
    assert 20 < batch["mean_tokens"] < 40  # 80 characters, and the template's


@pytest.mark.ci
def test_a_run_still_needs_weights_and_tokenizer(folder):
    run = {"model": {"name": str(folder / "config")}, "data": {"train": str(folder / "text.jsonl")}, "task": "cpt"}
    for keys, missing in (({}, "no weights"), ({"model.init": "random"}, "no tokenizer")):
        with pytest.raises(mh.UserError, match=missing):
            mh.train(run, {**keys, "output.dir": str(folder / "runs"), "data.cache": str(folder / "cache")})


def test_a_copy_of_the_hub_with_config_json_alone_is_enough(folder, monkeypatch):
    cached = str(folder / "config" / "config.json")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(mh.UserError, match="could not be found") as refused:
        hub.locate_model("org/none", None, True, config_suffices=True)
    assert "config.json" in refused.value.fix
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: cached)
    assert hub.locate_model("org/none", None, True, config_suffices=True) == folder / "config"
    with pytest.raises(mh.UserError, match="could not be found"):
        hub.locate_model("org/none", None, True)
