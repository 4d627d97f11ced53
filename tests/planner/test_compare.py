"""``manyhands plan --compare``: the newest plan of a run's folder beside what its report measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from manyhands.cli.main import app
from manyhands.facts.gpu_kinds import describe_host, parse_gpus
from manyhands.launch.run.folder import RunFolder
from manyhands.planner.search import plan
from manyhands.planner.text import compare, describe_cost
from tests.planner.examples import GIB, facts, llama_8b, run_config

MACHINE = facts(llama_8b()).model_copy(update={"host": describe_host(parse_gpus("2xH200"))})
PLAN = plan(run_config(), MACHINE)


def rows_of(report: dict) -> dict[str, tuple[str, ...]]:
    return {row[0].strip(): row[1:] for row in compare(PLAN, report)}


def test_memory_and_seconds_stand_beside_what_was_measured() -> None:
    assert PLAN.step_s is not None
    tensors = PLAN.memory.total - PLAN.memory.terms["overhead"] - PLAN.memory.terms["pools"]
    measured = {"peak_memory_bytes_by_rank": [tensors, tensors // 2], "step_s": PLAN.step_s / 1.1, "tokens_per_s": 1000}
    rows = rows_of({"measured": measured})
    assert rows["tensors' memory, GiB"] == (f"{tensors / GIB:.2f}", f"{tensors / GIB:.2f}", "+0.0%")
    assert rows["seconds a step"][2] == "+10.0%"
    assert rows["rank 1, GiB"][1] == f"{tensors // 2 / GIB:.2f}"
    assert {"weights, GiB", "matmuls, s", "tokens/s"} <= rows.keys()


def test_what_was_not_predicted_is_a_dash() -> None:
    cpu = plan(run_config(), facts())
    rows = {row[0]: row for row in compare(cpu, {"measured": {"step_s": 2.0}})}
    assert rows["seconds a step"] == ("seconds a step", "-", "2", "")


def test_the_command_reads_a_folder_and_names_what_is_missing(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_plan(PLAN)
    missing = CliRunner().invoke(app, ["plan", "--compare", str(folder.path)])
    assert missing.exit_code != 0 and "no report" in str(missing.output) + str(missing.exception)
    folder.report_json.write_text(json.dumps({"measured": {"step_s": 1.0}}))
    shown = CliRunner().invoke(app, ["plan", "--compare", str(folder.path)])
    assert shown.exit_code == 0 and "seconds a step" in shown.output and f"{PLAN.step_s:.4g}" in shown.output


@pytest.mark.parametrize(
    "measured", [None, "x", {"step_s": "x"}, {"peak_memory_bytes_by_rank": "x"}, {"peak_memory_bytes_by_rank": ["x"]}]
)
def test_of_a_report_with_wrong_values_the_plan_is_shown_alone(measured: object) -> None:
    rows = rows_of({"measured": measured})
    assert "weights, GiB" in rows and "seconds a step" not in rows and "rank 0, GiB" not in rows


def test_a_damaged_report_is_called_damaged(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_plan(PLAN)
    folder.report_json.write_text('{"measured": {')
    refused = CliRunner().invoke(app, ["plan", "--compare", str(folder.path)])
    assert refused.exit_code == 2 and "the run's report is damaged" in refused.output


@pytest.mark.parametrize("beside", [["run.yaml"], ["--json"], ["--price", "2"], ["--gpus", "8xH200"]])
def test_what_a_comparison_does_not_read_is_refused(tmp_path: Path, beside: list[str]) -> None:
    refused = CliRunner().invoke(app, ["plan", *beside, "--compare", str(tmp_path)])
    assert refused.exit_code == 2 and "--compare is given beside" in refused.output


def test_a_price_that_json_would_not_show_is_refused() -> None:
    refused = CliRunner().invoke(app, ["plan", "run.yaml", "--json", "--price", "2"])
    assert refused.exit_code == 2 and "--price has no effect with --json" in refused.output


@pytest.mark.parametrize("arguments", [["plan"]])
def test_without_a_run_file_one_is_asked_for(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0 and "no run file" in str(done.output) + str(done.exception)


def test_a_price_gives_the_cost() -> None:
    assert PLAN.time is not None
    assert describe_cost(PLAN.time, 2.5) == f"cost: {2.5 * PLAN.time.gpu_hours:,.2f} at 2.50 a GPU-hour"
    assert "not known" in describe_cost(None, 2.5)
