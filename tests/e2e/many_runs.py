"""Many runs of the real worker in one set of processes: starting one costs seconds, a run of a tiny model a tenth of
one.

``torchrun --nproc_per_node=2 many_runs.py SPECS.json``. A spec holds the worker's ``arguments``, ``ranks`` (2, or 1:
rank 0 as a process that was started alone) and, if the run is to break off, ``break_at``: {"step": N} when step N is
done but not yet written, {"saved": N} right after its checkpoint, {"saving": N} when its shards are written but not its
manifest (with one rank only); or {"memory": N} where every rank runs out of memory in place of step N's end.
Verification in a fresh process is left out.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import manyhands.checkpoint.background as background
from manyhands.worker import __main__ as worker
from manyhands.worker import export_stages as finish
from manyhands.worker import rendezvous, training


class BrokenOff(BaseException):
    """In place of a SIGKILL: nothing catches it."""


BREAK: dict[str, int] = {}
LOCKS: list[Any] = []
KEPT: list[
    Any
] = []  # a gloo group whose peer lives on may never end when it is freed; a worker leaves by os._exit and frees nothing
LAUNCHED = {
    name: value
    for name, value in os.environ.items()
    if name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
}


def break_off(where: str, step: int) -> None:
    if BREAK.get(where) == step:
        raise BrokenOff
    if where == "step" and BREAK.get("memory") == step:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. And so on")


def plant() -> None:
    finish.verify = lambda *_: {}
    prepare, commit = rendezvous.prepare_run, background.commit
    after_step, save = training.ProgressHook.after_step, training.CheckpointHook.save

    form_group = rendezvous.form_group

    def planted_group(store: Any, *arguments: Any) -> Any:
        world = form_group(store, *arguments)
        KEPT.extend((store, dist.group.WORLD))
        return world

    def planted_prepare(*arguments: Any, **options: Any) -> Any:
        prepared = prepare(*arguments, **options)
        LOCKS.append(prepared)  # a lock ends with its process, which here lives on
        return prepared

    def planted_step(self: Any, state: Any, result: Any) -> None:
        after_step(self, state, result)
        break_off("step", state.step)

    def planted_save(self: Any, state: Any) -> None:
        save(self, state)
        if BREAK.get("saved") == state.step:
            self.finish()
        break_off("saved", state.step)

    def planted_commit(partial: Path, folder: Path, manifest: Any) -> None:
        break_off("saving", int(folder.name.removeprefix("step-")))
        commit(partial, folder, manifest)

    rendezvous.form_group = planted_group  # type: ignore[assignment]
    rendezvous.prepare_run, background.commit = planted_prepare, planted_commit  # type: ignore[assignment]
    training.ProgressHook.after_step, training.CheckpointHook.save = planted_step, planted_save  # type: ignore[method-assign]


def run(spec: dict[str, Any]) -> int:
    BREAK.clear()
    BREAK.update(spec.get("break_at") or {})
    terminal = os.dup(1), os.dup(2)
    try:
        return worker.main(spec["arguments"])
    finally:
        for number, kept in enumerate(terminal, start=1):
            os.dup2(kept, number)
            os.close(kept)
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
        while LOCKS:
            LOCKS.pop().release()


def main(path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(
        0, {cores[int(LAUNCHED["RANK"]) % len(cores)]}
    )  # so one thread: two that share a busy core wait for each other
    plant()
    codes = []
    for number, spec in enumerate(json.loads(path.read_text())):
        for name in LAUNCHED:
            os.environ.pop(name, None)
        if spec["ranks"] == 2:
            os.environ.update(LAUNCHED)
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)  # keys of the shared store are new for each run
        if spec["ranks"] == 2 or LAUNCHED["RANK"] == "0":
            codes.append(run(spec))
    if LAUNCHED["RANK"] == "0":
        path.with_suffix(".codes").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)
