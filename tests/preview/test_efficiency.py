"""The share of useful tokens: the plan, ``manyhands data`` and the batches that are made agree on it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from manyhands.config.schema import RunConfig
from manyhands.data.batch.collate import collate_samples
from manyhands.data.store.store import TokenStore
from manyhands.launch.run.prepare import gather_facts
from manyhands.model.inputs import batch_shape
from manyhands.planner.efficiency import lay_out_step
from manyhands.planner.search import plan
from manyhands.preview.collect import collect
from manyhands.preview.contents import describe_counts
from tests.support.plans import explain_why
from tests.support.tiny import write_tiny_model


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def write_run(folder: Path, model: Path, num_processes: int, **sections: Any) -> RunConfig:
    rows = [{"question": f"q{n}", "answer": "a" * (1 + n * n % 61)} for n in range(90)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(folder / "a.jsonl"), "cache": str(folder / "cache"), **sections.pop("data", {})}
    parallel = {"device": "cpu", "gpus": num_processes, **sections.pop("parallel", {})}
    return RunConfig.model_validate(
        {"name": "t", "model": {"name": str(model)}, "data": data, "parallel": parallel, **sections}
    )


@pytest.mark.parametrize("num_processes", [1, 3])
@pytest.mark.parametrize(
    "sections",
    [
        {"batch": {"samples": 8}},
        {"batch": {"samples": 8}, "parallel": {"compile": True}},
        {"batch": {"loss_tokens": 200}},
        {"batch": {"packs": 3}, "data": {"max_length": 100}},
        {"batch": {"packs": 3}, "data": {"max_length": 100, "packing": False}},
        {"batch": {"samples": 12, "micro_samples": 2}, "data": {"packing": False}},
        {
            "batch": {"samples": 8},
            "task": "cpt",
            "data": {"max_length": 32, "too_long": "split"},
            "parallel": {"compile": True},
        },
    ],
    ids=["packed", "tiles", "tokens", "packs", "packs unpacked", "rows", "blocks"],
)
def test_plan_preview_and_batches_agree(
    num_processes: int, sections: dict[str, Any], model_folder: Path, tmp_path: Path
) -> None:
    config = write_run(
        tmp_path,
        model_folder,
        num_processes,
        **{name: dict(section) if isinstance(section, dict) else section for name, section in sections.items()},
    )
    if config.task == "cpt":
        (tmp_path / "a.jsonl").write_text(json.dumps({"text": "".join(f"{n:05d} " for n in range(400))}) + "\n")
    facts = gather_facts(config, report=lambda _: None)
    made = plan(config, facts)
    assert made.layout.world_size == num_processes and made.efficiency is not None

    store = TokenStore.open(made.data_folder)
    shape = batch_shape(config, made, store, SimpleNamespace(needs_documents=False, images=None))  # type: ignore[arg-type]
    order = store.order_samples(config.seed, **made.step_size)
    num_steps = made.steps_per_epoch
    useful = computed = 0
    for step in np.unique(np.linspace(0, num_steps - 1, min(num_steps, 20)).astype(int)):
        rows = order.samples(0, int(step))
        useful += int(store.train.lengths[rows].sum())
        for micro in lay_out_step(made, rows, store.train.lengths).micro_batches:
            computed += num_processes * max(
                collate_samples(store.train, part, shape)["input_ids"].size for part in micro
            )
    assert made.efficiency == pytest.approx(useful / computed, rel=0, abs=1e-12)

    sentence = next(said for said in explain_why(made) if said.startswith("efficiency: ")).removeprefix("efficiency: ")
    shown = dict(describe_counts(collect(config, report=lambda _: None)))
    assert shown["not packed" if not made.packing else "packing"] == sentence
    share = float(sentence.split("%")[0])
    assert share == pytest.approx(100 * made.efficiency, abs=0.5)
