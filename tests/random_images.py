"""Random batches of text and images on several ranks: whether all of them join every collective.

    python -m tests.random_images --batches 10000 --ranks 4    # of all kinds; the exit code says whether one failed
    python -m tests.random_images --batches 200 --kinds "gemma3 projector fsdp" --seed 7

A kind is a family, what is trained of it, and a layout; its batches train one tiny model, one after the other. In a
batch ranks and micro-batches have documents with and without images, or none at all; now and then one rank alone has
images, or nobody. Batch n of a kind is a function of (kind, seed, n).

A kind fails if a batch takes longer than ``LIMIT_S`` on a rank (all ranks then end, and one says where it stood), if a
rank fails, or if losses or gradient norms of the first ``CHECKED`` batches are not those of one process.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.config.schema import RunConfig
from manyhands.planner.types import Plan
from tests.support.images import Document, make_document, take_step
from tests.support.layouts import build
from tests.support.multimodal import write_tiny_multimodal
from tests.support.ranks import RankFailed, Ranks, ranks
from tests.support.tiny import tiny_plan, tiny_run

LIMIT_S = 120.0  # of a batch that takes a fraction of a second
CHECKED, TOLERANCE = 5, 1e-4
RATE = 1e-3
FAMILIES = ("gemma3", "qwen3_vl")
STATES = {
    "everything": ("trained", "trained", "trained"),
    "projector": ("frozen", "trained", "frozen"),
    "outer": ("trained", "trained", "frozen"),
    "inner": ("frozen", "trained", "trained"),
    "language": ("frozen", "frozen", "trained"),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "fsdp-recomputed": {"strategy": "fsdp", "reshard_after_forward": False, "activation_checkpointing": "full"},
    "hsdp": {"strategy": "hsdp", "shard_degree": 2},
}


@dataclass(frozen=True)
class Kind:
    family: str
    states: str
    layout: str

    @property
    def name(self) -> str:
        return f"{self.family} {self.states} {self.layout}"

    def plan(self, folder: Path, world_size: int) -> Plan:
        parts = dict(zip(("vision", "projector", "language"), STATES[self.states], strict=True))
        changes = {"world_size": world_size, **LAYOUTS[self.layout]} if world_size > 1 else {}
        return tiny_plan(folder, parts=parts, learning_rate=RATE, attention="blockwise", **changes)


KINDS = [Kind(*names) for names in product(FAMILIES, STATES, LAYOUTS)]


def draw_batch(kind: Kind, seed: int, number: int, world_size: int) -> list[list[Document]]:
    """The documents of each rank's micro-batches, all ranks of one micro-batch after the other."""
    rng = random.Random(f"{kind.name} {seed} {number}")
    shape = rng.choice(("mixed", "mixed", "mixed", "one rank", "one micro-batch", "text"))
    micros, only = rng.randint(1, 3), rng.randrange(world_size)
    only_micro = rng.randrange(micros)
    batch = []
    for micro, rank in product(range(micros), range(world_size)):
        shows = {"mixed": rng.random() < 0.6, "one rank": rank == only, "one micro-batch": micro == only_micro}
        counts = [rng.randint(0, 2) if shows.get(shape, False) else 0 for _ in range(rng.choice((0, 1, 1, 2)))]
        batch.append(
            [
                make_document(kind.family, num, rng.randrange(2**31), rng.randint(4, 9), rng.random() < 0.5)
                for num in counts
            ]
        )
    if not any(batch):
        batch[0] = [make_document(kind.family, 0, rng.randrange(2**31), 6)]
    return batch


def train(
    plan: Plan, config: RunConfig, kind: Kind, seed: int, batches: int, drawn_for: int, where: str
) -> list[tuple[float, float]]:
    """Losses and gradient norms of the first ``batches`` of a kind on this rank, which ends the process where one takes
    too long. ``drawn_for``: the ranks that documents are dealt to; ``where``: a file for the number of the batch.
    """
    engine = build(plan, config)
    engine.make_optimizer(plan, config)
    found = []
    for number in range(batches):
        if engine.world.rank == 0:
            Path(where).write_text(str(number))
        faulthandler.dump_traceback_later(LIMIT_S, exit=True)
        try:
            found.append(take_step(engine, config, kind.family, number, draw_batch(kind, seed, number, drawn_for)))
        finally:
            faulthandler.cancel_dump_traceback_later()
    return found


TRAIN = "tests.random_images:train"


def run_kind(
    world: Ranks, kind: Kind, folder: Path, seed: int, batches: int, world_size: int, target: str = TRAIN
) -> str:
    """What failed; "" if nothing did. ``target``: what the ranks do."""
    config = tiny_run(folder)
    optimizer = config.optimizer.model_copy(update={"learning_rate": RATE})
    config = config.model_copy(update={"optimizer": optimizer})
    with tempfile.TemporaryDirectory() as own:
        where = Path(own, "batch")
        arguments = (config, kind, seed, batches, world_size, str(where))
        try:
            answers = world.run(target, kind.plan(folder, world_size), *arguments, world_size=world_size)
        except RankFailed as error:
            return f"{kind.name}, batch {where.read_text() if where.exists() else 'none'}: {error}"
        few = min(batches, CHECKED)
        expected = train(kind.plan(folder, 1), config, kind, seed, few, world_size, str(where))
    if any(answer != answers[0] for answer in answers[1:]):
        return f"{kind.name}: ranks have other losses or norms than each other"
    if not np.isfinite(answers[0]).all():
        return f"{kind.name}: a loss or norm is no number"
    if not np.allclose(answers[0][:few], expected, rtol=TOLERANCE, atol=1e-7):
        return f"{kind.name}: {answers[0][:few]} on {world_size} ranks, {expected} in one process"
    return ""


def run_kinds(
    kinds: Sequence[Kind], seed: int, batches: int, world_size: int, stop_s: float = float("inf")
) -> Iterator[tuple[Kind, int, str]]:
    """Each kind with its batches and what failed; none is begun after ``stop_s``."""
    begun = time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        families = {kind.family for kind in kinds}
        folders = {name: write_tiny_multimodal(folder / name, family=name) for name in sorted(families)}
        share, more = divmod(batches, len(kinds))
        world: Ranks | None = None
        for number, kind in enumerate(kinds):
            if time.monotonic() - begun > stop_s:
                return
            if world is None:  # also after a failure, which may have left ranks in any state
                world = stack.enter_context(ranks(world_size, timeout_s=float(batches) * LIMIT_S))
            count = share + (number < more)
            failed = run_kind(world, kind, folders[kind.family], seed, count, world_size) if count else ""
            if failed:
                world.close()
                world = None
            yield kind, count, failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.random_images", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batches", type=int, default=10_000, help="of all kinds together")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kinds", default="", help="names as this prints them, comma-separated; all without it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stop-s", type=float, default=float("inf"), help="begin no kind after so many seconds")
    options = parser.parse_args(argv)
    names = [name.strip() for name in options.kinds.split(",") if name.strip()]
    kinds = [kind for kind in KINDS if not names or kind.name in names]
    if not kinds:
        parser.error(f"no such kind; there are: {', '.join(kind.name for kind in KINDS)}")
    done = failures = 0
    begun = time.monotonic()
    for kind, count, failed in run_kinds(kinds, options.seed, options.batches, options.ranks, options.stop_s):
        done, failures = done + count * (not failed), failures + bool(failed)
        print(f"{kind.name}: {count} batches {'FAILED' if failed else 'joined by all ranks'}", flush=True)
        if failed:
            print(failed, file=sys.stderr, flush=True)
    taken = f"{time.monotonic() - begun:,.0f} s"
    print(f"{done:,} batches joined by all of {options.ranks} ranks in {taken}; {failures} kinds failed")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
