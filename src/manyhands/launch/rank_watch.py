"""The watch under torchrun, accelerate and srun, which have none: a thread in each rank. Knows no torch.

Each rank ends itself once another has failed or is gone, and waits in vain. The first two ranks of each machine also
judge progress as ``manyhands train`` does; two, as one of them may be what hangs. The first to find that the run stands
still writes the reason as the failure of the rank furthest behind, ends that rank if it is on this machine, and then
itself: the others' collectives break off, or their own watch ends them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from manyhands.core.errors import EXIT_FAILED
from manyhands.launch.failure import write_failure
from manyhands.launch.heartbeat import read_beat, this_host
from manyhands.launch.run_folder import RunFolder
from manyhands.launch.watch import Watch, kill_group

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
