"""One measured row of a vision-language model, on the processes that started this module.

    python -m benchmarks.vision --case gemma4b-projector --output rows.jsonl
    torchrun --nproc_per_node=2 -m benchmarks.vision --case gemma4b-everything-fsdp --output rows.jsonl
    python -m benchmarks.vision --case qwen3vl4b-lora --layers 2 --pixels 256 --words 32   # small, to try it

The cases ``gemma4b-*`` are the rows of TheWorld's memory tables (benchmarks/vision_tables.py): two samples of 2,048
tokens with one image each a GPU, not packed, with gradient checkpointing or without as the name says.
``qwen3vl4b-lora`` is one image of 1,024 x 1,024 pixels and 512 tokens of text in half of the samples, text alone in the
other half, packed. Images are drawn and written as JPEG files first; each is decoded and resized once, while the run
trains.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.vision_shapes import write_image_rows, write_vision_folder
from benchmarks.vision_tables import PARTS, SAMPLES, SHORT, TOKENS
from manyhands.bench.case import Bench, Observer, read_options, run
from manyhands.bench.rows import BenchRow
from manyhands.core.holding import local
from manyhands.launch.environment import detect_launcher
from manyhands.training.loop import Loop
from manyhands.training.types import StepResult


@dataclasses.dataclass(frozen=True)
class Case:
    """What a case trains: ``keys`` of its run, and of each row the ``words`` and the image's side in ``pixels``."""

    shape: str
    method: str
    keys: dict[str, Any]
    length: int
    samples: int  # of a GPU in a step
    words: int
    pixels: int
    share: float = 1.0  # of the rows with an image


def _of_table(parts: str, strategy: str, again: bool) -> Case:
    keys = {
        "method.parts": PARTS[parts],
        "data.packing": False,
        "batch.micro_samples": SAMPLES,
        "parallel.strategy": strategy,
        "parallel.activation_checkpointing": "full" if again else "none",
        "parallel.offload_activations": False,
    }
    if strategy == "fsdp":
        keys["parallel.reshard_after_forward"] = True
    return Case("gemma3-4b", "full", keys, TOKENS, SAMPLES, TOKENS - 256 - 8, 1024)


CASES = {
    f"gemma4b-{short}{'' if strategy == 'auto' else '-' + strategy}{'-recompute' if again else ''}": _of_table(
        parts, strategy, again
    )
    for parts, short in SHORT.items()
    for strategy in ("auto", "ddp", "fsdp")
    for again in (False, True)
}
CASES["qwen3vl4b-lora"] = Case(
    "qwen3-vl-4b", "lora", {"data.packing": True, "parallel.strategy": "auto"}, 16384, 16, 512, 1024, share=0.5
)
CASES["qwen3vl4b-lora-images"] = dataclasses.replace(CASES["qwen3vl4b-lora"], share=1.0)


class Samples(Observer):
    """Adds samples and images a second to the row, and each rank's memory."""

    def __init__(self, case: Case, warm: int) -> None:
        self.case, self.warm = case, warm

    def after_build(self, bench: Bench) -> None:
        """transformers draws Gemma's projector as zeros: no image would reach the text, nor the check see one."""
        for name, parameter in bench.built.model.named_parameters():
            if name.endswith("mm_input_projection_weight"):
                part = local(parameter)
                draw = torch.Generator(part.device).manual_seed(0)  # the same on each replica
                with torch.no_grad():
                    part.normal_(std=0.02, generator=draw)

    def summarise(self, bench: Bench, loop: Loop, results: list[StepResult]) -> dict[str, Any]:
        timed = results[self.warm :]
        seconds = sum(result.seconds for result in timed)
        samples = self.case.samples * len(timed)
        return {
            "samples_per_s_gpu": round(samples / seconds, 2),
            "image_share": self.case.share,
            "pixels": self.case.pixels,
            "words": self.case.words,
            "parts": bench.rank.plan.parts,
        }


def main() -> None:
    options = parse()
    case = CASES[options.case]
    case = dataclasses.replace(case, words=options.words or case.words, pixels=options.pixels or case.pixels)
    case = dataclasses.replace(case, samples=options.samples or case.samples)
    row = BenchRow(
        options.case, options.case, case.shape, case.method, 1, rows=case.samples, length=case.length, data="images",
        keys=case.keys,
    )  # fmt: skip
    launcher = detect_launcher()
    folder = options.work / f"{case.shape}-{options.layers or 'all'}"
    if launcher.rank == 0:
        write_case(folder, case, options, launcher.world_size)
    run(options, row, Samples(case, options.warm))


def write_case(folder: Path, case: Case, options: argparse.Namespace, world_size: int) -> None:
    """The case's model folder and rows, where they are missing; images are enough for one epoch."""
    start = time.monotonic()
    if not (folder / "model").exists():
        write_vision_folder(folder / "model", case.shape, options.layers)
    num_rows = case.samples * world_size * (options.steps + 2)
    file = folder / f"images-{case.length}.jsonl"
    write_image_rows(file, num_rows, words=case.words, pixels=case.pixels, share=case.share)
    print(f"{num_rows} rows written in {time.monotonic() - start:.1f} s", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted(CASES), required=True)
    parser.add_argument("--samples", type=int, help="samples of one GPU in one step")
    parser.add_argument("--words", type=int, help="words of a row")
    parser.add_argument("--pixels", type=int, help="side of an image")
    return read_options(parser, steps=15, warm=4, work=Path(tempfile.gettempdir()) / "manyhands-vision")


if __name__ == "__main__":
    main()
