"""What the page's forms mean as a command line, and commands whose output it shows. They are processes, so that the
server stays small and a plan of a large model costs nobody else memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.core.errors import UserError

OPTIONS = {
    "model": "--model",
    "data": "--data",
    "method": "--method",
    "rank": "--rank",
    "epochs": "--epochs",
    "learning_rate": "--lr",
    "batch_size": "--batch-size",
    "max_length": "--max-length",
    "gpus": "--gpus",
}
OVERRIDE = re.compile(r"[a-z_]+(?:\.[^\s=]+)*=.*")
LIMIT_S, NICENESS = 600.0, 10


def words_of(form: Mapping[str, Any]) -> list[str]:
    """``form``: a run file (``run``), fields of ``OPTIONS``, and lines of ``section.key=value`` (``keys``). UserError
    for what is none of these. No value can become an option of its own.
    """
    if other := form.keys() - {*OPTIONS, "run", "keys"}:
        raise UserError(f"there is no such field: {', '.join(sorted(other))}")
    values = {name: str(value).strip() for name, value in form.items() if value is not None}
    words = []
    if run := values.get("run"):
        if run.startswith("-") or OVERRIDE.fullmatch(run):
            raise UserError("a run file must be a path", where=run, fix=f"write ./{run}")
        words.append(run)
    for line in filter(None, map(str.strip, values.get("keys", "").splitlines())):
        if not OVERRIDE.fullmatch(line):
            raise UserError("this is no key with a value", where=line, fix="write section.key=value, one a line")
        words.append(line)
    return words + [f"{option}={values[name]}" for name, option in OPTIONS.items() if values.get(name)]


def command_of(words: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "manyhands", *words]


class Asker:
    """Runs one command at a time, with low priority."""

    def __init__(self) -> None:
        self._one = asyncio.Lock()

    async def ask(self, words: Sequence[str]) -> str:
        """Standard output. UserError with the command's output where it failed or took over ``LIMIT_S``."""
        async with self._one:
            process = await asyncio.create_subprocess_exec(
                *command_of(words),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
            try:
                out, err = await asyncio.wait_for(process.communicate(), LIMIT_S)
            except TimeoutError:
                raise UserError(f"`manyhands {words[0]}` took longer than {LIMIT_S:.0f} s") from None
            finally:
                if process.returncode is None:  # it took too long, or the server ends
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
        text = out.decode("utf-8", "replace")
        if process.returncode and not text.startswith("{"):
            lines = f"\n{err.decode('utf-8', 'replace').strip()}"
            error = lines.rpartition("\nerror: ")[2]  # after lines of progress
            raise UserError(error.strip() or f"it ended with code {process.returncode}")
        return text


def describe_candidates(text: str, price: float | None) -> dict[str, Any]:
    """``manyhands plan --json`` for the page: decisions, and all candidates with why they lost."""
    from manyhands.planner.text import describe_checkpointing, describe_cost, explain, sentence_of, topic_of
    from manyhands.planner.types import Plan

    plan = Plan.model_validate_json(text)
    time = plan.time
    return {
        "decisions": [[topic_of(reason.code), sentence_of(reason)] for reason in plan.why],
        "memory": {name: size for name, size in plan.memory.terms.items() if size},
        "limit": plan.memory.limit,
        "num_steps": plan.num_steps,
        "num_ranks": plan.layout.world_size,
        "device": plan.layout.device,
        "seconds": None if time is None else time.step_s,
        "tokens_per_s": None if time is None else time.tokens_per_s,
        "total_s": None if time is None else time.total_s,
        "gpu_hours": None if time is None else time.gpu_hours,
        "cost": None if price is None else describe_cost(time, price),
        "candidates": [
            {
                "name": one.layout.strategy + ", resharded" * one.layout.reshard_after_forward,
                "checkpointing": describe_checkpointing(one.layout),
                "micro": one.layout.micro,
                "bytes": one.memory.total,
                "seconds": None if time is None else one.step_s,
                "fits": one.memory.fits,
                "chosen": one.chosen,
                "reason": explain(one.reason) if one.reason else "chosen",
            }
            for one in plan.candidates
        ],
        "packing": plan.packing,
    }
