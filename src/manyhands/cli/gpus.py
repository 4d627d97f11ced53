"""``--gpus``: a number of this machine's GPUs, or GPUs by kind, which may be of another machine, to plan for."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from manyhands.core.errors import UserError

if TYPE_CHECKING:
    from manyhands.config.schema import RunConfig
    from manyhands.facts.gpu_kinds import AskedGpus
    from manyhands.facts.types import HostFacts

VARIABLE = "SYNTH_GPU_TYPE"  # another tool's name for it: read for plans without --gpus


def ask_gpus(option: str | None) -> AskedGpus | None:
    """What ``--gpus`` names by kind; None where it is a number or not given. UserError if it is neither."""
    from manyhands.facts.gpu_kinds import parse_gpus, plain_number

    return None if option is None or plain_number(option) is not None else parse_gpus(option)


def host_to_plan(config: RunConfig, option: str | None) -> HostFacts | None:
    """The machine to plan for, given by ``--gpus`` or ``SYNTH_GPU_TYPE``; None for this one."""
    from manyhands.facts.gpu_kinds import describe_host, parse_gpus

    asked = ask_gpus(option)
    if option is None and (text := os.environ.get(VARIABLE)):
        asked = parse_gpus(text, VARIABLE)
        if config.parallel.gpus not in ("auto", asked.total):
            raise UserError(
                f"parallel.gpus is {config.parallel.gpus}, but {VARIABLE} names {asked}",
                where=f"{VARIABLE}={text}",
                fix=f"unset it, or set parallel.gpus to {asked.total} or auto",
            )
    return describe_host(asked) if asked else None


def gpus_to_start(config: RunConfig, option: str | None, dry_run: bool) -> dict[str, Any]:
    """Arguments for a start: the machine that a dry run is for, if it is another one. A run's own GPUs must be here."""
    if not dry_run:
        require_here(option)
        return {}
    host = host_to_plan(config, option)
    return {"host": host} if host else {}


def require_here(option: str | None) -> None:
    """UserError where a run is to start on GPUs that this machine does not have."""
    if option is None and os.environ.get(VARIABLE):
        print(f"{VARIABLE} is for `plan` and `--dry-run`: a run uses the GPUs of this machine", file=sys.stderr)
    asked = ask_gpus(option)
    if asked is None:
        return
    from manyhands.facts.gpu_kinds import kind_of
    from manyhands.facts.host import read_host_facts

    host = read_host_facts()
    kinds = [kind_of(gpu.name) for gpu in host.gpus[: asked.total]]
    if kinds == [asked.kind] * asked.total and asked.num_nodes == 1:
        return
    here = ", ".join(gpu.name for gpu in host.gpus) or (host.unusable_gpus.found if host.unusable_gpus else "none")
    raise UserError(
        f"a run cannot start on {asked}: this machine does not have them",
        where=f"--gpus {option}",
        why=f"its GPUs: {here}",
        fix="plan for them with `manyhands plan` or --dry-run; --gpus N takes N of this machine's GPUs"
        + (
            "; on several machines start the run on each with --nodes, --node-rank and --rendezvous"
            if asked.num_nodes > 1
            else ""
        ),
    )
