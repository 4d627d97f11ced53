"""The guide's code trains under each launcher, with two processes, and to the same losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.api.guide_script import GUIDE, blocks, write_place
from tests.e2e.runs import free_port

pytestmark = pytest.mark.skipif(GUIDE is None, reason="MANYHANDS_GUIDES names no folder with the guides")
LAUNCHERS = {
    "python": (),
    "torchrun": ("-m", "torch.distributed.run", "--nproc_per_node=2"),
    "accelerate": ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2",
                   "--main_process_port", "PORT"),
}  # fmt: skip
SAME: dict[str, Any] = {}


def call(folder: Path, *command: str) -> str:
    """The command in the folder, whose cache is there too; two processes where nothing else decides."""
    variables = {**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1", "MANYHANDS_NUM_PROCESSES": "2",
                 "HF_HOME": "/nonexistent/hf", "IPYTHONDIR": str(folder / "ipython")}  # fmt: skip
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check(result: dict[str, Any]) -> None:
    """Every launcher comes to the first one's result."""
    assert (result["world"], result["batches"], result["effective"], result["rate"]) == ([2, 2], [16, 16], 16, 2e-4)
    assert [len(losses) for losses in result["losses"]] == [3, 3] and isinstance(result["answer"], str)
    assert result["losses"][1][0] < result["losses"][0][-1], "the second trainer goes on from the first one's adapter"
    assert result == SAME.setdefault("result", result)


def test_the_guide_has_the_blocks_that_are_run() -> None:
    assert len(blocks()) == 8


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_guides_code_runs(tmp_path: Path, launcher: str) -> None:
    command = [str(free_port()) if word == "PORT" else word for word in LAUNCHERS[launcher]]
    output = call(write_place(tmp_path), sys.executable, *command, "guide.py")
    [line] = [line for line in output.splitlines() if line.startswith("RESULT ")]
    check(json.loads(line.removeprefix("RESULT ")))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_guides_code_runs_in_a_notebook_with_progress(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    text = (write_place(tmp_path) / "guide.py").read_text()
    setup, training = text.split("# Start training", 1)
    book = nbformat.v4.new_notebook()
    environment = f"import os; os.environ |= {{'HOME': {str(tmp_path)!r}, 'MANYHANDS_NUM_PROCESSES': '2'}}\n"
    book.cells = [nbformat.v4.new_code_cell(environment + setup), nbformat.v4.new_code_cell(training)]
    nbclient.NotebookClient(book, timeout=560, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = book.cells[1].outputs
    printed = "".join(output.get("text", "") for output in outputs)
    [line] = [line for line in printed.splitlines() if line.startswith("RESULT ")]
    check(json.loads(line.removeprefix("RESULT ")))
    bars = [output["data"]["text/html"] for output in outputs if output.output_type == "display_data"]
    assert len(bars) == 2 and all('<progress value="3" max="3"' in bar for bar in bars)
    assert "\x1b[" not in printed and "\nstep 1/3" not in printed
