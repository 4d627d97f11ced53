"""report.json and report.md: plan beside measurement, and no number that nobody measured."""

from __future__ import annotations

import json
import math

import pytest
from markdown_it import MarkdownIt

from manyhands.config.schema import MethodSection, RunConfig
from manyhands.core.terms import Metric
from manyhands.metrics.report import write_report
from manyhands.planner.types import MemoryEstimate, Plan
from manyhands.training.types import TrainState
from tests.support import plans

CONFIG = RunConfig(name="demo", model={"name": "tiny"}, data={"train": "rows.jsonl"})


def make_plan() -> Plan:
    return plans.make_plan(
        config_digest=CONFIG.digest,
        data_digest="d",
        device="cuda",
        world_size=2,
        strategy="ddp",
        reshard_after_forward=False,
        compute_dtype="bfloat16",
        frozen_dtype="bfloat16",
        attention="varlen",
        batch_samples=8,
        micro_tokens=2048,
        num_steps=10,
        warmup_steps=1,
        memory=MemoryEstimate(terms={"weights": 2**30, "activations": 2**29}, limit=2**36),
    )


SOURCE = {"name": "rows", "hub": False, "format": "messages", "weight": 1.0, "num_samples": 280, "num_tokens": 9000,
          "num_validation_samples": 20, "num_validation_tokens": 700}  # fmt: skip
MEASURED = {
    "num_parameters": 1000,
    "num_trained_parameters": 50,
    "losses": [3.0, 2.0, 1.0, 0.5],
    "seconds_by_step": [9.0, 1.0, 2.0, 2.0],
    "tokens_by_step": [50, 50, 100, 300],
    "input_wait_by_step": [5.0, 1.0, 0.01, 0.03],
    "evaluations": [
        {"step": 0, "loss": 3.1, "perplexity": 22.2, "accuracy": 0.25, "samples": [("q", "a")]},
        {"step": 4, "loss": 0.9, "perplexity": 2.46, "accuracy": 0.75, "samples": [("q", "b |c\n# d")]},
    ],
    "peak_bytes_by_rank": [2**30, 2**30 + 2**29],
    "verified": {"adapter": "120 tensors equal"},
    "data": [SOURCE],
    "started": 0.0,
}


def write_metrics(folder, num_steps=100, at=()):
    """Rows of a run whose loss falls from 4 to 0, ``at`` some steps not finite; a last line that was cut off."""
    fixed = {"kind": "step", "grad_norm": 1.5, "learning_rate": 1e-3}
    losses = [None if n in at else 4 * (1 - n / num_steps) for n in range(1, num_steps + 1)]
    rows = [{"step": n, "loss": loss, **fixed} for n, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"kind": "st')


def test_the_report_sets_plan_and_measurement_side_by_side(tmp_path):
    state = TrainState(
        step=4, samples=32, tokens=500, loss_tokens=200, elapsed_s=14.0, stop_reason="all 4 steps are done"
    )
    write_report(tmp_path, make_plan(), CONFIG, state, MEASURED)
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["planned"]["memory_bytes"] == 2**30 + 2**29
    assert report["measured"]["peak_memory_bytes_by_rank"] == [2**30, 2**30 + 2**29]
    # the first two steps carry compilation: (100 + 300) tokens in (2 + 2) s
    assert report["measured"]["tokens_per_s"] == 100.0
    assert report["measured"]["step_s"] == 2.0
    assert report["measured"]["input_wait_share"] == 0.01  # (0.01 + 0.03) s of (2 + 2) s
    assert [row["loss"] for row in report["evaluations"]] == [3.1, 0.9]
    page = (tmp_path / "report.md").read_text()
    assert "| peak memory per rank | 1.50 GiB | 1.50 GiB |" in page
    assert "| share of time waiting for input | - | 1.00% |" in page
    assert "| 4 | 0.9000 | 2.460 | 75.00% |" in page
    assert "Verified `adapter/`: 120 tensors equal" in page


def test_settings_hold_every_key_that_changes_what_is_learned(tmp_path):
    learned = {
        "method": {"neftune_alpha": 5.0},
        "optimizer": {"beta2": 0.95},
        "schedule": {"min_ratio": 0.1},
        "preference": {"beta": 0.3, "loss": "ipo"},
        "moe": {"balance": 0.01},
    }
    config = RunConfig.model_validate(CONFIG.model_dump(exclude_unset=True) | learned | {"task": "preference"})
    settings = write_report(tmp_path, make_plan(), config, TrainState(step=4), MEASURED)["settings"]
    expected = {f"{name}.{key}": value for name, keys in learned.items() for key, value in keys.items()}
    assert expected | {"task": "preference"} == {key: settings.get(key) for key in (*expected, "task")}


def test_what_was_not_measured_is_left_out(tmp_path):
    measured = {"losses": [math.nan], "seconds_by_step": [], "devices": []}
    report = write_report(tmp_path, make_plan(), CONFIG, TrainState(stop_reason="nothing to do"), measured)
    assert not {"tokens_per_s", "first_loss", "peak_memory_bytes_by_rank"} & set(report["measured"])
    page = (tmp_path / "report.md").read_text()
    assert "Nothing was held out" in page and "nan" not in page
    assert {file.name for file in tmp_path.iterdir()} == {"report.json", "report.md", "report.html"}


def test_the_report_says_what_was_set_on_what_it_was_trained_and_what_to_do_next(tmp_path):
    assert "ask it" not in write_report(tmp_path, make_plan(), CONFIG, TrainState(step=4), MEASURED)["next"], (
        "nothing was saved"
    )
    (tmp_path / "adapter").mkdir()
    report = write_report(tmp_path, make_plan(), CONFIG, TrainState(step=4, stop_reason="done"), MEASURED)
    settings = report["settings"]
    assert settings["optimizer.learning_rate"] == 1e-3 and settings["batch.samples"] == 8, (
        "the plan's, where the file says auto"
    )
    assert (settings["method.rank"], settings["method.alpha"], settings["schedule.warmup_steps"]) == (16, 32.0, 1)
    assert not {"method.dora", "method.train", "stop.max_steps"} & settings.keys(), "what nobody asked for"
    assert report["data"] == {"digest": "d", "sources": MEASURED["data"]}
    assert report["started"] == "1970-01-01 00:00:00 UTC" and report["finished"] > "2026"
    assert {"python", "manyhands", "torch", "transformers"} <= report["versions"].keys()
    assert report["next"]["ask it"] == f"manyhands generate {tmp_path} --prompt q"
    page = (tmp_path / "report.md").read_text()
    assert "| optimizer.learning_rate | 0.001 |" in page and "| method.rank | 16 |" in page
    assert "- `rows` (messages): 280 samples, 9,000 tokens, 20 held out" in page
    assert "\n    b |c\n    # d\n" in page, "what a model says is no markup"
    assert (
        page.rstrip().endswith(f"manyhands tensorboard {tmp_path}") and f"manyhands export {tmp_path} --merge" in page
    )


def test_figures_of_a_declared_metric_have_its_label_and_unit(tmp_path):
    metrics = (Metric("preferred", "preferred", label="pairs preferred", is_share=True),)
    evaluations = [{"step": 4, "loss": 0.9, "preferred": 0.5, "unknown_one": 2.0}]
    measured = MEASURED | {"metrics": metrics, "evaluations": evaluations}
    write_report(tmp_path, make_plan(), CONFIG, TrainState(step=4), measured)
    page = (tmp_path / "report.md").read_text()
    assert (
        "| step | held-out loss | pairs preferred | unknown one |" in page and "| 4 | 0.9000 | 50.00% | 2.000 |" in page
    )
    assert "pairs preferred" in (tmp_path / "report.html").read_text()


def test_names_and_samples_are_no_markup_and_steer_no_terminal(tmp_path):
    attack = "<img src=x onerror=alert(1)>|[a](b)`\x1b]0;x\x07\n# h"
    (tmp_path / "adapter").mkdir()
    measured = MEASURED | {
        "data": [SOURCE | {"name": attack}],
        "evaluations": [MEASURED["evaluations"][-1] | {"samples": [(attack, attack)], "sets": {attack: {"loss": 1.0}}}],
        "verified": {"adapter": attack},
        "slow": [attack],
    }
    config = CONFIG.model_copy(update={"model": CONFIG.model.model_copy(update={"name": attack})})
    state = TrainState(step=4, stop_reason=attack, divergence=attack)
    write_report(tmp_path, make_plan(), config, state, measured)
    for file in ("report.md", "report.html"):
        text = (tmp_path / file).read_text()
        assert "onerror" in text and not {"\x1b", "\x07"} & set(text)
    shown = MarkdownIt("commonmark").enable("table").render((tmp_path / "report.md").read_text())
    assert "<img" not in shown and "<a " not in shown and shown.count("<h1>") == 1
    assert "<img" not in (tmp_path / "report.html").read_text()


def test_a_setting_that_was_asked_for_is_shown(tmp_path):
    config = CONFIG.model_copy(
        update={"method": MethodSection(name="qlora", dora=True, target_modules=("*.q_proj", "a|b"))}
    )
    write_report(tmp_path, make_plan(), config, TrainState(), {})
    page = (tmp_path / "report.md").read_text()
    assert "| method.dora | true |" in page and r"| method.target_modules | \*.q_proj, a\|b |" in page


@pytest.mark.parametrize("num_steps", [2, 7, 60, 61, 1000])
def test_the_course_of_the_loss_is_shown_at_any_length(tmp_path, num_steps):
    write_metrics(tmp_path, num_steps, at=(1,))
    report = write_report(tmp_path, make_plan(), CONFIG, TrainState(), {})
    curve = report["curve"]
    assert len(curve) == min(num_steps, 60) and curve[-1]["step"] == num_steps
    losses = [point["loss"] for point in curve if "loss" in point]
    assert losses == sorted(losses, reverse=True) and losses[-1] == pytest.approx(
        2 * (num_steps - curve[-2]["step"] - 1) / num_steps
    )
    page = (tmp_path / "report.md").read_text()
    drawn = page.split("```")[1].strip("\n")
    assert len(drawn) == len(curve) and drawn.endswith("▁") and ("█" in drawn or len(losses) == 1)
    assert page.count("| 1.5 | 0.001 |") <= 6 and f"| {num_steps} | " in page


def test_a_report_without_metrics_draws_nothing(tmp_path):
    report = write_report(tmp_path, make_plan(), CONFIG, TrainState(), {})
    assert "curve" not in report and "```" not in (tmp_path / "report.md").read_text()
