"""Commands called in this process, and what they would start."""

from __future__ import annotations

import functools
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import typer.testing
from typer.testing import CliRunner

from manyhands.cli.main import app

# The commands are made of their functions once, not again for each call: a tenth of a second each.
typer.testing._get_command = functools.cache(typer.testing._get_command)


def call(*arguments: object, stdin: str | None = None, **environ: str) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin, env=environ)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("model: {name: org/model}\ndata: {train: rows.jsonl}\n")
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """The configurations that the launcher was asked to start, with its options."""
    calls: list[tuple[Any, dict[str, Any]]] = []
    start = types.SimpleNamespace(start=lambda run, **options: calls.append((run.config, options)) or 0)
    monkeypatch.setitem(sys.modules, "manyhands.launch.local.start", start)
    return calls
