"""Hooks and metrics of the user's: found by name in every rank, refused where they cannot be, part of an evaluation."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import manyhands as mh
from manyhands.api.callbacks import name_object
from manyhands.core.references import import_reference
from manyhands.training.types import Evaluation, Hook, TrainState
from manyhands.worker.hooks import read_hooks

SOURCE = """
from manyhands.training.types import Hook
def longest(evaluation): return max((len(answer) for _, answer in evaluation.samples), default=0)
def watch(rank): return Hook()
def nothing(rank): return None
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / f"hooks_of_{tmp_path.name}.py"
    path.write_text(SOURCE)
    return path


def evaluation(*answers: str) -> Evaluation:
    samples = tuple(("prompt", answer) for answer in answers)
    return Evaluation(1, 2.0, {"perplexity": 7.4, "accuracy": 0.5}, 1, 1, 1, 0.1, samples=samples)


def rank(is_first: bool = True) -> Any:
    return SimpleNamespace(is_first=is_first, print=lambda text: None)


def test_references(file: Path) -> None:
    assert import_reference("collections:Counter.most_common") is Counter.most_common
    assert import_reference(f"{file}:longest") is import_reference(f"{file}:longest")
    assert import_reference(len) is len
    for wrong in ("no_such_module:x", "collections:nothing", f"{file}:missing", "/none.py:x", "collections"):
        with pytest.raises(mh.UserError, match="cannot be imported"):
            import_reference(wrong)


def test_files_of_the_same_name_in_two_folders(tmp_path: Path) -> None:
    found = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "hooks.py").write_text(f"NAME = {folder!r}\n")
        found.append(import_reference(f"{tmp_path / folder / 'hooks.py'}:NAME"))
    assert found == ["a", "b"]


def test_names() -> None:
    assert name_object("a:b") == "a:b"
    assert name_object(Counter) == "collections:Counter"
    assert import_reference(name_object(json.dumps)) is json.dumps
    with pytest.raises(mh.UserError, match="cannot be imported by the ranks") as error:
        name_object(lambda evaluation: 1)
    assert "a lambda has no name" in error.value.why


def test_what_a_notebook_defines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def cell() -> None: ...

    cell.__module__, cell.__qualname__ = "__main__", "cell"
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    with pytest.raises(mh.UserError, match="cannot be imported") as error:
        name_object(cell)
    assert "notebook" in error.value.why and "%%writefile" in error.value.fix


def test_metrics_are_figures_of_rank_0(file: Path) -> None:
    [make] = read_hooks([], [f"longest={file}:longest"])
    assert make(rank()).measure(TrainState(step=1), evaluation("a", "abc")) == {"longest": 3.0}
    assert make(rank(is_first=False)).measure(TrainState(step=1), evaluation()) == {}
    [numpy] = read_hooks([], {"score": lambda evaluation: np.float32(0.5)})
    assert numpy(rank()).measure(TrainState(step=1), evaluation()) == {"score": 0.5}
    [wrong] = read_hooks([], {"text": lambda evaluation: "much"})
    with pytest.raises(mh.UserError, match="the metric 'text' is a str, not a number"):
        wrong(rank()).measure(TrainState(step=1), evaluation())


def test_hooks_are_made_of_the_context(file: Path) -> None:
    seen: list[Any] = []

    def watch(context: Any) -> Hook:
        seen.append(context)
        return Hook()

    here = rank()
    assert [type(make(here)) for make in read_hooks([watch, f"{file}:watch"], None)] == [Hook, Hook]
    assert seen == [here]
    with pytest.raises(mh.UserError, match="nothing returned a NoneType, not a hook"):
        read_hooks([f"{file}:nothing"], None)[0](here)
