"""The report of a finished run: what was asked, what was planned beside what was measured, and what to do next; as
JSON, as text and as a page.

Reads metrics.jsonl, writes three files. Knows the plan, the config and numbers; a number that nobody measured is left
out, never guessed.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manyhands.config.schema import RunConfig
from manyhands.core.files import read_rows, write_atomically
from manyhands.core.limits import GIB
from manyhands.core.terms import LANGUAGE_MODEL
from manyhands.core.text import code_span, in_markdown, indented, printable
from manyhands.core.units import count_of, draw_line
from manyhands.metrics.page import render_report
from manyhands.metrics.sinks import without_nan
from manyhands.metrics.summary import (
    describe_settings,
    describe_versions,
    format_number,
    make_curve,
    metrics_of,
    name_time,
    read_evaluations,
)
from manyhands.planner.text import describe_checkpointing, describe_degrees
from manyhands.planner.types import Plan
from manyhands.training.types import TrainState, figures_of

TABLE_ROWS = 6  # of the loss over steps
SHOWN_CHARACTERS = 600  # of a sample's prompt and answer
WARMUP_STEPS = 2  # left out of the speed where there are more: compilation, first allocations


def write_report(
    folder: str | os.PathLike[str], plan: Plan, config: RunConfig, state: TrainState, measured: Mapping[str, Any]
) -> dict[str, Any]:
    """Writes report.json, report.md and report.html into ``folder`` and returns what report.json holds.

    ``measured`` may hold: num_parameters, num_trained_parameters, losses, seconds_by_step, tokens_by_step,
    input_wait_by_step (one value a step of this launch), evaluations (in order), metrics (what their figures
    are), figures (of the last step), devices (the last reading of each rank), peak_bytes_by_rank, checkpoint_s,
    verified (folder name -> what verification found), data (as ``describe_data`` has it), device (its name), started
    (seconds since 1970).
    """
    path = Path(folder)
    evaluations = list(measured.get("evaluations", []))
    known = {row["step"] for row in evaluations}  # others are of the launches before
    earlier = [row.to_row() for row in read_evaluations(path / "metrics.jsonl") if row.step not in known]
    curve = make_curve(read_rows(path / "metrics.jsonl", "step"))
    measured = {**measured, "evaluations": earlier + evaluations, "curve": curve}
    report = make_report(plan, config, state, {**measured, "restarts": read_rows(path / "restarts.jsonl")})
    report["next"] = suggest_commands(path, config, report)
    write_atomically(path / "report.json", json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    write_atomically(path / "report.md", format_report(report))
    write_atomically(path / "report.html", render_report(report))
    return report


def make_report(plan: Plan, config: RunConfig, state: TrainState, measured: Mapping[str, Any]) -> dict[str, Any]:
    """The report as plain values: bytes, seconds, tokens, nats."""
    peaks = measured.get("peak_bytes_by_rank") or [int(device["peak_bytes"]) for device in measured.get("devices", [])]
    further = [metric for metric in measured.get("metrics", ()) if metric not in LANGUAGE_MODEL.metrics]
    evaluations = [
        {name: row.get(name) for name in ("step", "loss", *figures_of(row), "num_samples", "num_loss_tokens")}
        | ({"sets": row["sets"]} if row.get("sets") else {})
        for row in measured.get("evaluations", [])
    ]
    losses = [loss for loss in measured.get("losses", []) if math.isfinite(loss)]
    report = without_nan(
        {
            "name": config.name,
            "model": config.model.name,
            "task": config.task,
            "method": config.method.name,
            "started": name_time(measured["started"]) if "started" in measured else None,
            "finished": name_time(time.time()),
            "settings": describe_settings(config, plan),
            "data": {"digest": plan.data_digest, "sources": measured.get("data")},
            "versions": describe_versions(),
            "config_digest": config.digest,
            "plan_digest": plan.digest,
            "planned": _planned(plan, measured),
            "measured": {
                "steps": state.step,
                "stop_reason": state.stop_reason,
                "divergence": state.divergence or None,
                "skipped_steps": state.num_skipped or None,
                "left_out_steps": [step + 1 for step in state.left_out] or None,
                "slow": measured.get("slow") or None,
                "unmoved": measured.get("unmoved"),
                "samples": state.samples,
                "tokens": state.tokens,
                "loss_tokens": state.loss_tokens,
                "training_s": round(state.elapsed_s, 3),
                "parameters": measured.get("num_parameters"),
                "trained_parameters": measured.get("num_trained_parameters"),
                "peak_memory_bytes_by_rank": peaks or None,
                **_speed(*(measured.get(f"{what}_by_step", []) for what in ("seconds", "tokens", "input_wait"))),
                "first_loss": losses[0] if losses else None,
                "last_loss": losses[-1] if losses else None,
                "figures": measured.get("figures") or None,
                "checkpoint_s": measured.get("checkpoint_s"),
            },
            "restarts": measured.get("restarts") or None,
            "curve": measured.get("curve") or None,
            "evaluations": evaluations,
            "metrics": {each.name: {"label": each.label, "is_share": each.is_share} for each in further} or None,
            "samples": _samples(measured.get("evaluations", [])) or None,
            "best": {"step": state.best_step, "loss": state.best_loss} if state.best_step is not None else None,
            "verified": measured.get("verified"),
        }
    )
    return _without_none(report)


def _planned(plan: Plan, measured: Mapping[str, Any]) -> dict[str, Any]:
    """What the plan said of the run."""
    return {
        "number": plan.number,
        "cause": plan.cause,
        "world_size": plan.layout.world_size,
        "device": plan.layout.device,
        "device_name": measured.get("device"),
        "strategy": plan.layout.strategy,
        "degrees": describe_degrees(plan.layout) or None,
        "activation_checkpointing": describe_checkpointing(plan.layout),
        "steps": plan.num_steps,
        "memory_bytes": plan.memory.total,
        "memory_terms_bytes": plan.memory.terms,
        "step_s": plan.step_s,
        "tokens_per_s": plan.time.tokens_per_s if plan.time is not None else None,
        "time": plan.time.model_dump() if plan.time is not None else None,
    }


def format_report(report: Mapping[str, Any]) -> str:
    """report.md from what report.json holds."""
    planned, done = report["planned"], report["measured"]
    warning = [f"**Training diverged: {in_markdown(done['divergence'])}.**", ""] if "divergence" in done else []
    how = (
        f"{report['method']}, {planned['strategy']} on {planned['world_size']} x {planned['device']}"
        f"{planned.get('degrees', '')}, "
        f"activation checkpointing {planned['activation_checkpointing']}"
    )
    if "unmoved" in done:
        warning += [f"**{in_markdown(done['unmoved'])}.**", ""]
    warning += [f"**{in_markdown(text[:1].upper() + text[1:])}.**\n" for text in done.get("slow", ())]
    if "skipped_steps" in done:
        warning += [f"**{done['skipped_steps']} updates were skipped (guards; see logs/batch-*.json).**", ""]
    title, model = in_markdown(report["name"]), in_markdown(report["model"])
    lines = [f"# {title}", "", *warning, f"{model}: {report['task']}, {how}.", ""]
    lines += ["| | planned | measured |", "|---|---|---|"]
    lines.append(f"| steps | {planned['steps']} | {done['steps']} ({in_markdown(done['stop_reason'])}) |")
    peaks = done.get("peak_memory_bytes_by_rank")
    peak = f"{max(peaks) / GIB:.2f} GiB" if peaks else "-"
    resident = "" if planned["device"] == "cuda" else " (resident, libraries included)"
    lines.append(f"| peak memory per rank{resident} | {planned['memory_bytes'] / GIB:.2f} GiB | {peak} |")
    for label, name, form in (("seconds per step", "step_s", ".3f"), ("tokens/s, all ranks", "tokens_per_s", ",.0f")):
        lines.append(f"| {label} | {format_number(planned, name, form)} | {format_number(done, name, form)} |")
    lines.append(f"| share of time waiting for input | - | {format_number(done, 'input_wait_share', '.2%')} |")
    lines += [
        "",
        f"Training took {done['training_s']:.0f} s, evaluations, checkpoints and the first steps included, which the"
        f" speed above leaves out: {count_of(done['samples'], 'sample')}, {done['tokens']:,} tokens,"
        f" {done['loss_tokens']:,} of them in the loss.",
    ]
    if "trained_parameters" in done and "parameters" in done:
        share = done["trained_parameters"] / done["parameters"]
        lines.append(
            f"Parameters: {done['parameters']:,}, of which {done['trained_parameters']:,} were trained ({share:.2%})."
        )
    if "first_loss" in done:
        lines.append(
            f"Training loss: {done['first_loss']:.4f} in this launch's first step, {done['last_loss']:.4f} in the last."
        )
    if "figures" in done:
        figures = (f"{name.replace('_', ' ')} {figure:.3g}" for name, figure in done["figures"].items())
        lines.append(f"In the last step: {', '.join(figures)}.")
    lines += _restart_lines(report.get("restarts", []))
    lines += _curve_lines(report.get("curve", []))
    lines += _evaluation_lines(report)
    lines += _sample_lines(report.get("samples", []))
    for name, found in report.get("verified", {}).items():
        lines += ["", f"Verified `{name}/`: {in_markdown(found)}"]
    lines += _setting_lines(report) + _next_lines(report.get("next", {}))
    return "\n".join(lines) + "\n"


def _restart_lines(restarts: Sequence[Mapping[str, Any]]) -> list[str]:
    if not restarts:
        return []
    lost = sum(row["lost_steps"] for row in restarts)
    times = "once" if len(restarts) == 1 else f"{len(restarts)} times"
    causes = [row["cause"] + (f" ({row['lost']})" if row.get("lost") else "") for row in restarts]
    return ["", f"Restarted {times} after a fault, {lost} steps done again: {in_markdown('; '.join(causes))}."]


def _evaluation_lines(report: Mapping[str, Any]) -> list[str]:
    if not (evaluations := report.get("evaluations")):
        return ["", "Nothing was held out: no validation loss."]
    metrics = metrics_of(report)
    labels = ["step", "held-out loss", *(in_markdown(metric.label) for metric in metrics)]
    lines = ["", f"| {' | '.join(labels)} |", f"|{'---|' * len(labels)}"]
    for row in evaluations:
        cells = [metric.format(row.get(metric.name), ".3f", ".2%") for metric in metrics]
        lines.append(f"| {' | '.join([str(row['step']), format_number(row, 'loss', '.4f'), *cells])} |")
    return lines + _set_lines(evaluations)


def _set_lines(evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    """The loss of each set of evaluate.data, a column each."""
    names = list(dict.fromkeys(name for row in evaluations for name in row.get("sets") or {}))
    if not names:
        return []
    escaped = map(in_markdown, names)
    lines = ["", f"| step | {' | '.join(f'loss on {name}' for name in escaped)} |", f"|---|{'---|' * len(names)}"]
    for row in evaluations:
        cells = [format_number((row.get("sets") or {}).get(name, {}), "loss", ".4f") for name in names]
        lines.append(f"| {row['step']} | {' | '.join(cells)} |")
    return lines


def _samples(evaluations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each held-out prompt with its first and its last answer, where the evaluations answered any."""
    answered = [row for row in evaluations if row.get("samples")]
    if not answered:
        return []
    first, last = answered[0], answered[-1]
    before = dict(first["samples"]) if first is not last else {}
    steps = {"step": last["step"], "before_step": first["step"]}
    return [
        {"prompt": prompt, "before": before.get(prompt), "answer": answer, **steps}
        for prompt, answer in last["samples"]
    ]


def suggest_commands(folder: Path, config: RunConfig, report: Mapping[str, Any]) -> dict[str, str]:
    """What to do with what the run left: command by purpose."""
    name = shlex.quote(str(folder))
    prompt = report["samples"][0]["prompt"] if report.get("samples") else "..."
    prompt = prompt if len(prompt) < 100 and "\n" not in prompt and prompt == printable(prompt) else "..."
    commands = {}
    if any((folder / result).is_dir() for result in ("adapter", "model")):  # a run that diverged has written none
        commands["ask it"] = f"manyhands generate {name} --prompt {shlex.quote(prompt)}"
    if commands and config.method.trains_adapters and not config.output.merge:
        commands["write the model with the adapter merged into it"] = (
            f"manyhands export {name} --merge --output {name}/merged"
        )
    commands["see this report as a page"] = f"xdg-open {name}/report.html"
    if config.log.tensorboard:
        commands["see the curves"] = f"manyhands tensorboard {name}"
    return commands


def _curve_lines(curve: Sequence[Mapping[str, Any]]) -> list[str]:
    if len(curve) < 2:
        return []
    losses = [point.get("loss") for point in curve]
    every = max(1, math.ceil(len(curve) / TABLE_ROWS))
    shown = [point for index, point in enumerate(curve) if (len(curve) - 1 - index) % every == 0]
    lines = ["", f"Training loss, steps 1 to {curve[-1]['step']}:", "", "```", draw_line(losses), "```", ""]
    lines += ["| to step | training loss | gradient norm | learning rate |", "|---|---|---|---|"]
    columns = (("loss", ".4f"), ("grad_norm", ".3g"), ("learning_rate", ".3g"))
    for point in shown:
        cells = [format_number(point, name, form) for name, form in columns]
        lines.append(f"| {point['step']} | {' | '.join(cells)} |")
    return lines


def _sample_lines(samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Text of the data and of the model is code, nothing of it markup."""
    lines = ["", "## Held-out samples"] if samples else []
    for sample in samples:
        parts = [("prompt", sample["prompt"]), (f"after step {sample['step']}", sample["answer"])]
        if "before" in sample:
            parts.insert(1, (f"after step {sample['before_step']}", sample["before"]))
        for name, text in parts:
            shown = text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " ..."
            lines += ["", f"{name}:", "", *indented(shown or "(nothing)")]
    return lines


def _setting_lines(report: Mapping[str, Any]) -> list[str]:
    lines = ["", "## Settings", "", "| key | value |", "|---|---|"]
    lines += [f"| {key} | {format_value(value)} |" for key, value in report["settings"].items()]
    lines += ["", f"Data {report['data']['digest'][:16]}" + (":" if "sources" in report["data"] else ".")]
    for source in report["data"].get("sources", []):
        held_out = f", {source['num_validation_samples']:,} held out" if source["num_validation_samples"] else ""
        weight = f", weight {source['weight']:g}" if source["weight"] != 1 else ""
        counts = f"{count_of(source['num_samples'], 'sample')}, {source['num_tokens']:,} tokens{held_out}{weight}"
        counts += "".join(f", {number:,} left out by {key}" for key, number in source.get("left_out", {}).items())
        lines.append(f"- {code_span(source['name'])} ({source['format']}): {counts}")
    begun = f"Started {report['started']}, finished" if "started" in report else "Finished"
    versions = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    return [*lines, "", f"{begun} {report['finished']}.", "", f"Versions: {versions}."]


def _next_lines(commands: Mapping[str, str]) -> list[str]:
    lines = ["", "## Next"] if commands else []
    for purpose, command in commands.items():
        lines += ["", f"{purpose[0].upper()}{purpose[1:]}:", "", *indented(command)]
    return lines


def format_value(value: Any) -> str:
    """A setting for a cell of a table."""
    return in_markdown(_plain_value(value))


def _plain_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_plain_value(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def _speed(seconds: Sequence[float], tokens: Sequence[int], waits: Sequence[float]) -> dict[str, float | None]:
    """Means over steps after ``WARMUP_STEPS`` and the slowest rank's share of waiting; nothing without steps."""
    skip = WARMUP_STEPS if len(seconds) > WARMUP_STEPS else 0
    total_s = sum(seconds[skip:])
    if not total_s:
        return {}
    return {
        "step_s": total_s / len(seconds[skip:]),
        "tokens_per_s": sum(tokens[skip:]) / total_s,
        "input_wait_share": sum(waits[skip:]) / total_s if waits else None,
    }


def _without_none(value: Any) -> Any:
    """Leaves out what was not measured."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
