"""What each side's raw row says, by one definition: speed, memory, dtypes, attention kernels, machine."""

from __future__ import annotations

import contextlib
import hashlib
import platform
import re
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from manyhands.bench.rows import BenchRow
from manyhands.bench.shapes import SHAPES, flops_per_token

ATTENTION = re.compile(r"flash|fmha|sdpa|attention|attn", re.IGNORECASE)
NUM_KERNELS = 4  # of attention, the slowest first: forward and backward, and what goes with them
NAME_LENGTH = 120


def rates(steps: Sequence[tuple[float, int]], row: BenchRow, num_gpus: int, *, warm: int) -> dict[str, Any]:
    """Speed of all steps but the first ``warm``, each ``(seconds, tokens)``; the tokens are those of ``num_gpus`` GPUs
    together.

    ``step_s`` is the median where all steps have the same number of tokens, else the mean, and ``tokens_per_s_gpu`` is
    the mean number of tokens a step divided by it: the two say the same thing, on every side.
    """
    timed = steps[warm:]
    seconds, tokens = [each for each, _ in timed], [each for _, each in timed]
    equal = len(set(tokens)) == 1
    step_s = statistics.median(seconds) if equal else statistics.fmean(seconds)
    rate = statistics.fmean(tokens) / step_s / num_gpus
    equal_work = equal and row.shape in SHAPES
    flops = flops_per_token(row.shape, row.length, full=row.method == "full") if equal_work else 0.0
    return {
        "num_timed_steps": len(timed),
        "step_s": round(step_s, 4),
        "step_s_min_max": [round(min(seconds), 4), round(max(seconds), 4)],
        "steps_s": [round(each, 4) for each in seconds],
        "tokens_per_s_gpu": round(rate),
        "tflops": round(rate * flops / 1e12, 1) if equal_work else None,
    }


def lease() -> dict[str, str]:
    """``machine``: the same for rows measured on the same GPUs since the same boot, else different."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    known = [platform.node(), boot.read_text() if boot.exists() else ""]
    if torch.cuda.is_available():
        known += [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {"machine": hashlib.sha256("\n".join(known).encode()).hexdigest()[:12], "device": device}


def memory() -> dict[str, float | None]:
    """Peaks of this process in GiB, as torch's allocator counted them."""
    if not torch.cuda.is_available():
        return {"peak_allocated_gib": None, "peak_reserved_gib": None}
    return {
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
    }


def dtypes(model: torch.nn.Module, optimizer: Any) -> dict[str, list[str]]:
    """Of the parameters and of the optimizer's states, read from the tensors. NF4 values lie in uint8."""
    parameters = list(model.parameters())
    states = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return {
        "trained": _names(p for p in parameters if p.requires_grad),
        "frozen": _names(p for p in parameters if not p.requires_grad),
        "optimizer": _names(value for value in states if value.numel() > 1),
    }


def _names(tensors: Iterable[torch.Tensor]) -> list[str]:
    return sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})


@contextlib.contextmanager
def watch(model: Any, seen: dict[str, Any]) -> Iterator[None]:
    """Notes in ``seen`` which attention kernels ran inside, the slowest first, and in which dtype the last hidden
    states were.

    Meant for one more step after those that are timed, as the profiler costs time. Where the profiler cannot start,
    ``seen`` says why.
    """
    from torch.profiler import ProfilerActivity, profile

    hidden: list[torch.Tensor] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        hidden[:] = [output if isinstance(output, torch.Tensor) else output[0]]

    with contextlib.ExitStack() as stack:
        try:
            hook = model.get_decoder().register_forward_hook(keep)
            stack.callback(hook.remove)
            activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU
            profiler = stack.enter_context(profile(activities=[activity]))
        except (AttributeError, RuntimeError) as error:
            seen["attention_kernels"] = [f"not seen: {error}"]
            yield
            return
        yield
    seen["attention_kernels"] = attention_kernels(profiler.key_averages())
    seen["dtypes"] = seen.get("dtypes", {}) | {"compute": _names(hidden)}


def attention_kernels(events: Iterable[Any]) -> list[str]:
    """Names of attention kernels (of torch's operations on a CPU) by time, or a note that there are none."""
    found: dict[str, float] = {}
    for event in events:
        took = event.self_device_time_total or event.self_cpu_time_total
        if ATTENTION.search(event.key) and took:
            name = event.key[:NAME_LENGTH]
            found[name] = found.get(name, 0.0) + took
    return sorted(found, key=lambda name: -found[name])[:NUM_KERNELS] or [
        "none by name: attention ran as separate matmuls"
    ]
