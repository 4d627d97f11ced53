"""The guide's code as a script that runs: its blocks as they are printed, but for the import lines and the model."""

from __future__ import annotations

import json
import os
import random
import re
from pathlib import Path

from tests.e2e.runs import WORDS
from tests.support.tiny import write_tiny_model

ROOT = Path(__file__).parents[2]
FOLDERS = (os.environ.get("MANYHANDS_GUIDES"), ROOT.parent / "shared/references")
NAME = "unsloth-multi-gpu.md"
GUIDE = next((Path(folder) / NAME for folder in FOLDERS if folder and (Path(folder) / NAME).is_file()), None)
IMPORTS = {
    "from unsloth import ": "from manyhands import ",
    "from unsloth.distributed_utils import ": "from manyhands import ",
    "from unsloth.trainer import UnslothTrainingArguments, UnslothTrainer": "from manyhands import "
    "TrainingArguments as UnslothTrainingArguments, Trainer as UnslothTrainer",
}
MODEL = "unsloth/Llama-3.2-1B-Instruct"
# What the guide leaves to its reader: the data, and the names that its sums use.
BEFORE = """
import json
dataset = [json.loads(line) for line in open("rows.jsonl")]
num_gpus, per_device_train_batch_size, gradient_accumulation_steps = 2, 2, 4
"""
# Its second set of training arguments is used as its first one is.
AFTER = """
first = trainer.run
trainer = UnslothTrainer(model=model, tokenizer=tokenizer, train_dataset=dataset, args=training_args)
second = trainer.train()
if get_rank() == 0:
    print("RESULT", json.dumps({"losses": [first.losses, second.losses], "effective": effective_batch_size,
                                "batches": [first.plan.batch_samples, second.plan.batch_samples],
                                "world": [first.plan.layout.world_size, second.plan.layout.world_size],
                                "rate": second.plan.learning_rate,
                                "answer": model.generate("alpha", max_new_tokens=3)}))
"""


def blocks() -> list[str]:
    """The Python of the guide, block by block."""
    assert GUIDE is not None
    return re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def write_place(folder: Path) -> Path:
    """A tiny model, 16 rows, and the script ``guide.py``."""
    write_tiny_model(folder / "model")
    draw = random.Random(0)
    rows = [{"text": " ".join(draw.choices(WORDS, k=draw.randint(3, 12)))} for _ in range(16)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = "\n".join(blocks())
    for theirs, ours in IMPORTS.items():
        assert theirs in text
        text = text.replace(theirs, ours)
    assert text.count(MODEL) == 1 and "unsloth." not in text.replace(MODEL, "")
    text = text.replace(MODEL, str(folder / "model"))
    (folder / "guide.py").write_text(BEFORE + text + AFTER)
    return folder
