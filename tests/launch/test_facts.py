"""Facts of a whole run, from files that are there, and a plan made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from manyhands.core.errors import UserError
from manyhands.importers.load import config_from_mapping
from manyhands.launch.run.prepare import gather_facts
from manyhands.planner.search import plan
from tests.support.tiny import tiny_tokenizer, write_tiny_model


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


@pytest.mark.parametrize("packed", [False, True])
def test_ids_beyond_the_embedding_are_refused_before_the_launch(tmp_path: Path, packed: bool):
    """Tokens that a tool added to the tokenizer, and not to the model: by their names, whatever rows bring them."""
    write_tiny_model(tmp_path / "model", "llama")  # 260 rows
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<new0>", "<new1>"])
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"the cat {number}", "completion": "sat"} for number in range(40)]
    if packed:
        rows[17] = {"input_ids": [1, 2, 261]}
        rows = [row if "input_ids" in row else {"input_ids": [1, 2, 3, 4]} for row in rows]
    else:
        rows[17]["completion"] = "sat <new1> on <new0>"
        rows[18]["prompt"] = "<new1>"
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for _ in range(2):  # from the cache, too
        with pytest.raises(UserError, match="beyond the model's embedding, which has 260 rows") as caught:
            gather_facts(run_config(tmp_path), report=lambda _: None)
        wanted = ["rows.jsonl:18: the token '<new0>' has the id 260"] * (not packed)
        assert list(caught.value.details) == [*wanted, "rows.jsonl:18: the token '<new1>' has the id 261"]
    mapping = {"name": "more", "model": {"name": str(tmp_path / "model"), "new_tokens": ["<new0>", "<new1>"]}}
    data = {"train": str(tmp_path / "rows.jsonl"), "cache": str(tmp_path / "cache")}
    facts = gather_facts(config_from_mapping(mapping | {"data": data}, where="test"), report=lambda _: None)
    assert facts.data.largest_id == 261 and facts.model.vocab_size == 262
