"""``manyhands gpu-info`` and ``memory-check``: this machine's GPUs, planned beside used memory. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from manyhands.cli.run_file import find_run_folder
from manyhands.core.errors import EXIT_FAILED
from manyhands.core.units import format_gib

if TYPE_CHECKING:
    from manyhands.facts.types import GpuFacts, UnusableGpus
    from manyhands.launch.run.usage import RankUsage, RunUsage

BUSY = 0.9  # a GPU with less of its memory free is in use


def gpu_info() -> None:
    """List this machine's GPUs and their memory."""

    def describe(gpu: GpuFacts) -> str:
        about = f"{gpu.architecture}, {'bfloat16' if gpu.has_bfloat16 else 'no bfloat16'}"
        return f"{gpu.name} ({format_gib(gpu.memory_bytes)}), {format_gib(gpu.free_bytes)} free, {about}"

    _print_gpus(describe, none="no GPU found: runs use CPU processes", total=True)


def memory_check(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN]", help="A run's folder or run file; without it, all GPUs and active runs."),
    ] = None,
) -> None:
    """Compare planned with used memory, by rank. Of a live or finished run; exit code 1 if a limit is exceeded."""
    from manyhands.launch.run.folder import RunFolder
    from manyhands.launch.run.usage import find_live_runs, read_usage

    if run is not None:
        usages = [read_usage(RunFolder(find_run_folder(run)))]
    else:
        _print_gpus(_describe_use)
        usages = [read_usage(folder) for folder in find_live_runs(Path("runs"))]
        if not usages:
            print("no run is active in runs/: `manyhands memory-check RUN` takes a run's folder or its run file")
    for usage in usages:
        print("\n".join(describe_usage(usage)))
    if any(rank.verdict == "above the limit" for usage in usages for rank in usage.ranks):
        raise typer.Exit(EXIT_FAILED)


def describe_usage(usage: RunUsage) -> list[str]:
    """A title, a line for each rank, and the verdict on all of them."""
    at = "before its first step" if usage.step is None else f"step {usage.step} of {usage.num_steps}"
    lines = [f"run {usage.name}: {usage.state}, {at}"]
    lines += [f"  {_describe_rank(rank, usage.device)}" for rank in usage.ranks]
    by_verdict = {verdict: [rank for rank in usage.ranks if rank.verdict == verdict] for verdict in _ORDER}
    worst, ranks = next((verdict, ranks) for verdict, ranks in by_verdict.items() if ranks)
    which = "all ranks" if len(ranks) == len(usage.ranks) else f"rank {', '.join(str(rank.rank) for rank in ranks)}"
    return [*lines, f"verdict: {which} {worst}{_ADVICE.get(worst, '')}"]


_ORDER = ("above the limit", "above the plan", "unmeasured", "within the plan")
_ADVICE = {
    "above the limit": ": may run out of memory; if it does, it restarts automatically with smaller micro-batches",
    "above the plan": ", below the limit: the estimate is too low for this run",
}


def _describe_rank(rank: RankUsage, device: str) -> str:
    place = f"GPU {rank.gpu}" if rank.gpu is not None else "GPU" if device == "cuda" else "CPU process"
    known = [
        (rank.driver, "in use by the process"),
        (rank.now, "held by tensors" if device == "cuda" else "resident"),
        (rank.peak, "at the peak"),
    ]
    used = ", ".join(f"{format_gib(size)} {what}" for size, what in known if size is not None) or "nothing measured yet"
    share = f" ({rank.most / rank.planned:.0%} of the plan)" if rank.most is not None else ""
    planned = f"planned {format_gib(rank.planned)}, limit {format_gib(rank.limit)}"
    return f"rank {rank.rank}, {place}: {planned}; {used}{share}: {rank.verdict}"


def _print_gpus(describe: Callable[[GpuFacts], str], none: str = "", total: bool = False) -> None:
    """A line for each GPU, ``none`` where there is none, with ``total`` the memory of all; and the host."""
    from manyhands.facts.host import read_host_facts

    host = read_host_facts()
    print(f"Number of GPUs: {len(host.gpus)}")
    if host.unusable_gpus is not None:
        print(describe_unusable(host.unusable_gpus))
    elif none and not host.gpus:
        print(none)
    for lost in host.lost_gpus:
        print(f"  {lost}")
    for gpu in host.gpus:
        print(f"  GPU {gpu.index}: {describe(gpu)}")
    if total and host.gpus:
        print(f"Total VRAM: {format_gib(sum(gpu.memory_bytes for gpu in host.gpus))}")
    memory, free = format_gib(host.memory_bytes), format_gib(host.free_memory_bytes)
    print(f"CPU: {host.num_cores} cores, {memory} memory, {free} free")


def _describe_use(gpu: GpuFacts) -> str:
    used, total = gpu.memory_bytes - gpu.free_bytes, gpu.memory_bytes
    state = "free" if gpu.free_bytes >= BUSY * total else "in use"
    return f"{gpu.name}, {format_gib(used)} of {format_gib(total)} used ({used / total:.0%}): {state}"


def describe_unusable(unusable: UnusableGpus) -> str:
    """Two lines: which GPUs and why, and what to do."""
    return f"this machine has {unusable.found}, but none can be used: {unusable.why}\n  fix: {unusable.fix}"
