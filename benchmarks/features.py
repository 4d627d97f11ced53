"""CPU seconds of each epoch with and without ``data.cache_features``, on a CPU: ``python -m benchmarks.features``.

A projector is trained between a frozen tower of 6 million weights (8 blocks of 256, images of 224 x 224 pixels in 256
patches, 16 tokens each) and a frozen language model of 4 blocks of 256. Three runs over the same drawn images: without
features, with them, and again when all are there from the run before. Losses of the last two are the
same to the bit; of the first two their largest relative deviation is printed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.vision_shapes import SHAPES, write_image_rows, write_vision_folder
from manyhands.core.world import World
from manyhands.importers.load import config_from_mapping
from manyhands.launch.run.prepare import prepare_run
from manyhands.training.types import Hook, StepResult, TrainState
from manyhands.worker import stages, training
from manyhands.worker.rank import Process, Rank

TEXT: dict[str, Any] = {
    "model_type": "gemma3_text",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
}
TOWER: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "image_size": 224,
    "patch_size": 14,
    "vision_use_head": False,
}
BATCH = 4


def write_model(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForMultimodalLM

    config = {"text_config": TEXT, "vision_config": TOWER, "mm_tokens_per_image": 16}
    kind, _, tokens, fields, image, _, _ = SHAPES["gemma3-4b"]
    sizes = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 224, "width": 224}}
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": 16}
    SHAPES["small"] = kind, config, tokens, fields, image, sizes, processor
    write_vision_folder(folder, "small")
    torch.manual_seed(0)
    model = AutoModelForMultimodalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if name.endswith("mm_input_projection_weight"):  # drawn as zeros: no image would reach the text
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder)


class Seconds(Hook):
    """The process' CPU seconds after each step, in its threads together: what else the machine does is not in them."""

    def __init__(self) -> None:
        self.marks = [time.process_time()]

    def after_step(self, state: TrainState, result: StepResult) -> None:
        self.marks.append(time.process_time())


def train(work: Path, name: str, epochs: int, keeps: bool) -> dict[str, Any]:
    """CPU seconds of each epoch, and losses by step; by the worker's own stages, in this process."""
    run = {
        "name": name,
        "model": {"name": str(work / "model")},
        "method": {"name": "full", "parts": {"vision": "frozen", "projector": "trained", "language": "frozen"}},
        "data": {
            "train": str(work / "rows.jsonl"),
            "cache": str(work / "cache"),
            "validation_fraction": 0.0,
            "max_length": 256,
            "packing": False,
            "cache_features": keeps,
        },
        "batch": {"samples": BATCH, "micro_samples": BATCH},
        "stop": {"epochs": epochs},
        "parallel": {"device": "cpu", "gpus": 1},
        "evaluate": {"prompts": 0},
        "checkpoint": {"every_steps": 0},
        "output": {"dir": str(work / "runs")},
    }
    prepared = prepare_run(config_from_mapping(run), report=lambda _: None)
    prepared.release()
    rank = Rank(prepared.config, prepared.plan, prepared.folder, World(0, 0, 1, torch.device("cpu")), Process())
    data, built = stages.open_data(rank), stages.build_model(rank)
    measured: dict[str, Any] = {}
    training.train_model(rank, data, built, TrainState(), (seconds := Seconds(),), measured)
    marks = seconds.marks
    bounds = marks[:: (len(marks) - 1) // epochs]
    return {"seconds": [end - begin for begin, end in pairwise(bounds)], "losses": measured["losses"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_model(work / "model")
        write_image_rows(work / "rows.jsonl", options.images, words=32, pixels=320)
        runs = {name: train(work, name, options.epochs, name != "plain") for name in ("plain", "first", "second")}
        files = [path for path in (work / "cache" / "features").rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
    for name, found in runs.items():
        print(f"{name:8}", " ".join(f"{seconds:7.2f} s" for seconds in found["seconds"]))
    pairs = zip(runs["plain"]["losses"], runs["first"]["losses"], strict=True)
    print(f"{len(files)} images, {size / len(files):,.0f} bytes each")
    print(f"losses of plain and first deviate by up to {max(abs(a - b) / abs(a) for a, b in pairs):.1e}")
    print(f"losses of first and second are the same: {runs['first']['losses'] == runs['second']['losses']}")


if __name__ == "__main__":
    main()
