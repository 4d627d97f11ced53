"""The notebook runs from top to bottom in a kernel, with a tiny model; as it is stored it has no outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "quickstart.ipynb"


def text_of(cell: dict) -> str:
    return "".join(cell["source"])


def test_it_is_stored_without_outputs() -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert cells and not any(cell["outputs"] or cell["execution_count"] for cell in cells)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_it_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    from tests.support.tiny import write_tiny_model

    write_tiny_model(tmp_path / "model")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    [parameters] = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    values = {"MODEL": str(tmp_path / "model"), "STEPS": 4, "OUTPUT": str(tmp_path / "runs")}
    assert set(values) == set(re.findall(r"^(\w+) =", parameters.source, re.M))
    parameters.source = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    )
    printed = re.sub(r"\x1b\[\d*m", "", printed)  # in color where a plan is shown
    plans = re.findall(r"^Plan 1 .*\n *(?:device|hardware) +(.*?) *$", printed, re.M)
    assert len(plans) == 2 and "H100" in plans[1], plans
    assert len(re.findall(r"^layout  single, 1 CPU process", printed, re.M)) == 2, printed  # two trainings
    assert len(re.findall(r"loss \d+\.\d+ -> \d+\.\d+, verified: .*adapter", printed)) == 1
    answers = next(cell for cell in notebook.cells if "model = run.load()" in cell.source).outputs[-1]
    assert len(eval(answers["data"]["text/plain"])) == 2  # the text of a list of two answers
    assert (tmp_path / "runs" / "notebook-trainer" / "adapter").is_dir()
