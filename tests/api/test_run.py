"""``python -m manyhands.run``: scripts and notebooks that import from Unsloth and TRL, with ours in their place."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import manyhands as mh
from manyhands import run
from manyhands.core.errors import EXIT_USAGE
from tests.support.tiny import write_tiny_model

# The shape of a notebook of conversations: names, named template, rows of from and value, a loss on answers alone.
SCRIPT = """
import sys
from unsloth import FastLanguageModel, is_bfloat16_supported
from unsloth.chat_templates import get_chat_template, standardize_sharegpt, train_on_responses_only
from trl import SFTTrainer, SFTConfig
from transformers import DataCollatorForSeq2Seq

model, tokenizer = FastLanguageModel.from_pretrained(model_name=sys.argv[1], max_seq_length=256, load_in_4bit=False)
model = FastLanguageModel.get_peft_model(model, r=8, lora_alpha=16, use_gradient_checkpointing="unsloth")
tokenizer = get_chat_template(tokenizer, chat_template="chatml")
rows = standardize_sharegpt([
    {"conversations": [{"from": "human", "value": "alpha"}, {"from": "gpt", "value": "beta"}]} for _ in range(4)
])
rows = [{**row, "text": tokenizer.apply_chat_template(row["conversations"], tokenize=False)} for row in rows]
trainer = SFTTrainer(
    model=model, tokenizer=tokenizer, train_dataset=rows, dataset_text_field="text", max_seq_length=128,
    data_collator=DataCollatorForSeq2Seq(tokenizer=tokenizer), packing=False,
    args=SFTConfig(per_device_train_batch_size=2, fp16=not is_bfloat16_supported(), bf16=is_bfloat16_supported(),
                   output_dir="outputs", report_to="none"),
    overrides={"data.cache": sys.argv[2]},
)
trainer = train_on_responses_only(
    trainer, instruction_part="<|im_start|>user\\n", response_part="<|im_start|>assistant\\n"
)
config = trainer.load().config
[source] = config.data.train
print(config.method.rank, config.data.max_length, config.data.train_on, "chatml" if "im_start" in
      config.model.chat_template else "", open(source.path).readline())
"""


@pytest.fixture(autouse=True)
def same_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] in run.PACKAGES]:
        del sys.modules[name]


def write_notebook(path: Path, source: str) -> Path:
    cells = [
        {"cell_type": "code", "source": [text]} for text in ("%%capture\n!pip install unsloth", "!nvidia-smi", source)
    ]
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": ["# Title"]}, *cells]}))
    return path


@pytest.mark.parametrize("kind", ["script.py", "notebook.ipynb"])
def test_a_script_of_the_others_runs_with_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    base = write_tiny_model(tmp_path / "base")
    path = tmp_path / kind
    if kind.endswith(".py"):
        path.write_text(SCRIPT)
    else:
        write_notebook(path, SCRIPT)
    code = run.main([str(path), str(base), str(tmp_path / "cache")])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    rows = '{"conversations": [{"role": "user", "content": "alpha"}, {"role": "assistant", "content": "beta"}]}'
    assert f"8 128 assistant chatml {rows}" in printed.out.splitlines()


@pytest.mark.parametrize(
    ("line", "way"),
    [
        ("from trl import DPOTrainer", "task: preference"),
        ("from trl import GRPOConfig", "task: preference"),
        ("from trl import RewardTrainer", "reward models are not available"),
        ("from trl import ModelConfig", "manyhands train FILE"),
        ("import unsloth; unsloth.FastSentenceTransformer", "FastLanguageModel"),
    ],
)
def test_what_is_not_there_is_named_with_the_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, way: str
) -> None:
    (tmp_path / "script.py").write_text(f"\n{line}\n")
    assert run.main([str(tmp_path / "script.py")]) == EXIT_USAGE
    shown = capsys.readouterr().err
    assert way in shown and "line: script.py:2" in shown and "Traceback" not in shown


def test_no_file_and_a_package_that_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["none.py"]) == run.main([]) == EXIT_USAGE
    sys.modules["trl"] = sys
    with pytest.raises(mh.UserError, match="trl is imported already"):
        run.replace_imports()


def test_rows_of_text_cannot_be_masked(tmp_path: Path) -> None:
    trainer = mh.SFTTrainer(tmp_path, train_dataset=[{"text": "a"}])
    with pytest.raises(mh.UserError, match="no answers that could be trained alone") as error:
        mh.train_on_responses_only(trainer, instruction_part="u", response_part="a")
    assert "messages" in error.value.fix


def test_a_template_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(mh.UserError, match="'qwen-3' is not set by name") as error:
        mh.get_chat_template(object(), "qwen-3")
    assert "own template is used" in error.value.fix
    with pytest.raises(mh.UserError, match="train_on_responses_only has no effect") as error:
        mh.UnslothVisionDataCollator(None, None, train_on_responses_only=True)
    assert "assistant_only_loss" in error.value.fix
