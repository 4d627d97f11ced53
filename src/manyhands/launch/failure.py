"""Why a run failed: each rank writes its own reason, the launcher shows the first cause, once. Knows no torch.

When one rank fails, the others fail too: their peer is gone. Such consequences are told from causes by what they say,
and lose against any cause, whichever was written first.
"""

from __future__ import annotations

import json
import re
import signal
import time
import traceback
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from manyhands.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_TERMINATED, UserError
from manyhands.files import read_json, write_json
from manyhands.launch.heartbeat import read_beat, read_beats
from manyhands.launch.run_folder import RunFolder

TAIL_LINES = 15
PEER_GRACE_S = 2.0  # a rank that lost its peer leaves no sooner, so that the agent does not end the peer before it has spoken

# What gloo, NCCL and the store say where a peer has gone, on torch 2.11 and 2.13.
_CONSEQUENCE = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|connectfullmesh|socket ?timeout|timed out|watchdog|"
    r"remote process exited|ncclremoteerror|nccl communicator was aborted|failed to (recv|send)|sendbytes|recvbytes|peer closed",
    re.IGNORECASE,
)
_ENDED_BY_OTHERS = (-signal.SIGTERM, -signal.SIGINT, EXIT_INTERRUPTED, EXIT_TERMINATED)


class RankExit(Protocol):
    """What torch's agent knows of a rank that failed."""

    @property
    def exitcode(self) -> int: ...  # negative: the signal

    @property
    def pid(self) -> int: ...

    @property
    def timestamp(self) -> int: ...  # whole seconds since the epoch


def write_failure(folder: RunFolder, rank: int, stage: str, error: BaseException) -> None:
    """In a rank: why it ends, where the launcher finds it. The first reason stands; what fails after it does not replace it.

    A mere consequence returns only when the cause has been written too, or after ``PEER_GRACE_S``.
    """
    path = folder.failure(rank)
    if path.exists():
        return
    user = json.loads(error.to_json()) if isinstance(error, UserError) else None
    consequence = looks_like_consequence(error)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(
        path,
        {
            "rank": rank,
            "stage": stage,
            "time": time.time(),
            "user_error": user,
            "summary": "".join(traceback.format_exception_only(error)).strip(),
            "traceback": "".join(traceback.format_exception(error)),
            "consequence": consequence,
        },
    )
    deadline = time.monotonic() + PEER_GRACE_S
    while consequence and time.monotonic() < deadline and not _has_cause(folder):
        time.sleep(0.05)


def looks_like_consequence(error: BaseException) -> bool:
    """Whether a peer's end explains this error: a connection or collective that broke off."""
    if isinstance(error, UserError | SystemExit | KeyboardInterrupt | MemoryError):
        return False
    if isinstance(error, ConnectionError | BrokenPipeError):
        return True
    of_torch = type(error).__module__.startswith("torch") or isinstance(error, RuntimeError)
    return of_torch and _CONSEQUENCE.search(str(error)) is not None


def first_failure(folder: RunFolder, exits: Mapping[int, RankExit], ended_by_us: Collection[int] = ()) -> UserError:
    """The cause of a failed launch, as one error to show.

    ``exits``: failed ranks as the agent saw them (``ChildFailedError.failures``). ``ended_by_us``: pids the watch has
    killed, which are nobody's cause.
    """
    written = _read_reasons(folder)
    candidates = [(_tier_of_reason(reason), reason["time"], rank) for rank, reason in written.items()]
    # The agent's clock has whole seconds; a reason written in the same second was there first.
    candidates += [(_tier_of_exit(e, ended_by_us), e.timestamp + 1.0, rank) for rank, e in exits.items() if rank not in written]
    if not candidates:
        return UserError("the run failed, and no rank said why", where=str(folder.logs), exit_code=EXIT_FAILED)
    _, _, rank = min(candidates)
    if rank in written:
        return _explain_reason(folder, written[rank])
    return _explain_exit(folder, rank, exits[rank].exitcode)


def log_tail(folder: RunFolder, rank: int, num_lines: int = TAIL_LINES) -> str:
    """The last lines of a rank's log, indented to stand inside an error; "" where there is none."""
    try:
        with open(folder.log(rank), "rb") as file:
            file.seek(max(0, file.seek(0, 2) - 16384))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except FileNotFoundError:
        return ""
    return _indent("\n".join(lines), num_lines)


def _read_reasons(folder: RunFolder) -> dict[int, dict[str, Any]]:
    reasons = [read_json(path) for path in folder.ranks.glob("failure-*.json")]
    return {reason["rank"]: reason for reason in reasons if reason}


def _has_cause(folder: RunFolder) -> bool:
    return any(not reason["consequence"] for reason in _read_reasons(folder).values())


def _tier_of_reason(reason: Mapping[str, Any]) -> int:
    return 2 if reason["consequence"] else 0


def _tier_of_exit(exited: RankExit, ended_by_us: Collection[int]) -> int:
    """0: a cause; 1: an end without a word; 2: often a consequence (torch aborts when a collective breaks off); 3: ended by others."""
    if exited.pid in ended_by_us or exited.exitcode in _ENDED_BY_OTHERS:
        return 3
    if exited.exitcode == -signal.SIGABRT:
        return 2
    return 0 if exited.exitcode < 0 else 1


def _explain_reason(folder: RunFolder, reason: Mapping[str, Any]) -> UserError:
    rank, stage = reason["rank"], reason["stage"]
    if reason["user_error"] is not None:
        return UserError(**reason["user_error"])
    if reason["consequence"]:
        return UserError(
            f"rank {rank} lost its peers in stage '{stage}', and none of them said why",
            where=str(folder.log(rank)),
            why=reason["summary"],
            fix="read the logs of the other ranks; the network or the machine of one may have failed. The same command resumes",
            details=[f"rank {other} was last in {beat}" for other, beat in read_beats(folder).items() if other != rank],
            exit_code=EXIT_FAILED,
        )
    return UserError(
        f"rank {rank} failed in stage '{stage}': {reason['summary'].splitlines()[-1]}",
        where=str(folder.log(rank)),
        why="not an error this program knows; the end of its traceback:\n" + _indent(reason["traceback"]),
        fix="the log has the whole traceback; if it is a bug in manyhands, please report it with the log",
        exit_code=EXIT_FAILED,
    )


def _explain_exit(folder: RunFolder, rank: int, code: int) -> UserError:
    tail = log_tail(folder, rank)
    beat = read_beat(folder, rank)
    what, why = f"rank {rank} ended with exit code {code} and said nothing", "unknown"
    if code < 0:
        name = signal.Signals(-code).name
        what, why = f"rank {rank} was killed ({name})", _WHY_KILLED.get(-code, "a signal from outside, or a crash below Python")
    return UserError(
        what + (f" in {beat}" if beat else ""),
        where=str(folder.log(rank)),
        why=why + (f"; the end of its log:\n{tail}" if tail else ""),
        fix="read the log; the same command resumes from the last checkpoint",
        exit_code=EXIT_FAILED,
    )


_WHY_KILLED = {
    int(signal.SIGKILL): "often the host ran out of memory and the kernel chose this process (see `dmesg`); or somebody killed it",
    int(signal.SIGSEGV): "a crash inside a compiled library (driver, CUDA, NCCL, an extension)",
    int(signal.SIGBUS): "a file or shared memory that shrank, or a full /dev/shm",
    int(signal.SIGABRT): "a compiled library gave up (a failed check, an uncaught C++ exception)",
    int(signal.SIGTERM): "somebody asked it to end: a scheduler, or a person",
}


def _indent(text: str, num_lines: int = TAIL_LINES) -> str:
    lines = text.rstrip().splitlines()[-num_lines:]
    return "\n".join(f"    {line}" for line in lines)
