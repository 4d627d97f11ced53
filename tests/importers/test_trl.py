"""TRL's files: what they become, what TRL would do by default, what is refused; the alignment handbook's recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from manyhands.config.read import ParsedFile, read_run_file
from manyhands.core.errors import UserError
from manyhands.importers import trl
from manyhands.importers.load import load_run
from manyhands.importers.recognize import recognize, translate
from manyhands.importers.translation import ImportContext, Translation

BASE: dict[str, Any] = {"model_name_or_path": "org/model", "dataset_name": "org/data"}
LORA = BASE | {
    "use_peft": True,
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.0,
    "lora_target_modules": ["q_proj", "v_proj"],
    "max_length": 512,
    "assistant_only_loss": True,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 3,
    "learning_rate": "1e-4",
    "lr_scheduler_type": "cosine",
    "warmup_ratio": 0.1,
    "num_train_epochs": 2,
    "seed": 7,
    "output_dir": "out/first",
}


def read(values: dict[str, Any], **context: Any) -> Translation:
    lines = {key: number for number, key in enumerate(values, 1)}
    context = {"gpus": 4} | context
    return translate(ParsedFile(values, "sft.yaml", lines), trl, ImportContext(**context))  # type: ignore[arg-type]


def flat(values: dict[str, Any]) -> dict[str, Any]:
    done = read(values)
    assert done.findings() == []
    return done.mapping


def kind(values: dict[str, Any], key: str) -> str:
    return next(outcome.kind for outcome in read(values).outcomes if outcome.key == key)


def test_a_lora_run_is_exactly_this() -> None:
    assert flat(LORA) == {
        "name": "first",
        "task": "mixed",
        "seed": 7,
        "model": {"name": "org/model"},
        "data": {
            "train": [{"path": "hub:org/data"}],
            "validation_fraction": 0,
            "max_length": 512,
            "too_long": "truncate",
            "train_on": "assistant",
        },
        "method": {"name": "lora", "rank": 8, "alpha": 16, "dropout": 0.0, "target_modules": ["q_proj", "v_proj"]},
        "optimizer": {"learning_rate": 1e-4},
        "schedule": {"name": "cosine", "warmup_ratio": 0.1},
        "stop": {"epochs": 2},
        "batch": {"samples": 24},
        "evaluate": {"every_steps": 0},
        "checkpoint": {"every_steps": 500, "keep_last": "all"},
        "output": {"dir": "out"},
    }


def test_what_trl_does_by_default_is_carried_over() -> None:
    full = flat(BASE)
    assert full["method"] == {"name": "full"} and full["optimizer"] == {"learning_rate": 2e-5}
    assert full["schedule"] == {"name": "linear", "warmup_steps": 0} and full["stop"] == {"epochs": 3}
    assert full["batch"] == {"samples": 32} and full["seed"] == 42
    assert full["data"]["max_length"] == 1024 and full["data"]["train_on"] == "all"
    assert flat(BASE | {"use_peft": True})["method"] == {
        "name": "lora",
        "rank": 16,
        "alpha": 32,
        "dropout": 0.05,
        "target_modules": "peft-default",
    }
    assert flat(BASE | {"weight_decay": 0.1})["optimizer"]["decay_embeddings"] is True


@pytest.mark.parametrize(
    ("columns", "train_on"),
    [(("prompt", "completion"), "assistant"), (("messages",), "all"), (("text",), "all"), (None, "all")],
)
def test_the_columns_of_the_data_decide_what_is_trained(columns: tuple[str, ...] | None, train_on: str) -> None:
    asked: list[str] = []
    row = None if columns is None else dict.fromkeys(columns, "text")
    done = read(BASE, first_row=lambda path: asked.append(path) or row)
    assert ("chat_template" in done.mapping["model"]) is (columns == ("prompt", "completion"))
    assert done.mapping["data"]["train_on"] == train_on and set(asked) == {"hub:org/data"}
    outcome = next(outcome.kind for outcome in done.outcomes if outcome.key == "dataset_name")
    assert outcome == ("mapped" if columns else "substituted")


def test_packs_are_counted_where_trl_packs() -> None:
    packed = flat(LORA | {"packing": True, "packing_strategy": "bfd"})
    assert packed["batch"] == {"packs": 24}
    assert kind(LORA | {"packing": True, "packing_strategy": "wrapped"}, "packing_strategy") == "refused"


def test_a_mixture_of_the_handbook_is_a_list_of_sources() -> None:
    sets = [
        {"id": "org/a", "config": "default", "split": "train_sft", "columns": ["messages"], "weight": 1.0},
        {
            "id": "org/b",
            "config": "x",
            "split": "train",
            "columns": ["messages", "chat_template_kwargs"],
            "weight": 0.5,
        },
    ]
    values = {"model_name_or_path": "org/model", "torch_dtype": "bfloat16", "max_seq_length": 2048}
    values["dataset_mixture"] = {"datasets": sets, "test_split_size": 1000, "seed": 0}
    done = read(values)
    assert done.mapping["data"]["train"] == [
        {
            "path": "hub:org/a",
            "split": "train_sft",
            "ignore": ["chat_template_kwargs", "tools", "weight"],
            "weight": 1.0,
        },
        {"path": "hub:org/b", "subset": "x", "split": "train", "ignore": ["tools", "weight"], "weight": 0.5},
    ]
    assert done.mapping["data"]["max_length"] == 2048 and done.mapping["model"]["dtype"] == "bfloat16"
    assert {outcome.key: outcome.kind for outcome in done.outcomes}["dataset_mixture.test_split_size"] == "mapped"
    assert done.mapping["data"]["validation_fraction"] == 1000


def test_files_of_the_datasets_library_s_builders_are_paths() -> None:
    values = {"model_name_or_path": "org/model", "datasets": [{"path": "json", "data_files": "x/train.jsonl"}]}
    assert flat(values)["data"]["train"] == [{"path": "x/train.jsonl"}]


def test_a_file_is_recognized_and_its_errors_name_file_line_and_key(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(yaml.safe_dump(LORA | {"lora_droput": 0.1}, sort_keys=False))
    assert recognize(read_run_file(file).mapping) is trl
    with pytest.raises(UserError) as caught:
        load_run(file, ["parallel.gpus=1"])
    assert f"where: {file}" in str(caught.value)
    assert "line 20, `lora_droput`: TRL has no such key: did you mean `lora_dropout`?" in str(caught.value)
