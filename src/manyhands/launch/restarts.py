"""Whether a launch that a fault has ended is started again, and when. Knows no torch.

A fault is what may be gone at the next attempt: a process that was killed or crashed, a rank that hangs, an unexpected
error, a lost connection. What the user has to change (``UserError``) is none, and neither is a signal to this process.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import Any

from manyhands.core.errors import UserError
from manyhands.core.segments import RankSegments
from manyhands.launch.heartbeat import read_beats
from manyhands.launch.run_folder import RunFolder

FIRST_WAIT_S = 1.0  # doubled with each restart in a row
MAX_WAIT_S = 60.0
TRAINING = ("train", "checkpoint")  # stages between the first step and the last


@dataclass(frozen=True)
class Restart:
    """One restart, as it is announced and recorded."""

    cause: str
    step: int | None  # the last one that was done
    from_step: int | None  # what the next attempt resumes from; None: from the start
    attempt: int
    of: int
    in_memory: bool = False  # from_step is a snapshot's, on this machine; the ranks look for one that all have
    begun: int | None = None  # the newest that any rank has begun
    lost: str = ""  # devices that are lost, and what is left: another plan follows

    @property
    def lost_steps(self) -> int:
        """Steps that are done again, the one in flight included."""
        return max(0, (self.step or 0) - (self.from_step or 0), (self.begun or 0) - (self.from_step or 0))

    @property
    def wait_s(self) -> float:
        return min(FIRST_WAIT_S * 2 ** (self.attempt - 1), MAX_WAIT_S)

    def __str__(self) -> str:
        begin = "from the start" if self.from_step is None else f"from step {self.from_step}"
        begin += " in host memory, if every rank has it," if self.in_memory else ""
        lost = f"{self.lost_steps} step{'s' * (self.lost_steps != 1)} lost"
        cause = f"{self.cause}; {self.lost}" if self.lost else self.cause
        return f"{cause}; restarting {begin} in {self.wait_s:g} s, {lost} (attempt {self.attempt} of {self.of})"

    def to_json(self) -> dict[str, Any]:
        fields = {"cause": self.cause, "step": self.step, "from_step": self.from_step, "lost_steps": self.lost_steps}
        fields |= {"in_memory": self.in_memory} | ({"lost": self.lost} if self.lost else {})
        return {"time": time.time(), **fields, "attempt": self.attempt, "of": self.of, "wait_s": self.wait_s}


@dataclass
class Restarts:
    """Those of one ``manyhands train``. ``limit`` bounds how many there are in a row without a newer checkpoint, so
    that a run of weeks survives any number of faults and one that gets nowhere ends.
    """

    folder: RunFolder
    limit: int
    segments: RankSegments | None = None  # snapshots in memory, of this machine's ranks
    num_in_a_row: int = 0
    from_step: int | None = None  # of the latest restart
    seen: set[tuple[str, int | None]] = field(default_factory=set)

    def decide(self, error: UserError, lost: str = "", *, memory: bool = True) -> Restart:
        """The restart after the fault ``error``. Raises it, with what was tried, where another attempt is pointless:
        the same error came at the same step as before, or there were too many in a row. Where devices are ``lost`` the
        next attempt is on others, so that neither counts. ``memory``: snapshots can be read by the next attempt.
        """
        if not self.limit:
            raise error
        saved = self.folder.newest_step()
        kept = self.segments.newest_step() if self.segments is not None and memory else None
        newest, in_memory = (kept, True) if kept is not None and kept > (saved or 0) else (saved, False)
        step, begun = _read_steps(self.folder)
        step = newest if step is None else step
        fault = re.sub(r"\d+", "#", error.what), step
        if lost:
            self.seen.clear()
            self.num_in_a_row = 0
        if fault in self.seen:
            place = "before the first step" if step is None else f"after step {step}"
            raise with_finding(error, f"it is the second time {place} in this launch: another restart would not help")
        if newest is not None and (self.from_step is None or newest > self.from_step):
            self.num_in_a_row = 0
        if self.num_in_a_row >= self.limit:
            tried = f"{self.limit} restart{'s' * (self.limit != 1)} in a row brought no new checkpoint"
            raise with_finding(error, f"{tried} (launch.restarts = {self.limit})")
        self.seen.add(fault)
        self.num_in_a_row, self.from_step = self.num_in_a_row + 1, newest
        return Restart(error.what, step, newest, self.num_in_a_row, self.limit, in_memory, begun, lost)


def _read_steps(folder: RunFolder) -> tuple[int | None, int | None]:
    """The last step that is known to be done, and the newest that any rank has begun in training."""
    beats = read_beats(folder).values()
    begun = max((b.begun for b in beats if b.begun is not None and b.stage in TRAINING), default=None)
    done = [beat.step for beat in beats if beat.step is not None]
    if begun is not None and begun > 1:  # of steps faster than records all before it are done
        done.append(begun - 1)
    return max(done, default=None), begun


def with_finding(error: UserError, finding: str) -> UserError:
    """The error with one more detail."""
    error.details = (*error.details, finding)
    return error
