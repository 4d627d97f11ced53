"""The files of LLaMA-Factory's rewrite: its defaults, its data sets in a YAML file, batches, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from manyhands.config.read import ParsedFile, read_run_file
from manyhands.importers import llamafactory_v1
from manyhands.importers.load import load_run
from manyhands.importers.recognize import recognize, translate
from manyhands.importers.translation import ImportContext, Translation, flatten

SETS: dict[str, Any] = {
    "rows": {"path": "rows.json", "source": "local", "converter": "alpaca"},
    "chats": {"path": "org/chats", "converter": "sharegpt", "split": "test", "size": 9},
}
RUN = {"model": "org/model", "model_class": "llm", "train_dataset": "sets.yaml"}


def write(folder: Path, sets: dict[str, Any] = SETS, **changes: Any) -> Path:
    (folder / "sets.yaml").write_text(yaml.safe_dump(sets, sort_keys=False))
    (folder / "run.yaml").write_text(yaml.safe_dump({**RUN, **changes}, sort_keys=False))
    return folder / "run.yaml"


def translated(folder: Path, *, strict: bool = False, gpus: int = 2, **changes: Any) -> Translation:
    source = read_run_file(write(folder, **changes))
    importer = recognize(source.mapping)
    assert importer is not None and importer.TOOL == "LLaMA-Factory v1"
    return translate(source, importer, ImportContext(folder=folder, count_gpus=lambda: gpus, strict=strict))


def native(folder: Path, **changes: Any) -> dict[str, Any]:
    translation = translated(folder, **changes)
    assert translation.findings() == []
    return flatten(translation.mapping, {"data.chat_template_kwargs"})


def test_a_full_run_with_the_tool_s_defaults_is_exactly_this(tmp_path: Path) -> None:
    found = native(tmp_path, sets={"rows": SETS["rows"]}, dist_config={"name": "fsdp2"}, output_dir="out/full")
    source = {"path": "rows.json", "name": "rows", "format": "alpaca", "ignore": ["history", "weight"]}
    assert found == {
        "model.name": "org/model",
        "model.dtype": "bfloat16",
        "method.name": "full",
        "data.train": [source],
        "data.validation_fraction": 0,
        "data.max_length": 2048,
        "data.too_long": "truncate",
        "data.chat_template_kwargs": {"enable_thinking": False},
        "batch.samples": 2,
        "optimizer.learning_rate": 1e-4,
        "optimizer.weight_decay": 0.01,
        "optimizer.decay_embeddings": True,
        "schedule.name": "constant",
        "schedule.warmup_steps": 0,
        "stop.epochs": 3,
        "seed": 42,
        "checkpoint.every_steps": 0,
        "parallel.strategy": "fsdp",
        "output.dir": "out",
        "name": "full",
    }
    load_run(tmp_path / "run.yaml", context=ImportContext(gpus=2))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"peft_config": {"name": "lora"}},
            {"method.name": "lora", "method.rank": 8, "method.alpha": 16, "method.dropout": 0.05},
        ),
        (
            {"peft_config": {"name": "lora", "r": 4, "target_modules": ["q_proj"]}, "quant_config": {"name": "bnb"}},
            {"method.name": "qlora", "method.rank": 4, "method.target_modules": ["q_proj"]},
        ),
        (
            {"peft_config": {"name": "freeze", "freeze_trainable_layers": 2, "freeze_extra_modules": None}},
            {"method.name": "patterns", "method.train": ["layers[-2:]"]},
        ),
        ({"micro_batch_size": 3}, {"batch.samples": 6}),
        ({"micro_batch_size": 2, "global_batch_size": 8}, {"batch.samples": 8}),
        ({"batching_strategy": "padding_free", "micro_batch_size": 2}, {"batch.samples": 4, "data.packing": True}),
        ({"batching_strategy": "dynamic_padding_free", "micro_batch_size": 2}, {"batch.packs": 4}),
        (
            {"optim_config": {"name": "muon", "wd": 0.2, "adamw_betas": [0.8, 0.9]}},
            {"optimizer.name": "muon", "optimizer.weight_decay": 0.2, "optimizer.beta1": 0.8, "optimizer.beta2": 0.9},
        ),
        ({"save_epochs": 0.5}, {"checkpoint.per_epoch": 2}),
        ({"max_steps": 5, "bf16": False}, {"stop.max_steps": 5, "stop.epochs": 1_000_000, "model.dtype": "float32"}),
        (
            {"dist_config": {"name": "fsdp2"}, "mp_replicate_size": 2, "mp_shard_size": 4},
            {"parallel.strategy": "hsdp", "parallel.shard_degree": 4, "batch.samples": 8},
        ),
    ],
)
def test_keys_and_what_they_become(changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    found = native(tmp_path, **changes)
    assert {key: found.get(key) for key in expected} == expected
    load_run(tmp_path / "run.yaml", context=ImportContext(gpus=8 if "mp_shard_size" in changes else 2))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"lerning_rate": 1},
            "line 4, `lerning_rate`: LLaMA-Factory v1 has no such key: did you mean `learning_rate`?",
        ),
        ({"peft_config": {"name": "lora", "rr": 8}}, "`peft_config.rr`: LLaMA-Factory v1 has no such key"),
        ({"peft_config": {"name": "oft"}}, "line 5, `peft_config.name`: oft is not available: write lora or freeze"),
        ({"peft_config": {"r": 8}}, "`peft_config.name`: it is missing"),
        ({"micro_batch_size": 3, "global_batch_size": 8}, "8 is no multiple of 3 per GPU × 2 GPUs = 6"),
        ({"batching_strategy": "dynamic_batching"}, "it needs a number of steps: write max_steps"),
        ({"cp_size": 2}, "`cp_size`: `2`: sequences are not divided over GPUs: set it to 1"),
        ({"dist_config": {"name": "fsdpturbo", "ep_size": 16}}, "fsdpturbo is not available: write fsdp2"),
        ({"save_epochs": 0.3}, "0.3 is no even part of an epoch"),
        ({"train_dataset": "org/set"}, "org/set is no YAML file here that lists data sets"),
        ({"sets": {"a": {"path": "a.json", "converter": "pair"}}}, "sets.yaml, line 1, `a`: data of preferences (DPO)"),
        (
            {"sets": {"a": {"path": "a.json", "convertor": "alpaca"}}},
            "unknown key `convertor`: did you mean `converter`",
        ),
        ({"sets": {"a": {"path": "a.json"}}}, "converter: got null, allowed: alpaca, sharegpt"),
        ({"micro_batch_size": "two"}, "`micro_batch_size`: got two, allowed: a number"),
        ({"quant_config": {"name": "hqq"}, "peft_config": {"name": "lora"}}, "weights are quantized by bitsandbytes"),
        (
            {"cutoff_len": 8, "finetuning_type": "lora"},
            "a key of LLaMA-Factory, in a file that is read as LLaMA-Factory v1's",
        ),
    ],
)
def test_what_is_wrong_is_named_with_line_key_and_remedy(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    assert text in " | ".join(translated(tmp_path, **changes).findings())


def test_what_is_not_quite_the_same_is_said_and_refused_by_a_strict_caller(tmp_path: Path) -> None:
    (outcome,) = [outcome for outcome in translated(tmp_path).outcomes if outcome.kind == "substituted"]
    assert outcome.key == "train_dataset"
    for part in ("joined by a line break", "each answer of a conversation is a sample", "draw rows there"):
        assert part in outcome.why
    assert "--strict" in translated(tmp_path, strict=True).findings()[0]


def test_merging_an_adapter_is_one_refusal(tmp_path: Path) -> None:
    source = ParsedFile({"model": "a", "peft_config": {"name": "lora", "export_dir": "out"}}, "merge.yaml", {})
    importer = recognize(source.mapping)
    assert importer is not None and importer.TOOL == "LLaMA-Factory v1"
    assert len(translate(source, importer, ImportContext(folder=tmp_path)).findings()) == 1


def test_every_key_that_the_tool_knows_has_a_fate_whatever_its_value(tmp_path: Path) -> None:
    write(tmp_path)
    for kind in ("lora", "freeze"):
        for key in sorted(llamafactory_v1.KEYS):
            for value in (True, "x", ["x"], {"x": 1}):
                mapping: dict[str, Any] = {**RUN, "peft_config": {"name": kind}, "dist_config": {"name": "fsdp2"}}
                section, _, leaf = key.rpartition(".")
                target = mapping.setdefault(section, {}) if section else mapping
                target[leaf] = value
                t = translate(
                    ParsedFile(mapping, "run.yaml", {}), llamafactory_v1, ImportContext(folder=tmp_path, gpus=1)
                )
                assert {outcome.key for outcome in t.outcomes} >= set(flatten(mapping, llamafactory_v1.OPEN)), (
                    key,
                    value,
                )
