"""What ``mh.train`` refuses before anything is started, and what reaches the launcher."""

from __future__ import annotations

import io
import re
import signal
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import manyhands as mh
from manyhands.api.callbacks import Callbacks, Follower
from manyhands.api.display import NotebookDisplay
from manyhands.launch.local.workers import report_end
from manyhands.launch.run.folder import RunFolder


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    """A run that its launcher refuses, as there is no such model."""
    return {"name": "none", "model": {"name": str(tmp_path / "none")}, "data": {"train": "none.jsonl"},
            "output": {"dir": str(tmp_path / "runs")}}  # fmt: skip


@pytest.mark.parametrize("hooks", [(), ["module:name"]], ids=["", "hooks"])
def test_a_fresh_run_reaches_the_launcher(keys: dict[str, Any], hooks: Any) -> None:
    with pytest.raises(mh.UserError, match="is not a folder"):
        mh.train(keys, fresh=True, hooks=hooks)


def raising(row: dict[str, Any]) -> None:
    raise ValueError("the cat sat\non the keyboard")


def test_what_a_callback_raised_is_the_reason_in_status_and_log(tmp_path: Path) -> None:
    folder, callbacks, log = RunFolder(tmp_path), Callbacks({"evaluation": raising}), io.StringIO()
    folder.create()
    callbacks({"kind": "evaluation", "step": 1})
    callbacks.explain(folder, log)
    said: list[str] = []
    assert report_end(folder, signal.SIGINT, said.append, leads=True) == 130
    reason = "on_evaluate raised ValueError: the cat sat on the keyboard"
    assert folder.read_status()["reason"] == reason and said[0].startswith(f"{reason}: the run has ended")
    assert "in raising" in log.getvalue() and "ValueError: the cat sat" in log.getvalue()


def test_ctrl_c_in_a_callback_is_ctrl_c(tmp_path: Path) -> None:
    folder, callbacks = RunFolder(tmp_path), Callbacks({"step": lambda row: signal.raise_signal(signal.SIGINT)})
    folder.create()
    callbacks({"kind": "step", "step": 1})
    callbacks.explain(folder, io.StringIO())
    report_end(folder, signal.SIGINT, lambda text: None, leads=True)
    assert isinstance(callbacks.error, KeyboardInterrupt) and folder.read_status()["reason"] == "SIGINT"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpus": 2, "overrides": {"parallel.gpus": 1}}, r"gpus=2 and overrides parallel\.gpus=1"),
        ({"gpus": 2.0}, "gpus is 2.0"),
        ({"gpus": [0, 1]}, r"gpus is \[0, 1\]"),
        ({"gpus": True}, "gpus is True"),
        (
            {"train_data": [{"text": "a"}], "overrides": {"data.train": "a.jsonl"}},
            "train_data and overrides data.train",
        ),
        ({"on_step": 3}, "on_step is a int"),
        ({"hooks": "module:name"}, "hooks is a str"),
        ({"metrics": ["module:name"]}, "metrics is a list"),
        ({"hooks": [3]}, "int cannot be imported by the ranks"),
    ],
)
def test_wrong_and_contradicting_arguments_are_refused(
    keys: dict[str, Any], tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    keys["data"]["cache"] = str(tmp_path / "cache")
    with pytest.raises(mh.UserError, match=says):
        mh.train(keys, **options)
    if set(options) <= {"gpus", "overrides", "train_data"}:
        with pytest.raises(mh.UserError, match=says):
            mh.plan(keys, **options)


def test_gpus_of_a_kind_and_their_number(keys: dict[str, Any]) -> None:
    with pytest.raises(mh.UserError, match=r"gpus=8 and overrides parallel\.gpus=4"):
        mh.plan(keys, {"parallel.gpus": 4}, gpus="8xH200")
    for gpus in ("auto", 1, "8xH200"):  # as far as the model
        with pytest.raises(mh.UserError, match="is not a folder"):
            mh.plan(keys, gpus=gpus)


def test_rows_of_a_damaged_file_are_skipped(tmp_path: Path) -> None:
    """As a killed launch, or a disk, may leave it to the next one."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"kind": "st\n\xff\n[1]\n{}\n{"kind": "step", "step": 1, "loss": 2.0, "time": 1}\n{"kind": "st')
    follower = Follower(path)
    with path.open("ab") as file:
        file.write(b'ep", "step": 2, "loss": 1.0, "time": 2}\nnothing\n')
    assert [row["step"] for row in follower.read()] == [2]
    assert mh.TrainedRun(tmp_path).losses == [2.0, 1.0]


def test_a_damaged_report_is_named(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text('{"planned": ')
    with pytest.raises(mh.UserError, match="the run's report is damaged"):
        _ = mh.TrainedRun(tmp_path).report


def test_a_notebook_shows_the_curve_of_the_loss_and_its_evaluations(tmp_path: Path) -> None:
    shown = NotebookDisplay()
    shown.num_steps = 2000
    for step in range(1, 1001):
        row = {"kind": "step", "step": step, "loss": None if step == 7 else 4 - step / 500, "seconds": 0.5}
        shown.step = row | {"tokens_per_s": 10.0, "devices": []}
        shown._shown = float("inf")  # no kernel
        shown.take(shown.step)
    shown.take({"kind": "evaluation", "step": 1000, "loss": 2.5, "perplexity": 12.2})
    drawing = ElementTree.fromstring(re.findall("<svg.*</svg>", shown._repr_html_())[0])
    line, point = drawing
    places = [tuple(map(float, place.split(","))) for place in line.attrib["points"].split()]
    assert len(places) == 250 and places == sorted(places), "from left to right, ever lower"
    assert places[-1][0] == float(point.attrib["cx"]) == 200 and float(point.attrib["cy"]) < places[-1][1]
    assert "loss 2.0000" in shown._repr_html_() and "held-out loss 2.5000" in shown._repr_html_()
    assert NotebookDisplay()._curve() == ""
