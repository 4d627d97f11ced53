"""A run that is killed and resumed a great many times, and ends with the weights of a run left alone, bit for bit.

``python -m tests.faults.soak --cycles 1000 --limit-s 3600``. Ranks are forks of this process, which has imported what
they need: a cycle takes seconds. Each is a real start of the worker (two ranks as another launcher starts them, data
parallel) that is really killed by SIGKILL: one rank or both, at a moment drawn anew: while it starts, between two
steps, in a step, while it saves.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from manyhands.worker import __main__ as worker
from manyhands.worker import export_stages, rendezvous, run, training  # noqa: F401 - before the fork
from tests.e2e.runs import Place, Run, free_port, write_place
from tests.faults.audit import Audit, plant

NUM_RANKS = 2
END_S = 180.0  # from the kill of one rank until the other must have ended by itself
START_SHARE = 0.1  # of the kills come before the first step


def run_rank(rank: int, port: int, folder: Path, arguments: list[str], audit: Path, done: Any) -> None:
    """In a fork: one rank, from its start to its end; releases the semaphore ``done`` when a step is done."""
    os.setsid()
    os.chdir(folder)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), LOCAL_WORLD_SIZE=str(NUM_RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    output = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    export_stages.verify = lambda rank: None  # type: ignore[assignment]
    plant(training, audit)
    after_step = training.BeatHook.after_step

    def tell(self: Any, state: Any, result: Any) -> None:
        after_step(self, state, result)
        done.release()

    training.BeatHook.after_step = tell  # type: ignore[method-assign]
    os._exit(worker.main(["run.yaml", *arguments]))


class Cycle:
    """One start of both ranks."""

    def __init__(self, folder: Path, arguments: list[str], audit: Path) -> None:
        context, port = multiprocessing.get_context("fork"), free_port()
        self.done = context.Semaphore(0)  # once for each rank and step
        self.ranks = [
            context.Process(target=run_rank, args=(rank, port, folder, arguments, audit, self.done))
            for rank in range(NUM_RANKS)
        ]
        for process in self.ranks:
            process.start()

    def wait_for_steps(self, number: int) -> bool:
        """Until the ranks have done so many steps; False if they end before."""
        for _ in range(NUM_RANKS * number):
            while not self.done.acquire(timeout=1.0):
                if self.ranks[0].exitcode is not None:
                    return False
        return True

    def kill(self, ranks: list[int]) -> None:
        """SIGKILL; who lives on must end by itself."""
        for rank in ranks:
            os.kill(self.ranks[rank].pid, signal.SIGKILL)
        self.end()

    def end(self) -> list[int]:
        """Exit codes; AssertionError where a rank does not end."""
        wait([process.sentinel for process in self.ranks])
        codes = []
        for process in self.ranks:
            process.join(END_S)
            assert process.exitcode is not None, "a rank outlived its peer"
            codes.append(process.exitcode)
        return codes


def soak(folder: Path, num_cycles: int, limit_s: float, seed: int = 0) -> dict[str, Any]:
    """What was measured. AssertionError where anything differs from the run left alone."""
    torch.set_num_threads(1)
    write_place(folder)
    draw, place, begin = random.Random(seed), Place(folder), time.monotonic()
    num_steps = max(24, 3 * num_cycles)
    keys = [f"stop.max_steps={num_steps}", "stop.epochs=100000", "checkpoint.every_steps=2", "evaluate.every_steps=0"]
    keys += ["log.tensorboard=false", "evaluate.at_start=false", "parallel.timeout_s=30"]
    codes = Cycle(folder, ["name=alone", *keys], folder / "alone.audit").end()
    assert codes == [0, 0], (folder / "rank-0.txt").read_text()
    alone_s, arguments, audit = time.monotonic() - begin, ["name=killed", *keys], folder / "killed.audit"
    num_done, moments, begin = 0, {"start": 0, "training": 0}, time.monotonic()
    while num_done < num_cycles and time.monotonic() - begin < limit_s:
        cycle, struck = Cycle(folder, arguments, audit), draw.choice(([0, 1], [0, 1], [0, 1], [0], [1]))
        if draw.random() < START_SHARE:
            time.sleep(draw.uniform(0.0, 2.0))
            moments["start"] += 1
            struck = [0, 1]  # one that waits for the other to come would wait for parallel.timeout_s
        elif not cycle.wait_for_steps(draw.randint(1, 5)):
            assert cycle.end() == [0, 0], (folder / "rank-0.txt").read_text()
            break
        else:
            time.sleep(draw.expovariate(1 / 0.02))  # steps and saves of this model take some 20 ms each
            moments["training"] += 1
        cycle.kill(struck)
        num_done += 1
    codes = Cycle(folder, arguments, audit).end()
    assert codes == [0, 0], (folder / "rank-0.txt").read_text()
    check_same(place.run("alone"), place.run("killed"))
    reference = Audit.read(folder / "alone.audit")
    Audit.read(audit).check(reference, place.run("alone").read("plans/001.json")["steps_per_epoch"])
    seconds = time.monotonic() - begin
    return {
        "cycles": num_done,
        "moments": moments,
        "steps": num_steps,
        "steps_trained": len({(line["step"], line["pid"]) for line in Audit.read(audit).lines}) // NUM_RANKS,
        "seconds": round(seconds),
        "alone_s": round(alone_s),
    }


def check_same(alone: Run, killed: Run) -> None:
    """Every loss and gradient norm, and every bit of the adapter."""
    assert alone.course() == killed.course() and alone.seen() == killed.seen()
    first, second = (each.folder / "adapter/adapter_model.safetensors" for each in (alone, killed))
    assert first.read_bytes() == second.read_bytes()


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("tests.faults.soak", description=__doc__)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="start no further cycle after so long")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        print(json.dumps(soak(Path(folder), arguments.cycles, arguments.limit_s, arguments.seed)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
