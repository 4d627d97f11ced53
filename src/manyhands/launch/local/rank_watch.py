"""The watch under torchrun, accelerate and srun, which have none: a thread in each rank. Knows no torch.

Each rank ends itself once another has failed or is gone, and waits in vain. The first two ranks of each machine also
judge progress as ``manyhands train`` does; two, as one of them may be what hangs. The first to find that the run stands
still writes the reason as the failure of the rank furthest behind, ends that rank if it is on this machine, and then
itself: the others' collectives break off, or their own watch ends them. A rank without peers is also watched by a
separate process (``start_beside``), because SIGSTOP stops the rank's own watch thread as well.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import TextIO

from manyhands.core.errors import EXIT_FAILED
from manyhands.core.machine import end_with
from manyhands.core.text import print_safely
from manyhands.launch.diagnose.failure import claim_terminal, find_cause, record_for_torch, write_failure
from manyhands.launch.local.heartbeat import START, read_beat, this_host
from manyhands.launch.local.watch import Watch, kill_descendants, kill_group
from manyhands.launch.run.folder import RunFolder

NUM_JUDGES = 2  # ranks of a machine
SECOND_S = 10.0  # so much later the second one judges, should the first be stuck
RANKS_A_SECOND = 16  # whose heartbeats are read: a network file system serves all ranks


class RankWatch(Watch):
    """``report()`` shows on this terminal why the run ends."""

    def __init__(
        self,
        folder: RunFolder,
        world_size: int,
        timeout_s: float,
        *,
        rank: int,
        local_rank: int,
        report: Callable[[], object],
    ) -> None:
        super().__init__(folder, world_size, timeout_s + SECOND_S * min(local_rank, 1))
        self.rank, self.report = rank, report
        self.judges = local_rank < NUM_JUDGES
        self.is_done = False  # this rank ends as planned
        self.min_poll_s = world_size / RANKS_A_SECOND

    def start(self) -> None:
        self.__enter__()
        self._poll_s = max(self._poll_s, self.min_poll_s)

    def wait(self) -> None:
        """Until it has ended a rank, or is closed."""
        self._thread.join()

    def close(self) -> None:
        """Nothing is judged or ended from here on."""
        self.is_done = True
        self._stop.set()

    def _may_judge(self) -> bool:
        return self.judges and not self.is_done

    def _find_pids(self) -> None:
        """The launcher knows them."""

    def _end_ranks(self, culprits: list[int]) -> None:
        assert self.verdict is not None
        beat = self._ranks[culprits[0]].beat
        with contextlib.suppress(FileExistsError, OSError):
            os.close(os.open(self.folder.ranks / "judged", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            write_failure(self.folder, culprits[0], beat.stage if beat else "start", self.verdict)
        self.expect_end()
        self.report()
        for rank in culprits:
            beat = self._ranks[rank].beat
            if rank != self.rank and beat is not None and beat.host == this_host():
                kill_group(beat.pid)
        if self.rank in culprits:
            kill_descendants(os.getpid())
            os._exit(EXIT_FAILED)

    def _end_waiting(self, now: float) -> None:
        """This rank lives on after a cause: it waits for a peer that is gone."""
        if self.is_done or self._caused_at is None or now - self._caused_at < self.grace_s:
            return
        mine = read_beat(self.folder, self.rank)
        if mine is not None and mine.done:
            return
        self.report()
        os._exit(EXIT_FAILED)


NO_RANK = -1  # the watching process is none of the run's ranks


def start_beside(folder: RunFolder, timeout_s: float, terminal: TextIO) -> None:
    """Start a process that watches this one, the only rank, and ends when it ends."""
    command = [
        sys.executable,
        "-m",
        "manyhands.launch.local.rank_watch",
        str(folder.path),
        str(timeout_s),
        str(os.getpid()),
    ]
    # In this process's group, so that Ctrl-Z suspends both and is not mistaken for a hang.
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=terminal)


def main(path: str, timeout_s: str, parent: str) -> None:
    if not end_with(int(parent), signal.SIGKILL):
        return
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):  # meant for the rank
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    folder = RunFolder(path)

    def report() -> None:
        cause = find_cause(folder).error
        if claim_terminal(folder):
            print(cause, flush=True)
        beat = read_beat(folder, 0)
        record_for_torch(cause, beat.stage if beat else START, 0)
        with contextlib.suppress(OSError):
            folder.write_failed(cause, folder.read_plan())

    watch = RankWatch(folder, 1, float(timeout_s), rank=NO_RANK, local_rank=NUM_JUDGES - 1, report=report)
    watch.start()
    watch.wait()


if __name__ == "__main__":
    print_safely()
    main(*sys.argv[1:])
