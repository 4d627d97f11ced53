"""Which GPUs of a launch are lost after a fault, and how the workers of the next one get those that are left. Asks the
driver, reads what it reports (Xids), and asks CUDA in a process of its own with a time limit. Imports no torch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

from manyhands.config.schema import RunConfig
from manyhands.core.errors import EXIT_FAILED, FAULT, UserError
from manyhands.core.units import describe_ranks
from manyhands.facts import health
from manyhands.facts.host import read_host_facts
from manyhands.facts.types import GpuFacts
from manyhands.facts.xids import SEVERITY, Xid, XidListener
from manyhands.launch.local.watch import raise_when_stopped
from manyhands.planner.hardware import how_to_go_on
from manyhands.planner.types import Plan

# How CUDA, HIP, NCCL and the kernel's log call a device that cannot be used any more. Errors that a kernel may cause by
# itself, such as an illegal address, are not among them.
DEVICE_ERROR = re.compile(
    r"busy or unavailable|no (CUDA|ROCm)-capable device|uncorrectable (ECC|NVLink)|hardware (stack )?error|"
    r"fallen off the bus|GPU is lost|system not yet initialized|hipErrorNoDevice",
    re.IGNORECASE,
)
# What a GPU may be behind: where a rank fails so twice in a row, its GPU is tested.
SUSPICIOUS = re.compile(
    r"\b(CUDA|cu(BLAS|BLASLt|DNN|FFT|RAND|SOLVER|SPARSE)|HIP|NCCL|RCCL)\b.{0,40}(error|fail)|(CU|HIP)[A-Z]*_(STATUS|ERROR)_|"
    r"nccl\w+Error|made no progress",
    re.IGNORECASE,
)
NUM_STRIKES = 2  # faults of one rank's device, after which it is lost though it answers
ANSWER_S = 20.0  # of the driver
PROBE_S = 90.0  # most of it is importing torch
FRESH_S = 60.0  # beyond parallel.timeout_s: an Xid after which training went on for longer has not ended it


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

    @staticmethod
    def of_node(plan: Plan, num_ranks: int) -> LaunchGpus:
        """Those of the ``num_ranks`` ranks of ``plan`` that run here; a node of several uses all it has."""
        return LaunchGpus(num_ranks, read_host_facts().gpus[:num_ranks] if plan.layout.device == "cuda" else ())

    @property
    def uuids(self) -> list[str]:
        """Of NVIDIA's GPUs."""
        return [gpu.uuid for gpu in self.gpus if gpu.vendor == "nvidia" and gpu.uuid]

    def find_lost(
        self, error: UserError, step: int | None = None, xids: Sequence[Xid] = (), fresh_s: float = FRESH_S
    ) -> dict[int, str]:
        """Ranks whose device is lost after the fault ``error``, with the reason: the driver does not find it, or has
        reported within ``fresh_s`` that it needs a reset; or it fails a test, which is made where the error or an
        older report names the device, or the error may come from it for the second time in a row; or errors have named
        it twice without a newer checkpoint in between, ``step`` being the newest one's. ``xids``: reports of the
        launch that has failed.
        """
        driver_says = self._ask_driver()
        lost = {rank: driver_says[gpu.uuid] for rank, gpu in enumerate(self.gpus) if gpu.uuid in driver_says}
        lost |= self._find_reported([xid for xid in xids if xid.age_s <= fresh_s], lost)
        if step != self.step:
            self.strikes.clear()
        rank, before, self.latest, self.step = error.rank, self.latest, error.rank, step
        text = f"{error.what}\n{error.why}"
        named = {self._rank_of(xid) for xid in xids if xid.fault == "memory"}
        suspects = {self._rank_of(xid) for xid in xids if xid.fault in ("reset", "link")}
        if DEVICE_ERROR.search(text):
            named.add(rank)
        if rank == before and SUSPICIOUS.search(text):
            suspects.add(rank)
        for each in range(self.num_ranks):
            if each in lost:
                continue
            self.strikes[each] += each in named
            if self.gpus and each in named | suspects and (why := self._probe(each)):
                lost[each] = why
            elif each in named and self.strikes[each] >= NUM_STRIKES:
                lost[each] = f"it has failed {self.strikes[each]} times in this launch"
        return lost

    def _find_reported(self, xids: Sequence[Xid], lost: Collection[int]) -> dict[int, str]:
        """Those not in ``lost`` that need a reset; a failed link is the fault of the end known to be gone."""
        found = {self._rank_of(xid): str(xid) for xid in xids if xid.fault == "reset"}
        if not lost and not found:
            found = {self._rank_of(xid): str(xid) for xid in xids if xid.fault == "link"}
        return {rank: why for rank, why in found.items() if rank is not None and rank not in lost}

    def _rank_of(self, xid: Xid) -> int | None:
        return next((rank for rank, gpu in enumerate(self.gpus) if gpu.uuid == xid.uuid), None)

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
        if self.uuids:
            thread = threading.Thread(target=lambda: found.update(health.find_lost(self.uuids)), daemon=True)
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
class DriverReports:
    """What the driver reports of the GPUs of this machine's ranks while one launch of them runs. ``first_rank``: of
    these; ``host``: this machine, where there are several.
    """

    listener: XidListener
    gpus: Sequence[GpuFacts]
    first_rank: int = 0
    host: str = ""
    began: float = field(default_factory=time.monotonic)

    @property
    def xids(self) -> tuple[Xid, ...]:
        return self.listener.since(self.began)

    def describe(self) -> tuple[str, ...]:
        """``the driver reports of GPU 3 (NVIDIA H100): Xid 79, it has fallen off the bus``, the worst first."""
        gpus = {gpu.uuid: f"GPU {gpu.index} ({gpu.name})" for gpu in self.gpus}
        on = f" on {self.host}" if self.host else ""
        known = sorted((xid for xid in self.xids if xid.uuid in gpus), key=lambda xid: SEVERITY.index(xid.fault))
        return tuple(f"the driver reports of {gpus[xid.uuid]}{on}: {xid}" for xid in known)

    def name_in(self, error: UserError, rank: int | None) -> None:
        """Adds to the failure of ``rank`` what the driver reports of its GPU."""
        index = -1 if rank is None else rank - self.first_rank
        if error.kind != FAULT or not 0 <= index < len(self.gpus):
            return
        own = [xid for xid in self.xids if xid.uuid == self.gpus[index].uuid]
        if own:
            worst = min(own, key=lambda xid: SEVERITY.index(xid.fault))
            error.what = f"{error.what}; the driver reports of its GPU: {worst}"


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


@raise_when_stopped()  # a test of a GPU takes a minute and more
def find_lost(
    gpus: LaunchGpus, error: UserError, config: RunConfig, step: int | None, xids: Sequence[Xid] = ()
) -> Lost | None:
    """What a fault leaves of a launch; None: all. UserError: too little. ``xids``: the driver's reports."""
    fresh_s = config.parallel.timeout_s + FRESH_S
    why = gpus.find_lost(error, step, xids, fresh_s)
    if not why:
        return None
    lost = Lost(gpus, why)
    lost.refuse(error, config.launch.min_gpus)
    return lost
