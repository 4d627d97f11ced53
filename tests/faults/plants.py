"""What is planted into the processes of a run: one act, once, at a moment of one of its stages."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tests.faults.audit import BEGINNING

STAGES = {"build": "build model", "export": "export", "verification": "verify"}
STEP, EVALUATED, SAVED = 6, 4, 8  # of twelve, saved and evaluated every four
SPREAD_S = {"start": 2.0, "build": 0.3, "export": 0.05, "verification": 2.0, "saving": 0.01}  # moments are drawn
SMALL_DISK = "FAULTS_SMALL_DISK"  # environment: the folder that ``fill_disk`` fills


def kill_rank() -> None:
    with BEGINNING:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_all() -> None:
    """All ranks, this one last."""
    _send_to_all(signal.SIGKILL)


def _send_to_all(number: signal.Signals) -> None:
    ranks = [child.pid for child in psutil.Process(os.getppid()).children() if child.pid != os.getpid()]
    for pid in (*ranks, os.getpid()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_launcher() -> None:
    os.kill(os.getppid(), signal.SIGKILL)


def terminate() -> None:
    """As a scheduler does: the launcher gets SIGTERM; under srun all ranks do."""
    if "SLURM_PROCID" in os.environ:
        _send_to_all(signal.SIGTERM)
    else:
        os.kill(os.getppid(), signal.SIGTERM)


def stop_rank() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_launcher() -> None:
    """For five seconds, in which the ranks may end."""
    launcher = os.getppid()
    subprocess.Popen(["sh", "-c", f"sleep 5; kill -CONT {launcher}"], start_new_session=True)
    os.kill(launcher, signal.SIGSTOP)


def kill_everything() -> None:
    """The launcher and all ranks: nobody can tidy up."""
    os.kill(os.getppid(), signal.SIGKILL)
    kill_all()


def kill_data_worker() -> None:
    _find_child("spawn_main").kill()


def stop_data_worker() -> None:
    _find_child("spawn_main").suspend()


def kill_writer() -> None:
    _find_child("shard_writer").kill()


def stop_writer() -> None:
    _find_child("shard_writer").suspend()


def _find_child(word: str) -> psutil.Process:
    """A process of this rank, by a word of its command; it may only be about to start."""
    while True:
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if word in " ".join(child.cmdline()):
                    return child
        time.sleep(0.01)


def fill_disk() -> None:
    """That of the run's outputs, to the last byte."""
    with open(Path(os.environ[SMALL_DISK]) / "filler", "wb", buffering=0) as file:
        for size in (2**20, 4096, 512, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass


def cut_off() -> None:
    """This rank's node: nothing arrives any more, and nobody is told."""
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)


def fail() -> None:
    raise ValueError("the cat sat on the keyboard")


def spoil_weights() -> None:
    """The next loss is not a number."""
    import torch

    _CURRENT[0].model.get_input_embeddings().weight.data.fill_(torch.nan)


def spoil_batch() -> None:
    """The loss of the next batch is not a number, once."""
    import torch

    def spoil(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return output * torch.nan

    handle = _CURRENT[0].model.get_input_embeddings().register_forward_hook(spoil)


def set_clock_back() -> None:
    """An hour, for all that this process reads from now on."""
    real = time.time
    time.time = lambda: real() - 3600  # type: ignore[assignment]


_CURRENT: list[Any] = []  # the rank's engine, for acts on the model


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
        if os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == str(self.rank):
            self.happen_soon()

    def in_stage(self, module: dict[str, Any]) -> None:
        enter = module["Session"].enter

        def planted(session: Any, stage: str) -> None:
            enter(session, stage)
            if stage == STAGES[self.moment] and session.launcher.rank == self.rank:
                self.happen_soon()

        module["Session"].enter = planted

    def in_step(self, module: dict[str, Any]) -> None:
        after_step = module["ProgressHook"].after_step

        def planted(hook: Any, state: Any, result: Any) -> None:
            after_step(hook, state, result)
            if state.step == STEP and hook.rank.world.rank == self.rank:
                _CURRENT[:] = [hook.engine]
                self.happen()

        module["ProgressHook"].after_step = planted

    def in_evaluation(self, module: dict[str, Any]) -> None:
        stop_if_asked = module["stop_if_asked"]

        def planted(rank: Any, engine: Any) -> None:
            if rank.process.step == EVALUATED and rank.world.rank == self.rank:
                self.happen()
            stop_if_asked(rank, engine)

        module["stop_if_asked"] = planted

    def in_saving(self, module: dict[str, Any]) -> None:
        """Once the unfinished folder of a checkpoint is there."""
        before_training = module["ProgressHook"].before_training

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

        module["ProgressHook"].before_training = planted

    def in_staging(self, module: dict[str, Any]) -> None:
        """When the tensors of a checkpoint are about to be copied."""
        begin = module["CheckpointHook"]._begin

        def planted(hook: Any, folder: Path, tensors: Any, state: Any) -> None:
            if state.step == SAVED and hook.rank.world.rank == self.rank:
                self.happen()
            begin(hook, folder, tensors, state)

        module["CheckpointHook"]._begin = planted

    def in_data(self, module: dict[str, Any]) -> None:
        """In the thread that prepares batches ahead."""
        lay_out, rank = module["lay_out_training"], int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
        num_laid_out = 0

        def planted(*arguments: Any) -> Any:
            nonlocal num_laid_out
            num_laid_out += 1
            if num_laid_out == STEP and rank == self.rank:
                self.happen()
            return lay_out(*arguments)

        module["lay_out_training"] = planted

    def in_preparation(self, module: dict[str, Any]) -> None:
        """In the process that prepares: the launcher, or rank 0 of another one's."""
        gather_facts = module["gather_facts"]

        def planted(*arguments: Any, **options: Any) -> Any:
            if not self.mark.exists():
                self.mark.write_text(repr(time.time()))
                if self.act is fill_disk:
                    fill_disk()
                elif "RANK" in os.environ or "SLURM_PROCID" in os.environ:
                    self.act()
                else:
                    os.kill(os.getpid(), signal.SIGKILL if self.act is kill_launcher else signal.SIGTERM)
                    time.sleep(60)
            return gather_facts(*arguments, **options)

        module["gather_facts"] = planted


PREPARATION = "manyhands.launch.run.prepare"


def module_of(moment: str) -> str:
    """Into which module of a run the plant for a moment goes."""
    where = {
        "start": "manyhands.launch.local.heartbeat",
        "preparation": PREPARATION,
        "data": "manyhands.worker.batches",
    }
    where["staging"] = "manyhands.worker.checkpoints"
    if moment in STAGES:
        return "manyhands.worker.session"
    return where.get(moment, "manyhands.worker.training")
