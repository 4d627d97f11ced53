"""Which GPUs of a launch are lost after a fault, and how the workers of the next one get those that are left. Asks the
driver, and CUDA in a process of its own with a time limit. Imports no torch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from manyhands.config.schema import RunConfig
from manyhands.core.errors import EXIT_FAILED, FAULT, UserError
from manyhands.core.units import describe_ranks
from manyhands.facts import health
from manyhands.facts.host import read_host_facts
from manyhands.facts.types import GpuFacts
from manyhands.plan.hardware import how_to_go_on
from manyhands.plan.types import Plan

# How CUDA, HIP, NCCL and the kernel's log call a device that cannot be used any more. Errors that a kernel may cause by
# itself, such as an illegal address, are not among them.
DEVICE_ERROR = re.compile(
    r"busy or unavailable|no (CUDA|ROCm)-capable device|uncorrectable (ECC|NVLink)|hardware (stack )?error|"
    r"fallen off the bus|GPU is lost|system not yet initialized|hipErrorNoDevice|\bXid\b",
    re.IGNORECASE,
)
# What a GPU may be behind: where a rank fails so twice in a row, its GPU is tested.
SUSPICIOUS = re.compile(r"\b(CUDA|cu\w+|HIP|NCCL|RCCL)\b|made no progress", re.IGNORECASE)
NUM_STRIKES = 2  # faults of one rank's device, after which it is lost though it answers
ANSWER_S = 20.0  # of the driver
PROBE_S = 90.0  # most of it is importing torch


@dataclass
class LaunchGpus:
    """The GPUs of a launch's ranks on this machine, by rank; on a CPU none, and each rank's process is its device."""

    num_ranks: int
    gpus: tuple[GpuFacts, ...] = ()
    strikes: Counter[int] = field(default_factory=Counter)
    latest: int | None = None  # rank of the latest fault
    step: int | None = None  # of the newest checkpoint by then

    @staticmethod
    def of(plan: Plan) -> LaunchGpus:
        """``plan``'s; GPUs that do not answer are hidden from its workers."""
        num_ranks = plan.layout.world_size
        if plan.layout.device != "cuda":
            return LaunchGpus(num_ranks)
        host = read_host_facts()
        found = LaunchGpus(num_ranks, host.gpus[:num_ranks])
        if host.lost_gpus:
            found.hide(())
        return found

    def find_lost(self, error: UserError, step: int | None = None) -> dict[int, str]:
        """Ranks whose device is lost after the fault ``error``, with the reason: the driver does not find it, or it
        fails a test, which is made where the error names the device, or may come from it for the second time in a row;
        or errors have named it twice without a newer checkpoint in between, ``step`` being the newest one's.
        """
        driver_says = self._ask_driver()
        lost = {rank: driver_says[gpu.uuid] for rank, gpu in enumerate(self.gpus) if gpu.uuid in driver_says}
        if step != self.step:
            self.strikes.clear()
        rank, before, self.latest, self.step = error.rank, self.latest, error.rank, step
        if rank is None or rank in lost or not 0 <= rank < self.num_ranks:
            return lost
        text = f"{error.what}\n{error.why}"
        is_named = DEVICE_ERROR.search(text) is not None
        is_suspect = is_named or (rank == before and SUSPICIOUS.search(text) is not None)
        self.strikes[rank] += is_named
        if self.gpus and is_suspect and (why := self._probe(rank)):
            lost[rank] = why
        elif self.strikes[rank] >= NUM_STRIKES:
            lost[rank] = f"it has failed {self.strikes[rank]} times in this launch"
        return lost

    def describe(self, rank: int) -> str:
        """``GPU 3 (NVIDIA H100)``."""
        return f"GPU {rank} ({self.gpus[rank].name})" if self.gpus else f"the device of rank {rank}"

    def count(self, num: int) -> str:
        return describe_ranks("cuda" if self.gpus else "cpu", num)

    def hide(self, lost: Collection[int], environ: MutableMapping[str, str] = os.environ) -> None:
        """Leaves the other GPUs visible, for the plan and the workers."""
        if not self.gpus:
            return
        name = "CUDA_VISIBLE_DEVICES"
        if self.gpus[0].vendor == "amd" and ("HIP_VISIBLE_DEVICES" in environ or name not in environ):
            name = "HIP_VISIBLE_DEVICES"
        left = [rank for rank in range(self.num_ranks) if rank not in lost]
        environ[name] = ",".join(self._entry(rank, environ.get(name)) for rank in left)

    def _entry(self, rank: int, visible: str | None) -> str:
        """By which a list of visible devices names it."""
        return self.gpus[rank].uuid or (visible.split(",")[rank].strip() if visible else str(rank))

    def _ask_driver(self) -> Mapping[str, str]:
        """What it says of GPUs that are lost, by UUID. A driver that hangs is not waited for."""
        found: dict[str, str] = {}
        uuids = [gpu.uuid for gpu in self.gpus if gpu.uuid]
        if uuids:
            thread = threading.Thread(target=lambda: found.update(health.find_lost(uuids)), daemon=True)
            thread.start()
            thread.join(ANSWER_S)
        return dict(found)

    def _probe(self, rank: int) -> str:
        """Why the rank's GPU cannot multiply matrices; "" where it can, or where its memory is taken."""
        environment = dict(os.environ)
        self.hide([other for other in range(self.num_ranks) if other != rank], environment)
        command = [sys.executable, "-m", "manyhands.worker.health"]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=PROBE_S
            )
        except subprocess.TimeoutExpired:
            return f"it has not multiplied a matrix within {PROBE_S:.0f} s"
        if done.returncode == 0 or "out of memory" in done.stderr:
            return "CUDA does not list it" if "RESULT []" in done.stdout else ""
        said = done.stderr.strip().splitlines()
        return f"it cannot multiply a matrix: {said[-1] if said else f'exit code {done.returncode}'}"


@dataclass(frozen=True)
class Lost:
    """Devices that a launch has lost. ``names``: by rank, with why."""

    gpus: LaunchGpus
    why: Mapping[int, str]

    @property
    def num_left(self) -> int:
        return self.gpus.num_ranks - len(self.why)

    def __str__(self) -> str:
        return "; ".join(f"{self.gpus.describe(rank)} is lost: {why}" for rank, why in sorted(self.why.items()))

    def refuse(self, error: UserError, least: int | None) -> None:
        """UserError, with the fault ``error`` as the reason, where fewer GPUs are left than ``launch.min_gpus``."""
        if self.num_left >= (self.gpus.num_ranks if least is None else least):
            return
        fix = "reset or replace it (restart the machine), and start the same command again, which resumes"
        where = "launch.min_gpus is not set: all are needed"
        if least is not None:
            where = f"launch.min_gpus: {least}"
        if self.num_left:
            fix += f"; with {how_to_go_on(self.num_left)} the run goes on by itself with {self._left}"
        raise UserError(
            str(self),
            where=where,
            why=f"{error.what}; {self._left} left of {self.gpus.num_ranks}",
            fix=fix,
            exit_code=EXIT_FAILED,
            kind=FAULT,
        ) from error

    @property
    def _left(self) -> str:
        return self.gpus.count(self.num_left) if self.num_left else "none"


def find_lost(gpus: LaunchGpus | None, error: UserError, config: RunConfig, step: int | None) -> Lost | None:
    """What the fault ``error`` has left of a launch; None where all is left. UserError where that is too little."""
    why = gpus.find_lost(error, step) if gpus is not None else {}
    if gpus is None or not why:
        return None
    lost = Lost(gpus, why)
    lost.refuse(error, config.launch.min_gpus)
    return lost


@contextmanager
def restored_environment() -> Iterator[None]:
    """Afterwards this process's variables are those of before; ``LaunchGpus.hide`` changes them for all launches."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
