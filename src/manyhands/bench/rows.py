"""Rows of the speed table: what is measured, and how cases run in processes of their own. JSON lines. No torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class BenchRow:
    """One piece of work. ``rows`` is samples of one GPU in one step; micro-batches are the plan's (``auto``).

    ``keys`` are keys of the run that belong to the work itself (activation checkpointing, fp8), never tuning.
    ``recorded`` is what H200s did: by number of GPUs, (tokens/s a GPU, peak GiB of torch's allocator).
    """

    name: str
    what: str
    shape: str
    method: Literal["full", "lora", "qlora"]
    gpus: int
    recorded: dict[int, tuple[int, float]] = field(default_factory=dict)
    rows: int = 2
    length: int = 4096
    # samples of one length, a mix of ``MIXES``, pairs of answers, or messages with images that the caller has written
    data: Literal["full", "mix", "chats", "long", "pairs", "images"] = "full"
    keys: dict[str, Any] = field(default_factory=dict)


CHECKPOINTED = {"parallel.activation_checkpointing": "full"}
FP8 = {"kernels.linear": "fp8"}
ZERO_2 = {"parallel.strategy": "zero2"}

# The most valuable first: what most people run. The recorded figures are those of docs/results.md.
TABLE = (
    BenchRow("8b-lora", "Llama-8B LoRA", "llama8b", "lora", 1, {1: (16_482, 50.4)}),
    BenchRow("8b-qlora", "Llama-8B QLoRA", "llama8b", "qlora", 1, {1: (16_302, 75.5)}, rows=4),
    BenchRow("1b-full", "Llama-1B full", "llama1b", "full", 1, {1: (65_082, 37.0)}, rows=4),
    BenchRow("8b-lora-recompute", "Llama-8B LoRA, full activation checkpointing", "llama8b", "lora", 1,
        {1: (11_474, 17.2)}, keys=CHECKPOINTED),
    BenchRow("8b-qlora-recompute", "Llama-8B QLoRA, full activation checkpointing", "llama8b", "qlora", 1,
        {1: (11_281, 7.7)}, keys=CHECKPOINTED),
    BenchRow("8b-lora-mix", "Llama-8B LoRA, lengths 64 to 4,096, packed", "llama8b", "lora", 1, data="mix", rows=16),
    BenchRow("8b-dpo", "Llama-8B LoRA by DPO, pairs of 2 x 2,048", "llama8b", "lora", 1, data="pairs", length=2048),
    BenchRow("27b-qlora", "Gemma-3-27B QLoRA", "gemma27b", "qlora", 2, {1: (4_754, 69.2), 2: (4_782, 72.1)}, rows=1),
    BenchRow("32b-qlora", "Qwen3-32B QLoRA", "qwen32b", "qlora", 4,
        {1: (3_849, 81.4), 2: (3_871, 81.9), 4: (3_469, 81.9)}, rows=1),
    BenchRow("70b-qlora", "Llama-70B QLoRA", "llama70b", "qlora", 2, {1: (1_958, 120.0), 2: (1_836, 109.3)}, rows=1),
    BenchRow("8b-lora-ddp", "Llama-8B LoRA, replicated", "llama8b", "lora", 8, {2: (16_456, 50.5)}),
    BenchRow("8b-full", "Llama-8B full, 8,192 tokens a sample", "llama8b", "full", 8,
        {1: (9_542, 122.5), 2: (10_022, 97.6), 4: (10_038, 75.2)}, rows=1, length=8192),
    BenchRow("70b-lora", "Llama-70B LoRA", "llama70b", "lora", 8, {2: (1_517, 118.6), 4: (1_669, 117.5)}, rows=1),
    BenchRow("8b-lora-fp8", "Llama-8B LoRA, matmuls in fp8", "llama8b", "lora", 1, {1: (22_788, 59.3)}, keys=FP8),
    BenchRow("8b-full-fp8", "Llama-8B full, matmuls in fp8", "llama8b", "full", 8,
        {2: (13_001, 95.6), 4: (13_512, 73.2)}, rows=1, length=8192, keys=FP8),
    BenchRow("8b-full-zero2", "Llama-8B full, 8,192 tokens a sample, DeepSpeed's ZeRO-2", "llama8b", "full", 4,
        {2: (8_724, 97.8)}, rows=1, length=8192, keys=ZERO_2),
    BenchRow("8b-full-zero3", "Llama-8B full, 8,192 tokens a sample, DeepSpeed's ZeRO-3", "llama8b", "full", 4,
        rows=1, length=8192, keys={"parallel.strategy": "zero3"}),
    BenchRow("27b-qlora-zero2", "Gemma-3-27B QLoRA, DeepSpeed's ZeRO-2", "gemma27b", "qlora", 2,
        {2: (4_466, 71.0)}, rows=1, keys=ZERO_2),
)  # fmt: skip

BY_NAME = {row.name: row for row in TABLE}


# Long-tailed mixes by mean and deviation of the logarithm, and bounds: instruction data, short chats, documents.
MIXES = {"mix": (6.0, 1.0, 64, 4096), "chats": (5.2, 0.5, 32, 1024), "long": (8.0, 0.9, 256, 16384)}


def mix_lengths(num_samples: int, seed: int = 5, *, mix: str = "mix") -> list[int]:
    """A log-normal mix of ``MIXES``; by default around 400 tokens, cut to 64 .. 4,096, as instruction data has it."""
    import random

    choose = random.Random(seed)
    mean, deviation, shortest, longest = MIXES[mix]
    return [min(longest, max(shortest, round(choose.lognormvariate(mean, deviation)))) for _ in range(num_samples)]


def new_run() -> str:
    """A name for the rows that one call of ``manyhands bench`` measures."""
    return time.strftime("%Y%m%dT%H%M%S")


RUN = new_run()  # of rows that are of no other: one call of a script


def append(path: Path, row: dict[str, Any]) -> None:
    """Every row names the run that it is of."""
    with path.open("a") as file:
        file.write(json.dumps({"run": RUN} | row) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """All rows; none where there is no file yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def say(row: dict[str, Any], path: Path | None, prefix: str = "") -> None:
    """Prints a row, and appends it where a file is asked for."""
    print(prefix + json.dumps(row), flush=True)
    if path is not None:
        append(path, row)


def start_processes(
    module: str,
    arguments: list[str],
    world_size: int,
    limit_s: float,
    variables: dict[str, str] | None = None,
    wait: Callable[[], tuple[str, float]] | None = None,
    folder: Path | None = None,
) -> tuple[str, dict[str, Any] | None]:
    """All that one process group wrote, and its result, if there is one. One that takes longer than ``limit_s`` is
    ended. ``variables`` are added to its environment. ``wait`` is called beside the process that was started, and gives
    what this then reads from standard input, and ``limit_s`` from there. It starts in ``folder``, by default in this
    process's.
    """
    launcher = ["-m", "manyhands.launch.local.agent", str(world_size)] if world_size > 1 else []
    command = [sys.executable, *(launcher or ["-m"]), module, *arguments]
    environment = os.environ | {
        "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        **(variables or {}),
    }
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE if wait else None,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    try:
        read, limit_s = wait() if wait else (None, limit_s)
        output = process.communicate(read, timeout=limit_s)[0]
    except subprocess.TimeoutExpired:
        return f"{end(process)}\nended after {limit_s} s", None
    except BaseException:
        end(process)
        raise
    found = [json.loads(line.removeprefix("RESULT ")) for line in output.splitlines() if line.startswith("RESULT ")]
    return output, found[-1] if found else None


def end(process: subprocess.Popen[str]) -> str:
    """End a launcher and its ranks, which would keep the device, and give what they wrote."""
    for how, patience_s in ((signal.SIGTERM, 15), (signal.SIGKILL, None)):
        os.killpg(process.pid, how)
        try:
            return process.communicate(timeout=patience_s)[0]
        except subprocess.TimeoutExpired:
            continue
    return ""


def count_gpus() -> int:
    from manyhands.facts.host import read_host_facts

    return len(read_host_facts().gpus)
