"""A repository's root as a reader of a guide stands in it, and a tiny run there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.runs import write_place
from tests.support.zygote import forking

ROOT = Path(__file__).parents[2]
FAST = "stop.max_steps=2 evaluate.max_tokens=200"

Call = Callable[..., subprocess.CompletedProcess[str]]


def environment(**more: str) -> dict[str, str]:
    """Without what `make test` hands on to the makes below it, and without a user's own accelerate configuration."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    paths = {"PYTHONPATH": str(ROOT / "src"), "MANYHANDS_PYTHON": sys.executable, "HF_HOME": "/nonexistent/hf"}
    return {**inherited, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **paths, **more}


def call(*command: str, cwd: Path = ROOT, **more: str) -> subprocess.CompletedProcess[str]:
    """The command in the root, its output in one text, in at most four minutes."""
    variables = environment(**more)
    with forking(variables):
        return subprocess.run(
            command,
            cwd=cwd,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )


def make(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return call("make", *arguments, **more)


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model/, rows.jsonl and the run file run.yaml: LoRA, 12 steps."""
    folder = tmp_path_factory.mktemp("guides")
    write_place(folder)
    return folder
