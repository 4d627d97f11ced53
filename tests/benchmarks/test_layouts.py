"""The layout that the plan chooses is within 1 % of the fastest one that was measured beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import layouts
from benchmarks.foresight_cases import WORKLOADS
from benchmarks.layouts import BOUND, Judged, Seconds, judge, section, sort_rows
from manyhands.facts.gpu_kinds import load_kinds

FILES = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.jsonl"))
ROWS = sort_rows(FILES)


def compared() -> list[Any]:
    """Names of workloads and kinds of GPU of which two layouts were measured in one lease."""
    ours = {work.name for work in WORKLOADS}
    leases = {pair: [lease for taken in seconds.values() for lease in taken] for pair, seconds in sorted(ROWS.items())}
    pairs = [pair for pair, names in leases.items() if pair[0] in ours and len(names) > len(set(names))]
    return [pytest.param(*pair, id=" on ".join(pair)) for pair in pairs]


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
