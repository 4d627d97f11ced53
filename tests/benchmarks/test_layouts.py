"""The layout that the plan chooses is within 1 % of the fastest one that was measured beside it."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import foresight, layouts
from benchmarks.foresight_cases import BY_NAME, DDP, FSDP, NONE, RESHARD, TRIED, WORKLOADS, Case, Workload, micro
from benchmarks.layouts import BOUND, Judged, Seconds, judge, section, sort_rows, work_of_row
from manyhands.facts.gpu_kinds import load_kinds

FILES = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.jsonl"))
ROWS = sort_rows(FILES)
# Choices that are further behind than the bound, and how far: {"WORKLOAD on KIND": "1.9 %"}. One that comes within it
# leaves this list.
BEHIND: dict[str, str] = {}


def has_several(seconds: Seconds) -> bool:
    """Whether two layouts were measured in one lease."""
    leases = [lease for taken in seconds.values() for lease in taken]
    return len(leases) > len(set(leases))


def compared() -> list[Any]:
    """Names of workloads and kinds of GPU."""
    ours = {work.name for work in WORKLOADS}
    pairs = [pair for pair, seconds in sorted(ROWS.items()) if pair[0] in ours and has_several(seconds)]
    return [pytest.param(*pair, id=" on ".join(pair), marks=marks_of(" on ".join(pair))) for pair in pairs]


def marks_of(name: str) -> list[Any]:
    return [pytest.mark.xfail(strict=True, reason=f"{BEHIND[name]} behind")] if name in BEHIND else []


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts, "WORK", tmp_path_factory.mktemp("layouts"))
        yield


def judged(name: str, rows: dict[tuple[str, str], Seconds], kind: str = "H200") -> Judged:
    of_gpu = next(known for known in load_kinds() if known.name == kind)
    found = judge(next(work for work in WORKLOADS if work.name == name), of_gpu, rows)
    assert found is not None
    return found


@pytest.mark.parametrize(("name", "kind"), compared())
def test_the_choice_is_within_the_bound_of_the_fastest(name: str, kind: str) -> None:
    found = judged(name, ROWS, kind)
    if found.behind is None:
        pytest.skip("the layout that is chosen today was not measured beside another one")
    assert found.behind <= BOUND, found.beside


def test_what_is_behind_is_a_workload_that_was_compared() -> None:
    assert BEHIND.keys() <= {str(param.id) for param in compared()}


def test_the_workloads_are_of_many_kinds() -> None:
    works = [workload.work for workload in WORKLOADS]
    assert len({work.name for work in works}) == len(works) >= 10
    assert {work.gpus for work in works} >= {1, 2} and {work.method for work in works} == {"full", "lora", "qlora"}
    assert any(work.keys.get("kernels.linear") == "fp8" for work in works)
    for workload in WORKLOADS:
        assert len(workload.layouts) >= 2 and not workload.work.keys.keys() & layouts.LAYOUT_KEYS
        assert all(BY_NAME[case.name].as_row().keys == case.keys for case in workload.cases)


# -- Which rows are compared -------------------------------------------------------------------------------------------

LORA = "llama8b,lora,1x2x4096,full"
CHOSEN = {"strategy": "single", "activation_checkpointing": "none", "micro_tokens": 10368, "pack_tokens": 8192}
SMALLER = CHOSEN | {"micro_tokens": 4096, "pack_tokens": 4096}
SELECTIVE = CHOSEN | {"activation_checkpointing": "selective"}


def rows_of(file: Path, *rows: dict[str, Any]) -> dict[tuple[str, str], Seconds]:
    base = {"shape": "llama8b", "method": "lora", "gpus": 1, "rows": 2, "length": 4096, "case": LORA}
    base |= {"device": "NVIDIA H200", "machine": "a"}
    file.write_text("".join(json.dumps(base | row) + "\n" for row in rows))
    return sort_rows([file])


def test_the_fastest_in_the_lease_of_the_choice_counts(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path / "rows.jsonl",
        CHOSEN | {"step_s": 1.0},
        SMALLER | {"step_s": 0.98},
        SELECTIVE | {"step_s": 0.5, "machine": "b"},
        SELECTIVE | {"step_s": 0.5, "limit_gib": 45.0},
        SELECTIVE | {"step_s": 0.5, "device": "NVIDIA H100 80GB HBM3"},
        SELECTIVE | {"step_s": 0.5, "by_hand": ["kernels.linear=fp8"]},
        SELECTIVE | {"step_s": 0.5, "rows": 4},
    )
    found = judged(LORA, rows)
    assert found.behind == pytest.approx(1 / 0.98 - 1) and str(found.best) == "none, 4,096"
    assert [str(way) for way in found.beside] == ["none, 4,096"]
    assert "| 2.0% (none, 4,096) |" in section([found]) and "0.5 s in other leases" in section([found])


def test_of_several_leases_the_one_counts_in_which_the_choice_is_furthest_behind(tmp_path: Path) -> None:
    rows = rows_of(
        tmp_path / "rows.jsonl",
        *({**CHOSEN, "step_s": 1.0, "machine": name} for name in "ab"),
        SELECTIVE | {"step_s": 1.03},
        SELECTIVE | {"step_s": 0.95, "machine": "b"},
    )
    assert judged(LORA, rows).behind == pytest.approx(1 / 0.95 - 1)


def test_without_a_second_layout_nothing_is_said(tmp_path: Path) -> None:
    found = judged(LORA, rows_of(tmp_path / "rows.jsonl", CHOSEN | {"step_s": 1.0}))
    assert found.behind is None and found.missing[0].name == LORA and len(found.missing) == 4
    assert "0 have the choice and another layout" in section([found])


def test_what_was_measured_beside_the_choice_is_not_missing(tmp_path: Path) -> None:
    found = judged(LORA, rows_of(tmp_path / "rows.jsonl", CHOSEN | {"step_s": 1.0}, SELECTIVE | {"step_s": 1.1}))
    assert [case.name.rpartition(LORA)[2] for case in found.missing] == [
        "",
        ",micro_tokens=4096,activation_checkpointing=none",
        ",activation_checkpointing=full,offload_activations=False",
    ]


def test_a_layer_more_or_less_is_the_same_choice(tmp_path: Path) -> None:
    name = "llama8b,lora,1x1x32768,full"
    chosen = judged(name, {}).chosen
    assert chosen.lighter_layers > 2
    row = {"case": name, "rows": 1, "length": 32768, "strategy": "single", "pack_tokens": 32768, "step_s": 1.0}
    row |= {"activation_checkpointing": chosen.checkpointing}
    near, far = ({**row, "lighter_layers": chosen.lighter_layers - less} for less in (1, 2))
    assert set(judged(name, rows_of(tmp_path / "rows.jsonl", near)).seconds) == {chosen}
    assert chosen not in judged(name, rows_of(tmp_path / "rows.jsonl", far)).seconds


def test_rows_name_their_work_without_their_layout() -> None:
    base = {"shape": "llama8b", "method": "lora", "gpus": 1, "rows": 2, "length": 4096, "step_s": 1.0} | CHOSEN
    keys = ["parallel.activation_checkpointing=full", "kernels.linear=fp8", "batch.micro_tokens=4096"]
    assert work_of_row(base | {"row": "8b-lora", "by_hand": keys}) == f"{LORA},linear=fp8"
    assert work_of_row(base | {"row": "8b-lora-recompute", "by_hand": []}) == LORA
    assert work_of_row(base | {"row": "no such row"}) is None


# -- What is measured --------------------------------------------------------------------------------------------------


def schedule(
    monkeypatch: pytest.MonkeyPatch, folder: Path, num_gpus: int, workloads: tuple[Workload, ...], **more: Any
) -> tuple[layouts.LayoutSchedule, list[tuple[str, str]]]:
    """On GPUs that there are not; and what it has started: cases and their GPUs."""
    gpus = [SimpleNamespace(name="NVIDIA H200", memory_bytes=140 * 2**30)] * num_gpus
    started: list[tuple[str, str]] = []

    def start(module: str, arguments: list[str], *_: Any, wait: Any = None) -> tuple[str, dict[str, Any]]:
        variables = json.loads(wait()[0]) if wait is not None else _[2]
        started.append((arguments[1], variables["CUDA_VISIBLE_DEVICES"]))
        time.sleep(0.01)
        return "", {"peak_reserved_gib": 1.0, "outside_gib": 1.0, "planned_gib": 2.0, "step_s": 1.0}

    for module in (foresight, layouts):
        monkeypatch.setattr(module, "read_host_facts", lambda: SimpleNamespace(gpus=gpus))
    monkeypatch.setattr(foresight, "start_processes", start)
    monkeypatch.setattr(foresight, "count_gpus", lambda: num_gpus)
    monkeypatch.setattr(layouts, "WORKLOADS", workloads)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    options = {"output": folder / "rows.jsonl", "have": [], "budget": 540.0, "gpus": None, "only": None} | more
    options |= {"workload": None, "alone": False, "case": None, "calibrate": False, "kept": False}
    return layouts.LayoutSchedule(argparse.Namespace(**options)), started


ALONE = tuple(Workload(Case("tiny", "full", 1, num, 128), (NONE | micro(128),)) for num in (4, 8, 12))
PAIR = Workload(Case("tiny", "full", 2, 4, 128), (DDP | NONE, FSDP | RESHARD | NONE))


def test_cases_of_a_workload_have_one_gpu_and_the_choice_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, started = schedule(monkeypatch, tmp_path, 2, (*ALONE, PAIR))
    assert made.run() == 0
    pairs = [name for name, gpus in started if gpus == "0,1"]
    assert pairs[0] == PAIR.name and [name for name, _ in started[: len(pairs)]] == pairs
    for workload in ALONE:
        mine = [(name, gpus) for name, gpus in started if name in {case.name for case in workload.cases}]
        assert [name for name, _ in mine] == [case.name for case in workload.cases]
        assert len({gpus for _, gpus in mine}) == 1
    assert {gpus for _, gpus in started} == {"0", "1", "0,1"}


def test_a_workload_that_does_not_fit_into_the_time_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, _ = schedule(monkeypatch, tmp_path, 1, (*ALONE, PAIR), budget=100.0)
    assert [case.name for case in made.pending] == [case.name for case in ALONE[0].cases]
    assert f"not begun: {ALONE[1].name}, all 2 cases" in capsys.readouterr().out


def test_there_is_something_to_try_without_a_gpu() -> None:
    assert all(case.name in BY_NAME and case.shape == "tiny" for workload in TRIED for case in workload.cases)
