"""``manyhands setup-accelerate``: what a start on this machine would use, and accelerate's default configuration beside
it. Asks nothing by default."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.core.errors import UserError
from manyhands.core.units import count_of

if TYPE_CHECKING:
    from manyhands.facts.types import HostFacts


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
        from manyhands.cli.memory import describe_unusable

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

    if find_spec("accelerate") is None:
        raise UserError("accelerate is not installed", fix="pip install accelerate")
    if code := run_module("accelerate.commands.accelerate_cli", ["config"]):
        raise typer.Exit(code)
