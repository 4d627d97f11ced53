"""The follower of metrics.jsonl: whole lines only, files that are cut or replaced, steps that are done again."""

import json
import os
import time

import pytest

from manyhands.ui.follow import SLICE_BYTES, Metrics, Tail
from manyhands.ui.runs import Runs
from tests.ui.conftest import write_run


def row(step, loss=1.0, **fields):
    return json.dumps({"kind": "step", "step": step, "loss": loss, "num_tokens": 10, "seconds": 2.0, **fields}) + "\n"


def evaluation(step, loss):
    samples = [{"prompt": "p", "answer": f"at {step}"}]
    return json.dumps({"kind": "evaluation", "step": step, "loss": loss, "samples": samples}) + "\n"


def read(metrics):
    while metrics.update():
        pass
    return metrics.series(["loss"], "step", 100)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "metrics.jsonl"


def test_half_line_waits(file):
    file.write_text(row(1) + row(2)[:20])
    metrics = Metrics(file)
    assert read(metrics)["x"] == [1]
    with file.open("a") as more:
        more.write(row(2)[20:])
    assert read(metrics)["x"] == [1, 2]


def cut(file):
    file.write_text(row(1, 5.0))


def replace(file):
    other = file.with_name("new")
    other.write_text("".join(row(step, 5.0) for step in range(1, 5)))
    os.replace(other, file)


def regrow(file):
    with file.open("r+") as same:
        same.truncate(0)
        same.write("".join(row(step, 5.0) for step in range(1, 9)))


@pytest.mark.parametrize("change", [cut, replace, regrow])
def test_other_file_is_read_from_its_beginning(file, change):
    file.write_text("".join(row(step) for step in range(1, 4)))
    metrics = Metrics(file)
    read(metrics)
    change(file)
    assert set(read(metrics)["loss"]["mean"]) == {5.0}


def test_steps_done_again_replace_those_of_before(file):
    file.write_text(row(1) + row(2) + evaluation(2, 0.5) + row(3) + evaluation(3, 0.4) + row(2, 7.0))
    metrics = Metrics(file)
    found = read(metrics)
    assert (found["x"], found["loss"]["mean"]) == ([1, 2], [1.0, 7.0])
    assert found["held_out"]["loss"] == []
    assert metrics.samples == []


@pytest.mark.parametrize("value", ["NaN", "Infinity", "null", '"text"', "true", "1" + "0" * 400])
def test_what_is_no_number_is_null(file, value):
    file.write_text(row(1).replace("1.0", value) + row(2))
    found = read(Metrics(file))
    assert json.loads(json.dumps(found, allow_nan=False))["loss"]["mean"] == [None, 1.0]


@pytest.mark.parametrize(
    "line", ["[]", "{}", "\x00", '{"kind": "step", "step": "x"}', "[" * 5000, '{"kind": "evaluation"}']
)
def test_damaged_lines_are_skipped(file, line):
    file.write_text(row(1) + line + "\n" + row(2))
    assert read(Metrics(file))["x"] == [1, 2]


def test_peaks_survive_fewer_points(file):
    file.write_text("".join(row(step, 100.0 if step == 777 else 1.0) for step in range(1, 2001)))
    found = Metrics(file)
    read(found)
    few = found.series(["loss"], "step", 50)
    assert len(few["x"]) == 50
    assert max(few["loss"]["high"]) == 100
    assert min(few["loss"]["low"]) == 1


def test_axes(file):
    file.write_text(row(2) + row(4) + evaluation(4, 0.5))  # every second step is logged
    metrics = Metrics(file)
    read(metrics)
    assert metrics.series(["loss"], "tokens", 10)["x"] == [20, 40]
    assert metrics.series(["loss"], "time", 10)["held_out"] == {"x": [8.0], "loss": [0.5]}


def test_preview_of_a_large_file(file):
    padding = "x" * 700
    with file.open("w") as rows:
        rows.writelines(row(step, pad=padding) for step in range(1, 25_000))
    metrics = Metrics(file)
    metrics.preview()
    shown = metrics.series(["loss"], "step", 5000)
    assert 1000 < len(shown["x"]) < 1600
    assert shown["x"][-1] > 24_900
    assert metrics.update(), "one call does not read it whole"
    assert len(metrics.series(["loss"], "step", 5000)["x"]) < 1600, "the preview stays until all rows are read"
    assert read(metrics)["num_rows"] == 24_999


def test_no_file_and_a_line_without_an_end(file):
    tail = Tail(file)
    assert tail.read() == (b"", False)
    file.write_bytes(b"x" * (SLICE_BYTES + 5) + b"\n" + row(1).encode())
    assert tail.read()[0]
    assert tail.read()[0].endswith(row(1).encode())


def test_a_million_rows_open_within_a_second(runs):
    """Of this process's own time, since a machine at work says nothing about the page."""
    run = write_run(runs, "long", num_rows=0, num_steps=1_000_000)
    with (run / "metrics.jsonl").open("w") as rows:
        rows.writelines(
            f'{{"kind": "step", "step": {step}, "loss": 1.5, "pad": "0123"}}\n' for step in range(1, 1_000_001)
        )
    started = time.process_time()
    found = Runs(runs)
    found.look()
    shown = json.dumps(found.get("long").describe())
    assert time.process_time() - started < 0.5
    assert '"x": [' in shown and '"step": 1000000' in shown
