"""Axolotl's files: what a LoRA run becomes, key by key; per-GPU batches; substitutions; what is refused, and where."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from manyhands.config.patterns import reaches
from manyhands.config.read import read_run_file
from manyhands.config.schema import Source
from manyhands.core.errors import UserError
from manyhands.data.chat.render import render
from manyhands.data.read import messages
from manyhands.data.read.files import Row
from manyhands.data.read.formats import to_conversation
from manyhands.data.tokenize.tokenizer import load_tokenizer
from manyhands.importers.axolotl import run as axolotl
from manyhands.importers.axolotl import templates as axolotl_templates
from manyhands.importers.axolotl.data import KNOWN_ROLES, TRAIN_KEYS
from manyhands.importers.load import config_from_mapping
from manyhands.importers.recognize import recognize, translate
from manyhands.importers.translation import STOPS, ImportContext, Translation
from tests.data.test_named_templates import write_tokenizer

LORA = """\
base_model: ours/small-llama
datasets:
  - path: ours/turns
    type: chat_template
    split: train[:20%]
    field_messages: conversations
    message_property_mappings:
      role: from
      content: value
val_set_size: 0.05
output_dir: ./outputs/first
adapter: lora
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
sequence_len: 4096
sample_packing: true
eval_sample_packing: false
gradient_accumulation_steps: 4
micro_batch_size: 2
num_epochs: 3
optimizer: adamw_bnb_8bit
learning_rate: 2e-4
bf16: auto
tf32: true
gradient_checkpointing: true
attn_implementation: flash_attention_2
wandb_project:
logging_steps: 1
warmup_ratio: 0.1
evals_per_epoch: 4
saves_per_epoch: 1
weight_decay: 0.0
special_tokens:
  pad_token: <|pad|>
"""
METHOD = {"name": "lora", "rank": 32, "alpha": 16, "dropout": 0.05, "target_modules": "all-linear"}


def read(tmp_path: Path, text: str, **context: Any) -> Translation:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    source = read_run_file(path)
    assert recognize(source.mapping) is axolotl
    return translate(source, axolotl, ImportContext(**{"folder": tmp_path, "gpus": 2, **context}))


def change(tmp_path: Path, remove: str = "", **changes: Any) -> Translation:
    """The LoRA run with these keys set, and those of ``remove`` taken out."""
    mapping = yaml.safe_load(LORA) | changes
    for key in remove.split():
        mapping.pop(key, None)
    return read(tmp_path, yaml.safe_dump(mapping, sort_keys=False))


def outcome(translation: Translation, key: str) -> tuple[str, str]:
    return next((outcome.kind, outcome.why) for outcome in translation.outcomes if outcome.key == key)


def refused(translation: Translation) -> dict[str, str]:
    return {outcome.key: outcome.why for outcome in translation.outcomes if outcome.kind in STOPS}


def section(translation: Translation, name: str) -> Mapping[str, Any]:
    return translation.mapping.get(name, {})


def test_a_lora_run_becomes_this_run_file(tmp_path: Path) -> None:
    assert read(tmp_path, LORA).mapping == {
        "name": "first",
        "task": "sft",
        "seed": 42,
        "model": {"name": "ours/small-llama"},
        "method": METHOD,
        "data": {
            "train": [
                {"path": "hub:ours/turns", "split": "train[:20%]", "format": "sharegpt"},
            ],
            "max_length": 4096,
            "too_long": "drop",
            "validation_fraction": 0.05,
        },
        "batch": {"packs": 16},
        "optimizer": {"name": "adamw_8bit", "learning_rate": 2e-4, "weight_decay": 0.0},
        "schedule": {"name": "cosine", "warmup_ratio": 0.1},
        "stop": {"epochs": 3},
        "evaluate": {"per_epoch": 4},
        "checkpoint": {"per_epoch": 1, "keep_last": 4},
        "log": {"every_steps": 1},
        "output": {"dir": "./outputs"},
    }


def test_the_native_mapping_is_valid_and_every_key_has_one_fate_on_its_line(tmp_path: Path) -> None:
    done = read(tmp_path, LORA)
    config_from_mapping(done.mapping)
    lines = {outcome.key: outcome.line for outcome in done.outcomes}
    assert lines["datasets[0].type"] == 4 and lines["special_tokens.pad_token"] == 36
    assert len(lines) == len(done.outcomes)
    assert outcome(done, "micro_batch_size")[1] == "2 per GPU × 2 GPUs × 4 accumulation"
    assert outcome(done, "wandb_project")[0] == "no_op"
    assert outcome(done, "evals_per_epoch") == ("mapped", "")
    order = [outcome.key for outcome in done.outcomes]
    assert order.index("datasets") + 1 == order.index("datasets[0].path") < order.index("val_set_size")


def test_defaults_of_axolotl_are_carried_over(tmp_path: Path) -> None:
    text = """\
base_model: ours/small-llama
datasets: [{path: ours/turns, type: chat_template}]
gradient_accumulation_steps: 1
micro_batch_size: 2
learning_rate: 2e-5
"""
    done = read(tmp_path, text)
    assert done.mapping["method"] == {"name": "full"}
    assert done.mapping["data"] == {
        "train": [{"path": "hub:ours/turns", "format": "messages"}],
        "max_length": 512,
        "too_long": "drop",
        "validation_fraction": 0.0,
    }
    assert done.mapping["schedule"] == {"name": "cosine", "warmup_ratio": 0.03}
    assert done.mapping["batch"] == {"samples": 4}
    assert done.mapping["optimizer"] == {"name": "adamw", "learning_rate": 2e-5}
    assert (done.mapping["seed"], done.mapping["stop"]) == (42, {"epochs": 1})
    assert section(done, "checkpoint") == {"per_epoch": 1, "keep_last": 4}
    assert "float32, in Axolotl without FSDP in bfloat16" in done.tool_defaults["method.name"]


# per-GPU numbers


@pytest.mark.parametrize(
    ("changes", "context", "packs"),
    [
        ({}, {"gpus": 4}, 32),
        ({}, {"gpus": None, "count_gpus": lambda: 3}, 24),
        ({"use_ray": True, "ray_num_workers": 8}, {"gpus": None, "count_gpus": lambda: 1}, 64),
        ({"dp_shard_size": 4, "dp_replicate_size": 2}, {"gpus": None}, 64),
        ({"gradient_accumulation_steps": None, "batch_size": 6}, {"gpus": 2}, 12),
    ],
)
def test_the_batch_is_multiplied_by_the_gpus_that_the_file_or_the_machine_names(
    tmp_path: Path, changes: dict[str, Any], context: dict[str, Any], packs: int
) -> None:
    done = read(tmp_path, yaml.safe_dump(yaml.safe_load(LORA) | changes), **context)
    assert done.mapping["batch"]["packs"] == packs
    assert done.findings() == []


def test_the_older_name_of_packing(tmp_path: Path) -> None:
    done = change(tmp_path, "sample_packing", max_packed_sequence_len=4096)
    assert done.mapping["batch"] == {"packs": 16} and outcome(done, "max_packed_sequence_len")[0] == "substituted"
    assert "packs" not in change(tmp_path, sample_packing=False, max_packed_sequence_len=4096).mapping["batch"]
    other = change(tmp_path, "sample_packing", max_packed_sequence_len=2048)
    assert "write sample_packing: true" in refused(other)["max_packed_sequence_len"]


def test_without_a_number_of_gpus_the_batch_is_unknown(tmp_path: Path) -> None:
    done = read(tmp_path, LORA, gpus=None)
    assert "add parallel.gpus=N" in refused(done)["micro_batch_size"]


def test_contradictions_of_the_batch_name_both_keys(tmp_path: Path) -> None:
    assert refused(change(tmp_path, batch_size=8)) == {
        "batch_size": "line 20, `gradient_accumulation_steps` is set too: Axolotl takes one of them"
    }
    both = change(tmp_path, remove="gradient_accumulation_steps", batch_size=7)
    assert refused(both) == {"batch_size": "7 is no multiple of `micro_batch_size: 2`"}


# data


@pytest.mark.parametrize(
    ("entry", "source"),
    [
        ({"path": "data.jsonl", "type": "chat_template"}, {"path": "data.jsonl", "format": "messages"}),
        ({"path": "wikitext", "type": "completion", "field": "page"},
         {"path": "hub:wikitext", "format": "text", "fields": {"text": "page"}}),
        ({"path": "json", "data_files": "rows.json", "ds_type": "json", "type": "completion"},
         {"path": "rows.json", "format": "text"}),
        ({"path": "a/b", "data_files": ["data/x.jsonl", "data/y*.jsonl"], "type": "completion"},
         {"path": "hub:a/b", "files": ["data/x.jsonl", "data/y*.jsonl"], "format": "text"}),
        ({"path": "./rows", "data_files": "x.jsonl", "type": "completion"},
         {"path": "./rows/x.jsonl", "format": "text"}),
        ({"path": "a/b", "type": "chat_template", "drop_system_message": True},
         {"path": "hub:a/b", "format": "messages", "drop_system": True}),
        ({"path": "a/b", "name": "en", "revision": "abc", "type": "completion"},
         {"path": "hub:a/b", "subset": "en", "revision": "abc", "format": "text"}),
        ({"path": "a/b", "type": "chat_template", "field_messages": "turns",
          "message_property_mappings": {"role": "who", "content": "said"}},
         {"path": "hub:a/b", "format": "messages", "fields": {"messages": "turns", "role": "who", "content": "said"}}),
        ({"path": "a/b", "type": "chat_template", "message_field_role": "from", "message_field_content": "value"},
         {"path": "hub:a/b", "format": "sharegpt", "fields": {"conversations": "messages"}}),
    ],
)  # fmt: skip
def test_an_entry_of_datasets_becomes_a_source(tmp_path: Path, entry: dict[str, Any], source: dict[str, Any]) -> None:
    done = change(tmp_path, datasets=[entry])
    assert refused(done) == {}
    assert done.mapping["data"]["train"] == [source]
    assert {f"datasets[0].{name}" for name in entry} - {"datasets[0].message_property_mappings"} <= {
        outcome.key for outcome in done.outcomes
    }


def test_a_name_that_is_a_folder_is_one(tmp_path: Path) -> None:
    (tmp_path / "ours" / "turns").mkdir(parents=True)
    assert read(tmp_path, LORA).mapping["data"]["train"][0]["path"] == "ours/turns"


def test_text_is_cut_and_conversations_are_dropped(tmp_path: Path) -> None:
    text = {"path": "a/b", "type": "completion"}
    chat = {"path": "c/d", "type": "chat_template"}
    only_text = change(tmp_path, datasets=[text], train_on_inputs=True).mapping
    assert (only_text["task"], only_text["data"]["too_long"]) == ("cpt", "split")
    mixed = change(tmp_path, datasets=[text, chat], excess_length_strategy="truncate").mapping
    assert (mixed["task"], mixed["data"]["too_long"]) == ("mixed", "truncate")
    assert [source.get("too_long") for source in mixed["data"]["train"]] == ["split", None]
    tested = change(tmp_path, "val_set_size", datasets=[chat], test_datasets=[text]).mapping
    assert (tested["task"], tested["data"]["validation"][0]["too_long"]) == ("mixed", "split")
    for mapping in (only_text, mixed, tested):
        config_from_mapping(mapping)


def test_validation_data_of_its_own(tmp_path: Path) -> None:
    tests = [{"path": "a/b", "type": "chat_template"}, {"path": "more.jsonl", "type": "chat_template"}]
    done = change(tmp_path, remove="val_set_size", test_datasets=tests)
    assert done.mapping["data"]["validation"] == [
        {"path": "hub:a/b", "split": "test", "format": "messages"},
        {"path": "more.jsonl", "format": "messages"},
    ]
    config_from_mapping(done.mapping)
    assert "`test_datasets` is set too" in refused(change(tmp_path, test_datasets=tests))["val_set_size"]


def test_prompts_of_a_file_s_own_are_a_chat_template(tmp_path: Path) -> None:
    kind = {
        "system_prompt": 'It\'s "so" in C:\\new.\n',
        "system_format": "<<{system}>>",
        "field_instruction": "question",
        "format": "[{instruction}|{input}] {{é}}\n",
        "no_input_format": "[{instruction}] ",
    }
    done = change(tmp_path, datasets=[{"path": "ours/rows", "type": kind}])
    config = config_from_mapping(done.mapping)
    assert config.data.train == (Source(path="hub:ours/rows", format="alpaca", fields={"instruction": "question"}),)
    row = {"question": "Add", "input": "1", "output": "2"}
    shown = render_rows(done, tmp_path, [row, row | {"input": ""}, row | {"system": "S"}])
    first = 'BOS<<It\'s "so" in C:\\new.\n>>'
    assert shown == [f"{first}[Add|1] {{é}}\n|2EOS|", f"{first}[Add] |2EOS|", "BOS<<S>>[Add|1] {é}\n|2EOS|"]
    assert render_rows(done, tmp_path, [row], begins=False) == [shown[0].removeprefix("BOS")]


def test_jeopardy_s_answers_begin_as_they_do_there(tmp_path: Path) -> None:
    done = change(tmp_path, datasets=[{"path": "ours/rows", "type": "jeopardy"}])
    (shown,) = render_rows(done, tmp_path, [{"question": "Largest?", "category": "Planets", "answer": "Jupiter"}])
    assert shown.startswith("BOSBelow is an instruction that describes a task, paired with an input")
    assert shown.endswith("### Instruction:\nLargest?\n\n### Input:\nPlanets\n\n### Response:\n|what is JupiterEOS|")


def render_rows(done: Translation, folder: Path, rows: list[dict[str, Any]], begins: bool = True) -> list[str]:
    """Rows as the translated run renders them, with a mark before and behind what is trained. ``begins``: by a
    tokenizer that puts BOS in front of every text."""
    model = write_tokenizer(folder / f"model-{begins}", begins=begins)
    tokenizer = load_tokenizer(model, done.mapping["model"]["chat_template"])
    fields = done.mapping["data"]["train"][0].get("fields", {})
    shown = []
    for row in rows:
        rendered = render(to_conversation(Row(row, "f", 1), "alpaca", fields), tokenizer)
        first = int(rendered.trained.argmax())
        assert rendered.trained[first:].all()
        shown.append(f"{tokenizer.decode(rendered.ids[:first])}|{tokenizer.decode(rendered.ids[first:])}|")
    return shown


def test_a_stream_is_the_rows_that_its_steps_can_take(tmp_path: Path) -> None:
    text = [{"path": "ours/web", "name": "en", "type": "pretrain", "text_column": "body"}]
    done = change(tmp_path, "datasets", pretraining_dataset=text, max_steps=10)
    config = config_from_mapping(done.mapping)
    rows = 10 * 16 * 4096 // 128  # steps x packs x tokens of each, by 128 tokens a row
    assert (config.task, config.batch.packs, config.stop.max_steps) == ("cpt", 16, 10)
    assert config.data.train == (
        Source(path="hub:ours/web", subset="en", split=f"train[:{rows}]", format="text", fields={"text": "body"}),
    )
    kind, why = outcome(done, "pretraining_dataset")
    assert kind == "substituted" and f"the first {rows:,} rows of the stream" in why
    unpacked = change(tmp_path, streaming=True, max_steps=10, sample_packing=False, datasets=[
        {"path": "ours/turns", "type": "chat_template"}, {"path": "rows.jsonl", "type": "chat_template"}])  # fmt: skip
    assert [source.get("split") for source in unpacked.mapping["data"]["train"]] == ["train[:160]", None]
    assert "write `max_steps`" in refused(change(tmp_path, streaming=True))["streaming"]
    both = change(tmp_path, pretraining_dataset=text, max_steps=10)
    assert "`pretraining_dataset` is set too" in refused(both)["datasets"]


@pytest.mark.parametrize(
    ("entry", "key", "told"),
    [
        ({"type": "sharegpt.load_guanaco"}, "type", "write `type: chat_template`"),
        ({"type": "sharegpt", "conversation": "zephyr"}, "conversation", "zephyr is not built in"),
        ({"type": "chat_template", "roles": {"user": [3]}}, "roles.user", "allowed: a list of the names"),
        ({"type": "chat_template", "roles": {"critic": ["user"]}}, "roles.critic", "templates have no role critic"),
        ({"type": "chat_template", "roles": {"user": ["a"], "tool": ["a"]}}, "roles.tool", "a is a name of user too"),
        (
            {"type": "chat_template", "roles": {"user": ["gpt"]}, "roles_to_train": ["gpt"]},
            "roles_to_train",
            "only assistant turns are trained",
        ),
        ({"type": "chat_template", "roles": ["user"]}, "roles", "allowed: a mapping of role to a list of names"),
        ({"type": "chat_template", "message_field_training": "seen"}, "message_field_training", "write one of train,"),
        ({"type": "alpacca"}, "type", "alpacca is not available: write one of alpaca"),
        ({"type": "chat_template", "fild_messages": "x"}, "fild_messages", "did you mean `field_messages`?"),
        ({"type": "chat_template", "roles_to_train": ["user"]}, "roles_to_train", "only assistant turns are trained"),
        ({"type": "chat_template", "train_on_eos": "last"}, "train_on_eos", "the end of each trained turn is trained"),
        ({"type": {"formt": "{instruction}"}}, "type", "did you mean `format`?"),
        ({"type": {"format": "{instruction} {answer}"}}, "type", "{instruction} and {input}, not {answer}"),
        ({"type": {"format": "{instruction"}}, "type", "expected '}' before end of string"),
        ({"type": {"field_output": 3}}, "type", "got 3, allowed: a text"),
        ({"type": "sharegpt", "conversation": ["chatml"]}, "conversation", "is not built in"),
        ({"type": "alpaca", "data_files": {"train": "a.json"}}, "data_files", "allowed: the name of a file, or a list"),
        ({"type": "completion", "path": "s3://bucket/x"}, "path", "copy it to this machine"),
    ],
)
def test_what_an_entry_cannot_have_is_refused_at_its_line(
    tmp_path: Path, entry: dict[str, Any], key: str, told: str
) -> None:
    done = change(tmp_path, datasets=[{"path": "a/b"} | entry])
    found = refused(done)[f"datasets[0].{key}"]
    assert told in found
    assert next(outcome.line for outcome in done.outcomes if outcome.key == f"datasets[0].{key}") in range(2, 9)


# model and method


def test_tokens_are_the_tokenizer_s_special_ones_or_new(tmp_path: Path) -> None:
    special = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "additional_special_tokens": ["<a>"]}
    done = change(tmp_path, special_tokens=special, tokens=["<b>"])
    assert done.mapping["model"]["special_tokens"] == {"eos": "<|end|>"}
    assert done.mapping["model"]["new_tokens"] == ["<a>", "<b>"]
    old = change(tmp_path, remove="special_tokens", tokens={"pad_token": "[PAD]", "eos_token": "</s>"})
    assert outcome(old, "tokens")[0] == "substituted"
    assert old.mapping["model"] == {"name": "ours/small-llama", "special_tokens": {"eos": "</s>"}}


@pytest.mark.parametrize(
    ("changes", "target"),
    [
        ({"lora_target_linear": None, "lora_target_modules": ["q_proj", "v_proj"]}, ["q_proj", "v_proj"]),
        ({"lora_target_linear": None, "lora_target_modules": r"model.layers.\d+.mlp.up_proj"},
         [r"re:model.layers.\d+.mlp.up_proj"]),
        ({"lora_target_modules": ["q_proj"]}, "all-linear"),
        ({"lora_target_linear": False}, "peft-default"),
    ],
)  # fmt: skip
def test_lora_reaches_what_peft_would(tmp_path: Path, changes: dict[str, Any], target: Any) -> None:
    done = change(tmp_path, **changes)
    assert refused(done) == {}
    assert done.mapping["method"]["target_modules"] == target


def test_qlora_and_its_options(tmp_path: Path) -> None:
    options = {"adapter": "qlora", "load_in_4bit": True, "bnb_config_kwargs": {"bnb_4bit_use_double_quant": True},
               "peft_use_rslora": True, "loraplus_lr_ratio": 16, "lora_modules_to_save": ["lm_head"]}  # fmt: skip
    done = change(tmp_path, **options)
    assert refused(done) == {}
    assert done.mapping["method"] == {
        "name": "qlora", "rank": 32, "alpha": 16, "dropout": 0.05, "target_modules": "all-linear", "rslora": True,
        "modules_to_save": ["lm_head"],
    }  # fmt: skip
    assert done.mapping["optimizer"]["learning_rates"] == {"lora_B": pytest.approx(3.2e-3)}
    config_from_mapping(done.mapping)


def test_axolotl_s_own_contradictions_are_ours(tmp_path: Path) -> None:
    for changes, key in (
        ({"adapter": "qlora"}, "load_in_4bit"),
        ({"adapter": "qlora", "load_in_4bit": True, "load_in_8bit": True}, "load_in_8bit"),
        ({"adapter": None, "load_in_4bit": True}, "load_in_4bit"),
        ({"warmup_steps": 10}, "warmup_ratio"),
        ({"save_steps": 10}, "save_steps"),
        ({"deepspeed": "zero2.json", "fsdp": ["full_shard"]}, "deepspeed"),
        ({"gradient_checkpointing": False, "activation_offloading": True}, "activation_offloading"),
    ):
        done = change(tmp_path, **changes)
        assert [outcome.key for outcome in done.outcomes if outcome.kind == "contradicts"] == [key], changes


def test_weights_that_are_not_frozen_are_the_ones_that_axolotl_s_pattern_matches(tmp_path: Path) -> None:
    patterns = ["^lm_head.weight$", "model.layers.4[4-9]+.mlp"]
    done = change(tmp_path, remove="adapter lora_r lora_alpha lora_dropout lora_target_linear",
                  unfrozen_parameters=patterns)  # fmt: skip
    assert done.mapping["method"]["name"] == "patterns"
    names = ("lm_head.weight", "model.layers.44.mlp.up_proj.weight", "model.layers.4.mlp.up_proj.weight",
             "model.layers.44.self_attn.q_proj.weight", "xlm_head.weight")  # fmt: skip
    trained = [name for name in names if any(reaches(name, one) for one in done.mapping["method"]["train"])]
    assert trained == ["lm_head.weight", "model.layers.44.mlp.up_proj.weight"]
    rows = change(tmp_path, adapter=None, unfrozen_parameters=["model.embed_tokens.weight$[:32000]"])
    assert "rows of a matrix cannot be trained alone" in refused(rows)["unfrozen_parameters"]


# schedule and stops


@pytest.mark.parametrize(
    ("changes", "schedule"),
    [
        ({"warmup_ratio": None, "warmup_steps": 10}, {"name": "cosine", "warmup_steps": 10}),
        ({"warmup_ratio": None, "warmup_steps": 1}, {"name": "cosine", "warmup_steps": 2}),
        ({"warmup_ratio": None, "warmup_steps": 0.1}, {"name": "cosine", "warmup_ratio": 0.1}),
        ({"max_steps": 57}, {"name": "cosine", "warmup_steps": 5}),
        ({"warmup_ratio": None, "max_steps": 5000}, {"name": "cosine", "warmup_steps": 100}),
        ({"warmup_ratio": None, "max_steps": 200}, {"name": "cosine", "warmup_steps": 6}),
        ({"lr_scheduler": "constant"}, {"name": "constant", "warmup_steps": 0}),
        ({"lr_scheduler": "constant_with_warmup"}, {"name": "constant", "warmup_ratio": 0.1}),
        ({"cosine_min_lr_ratio": 0.1, "cosine_constant_lr_ratio": 0},
         {"name": "cosine", "warmup_ratio": 0.1, "min_ratio": 0.1}),
    ],
)  # fmt: skip
def test_the_rate_follows_axolotl_s_schedule(tmp_path: Path, changes: dict[str, Any], schedule: dict[str, Any]) -> None:
    done = change(tmp_path, **changes)
    assert refused(done) == {}
    assert {"name": "cosine", **done.mapping["schedule"]} == schedule
    config_from_mapping(done.mapping)


def test_max_steps_alone_ends_a_run(tmp_path: Path) -> None:
    done = change(tmp_path, max_steps=100, evals_per_epoch=2)
    assert done.mapping["stop"] == {"max_steps": 100, "epochs": 1_000_000}
    assert done.mapping["evaluate"] == {"every_steps": 17}  # a sixth of the run: two an epoch, three epochs
    assert done.mapping["checkpoint"]["every_steps"] == 34


def test_evaluations_need_validation_data(tmp_path: Path) -> None:
    done = change(tmp_path, val_set_size=0, early_stopping_patience=3)
    assert section(done, "evaluate") == {} and "patience" not in done.mapping["stop"]
    assert outcome(done, "evals_per_epoch") == ("no_op", "there is no validation data")
    best = change(tmp_path, remove="evals_per_epoch saves_per_epoch", eval_steps=50, save_steps=100,
                  early_stopping_patience=3)  # fmt: skip
    assert best.mapping["stop"]["patience"] == 3 and best.mapping["checkpoint"]["keep_best"] is True
    config_from_mapping(best.mapping)


# distribution


def test_fsdp_in_both_spellings(tmp_path: Path) -> None:
    new = {"fsdp_version": 2, "fsdp_config": {"offload_params": True, "reshard_after_forward": True,
           "activation_checkpointing": True, "transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}}  # fmt: skip
    old = {"fsdp": ["full_shard", "auto_wrap"], "fsdp_config": {
        "fsdp_offload_params": True, "fsdp_use_orig_params": False, "fsdp_limit_all_gathers": True,
        "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_state_dict_type": "FULL_STATE_DICT"}}  # fmt: skip
    done = change(tmp_path, gradient_checkpointing=False, **new)
    assert refused(done) == {}
    assert done.mapping["parallel"] == {
        "strategy": "fsdp", "offload": "all", "reshard_after_forward": True, "activation_checkpointing": "full"
    }  # fmt: skip
    done = change(tmp_path, **old)
    assert refused(done) == {}
    assert done.mapping["parallel"] == {"strategy": "fsdp", "offload": "all"}
    assert outcome(done, "fsdp_config.fsdp_sharding_strategy")[0] == "ignored"


def test_deepspeed_s_file_is_read_where_it_is_at_hand(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text('{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}')
    done = change(tmp_path, deepspeed="mine.json")
    assert refused(done) == {}
    assert done.mapping["parallel"] | {"strategy": "fsdp", "offload": "all"} == done.mapping["parallel"]
    assert "there is no file other.json" in refused(change(tmp_path, deepspeed="other.json"))["deepspeed"]


def test_groups_of_shards(tmp_path: Path) -> None:
    done = change(tmp_path, dp_shard_size=4, dp_replicate_size=2, fsdp_version=2, fsdp_config={"offload_params": False})
    assert refused(done) == {}
    assert done.mapping["parallel"]["strategy"] == "hsdp" and done.mapping["parallel"]["shard_degree"] == 4


def test_ranks_that_divide_experts_have_samples_of_their_own(tmp_path: Path) -> None:
    done = change(tmp_path, expert_parallel_size=2, dp_shard_size=4, micro_batch_size=3, gradient_accumulation_steps=5)
    assert refused(done) == {} and done.gpus == 8
    assert done.mapping["parallel"]["expert_degree"] == 2
    assert 3 * 5 * 8 in done.mapping["batch"].values()


@pytest.mark.parametrize("key", ["context_parallel_size", "sequence_parallel_degree"])
def test_gpus_that_divide_samples_count_as_one(tmp_path: Path, key: str) -> None:
    done = change(tmp_path, **{key: 2}, dp_shard_size=4, micro_batch_size=3, gradient_accumulation_steps=5)
    assert refused(done) == {} and done.gpus == 8
    assert done.mapping["parallel"]["context_degree"] == 2
    assert 3 * 5 * 4 in done.mapping["batch"].values()


# substitutions


@pytest.mark.parametrize(
    ("changes", "key", "native"),
    [
        ({"load_in_8bit": True}, "load_in_8bit", {"method": {"name": "lora"}}),
        ({"optimizer": "adamw_torch_4bit"}, "optimizer", {"optimizer": {"name": "adamw_8bit"}}),
        ({"optimizer": "adamw_torch_8bit"}, "optimizer", {"optimizer": {"name": "adamw_8bit"}}),
        ({"optimizer": "paged_adamw_8bit", "fsdp_version": 2, "fsdp_config": {"offload_params": True}}, "optimizer",
         {"optimizer": {"name": "adamw"}, "parallel": {"offload": "all"}}),
        ({"fp16": True}, "fp16", {"model": {"dtype": "bfloat16"}}),
        ({"fp8": True}, "fp8", {"kernels": {"linear": "fp8"}}),
        ({"resize_token_embeddings_to_32x": True}, "resize_token_embeddings_to_32x", {}),
        ({"peft": {"loftq_config": {"loftq_bits": 4}}}, "peft.loftq_config.loftq_bits",
         {"method": {"name": "qlora", "init": "loftq"}}),
        ({"unfrozen_parameters": ["^model.*"]}, "unfrozen_parameters", {"method": {"name": "lora"}}),
        ({"warmup_ratio": None, "warmup_steps": 0.1}, "warmup_steps", {"schedule": {"warmup_ratio": 0.1}}),
    ],
)  # fmt: skip
def test_a_substitution_is_told_and_refused_by_strict(
    tmp_path: Path, changes: dict[str, Any], key: str, native: dict[str, Any]
) -> None:
    done = change(tmp_path, **changes)
    kind, why = outcome(done, key)
    assert kind == "substituted" and why
    for name, values in native.items():
        assert {leaf: done.mapping[name][leaf] for leaf in values} == values
    strict = read(tmp_path, yaml.safe_dump(yaml.safe_load(LORA) | changes), strict=True)
    assert "refused under --strict" in refused(strict)[key]


# chat templates


@pytest.mark.parametrize(
    ("base", "name", "template"),
    [("a/b", "llama3", "llama3"), ("a/b", "gemma3", "gemma"), ("a/b", "falcon_h1", "falcon-h1"),
     ("a/b", "alpaca", "alpaca-plain"), ("a/b", "metharme", "metharme"), ("a/b", "qwen2_vl", "qwen2-vl"),
     ("a/b", "pixtral", "mistral-tekken"), ("llava-hf/llava-1.5", "llava", None),
     ("a/b", "tokenizer_default", None), ("a/b", "tokenizer_default_fallback_chatml", None),
     ("Qwen/Qwen3-8B", "qwen3", None)],
)  # fmt: skip
def test_templates_by_name(tmp_path: Path, base: str, name: str, template: str | None) -> None:
    done = change(tmp_path, base_model=base, chat_template=name)
    assert refused(done) == {}
    assert done.mapping["model"].get("chat_template") == template
    differs = name in ("qwen3", "llava", "pixtral")
    assert outcome(done, "chat_template")[0] == ("substituted" if differs else "mapped" if template else "no_op")


def test_a_template_that_neither_we_nor_the_model_have_is_refused(tmp_path: Path) -> None:
    assert (
        "write its text in `chat_template_jinja`" in refused(change(tmp_path, chat_template="qwen3"))["chat_template"]
    )
    text = "{{ messages[0].content }}"
    done = change(tmp_path, chat_template="jinja", chat_template_jinja=text)
    assert done.mapping["model"]["chat_template"] == text and refused(done) == {}
    assert "write it in" in refused(change(tmp_path, chat_template="jinja"))["chat_template"]


def test_prompts_of_alpaca_are_a_chat_template_and_not_mixed_with_others(tmp_path: Path) -> None:
    done = change(tmp_path, datasets=[{"path": "a/b", "type": "alpaca:chat"}], chat_template="llama3")
    assert done.mapping["data"]["train"] == [{"path": "hub:a/b", "format": "alpaca"}]
    assert done.mapping["model"]["chat_template"] == "alpaca-chat"
    assert outcome(done, "chat_template") == ("no_op", "no data set of conversations uses it")
    mixed = [{"path": "a/b", "type": "alpaca"}, {"path": "c/d", "type": "chat_template"}]
    assert "a run has one chat template" in refused(change(tmp_path, datasets=mixed))["datasets[1].type"]


def test_every_template_that_a_name_stands_for_is_one_of_ours() -> None:
    from manyhands.config.named_templates import TEMPLATES

    assert set(axolotl_templates.TEMPLATES.values()) <= set(TEMPLATES)
    assert {template for template, _ in axolotl_templates._NEAR.values()} <= set(TEMPLATES)


def test_a_tokenizer_of_mistral_common_has_the_template_of_its_version(tmp_path: Path) -> None:
    done = change(tmp_path, tokenizer_use_mistral_common=True)
    assert config_from_mapping(done.mapping).model.chat_template == "tekken"
    other = change(tmp_path, tokenizer_use_mistral_common=True, chat_template="chatml")
    assert "`model.chat_template: chatml-no-bos`" in refused(other)["chat_template"]
    text = change(tmp_path, tokenizer_use_mistral_common=True, datasets=[{"path": "a/b", "type": "completion"}])
    assert "chat_template" not in text.mapping["model"]


def test_the_end_of_turns_is_the_template_s(tmp_path: Path) -> None:
    good = change(tmp_path, chat_template="gemma3", eot_tokens=["<end_of_turn>"])
    assert outcome(good, "eot_tokens")[0] == "no_op"
    bad = change(tmp_path, chat_template="gemma3", eot_tokens=["<eos>"])
    assert "turns of gemma3 end with <end_of_turn>" in refused(bad)["eot_tokens"]


# what is not read, not available, or wrong


def test_keys_that_axolotl_itself_ignores_are_reported(tmp_path: Path) -> None:
    done = change(tmp_path, context_parapllel_size=2, eta_min="7e-7", adam_eps=1e-5, gptq_groupsize=None)
    assert refused(done) == {}
    assert all(outcome(done, key)[0] == "ignored" for key in ("context_parapllel_size", "eta_min", "adam_eps"))


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"data_seed": 7}, {"data_seed": "ignored"}),
        ({"report_to": "wandb", "hub_always_push": True, "logging_first_step": True, "disable_tqdm": True},
         {"report_to": "ignored", "hub_always_push": "ignored", "logging_first_step": "ignored"}),
        ({"wandb_tags": ["a"], "tokenizer_padding_side": "left"}, {"wandb_tags": "ignored"}),
        ({"dataloader_pin_memory": False, "dataloader_num_workers": 4, "save_only_model": True},
         {"dataloader_pin_memory": "ignored", "dataloader_num_workers": "ignored", "save_only_model": "ignored"}),
        ({"dataloader_pin_memory": True, "save_only_model": False, "tf32": True},
         {"dataloader_pin_memory": "no_op", "save_only_model": "no_op", "tf32": "no_op"}),
        ({"bf16": False, "tf32": True}, {"tf32": "ignored"}),
        ({"torch_compile": True, "torch_compile_mode": "max-autotune"}, {"torch_compile_mode": "ignored"}),
    ],
)  # fmt: skip
def test_what_changes_nothing_here_or_there_is_ignored_by_name(
    tmp_path: Path, changes: dict[str, Any], kinds: dict[str, str]
) -> None:
    done = change(tmp_path, **changes)
    assert refused(done) == {} and {key: outcome(done, key)[0] for key in kinds} == kinds


@pytest.mark.parametrize(
    ("remove", "changes", "expected"),
    [
        # of `save_steps` and `eval_steps`: a share, and what makes the best checkpoint the result
        ("saves_per_epoch evals_per_epoch", {"save_steps": 0.25, "eval_steps": 0.05},
         {"checkpoint": {"every_steps": 0.25, "keep_last": 4}, "evaluate": {"every_steps": 0.05}}),
        ("saves_per_epoch evals_per_epoch", {"save_steps": 0.5, "eval_steps": 0.25, "load_best_model_at_end": True},
         {"checkpoint": {"every_steps": 0.5, "keep_best": True, "keep_last": 4}}),
        ("", {"saves_per_epoch": 2, "evals_per_epoch": 2, "early_stopping_patience": 3},
         {"checkpoint": {"per_epoch": 2, "keep_best": True, "keep_last": 4}}),
        ("saves_per_epoch evals_per_epoch", {"save_strategy": "steps", "eval_strategy": "steps", "logging_steps": 7},
         {"checkpoint": {"every_steps": 500, "keep_last": 4}, "evaluate": {"every_steps": 7}}),
        ("evals_per_epoch", {"evaluation_strategy": "epoch"}, {"evaluate": {"per_epoch": 1}}),
        # special values
        ("", {"neftune_noise_alpha": 5}, {"method": METHOD | {"neftune_alpha": 5}}),
        ("", {"noisy_embedding_alpha": 5}, {"method": METHOD | {"neftune_alpha": 5}}),
        ("", {"neftune_noise_alpha": None}, {"method": METHOD}),
        ("", {"save_total_limit": -1}, {"checkpoint": {"per_epoch": 1, "keep_last": "all"}}),
        ("", {"save_total_limit": 0}, {"checkpoint": {"per_epoch": 1, "keep_last": 4}}),
        ("", {"max_steps": -1}, {"stop": {"epochs": 3}, "schedule": {"name": "cosine", "warmup_ratio": 0.1}}),
        ("warmup_ratio", {"max_steps": 0}, {"schedule": {"name": "cosine", "warmup_ratio": 0.03}}),
        ("micro_batch_size gradient_accumulation_steps", {}, {"batch": {"packs": 2}}),
        ("gradient_accumulation_steps", {"batch_size": 6}, {"batch": {"packs": 12}}),
    ],
)  # fmt: skip
def test_what_the_run_s_keys_and_their_special_values_become(
    tmp_path: Path, remove: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    done = change(tmp_path, remove, **changes)
    assert refused(done) == {} and {name: section(done, name) for name in expected} == expected
    config_from_mapping(done.mapping)


def test_roles_that_state_what_is_so_are_accepted(tmp_path: Path) -> None:
    """All that the reader of rows knows, and no other."""
    table = {role: sorted(known) for role, known in KNOWN_ROLES.items()}
    assert {name: role for role, known in table.items() for name in known} == {
        name: role for name, role in messages.ROLE_NAMES.items() if name != "developer"
    }
    entry = {"path": "a/b", "type": "chat_template", "roles": table, "message_field_training": "training"}
    done = change(tmp_path, datasets=[entry])
    assert refused(done) == {} and outcome(done, "datasets[0].roles.user")[0] == "no_op"
    assert done.mapping["data"]["train"] == [{"path": "hub:a/b", "format": "messages"}]
    assert TRAIN_KEYS == messages.TRAIN_KEYS


@pytest.mark.parametrize(
    ("roles", "ours"),
    [
        ({"user": ["human", "visitor"], "assistant": ["gpt", "Agent 7"]}, {"visitor": "user", "Agent 7": "assistant"}),
        ({"user": ["assistant"], "assistant": ["user"]}, {"assistant": "user", "user": "assistant"}),
        ({"assistant": "clerk"}, {"clerk": "assistant"}),
        ({"user": ["visitor"], "system": ["a.b"]}, {"visitor": "user", "a.b": "system"}),
    ],
)
@pytest.mark.parametrize("kind", ["chat_template", "sharegpt"])
def test_roles_of_the_user_s_own_names(tmp_path: Path, kind: str, roles: Any, ours: dict[str, str]) -> None:
    """The rows are read as those with the names that are known here, whatever turn is trained."""
    entry = {"path": "a/b", "type": kind, "field_messages": "talk", "roles": roles}
    done = change(tmp_path, datasets=[entry | {"roles_to_train": [next(n for n in ours if ours[n] == "assistant")]}]
                  if "assistant" in ours.values() else [entry])  # fmt: skip
    assert refused(done) == {}
    (source,) = config_from_mapping(done.mapping).data.train
    assert not isinstance(source, str) and source.roles == ours
    assert source.format is not None and source.format != "auto" and source.fields is not None
    names = ("role", "content") if source.format == "messages" else ("from", "value")
    read = []
    for renamed in (ours, {}):
        back = {role: name for name, role in renamed.items()}
        turns = [
            {names[0]: back.get(role, role), names[1]: text} for role, text in (("user", "Hi"), ("assistant", "Yes"))
        ]
        row = Row({"talk": turns}, "f", 1)
        read.append(to_conversation(row, source.format, source.fields, roles=renamed))
    assert read[0] == read[1]


@pytest.mark.parametrize(
    ("changes", "ours", "kinds"),
    [
        ({"wandb_project": "mine"}, {"wandb": "mine"}, {"wandb_project": "mapped"}),
        ({"use_wandb": True}, {"wandb": "huggingface"}, {"use_wandb": "mapped"}),
        ({"use_wandb": False, "wandb_entity": "us"}, {}, {"use_wandb": "no_op", "wandb_entity": "no_op"}),
        ({"wandb_project": "mine", "wandb_mode": "disabled"}, {},
         {"wandb_project": "no_op", "wandb_mode": "no_op"}),
        ({"use_mlflow": True, "mlflow_experiment_name": "x", "mlflow_tracking_uri": "http://x"}, {"mlflow": "x"},
         {"mlflow_experiment_name": "mapped", "mlflow_tracking_uri": "substituted"}),
        ({"trackio_project_name": "x", "trackio_space_id": "a/b"}, {"trackio": "x"},
         {"trackio_space_id": "substituted"}),
        ({"wandb_project": "mine", "wandb_entity": "us", "wandb_name": "r", "wandb_watch": "all"}, {"wandb": "mine"},
         {"wandb_entity": "substituted", "wandb_name": "substituted", "wandb_watch": "substituted"}),
        ({"use_tensorboard": True}, {"tensorboard": True}, {"use_tensorboard": "mapped"}),
        ({"comet_project_name": "x", "comet_workspace": "w"}, {},
         {"comet_project_name": "substituted", "comet_workspace": "no_op"}),
        ({"use_comet": True}, {}, {"use_comet": "substituted"}),
        ({"use_swanlab": True, "swanlab_project": "x"}, {},
         {"use_swanlab": "substituted", "swanlab_project": "no_op"}),
        ({"use_otel_metrics": True, "otel_metrics_port": 1}, {}, {"use_otel_metrics": "substituted"}),
    ],
)  # fmt: skip
def test_trackers(tmp_path: Path, changes: dict[str, Any], ours: dict[str, Any], kinds: dict[str, str]) -> None:
    done = change(tmp_path, **changes)
    log = done.mapping["log"]
    assert {name: log[name] for name in ("wandb", "mlflow", "trackio", "tensorboard") if name in log} == ours
    assert {key: outcome(done, key)[0] for key in kinds} == kinds
    strict = read(tmp_path, yaml.safe_dump(yaml.safe_load(LORA) | changes), strict=True)
    assert set(refused(strict)) == {key for key, kind in kinds.items() if kind == "substituted"}


def test_rows_held_out_options_of_schedules_and_long_texts(tmp_path: Path) -> None:
    done = change(tmp_path, val_set_size=100, ddp_timeout=7200)
    assert done.mapping["data"]["validation_fraction"] == 100 and refused(done) == {}
    assert done.mapping["parallel"]["timeout_s"] == 7200
    low = change(tmp_path, lr_scheduler="cosine_with_min_lr", lr_scheduler_kwargs={"min_lr_rate": 0.2})
    assert low.mapping["schedule"] | {"name": "cosine", "min_ratio": 0.2} == low.mapping["schedule"]
    own = change(tmp_path, cosine_min_lr_ratio=0.1, lr_scheduler_kwargs={"num_cycles": 2})
    assert own.mapping["schedule"]["min_ratio"] == 0.1 and refused(own) == {}
    text = change(tmp_path, datasets=[{"path": "a/b", "type": "completion"}])
    assert "beyond 64 x `sequence_len` tokens" in outcome(text, "datasets[0].type")[1]


@pytest.mark.parametrize(
    ("entry", "source", "template"),
    [
        ({"type": "sharegpt"}, {"format": "sharegpt"}, None),
        ({"type": "sharegpt", "conversation": "chatml", "field": "turns"},
         {"format": "sharegpt", "fields": {"conversations": "turns"}}, "chatml-no-bos"),
        ({"type": "sharegpt.load_role"}, {"format": "sharegpt", "fields": {"from": "role"}}, None),
        ({"type": "sharegpt.load_ultrachat"}, {"format": "messages"}, None),
    ],
)  # fmt: skip
def test_the_older_type_sharegpt_is_read_as_its_error_advises(
    tmp_path: Path, entry: dict[str, Any], source: dict[str, Any], template: str | None
) -> None:
    done = change(tmp_path, datasets=[{"path": "a/b"} | entry])
    assert refused(done) == {} and outcome(done, "datasets[0].type")[0] == "substituted"
    assert done.mapping["data"]["train"] == [{"path": "hub:a/b"} | source]
    assert done.mapping["model"].get("chat_template") == template
    config_from_mapping(done.mapping)
    named = change(tmp_path, datasets=[{"path": "a/b", "type": "sharegpt"}], chat_template="chatml")
    assert named.mapping["model"]["chat_template"] == "chatml-no-bos"


def test_a_key_that_stands_twice_without_a_value_is_one(tmp_path: Path) -> None:
    assert refused(read(tmp_path, LORA + "wandb_project:\nwandb_name:\nwandb_name: ~\n")) == {}
    with pytest.raises(UserError, match="duplicate keys"):
        read(tmp_path, LORA + "wandb_project: mine\n")


@pytest.mark.parametrize(
    ("changes", "key", "told"),
    [
        ({"lora_rank": 8}, "lora_rank", "Axolotl has no such key: did you mean `lora_r"),
        ({"micro_batchsize": 8}, "micro_batchsize", "did you mean `micro_batch_size`?"),
        ({"learning_rate": "fast"}, "learning_rate", "got fast, allowed: a number"),
        ({"sample_packing": "perhaps"}, "sample_packing", "allowed: true or false"),
        ({"sequence_len": 12.5}, "sequence_len", "allowed: a whole number"),
        ({"datasets": "ours/turns"}, "datasets", "allowed: a list of data sets"),
        ({"optimizer": "sinkgd"}, "optimizer", "sinkgd is not available: write one of adamw_torch"),
        ({"lr_scheduler": "rex"}, "lr_scheduler", "write one of cosine, linear"),
        ({"expert_parallel_size": 2, "context_parallel_size": 2}, "expert_parallel_size", "cannot divide experts"),
        (
            {"expert_parallel_size": 2, "dp_replicate_size": 2},
            "expert_parallel_size",
            "does not combine it with replicas",
        ),
        ({"plugins": ["axolotl.integrations.diffusion.DiffusionPlugin"]}, "plugins", "DiffusionPlugin: diffusion"),
        ({"plugins": ["mine.Plugin"]}, "plugins", "mine.Plugin is not available"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size", "`2`: splitting a layer"),
        ({"neftune_noise_alpha": 5, "noisy_embedding_alpha": 5}, "noisy_embedding_alpha", "keep one"),
        ({"val_set_size": 1}, "val_set_size", "1 is all rows to Axolotl: write a share below 1, or a number of rows"),
        ({"lr_scheduler": "cosine_with_min_lr"}, "lr_scheduler", "needs options"),
        ({"lr_scheduler_kwargs": {"power": 2}, "lr_scheduler": "linear"}, "lr_scheduler_kwargs", "cannot be expressed"),
        ({"micro_batch_size": 0}, "micro_batch_size", "got 0, allowed: a whole number above 0"),
        ({"unsloth_lora_mlp": True}, "unsloth_lora_mlp", "Axolotl itself refuses this key"),
        (
            {"lora_target_modules": ["q_proj", "embed_out"], "lora_target_linear": False},
            "lora_target_modules",
            "embed_out is not one of the blocks' layers",
        ),
        ({"pretrain_multipack_attn": False}, "pretrain_multipack_attn", "documents of a pack never see each other"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config", "`split_batches` is not available"),
        ({"optimiser": "adamw_torch"}, "optimiser", "did you mean `optimizer`?"),
        ({"adapter": None, "unfrozen_parameters": [3]}, "unfrozen_parameters", "allowed: a list of patterns of names"),
        ({"tokenizer_config": "other/one"}, "tokenizer_config", "a tokenizer of another model"),
        ({"batch.samples": 8}, "batch.samples", "a key of manyhands"),
        ({"model_name_or_path": "x", "assistant_only_loss": True}, "assistant_only_loss", "a key of TRL"),
    ],
)
def test_bad_input_is_refused_with_its_key(tmp_path: Path, changes: dict[str, Any], key: str, told: str) -> None:
    done = change(tmp_path, **changes)
    assert told in refused(done)[key]
    with pytest.raises(UserError, match=r"this Axolotl file cannot be run") as error:
        done.refuse()
    assert any(f"`{key}`" in detail for detail in error.value.details) and "run.yaml" in error.value.where


@pytest.mark.parametrize("key", ["base_model", "learning_rate", "datasets", "lora_r"])
def test_what_axolotl_requires_is_asked_for(tmp_path: Path, key: str) -> None:
    assert "it is missing" in refused(change(tmp_path, remove=key))[key]


@pytest.mark.parametrize("changes", [{"rl": "grpo", "trl": {"beta": 0.1}}, {"reward_model": True}])
def test_another_kind_of_training_has_one_reason(tmp_path: Path, changes: dict[str, Any]) -> None:
    done = change(tmp_path, colour=3, **changes)
    assert list(refused(done)) == [next(iter(changes))]


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"model_quantization_config": "Mxfp4Config", "model_quantization_config_kwargs": {"dequantize": True}}, ""),
        ({"model_quantization_config_kwargs": {"dequantize": True}}, ""),
        ({"model_quantization_config": "FineGrainedFP8Config"}, "model_quantization_config"),
        ({"model_quantization_config": "Mxfp4Config", "model_quantization_config_kwargs": {"other": 1}},
         "model_quantization_config_kwargs"),
    ],
)  # fmt: skip
def test_experts_in_mxfp4_are_read_as_they_are_stored(tmp_path: Path, changes: dict[str, Any], refusal: str) -> None:
    assert list(refused(change(tmp_path, **changes))) == ([refusal] if refusal else [])


def test_options_of_a_method_that_is_off_change_nothing(tmp_path: Path) -> None:
    done = change(tmp_path, relora_prune_ratio=0.9, eaft_k=20, gptq=False, load_in_8bit=False, group_by_length=False)
    assert refused(done) == {}
