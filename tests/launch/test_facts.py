"""Facts of a whole run, from files that are there, and a plan made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyhands.config.load import config_from_mapping
from manyhands.core.errors import UserError
from manyhands.launch.prepare import gather_facts
from manyhands.plan.search import plan
from tests.support.tiny import write_tiny_model


def run_config(folder: Path, **data: object):
    mapping = {
        "name": "gathered",
        "model": {"name": str(folder / "model")},
        "data": {"train": str(folder / "rows.jsonl"), "cache": str(folder / "cache"), "max_length": 64} | data,
        "parallel": {"gpus": 2, "device": "cpu"},
    }
    return config_from_mapping(mapping, where="test")


def test_facts_of_a_run_and_its_plan(tmp_path: Path):
    write_tiny_model(tmp_path / "model", "llama")
    rows = [{"prompt": "the cat", "completion": " ".join(["sat"] * (1 + i % 9))} for i in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config, said = run_config(tmp_path), []
    facts = gather_facts(config, report=said.append)
    assert facts.model.folder == str(tmp_path / "model")
    assert facts.data.num_samples + facts.data.num_validation_samples == 100
    assert facts.world_size is None
    made = plan(config, facts)
    assert (made.layout.world_size, made.layout.strategy, made.packing) == (2, "ddp", True)
    assert made.num_steps * (made.batch_samples or 0) >= facts.data.num_samples
    assert made.data_digest == facts.data.digest
    assert gather_facts(config, world_size=2, report=said.append).world_size == 2
    assert facts.free_disk_bytes > 0 and gather_facts(config, saves=False, report=said.append).free_disk_bytes is None


def test_a_broken_model_is_found_before_the_data_is_read(tmp_path: Path):
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match="this is not a model's folder"):
        gather_facts(run_config(tmp_path), report=lambda _: None)
