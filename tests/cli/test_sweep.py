"""``manyhands sweep``: what its words mean, which runs they make, and how many GPUs each of them gets."""

import json
import re
import signal
import sys
import types
from pathlib import Path

import pytest

from manyhands.cli import sweep
from manyhands.cli.sweep import choose, draw, name_of, plan_trials, show, split_values, split_words
from manyhands.core.errors import EXIT_FAILED, EXIT_INTERRUPTED, UserError
from manyhands.ui import queue
from tests.cli.conftest import call

GRID = {"optimizer.learning_rate": ["1e-5", "3e-5"], "method.rank": ["8", "32"]}


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-5,3e-5", ["1e-5", "3e-5"]),
        ("8", ["8"]),
        ("[q_proj, v_proj]", ["[q_proj, v_proj]"]),
        ("[q_proj, v_proj], all-linear", ["[q_proj, v_proj]", "all-linear"]),
        ("'a,b',c", ["'a,b'", "c"]),
        ("{a: 1, b: 2}", ["{a: 1, b: 2}"]),
    ],
)
def test_values_are_separated_by_commas_outside_of_brackets(text, values):
    assert split_values(text) == values


def test_words_with_several_values_are_keys_of_the_sweep():
    words = ["optimizer.learning_rate=1e-5,3e-5", "stop.epochs=1", "method.rank=8..64", "data.fields.a=[x, y]"]
    keys, fixed = split_words(words)
    assert keys == {"optimizer.learning_rate": ["1e-5", "3e-5"], "method.rank": ["8..64"]}
    assert fixed == ["stop.epochs=1", "data.fields.a=[x, y]"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "no key has several values"),
        (["method.rank=8"], "no key has several values"),
        (["method.rank=8,8"], "given twice"),
        (["method.rank=8,"], "empty"),
        (["method.rank=8,16", "method.rank=32"], "method.rank is given twice"),
        (["name=a,b"], "name is no key to try"),
    ],
)
def test_refused_words(words, error):
    with pytest.raises(UserError, match=error):
        split_words(words)


def test_grid_and_draws():
    assert [tuple(values.values()) for values in choose(GRID, None, 0)] == [
        ("1e-5", "8"),
        ("1e-5", "32"),
        ("3e-5", "8"),
        ("3e-5", "32"),
    ]
    drawn = choose(GRID, 3, 1)
    assert len({tuple(values.items()) for values in drawn}) == 3 and drawn == choose(GRID, 3, 1)
    assert any(choose(GRID, 3, seed) != drawn for seed in range(2, 6))
    with pytest.raises(UserError, match="there are 4 combinations and not 5"):
        choose(GRID, 5, 0)
    with pytest.raises(UserError, match="a grid needs values"):
        choose({"method.rank": ["8..64"]}, None, 0)


def test_ranges():
    import random

    source = random.Random(0)
    rates = [float(draw(source, "1e-5..1e-3")) for _ in range(400)]
    assert all(1e-5 <= rate <= 1e-3 for rate in rates)
    assert 150 < sum(rate < 1e-4 for rate in rates) < 250, "evenly by the logarithm"
    ranks = {draw(source, "4..9") for _ in range(200)}
    assert ranks == {"4", "5", "6", "7", "8", "9"}
    with pytest.raises(UserError, match="the range is empty"):
        draw(source, "3..1")


def test_names_follow_from_the_values_alone():
    assert name_of({"optimizer.learning_rate": "1e-5", "method.rank": "8"}) == "learning_rate-1e-5-rank-8"
    names = [name_of({"data.train": f"data/{name}.jsonl"}) for name in ("a b", "a/b", "x" * 200, "x" * 201)]
    assert len(set(names)) == 4 and all(len(name) < 100 and "/" not in name for name in names)


@pytest.mark.parametrize(
    ("gpus", "asked", "seconds", "placed", "words"),
    [
        (0, "auto", {}, [], "one after the other"),
        (1, "auto", {}, [], "one after the other"),
        (4, "auto", {1: 100.0, "auto": 30.0}, ["G0", "G1", "G2", "G3"], "one on each of 4 GPUs"),
        (4, "auto", {1: 130.0, "auto": 30.0}, [], "expect to be faster"),
        (4, "auto", {1: None, "auto": 30.0}, [], "one GPU is too small"),
        (4, 2, {}, [], "one after the other"),
        (2, 1, {1: 9.0}, ["G0", "G1"], "one on each of 2 GPUs"),
    ],
)
def test_gpus_of_a_run_follow_from_the_plans(monkeypatch, gpus, asked, seconds, placed, words):
    def plan_trial(config, name):
        total_s = seconds.get(config.parallel.gpus, 10.0)
        if total_s is None:
            raise UserError("no plan fits")
        return types.SimpleNamespace(time=types.SimpleNamespace(total_s=total_s))

    def config(number):
        return types.SimpleNamespace(parallel=types.SimpleNamespace(gpus=number))

    def loaded(number):
        return types.SimpleNamespace(config=config(number))

    host = types.SimpleNamespace(gpus=[types.SimpleNamespace(uuid=f"G{number}") for number in range(gpus)])
    monkeypatch.setattr("manyhands.facts.host.read_host_facts", lambda: host)
    monkeypatch.setattr(sweep, "plan_trial", plan_trial)
    monkeypatch.setattr(sweep, "on_one_gpu", lambda _: config(1))
    trials = [sweep.Trial(str(number), {}, loaded(asked)) for number in range(4)]
    found, note, plans = plan_trials(trials)
    assert [plan.time.total_s for plan in plans] == 4 * [seconds.get(1 if placed else asked, 10.0)]
    assert found == placed and words in note


def test_the_table_has_the_best_first(tmp_path, capsys, monkeypatch):
    losses = {"8": ("finished", 1.5, True), "16": ("finished", 1.2, True), "32": ("failed", 0.1, True)}
    trials = [sweep.Trial(f"rank-{rank}", {"method.rank": rank}, None) for rank in losses]
    monkeypatch.setattr(
        sweep,
        "describe",
        lambda folder, name: (losses[name[5:]][0], f"{losses[name[5:]][1]:.4f}", *losses[name[5:]][:0:-1]),
    )
    assert show(trials, tmp_path) == "rank-16"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["rank", "state", "held-out", "loss"]
    assert [line.split()[0] for line in lines[1:4]] == ["16", "8", "32"]
    assert lines[4] == f"best: {tmp_path / 'rank-16'}"
    assert json.loads((tmp_path / "sweep.json").read_text())["best"] == "rank-16"


TRAIN = """
import json, pathlib, sys, time
from manyhands.cli.run_file import load_run
from manyhands.launch.run.resume import folder_of
config = load_run(pathlib.Path(sys.argv[2]), sys.argv[3:]).config
folder = folder_of(config)
folder.create()
folder.write_config(config)
fails = config.method.rank == 16 and not (folder.path / "again").exists()
(folder.path / "again").touch()
row = {"kind": "evaluation", "step": 1, "loss": 1 / config.method.rank, "time": time.time()}
folder.metrics.write_text(json.dumps(row) + "\\n")
folder.write_status("failed" if fails else "finished")
sys.exit(fails)
"""


@pytest.mark.ci
def test_a_run_that_fails_is_tried_again_by_the_same_command(monkeypatch, run_file):
    monkeypatch.chdir(run_file.parent)
    monkeypatch.setattr(sweep, "plan_trial", lambda *_: types.SimpleNamespace(time=None))
    monkeypatch.setattr(queue, "command_of", lambda words: [sys.executable, "-c", TRAIN, *words])
    monkeypatch.setattr(queue.run_queue, "__defaults__", (0.05, *queue.run_queue.__defaults__[1:]))
    Path("rows.jsonl").write_text("{}\n")
    words = ("sweep", run_file, "method.rank=8,16", "stop.epochs=1")
    first = call(*words)
    assert first.exit_code == EXIT_FAILED, first.output
    assert "rank-16: failed" in first.output and "best: " in first.output and "runs/run-sweep/rank-8\n" in first.output
    monkeypatch.setattr(sweep, "plan_trial", None)  # the GPUs were chosen by the first call
    second = call(*words)
    assert second.exit_code == 0, second.output
    assert "rank-8: started" not in second.output and "runs/run-sweep/rank-16\n" in second.output
    config = json.loads(Path("runs/run-sweep/rank-16/run.json").read_text())
    assert (config["method"]["rank"], config["stop"]["epochs"]) == (16, 1)


@pytest.mark.ci
def test_a_run_file_that_is_edited_changes_no_run_of_a_sweep(monkeypatch, run_file):
    edit = """pathlib.Path("run.yaml").write_text(pathlib.Path("edited.yaml").read_text())\nsys.exit"""
    script = TRAIN.replace("sys.exit", edit)
    Path(run_file.with_name("edited.yaml")).write_text(run_file.read_text() + "optimizer: {weight_decay: 0.3}\n")
    monkeypatch.chdir(run_file.parent)
    monkeypatch.setattr(sweep, "plan_trial", lambda *_: types.SimpleNamespace(time=None))
    monkeypatch.setattr(queue, "command_of", lambda words: [sys.executable, "-c", script, *words])
    monkeypatch.setattr(queue.run_queue, "__defaults__", (0.05, *queue.run_queue.__defaults__[1:]))
    Path("rows.jsonl").write_text("{}\n")
    words = ("sweep", run_file, "method.rank=8,32")
    first = call(*words)
    assert first.exit_code == 0, first.output
    runs = [json.loads(Path(f"runs/run-sweep/rank-{rank}/run.json").read_text()) for rank in (8, 32)]
    assert [run["optimizer"]["weight_decay"] for run in runs] == [0.0, 0.0]
    second = call(*words)
    assert second.exit_code and "optimizer.weight_decay: 0.0 -> 0.3" in second.output, second.output
    assert "-o FOLDER" in second.output


def test_without_a_run_file(monkeypatch, tmp_path, started):
    monkeypatch.chdir(tmp_path)
    planned = []
    memory, no_time = types.SimpleNamespace(total=2.25 * 2**30, limit=70 * 2**30), 1e-3  # the rate that has none

    def plan_trial(config, name):
        planned.append(config)
        timed = config.optimizer.learning_rate != no_time
        return types.SimpleNamespace(memory=memory, time=types.SimpleNamespace(total_s=1234.4) if timed else None)

    monkeypatch.setattr(sweep, "plan_trial", plan_trial)
    Path("rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 3)
    words = ("--model", "org/model", "--data", "rows.jsonl", "--lr", "1e-4,1e-3", "method.rank=4", "-o", "runs/s")
    ended = call("sweep", *words, "--dry-run")
    lines = [re.split("  +", line) for line in ended.output.splitlines()[-3:]]
    assert ended.exit_code == 0 and lines == [
        ["optimizer.learning_rate", "memory per rank", "seconds"],
        ["1e-4", "2.2 of 70.0 GiB", "1,234"],
        ["1e-3", "2.2 of 70.0 GiB", "not known"],
    ], ended.output
    assert [config.optimizer.learning_rate for config in planned] == [1e-4, 1e-3]
    assert {(config.model.name, config.method.rank) for config in planned} == {("org/model", 4)}
    assert not Path("runs").exists(), "a dry run leaves nothing"

    waiting = []
    monkeypatch.setattr(queue, "run_queue", lambda found, *_, **__: waiting.extend(found.read()["items"]) or True)
    Path("run.yaml").write_text("mine")
    assert call("sweep", *words[:-1], ".").exit_code == EXIT_FAILED, "none has finished"
    assert Path("run.yaml").read_text() == "mine", "a run file in the sweep's folder is the user's own"
    assert [call(*item["words"]).exit_code for item in waiting] == [0, 0]
    assert [config for config, _ in started] == planned[2:], "each trains what was planned"
    assert {(config.output.dir, config.name) for config in planned[2:]} == {
        (str(tmp_path), "learning_rate-1e-4"),
        (str(tmp_path), "learning_rate-1e-3"),
    }


def test_ctrl_c_ends_the_sweep_and_says_so(monkeypatch, run_file):
    monkeypatch.chdir(run_file.parent)
    monkeypatch.setattr(sweep, "plan_trial", lambda *_: types.SimpleNamespace(time=None))
    monkeypatch.setattr(queue, "run_queue", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    Path("rows.jsonl").write_text("{}\n")
    ended = call("sweep", run_file, "method.rank=8,16")
    assert ended.exit_code == EXIT_INTERRUPTED
    assert ended.stderr == ("SIGINT: stopped the sweep and its runs; run the same command again to continue them\n")
    assert queue.Queue(Path("runs/run-sweep")).read()["paused"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["method.rank=8,many"], "method.rank"),
        (["optimizer.learning_rate=1e-4,0.0001"], "learning_rate-1e-4, learning_rate-0.0001"),
        (["method.rank=8,8.0", "stop.epochs=1,2"], "the same"),
        (["--random", "2", "optimizer.learning_rate=1e-4,0.0001"], "the same"),
    ],
)
def test_values_that_are_refused_before_anything_starts(run_file, tmp_path, monkeypatch, words, error):
    monkeypatch.chdir(tmp_path)
    ended = call("sweep", run_file, *words)
    assert ended.exit_code and error in ended.output
    assert not Path("runs").exists()
