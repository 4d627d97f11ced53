"""One case a contradiction; every message names both keys."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from manyhands.config.checks import check
from manyhands.config.schema import default_cache
from manyhands.core.errors import UserError
from manyhands.importers.load import config_from_mapping
from tests.config.builders import config

CONTRADICTIONS = [
    ({"batch__samples": 8, "batch__loss_tokens": 900}, "batch.samples", "batch.loss_tokens"),
    ({"batch__samples": 8, "batch__packs": 2}, "batch.samples", "batch.packs"),
    ({"batch__loss_tokens": 8, "batch__packs": 2}, "batch.loss_tokens", "batch.packs"),
    ({"data__packing": False, "batch__packs": 2, "batch__accumulation": 2}, "batch.accumulation", "batch.packs"),
    ({"model__special_tokens": {"end": "</s>"}}, "model.special_tokens", "model.special_tokens"),
    ({"data__min_length": 20, "data__max_length": 10}, "data.min_length", "data.max_length"),
    ({"data__enlarge_images_below": 20, "data__shrink_images_above": 10}, "data.enlarge_images_below",
     "data.shrink_images_above"),
    ({"schedule__warmup_ratio": 0.1, "schedule__warmup_steps": 5}, "schedule.warmup_ratio", "schedule.warmup_steps"),
    ({"schedule__warmup_ratio": 0.0, "schedule__warmup_steps": 0}, "schedule.warmup_ratio", "schedule.warmup_steps"),
    ({"data__format": "tokens", "data__train_on": "all"}, "data.train_on", "data.format"),
    ({"data__train": [{"path": "a.jsonl", "format": "segments"}], "data__train_on": "last"}, "data.train_on",
     "segments"),
    ({"batch__micro_samples": 2}, "batch.micro_samples", "data.packing"),
    ({"batch__accumulation": 2}, "batch.accumulation", "data.packing"),
    ({"data__packing": False, "batch__micro_tokens": 4096}, "batch.micro_tokens", "data.packing"),
    ({"data__packing": False, "batch__loss_tokens": 900}, "batch.loss_tokens", "data.packing"),
    ({"batch__micro_tokens": 1024, "data__max_length": 2048}, "batch.micro_tokens", "data.max_length"),
    ({"data__packing": False, "batch__samples": 10, "batch__micro_samples": 2, "batch__accumulation": 2},
     "batch.samples", "batch.micro_samples"),
    ({"data__packing": False, "batch__samples": 10, "batch__accumulation": 4}, "batch.samples", "batch.accumulation"),
    ({"checkpoint__keep_best": True, "data__validation_fraction": 0.0}, "checkpoint.keep_best",
     "data.validation_fraction"),
    ({"stop__patience": 2, "data__validation_fraction": 0.0}, "stop.patience", "data.validation"),
    ({"evaluate__every_steps": 5, "data__validation_fraction": 0.0}, "evaluate.every_steps",
     "data.validation_fraction"),
    ({"evaluate__max_tokens": 5, "data__validation_fraction": 0.0}, "evaluate.max_tokens", "data.validation_fraction"),
    ({"evaluate__prompts": 5, "data__validation_fraction": 0.0}, "evaluate.prompts", "data.validation_fraction"),
    ({"evaluate__max_new_tokens": 5, "data__validation_fraction": 0.0}, "evaluate.max_new_tokens", "data.validation"),
    ({"checkpoint__every_steps": 0, "checkpoint__keep_last": 5}, "checkpoint.keep_last", "checkpoint.every_steps"),
    ({"checkpoint__keep_best": True, "evaluate__every_steps": 0}, "checkpoint.keep_best", "evaluate.every_steps"),
    ({"stop__patience": 2, "evaluate__every_steps": 0}, "stop.patience", "evaluate.every_steps"),
    ({"data__validation": "v.jsonl", "data__validation_fraction": 0.1}, "data.validation", "data.validation_fraction"),
    ({"evaluate__prompts": 0, "evaluate__max_new_tokens": 5}, "evaluate.prompts", "evaluate.max_new_tokens"),
    ({"evaluate__every_steps": 5, "evaluate__per_epoch": 1}, "evaluate.every_steps", "evaluate.per_epoch"),
    ({"checkpoint__every_steps": 5, "checkpoint__per_epoch": 1}, "checkpoint.every_steps", "checkpoint.per_epoch"),
    ({"evaluate__per_epoch": 1, "data__validation_fraction": 0.0}, "evaluate.per_epoch", "data.validation_fraction"),
    ({"stop__loss_above_steps": 5}, "stop.loss_above_steps", "stop.loss_above"),
    ({"guards__spike": "off", "guards__spike_mads": 4.0}, "guards.spike_mads", "guards.spike"),
    ({"guards__nonfinite": "skip", "guards__leave_out": 2}, "guards.leave_out", "guards.nonfinite"),
    ({"guards__max_in_a_row": 2}, "guards.max_in_a_row", "guards.nonfinite"),
    ({"optimizer__decay_embeddings": True}, "optimizer.decay_embeddings", "optimizer.weight_decay"),
    ({"method__double_quant": False}, "method.double_quant", "method.name"),
    ({"method__name": "full", "method__rank": 8}, "method.rank", "method.name"),
    ({"method__name": "patterns", "method__rank": 8}, "method.rank", "method.name"),
    ({"method__name": "full", "method__freeze": ("norm",)}, "method.freeze", "method.name"),
    ({"optimizer__name": "adafactor", "optimizer__beta1": 0.8}, "optimizer.beta1", "optimizer.name"),
    ({"optimizer__name": "adamw_8bit", "parallel__device": "cpu"}, "optimizer.name", "parallel.device"),
    ({"optimizer__name": "paged_adamw", "model__dtype": "float64"}, "optimizer.name", "model.dtype"),
    ({"method__name": "lora", "method__init": "loftq"}, "method.init", "method.name"),
    ({"method__name": "full", "method__init": "loftq"}, "method.init", "method.name"),
    ({"method__name": "qlora", "method__init": "loftq", "method__dora": True}, "method.init", "method.dora"),
    ({"method__name": "qlora", "method__init": "loftq", "method__adapter": "x"}, "method.init", "method.adapter"),
    ({"method__name": "full", "method__alpha": 8}, "method.alpha", "method.name"),
    ({"method__name": "full", "method__dropout": 0.1}, "method.dropout", "method.name"),
    ({"method__name": "full", "method__target_modules": ["q_proj"]}, "method.target_modules", "method.name"),
    ({"method__name": "full", "output__merge": True}, "output.merge", "method.name"),
    ({"data__too_long": "split"}, "data.too_long", "task"),
    ({"data__format": "text"}, "data.format", "task"),
    ({"task": "cpt", "data__format": "messages"}, "data.format", "task"),
    ({"task": "cpt", "model__chat_template": "x"}, "model.chat_template", "task"),
    ({"parallel__strategy": "single", "parallel__gpus": 2}, "parallel.strategy", "parallel.gpus"),
    ({"launch__min_gpus": 4, "parallel__gpus": 2}, "launch.min_gpus", "parallel.gpus"),
    ({"parallel__strategy": "ddp", "parallel__reshard_after_forward": False}, "parallel.reshard_after_forward",
     "parallel.strategy"),
    ({"schedule__decay_ratio": 0.5}, "schedule.decay_ratio", "schedule.name"),
    ({"schedule__name": "wsd", "schedule__warmup_ratio": 0.9}, "schedule.warmup_ratio", "schedule.decay_ratio"),
    ({"schedule__name": "constant", "schedule__min_ratio": 0.1}, "schedule.min_ratio", "schedule.name"),
    ({"kernels__linear": "fp8", "method__name": "qlora"}, "kernels.linear", "method.name"),
    ({"kernels__linear": "fp8", "method__name": "patterns"}, "kernels.linear", "method.name"),
    ({"kernels__linear": "fp8", "model__dtype": "float32"}, "kernels.linear", "model.dtype"),
    ({"kernels__linear": "fp8", "model__dtype": "float64", "parallel__device": "cpu"}, "kernels.linear", "model.dtype"),
    *(({"method__name": "full", f"method__{key}": value}, f"method.{key}", "method.name")
      for key, value in (("rslora", True), ("dora", True), ("modules_to_save", ["lm_head"]), ("adapter", "x"))),
    *(({"task": "cpt", f"data__{key}": value}, f"data.{key}", "task")
      for key, value in (("train_on", "all"), ("chat_template_kwargs", {"a": 1}), ("date", "2025-01-01"))),
    ({"data__packing": "auto", "batch__micro_samples": 2}, "batch.micro_samples", "data.packing: auto"),
    ({"data__too_long": "split", "data__train": [{"path": "a"}]}, "data.too_long", "task: sft"),
]  # fmt: skip

ALLOWED = [
    {},
    {"kernels__linear": "fp8", "model__dtype": "float32", "parallel__device": "cpu"},
    {"batch__loss_tokens": 900},
    {"data__packing": False, "batch__packs": 2, "batch__micro_samples": 2},
    {"data__packing": False, "batch__samples": 16, "batch__micro_samples": 2, "batch__accumulation": 4},
    {"batch__micro_tokens": 2048},
    {"data__validation_fraction": 0.0},
    {"data__validation": "v.jsonl", "data__validation_fraction": 0.0},
    {"data__validation": "v.jsonl", "checkpoint__keep_best": True, "stop__patience": 2},
    {"method__name": "full", "method__rank": 16},
    {
        "method__name": "qlora",
        "method__init": "loftq",
        "method__rslora": True,
        "method__dropout": 0.1,
        "model__init": "random",
    },
    {"task": "cpt", "data__too_long": "split", "data__format": "text"},
    {"parallel__strategy": "ddp", "parallel__gpus": 1},
    {"parallel__strategy": "single", "parallel__gpus": 1},
    {"launch__min_gpus": 4, "parallel__gpus": 4},
    {"parallel__reshard_after_forward": True},
    {"evaluate__prompts": 0, "data__validation_fraction": 0.0},
    {"checkpoint__every_steps": 0, "checkpoint__keep_last": 1, "checkpoint__keep_best": True},
    {"model__dtype": "bfloat16", "parallel__device": "cpu"},
    {"model__init": "random", "model__revision": "v1"},
    {"schedule__name": "wsd", "schedule__decay_ratio": 0.5},
    {"guards__nonfinite": "skip", "guards__max_in_a_row": 2},
    {"guards__spike": "rollback", "guards__leave_out": 2, "guards__max_in_a_row": 2},
    {"data__train": [{"path": "hub:o/n", "subset": "x", "split": "test", "revision": "r", "weight": 2.0}]},
    {"data__train": [{"path": "saved/set", "split": "test"}]},
    {
        "data__train": [
            "a.jsonl",
            {"path": "b.jsonl", "format": "sharegpt", "fields": {"conversations": "talk", "from": "who"}},
        ]
    },
    {"task": "mixed", "data__train": ["a.txt", {"path": "b", "format": "messages"}], "data__too_long": "split",
     "data__train_on": "last"},
    {"task": "mixed", "data__format": "text", "model__chat_template": "x"},
    {"task": "cpt", "data__fields": {"text": "body"}},
    {"method__name": "qlora", "method__rank": 8, "method__rslora": True, "method__modules_to_save": ["lm_head"],
     "method__adapter": "x"},
    {"data__packing": True, "batch__micro_tokens": 4096},
]  # fmt: skip


@pytest.mark.parametrize(("keys", "first", "second"), CONTRADICTIONS)
def test_a_contradiction_names_both_keys_and_what_to_do(keys, first, second):
    findings = check(config(**keys))
    assert len(findings) == 1
    assert f"`{first}" in findings[0] and f"`{second}" in findings[0]
    assert ": " in findings[0]


@pytest.mark.parametrize("keys", ALLOWED)
def test_what_goes_together_is_not_refused(keys):
    assert check(config(**keys)) == []


def test_the_nearest_batches_that_work_are_named():
    keys = {"data__packing": False, "batch__samples": 10, "batch__micro_samples": 4}
    assert "8 or 12" in check(config(**keys))[0]
    keys["batch__samples"] = 3
    assert check(config(**keys))[0].endswith("that work are 4")


def test_contradictions_are_reported_together():
    assert (
        len(
            check(
                config(
                    batch__samples=8,
                    batch__loss_tokens=9,
                    method__name="full",
                    method__rank=8,
                    schedule__decay_ratio=0.5,
                )
            )
        )
        == 3
    )


@pytest.mark.parametrize("blank", ["", " \t"])
@pytest.mark.parametrize(
    "place",
    [
        "model.name", "model.revision", "model.chat_template", "model.special_tokens.eos", "method.adapter",
        "method.target_modules[0]", "method.modules_to_save[0]", "data.train", "data.train[0]", "data.train[0].path",
        "data.train[0].name", "data.validation", "data.validation[0]", "data.ignore[0]", "data.fields.prompt",
        "data.image_folder", "data.cache", "evaluate.data.extra", "output.dir", "submit.partition", "submit.options[0]",
    ],
)  # fmt: skip
def test_text_that_names_nothing_is_refused_by_its_place(place: str, blank: str) -> None:
    names = place.replace("[0]", ".0").split(".")
    value: object = blank
    for name in reversed(names[2:]):
        value = (
            [value] if name == "0" else {name: value} | ({"path": "a"} if names[2] == "0" and name != "path" else {})
        )
    run = {"name": "t", "model": {"name": "m"}, "data": {"train": "a.jsonl"}}
    run[names[0]] = {**run.get(names[0], {}), names[1]: value}  # type: ignore[dict-item]
    with pytest.raises(UserError) as caught:
        config_from_mapping(run, where="test")
    assert any(f"`{place}`" in line or f"`{place}:" in line or f"`{place.rpartition('[')[0]}" in line
               for line in caught.value.details), caught.value.details  # fmt: skip


def test_text_that_may_be_blank() -> None:
    given = config(data__chat_template_kwargs={"prefix": ""}, submit__environment={"A": ""}, model__new_tokens=["\t\t"])
    assert not [finding for finding in check(given) if "is empty" in finding]


def test_the_cache_follows_xdg() -> None:
    assert default_cache({}) == default_cache({"XDG_CACHE_HOME": ""}) == "~/.cache/manyhands/data"
    assert default_cache({"XDG_CACHE_HOME": "relative"}) == "~/.cache/manyhands/data"
    assert default_cache({"XDG_CACHE_HOME": "/scratch/me"}) == "/scratch/me/manyhands/data"
    code = "from manyhands.config.schema import DataSection; print(DataSection(train='x').cache)"
    environ = os.environ | {"XDG_CACHE_HOME": "/scratch/me", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout == "/scratch/me/manyhands/data\n"
