"""The cells of the fault matrix: what is done to a run, when, and to which run; the most telling ones first."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

OURS, TORCHRUN, SRUN = "manyhands train", "torchrun", "srun"
LAYOUTS = {  # run file, ranks, keys
    "LoRA, DDP x2": ("run.yaml", 2, ()),
    "full, FSDP2 x2": ("full.yaml", 2, ("parallel.strategy=fsdp",)),
    "full, ZeRO-2 x2": ("full.yaml", 2, ("parallel.strategy=zero2",)),
    "LoRA, one process": ("run.yaml", 1, ()),
    "full, DDP x2": ("full.yaml", 2, ()),
    "LoRA, FSDP2 x2": ("run.yaml", 2, ("parallel.strategy=fsdp",)),
    "full, one process": ("full.yaml", 1, ()),
}
TWO_NODES = "LoRA, DDP on two nodes"
STAGES = ("start", "build", "step", "evaluation", "staging", "saving", "export", "verification")
FAULTS = {  # what is done, and in which stages
    "SIGKILL of one rank": ("kill_rank", STAGES),
    "SIGKILL of all ranks": ("kill_all", STAGES),
    "SIGKILL of the launcher": ("kill_launcher", ("preparation", *STAGES)),
    "SIGTERM to the launcher": ("terminate", ("preparation", *STAGES)),
    "SIGSTOP of one rank": ("stop_rank", ("build", "step", "evaluation", "staging", "saving", "export")),
    "SIGSTOP of the launcher for 5 s": ("stop_launcher", ("step",)),
    "SIGKILL of a data worker": ("kill_data_worker", ("step",)),
    "SIGSTOP of a data worker": ("stop_data_worker", ("step",)),
    "SIGKILL of the checkpoint writer": ("kill_writer", ("step", "staging", "saving")),
    "SIGSTOP of the checkpoint writer": ("stop_writer", ("step",)),
    "full disk": (
        "fill_disk",
        ("preparation", "build", "step", "evaluation", "staging", "saving", "export", "verification"),
    ),
    "exception in one rank": ("fail", ("step", "evaluation")),
    "exception in one rank's data": ("fail", ("data",)),
    "weights that are not a number": ("spoil_weights", ("step",)),
    "batch whose loss is not a number": ("spoil_batch", ("step",)),
    "clock set back an hour": ("set_clock_back", ("step",)),
}
NODE_FAULTS = {
    "node cut off": ("cut_off", ("build", "step", "evaluation", "saving")),
    "SIGKILL of one rank": ("kill_rank", ("step", "saving")),
    "SIGKILL of the launcher": ("kill_launcher", ("step", "saving")),
}
NEXT_START = "at the next start"
CHECKPOINT_PIECES = {  # kinds of file, by a pattern below the folder of a run
    "checkpoint shard": "checkpoints/step-000008/*.safetensors",
    "checkpoint train_state.json": "checkpoints/step-000008/train_state.json",
    "checkpoint manifest.json": "checkpoints/step-000008/manifest.json",
}
PIECES = CHECKPOINT_PIECES | {
    "plan": "plans/001.json",
    "run.json": "run.json",
    "status.json": "status.json",
    "metrics.jsonl": "metrics.jsonl",
    "heartbeat": ".ranks/beat-0.json",
    "lock": ".lock",
    "log of a rank": "logs/rank-0.log",
    # of what the run was made from, which other runs share
    "training data": "../../rows.jsonl",
    "token cache": "../../cache/*/tokens.bin",
    "token cache's meta.json": "../../cache/*/meta.json",
    "model's weights": "../../model/model.safetensors",
    "model's config.json": "../../model/config.json",
    "model's tokenizer.json": "../../model/tokenizer.json",
}
DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flipped": lambda path: path.write_bytes(
        bytes([*path.read_bytes()[:-20], *(b ^ 8 for b in path.read_bytes()[-20:])])
    ),
    "missing": lambda path: path.unlink(),
}
SECOND, FOREIGN_LOCK = "second launch", "leftover lock of another host"


@dataclass(frozen=True)
class Cell:
    fault: str
    moment: str
    layout: str
    launcher: str = OURS

    @property
    def name(self) -> str:
        return f"{self.fault} | {self.moment} | {self.layout} | {self.launcher}"

    @property
    def run_name(self) -> str:
        return re.sub(r"\W+", "-", self.name)[:110]

    @property
    def act(self) -> str:
        return (NODE_FAULTS if self.layout == TWO_NODES else FAULTS)[self.fault][0]

    @property
    def is_stop(self) -> bool:
        """Whether it is found by ``parallel.timeout_s``: nothing ends, nothing goes forward."""
        return self.act in ("stop_rank", "stop_data_worker", "stop_writer", "cut_off")


def cells() -> Iterator[Cell]:
    """All, in the order in which they are measured."""
    done: set[Cell] = set()
    for cell in _with_repeats():
        if cell not in done:
            done.add(cell)
            yield cell


def _with_repeats() -> Iterator[Cell]:
    first, second, zero, *others = LAYOUTS
    for layout in (first, second):
        yield from _of_layout(layout, OURS)
    single = "LoRA, one process"
    yield from (Cell(f"{piece} {how}", NEXT_START, single) for piece in PIECES for how in DAMAGES)
    yield from (Cell(fault, NEXT_START, single) for fault in (FOREIGN_LOCK,))
    yield Cell(SECOND, "step", single)
    for launcher in (OURS, TORCHRUN):
        yield from (Cell(fault, at, TWO_NODES, launcher) for fault, (_, found) in NODE_FAULTS.items() for at in found)
    for launcher in (TORCHRUN, SRUN):
        yield from _of_layout(first, launcher)
    yield from _of_layout(zero, OURS)
    yield from (Cell(f"{piece} {how}", NEXT_START, second) for piece in CHECKPOINT_PIECES for how in DAMAGES)
    for launcher in (TORCHRUN, SRUN):
        yield from _of_layout(second, launcher)
    for layout in others:
        yield from _of_layout(layout, OURS)
    for launcher in (TORCHRUN, SRUN):
        for layout in (zero, *others):
            yield from _of_layout(layout, launcher)


def _of_layout(layout: str, launcher: str) -> Iterator[Cell]:
    """Those last that need processes of their own, which take ten times as long."""
    yield from sorted(_in_order(layout, launcher), key=lambda cell: cell.moment in ("start", "verification"))


def _in_order(layout: str, launcher: str) -> Iterator[Cell]:
    for fault, (act, moments) in FAULTS.items():
        if act == "kill_all" and layout.endswith("process"):
            continue
        if act in ("kill_launcher", "stop_launcher") and launcher == SRUN:  # which is on another machine
            continue
        if act == "kill_rank" and launcher != OURS:  # under another launcher rank 0 prepares
            moments = ("preparation", *moments)
        if "ZeRO" in layout:  # whose checkpoints the ranks write themselves, while training waits
            moments = () if "writer" in act else tuple(moment for moment in moments if moment != "staging")
        yield from (Cell(fault, moment, layout, launcher) for moment in moments)
