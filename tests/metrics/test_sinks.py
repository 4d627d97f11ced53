"""What a run leaves in metrics.jsonl and TensorBoard, and what the person at the terminal reads."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from manyhands.core import files
from manyhands.metrics import console as console_module
from manyhands.metrics.console import ConsoleSink
from manyhands.metrics.report import read_evaluations
from manyhands.metrics.sinks import JsonlSink, Meter, TensorBoardSink
from manyhands.training.types import Evaluation, StepResult, TrainState


def step_result(step: int, **changes) -> StepResult:
    fields = {"step": step, "epoch": step / 10, "loss": 2.0 / step, "rank_losses": (2.0 / step, math.nan)}
    fields |= {"grad_norm": 0.5, "learning_rate": 1e-3, "seconds": 0.5, "tokens_per_s": 200.0}
    fields |= {"num_samples": 4, "num_tokens": 100, "num_loss_tokens": 40, "num_micro_batches": 1}
    return StepResult(**fields | changes)


def evaluation(step: int, loss: float = 1.5) -> Evaluation:
    figures = {"perplexity": math.exp(loss), "accuracy": 0.5}
    return Evaluation(step, loss, figures, 3, 90, 30, 0.1, samples=(("system\nBe brief.", f"answer {step}"),))


DEVICES = [{"memory_allocated_bytes": 2.0**30, "peak_bytes": 2.0**31, "utilization": 0.9}] * 2


def feed(sink, steps, evaluations=()) -> None:
    state = TrainState()
    for step in steps:
        sink.record_devices(step, DEVICES)
        sink.after_step(state, step_result(step))
        if step in evaluations:
            sink.after_evaluation(state, evaluation(step))


def write(sink, steps=(), evaluations=()):
    """The sink, closed after these steps."""
    feed(sink, steps, evaluations)
    sink.close()
    return sink


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]


def test_jsonl_holds_steps_with_their_devices_and_evaluations_with_their_samples(tmp_path):
    write(JsonlSink(tmp_path / "metrics.jsonl"), [1, 2], evaluations=[2])
    first, second, third = read_rows(tmp_path / "metrics.jsonl")
    assert (first["kind"], first["step"], first["loss"], first["rank_losses"]) == ("step", 1, 2.0, [2.0, None])
    assert first["devices"][1]["peak_bytes"] == 2**31
    assert (second["kind"], third["kind"], third["loss"]) == ("step", "evaluation", 1.5)
    assert third["samples"] == [{"prompt": "system\nBe brief.", "answer": "answer 2"}]


def test_a_file_that_is_removed_meanwhile_has_no_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "is_file", lambda path: True)  # a moment ago
    assert files.read_rows(tmp_path / "metrics.jsonl") == []


def test_a_line_separator_in_an_answer_ends_no_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    answer = "one\u2028two\u2029three\x85four"
    sink.after_evaluation(TrainState(), replace(evaluation(2), samples=(("Count.", answer),)))
    write(sink, [3])
    assert [row["kind"] for row in files.read_rows(path)] == ["evaluation", "step"]
    assert read_evaluations(path)[0].samples == (("Count.", answer),)
    written = path.read_bytes()
    resumed = write(JsonlSink(path, resumed_at=3))
    assert path.read_bytes() == written and resumed.lost == ""


@pytest.mark.parametrize(("resumed_at", "kept"), [(4, [3, 4]), (0, [])])
def test_rows_of_another_run_are_kept_aside(tmp_path, resumed_at, kept):
    path, mine = tmp_path / "metrics.jsonl", tmp_path / "mine.jsonl"
    for file, run, steps in ((path, "other", [1, 2]), (mine, "mine", [3, 4])):
        write(JsonlSink(file, run=run), steps)
    path.write_text(both := path.read_text() + mine.read_text())
    sink = write(JsonlSink(path, run="mine", resumed_at=resumed_at))
    assert sink.lost == "metrics.jsonl had rows of another run (2), kept in metrics.jsonl.other"
    assert [row["step"] for row in read_rows(path)] == kept
    assert (tmp_path / "metrics.jsonl.other").read_text() == both


def test_only_every_nth_step_is_written(tmp_path):
    sink = JsonlSink(tmp_path / "metrics.jsonl", every_steps=3)
    feed(sink, range(1, 8))
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [3, 6]


def test_resume_takes_back_later_rows_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(JsonlSink(path), range(1, 6), evaluations=[3, 5])
    with open(path, "a") as file:
        file.write('{"kind": "step", "step": 6, "lo')
    write(JsonlSink(path, resumed_at=3), [4])
    kept = [("step", 1), ("step", 2), ("step", 3), ("evaluation", 3), ("step", 4)]
    assert [(row["kind"], row["step"]) for row in read_rows(path)] == kept


def test_what_a_damaged_file_has_lost_is_said_and_what_is_written_again_is_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(JsonlSink(path), range(1, 9))
    whole = path.read_text().splitlines(keepends=True)

    def lost(text: str, **changes) -> str:
        path.write_text(text)
        return write(JsonlSink(path, **{"resumed_at": 6} | changes)).lost

    assert lost("".join(whole)) == lost("".join(whole[:6]) + whole[6][:20]) == ""
    assert lost("".join(whole[:3]) + whole[3][:20]) == "metrics.jsonl has no steps from 4 to 6"
    assert lost("".join([whole[0], whole[1][5:], *whole[2:]])) == "metrics.jsonl had damaged lines (1)"
    assert lost("") == "metrics.jsonl has no steps from 1 to 6"
    assert lost("".join(whole[4:5]), every_steps=5) == lost("".join(whole[4:5])) == "", "log.every_steps was 5"
    assert lost("", resumed_at=0) == ""


def test_an_evaluation_that_the_checkpoint_does_not_know_is_taken_back_and_the_step_before_it_is_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(JsonlSink(path), range(1, 5), evaluations=[2, 4])
    write(JsonlSink(path, resumed_at=4, evaluated_at=2))
    rows = [(row["kind"], row["step"]) for row in read_rows(path)]
    assert rows[-2:] == [("step", 3), ("step", 4)] and ("evaluation", 2) in rows


def test_a_start_from_nothing_leaves_no_old_row(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for _ in range(2):
        sink = JsonlSink(path)
        sink.after_evaluation(TrainState(), evaluation(0))
        sink.close()
    assert len(read_rows(path)) == 1


def test_tensorboard_has_every_curve_and_resume_purges(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(TensorBoardSink(tmp_path), [1, 2, 3], evaluations=[2])
    write(TensorBoardSink(tmp_path, resumed_at=2), [3])
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = set(events.Tags()["scalars"])
    assert {"loss/all", "loss/rank0", "memory_gib/rank0", "memory_gib/rank1", "utilization_percent/rank1"} <= tags
    assert {"speed/input_wait_s", "train/learning_rate", "train/gradient_norm"} <= tags
    assert {"validation/loss", "validation/perplexity", "validation/accuracy"} <= tags
    assert "loss/rank1" not in tags  # that rank had no trained token
    assert [event.step for event in events.Scalars("loss/all")] == [1, 2, 3]
    assert events.Scalars("utilization_percent/rank1")[0].value == pytest.approx(90)


def test_tensorboard_hides_a_launch_that_ended_before_its_first_checkpoint(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in ([1, 2, 3], [1, 2]):
        sink = TensorBoardSink(tmp_path)
        sink.after_evaluation(TrainState(), evaluation(0))
        write(sink, steps)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("loss/all")] == [1, 2]
    assert [event.step for event in events.Scalars("validation/loss")] == [0]


def test_a_pipe_gets_plain_lines_at_a_sensible_pace_and_both_answers():
    out = io.StringIO()
    sink = ConsoleSink(out, num_steps=1000)
    state = TrainState()
    sink.before_training(state)
    sink.after_evaluation(state, evaluation(0, loss=3.0))
    feed(sink, range(1, 1001))
    sink.after_evaluation(state, evaluation(1000, loss=1.5))
    sink.after_training(state)
    lines = out.getvalue().splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert 2 <= len(steps) <= 20
    assert steps[0].startswith("step 1/1000  loss 2.0000  200 tokens/s  memory 2.0 GiB")
    assert steps[0].endswith("8 min left")  # 999 steps of 0.5 s
    assert steps[-1].startswith("step 1000/1000")
    assert "held-out loss: 3.0000 before training, 1.5000 after step 1000" in lines
    assert lines[-2:] == ["  before: answer 0", "  after:  answer 1000"]
    assert "\x1b" not in out.getvalue()


def test_a_resumed_run_shows_what_was_measured_before_its_first_launch(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    sink = JsonlSink(metrics)
    sink.after_evaluation(TrainState(), evaluation(0, loss=3.0))
    sink.close()
    damaged = [{"loss": "x"}, {"samples": [{"prompt": "a"}]}, {"samples": ["a"]}, {"sets": {"a": 1}}, {"terms": [1]}]
    lines = "".join(json.dumps({"kind": "evaluation", "step": 1, **fields}) + "\n" for fields in damaged)
    metrics.write_text(metrics.read_text() + lines + '{"kind": "evalu')  # killed while it wrote
    (first,) = read_evaluations(metrics)
    assert (first.step, first.loss, first.samples) == (0, 3.0, evaluation(0, loss=3.0).samples)
    out = io.StringIO()
    console = ConsoleSink(out, num_steps=4, first=first)
    console.after_evaluation(TrainState(), evaluation(4, loss=1.5))
    console.after_training(TrainState())
    assert "held-out loss: 3.0000 before training, 1.5000 after step 4" in out.getvalue()
    assert "before: answer 0" in out.getvalue()


def test_text_in_brackets_is_not_taken_for_markup():
    out = io.StringIO()
    sink = ConsoleSink(out, num_steps=1)
    sink.after_evaluation(TrainState(), replace(evaluation(0), samples=(("xs[0]", "[/bold] [red]"),)))
    assert "xs[0]" in out.getvalue() and "[/bold] [red]" in out.getvalue()


def test_a_terminal_gets_a_bar_that_is_gone_after_an_error():
    out = Terminal()
    sink = ConsoleSink(out, num_steps=4)
    sink.before_training(TrainState())
    feed(sink, [1, 2])
    sink.close()
    sink.close()
    assert "2/4" in out.getvalue() and "loss 1.0000" in out.getvalue()


def test_the_time_left_counts_evaluations_between_steps():
    out = io.StringIO()
    sink = ConsoleSink(out, num_steps=4)
    sink.before_training(TrainState())
    sink.after_evaluation(TrainState(), replace(evaluation(0), seconds=100.0))  # before training, once
    feed(sink, [1])
    sink.after_evaluation(TrainState(), replace(evaluation(1), seconds=20.0))
    feed(sink, [4])
    shown = [line.rsplit("  ", 1)[1] for line in out.getvalue().splitlines() if "left" in line]
    assert shown == ["2 s left", "0 s left"]
    assert sink._time_left(2) == "21 s left"  # 2 steps of half a second and one evaluation, twice


def test_evaluation_and_saving_have_a_bar_with_their_name_and_progress_and_the_log_has_plain_lines():
    out, log = Terminal(), io.StringIO()
    sink = ConsoleSink(out, num_steps=4, log=log)
    sink.before_training(TrainState())
    feed(sink, [1, 2])
    assert "1 s left" in bars(sink), "two steps of half a second"
    for stage, total in (("evaluation", 40), ("checkpoint 2", 3)):
        sink.show_progress(stage, 0, total)
        sink.show_progress(stage, 2, total)
        assert f"{stage} 2/{total}" in " ".join(bars(sink).split())
        sink.show_progress(stage, total, total)
        assert stage not in bars(sink)
    feed(sink, [3, 4])
    sink.after_evaluation(TrainState(), evaluation(4, loss=1.5))
    sink.close()
    lines = log.getvalue().splitlines()
    assert lines[0].startswith("step 1/4  loss 2.0000") and any(line.startswith("step 4/4") for line in lines)
    assert any("after step 4: held-out loss 1.5000" in line for line in lines) and "\x1b" not in log.getvalue()


FIGURES = {"idle_experts": 0.125, "largest_load": 1.75}
PREFERENCE = {"preference_accuracy": 0.625, "reward_margin": 0.25, "image_tokens": 1234567.0}


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_lines_fit_the_terminal_and_drop_whole_figures(monkeypatch, width, term):
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", "25")
    out, log = Terminal(), io.StringIO()
    sink = ConsoleSink(out, num_steps=12000, log=log)
    sink.before_training(TrainState())
    sink.record_devices(1, [{"peak_bytes": 120.25 * 2**30}])
    sink.after_step(TrainState(), step_result(1, loss=11.2345, tokens_per_s=1234567.0, figures=FIGURES))
    sink.after_evaluation(TrainState(), replace(evaluation(1), figures=PREFERENCE))
    sink.show_progress("checkpoint 1", 0, 4)
    full, evaluated, *_ = log.getvalue().splitlines()
    assert "grad norm 0.500  idle experts 0.125  largest load 1.75  100 min left" in full
    assert ", reward margin 0.25, image tokens 1.2e+06 (3 samples" in evaluated
    if term == "dumb":
        step, held_out, *_ = out.getvalue().splitlines()
        assert {"step 1/12000", "loss 11.2345", "100 min left"} <= set(step.split("  ")) <= set(full.split("  "))
        assert ("idle experts 0.125" in step) == (width == 120) and "grad norm" not in step
        assert evaluated.startswith(held_out) and evaluated[len(held_out)] in ", " and len(held_out) <= width
    else:
        step, *_ = bars(sink, width).splitlines()
        assert "1/12000" in step and "loss 11.2345 " in step and step.rstrip().endswith("100 min left")
        assert ("1,234,567 tokens/s" in step) == (width >= 80) and ("memory 120.2 GiB" in step) == (width == 120)
    assert len(step.rstrip()) <= width


def bars(sink: ConsoleSink, width: int = 160) -> str:
    """What the bars show now."""
    console = Console(width=width)
    with console.capture() as capture:
        console.print(sink._progress.get_renderable())
    return capture.get()


def test_a_long_evaluation_says_where_it_is_in_plain_text_too(monkeypatch):
    monkeypatch.setattr(console_module, "PLAIN_PAUSE_S", 0.0)
    out = io.StringIO()
    sink = ConsoleSink(out, num_steps=4)
    for done in range(4):
        sink.show_progress("evaluation", done, 3)
    assert out.getvalue().splitlines() == ["evaluation: 1/3", "evaluation: 2/3"]


def test_the_meter_of_a_cpu_reads_the_memory_of_this_process():
    import torch

    reading = Meter(torch.device("cpu")).read()
    assert list(reading) == ["memory_allocated_bytes", "peak_bytes", "utilization"]
    assert 50e6 < reading["memory_allocated_bytes"] <= reading["peak_bytes"] < 1e12
    assert math.isnan(reading["utilization"])


@pytest.mark.gpu
def test_the_meter_of_a_gpu_sees_a_tensor():
    import torch

    device = torch.device("cuda", 0)
    meter = Meter(device)
    before = meter.read()["memory_allocated_bytes"]
    tensor = torch.empty(2**20, device=device)
    reading = meter.read()
    assert reading["memory_allocated_bytes"] - before >= tensor.numel() * 4
    assert 0 <= reading["utilization"] <= 1
