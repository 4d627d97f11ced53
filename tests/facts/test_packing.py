"""Whether rows are packed is known before the plan: from measured families, from a probe that runs once, from
neither.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from manyhands import families
from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.facts import model_config as packing
from manyhands.facts.model_config import judge_packing
from manyhands.importers.load import config_from_mapping
from tests.planner.examples import model_facts


def make_config(folder: Path, packing: Any = "auto", **model: Any) -> RunConfig:
    return config_from_mapping(
        {
            "name": "probed",
            "model": {"name": str(folder), **model},
            "data": {"train": "rows.jsonl", "cache": str(folder / "cache"), "packing": packing},
        }
    )


def judge(folder: Path, model_type: str, said: list[str] | None = None, packing: Any = "auto", **fields: Any) -> Any:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type} | fields))
    facts = model_facts().model_copy(update={"model_type": model_type, "folder": str(folder)})
    return judge_packing(make_config(folder, packing), facts, (said if said is not None else []).append)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the probe's process will print, one for each start; more starts than that fail."""
    queue: list[Any] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        answer = queue.pop(0)
        crashed = isinstance(answer, str)
        return subprocess.CompletedProcess(
            command, int(crashed), "" if crashed else json.dumps(answer) + "\n", answer if crashed else ""
        )

    monkeypatch.setattr(packing.subprocess, "run", run)
    return queue


def test_a_measured_family_starts_no_process(tmp_path: Path, answers: list[Any]) -> None:
    for family, other in (("qwen3", "sliding_attention"), ("qwen3_5_text", "linear_attention"), ("lfm2", "conv")):
        facts = judge(tmp_path, family, layer_types=["full_attention", other])
    assert facts.packs and "verified" in facts.packing_reason and not (tmp_path / "cache").exists()


def test_what_is_around_measured_text_must_be_measured_too(tmp_path: Path, answers: list[Any]) -> None:
    facts = model_facts().model_copy(update={"model_type": "gemma", "folder": str(tmp_path)})
    answers.append({"trains": False, "packs": False, "reason": "both directions"})
    for outer in ("llava", "paligemma"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": outer, "text_config": {"model_type": "gemma"}}))
        if outer == "llava":
            assert judge_packing(make_config(tmp_path), facts, print).packs and answers
    with pytest.raises(UserError, match="cannot be trained here"):
        judge_packing(make_config(tmp_path), facts, print)


def test_a_family_that_cannot_pack_says_why(tmp_path: Path, answers: list[Any]) -> None:
    facts = judge(tmp_path, "llama4_text")
    assert not facts.packs and "beginning of a row" in facts.packing_reason


def test_packing_off_asks_nothing(tmp_path: Path, answers: list[Any]) -> None:
    assert judge(tmp_path, "unheard_of", packing=False).packing_reason == ""


@pytest.mark.parametrize("why", ["other layers", "another transformers", "another family"])
def test_what_was_not_measured_is_probed_once(
    tmp_path: Path, answers: list[Any], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    answers.append({"trains": True, "packs": False, "reason": "it leaks"})
    family, fields = ("unheard_of", {}) if why == "another family" else ("llama", {})
    if why == "other layers":
        fields = {"layer_types": ["full_attention", "linear_attention"]}
    if why == "another transformers":
        monkeypatch.setattr(families, "MEASURED_WITH", "4.")
    said: list[str] = []
    for _ in range(2):  # the second time the answer is on disk
        facts = judge(tmp_path, family, said, **fields)
        assert (facts.packs, facts.packing_reason) == (False, "it leaks")
    assert len(said) == 1 and "trying a shrunken copy" in said[0] and answers == []
    answers.append({"trains": True, "packs": True, "reason": "fine"})
    assert judge(tmp_path, family, rope_theta=5.0, **fields).packs  # another configuration is asked again


def test_a_crash_packs_nothing_and_is_not_remembered(tmp_path: Path, answers: list[Any]) -> None:
    answers += ["Traceback ...\nKeyError: 'x'", {"trains": True, "packs": True, "reason": "fine"}]
    facts = judge(tmp_path, "odd")
    assert not facts.packs and "KeyError: 'x'" in facts.packing_reason
    assert judge(tmp_path, "odd").packs


def test_a_family_that_cannot_be_trained_is_refused_before_the_data_is_touched(
    tmp_path: Path, answers: list[Any]
) -> None:
    answers.append({"trains": False, "packs": False, "reason": "a router loss would be dropped"})
    with pytest.raises(UserError, match="cannot be trained here") as caught:
        judge(tmp_path, "odd")
    assert "router loss" in caught.value.why


@pytest.mark.ci
def test_the_real_probe_answers_in_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.support.tiny import tiny_config

    monkeypatch.setattr(families, "MEASURED_WITH", "4.")
    tiny_config("lfm2").save_pretrained(tmp_path)
    facts = model_facts().model_copy(update={"model_type": "lfm2", "folder": str(tmp_path)})
    judged = judge_packing(make_config(tmp_path), facts, lambda _: None)
    assert judged.packs and "same logits" in judged.packing_reason
