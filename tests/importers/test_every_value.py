"""Every key of every other tool's files, with values that it may not have: an outcome or an error, never a
traceback. ``Translator.finish`` raises where a key has none.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from manyhands.config.read import ParsedFile, read_run_file
from manyhands.core.errors import UserError
from manyhands.importers import recognize
from manyhands.importers.translation import STOPS, ImportContext

VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2.5, float("nan"), False, True, 10**30),
    *("", "x", "0", "auto", "no", "x" * 5000),
    *([], ["x"], [[1]], [{"a": 1}], {}, {"a": 1}),
)
INFO = {"rows": {"file_name": "rows.json"}, "text": {"file_name": "rows.json", "columns": {"prompt": "text"}}}
LLAMAFACTORY = {"model_name_or_path": "model", "do_train": True, "dataset_dir": INFO, "output_dir": "out"}
FILES: dict[str, list[dict[str, Any]]] = {
    "axolotl.run": [
        {
            "base_model": "model",
            "datasets": [{"path": "rows.jsonl", "type": "chat_template"}],
            "adapter": "lora",
            "lora_target_linear": True,
            "lora_r": 8,
            "lora_alpha": 16,
            "learning_rate": 1e-4,
            "sequence_len": 512,
            "sample_packing": True,
            "output_dir": "out",
        }
    ],
    "trl": [{"model_name_or_path": "model", "dataset_name": "rows.jsonl", "use_peft": True, "output_dir": "out"}],
    "llamafactory.run": [
        LLAMAFACTORY | {"stage": "sft", "finetuning_type": "lora", "template": "llama3", "dataset": "rows"},
        LLAMAFACTORY | {"stage": "sft", "finetuning_type": "freeze", "dataset": "rows"},
        LLAMAFACTORY | {"stage": "pt", "finetuning_type": "full", "dataset": "text"},
    ],
    "accelerate": [{"distributed_type": "FSDP", "num_processes": 2}],
    "deepspeed": [{"zero_optimization": {"stage": 2}}],
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
    for key, base in itertools.product(sorted(importer.KEYS), FILES.get(name, [{}])):
        for value in rng.sample(VALUES, per_key):
            mapping = copy.deepcopy(base)
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


@pytest.mark.parametrize("tool", ["Axolotl", "LLaMA-Factory", "TRL", "handbook"])
def test_every_published_file_is_known_as_its_tool_s(tool: str) -> None:
    """Nothing that is substituted or refused goes without a reason."""
    variable = f"MANYHANDS_{tool.upper().replace('-', '')}"
    if not (folder := os.environ.get(variable)):
        pytest.skip(f"{variable} names no folder with its files")
    tools: Counter[str] = Counter()
    for path in sorted(Path(folder).rglob("*.y*ml")):
        source = read_run_file(path)
        if importer := recognize.recognize(source.mapping):
            done = recognize.translate(source, importer, ImportContext(folder=path.parent, gpus=2))
            assert all(one.why for one in done.outcomes if one.kind in (*STOPS, "substituted")), path
            tools[importer.TOOL] += 1
    assert tools.most_common(1)[0][0] == ("TRL" if tool == "handbook" else tool)
