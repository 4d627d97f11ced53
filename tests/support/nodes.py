"""Nodes on one machine: network namespaces on a bridge, each with an address, a host name, processes and, where a test
wants it, a disk of its own. Needs root and the commands ``ip``, ``nsenter`` and ``unshare``.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil

WAIT_S = 240.0  # busy machines are slow


@cache
def why_no_nodes() -> str | None:
    """Why nodes cannot be made here; None if they can."""
    missing = [name for name in ("ip", "nsenter", "unshare", "mount") if shutil.which(name) is None]
    if missing:
        return f"needs the commands {', '.join(missing)}"
    if os.geteuid():
        return "needs root, for network namespaces"
    name = f"mhprobe{secrets.token_hex(2)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None if made.returncode == 0 else f"no network namespaces here: {made.stderr.strip()}"


@dataclass
class Launched:
    """A command on a node."""

    process: subprocess.Popen[str]
    output: Path
    node: int

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait(self, limit_s: float = WAIT_S) -> int:
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"node {self.node} did not end:\n{self.text}") from None

    @property
    def command(self) -> psutil.Process:
        """The command itself, below the shell that is process 1 of the node."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for child in psutil.Process(self.process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "python" in child.name() and "python" not in (child.parent() or child).name():
                        return child
            time.sleep(0.02)
        raise AssertionError(f"node {self.node} started nothing:\n{self.text}")

    def workers(self) -> list[psutil.Process]:
        """Ranks on this node, in their order."""
        found = {}
        for child in self.command.children():
            with contextlib.suppress(psutil.Error):
                if "manyhands.worker" in " ".join(child.cmdline()):
                    found[int(child.environ().get("RANK", -1))] = child
        return [found[rank] for rank in sorted(found)]


@dataclass
class Bed:
    """``num`` nodes ``mh0``, ``mh1``, ... at 10.77.X.1, .2, ..."""

    folder: Path
    num: int
    key: str = field(default_factory=lambda: secrets.token_hex(2))
    subnet: str = field(default_factory=lambda: f"10.77.{secrets.randbelow(250)}")
    launched: list[Launched] = field(default_factory=list)

    def address(self, node: int) -> str:
        return f"{self.subnet}.{node + 1}"

    def netns(self, node: int) -> str:
        return f"mh{self.key}n{node}"

    def cut(self, node: int) -> None:
        """Takes the node's link down: nothing arrives any more, and nobody is told."""
        _ip("link", "set", f"mh{self.key}v{node}", "down")

    def mend(self, node: int) -> None:
        """Its link is up again, whichever end of it was down."""
        _ip("link", "set", f"mh{self.key}v{node}", "up")
        _ip("-n", self.netns(node), "link", "set", "eth0", "up")

    def slow(self, node: int, rate: str) -> None:
        """What the node sends goes no faster than ``rate``, such as 100mbit."""
        command = f"tc qdisc replace dev eth0 root tbf rate {rate} burst 256kb latency 400ms"
        subprocess.run(["nsenter", f"--net=/run/netns/{self.netns(node)}", *command.split()], check=True)

    def start(
        self,
        node: int,
        *command: str,
        environment: Mapping[str, str] | None = None,
        own: Sequence[Path] = (),
        setup: str = "true",
    ) -> Launched:
        """A command on a node, in ``folder``. ``own``: folders that are the node's own, each an empty disk there.
        ``setup``: shell that fills them.
        """
        hosts = self.folder / f"hosts-{self.key}"
        lines = ["mount --make-rprivate /", f"hostname mh{node}", f"mount --bind {hosts} /etc/hosts"]
        lines += [f"mkdir -p {path} && mount -t tmpfs tmpfs {path}" for path in own]
        lines += [f"cd {self.folder}", setup, '"$@" & child=$!; trap "kill -TERM $child" TERM; wait $child; code=$?',
                  "while kill -0 $child 2>/dev/null; do wait $child; code=$?; done; exit $code"]  # fmt: skip
        output = self.folder / f"output-{self.key}-{node}-{len(self.launched)}.txt"
        enter = ["nsenter", f"--net=/run/netns/{self.netns(node)}", "unshare", "--uts", "--mount", "--pid", "--fork"]
        with open(output, "w") as file:
            process = subprocess.Popen(
                [*enter, "--mount-proc", "bash", "-c", "\n".join(lines), "node", *command],
                cwd=self.folder,
                env={**os.environ, **(environment or {})},
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        self.launched.append(Launched(process, output, node))
        return self.launched[-1]


@contextlib.contextmanager
def make_bed(folder: Path, num: int) -> Iterator[Bed]:
    """Nodes that are gone afterwards, with all that runs on them."""
    bed = Bed(folder, num)
    bridge = f"mh{bed.key}b"
    names = "".join(f"{bed.address(node)} mh{node}\n" for node in range(num))
    (folder / f"hosts-{bed.key}").write_text(f"127.0.0.1 localhost\n{names}")
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for node in range(num):
            netns, outer, inner = bed.netns(node), f"mh{bed.key}v{node}", f"mh{bed.key}i{node}"
            _ip("netns", "add", netns)
            _ip("link", "add", outer, "type", "veth", "peer", "name", inner)
            _ip("link", "set", outer, "master", bridge, "up")
            _ip("link", "set", inner, "netns", netns, "name", "eth0")
            _ip("-n", netns, "addr", "add", f"{bed.address(node)}/24", "dev", "eth0")
            _ip("-n", netns, "link", "set", "eth0", "up")
            _ip("-n", netns, "link", "set", "lo", "up")
        yield bed
    finally:
        for launched in bed.launched:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(launched.process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        child.kill()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(launched.process.pid, signal.SIGKILL)
            launched.process.wait()
        for node in range(num):
            subprocess.run(["ip", "netns", "del", bed.netns(node)], capture_output=True, check=False)
            # A namespace that a dying process still holds keeps its end of the link, and with it this one.
            subprocess.run(["ip", "link", "del", f"mh{bed.key}v{node}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
