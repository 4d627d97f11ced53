"""Why a run failed: each rank writes its own reason, the launcher shows the first cause, once. Knows no torch.

When one rank fails, the others fail too: their peer is gone. Such consequences are recognized by their text
and rank below any cause, whichever was written first. A rank that has only lost a peer does not end before the cause
is on disk: as soon as one rank ends, torch's agent ends all others, including one that has not reported its error yet.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import time
import traceback
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from manyhands.core.errors import DISK_FULL, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED, FAULT, PeerError, UserError
from manyhands.core.files import nearest_folder, write_json_on_full_disk
from manyhands.launch.local.heartbeat import RESERVE_BYTES, Beat, read_beat, read_beats, this_host
from manyhands.launch.run.folder import RunFolder

TAIL_LINES = 15
LITTLE_BYTES = 2**20  # of a disk: as good as full
MAX_SUMMARY = 500  # characters of the one line
# Ticks of its heartbeat (two a second on an idle machine) within which each living peer must report. Ticks, not
# seconds: on a machine so loaded that a rank is slow to report, its ticks are slow too.
PATIENCE_TICKS = 40
REMOTE_SILENCE_S = 30.0  # without a tick: a rank of another machine is taken for gone

# Messages of gloo, NCCL and the store when a peer is gone, on torch 2.11 and 2.13.
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|connectfullmesh|socket ?timeout|timed out|watchdog|"
    r"remote process exited|ncclremoteerror|nccl communicator was aborted|failed to (recv|send)|sendbytes|recvbytes|"
    r"peer closed|pair closure",
    re.IGNORECASE,
)
ENDED_BY_OTHERS = 5  # the last tier: nobody's cause
_CODES_OF_OTHERS = (-signal.SIGTERM, -signal.SIGINT, EXIT_INTERRUPTED, EXIT_TERMINATED)


def write_failure(folder: RunFolder, rank: int, stage: str, error: BaseException, *, world_size: int = 2) -> None:
    """In a rank: writes why it ends, for the launcher. Only the first reason is kept."""
    path = folder.failure(rank)
    if path.exists() or not folder.path.exists():
        return
    user = json.loads(error.to_json()) if isinstance(error, UserError) else None
    reason = {
        "rank": rank,
        "stage": stage,
        "time": time.time(),
        "user_error": user,
        "summary": "".join(traceback.format_exception_only(error)).strip()[-RESERVE_BYTES // 8 :],
        "traceback": "".join(traceback.format_exception(error))[-RESERVE_BYTES // 4 :],
        "consequence": world_size > 1 and looks_like_consequence(error),
        "unclear": world_size > 1 and _is_of_torch(error),
    }
    with contextlib.suppress(OSError):  # then the rank's exit code is all that the launcher sees
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_on_full_disk(path, reason, reserve=folder.reserve(rank))


def record_for_torch(error: BaseException, stage: str, rank: int, environ: Mapping[str, str] = os.environ) -> None:
    """In a rank: writes the error file that torch's agent (torchrun, accelerate) shows, if it has named one.

    In the format of ``torch.distributed.elastic.multiprocessing.errors.ErrorHandler``, which would give a user's
    mistake a traceback.
    """
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    # The agent takes the lowest for the cause, in whole seconds.
    timestamp = int(time.time()) + (1 if looks_like_consequence(error) else 0)
    text = (
        str(error).removeprefix("error: ")
        if isinstance(error, UserError)
        else "".join(traceback.format_exception(error))
    )
    message = f"rank {rank} failed in stage '{stage}': {_summarize(error)}"
    fields = {"message": message, "extraInfo": {"py_callstack": text, "timestamp": str(timestamp)}}
    with contextlib.suppress(OSError):
        Path(path).write_text(json.dumps({"message": fields}), encoding="utf-8")


def claim_terminal(folder: RunFolder) -> bool:
    """In a rank under another launcher: whether it is the first of its machine to fail, and so prints the cause."""
    if not folder.path.exists():
        return True
    machine = hashlib.sha256(f"{this_host()} {socket.gethostname()}".encode()).hexdigest()[:16]
    try:
        folder.ranks.mkdir(parents=True, exist_ok=True)
        os.close(os.open(folder.ranks / f"shown-{machine}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        return False
    except OSError:  # a full disk: better twice than never
        return True
    return True


def describe_failure(error: BaseException, stage: str, rank: int, log: Path | None) -> str:
    """The terminal's text for a failed rank: a UserError in full, any other error in one line."""
    if isinstance(error, UserError):
        return str(error)
    return f"error: rank {rank} failed in stage '{stage}': {_summarize(error)}" + (
        f"; log: {log}" if log is not None else ""
    )


def describe_lost(
    folder: RunFolder, rank: int, stage: str, error: BaseException | None, silent: Collection[int] = ()
) -> str:
    """A line for a launch without a written cause: missing ranks, else this rank, and what that says of machines."""
    gone = [
        f"rank {other} ended without an error message in {beat}; log: {folder.log(other)}"
        for other, beat in _gone(folder).items()
    ]
    if gone:
        return f"error: {'; '.join(gone)}"
    why = f": {_summarize(error)}" if error is not None else ""
    lost = f"rank {rank} lost its peers in stage '{stage}', and none of them reported a cause"
    return f"error: {lost}{why}{_explain_machines(folder, rank, silent)}; log: {folder.log(rank)}"


def _explain_machines(folder: RunFolder, rank: int, silent: Collection[int]) -> str:
    """Which machine is probably cut off, by heartbeats on the shared disk; "" where all are on one."""
    beats, failed = read_beats(folder), folder.read_failures()
    machines: dict[str, list[int]] = {}
    for other, beat in beats.items():
        machines.setdefault(beat.machine or beat.host, []).append(other)
    if len(machines) < 2 or rank not in beats:
        return ""
    if silent:
        named = {machine: [other for other in ranks if other in silent] for machine, ranks in machines.items()}
        who = ", ".join(f"{machine} (rank {', '.join(map(str, ranks))})" for machine, ranks in named.items() if ranks)
        return f"; nothing was heard from {who} for {REMOTE_SILENCE_S:.0f} s: it has ended, or is cut off"
    if all(other in failed for other in beats if other != rank):
        return f"; all ranks live and have lost each other: a link between {' and '.join(machines)} is probably cut"
    return ""


def is_lost(folder: RunFolder) -> bool:
    """Whether a rank has failed, or ended before its work was done, so that waiting is pointless."""
    return folder.has_cause() or bool(_gone(folder))


def _gone(folder: RunFolder) -> dict[int, Beat]:
    return {rank: beat for rank, beat in read_beats(folder).items() if beat.is_gone}


def _summarize(error: BaseException) -> str:
    """Type and message in one line."""
    return " ".join("".join(traceback.format_exception_only(error)).split())[:MAX_SUMMARY]


def wait_for_cause(folder: RunFolder, rank: int, world_size: int, limit_s: float) -> list[int]:
    """In a rank that has lost a peer: returns once the cause is on disk, a peer's process has ended, or no report can
    be expected: each peer has lost another too, is done, or has ticked ``PATIENCE_TICKS`` times without failing.

    ``limit_s`` bounds it in any case (a peer that never started, or is stopped). Returns ranks of other machines that
    are not heard any more.
    """
    peers = {other: _Peer() for other in range(world_size) if other != rank}
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and not folder.has_cause():
        failed = folder.read_failures()
        for other, peer in peers.items():
            peer.look(read_beat(folder, other))
        if any(peer.is_gone for peer in peers.values()):
            break
        if all(
            other in failed or peer.num_ticks >= PATIENCE_TICKS or (peer.beat and peer.beat.done)
            for other, peer in peers.items()
        ):
            break
        time.sleep(0.1)
    return [other for other, peer in peers.items() if peer.is_silent]


@dataclass
class _Peer:
    """One rank's view of another while it waits for its report."""

    beat: Beat | None = None
    num_ticks: int = 0
    ticked_at: float = field(default_factory=time.monotonic)

    def look(self, beat: Beat | None) -> None:
        if beat is not None and self.beat is not None and beat.tick != self.beat.tick:
            self.num_ticks, self.ticked_at = self.num_ticks + 1, time.monotonic()
        self.beat = beat or self.beat

    @property
    def is_gone(self) -> bool:
        if self.beat is None or self.beat.done:
            return False
        return self.beat.is_gone or self.is_silent

    @property
    def is_silent(self) -> bool:
        """On another machine, and not heard any more."""
        if self.beat is None or self.beat.done or self.beat.host == this_host():
            return False
        return time.monotonic() - self.ticked_at > REMOTE_SILENCE_S


def looks_like_consequence(error: BaseException) -> bool:
    """Whether a peer's end explains this error: a connection or collective that broke off."""
    if isinstance(error, UserError | SystemExit | KeyboardInterrupt | MemoryError):
        return False
    if isinstance(error, ConnectionError | BrokenPipeError | PeerError):
        return True
    return _is_of_torch(error) and _CONSEQUENCE.search(str(error)) is not None


def _is_of_torch(error: BaseException) -> bool:
    """Whether torch raised it, for a broken collective or anything else; texts change between versions."""
    return type(error).__module__.startswith("torch") or isinstance(error, RuntimeError)


@dataclass(frozen=True)
class FoundCause:
    """Why a launch failed, as one node sees it. The lowest of all nodes' counts, by ``tier``, then by ``time``."""

    tier: int  # 0: a cause; 5: ended by others
    time: float
    error: UserError
    rank: int | None = None  # whose failure it is

    def to_json(self) -> list[Any]:
        return [self.tier, self.time, self.error.to_json(), self.rank]

    @staticmethod
    def from_json(fields: list[Any]) -> FoundCause:
        tier, when, error, rank = fields
        return FoundCause(tier, when, UserError.from_json(error), rank)


def find_cause(
    folder: RunFolder, exits: Mapping[int, Any] = MappingProxyType({}), ended_by_us: Collection[int] = ()
) -> FoundCause:
    """The cause of a failed launch, as one error to show.

    ``exits``: failed ranks as the agent saw them (``ChildFailedError.failures``): exitcode (negative: the signal), pid
    and timestamp (whole seconds). ``ended_by_us``: pids the watch has killed, which are nobody's cause.
    """
    if not folder.path.exists():
        return FoundCause(0, time.time(), folder.explain_gone())
    written = folder.read_failures()
    candidates = [
        (4 if reason["consequence"] else 1 if reason["unclear"] else 0, reason["time"], rank)
        for rank, reason in written.items()
    ]
    # The agent's clock has whole seconds; a reason written in the same second was there first.
    candidates += [
        (_tier_of_exit(e, ended_by_us), e.timestamp + 1.0, rank) for rank, e in exits.items() if rank not in written
    ]
    if not candidates:
        error = UserError("the run failed, and no rank reported a cause", where=str(folder.logs), exit_code=EXIT_FAILED)
        return FoundCause(ENDED_BY_OTHERS, time.time(), error)
    tier, when, rank = min(candidates)
    explains = rank in written
    error = _explain_reason(folder, written[rank]) if explains else _explain_exit(folder, rank, exits[rank].exitcode)
    return FoundCause(tier, when, error, rank)


def log_tail(folder: RunFolder, rank: int, num_lines: int = TAIL_LINES) -> str:
    """The last lines of a rank's log, indented to stand inside an error; "" where there is none."""
    try:
        with open(folder.log(rank), "rb") as file:
            file.seek(max(0, file.seek(0, 2) - 16384))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return ""
    return _indent("\n".join(lines), num_lines)


def _tier_of_exit(exited: Any, ended_by_us: Collection[int]) -> int:
    """0: a cause, as a failure elsewhere ends a rank only by ``_CODES_OF_OTHERS``; 2: an exit without a
    report; 3: perhaps a consequence (torch aborts when a collective breaks off), but nearer to the cause than a rank
    that reports so; 5: ended by others.
    """
    if exited.pid in ended_by_us or exited.exitcode in _CODES_OF_OTHERS:
        return ENDED_BY_OTHERS
    if exited.exitcode == -signal.SIGABRT:
        return 3
    return 0 if exited.exitcode < 0 else 2


def _explain_reason(folder: RunFolder, reason: Mapping[str, Any]) -> UserError:
    rank, stage = reason["rank"], reason["stage"]
    if reason["user_error"] is not None:
        return UserError(**reason["user_error"])
    if reason["consequence"]:
        return UserError(
            f"rank {rank} lost its peers in stage '{stage}', and none of them reported a cause",
            where=str(folder.log(rank)),
            why=reason["summary"],
            fix="read the logs of the other ranks; the network or the machine of one may have failed;"
            " the same command resumes",
            details=[f"rank {other} was last in {beat}" for other, beat in read_beats(folder).items() if other != rank],
            exit_code=EXIT_FAILED,
            kind=FAULT,
        )
    return UserError(
        f"rank {rank} failed in stage '{stage}': {reason['summary'].splitlines()[-1]}",
        where=str(folder.log(rank)),
        why="an unexpected error; the end of its traceback:\n" + _indent(reason["traceback"]),
        fix="the log has the full traceback; if it is a bug in manyhands, please report it with the log",
        exit_code=EXIT_FAILED,
        kind=FAULT,
    )


def _explain_exit(folder: RunFolder, rank: int, code: int) -> UserError:
    tail = log_tail(folder, rank)
    beat = read_beat(folder, rank)
    what, why = f"rank {rank} ended with exit code {code} and no message", "unknown"
    if code < 0:
        name = signal.Signals(-code).name
        what, why = (
            f"rank {rank} was killed ({name})",
            _WHY_KILLED.get(-code, "a signal from outside, or a crash outside Python"),
        )
    kind = "" if code in _CODES_OF_OTHERS else FAULT
    free = shutil.disk_usage(nearest_folder(folder.path)).free
    if free < LITTLE_BYTES:
        kind, why = DISK_FULL, f"probably the disk is full: {free:,} bytes are free where the run's folder is"
    return UserError(
        what + (f" in {beat}" if beat else ""),
        where=str(folder.log(rank)),
        why=why + (f"; the end of its log:\n{tail}" if tail else ""),
        fix="read the log; the same command resumes from the last checkpoint",
        exit_code=EXIT_FAILED,
        kind=kind,
    )


_WHY_KILLED = {
    int(signal.SIGKILL): "often the kernel when the host runs out of memory (see `dmesg`); else another process",
    int(signal.SIGSEGV): "a crash inside a compiled library (driver, CUDA, NCCL, an extension)",
    int(signal.SIGBUS): "a file or shared memory that shrank, or a full /dev/shm",
    int(signal.SIGABRT): "an abort in a compiled library (a failed check, an uncaught C++ exception)",
    int(signal.SIGTERM): "a request to stop, by a scheduler or a user",
}


def _indent(text: str, num_lines: int = TAIL_LINES) -> str:
    lines = text.rstrip().splitlines()[-num_lines:]
    return "\n".join(f"    {line}" for line in lines)
