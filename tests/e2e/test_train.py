"""``manyhands train`` as a user types it: what it leaves, and what a second start does."""

from __future__ import annotations

import re

import pytest

from tests.e2e.runs import NUM_STEPS, Ended, Place, Run

LEFT = {  # by a LoRA run with TensorBoard; event files are named by time and process
    ".lock",
    "run.json",
    "plan.json",
    "plans/001.json",
    "status.json",
    "metrics.jsonl",
    "report.json",
    "report.md",
    "report.html",
    "verify/probe.safetensors",
    *(f"checkpoints/step-{step:06d}/{name}" for step in (8, 12) for name in ("manifest.json", "train_state.json")),
}
ADAPTER = {
    "verify/adapter.json",
    "adapter/README.md",
    "adapter/adapter_config.json",
    "adapter/adapter_model.safetensors",
    "adapter/manyhands.json",
}
MODEL = {"verify/model.json"} | {
    f"model/{name}"
    for name in (
        "README.md",
        "config.json",
        "generation_config.json",
        "manyhands.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    )
}


def files_of(num_ranks: int, exported: set[str]) -> set[str]:
    ranks = range(num_ranks)
    shards = {
        f"checkpoints/step-{step:06d}/shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
        for step in (8, 12)
        for rank in ranks
    }
    return LEFT | exported | shards | {f"logs/rank-{rank}.log" for rank in ranks}


def check_files(run: Run, num_ranks: int, exported: set[str]) -> None:
    files = run.files()
    events = {name for name in files if name.startswith("tensorboard/events.out.tfevents.")}
    assert files - events == files_of(num_ranks, exported) and len(events) == 1


def check_metrics(run: Run, num_ranks: int) -> None:
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1))
    for row in rows:
        assert (
            row["seconds"] > 0 and row["tokens_per_s"] > 0 and 0 < row["learning_rate"] <= 3e-3 and row["grad_norm"] > 0
        )
        assert row["num_samples"] == (4 if row["step"] == 8 else 8), "60 rows: the last step of an epoch is short"
        assert len(row["rank_losses"]) == len(row["devices"]) == num_ranks
        assert all(device["memory_allocated_bytes"] > 0 and device["peak_bytes"] > 0 for device in row["devices"])
    assert sum(row["num_samples"] for row in rows[:8]) == 60 and rows[7]["epoch"] == 1
    evaluations = run.rows("evaluation")
    assert [row["step"] for row in evaluations] == [0, 4, 8, 12]
    assert all(row["num_samples"] == 20 and len(row["samples"]) == 1 for row in evaluations)
    assert evaluations[-1]["loss"] < 0.9 * evaluations[0]["loss"]


def test_a_run_on_two_processes_ends_well_and_says_what_it_did(whole: tuple[Ended, Run]) -> None:
    ended, run = whole
    assert ended.code == 0, ended.output
    assert "2 CPU processes" in ended.output and "before training: held-out loss" in ended.output
    assert "reopened by PeftModel.from_pretrained" in ended.output and f"finished: {run.folder}" in ended.output
    assert "Traceback" not in ended.output and "Warning" not in ended.output
    check_files(run, 2, ADAPTER | {"logs/launcher.log"})
    check_metrics(run, 2)
    kept = (run.folder / "logs/rank-0.log").read_text()
    for line in ended.output[ended.output.index("model: ") :].splitlines():
        shown = re.split("  |, ", line.rstrip())  # without figures that a narrow terminal has no room for
        whole_lines = [logged for logged in kept.splitlines() if all(figure in logged for figure in shown)]
        assert whole_lines, f"{line!r}: what the terminal showed is in the log"
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in kept and "finished: " in kept and "\x1b" not in kept
    assert "Plan 1" in (run.folder / "logs/launcher.log").read_text()
    status, report = run.read("status.json"), run.read("report.json")
    assert (status["state"], status["step"]) == ("finished", NUM_STEPS)
    assert report["measured"]["steps"] == report["planned"]["steps"] == NUM_STEPS
    assert report["measured"]["tokens"] == sum(row["num_tokens"] for row in run.rows())
    assert "42 tensors compared" in report["verified"]["adapter"]


def test_tensorboard_shows_loss_of_all_and_each_rank_speed_rate_norm_and_memory(whole: tuple[Ended, Run]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, run = whole
    events = EventAccumulator(str(run.folder / "tensorboard"))
    events.Reload()
    each_step = [
        "loss/all",
        "loss/rank0",
        "loss/rank1",
        "speed/tokens_per_s",
        "train/learning_rate",
        "train/gradient_norm",
    ]
    each_step += [f"{kind}/rank{rank}" for kind in ("memory_gib", "peak_memory_gib") for rank in (0, 1)]
    for tag in each_step:
        assert [event.step for event in events.Scalars(tag)] == list(range(1, NUM_STEPS + 1)), tag
    assert [event.value for event in events.Scalars("loss/all")] == pytest.approx(run.losses(), rel=1e-6)
    assert [event.step for event in events.Scalars("validation/loss")] == [0, 4, 8, 12]


def test_the_adapter_opens_with_peft(place: Place, whole: tuple[Ended, Run]) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(place.folder / "model", dtype=torch.float32)
    ids = torch.arange(20)[None]
    before = base(ids).logits
    after = PeftModel.from_pretrained(base, whole[1].folder / "adapter")(ids).logits
    assert (after - before).abs().max() > 0.01


def test_a_second_start_says_that_the_run_is_finished(place: Place, whole: tuple[Ended, Run]) -> None:
    before = whole[1].files()
    again = place.train("whole", "--gpus", "2")
    assert again.code == 0 and "runs/whole is finished; nothing to do" in again.output
    assert whole[1].files() == before


def test_another_run_of_the_name_is_refused_with_the_changed_keys(place: Place, whole: tuple[Ended, Run]) -> None:
    refused = place.train("whole", "--gpus", "2", "optimizer.learning_rate=0.1", "seed=7")
    assert refused.code == 2
    assert "optimizer.learning_rate: 0.003 -> 0.1" in refused.output and "seed: 0 -> 7" in refused.output
    assert "parallel.gpus" not in refused.output and "--fresh" in refused.output


def test_fresh_takes_a_new_folder_and_a_dry_run_leaves_run_and_plan_only(
    place: Place, whole: tuple[Ended, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    # the process that builds the model for a dry run: tests/launch/test_rehearsal.py
    monkeypatch.setattr("manyhands.launch.run.prepare.rehearse", lambda config, plan: None)
    ended = place.train("whole", "--fresh", "--dry-run")
    assert ended.code == 0 and "nothing was started" in ended.output
    assert place.run("whole-2").files() == {".lock", "run.json", "plan.json", "plans/001.json"}
    assert place.run("whole-2").read("run.json")["name"] == "whole-2"


def test_full_weights_from_shards_open_with_transformers(place: Place, many: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, one = place.run("full"), place.run("full-one")
    check_files(run, 2, MODEL)
    check_metrics(run, 2)
    check_files(one, 1, MODEL)
    assert run.losses() == pytest.approx(one.losses(), rel=1e-5)
    model = AutoModelForCausalLM.from_pretrained(run.folder / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(run.folder / "model")
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "alpha"}], return_tensors="pt", return_dict=True)
    start = AutoModelForCausalLM.from_pretrained(place.folder / "model", dtype=torch.float32)
    assert (model(**ids).logits - start(**ids).logits).abs().max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "arguments", "num_ranks", "exported"),
    [
        ("run.yaml", ("--gpus", "1"), 1, ADAPTER),
        ("full.yaml", ("--gpus", "1"), 1, MODEL),
        ("run.yaml", ("--gpus", "2", "parallel.strategy=fsdp"), 2, ADAPTER),
    ],
)
def test_other_layouts_at_the_command_line(
    place: Place, file: str, arguments: tuple[str, ...], num_ranks: int, exported: set[str]
) -> None:
    name = f"slow-{num_ranks}-{file.removesuffix('.yaml')}"
    ended = place.train(name, *arguments, file=file)
    assert ended.code == 0 and "verified" in ended.output and "reopened by" in ended.output, ended.output
    check_files(place.run(name), num_ranks, exported | {"logs/launcher.log"})
    check_metrics(place.run(name), num_ranks)
