"""Answers a second with random weights of a published shape: one GPU, several at once, and layers divided over two.

    python -m benchmarks.generate --shape llama8b --prompts 1024 --gpus 1 2 --output rows.jsonl
    python -m benchmarks.generate --shape tiny --prompts 24 --new-tokens 8 --gpus 0      # a trial on a CPU

The weights are drawn on the device and written once, so that every copy reads them as it would a model's. Each row is
one JSON line; the seconds count from the first task that a loaded copy takes to the last answer. ``split`` compares one
copy divided over two GPUs, with a LoRA adapter beside its layers, with the same on one GPU, token by token.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from manyhands.bench.shapes import write_model_folder
from manyhands.config.schema import MethodSection
from manyhands.convert.lora import adapted_layers, apply_lora
from manyhands.export.adapter import export_adapter
from manyhands.infer.batch import load_at, open_replica
from manyhands.infer.decode import Completion, complete
from manyhands.infer.load import ModelLocation
from manyhands.infer.prompts import PromptTokens
from manyhands.infer.replicas import DeviceSlot, Placement, run_tasks
from manyhands.infer.settings import GenerationSettings
from manyhands.infer.worker import PromptQueue

METHOD = MethodSection(rank=16, alpha=32.0)


def write_model(folder: Path, shape: str, layers: int | None, device: str) -> tuple[Path, Path]:
    """(model folder, adapter folder) with random weights, bfloat16 on a GPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    base, adapter = folder / "base", folder / "adapter"
    if base.exists():
        shutil.rmtree(folder)
    write_model_folder(base, shape, layers)
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base), dtype=torch.bfloat16)
    model.save_pretrained(base)
    apply_lora(model, METHOD, seed=0)
    with torch.no_grad():
        for layer in adapted_layers(model).values():
            layer.lora_B.weight.normal_(std=0.02)
    export_adapter(adapter, model, METHOD, str(base), rank=0)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return base, adapter


def make_prompts(number: int, vocabulary: int, longest: int) -> list[PromptTokens]:
    """Lengths from a 16th of ``longest`` up, evenly mixed."""
    choose = random.Random(1)
    lengths = [choose.randint(max(2, longest // 16), longest) for _ in range(number)]
    return [PromptTokens(n, tuple(choose.choices(range(2, vocabulary), k=size))) for n, size in enumerate(lengths)]


def measure(
    found: ModelLocation,
    prompts: list[PromptTokens],
    settings: GenerationSettings,
    placement: Placement,
    slots: list[DeviceSlot],
) -> tuple[dict[str, Any], dict[int, Completion]]:
    """The row of one placement, and its answers."""
    queue, answers = PromptQueue(prompts, settings.max_new_tokens, len(slots)), dict[int, Completion]()
    begin, batches = [], []

    def take(capacity: Any) -> Any:
        if not begin:
            begin.append(time.monotonic())
        task = queue.take(capacity)
        if task:
            batches.append(len(task))
        return task

    make = functools.partial(open_replica, found=found, settings=settings, placement=placement, num_replicas=len(slots))
    started = time.monotonic()
    run_tasks(slots, make, take, answers.update)
    seconds = time.monotonic() - begin[0]
    new = sum(len(answer.ids) for answer in answers.values())
    row = {
        "copies": len(slots),
        "gpus": sum(len(slot.gpus) for slot in slots),
        "device_map": placement.device_map,
        "prompts": len(prompts),
        "answered": len(answers),
        "prompt_tokens": sum(len(prompt.ids) for prompt in prompts),
        "new_tokens": new,
        "batches": batches,
        "loading_s": round(begin[0] - started, 2),
        "seconds": round(seconds, 2),
        "answers_per_s": round(len(answers) / seconds, 2),
        "new_tokens_per_s": round(new / seconds, 1),
    }
    return row, answers


def compare_split(
    base: Path, adapter: Path, prompts: list[PromptTokens], settings: GenerationSettings
) -> dict[str, Any]:
    """The same batch by one copy on GPU 0 and by one divided over GPUs 0 and 1, the adapter unmerged."""
    found = ModelLocation(base, adapter)
    rows: dict[str, list[Completion]] = {}
    devices: list[str] = []
    for name, slot in (("one", DeviceSlot((0,))), ("split", DeviceSlot((0, 1)))):
        answerer = load_at(slot, found, Placement(device_map="balanced"))
        devices = sorted({str(parameter.device) for parameter in answerer.model.parameters()})
        rows[name] = complete(
            answerer.model, answerer.tokenizer, [prompt.ids for prompt in prompts], settings, frozenset()
        )
        del answerer
        torch.cuda.empty_cache()
    same = sum(one == split for one, split in zip(rows["one"], rows["split"], strict=True))
    return {"what": "split", "devices": devices, "prompts": len(prompts), "same_answers": same}


def measure_library(base: Path, prompts: list[PromptTokens], new_tokens: int) -> dict[str, Any]:
    """transformers' own continuous batching (``generate_batch``) on one GPU, as a mark beside ours."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto", device_map={"": 0})
    model.set_attn_implementation("paged|sdpa")
    config = GenerationConfig(do_sample=False, max_new_tokens=new_tokens, eos_token_id=-1, pad_token_id=0)
    begin = time.monotonic()
    outputs = model.generate_batch([list(prompt.ids) for prompt in prompts], generation_config=config)
    seconds = time.monotonic() - begin
    return {
        "what": "transformers generate_batch, with warm-up",
        "gpus": 1,
        "seconds": round(seconds, 2),
        "answers_per_s": round(len(outputs) / seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama8b")
    parser.add_argument("--layers", type=int, help="instead of the shape's own number")
    parser.add_argument("--prompts", type=int, default=1024)
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest prompt")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--gpus", type=int, nargs="+", default=[1, 2], help="0 is the CPU")
    parser.add_argument("--library", action="store_true", help="measure transformers' continuous batching too")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/manyhands-generate"))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base, adapter = write_model(arguments.folder, arguments.shape, arguments.layers, device)
    prompts = make_prompts(arguments.prompts, 500, arguments.longest)
    settings = GenerationSettings(max_new_tokens=arguments.new_tokens)
    machine = torch.cuda.get_device_name(0) if device == "cuda" else "cpu"
    about = {"shape": arguments.shape, "machine": machine, "torch": torch.__version__}

    def write(row: dict[str, Any]) -> None:
        print(json.dumps(about | row), flush=True)
        if arguments.output is not None:
            with arguments.output.open("a") as file:
                file.write(json.dumps(about | row) + "\n")

    for number in arguments.gpus:
        placement = Placement(gpus=number, device_map="none")
        slots = [DeviceSlot((gpu,)) for gpu in range(number)] or [DeviceSlot()]
        row, _ = measure(ModelLocation(base), prompts, settings, placement, slots)
        write({"what": "data-parallel", **row})
    if max(arguments.gpus) >= 2:
        write(compare_split(base, adapter, prompts[:32], settings))
        placement = Placement(gpus=2, device_map="balanced")
        row, _ = measure(ModelLocation(base), prompts[:256], settings, placement, [DeviceSlot((0, 1))])
        write({"what": "layers over two GPUs", **row})
    if arguments.library:
        try:
            write(measure_library(base, prompts, arguments.new_tokens))
        except Exception as error:  # a mark beside ours: what stops it is the row
            write({"what": "transformers generate_batch", "error": f"{type(error).__name__}: {error}"[:300]})


if __name__ == "__main__":
    main()
