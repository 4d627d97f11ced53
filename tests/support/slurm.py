"""A SLURM cluster of two nodes on this machine: Debian's daemons in network namespaces, with GPUs that are no GPUs.

The nodes ``mh0`` and ``mh1`` have addresses and host names of their own and share the disk. Needs root, and the
packages slurmctld, slurmd, slurm-client and munge.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged", "ip", "nsenter", "unshare")
NUM_GPUS = 2  # of each node
BRIDGE, NETWORK = "mhslurm", "10.87.0"
START_S, END_S = 60.0, 5.0

CONF = """\
ClusterName=mh
SlurmctldHost=mh0({network}.10)
SlurmUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
MpiDefault=none
JobRequeue=1
KillWait=5
GresTypes=gpu
SlurmdParameters=config_overrides
NodeName=mh0 NodeAddr={network}.10 CPUs=4 RealMemory=1000 Gres=gpu:h200:{num_gpus}
NodeName=mh1 NodeAddr={network}.11 CPUs=4 RealMemory=1000 Gres=gpu:h200:{num_gpus}
PartitionName=gpu Nodes=mh[0-1] Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why there can be no cluster here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    return (
        f"not installed: {', '.join(missing)} (apt-get install slurmctld slurmd slurm-client munge)"
        if missing
        else None
    )


@dataclass(frozen=True)
class Slurm:
    """A running cluster. Commands run on ``mh0``, as on a login node."""

    folder: Path

    def run(self, *command: str, check: bool = True, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*on_node(self.folder, 0), *command],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done

    @property
    def environment(self) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        return clean | {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def submit(self, *arguments: str) -> int:
        """Number of the job."""
        return int(self.run("sbatch", "--parsable", *arguments).stdout.split(";")[0])

    def show(self, job: int) -> dict[str, str]:
        """Fields of ``scontrol show job``."""
        words = self.run("scontrol", "show", "job", str(job)).stdout.split()
        return dict(word.partition("=")[::2] for word in words)

    def wait(self, job: int, *states: str, timeout_s: float = 400.0) -> dict[str, str]:
        """Until the job is in one of these states, or has ended."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        deadline = time.monotonic() + timeout_s
        while (fields := self.show(job))["JobState"] not in (*states, *ended):
            assert time.monotonic() < deadline, fields
            time.sleep(0.5)
        return fields


def namespace(index: int) -> str:
    return f"mhslurm{index}"


def on_node(folder: Path, index: int) -> list[str]:
    """Prefix of a command that runs on this node."""
    enter = f'hostname mh{index} && mount --bind {folder}/hosts /etc/hosts && exec "$@"'
    return ["nsenter", f"--net=/run/netns/{namespace(index)}", "unshare", "--uts", "--mount", "sh", "-c", enter, "sh"]


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[Slurm]:
    """Both nodes idle. No process and no interface is left afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    gpus = [folder / f"gpu{index}" for index in range(NUM_GPUS)]
    for gpu in gpus:
        os.mknod(gpu, 0o666 | 0o020000, os.makedev(1, 3))  # /dev/null under another name
    (folder / "slurm.conf").write_text(CONF.format(folder=folder, network=NETWORK, num_gpus=NUM_GPUS))
    names = "".join(f"{NETWORK}.{10 + index} mh{index}\n" for index in range(2))
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + names)
    files = f"{folder}/gpu[0-{NUM_GPUS - 1}]"
    (folder / "gres.conf").write_text(f"NodeName=mh[0-1] Name=gpu Type=h200 File={files}\n")
    (folder / "state").mkdir()
    cluster = Slurm(folder)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_network())
        if (
            not Path("/run/munge/munge.socket.2").exists()
            or subprocess.run(["munge", "-n"], capture_output=True).returncode
        ):
            stack.enter_context(_munge(folder))
        for index, program in ((0, ("slurmctld", "-D")), *((i, ("slurmd", "-D", "-N", f"mh{i}")) for i in range(2))):
            log = stack.enter_context(open(folder / f"{program[0]}-{index}.out", "wb"))
            daemon = subprocess.Popen(
                [*on_node(folder, index), *program], env=cluster.environment, stdout=log, stderr=log
            )
            stack.callback(_end, daemon)
        stack.callback(cluster.run, "scancel", "--user=root", check=False)
        deadline = time.monotonic() + START_S
        while cluster.run("sinfo", "--noheader", "--format=%T %D", check=False).stdout.split() != ["idle", "2"]:
            assert time.monotonic() < deadline, (folder / "slurmctld.log").read_text()[-2000:]
            time.sleep(0.5)
        yield cluster


@contextlib.contextmanager
def _network() -> Iterator[None]:
    """Two namespaces on a bridge, which has no way out."""

    def ip(*arguments: str, check: bool = True) -> None:
        subprocess.run(["ip", *arguments], check=check, capture_output=True)

    def remove() -> None:
        for index in range(2):
            ip("netns", "delete", namespace(index), check=False)
            ip("link", "delete", f"mhs{index}", check=False)
        ip("link", "delete", BRIDGE, check=False)

    remove()
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("link", "set", BRIDGE, "up")
        for index in range(2):
            node = namespace(index)
            ip("netns", "add", node)
            ip("link", "add", f"mhs{index}", "type", "veth", "peer", "name", "eth0", "netns", node)
            ip("link", "set", f"mhs{index}", "master", BRIDGE, "up")
            ip("-n", node, "address", "add", f"{NETWORK}.{10 + index}/24", "dev", "eth0")
            ip("-n", node, "link", "set", "eth0", "up")
            ip("-n", node, "link", "set", "lo", "up")
        yield
    finally:
        remove()


@contextlib.contextmanager
def _munge(folder: Path) -> Iterator[None]:
    key = Path("/etc/munge/munge.key")
    if not key.exists():
        subprocess.run(["mungekey", "--create"], check=True, capture_output=True)
    Path("/run/munge").mkdir(exist_ok=True)
    with open(folder / "munged.out", "wb") as log:
        daemon = subprocess.Popen(["munged", "--force", "--foreground"], stdout=log, stderr=log)
    try:
        yield
    finally:
        _end(daemon)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the daemon itself: ``sh`` has become it."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            daemon.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.wait(END_S)
            return
