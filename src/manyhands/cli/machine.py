"""Commands on this machine: ``doctor``, ``gpu-info``, ``memory-check``, ``setup-accelerate``. Imports no torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from manyhands.cli.run_file import find_run_folder
from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.units import count_of, format_gib

if TYPE_CHECKING:
    from manyhands.facts.types import GpuFacts, HostFacts, UnusableGpus
    from manyhands.launch.run.usage import RankUsage, RunUsage

BUSY = 0.9  # a GPU with less of its memory free is in use
MIN_PYTHON = (3, 11)
NEEDED = {
    "torch": (2, 11),
    "transformers": (5, 17),
    "safetensors": (0, 4),
    "pydantic": (2, 0),
    "huggingface_hub": (0, 0),
}
OPTIONAL = {"tensorboard": "curves in the browser", "bitsandbytes": "4-bit weights"}
HUB_TIMEOUT_S = 5.0
MIN_DISK_BYTES = 10 * 2**30
CALIBRATE_S = 180.0
SPEED_S = 90.0  # most of it is importing torch
TORCH_PROBE = """
import torch
cuda, hip = torch.version.cuda, torch.version.hip
build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
print(build, torch.cuda.device_count() if torch.cuda.is_available() else 0)
"""


@dataclass(frozen=True)
class CheckResult:
    """``bad`` leads to exit code 1, a warning does not."""

    state: Literal["ok", "warning", "bad"]
    text: str
    fix: str = ""


def doctor(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure what the GPUs sustain, in less than a minute, for later plans.")
    ] = False,
    run: Annotated[
        str, typer.Option("--run", metavar="RUN", help="Say what this run does or waits for, without ending it.")
    ] = "",
) -> None:
    """Check Python, packages, GPUs, limits, disk and hub. Exit code 1 if something is missing."""
    from rich.text import Text

    from manyhands.core.text import open_console

    if calibrate:
        raise typer.Exit(_calibrate())
    if run:
        raise typer.Exit(_examine(run))
    console = open_console(highlight=False)
    marks = {"ok": ("ok     ", "green"), "warning": ("warning", "yellow"), "bad": ("missing", "bold red")}
    counts = Counter[str]()
    for result in (result for check in CHECKS for result in check()):
        counts[result.state] += 1
        fix = f" -> {result.fix}" if result.fix else ""
        console.print(Text.assemble(marks[result.state], "  ", result.text, (fix, "bold")), soft_wrap=True)
    console.print(f"{counts['bad']} missing, {count_of(counts['warning'], 'warning')}")
    raise typer.Exit(EXIT_FAILED if counts["bad"] else 0)


def _examine(run: str) -> int:
    """Exit code 1 where the run stands still."""
    from manyhands.cli.runs import RUNS, open_run
    from manyhands.launch.diagnose.hang import examine

    found = examine(open_run(run, RUNS))
    typer.echo("\n".join(found.lines))
    return EXIT_FAILED if found.stands_still else 0


def _calibrate() -> int:
    """Prints what plans will use."""
    try:
        rates, last = _measure("manyhands.bench.calibrate", CALIBRATE_S)
    except subprocess.TimeoutExpired:
        typer.echo(f"error: no result within {CALIBRATE_S:.0f} s; end other programs on the GPUs (nvidia-smi)")
        return EXIT_FAILED
    if rates is None:
        typer.echo(last or "error: the calibration wrote nothing")
        return EXIT_FAILED
    typer.echo(f"{rates.pop('gpus')} × {rates.pop('device')}, kept for later plans:")
    units = {"tflops": "TFLOP/s", "gb_s": "GB/s", "us": "µs"}
    for name, rate in rates.items():
        unit = next(unit for unit in units if name.endswith(f"_{unit}"))
        typer.echo(f"  {name.removesuffix(f'_{unit}').replace('_', ' ')}: {rate:,.4g} {units[unit]}")
    return 0


def _measure(module: str, timeout_s: float) -> tuple[Any, str]:
    """The result of a module that needs torch, run in a process; None with its last line where it gave none."""
    done = subprocess.run([sys.executable, "-m", module], capture_output=True, text=True, timeout=timeout_s)
    found = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    lines = (done.stdout + done.stderr).strip().splitlines()
    return json.loads(found[-1]) if found else None, lines[-1] if lines else ""


def _check_python() -> Iterator[CheckResult]:
    good, least = sys.version_info >= MIN_PYTHON, ".".join(map(str, MIN_PYTHON))
    text = f"Python {'.'.join(map(str, sys.version_info[:3]))}"
    yield CheckResult("ok" if good else "bad", text, "" if good else f"use Python {least} or newer")


def _check_packages() -> Iterator[CheckResult]:
    from importlib import metadata

    for name, least in NEEDED.items():
        install = f"pip install '{name}>={'.'.join(map(str, least))}'"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield CheckResult("bad", f"{name} is not installed", install)
            continue
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
        good = numbers >= least
        yield CheckResult("ok" if good else "bad", f"{name} {version}", "" if good else install)
    for name, purpose in OPTIONAL.items():
        try:
            yield CheckResult("ok", f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            yield CheckResult("warning", f"{name} is not installed: no {purpose}", f"pip install {name}")


def _check_torch() -> Iterator[CheckResult]:
    """In a process: the import may fail, and the driver may be too old."""
    from manyhands.facts.host import read_host_facts

    host = read_host_facts()
    num_gpus = len(host.gpus)
    try:
        probe = subprocess.run([sys.executable, "-c", TORCH_PROBE], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        yield CheckResult("bad", "importing torch took over 120 s", "check the disk and the GPU driver (nvidia-smi)")
        return
    if probe.returncode:
        lines = probe.stderr.strip().splitlines()
        yield CheckResult("bad", f"torch cannot be imported: {lines[-1] if lines else 'no message'}", "reinstall torch")
        return
    for lost in host.lost_gpus:
        yield CheckResult("bad", lost, "reset or replace it (restart the machine)")
    build, _, usable = probe.stdout.strip().rpartition(" ")
    if host.unusable_gpus is not None:
        unusable = host.unusable_gpus
        yield CheckResult("bad", f"{unusable.found}, but none can be used: {unusable.why}", unusable.fix)
    elif not num_gpus:
        yield CheckResult("warning", "no GPU found: runs use CPU processes", "")
    elif int(usable) < num_gpus:
        yield CheckResult("bad", f"{num_gpus} GPUs, but torch ({build}) can use {usable}", "update the GPU driver")
    else:
        yield CheckResult("ok", f"torch can use {'the GPU' if num_gpus == 1 else f'all {num_gpus} GPUs'} ({build})")


def _check_memory() -> Iterator[CheckResult]:
    from manyhands.facts.host import read_host_facts
    from manyhands.planner.hardware import figures_of
    from manyhands.planner.text import sentence_of

    host = read_host_facts()
    for gpu in host.gpus:
        busy = gpu.free_bytes < 0.9 * gpu.memory_bytes
        text = f"GPU {gpu.index} {gpu.name}: {format_gib(gpu.memory_bytes)}, {format_gib(gpu.free_bytes)} free"
        yield CheckResult(
            "warning" if busy else "ok", text, "another program uses its memory, see nvidia-smi" if busy else ""
        )
        if not gpu.has_bfloat16:
            yield CheckResult("warning", f"GPU {gpu.index} does not support bfloat16: runs compute in float32")
    if host.kind is not None:
        yield CheckResult("ok", sentence_of(figures_of(host.kind)))
    low = host.free_memory_bytes < 4 * 2**30
    text = f"memory {format_gib(host.memory_bytes)}, {format_gib(host.free_memory_bytes)} free, {host.num_cores} cores"
    yield CheckResult("warning" if low else "ok", text, "close other programs" if low else "")


def _check_folders() -> Iterator[CheckResult]:
    """Folders of runs, token cache and models: writable, with free space."""
    from manyhands.config.schema import DataSection

    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub")
    for purpose, folder in (
        ("runs", Path.cwd()),
        ("token cache", Path(DataSection.model_fields["cache"].default)),
        ("hub cache", hub),
    ):
        folder = folder.expanduser()
        there = next(place for place in (folder, *folder.parents) if place.exists())
        if not os.access(there, os.W_OK):
            yield CheckResult(
                "bad", f"{purpose}: no permission to write to {folder}", "change its owner, or choose another folder"
            )
            continue
        free = shutil.disk_usage(there).free
        low, text = free < MIN_DISK_BYTES, f"{purpose}: {folder}, {format_gib(free)} free"
        yield CheckResult("warning" if low else "ok", text, "free some space" if low else "")


def _check_limits() -> Iterator[CheckResult]:
    """Shared memory, limits of processes, errors and throttling of GPUs."""
    from manyhands.facts.health import judge_host, read_health

    health = read_health("", Path.cwd())
    found = [CheckResult(*finding) for finding in judge_host(health, max(1, len(health.gpus)))]
    yield from found
    if not found:
        gpus = f"; {count_of(len(health.gpus), 'GPU')} without errors or throttling" if health.gpus else ""
        yield CheckResult("ok", f"limits of open files, locked and shared memory suffice{gpus}")


def _check_speed() -> Iterator[CheckResult]:
    """Matmuls of each GPU, in a process."""
    from manyhands.facts.gpu_kinds import kind_of_all
    from manyhands.facts.health import judge_speed
    from manyhands.facts.host import read_host_facts

    host = read_host_facts()
    if not host.gpus:
        return
    try:
        measured, last = _measure("manyhands.worker.health", SPEED_S)
    except subprocess.TimeoutExpired:
        yield CheckResult("warning", f"no matmul rate within {SPEED_S:.0f} s", "end other programs on the GPUs")
        return
    if measured is None:
        yield CheckResult("warning", f"the GPUs' speed could not be measured: {last or 'no message'}")
        return
    rates = {f"GPU {index}": rate for index, rate in enumerate(measured)}
    kind = kind_of_all(host.gpus)
    known, name = (kind.bf16_tflops, kind.name) if kind is not None else (None, "")
    found = [CheckResult(*one) for one in judge_speed(rates, known, name)]
    each = ", ".join(f"{rate:.0f}" for rate in rates.values())
    yield from found or [CheckResult("ok", f"GPUs multiply matrices at {each} TFLOP/s in bfloat16")]


def _check_hub() -> Iterator[CheckResult]:
    import urllib.error
    import urllib.parse
    import urllib.request

    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        yield CheckResult("warning", "HF_HUB_OFFLINE is set: models are loaded from the cache or a folder only")
        return
    address = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    host = urllib.parse.urlsplit(address).hostname or "?"  # without a password in the address
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=HUB_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        pass  # it answered
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        yield CheckResult(
            "warning",
            f"the hub {host} does not respond: {reason}",
            "use a local model folder, or set HF_ENDPOINT or a proxy",
        )
        return
    yield CheckResult("ok", f"the hub {host} is reachable")


CHECKS: tuple[Callable[[], Iterator[CheckResult]], ...] = (
    _check_python,
    _check_packages,
    _check_torch,
    _check_memory,
    _check_folders,
    _check_limits,
    _check_speed,
    _check_hub,
)


def gpu_info() -> None:
    """List this machine's GPUs and their memory."""

    def describe(gpu: GpuFacts) -> str:
        about = f"{gpu.architecture}, {'bfloat16' if gpu.has_bfloat16 else 'no bfloat16'}"
        return f"{gpu.name} ({format_gib(gpu.memory_bytes)}), {format_gib(gpu.free_bytes)} free, {about}"

    _print_gpus(describe, none="no GPU found: runs use CPU processes", total=True)


def memory_check(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="A run's folder or run file; without it, all GPUs and active runs."),
    ] = None,
) -> None:
    """Compare planned with used memory, by rank. Of a live or finished run; exit code 1 if a limit is exceeded."""
    from manyhands.launch.run.folder import RunFolder
    from manyhands.launch.run.usage import find_live_runs, read_usage

    def describe(gpu: GpuFacts) -> str:
        used, total = gpu.memory_bytes - gpu.free_bytes, gpu.memory_bytes
        state = "free" if gpu.free_bytes >= BUSY * total else "in use"
        return f"{gpu.name}, {format_gib(used)} of {format_gib(total)} used ({used / total:.0%}): {state}"

    if run is not None:
        usages = [read_usage(RunFolder(find_run_folder(run)))]
    else:
        _print_gpus(describe)
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


def describe_unusable(unusable: UnusableGpus) -> str:
    """Two lines: which GPUs and why, and what to do."""
    return f"this machine has {unusable.found}, but none can be used: {unusable.why}\n  fix: {unusable.fix}"


def setup_accelerate(
    ask: Annotated[
        bool, typer.Option("--ask", help="Ask and write a configuration, as `accelerate config` does.")
    ] = False,
) -> None:
    """Show what a start would use on this machine. Nothing needs to be configured."""
    from manyhands.facts.host import read_host_facts

    path = default_config(os.environ)
    if ask:
        _ask()
        print(f"`make train-distributed` uses {path}; ACCELERATE_CONFIG=none ignores it")
        return
    host = read_host_facts()
    if host.unusable_gpus is not None:
        print(describe_unusable(host.unusable_gpus))
        print("a start would be refused until then, unless parallel.device is cpu")
        return
    print("nothing needs to be configured; `make train-distributed` uses what this machine has:")
    print("\n".join(f"  {line}" for line in describe_machine(host, os.environ)))
    print("\n".join(describe_default(path, len(host.gpus))))


def describe_machine(host: HostFacts, environ: Mapping[str, str]) -> list[str]:
    """The answers to what ``accelerate config`` asks."""
    num_gpus, visible = len(host.gpus), environ.get("CUDA_VISIBLE_DEVICES")
    kind = "multi-GPU" if num_gpus > 1 else "one GPU" if num_gpus else "no GPU: CPU processes"
    ids = visible if visible and num_gpus else ",".join(str(gpu.index) for gpu in host.gpus) or "none"
    has_bfloat16 = num_gpus and all(gpu.has_bfloat16 for gpu in host.gpus)
    return [
        "compute environment: this machine",
        f"machine type: {kind}",
        f"number of processes: {max(1, num_gpus)}" + (" (parallel.gpus=N starts more)" if not num_gpus else ""),
        f"GPU ids: {ids}" + (" (CUDA_VISIBLE_DEVICES)" if visible and num_gpus else ""),
        f"mixed precision: {'bf16' if has_bfloat16 else 'no, float32'}",
    ]


def describe_default(path: Path, num_gpus: int) -> list[str]:
    """accelerate's default configuration: that there is none, or its contents and what this machine does not have."""
    if not path.is_file():
        return [f"accelerate has no default configuration ({path}); `make setup-accelerate ASK=1` writes one"]
    import yaml

    try:
        found: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(
            "accelerate's default configuration cannot be read",
            where=str(path),
            why=str(error).splitlines()[0],
            fix="write a new one: make setup-accelerate ASK=1",
        ) from None
    keys = found if isinstance(found, dict) else {}
    shown = ", ".join(
        f"{key}: {keys[key]}" for key in ("distributed_type", "num_processes", "mixed_precision") if key in keys
    )
    lines = [f"accelerate's default configuration, which `make train-distributed` follows: {path} ({shown})"]
    asked = keys.get("num_processes")
    if isinstance(asked, int) and num_gpus and asked > num_gpus:
        lines.append(f"warning: it asks for {asked} processes, but {count_of(num_gpus, 'GPU')} are visible")
    return lines


def default_config(environ: Mapping[str, str]) -> Path:
    """Where ``accelerate config`` writes: https://huggingface.co/docs/accelerate/package_reference/cli."""
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = Path(environ.get("HF_HOME") or Path(cache) / "huggingface").expanduser()
    return home / "accelerate" / "default_config.yaml"


def _ask() -> None:
    from importlib.util import find_spec

    from manyhands.cli.process import run_module

    if not sys.stdin.isatty():  # its menu ends in a traceback
        raise UserError("standard input is not a terminal", where="--ask", fix="run it in a terminal, or omit --ask")
    if find_spec("accelerate") is None:
        raise UserError("accelerate is not installed", fix="pip install accelerate")
    if code := run_module("accelerate.commands.accelerate_cli", ["config"]):
        raise typer.Exit(code)
