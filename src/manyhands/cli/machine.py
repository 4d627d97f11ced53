"""``manyhands doctor``: whether this machine is ready. Imports no torch itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from manyhands.core.errors import EXIT_FAILED
from manyhands.core.units import count_of

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
        bool,
        typer.Option("--calibrate", help="Measure what the GPUs sustain, in less than a minute, for later plans."),
    ] = False,
    run: Annotated[
        str,
        typer.Option("--run", metavar="RUN", help="Say what this run does or waits for, without ending it."),
    ] = "",
) -> None:
    """Check Python, packages, GPUs, limits, disk and hub (exit code 1 if something is missing)."""
    from rich.text import Text

    from manyhands.core.text import open_console

    if calibrate:
        raise typer.Exit(_calibrate())
    if run:
        raise typer.Exit(_examine(run))
    console = open_console(highlight=False)
    marks = {"ok": ("ok     ", "green"), "warning": ("warning", "yellow"), "bad": ("missing", "bold red")}
    results = []
    for check in CHECKS:
        for result in check():
            results.append(result)
            mark, style = marks[result.state]
            console.print(
                Text.assemble((mark, style), "  ", result.text, (f" -> {result.fix}" if result.fix else "", "bold")),
                soft_wrap=True,
            )
    num_bad = sum(result.state == "bad" for result in results)
    num_warnings = sum(result.state == "warning" for result in results)
    console.print(f"{num_bad} missing, {count_of(num_warnings, 'warning')}")
    raise typer.Exit(EXIT_FAILED if num_bad else 0)


def _examine(run: str) -> int:
    """Exit code 1 where the run stands still."""
    from manyhands.cli.runs import RUNS, open_run
    from manyhands.launch.diagnose.hang import examine

    found = examine(open_run(run, RUNS))
    typer.echo("\n".join(found.lines))
    return EXIT_FAILED if found.stands_still else 0


def _calibrate() -> int:
    """In a process of its own, as it needs torch. Says what plans will use."""
    import json

    command = [sys.executable, "-m", "manyhands.bench.calibrate"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CALIBRATE_S)
    except subprocess.TimeoutExpired:
        typer.echo(f"error: no result within {CALIBRATE_S:.0f} s; end other programs on the GPUs (nvidia-smi)")
        return EXIT_FAILED
    found = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        lines = (done.stdout + done.stderr).strip().splitlines()
        typer.echo(lines[-1] if lines else "error: the calibration wrote nothing")
        return EXIT_FAILED
    rates = json.loads(found[-1])
    typer.echo(f"{rates.pop('gpus')} × {rates.pop('device')}, kept for later plans:")
    units = {"tflops": "TFLOP/s", "gb_s": "GB/s", "us": "µs"}
    for name, rate in rates.items():
        unit = next(unit for unit in units if name.endswith(f"_{unit}"))
        typer.echo(f"  {name.removesuffix(f'_{unit}').replace('_', ' ')}: {rate:,.4g} {units[unit]}")
    return 0


def _check_python() -> Iterator[CheckResult]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= MIN_PYTHON
    yield CheckResult(
        "ok" if good else "bad",
        f"Python {version}",
        "" if good else f"use Python {'.'.join(map(str, MIN_PYTHON))} or newer",
    )


def _check_packages() -> Iterator[CheckResult]:
    from importlib import metadata

    for name, least in NEEDED.items():
        wanted = ".".join(map(str, least))
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield CheckResult("bad", f"{name} is not installed", f"pip install '{name}>={wanted}'")
            continue
        numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())
        good = numbers >= least
        yield CheckResult(
            "ok" if good else "bad", f"{name} {version}", "" if good else f"pip install '{name}>={wanted}'"
        )
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
        text = f"GPU {gpu.index} {gpu.name}: {gib(gpu.memory_bytes)}, {gib(gpu.free_bytes)} free"
        yield CheckResult(
            "warning" if busy else "ok", text, "another program uses its memory, see nvidia-smi" if busy else ""
        )
        if not gpu.has_bfloat16:
            yield CheckResult("warning", f"GPU {gpu.index} does not support bfloat16: runs compute in float32")
    if host.kind is not None:
        yield CheckResult("ok", sentence_of(figures_of(host.kind)))
    low = host.free_memory_bytes < 4 * 2**30
    text = f"memory {gib(host.memory_bytes)}, {gib(host.free_memory_bytes)} free, {host.num_cores} cores"
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
        low = free < MIN_DISK_BYTES
        yield CheckResult(
            "warning" if low else "ok", f"{purpose}: {folder}, {gib(free)} free", "free some space" if low else ""
        )


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
    import json

    from manyhands.facts.gpu_kinds import kind_of_all
    from manyhands.facts.health import judge_speed
    from manyhands.facts.host import read_host_facts

    host = read_host_facts()
    if not host.gpus:
        return
    command = [sys.executable, "-m", "manyhands.worker.health"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SPEED_S)
    except subprocess.TimeoutExpired:
        yield CheckResult("warning", f"no matmul rate within {SPEED_S:.0f} s", "end other programs on the GPUs")
        return
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield CheckResult("warning", f"the GPUs' speed could not be measured: {last}")
        return
    rates = {f"GPU {index}": rate for index, rate in enumerate(json.loads(lines[-1]))}
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


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
