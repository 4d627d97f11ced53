"""A base model learns to chat: template and markers given, trained, saved, reopened by plain transformers and PEFT;
then gone on from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.e2e.runs import Place
from tests.support.tiny import CHATML, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow  # whole runs in processes of their own: minutes together

MARKERS = ["<|im_start|>", "<|im_end|>"]
START, END, NUM_SAMPLES = 257, 258, 259


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A base model of 256 bytes and <|endoftext|>; rows that always answer the same; run.yaml: LoRA with DoRA, 40
    steps.
    """
    folder = tmp_path_factory.mktemp("base")
    model = tiny_model("qwen3", vocab_size=257, eos_token_id=256, bos_token_id=None, pad_token_id=None)
    model.save_pretrained(folder / "model")
    tiny_tokenizer(("<|endoftext|>",)).save_pretrained(folder / "model")
    (folder / "chatml.jinja").write_text(CHATML)
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"say {i % 7}", "completion": "yes"}) + "\n" for i in range(64))
    )
    run = {
        "model": {"name": str(folder / "model"), "chat_template": str(folder / "chatml.jinja"), "new_tokens": MARKERS},
        "method": {"name": "lora", "rank": 8, "alpha": 16, "dora": True},
        "data": {"train": "rows.jsonl", "validation_fraction": 0.4, "max_length": 256, "cache": str(folder / "cache")},
        "batch": {"samples": 16},
        "optimizer": {"learning_rate": 0.03},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "stop": {"epochs": 20, "max_steps": 40},
        "parallel": {"device": "cpu"},
        "evaluate": {"every_steps": 0, "prompts": 1, "max_new_tokens": 8},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    full = {"method": {"name": "full"}, "optimizer": {"learning_rate": 0.01}}
    (folder / "full.yaml").write_text(yaml.safe_dump(run | full))
    return Place(folder)


def answer(model: Any, tokenizer: Any) -> list[int]:
    """Plain transformers, as a user would: template, generate, no word about where to stop."""
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "say 3"}], add_generation_prompt=True, return_tensors="pt"
    )
    ids = ids if isinstance(ids, torch.Tensor) else ids["input_ids"]
    assert (ids == START).sum() == 2 and (ids == END).sum() == 1
    return model.generate(input_ids=ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :].tolist()


def test_full_training_saves_a_model_that_chats(place: Place) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ended = place.train("full", file="full.yaml")
    assert ended.code == 0, ended.output
    folder = place.run("full").folder / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert (
        model.config.vocab_size == NUM_SAMPLES == len(tokenizer)
        and model.get_input_embeddings().weight.shape[0] == NUM_SAMPLES
    )
    assert model.generation_config.eos_token_id == [256, END]
    new = answer(model, tokenizer)
    assert tokenizer.decode(new[:-1]) == "yes" and new[-1] == END


@pytest.fixture(scope="module")
def adapter(place: Place) -> Path:
    ended = place.train("sharded", "parallel.gpus=2", "parallel.strategy=fsdp")
    assert ended.code == 0 and "PeftModel" in ended.output, ended.output
    return place.run("sharded").folder / "adapter"


def test_peft_opens_the_adapter_of_sharded_training_on_the_grown_base(place: Place, adapter: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(adapter)
    base = AutoModelForCausalLM.from_pretrained(place.folder / "model")
    base.resize_token_embeddings(len(tokenizer))
    base.generation_config.eos_token_id = [256, END]
    model = PeftModel.from_pretrained(base, str(adapter))
    new = answer(model, tokenizer)
    assert tokenizer.decode(new[:-1]) == "yes" and new[-1] == END


def test_generate_and_export_use_the_grown_model(place: Place, adapter: Path) -> None:
    asked = place.call("-m", "manyhands", "generate", str(adapter.parent), "--prompt", "say 5", "--max-new-tokens", "8")
    assert asked.code == 0 and asked.output.strip().splitlines()[-1] == "yes", asked.output
    merged = place.folder / "merged"
    ended = place.call("-m", "manyhands", "export", str(adapter.parent), "--output", str(merged), "--merge")
    assert ended.code == 0 and "verified" in ended.output, ended.output
    assert json.loads((merged / "config.json").read_text())["vocab_size"] == NUM_SAMPLES
    asked = place.call("-m", "manyhands", "generate", str(merged), "--prompt", "say 5", "--max-new-tokens", "8")
    assert asked.output.strip().splitlines()[-1] == "yes", asked.output


def test_a_run_goes_on_from_a_finished_one(place: Place, adapter: Path) -> None:
    """Rank, alpha and DoRA are the adapter's; the first evaluation is the last one of the run before; one adapter is
    saved.
    """
    keys = (
        "method.rank=16",
        "method.alpha=32",
        "method.dora=false",
        "stop.max_steps=2",
        f"method.adapter={adapter.parent}",
    )
    ended = place.train("again", *keys)
    assert ended.code == 0, ended.output
    before, after = place.run("sharded").evaluations(), place.run("again").evaluations()
    assert after[0][1] == pytest.approx(before[-1][1], rel=1e-5) and before[-1][1] < 0.5 * before[0][1]
    fields = json.loads((place.run("again").folder / "adapter" / "adapter_config.json").read_text())
    assert (fields["r"], fields["lora_alpha"], fields["use_dora"]) == (8, 16, True)


def test_an_adapter_and_a_run_file_that_contradict_are_refused(place: Place, adapter: Path) -> None:
    ended = place.train("wrong", "method.rank=4", "method.alpha=16", f"method.adapter={adapter}")
    assert ended.code == 2 and "method.rank is 4, and the adapter's is 8" in ended.output
    ended = place.train("wrong", "model.new_tokens=[]", f"method.adapter={adapter}")
    assert ended.code == 2 and "model.new_tokens" in ended.output


def test_markers_that_are_no_tokens_are_named(place: Place) -> None:
    ended = place.train("plain", "model.new_tokens=[]", "--dry-run")
    assert ended.code == 0 and "<|im_start|>, <|im_end|>" in ended.output, ended.output
