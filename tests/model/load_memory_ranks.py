"""On one rank: the peak of anonymous memory during a load. Runs in the processes of ``tests/support/ranks.py``."""

from __future__ import annotations

import ctypes
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from manyhands.core.holding import local
from tests.support.layouts import build
from tests.support.tiny import tiny_plan, tiny_run

SAMPLE_EVERY_S = 0.001


def anonymous_bytes() -> int:
    """Memory of this process that no file backs. The mapped pages of a weights file are not among it."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("smaps_rollup has no line Anonymous")


def peak_above(act: Callable[[], Any]) -> int:
    """The most anonymous memory while ``act`` runs and its result is held, above the level before."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier tests freed must not be there to be used again
    dist.barrier()
    before, done, peak = anonymous_bytes(), threading.Event(), 0

    def sample() -> None:
        nonlocal peak
        while not done.wait(SAMPLE_EVERY_S):
            peak = max(peak, anonymous_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    held = act()
    touched = sum(float(tensor.sum()) for tensor in held)
    peak_at_end = anonymous_bytes()
    done.set()
    sampler.join()
    assert touched == touched
    return max(peak, peak_at_end) - before


def load_sharded(folder: str) -> list[torch.Tensor]:
    """As a run does it, float32 masters under FSDP2; this rank's shards."""
    plan = tiny_plan(
        folder, strategy="fsdp", world_size=dist.get_world_size(), master_dtype="float32", compute_dtype="bfloat16"
    )
    return [local(parameter) for parameter in build(plan, tiny_run(folder)).model.parameters()]


def load_whole(folder: str) -> list[torch.Tensor]:
    """The naive way: everything on every rank, then its shards."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return [local(distribute_tensor(parameter.detach(), mesh, [Shard(0)])) for parameter in model.parameters()]


def measure(folder: str, warm_up: str, naive: bool) -> int:
    """Peak of one way to load ``folder``; ``warm_up``, a small model, is loaded before, for imports and first
    allocations.
    """
    load = load_whole if naive else load_sharded
    load(warm_up)
    return peak_above(lambda: load(folder))
