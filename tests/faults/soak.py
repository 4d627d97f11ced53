"""A run that is killed and resumed a great many times, and ends with the weights of a run left alone, bit for bit.

``python -m tests.faults.soak FOLDER --cycles 1000 --limit-s 3600``; the same command goes on. Ranks are forks of this
process, which has imported what they need: a cycle takes seconds. Each is a real start of the worker (two ranks as
another launcher starts them, data parallel) that is really killed by SIGKILL: one rank or both, at a moment drawn anew:
while it starts, between two steps, in a step, while it saves.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from manyhands.core.files import write_json
from manyhands.core.machine import end_with
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
    end_with(os.getppid(), signal.SIGKILL)  # a soak that is ended leaves nobody who trains on
    os.chdir(folder)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), LOCAL_WORLD_SIZE=str(NUM_RANKS))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    output = os.open(folder / f"rank-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    export_stages.verify = lambda *_: {}
    plant(training, audit)
    after_step = training.ProgressHook.after_step

    def tell(self: Any, state: Any, result: Any) -> None:
        after_step(self, state, result)
        done.release()

    training.ProgressHook.after_step = tell  # type: ignore[method-assign]
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


@dataclass
class Progress:
    """What a soak has done so far, in all calls; ``progress.json`` in its folder."""

    num_cycles: int  # to be done
    seed: int = 0
    cycles: int = 0
    in_training: int = 0
    while_starting: int = 0
    seconds: float = 0.0  # of cycles
    alone_s: float = 0.0
    is_same: bool = False  # finished, and nothing differs from the run left alone

    @property
    def num_steps(self) -> int:
        return max(24, 3 * self.num_cycles)

    def write(self, folder: Path) -> None:
        write_json(folder / "progress.json", asdict(self))

    @staticmethod
    def read(folder: Path, num_cycles: int, seed: int) -> Progress:
        """Of the soak that was begun in the folder; else of a new one."""
        path = folder / "progress.json"
        return Progress(**json.loads(path.read_text())) if path.exists() else Progress(num_cycles, seed)


def soak(folder: Path, num_cycles: int, limit_s: float, seed: int = 0, *, is_last: bool = True) -> Progress:
    """Goes on with the soak in ``folder`` for ``limit_s`` seconds. When its cycles are done, or with ``is_last``, the
    run is finished. AssertionError where anything differs from the run left alone.
    """
    torch.set_num_threads(1)
    progress, place, begin = Progress.read(folder, num_cycles, seed), Place(folder), time.monotonic()
    if not (folder / "run.yaml").exists():
        write_place(folder)
    keys = [f"stop.max_steps={progress.num_steps}", "stop.epochs=100000", "checkpoint.every_steps=2"]
    keys += ["evaluate.every_steps=0", "log.tensorboard=false", "evaluate.at_start=false", "parallel.timeout_s=30"]
    if not (folder / "runs/alone/report.json").exists():
        finish(folder, "alone", keys)
        progress.alone_s = time.monotonic() - begin
        progress.write(folder)
    while progress.cycles < progress.num_cycles and time.monotonic() - begin < limit_s:
        begin_cycle = time.monotonic()
        if not kill_once(folder, ["name=killed", *keys], progress):
            break
        progress.cycles += 1
        progress.seconds += time.monotonic() - begin_cycle
        progress.write(folder)
    if is_last or progress.cycles == progress.num_cycles:
        finish(folder, "killed", keys)
        check_same(place.run("alone"), place.run("killed"))
        steps_per_epoch = place.run("alone").read("plans/001.json")["steps_per_epoch"]
        Audit.read(folder / "killed.audit").check(Audit.read(folder / "alone.audit"), steps_per_epoch)
        progress.is_same = True
        progress.write(folder)
    return progress


def kill_once(folder: Path, arguments: list[str], progress: Progress) -> bool:
    """Starts both ranks and kills one or both at a moment that is drawn; False where they had finished by then."""
    draw = random.Random(f"{progress.seed} {progress.cycles}")
    cycle, struck = Cycle(folder, arguments, folder / "killed.audit"), draw.choice(([0, 1], [0, 1], [0, 1], [0], [1]))
    if draw.random() < START_SHARE:
        time.sleep(draw.uniform(0.0, 2.0))
        progress.while_starting += 1
        struck = [0, 1]  # one that waits for the other to come would wait for parallel.timeout_s
    elif cycle.wait_for_steps(draw.randint(1, 5)):
        time.sleep(draw.expovariate(1 / 0.02))  # steps and saves of this model take some 20 ms each
        progress.in_training += 1
    else:
        assert cycle.end() == [0, 0], (folder / "rank-0.txt").read_text()
        return False
    cycle.kill(struck)
    return True


def finish(folder: Path, name: str, keys: list[str]) -> None:
    codes = Cycle(folder, [f"name={name}", *keys], folder / f"{name}.audit").end()
    assert codes == [0, 0], (folder / "rank-0.txt").read_text()


def steps_trained(folder: Path) -> int:
    """By the run that was killed, those done again included."""
    audit = folder / "killed.audit"
    lines = Audit.read(audit).lines if audit.exists() else ()
    return len({(line["step"], line["pid"]) for line in lines}) // NUM_RANKS


def check_same(alone: Run, killed: Run) -> None:
    """Every loss and gradient norm, and every bit of the adapter."""
    assert alone.course() == killed.course() and alone.seen() == killed.seen()
    first, second = (each.folder / "adapter/adapter_model.safetensors" for each in (alone, killed))
    assert first.read_bytes() == second.read_bytes()


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser("tests.faults.soak", description=__doc__)
    parser.add_argument("folder", type=Path, help="where it is done; an interrupted soak goes on there")
    parser.add_argument("--cycles", type=int, default=1000, help="of a new soak")
    parser.add_argument(
        "--limit-s", type=float, default=3600.0, help="begin no further cycle in this call after so long"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--finish", action="store_true", help="and finish the run, however many cycles were done")
    parser.add_argument("--result", type=Path, help="benchmarks/results/soak.json, for docs/faults.md")
    arguments = parser.parse_args(argv)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    folder = arguments.folder.resolve()
    progress = soak(folder, arguments.cycles, arguments.limit_s, arguments.seed, is_last=arguments.finish)
    result = asdict(progress) | {"num_steps": progress.num_steps, "steps_trained": steps_trained(folder)}
    result |= {"when": time.strftime("%Y-%m-%d"), "torch": torch.__version__}
    print(json.dumps(result), flush=True)
    if arguments.result is not None:
        write_json(arguments.result, result)


if __name__ == "__main__":
    main(sys.argv[1:])
