"""``manyhands runs`` and ``prove``: what is listed, compared and deleted; what counts as another result."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.cli import prove, runs, sweep
from manyhands.cli.main import app
from manyhands.cli.prove import LossCurve, compare, parse_layouts
from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.core.files import read_json
from manyhands.launch.run import folder as run_folder
from manyhands.launch.run.folder import RunFolder
from tests.support.zygote import forking

RUNNER = CliRunner()


def write_run(folder: Path, name: str, losses: list[float], *, held_out: float | None = None, rank: int = 16) -> Path:
    config = RunConfig(name=name, model={"name": "org/tiny"}, data={"train": "a.jsonl"}, method={"rank": rank})
    path = folder / name
    path.mkdir(parents=True)
    (path / "run.json").write_text(config.model_dump_json())
    (path / "status.json").write_text(json.dumps({"state": "finished", "time": 1.0}))
    rows = [{"kind": "step", "step": n, "loss": loss, "grad_norm": 1.0} for n, loss in enumerate(losses, 1)]
    if held_out is not None:
        rows.append({"kind": "evaluation", "step": len(losses), "loss": held_out})
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "st')
    return path


def call(*arguments: str) -> str:
    found = RUNNER.invoke(app, ["runs", *arguments])
    assert found.exit_code == 0, found.output
    return found.output


def test_runs_are_listed_with_their_state_and_loss_the_newest_first(tmp_path):
    for name, age in (("old", 100), ("new", 0)):
        path = write_run(tmp_path, name, [3.0, 2.0], held_out=1.5 if name == "new" else None)
        for file in path.iterdir():
            os.utime(file, (1e9 - age, 1e9 - age))
    (tmp_path / "no run").mkdir()
    lines = call("list", "--dir", str(tmp_path)).splitlines()
    assert [line.split()[0] for line in lines] == ["run", "new", "old"]
    assert "1.5000 " in lines[1] and "2.0000 (train)" in lines[2] and "finished" in lines[1]


def test_two_runs_are_compared_by_what_differs(tmp_path):
    write_run(tmp_path, "a", [3.0, 2.0], held_out=1.5)
    write_run(tmp_path, "b", [3.0, 1.0], held_out=1.25, rank=64)
    lines = {
        line.split("  ")[0]: line.split() for line in call("compare", "a", "b", "--dir", str(tmp_path)).splitlines()
    }
    assert lines["method.rank"] == ["method.rank", "16", "64"]
    assert lines["held-out loss, best"][-2:] == ["1.5000", "1.2500"]
    assert not {"name", "method.alpha"} & lines.keys()
    assert lines["training loss of b: █▁"]


def test_runs_with_and_without_a_balance_loss_are_compared_by_the_cross_entropy(tmp_path):
    write_run(tmp_path, "a", [2.0], held_out=1.5)
    rows = [
        {"kind": kind, "step": 1, "loss": 1.7, "terms": {"lm": 1.4, "balance": 3.0}} for kind in ("step", "evaluation")
    ]
    path = write_run(tmp_path, "b", [])
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = call("compare", "a", "b", "--dir", str(tmp_path)).splitlines()
    shown = {line.split("  ")[0]: line.split()[-2:] for line in lines}
    assert shown["held-out loss, best"] == shown["held-out loss, last"] == ["1.5000", "1.4000"]
    assert shown["training loss, last step"] == ["2.0000", "1.4000"]
    assert sweep.describe(tmp_path, "b")[1:] == ("1.4000", True, 1.4)


@pytest.mark.parametrize("text", ['{"state": "fini', "", "[1]", '{"state": 3}', None])
def test_a_damaged_status_is_named_and_a_report_says_that_the_run_was_finished(tmp_path, text):
    for name in ("reported", "unknown"):
        path = write_run(tmp_path, name, [3.0])
        (path / "status.json").unlink() if text is None else (path / "status.json").write_text(text)
    (tmp_path / "reported" / "report.json").write_text("{}")
    states = {line.split()[0]: line.split()[1] for line in call("list", "--dir", str(tmp_path)).splitlines()}
    assert (states["reported"], states["unknown"]) == ("finished", "unknown")
    why = "status.json is missing" if text is None else "status.json is damaged"
    assert why in call("show", "unknown", "--dir", str(tmp_path))
    asked = CliRunner().invoke(app, ["doctor", "--run", str(tmp_path / "unknown")])
    assert f"unknown ({why})" in asked.output, asked.output


def test_a_status_that_a_launch_writes_just_now_is_not_taken_for_a_damaged_one(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)

    def read_before_it_is_written(path):
        found = read_json(path)
        folder.write_status("running")
        return found

    monkeypatch.setattr(run_folder, "read_json", read_before_it_is_written)
    assert [folder.read_status().get("state") for _ in range(2)] == [None, "running"]


def test_a_run_may_be_deleted_while_runs_are_listed(tmp_path, monkeypatch):
    path = write_run(tmp_path, "a", [3.0])
    monkeypatch.setattr(runs, "read_status", lambda run: shutil.rmtree(path) or {})
    assert call("list", "--dir", str(tmp_path)).splitlines()[1].startswith("a ")
    monkeypatch.setattr(Path, "is_dir", lambda path: True)  # a moment ago
    with pytest.raises(UserError, match="this run has no plan"):
        RunFolder(path).read_plan()
    assert RunFolder(path).newest_step() is None


def test_odd_files_in_a_runs_folder_are_no_traceback(tmp_path):
    path = write_run(tmp_path, "odd", [3.0])
    (path / "metrics.jsonl").unlink()
    (path / "metrics.jsonl").mkdir()
    (path / "report.md").write_bytes(b"\xff report")
    assert "finished" in call("list", "--dir", str(tmp_path))
    assert "report" in call("show", "odd", "--dir", str(tmp_path))
    refused = CliRunner().invoke(app, ["plan", "--compare", str(path / "report.md")])
    assert refused.exit_code == 2 and "the run has no report" in refused.output


def test_what_may_not_be_read_is_an_error_of_the_user(tmp_path, monkeypatch):
    """As root, for whom every file may be read, it is pretended."""
    path, sound = write_run(tmp_path, "closed", [3.0]), write_run(tmp_path, "open", [3.0])
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path / "metrics.jsonl"))
    read_text = Path.read_text

    def refuse(self, *arguments, **options):
        if self == path / "metrics.jsonl":
            raise denied
        return read_text(self, *arguments, **options)

    monkeypatch.setattr(Path, "read_text", refuse)
    listed = call("list", "--dir", str(tmp_path))
    assert f"{path} is left out: Permission denied" in listed and sound.name in listed
    refused = RUNNER.invoke(app, ["runs", "compare", "closed", "open", "--dir", str(tmp_path)])
    assert refused.exit_code == 2 and f"where: {path}/metrics.jsonl\n  why: Permission denied" in refused.output


def test_a_missing_run_is_looked_for_where_the_command_can(tmp_path, monkeypatch):
    """`doctor --run` has no --dir."""
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(app, ["doctor", "--run", "nope"])
    assert refused.exit_code == 2 and "--dir" not in refused.output and "path/to/runs/NAME" in refused.output


def test_a_key_that_only_the_second_run_has_is_compared(tmp_path):
    for name, sets in (("a", {}), ("b", {"easy": "easy.jsonl"})):
        path = write_run(tmp_path, name, [1.0])
        config = json.loads((path / "run.json").read_text())
        config["evaluate"]["data"] = sets
        (path / "run.json").write_text(json.dumps(config))
    lines = [line.split() for line in call("compare", "a", "b", "--dir", str(tmp_path)).splitlines()]
    assert [line for line in lines if line[0] == "evaluate.data.easy"] == [["evaluate.data.easy", "-", "easy.jsonl"]]


def test_trials_leave_nothing_in_the_trackers_of_the_run(tmp_path, monkeypatch):
    started = []

    def run_steps(command, folder, name, steps, limit):
        started.append(command)
        return LossCurve(name, (1.0,), (1.0,))

    monkeypatch.setattr(prove, "plan_batch", lambda run, overrides: (4, "float32"))
    monkeypatch.setattr(prove, "run_steps", run_steps)
    (tmp_path / "run.yaml").write_text("name: a\n")
    result = RUNNER.invoke(app, ["prove", str(tmp_path / "run.yaml"), "log.wandb=ours"])
    assert result.exit_code == 0, result.output
    assert all(command.index("log.wandb=null") > command.index("log.wandb=ours") for command in started) and started


def test_a_run_is_deleted_only_when_asked_and_not_while_it_runs(tmp_path):
    path = write_run(tmp_path, "a", [3.0])
    for answer, code, words in (("n\n", 1, "nothing was deleted"), ("", 2, "fix: add --yes")):
        refused = RUNNER.invoke(app, ["runs", "delete", "a", "--dir", str(tmp_path)], input=answer)
        assert (refused.exit_code, words in refused.output, path.exists()) == (code, True, True), refused.output
    with (path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        busy = RUNNER.invoke(app, ["runs", "delete", "a", "--yes", "--dir", str(tmp_path)])
        assert busy.exit_code != 0 and path.exists()
    assert "deleted" in call("delete", "a", "--yes", "--dir", str(tmp_path)) and not path.exists()
    missing = RUNNER.invoke(app, ["runs", "show", "a", "--dir", str(tmp_path)])
    assert missing.exit_code == 2


def test_a_run_is_deleted_from_within_but_not_through_a_link(tmp_path, monkeypatch):
    path = write_run(tmp_path, "a", [3.0])
    (tmp_path / "link").symlink_to(path)
    refused = RUNNER.invoke(app, ["runs", "delete", "link", "--yes", "--dir", str(tmp_path)])
    assert refused.exit_code == 2 and f"fix: manyhands runs delete {path}\n" in refused.stderr and path.exists()
    monkeypatch.chdir(path)
    assert "deleted" in call("delete", ".", "--yes") and not path.exists()


def test_layouts_are_read_and_what_does_not_divide_is_refused():
    two, four = parse_layouts("ddp:2, accumulation:4", 8)
    assert two.keys == ("parallel.strategy=ddp", "parallel.gpus=2")
    assert "batch.micro_samples=2" in four.keys
    for text, batch, what in (
        ("ddp", 8, "no layout"),
        ("ddp:2,accumulation:3", 8, "3 equal"),
        ("ddp:2", 8, "one layout"),
    ):
        with pytest.raises(UserError, match=what):
            parse_layouts(text, batch)


def test_a_layout_outside_the_bounds_of_the_dtype_is_named():
    first = LossCurve("single:1", (2.0, 1.0), (1.0, 1.0))
    near, far = LossCurve("ddp:2", (2.0 * (1 + 4e-6), 1.0), (1.0, 1.0)), LossCurve("fsdp:2", (2.0, 1.001), (1.0, 1.0))
    for curves, dtype, fine in (
        ([first, near], "float32", True),
        ([first, far], "float32", False),
        ([first, far], "bfloat16", True),
    ):
        assert compare(curves, dtype)[1] is fine
    assert compare([first, far], "float32")[0][-1].endswith("OUTSIDE THE BOUNDS")
    nan = LossCurve("ddp:2", (2.0, None), (1.0, 1.0))
    assert compare([first, nan], "bfloat16")[1] is False


def test_a_run_that_cannot_take_its_steps_shows_its_last_lines(tmp_path):
    with pytest.raises(UserError, match="cannot take 2 steps as ddp:2") as caught:
        prove.run_steps(["sh", "-c", "echo no such model; exit 3"], tmp_path, "ddp:2", 2, 60)
    assert caught.value.details == ("no such model",) and caught.value.why == "exit code 3"


@pytest.mark.slow
def test_a_tiny_run_is_the_same_in_two_processes_and_leaves_nothing(tmp_path):
    from tests.support.tiny import write_tiny_model

    write_tiny_model(tmp_path / "model")
    rows = [{"prompt": f"what is {n}", "completion": f"{n} it is"} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {
        "model": {"name": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 64, "cache": str(tmp_path / "cache")},
        "parallel": {"device": "cpu"},
        "batch": {"samples": 8},
        "stop": {"max_steps": 1000},
    }
    (tmp_path / "run.json").write_text(json.dumps(run))
    before = set(tmp_path.iterdir())
    layouts = ["--layouts", "single:1,ddp:2,accumulation:4", "--steps", "3"]
    with forking():
        found = RUNNER.invoke(app, ["prove", str(tmp_path / "run.json"), *layouts])
    assert found.exit_code == 0, found.output
    assert found.output.count("within the bounds") == 2
    assert set(tmp_path.iterdir()) - before <= {tmp_path / "cache"}
