"""Every key of every other tool's files, with values that it may not have: an outcome or an error, never a
traceback.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from manyhands.config.read import ParsedFile
from manyhands.core.errors import UserError
from manyhands.importers import recognize
from manyhands.importers.translation import ImportContext

VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2.5, float("nan"), False, True, 10**30),
    *("", "x", "0", "auto", "no", "x" * 5000),
    *([], ["x"], [[1]], [{"a": 1}], {}, {"a": 1}),
)
FILES: dict[str, dict[str, Any]] = {
    "axolotl.run": {
        "base_model": "model",
        "datasets": [{"path": "rows.jsonl", "type": "chat_template"}],
        "adapter": "lora",
        "lora_target_linear": True,
        "sequence_len": 512,
        "sample_packing": True,
        "output_dir": "out",
    },
    "trl": {"model_name_or_path": "model", "dataset_name": "rows.jsonl", "use_peft": True, "output_dir": "out"},
    "llamafactory.run": {
        "model_name_or_path": "model",
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "lora",
        "template": "llama3",
        "output_dir": "out",
    },
    "accelerate": {"distributed_type": "FSDP", "num_processes": 2},
    "deepspeed": {"zero_optimization": {"stage": 2}},
}


def put(mapping: dict[str, Any], key: str, value: Any) -> None:
    *sections, name = key.split(".")
    for section in sections:
        if not isinstance(mapping.get(section), dict):
            mapping[section] = {}
        mapping = mapping[section]
    mapping[name] = copy.deepcopy(value)


def try_values(name: str, per_key: int) -> None:
    importer = recognize.load_importer(name)
    rng = random.Random(name)
    for key in sorted(importer.KEYS):
        for value in rng.sample(VALUES, per_key):
            mapping = copy.deepcopy(FILES.get(name, {}))
            put(mapping, key, value)
            try:
                recognize.translate(ParsedFile(mapping, "run.yaml"), importer, ImportContext(gpus=2))
            except UserError:
                pass
            except Exception as error:
                raise AssertionError(f"{name}: {key}: {value!r}") from error


@pytest.mark.parametrize("name", (*recognize.FILES, *recognize.SETTINGS))
def test_two_values_of_every_key_have_an_outcome(name: str) -> None:
    try_values(name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", (*recognize.FILES, *recognize.SETTINGS))
def test_all_values_of_every_key_have_an_outcome(name: str) -> None:
    try_values(name, len(VALUES))
