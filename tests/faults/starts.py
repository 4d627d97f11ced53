"""Starts of a run under each launcher, in a folder: as forks of this process, or with ranks started as those of users
are. What a start leaves behind is found, and how long it lived on.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch.distributed.run as torchrun

from manyhands.cli import main as cli
from tests.conftest import ROOT
from tests.e2e.runs import WORKER, Ended, Place, free_port
from tests.faults.cells import OURS, SRUN, TORCHRUN
from tests.faults.forks import Fork, Plants, children, run_launcher, run_worker
from tests.faults.plants import PREPARATION, SMALL_DISK
from tests.support.nodes import Bed, make_bed

LIMIT_S = 240.0  # for one start; a cell that takes longer is one that hangs
ORPHANS_S = 90.0  # for what is left of a start whose launcher was killed
CLONE_NEWNET, CLONE_NEWNS, CLONE_NEWUTS = 0x40000000, 0x00020000, 0x04000000  # linux/sched.h
DISK_MB = 64


@dataclass(frozen=True)
class Start:
    """What is started: ``launcher`` with ``num_ranks`` ranks, ``arguments`` after the run file."""

    launcher: str
    num_ranks: int
    file: str
    arguments: Sequence[str]
    plants: Plants = field(default_factory=dict)
    is_forked: bool = True


@dataclass(frozen=True)
class Outcome:
    """How a start ended. ``all_gone_at``: when the last of its processes had (seconds since 1970)."""

    ended: Ended
    all_gone_at: float
    left_over: str = ""  # what had to be killed


class Starter:
    """In the folder of ``place``."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.variables = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        self.variables["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "src")))
        self.bed: Bed | None = None

    def run(self, start: Start, variables: Mapping[str, str] | None = None) -> Outcome:
        """To its end, of all of its processes."""
        with self.running(start, variables) as forks:
            return self.end(forks)

    @contextlib.contextmanager
    def running(self, start: Start, variables: Mapping[str, str] | None = None) -> Iterator[list[Fork]]:
        """What is started: the launcher, all tasks of srun, or the launchers of all nodes."""
        environment = {**self.variables, **(variables or {})}
        if not start.is_forked:
            environment = self.place.variables(start.plants, environment)
        self.place.output.unlink(missing_ok=True)
        begin = {OURS: self._ours, TORCHRUN: self._torchrun, SRUN: self._srun}[start.launcher]
        forks = self._on_nodes(start, environment) if self.bed is not None else begin(start, environment)
        try:
            yield forks
        finally:
            for child in children():
                with contextlib.suppress(psutil.Error):
                    child.kill()
            for fork in forks:
                fork.wait()

    def end(self, forks: Sequence[Fork]) -> Outcome:
        begin, left_over = time.monotonic(), ""
        for fork in forks:
            try:
                fork.wait(max(0.0, LIMIT_S + begin - time.monotonic()))
            except subprocess.TimeoutExpired:
                left_over = f"the launcher had not ended after {LIMIT_S:g} s"
                with contextlib.suppress(ProcessLookupError):
                    os.kill(fork.pid, signal.SIGKILL)
                fork.wait()
        ended_at = time.monotonic()
        while children() and time.monotonic() < ended_at + ORPHANS_S:
            time.sleep(0.02)
        gone_at = time.time()
        if rest := children():
            left_over = left_over or f"{len(rest)} processes lived on for {ORPHANS_S:g} s after the launcher had ended"
        codes = [fork.returncode or 0 for fork in forks]
        worst = next((code for code in codes if code), 0)
        output = self.place.output.read_text(errors="replace") if self.place.output.exists() else ""
        return Outcome(Ended(worst, output, time.monotonic() - begin), gone_at, left_over)

    def _ours(self, start: Start, environment: Mapping[str, str]) -> list[Fork]:
        arguments = ["train", start.file, "--gpus", str(start.num_ranks), *start.arguments]
        return [self._launcher(start, arguments, environment)]

    def _torchrun(self, start: Start, environment: Mapping[str, str]) -> list[Fork]:
        arguments = ["--standalone", f"--nproc_per_node={start.num_ranks}", *WORKER[:2], start.file, *start.arguments]
        return [self._launcher(start, arguments, environment)]

    def _launcher(
        self, start: Start, arguments: list[str], environment: Mapping[str, str], place: NodePlace | None = None
    ) -> Fork:
        def call() -> None:
            if place is not None or start.num_ranks == 1:  # a rank computes with as many threads as it has cores
                cores = sorted(os.sched_getaffinity(0))
                os.sched_setaffinity(0, {cores[-1 if place is None else place.node % len(cores)]})
            if place is not None:
                place.enter()
            if start.launcher == OURS:
                cli.app(arguments, prog_name="manyhands")
            else:
                torchrun.main(arguments)

        module = cli if start.launcher == OURS else torchrun
        return self._fork(
            run_launcher(module, call, self._plants_of_ranks(start), forks_ranks=start.is_forked),
            environment,
            {name: code for name, code in start.plants.items() if start.launcher == OURS and name == PREPARATION},
        )

    def _plants_of_ranks(self, start: Start) -> Plants:
        """What the launcher has not got already, which they are forks of."""
        return {name: code for name, code in start.plants.items() if start.launcher != OURS or name != PREPARATION}

    def _srun(self, start: Start, environment: Mapping[str, str]) -> list[Fork]:
        """As srun starts them: no agent beside them, and rank 0 serves the store."""
        tasks = {"SLURM_NTASKS": str(start.num_ranks), "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "localhost"}
        tasks |= {"SLURM_STEP_NUM_TASKS": str(start.num_ranks), "SLURM_STEP_NUM_NODES": "1"}
        tasks |= {"SLURM_TASKS_PER_NODE": str(start.num_ranks), "MASTER_ADDR": "127.0.0.1"}
        tasks |= {"MASTER_PORT": str(free_port())}
        forks = []
        for rank in range(start.num_ranks):
            own = {**environment, **tasks, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
            command = [start.file, *start.arguments]
            call = run_worker(command) if start.is_forked else _exec_worker(command)
            forks.append(self._fork(call, own, start.plants if start.is_forked else {}))
        return forks

    def _on_nodes(self, start: Start, environment: Mapping[str, str]) -> list[Fork]:
        """One rank and a launcher on each of two nodes."""
        assert self.bed is not None
        forks = []
        for node in range(self.bed.num):
            host, port = self.bed.address(0), 29400
            if start.launcher == OURS:
                arguments = ["train", start.file, "--nodes", str(self.bed.num), "--node-rank", str(node)]
                arguments += ["--rendezvous", f"{host}:{port}", *start.arguments]
            else:
                arguments = [f"--nnodes={self.bed.num}", f"--node-rank={node}", f"--master-addr={host}"]
                arguments += [f"--master-port={port}", "--nproc_per_node=1", *WORKER[:2], start.file, *start.arguments]
            forks.append(self._launcher(start, arguments, environment, NodePlace(self.bed, node)))
        return forks

    def _fork(self, call, environment: Mapping[str, str], plants: Plants) -> Fork:  # type: ignore[no-untyped-def]
        return Fork(call, environment=environment, folder=self.place.folder, output=self.place.output, plants=plants)


def _exec_worker(arguments: Sequence[str]):  # type: ignore[no-untyped-def]
    return lambda: os.execve(sys.executable, [sys.executable, *WORKER[:2], *arguments], os.environ)


@dataclass(frozen=True)
class NodePlace:
    """A node of a bed, which the process that enters it does not leave."""

    bed: Bed
    node: int

    def enter(self) -> None:
        system = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.bed.netns(self.node)}") as file:
            assert system.setns(file.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        assert system.unshare(CLONE_NEWUTS | CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
        hosts = self.bed.folder / f"hosts-{self.bed.key}"
        for command in ("mount --make-rprivate /", f"mount --bind {hosts} /etc/hosts", f"hostname mh{self.node}"):
            subprocess.run(command.split(), check=True)


@contextlib.contextmanager
def two_nodes(starter: Starter) -> Iterator[Bed]:
    """Within, starts are on two nodes of their own, as network namespaces."""
    with make_bed(starter.place.folder, 2) as bed:
        starter.bed = bed
        try:
            yield bed
        finally:
            starter.bed = None


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[dict[str, str]]:
    """A file system of its own at ``folder``, which ``fill_disk`` fills; needs root. Yields the variables for that."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(folder)], check=True)
    try:
        yield {SMALL_DISK: str(folder)}
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
