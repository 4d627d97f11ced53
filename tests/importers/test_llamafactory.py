"""LLaMA-Factory's flat files: what each key becomes, its defaults, its data sets, and what is wrong with a file."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from manyhands.config.read import read_run_file
from manyhands.core.errors import UserError
from manyhands.importers.llamafactory import run as llamafactory
from manyhands.importers.llamafactory.templates import CHAT_FORMATS, make_chat_template
from manyhands.importers.load import load_run
from manyhands.importers.recognize import recognize, translate
from manyhands.importers.translation import ImportContext, Translation, flatten

INFO = {
    "greetings": {"file_name": "greetings.json"},
    "chats": {"file_name": "chats.jsonl", "formatting": "sharegpt",
              "columns": {"messages": "turns", "system": "instructions"},
              "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}},
    "essays": {"file_name": "essays.jsonl", "columns": {"prompt": "body"}},
    "pages": {"file_name": "pages.txt", "columns": {"prompt": "text"}},
    "wiki": {"hf_hub_url": "org/wiki", "subset": "en", "split": "test", "columns": {"prompt": "q", "response": "a"}},
    "calls": {"file_name": "calls.json", "formatting": "sharegpt", "columns": {"messages": "conversations",
                                                                                 "tools": "tools"}},
    "better": {"file_name": "better.json", "ranking": True, "columns": {"chosen": "good", "rejected": "bad"}},
    "photos": {"file_name": "photos.json", "columns": {"prompt": "q", "response": "a", "images": "image"}},
    "films": {"file_name": "films.json", "columns": {"prompt": "q", "response": "a", "videos": "film"}},
    "few": {"file_name": "few.json", "num_samples": 50},
    "odd": {"file_name": "odd.json", "formating": "alpaca"},
    "knight": {"file_name": "knight.json", "formatting": "sharegpt", "tags": {"function_tag": "quest"}},
    "folder": {"hf_hub_url": "org/code", "folder": "python", "columns": {"prompt": "content"}},
}  # fmt: skip
LORA = {
    "model_name_or_path": "org/model",
    "stage": "sft",
    "do_train": True,
    "finetuning_type": "lora",
    "dataset": "greetings",
    "template": "qwen3_nothink",
}


def write(folder: Path, values: dict[str, Any], name: str = "run.yaml") -> Path:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "dataset_info.json").write_text(json.dumps(INFO, indent=1))
    (folder / name).write_text(json.dumps(values) if name.endswith("json") else yaml.safe_dump(values, sort_keys=False))
    return folder / name


def translated(folder: Path, *, strict: bool = False, hub_file: Any = None, **changes: Any) -> Translation:
    source = read_run_file(write(folder, {**LORA, **changes}))
    importer = recognize(source.mapping)
    assert importer is not None and importer.TOOL == "LLaMA-Factory"
    return translate(
        source, importer, ImportContext(folder=folder, count_gpus=lambda: 2, strict=strict, hub_file=hub_file)
    )


def native(folder: Path, **changes: Any) -> dict[str, Any]:
    translation = translated(folder, **changes)
    assert translation.findings() == []
    return flatten(translation.mapping, {"optimizer.learning_rates", "data.chat_template_kwargs"})


def finding(folder: Path, **changes: Any) -> str:
    return " | ".join(translated(folder, **changes).findings())


def test_a_lora_run_with_the_tool_s_defaults_is_exactly_this(tmp_path: Path) -> None:
    changes = {"bf16": True, "output_dir": "saves/qwen/sft", "lora_rank": 4, "learning_rate": "1e-4"}
    source = {"name": "greetings", "path": "data/greetings.json", "format": "alpaca"}
    assert native(tmp_path, **changes) == {
        "model.name": "org/model",
        "model.dtype": "bfloat16",
        "model.chat_template": make_chat_template(CHAT_FORMATS["qwen3_nothink"]),
        "method.name": "lora",
        "method.rank": 4,
        "method.alpha": 8,
        "method.dropout": 0,
        "method.target_modules": "all-linear",
        "data.train": [{**source, "ignore": ["history", "system", "weight"]}],
        "data.validation_fraction": 0,
        "data.max_length": 2048,
        "data.too_long": "truncate",
        "batch.samples": 16,
        "optimizer.learning_rate": 1e-4,
        "schedule.name": "linear",
        "schedule.warmup_steps": 0,
        "stop.epochs": 3,
        "seed": 42,
        "evaluate.every_steps": 0,
        "checkpoint.every_steps": 500,
        "checkpoint.keep_last": "all",
        "output.dir": "saves/qwen",
        "name": "sft",
    }


def test_json_and_a_list_of_data_sets(tmp_path: Path) -> None:
    path = write(tmp_path, {**LORA, "dataset": ["greetings", "chats"]}, "run.json")
    run = load_run(path, context=ImportContext(count_gpus=lambda: 1))
    assert [getattr(source, "name", "") for source in run.config.data.train] == ["greetings", "chats"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"finetuning_type": "full"}, {"method.name": "full", "model.dtype": "float32"}),
        ({"finetuning_type": "full", "pure_bf16": True}, {"model.master_dtype": "bfloat16"}),
        ({"finetuning_type": "freeze", "freeze_trainable_layers": 3}, {"method.train": ["layers[-3:]"]}),
        (
            {
                "finetuning_type": "freeze",
                "freeze_trainable_layers": -2,
                "freeze_trainable_modules": "mlp,self_attn",
                "freeze_extra_modules": "embed_tokens",
            },
            {"method.name": "patterns", "method.train": ["layers[:2].mlp", "layers[:2].self_attn", "*embed_tokens*"]},
        ),
        ({"finetuning_type": "full", "weight_decay": 0.1},
         {"optimizer.weight_decay": 0.1, "optimizer.decay_embeddings": True}),
        ({"lora_rank": 16}, {"method.rank": 16, "method.alpha": 32}),
        ({"lora_alpha": 7}, {"method.rank": 8, "method.alpha": 7}),
        ({"lora_target": "q_proj, v_proj"}, {"method.target_modules": ["q_proj", "v_proj"]}),
        ({"additional_target": "lm_head"}, {"method.modules_to_save": ["lm_head"]}),
        ({"use_dora": True, "use_rslora": True}, {"method.dora": True, "method.rslora": True}),
        ({"loraplus_lr_ratio": 16.0, "learning_rate": 1e-4},
         {"optimizer.learning_rates": {"lora_B": pytest.approx(1.6e-3)}}),
        ({"quantization_bit": 4, "quantization_method": "bnb"}, {"method.name": "qlora"}),
        ({"quantization_bit": 4, "double_quantization": False}, {"method.double_quant": False}),
        ({"use_muon": True}, {"optimizer.name": "muon"}),
        ({"mask_history": True}, {"data.train_on": "last"}),
        ({"train_on_prompt": True}, {"data.train_on": "all"}),
        ({"neat_packing": True, "cutoff_len": 1024, "per_device_train_batch_size": 2},
         {"data.packing": True, "data.max_length": 1023, "batch.packs": 4}),
        ({"val_size": 0.1, "eval_strategy": "steps", "eval_steps": 5}, {"data.validation_fraction": 0.1}),
        ({"val_size": 100}, {"data.validation_fraction": 100}),
        ({"ddp_timeout": 180000000}, {"parallel.timeout_s": 86400}),
        ({"disable_gradient_checkpointing": True}, {"parallel.activation_checkpointing": "none"}),
        ({"max_steps": 7}, {"stop.max_steps": 7, "stop.epochs": 1_000_000}),
        ({"disable_shuffling": True}, {"data.order": "as_given"}),
        ({"ray_num_workers": 4}, {"batch.samples": 32, "parallel.gpus": 4}),
        ({"train_from_scratch": True, "model_revision": "v2"}, {"model.init": "random", "model.revision": "v2"}),
        ({"add_special_tokens": "<a>,<b>"}, {"model.new_tokens": ["<a>", "<b>"]}),
    ],
)  # fmt: skip
def test_keys_and_what_they_become(changes: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    found = native(tmp_path, **changes)
    assert {key: found.get(key) for key in expected} == expected
    load_run(tmp_path / "run.yaml", context=ImportContext(count_gpus=lambda: 2))


def test_continued_pre_training_packs_texts(tmp_path: Path) -> None:
    found = native(tmp_path, stage="pt", dataset="essays", cutoff_len=512, per_device_train_batch_size=3)
    assert found["data.train"] == [
        {
            "name": "essays",
            "path": "data/essays.jsonl",
            "format": "text",
            "fields": {"text": "body"},
            "ignore": ["weight"],
        }
    ]
    assert (found["task"], found["data.too_long"], found["data.packing"]) == ("cpt", "split", True)
    assert found["batch.packs"] == 6 and found["data.max_length"] == 512 and "model.chat_template" not in found
    translation = translated(tmp_path, stage="pt", dataset="essays")
    assert [outcome.key for outcome in translation.outcomes if outcome.kind == "substituted"] == ["stage"]
    alone = native(tmp_path, stage="pt", dataset="essays", packing=False)
    assert alone["batch.samples"] == 16 and alone["data.too_long"] == "truncate"


def test_an_adapter_brings_its_own_shape(tmp_path: Path) -> None:
    found = native(tmp_path, adapter_name_or_path="saves/first", lora_rank=64)
    assert found["method.adapter"] == "saves/first" and "method.rank" not in found and "method.alpha" not in found
    assert "merge them first" in finding(tmp_path, adapter_name_or_path="a,b")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "chats",
            {
                "path": "data/chats.jsonl",
                "format": "sharegpt",
                "fields": {"conversations": "turns", "from": "role", "value": "content", "system": "instructions"},
                "ignore": ["chat_template_kwargs", "tools", "weight"],
            },
        ),
        ("wiki",
         {"path": "hub:org/wiki", "subset": "en", "split": "test", "format": "alpaca",
          "fields": {"instruction": "q", "output": "a"}, "ignore": ["history", "input", "system", "weight"]}),
        ("few", {"path": "data/few.json", "format": "alpaca", "max_samples": 50}),
    ],
)  # fmt: skip
def test_entries_of_dataset_info_become_sources(name: str, expected: dict[str, Any], tmp_path: Path) -> None:
    (source,) = native(tmp_path, dataset=name)["data.train"]
    assert {key: source.get(key) for key in expected} == expected


def test_a_file_in_a_checkout_finds_the_data_of_the_checkout(tmp_path: Path) -> None:
    write(tmp_path, LORA)
    inner = tmp_path / "examples" / "train_lora"
    inner.mkdir(parents=True)
    (tmp_path / "run.yaml").rename(inner / "run.yaml")
    run = load_run(inner / "run.yaml", context=ImportContext(gpus=1))
    assert getattr(run.config.data.train[0], "path", "") == str(tmp_path / "data/greetings.json")


def test_max_samples_are_the_first_rows_and_num_samples_drawn_ones(tmp_path: Path) -> None:
    greetings, wiki, few = native(tmp_path, dataset="greetings,wiki,few", max_samples=20)["data.train"]
    assert greetings["split"] == "train[:20]" and wiki["split"] == "test[:20]"
    assert few["max_samples"] == 20 and "split" not in few


@pytest.mark.parametrize("formatting", ["sharegpt", "openai"])
def test_tags_of_the_user_s_own_are_roles(formatting: str, tmp_path: Path) -> None:
    tags = {"role_tag": "who", "content_tag": "said", "user_tag": "squire", "assistant_tag": "gpt"}
    entry = {"file_name": "knight.json", "formatting": formatting, "columns": {"messages": "talk"}, "tags": tags}
    (source,) = native(tmp_path, dataset="knight", dataset_dir={"knight": entry})["data.train"]
    assert source["roles"] == {"squire": "user"}
    load_run(tmp_path / "run.yaml", context=ImportContext(count_gpus=lambda: 2))


def test_only_columns_that_the_rows_have_are_ignored(tmp_path: Path) -> None:
    source = read_run_file(write(tmp_path, LORA))
    importer = recognize(source.mapping)
    assert importer is not None
    columns = ("instruction", "output", "history")
    row = dict.fromkeys(columns or ())
    context = ImportContext(
        folder=tmp_path, gpus=1, first_row=lambda path: row if path == "data/greetings.json" else None
    )
    (found,) = translate(source, importer, context).mapping["data"]["train"]
    assert found["ignore"] == ["history"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("better", "`better.ranking`: this is data of preferences: write stage dpo (pairs) or kto"),
        ("films", "`films.columns.videos`: these rows come with videos, and only text and images can be trained"),
        ("greeting", "has no data set greeting: did you mean greetings? It has greetings, chats"),
        ("odd", "`odd.formating`: LLaMA-Factory has no such key: did you mean `formatting`?"),
        ("knight", "`knight.tags.function_tag`: quest is not known here: the rows must say function_call or tool_call"),
        ("folder", "`folder.columns`: it names no `response`"),
        ("essays", "`essays.columns`: it names no `response`"),
    ],
)
def test_data_sets_that_cannot_be_trained(name: str, text: str, tmp_path: Path) -> None:
    found = finding(tmp_path, dataset=name)
    assert text in found and found.startswith("line 5, `dataset`: ") and "dataset_info.json" in found


def _hub_file(name: str, file: str) -> Path:
    """Stands in for the hub, which has one data set with a list."""
    if name != "org/demo":
        raise UserError("the file cannot be fetched", why="no such data set")
    path = Path(tempfile.mkdtemp()) / file
    entries = {
        "mine": {"file_name": "mine.json"},
        "theirs": {"hf_hub_url": "org/set"},
        "part": {"hf_hub_url": "org/set", "folder": "english"},
    }
    path.write_text(json.dumps(entries))
    return path


def test_a_missing_list_of_data_sets_and_one_on_the_hub(tmp_path: Path) -> None:
    assert "write the folder that has it as dataset_dir" in finding(tmp_path, dataset_dir="elsewhere")
    assert "hf download org/demo --repo-type dataset" in finding(tmp_path, dataset_dir="REMOTE:org/demo")
    assert "no such data set" in finding(tmp_path, dataset_dir="REMOTE:org/none", hub_file=_hub_file)
    there = native(tmp_path, dataset_dir="REMOTE:org/demo", dataset="mine,theirs,part", hub_file=_hub_file)
    assert [{key: source.get(key) for key in ("path", "files")} for source in there["data.train"]] == [
        {"path": "hub:org/demo", "files": ["mine.json"]},
        {"path": "hub:org/set", "files": None},
        {"path": "hub:org/set", "files": ["english/**"]},
    ]
    online = native(tmp_path, dataset_dir="ONLINE", dataset="org/set")
    assert online["data.train"][0]["path"] == "hub:org/set"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"loar_rank": 8}, "line 7, `loar_rank`: LLaMA-Factory has no such key: did you mean `lora_rank`?"),
        ({"colour": 1}, "LLaMA-Factory has no such key and refuses it"),
        ({"lora_rank": "eight"}, "line 7, `lora_rank`: got eight, allowed: a number"),
        ({"val_size": 0.1, "eval_dataset": "chats"}, "line 8, `eval_dataset` names validation data already"),
        ({"val_size": 1}, "1 is all rows to LLaMA-Factory: write a share below 1, or a number of rows from 2 on"),
        ({"eval_strategy": "steps"}, "there is no validation data: write val_size or eval_dataset"),
        ({"mask_history": True, "train_on_prompt": True}, "trains everything, this the last answer alone"),
        ({"finetuning_type": "full", "quantization_bit": 4}, "quantized weights are trained by lora only"),
        ({"finetuning_type": "oft"}, "oft is not available: write lora, full or freeze"),
        ({"use_galore": True}, "GaLore is not available"),
        ({"pipeline_model_parallel_size": 2}, "pipeline parallelism is not available: set it to 1"),
        ({"expert_model_parallel_size": 2}, "set it to 1, and parallel.expert_degree in a native file"),
        ({"template": "qwen3_nothnk"}, "LLaMA-Factory has no format qwen3_nothnk: did you mean qwen3_nothink?"),
        ({"streaming": True}, "rows are read completely: set it to false"),
        ({"hf_hub_token": "secret"}, "a secret in a run file is copied with it"),
        ({"batch": {"samples": 3}}, "a key of manyhands"),
    ],
)
def test_what_is_wrong_is_named_with_line_key_and_remedy(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    assert text in finding(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"stage": "ppo", "pref_beta": 0.1}, "line 2, `stage`: it trains on answers that are sampled while it runs"),
        ({"stage": "rm"}, "line 2, `stage`: reward models are not available"),
        ({"do_train": False, "do_predict": True, "max_new_tokens": 9}, "`do_predict`: this file trains nothing"),
        ({"export_dir": "out"}, "line 7, `export_dir`: this file merges and exports a model"),
        ({"do_train": None, "infer_backend": "vllm"}, "`infer_backend`: this file trains nothing"),
    ],
)
def test_another_task_is_one_refusal(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    translation = translated(tmp_path, **changes)
    assert len(translation.findings()) == 1 and text in translation.findings()[0]


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"quantization_bit": 8}, "quantization_bit"),
        ({"fp16": True}, "fp16"),
        ({"packing": True}, "packing"),
        ({"pure_bf16": True}, "pure_bf16"),
        ({"template": "glm4"}, "template"),
        ({"dataset": "calls"}, "template"),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "deepspeed > zero_optimization.stage"),
        ({"stage": "pt", "dataset": "pages", "packing": False}, "dataset"),
        ({"add_tokens": "<a>"}, "add_tokens"),
    ],
)
def test_substitutions_are_said_and_refused_by_a_strict_caller(
    changes: dict[str, Any], key: str, tmp_path: Path
) -> None:
    (outcome,) = [outcome for outcome in translated(tmp_path, **changes).outcomes if outcome.kind == "substituted"]
    assert outcome.key == key and outcome.why
    strict = translated(tmp_path, strict=True, **changes)
    assert any(f"`{key}`: " in found and "--strict" in found for found in strict.findings())


@pytest.mark.parametrize("value", [True, False])
def test_curves_are_in_every_report(value: bool, tmp_path: Path) -> None:
    """They are no tracker's, and a strict start has nothing to say of them."""
    (outcome,) = [outcome for outcome in translated(tmp_path, plot_loss=value).outcomes if outcome.key == "plot_loss"]
    assert (outcome.kind, outcome.why) == ("no_op", "the run's report has the curves")


def test_a_format_that_thinks_follows_its_keys(tmp_path: Path) -> None:
    text = native(tmp_path, template="qwen3", enable_thinking=False, default_system="Speak Latin.")
    chat = CHAT_FORMATS["qwen3"]
    assert text["model.chat_template"] == make_chat_template(chat, thinks=False, default_system="Speak Latin.")
    last = native(tmp_path, template="qwen3", mask_history=True)
    assert last["model.chat_template"] == make_chat_template(chat, last_thought_only=True)


PHOTOS = {"dataset": "photos", "template": "qwen2_vl"}


def test_images_are_found_and_resized_as_there(tmp_path: Path) -> None:
    found = native(tmp_path, **PHOTOS)
    (source,) = found["data.train"]
    assert source["fields"] == {"instruction": "q", "output": "a", "images": "image"}
    expected = {
        "data.images": True,
        "data.image_folder": "data",
        "data.shrink_images_above": 768 * 768,
        "data.enlarge_images_below": 1024,
        "method.parts.vision": "frozen",
        "method.parts.projector": "frozen",
    }
    assert expected.items() <= found.items() and "model.chat_template" not in found
    given = native(tmp_path, **PHOTOS, media_dir="photos", image_max_pixels=4096, image_min_pixels=100)
    names = ("data.image_folder", "data.shrink_images_above", "data.enlarge_images_below")
    assert [given[name] for name in names] == ["photos", 4096, 100]
    assert not any("image" in key or "parts" in key for key in native(tmp_path, image_max_pixels=4096))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("frozen", "frozen", "full")),
        ({"freeze_vision_tower": False}, ("trained", "frozen", "full")),
        ({"freeze_multi_modal_projector": False, "freeze_language_model": True}, ("frozen", "trained", "frozen")),
    ],
)
def test_parts_are_trained_as_there(changes: dict[str, Any], expected: tuple[str, ...], tmp_path: Path) -> None:
    found = native(tmp_path, **PHOTOS, finetuning_type="full", **changes)
    assert tuple(found[f"method.parts.{part}"] for part in ("vision", "projector", "language")) == expected
    load_run(tmp_path / "run.yaml", context=ImportContext(count_gpus=lambda: 2))


def test_a_projector_is_trained_beside_adapters_where_it_is_saved(tmp_path: Path) -> None:
    found = native(tmp_path, **PHOTOS, additional_target="visual.merger,lm_head")
    assert found["method.parts.projector"] == "trained" and found["method.modules_to_save"] == ["lm_head"]
    layers = native(tmp_path, **PHOTOS, finetuning_type="freeze", freeze_multi_modal_projector=False)
    assert layers["method.parts.projector"] == "trained" and layers["method.name"] == "patterns"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"freeze_vision_tower": False}, "`freeze_vision_tower`: adapters are for the language model alone"),
        ({"freeze_language_model": True}, "`freeze_language_model`: finetuning_type lora trains the language model"),
        ({"image_do_pan_and_scan": True}, "`image_do_pan_and_scan`: images are not cut into crops"),
        ({"crop_to_patches": True}, "`crop_to_patches`: the model's own preprocessor_config.json says"),
        ({"stage": "pt"}, "`photos.columns.images`: stage pt trains text alone here"),
        ({"dataset": "greetings", "freeze_language_model": True}, "no data set has images: nothing would be trained"),
        (
            {"finetuning_type": "full", **dict.fromkeys(llamafactory.keys.FREEZE_PARTS_DEFAULT, True)},
            "every part of the model is frozen",
        ),
    ],
)
def test_what_cannot_be_done_with_images_is_named(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    assert text in finding(tmp_path, **{**PHOTOS, **changes})


@pytest.mark.parametrize(
    ("key", "value", "changes"),
    [
        ("freeze_multi_modal_projector", False, PHOTOS),
        ("freeze_multi_modal_projector", False, {"finetuning_type": "full"}),
        ("freeze_vision_tower", False, {"finetuning_type": "full"}),
        ("additional_target", "multi_modal_projector", {}),
    ],
)
def test_what_has_no_effect_on_parts_is_said(key: str, value: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    (outcome,) = [one for one in translated(tmp_path, **{**changes, key: value}).outcomes if one.key == key]
    assert outcome.kind == "ignored" and outcome.why


def test_a_column_of_images_that_the_tool_does_not_read_is_ignored(tmp_path: Path) -> None:
    source = read_run_file(write(tmp_path, LORA))
    context = ImportContext(
        folder=tmp_path, gpus=1, first_row=lambda path: dict.fromkeys(("instruction", "output", "images"))
    )
    (found,) = translate(source, llamafactory, context).mapping["data"]["train"]
    assert found["ignore"] == ["images"]


def test_a_file_of_the_rewrite_is_refused_by_name(tmp_path: Path) -> None:
    file = {
        "model": "m",
        "model_class": "llm",
        "train_dataset": "data.yaml",
        "output_dir": "out",
        "learning_rate": 1e-4,
    }
    with pytest.raises(UserError, match="LLaMA-Factory v1, which is not read"):
        load_run(write(tmp_path, file))
