"""What is planted into the processes of a run: one act, once, at a moment of one of its stages."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

STAGES = {"build": "build model", "export": "export", "verification": "verify"}
STEP, EVALUATED, SAVED = 6, 4, 8  # of twelve, saved and evaluated every four
SPREAD_S = {"start": 2.0, "build": 0.3, "export": 0.05, "verification": 2.0, "saving": 0.01}  # moments are drawn


def kill_rank() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_all() -> None:
    """All ranks, this one last."""
    ranks = [child.pid for child in psutil.Process(os.getppid()).children() if child.pid != os.getpid()]
    for pid in (*ranks, os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_launcher() -> None:
    os.kill(os.getppid(), signal.SIGKILL)


def terminate() -> None:
    """As a scheduler does: the launcher gets SIGTERM."""
    os.kill(os.getppid(), signal.SIGTERM)


def stop_rank() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def kill_data_worker() -> None:
    _CURRENT[0].workers._processes[0].kill()


def fail() -> None:
    raise ValueError("the cat sat on the keyboard")


def spoil_weights() -> None:
    """The next loss is not a number."""
    import torch

    _CURRENT[0].model.get_input_embeddings().weight.data.fill_(torch.nan)


def set_clock_back() -> None:
    """An hour, for all that this process reads from now on."""
    real = time.time
    time.time = lambda: real() - 3600  # type: ignore[assignment]


ACTS = (kill_rank, kill_all, kill_launcher, terminate, stop_rank, kill_data_worker, fail, spoil_weights, set_clock_back)
_CURRENT: list[Any] = []  # the rank's context, for acts on the model


class Plant:
    """``Plant("kill_rank", "build", mark, rank=1)(module)`` in the module that ``module_of`` names. ``mark`` gets the
    time of the act, and keeps it from happening twice.
    """

    def __init__(self, act: str, moment: str, mark: str, rank: int, seed: int) -> None:
        self.act: Callable[[], None] = globals()[act]
        self.moment, self.mark, self.rank = moment, Path(mark), rank
        self.delay_s = random.Random(seed).uniform(0.0, SPREAD_S.get(moment, 0.0))

    def __call__(self, module: dict[str, Any]) -> None:
        getattr(self, f"in_{self.moment}", self.in_stage)(module)

    def happen(self) -> None:
        try:
            os.close(os.open(self.mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return
        self.mark.write_text(repr(time.time()))
        self.act()

    def happen_soon(self) -> None:
        """In a thread, as whatever the stage does goes on meanwhile."""

        def wait_and_act() -> None:
            time.sleep(self.delay_s)
            self.happen()

        if not self.mark.exists():
            threading.Thread(target=wait_and_act, daemon=True).start()

    # Where each moment is found: the namespace of one module of the run.

    def in_start(self, module: dict[str, Any]) -> None:
        if os.environ.get("RANK") == str(self.rank):
            self.happen_soon()

    def in_stage(self, module: dict[str, Any]) -> None:
        enter = module["Session"].enter

        def planted(session: Any, stage: str) -> None:
            enter(session, stage)
            if stage == STAGES[self.moment] and session.launcher.rank == self.rank:
                self.happen_soon()

        module["Session"].enter = planted

    def in_step(self, module: dict[str, Any]) -> None:
        after_step = module["BeatHook"].after_step

        def planted(hook: Any, state: Any, result: Any) -> None:
            after_step(hook, state, result)
            if state.step == STEP and hook.rank.world.rank == self.rank:
                _CURRENT[:] = [hook.rank]
                self.happen()

        module["BeatHook"].after_step = planted

    def in_evaluation(self, module: dict[str, Any]) -> None:
        stop_if_asked = module["stop_if_asked"]

        def planted(rank: Any) -> None:
            if rank.state.step == EVALUATED and rank.world.rank == self.rank:
                self.happen()
            stop_if_asked(rank)

        module["stop_if_asked"] = planted

    def in_saving(self, module: dict[str, Any]) -> None:
        """Once the unfinished folder of a checkpoint is there."""
        before_training = module["BeatHook"].before_training

        def planted(hook: Any, state: Any) -> None:
            before_training(hook, state)
            partial = hook.rank.folder.checkpoints / f"step-{SAVED:06d}.tmp"

            def watch() -> None:
                while not partial.exists():
                    time.sleep(0.0005)
                time.sleep(self.delay_s)
                self.happen()

            if hook.rank.world.rank == self.rank and not self.mark.exists():
                threading.Thread(target=watch, daemon=True).start()

        module["BeatHook"].before_training = planted

    def in_preparation(self, module: dict[str, Any]) -> None:
        """In the launcher, which this ends itself."""
        gather_facts = module["gather_facts"]

        def planted(*arguments: Any, **options: Any) -> Any:
            if not self.mark.exists():
                self.mark.write_text(repr(time.time()))
                os.kill(os.getpid(), signal.SIGKILL if self.act is kill_launcher else signal.SIGTERM)
                time.sleep(60)
            return gather_facts(*arguments, **options)

        module["gather_facts"] = planted


def module_of(moment: str) -> str:
    """Into which module of a run the plant for a moment goes."""
    where = {"start": "manyhands.launch.heartbeat", "preparation": "manyhands.launch.prepare"}
    if moment in STAGES:
        return "manyhands.worker.session"
    return where.get(moment, "manyhands.worker.training")
