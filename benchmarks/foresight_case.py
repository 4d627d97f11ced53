"""One case of ``benchmarks.foresight``, on the processes that start this module: what was planned beside what it took.

    python -m benchmarks.foresight_case --case NAME
    torchrun --nproc_per_node=2 -m benchmarks.foresight_case --case NAME

The raw row of ``manyhands.bench.case``, and with it all that the estimates are functions of (``input``, ``work``), so
that a later version of them can be compared with the same run, and on each rank: bytes allocated and reserved by stage,
context, and the seconds of kernels by kind in one more step.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.foresight_cases import BY_NAME, Case
from manyhands.bench.case import (
    Bench,
    Observer,
    find_facts,
    folder_of,
    more_steps,
    outside_allocator_gib,
    read_options,
    run,
)
from manyhands.planner.efficiency import lay_out_step
from manyhands.planner.search import base_input
from manyhands.planner.types import Plan
from manyhands.training.loop import Loop
from manyhands.training.types import StepResult, TrainState

GIB = 2**30
# Kinds of kernels by their names, the first that fits. What fits none is elementwise work.
KINDS = (
    ("communication", re.compile(r"nccl", re.IGNORECASE)),
    ("attention", re.compile(r"flash|fmha|sdpa|attention|attn", re.IGNORECASE)),
    ("matmul", re.compile(r"nvjet|gemm|cutlass|cublas|wgmma|splitk|_mm_|matmul", re.IGNORECASE)),
    ("optimizer", re.compile(r"multi_tensor|adam|foreach|kOptimizer|lp_norm", re.IGNORECASE)),
    ("dequantize", re.compile(r"nf4|dequant", re.IGNORECASE)),
    ("copy", re.compile(r"memcpy|memset", re.IGNORECASE)),
)
NUM_KERNELS = 24  # the slowest, by name


class Watched(Observer):
    """Memory by stage on every rank, and what the estimates are functions of."""

    def __init__(self, case: Case, options: argparse.Namespace) -> None:
        self.case, self.options = case, options
        self.stages: dict[str, Any] = {}
        self.begin = 0.0
        self.first_s: list[float] = []

    def before_first_step(self, bench: Bench) -> None:
        self.stages["built"] = memory_now()
        self.begin = time.monotonic()

    def after_step(self, state: TrainState, result: StepResult) -> None:
        if state.step <= 2:
            self.first_s.append(round(time.monotonic() - self.begin, 2))
        if state.step == 1:
            self.stages["first_step"] = memory_now()

    def summarise(self, bench: Bench, loop: Loop, results: list[StepResult]) -> dict[str, Any]:
        self.stages["last_step"] = memory_now()
        world, plan = bench.rank.world, bench.rank.plan
        if world.device.type == "cuda":
            self.stages["outside_gib"] = round(outside_allocator_gib(world.device), 3)
        every: list[Any] = [None] * world.world_size
        dist.all_gather_object(every, self.stages)
        work = [work_of_step(bench, step) for step in range(len(results))]
        profiled = profile_step(lambda: more_steps(bench, loop, 1), world.is_first)
        if self.options.kept:
            profiled["kept_gib"] = kept_for_backward(lambda: more_steps(bench, loop, 1))
        if not world.is_first:
            return {}
        return {
            "case": self.case.name,
            "held_out": self.case.is_held_out,
            "beside": int(os.environ.get("FORESIGHT_BESIDE", "0")),
            "gpu": str(torch.cuda.get_device_properties(0).uuid) if torch.cuda.is_available() else None,
            "ranks": every,
            "first_steps_s": self.first_s,  # since the model was built, compilation and all
            "compiled_s": slowest_compilations(),
            "graph_caches": count_cached_graphs(),
            "terms_gib": {name: round(size / GIB, 4) for name, size in plan.memory.terms.items()},
            "planned_step_s": plan.step_s,
            "work": work if any(step != work[0] for step in work) else work[:1],
            "input": input_of(self.options, self.case, plan),
            **profiled,
        }


def slowest_compilations() -> dict[str, tuple[float, int]]:
    """Seconds and calls of torch.compile's phases so far, which contain each other; the slowest."""
    from torch._dynamo.utils import compilation_time_metrics

    sums = {name: (round(sum(seconds), 2), len(seconds)) for name, seconds in compilation_time_metrics.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1][0])[:NUM_KERNELS])


def count_cached_graphs() -> dict[str, int]:
    """What torch.compile has found of earlier processes in its two caches, and what not."""
    from torch._dynamo.utils import counters

    found = {**counters["aot_autograd"], **counters["inductor"]}
    return {name: count for name, count in found.items() if "cache" in name}


def memory_now() -> dict[str, float]:
    """GiB, of this process: allocated and reserved now and at most, and the most that was asked for at once."""
    if not torch.cuda.is_available():
        return {}
    stats = torch.cuda.memory_stats()
    names = {
        "allocated": "allocated_bytes.all.current",
        "peak_allocated": "allocated_bytes.all.peak",
        "reserved": "reserved_bytes.all.current",
        "peak_reserved": "reserved_bytes.all.peak",
        "peak_requested": "requested_bytes.all.peak",
    }
    found = {name: round(stats.get(key, 0) / GIB, 4) for name, key in names.items()}
    return found | {"retries": stats.get("num_alloc_retries", 0)}


def work_of_step(bench: Bench, step: int) -> list[list[list[int]]]:
    """Lengths of the samples, ``[micro-batch][rank][sample]``; equal ones once, with their number before them."""
    plan, lengths = bench.rank.plan, bench.data.store.train.lengths
    samples = bench.data.order.samples(*divmod(step, plan.steps_per_epoch))
    layout = lay_out_step(plan, samples, lengths)
    return [[shorten([int(length) for length in lengths[part]]) for part in micro] for micro in layout.micro_batches]


def shorten(lengths: list[int]) -> list[int]:
    """``[-3, 512]`` for three samples of 512 tokens."""
    return [-len(lengths), lengths[0]] if len(lengths) > 2 and len(set(lengths)) == 1 else lengths


def profile_step(step: Callable[[], None], is_first: bool) -> dict[str, Any]:
    """Milliseconds of kernels by kind in one step, and the slowest ones by name: (ms, launches). Every rank takes the
    step, the first one looks.
    """
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) if is_first else contextlib.nullcontext() as profiler:
        step()
        torch.cuda.synchronize()
    if profiler is None:
        return {}
    kinds: dict[str, float] = {}
    names: dict[str, tuple[float, int]] = {}
    for event in profiler.key_averages():
        ms = event.self_device_time_total / 1000
        if ms > 0:
            kind = next((kind for kind, pattern in KINDS if pattern.search(event.key)), "elementwise")
            kinds[kind] = round(kinds.get(kind, 0.0) + ms, 3)
            names[event.key[:64]] = (round(ms, 3), event.count)
    slowest = sorted(names, key=lambda name: -names[name][0])[:NUM_KERNELS]
    return {
        "kernels_ms": kinds,
        "launches": sum(count for _, count in names.values()),
        "slowest": {name: names[name] for name in slowest},
    }


def kept_for_backward(step: Callable[[], None]) -> dict[str, tuple[float, int]]:
    """What a step's graphs keep from forward to backward, by dtype and shape: GiB of all and how many; a storage counts
    once, with the first tensor that is kept of it.
    """
    found: dict[str, tuple[float, int]] = {}
    seen: set[int] = set()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if not isinstance(tensor, torch.nn.Parameter) and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            name = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            size, count = found.get(name, (0.0, 0))
            found[name] = (round(size + storage.nbytes() / GIB, 4), count + 1)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    largest = sorted(found, key=lambda name: -found[name][0])[:NUM_KERNELS]
    return {name: found[name] for name in largest}


def input_of(options: argparse.Namespace, case: Case, plan: Plan) -> dict[str, Any]:
    """All that the estimates are functions of, as JSON. The layout is the plan's."""
    row = case.as_row()
    config, facts = find_facts(folder_of(options.work, row), row, case.gpus, options.steps, [])
    shared = base_input(config, facts)
    model = facts.model.model_dump(mode="json", exclude={"parameter_shapes", "files", "folder", "packing_reason"})
    fields = {name: value for name, value in vars(shared).items() if name not in ("model", "layout")}
    return {"model": model, "layout": asdict(plan.layout), "attention": plan.attention, **fields}


def stage(options: argparse.Namespace, case: Case) -> None:
    """What needs no GPU, while another case holds it: imports, the model's folder, the prepared samples. CUDA first
    looks at which GPUs are visible after that.
    """
    row = case.as_row()
    find_facts(folder_of(options.work, row), row, case.gpus, options.steps, [])
    for module in ("torch._dynamo", "torch._inductor.compile_fx", "transformers.modeling_utils"):
        importlib.import_module(module)
    os.environ.update(json.loads(sys.stdin.readline()))
    if cuda_has_begun():  # it has read which GPUs are visible, and would use the first one
        arguments = [argument for argument in sys.argv[1:] if argument != "--staged"]
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks.foresight_case", *arguments])


def cuda_has_begun() -> bool:
    """Whether something in this process has started the CUDA driver. False where there is none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) == 0  # else 3: not initialized


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=sorted(BY_NAME), required=True)
    parser.add_argument("--staged", action="store_true", help="prepare, read variables from standard input, run")
    parser.add_argument("--kept", action="store_true", help="also what is kept for the backward pass; compiles again")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "manyhands-foresight")
    asked = parser.parse_args()
    case = BY_NAME[asked.case]
    options = read_options(argparse.ArgumentParser(), [])
    options.work = asked.work / str(sorted(BY_NAME).index(case.name))
    options.steps, options.warm = case.steps, min(3, case.steps - 2)
    options.label, options.kept = "foresight", asked.kept
    options.work.mkdir(parents=True, exist_ok=True)
    if asked.staged:
        stage(options, case)
    run(options, case.as_row(), Watched(case, options))


if __name__ == "__main__":
    main()
