"""Why a run is not making progress: what every rank does at this moment, and the likely cause by explicit rules; and
``manyhands doctor --run``, which examines a live run and ends nothing. No torch.

The rules (``find_cause``) are listed in docs/hangs.md. They read facts only: heartbeats, the state of processes, stacks
and the last collectives. Each is a guess, said as such.
"""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import psutil

from manyhands.core.errors import UserError
from manyhands.core.files import nearest_folder, read_rows
from manyhands.core.units import format_gib
from manyhands.launch.diagnose.stacks import (
    Frame,
    RankStacks,
    parse_faulthandler,
    read_stack,
    read_stacks,
    request_stacks,
    signal_for_stack,
)
from manyhands.launch.local.heartbeat import TICK_S, Beat, lives, read_beats, this_host, was_killed
from manyhands.launch.run.folder import RunFolder

ANSWER_S = 2.5  # heartbeats tick twice a second
STACK_S = 0.5
PY_SPY_S = 5.0
POLL_S = 0.1
# Where a main thread may be: stages, packages, and what that means.
PLACES = (
    (
        ("checkpoint", "export", "verify", "report"),
        ("checkpoint/", "export/"),
        "it reads or writes files in stage '{stage}' and is not making progress{at}{free}",
    ),
    (
        (),
        ("data/", "worker/batches"),
        "its next batch does not come: the process or disk that delivers data is stuck{at}",
    ),
)
TASKS = {"spawn_main": "prepares batches", "shard_writer": "writes checkpoints"}  # by a part of the command line
GONE, STOPPED, DISK = "gone", "stopped", "waiting for a disk"
BROKEN = {STOPPED: "is stopped (SIGSTOP)", GONE: "has ended"}
LOOK_S = 3.0  # between two looks, several ticks
STILL_S = 10.0  # without progress: worth a closer look; long steps take longer, which the text says
FRAMES = 12  # of the stack that is printed


@dataclass(frozen=True)
class Child:
    """A process that a rank has started."""

    pid: int
    state: str
    task: str = ""  # ``prepares batches``, ``writes checkpoints``; "" where it is another


@dataclass(frozen=True)
class RankState:
    rank: int
    name: str  # ``rank 3 on gpu01``
    beat: Beat | None = None
    still_s: float = 0.0  # without progress
    is_stuck: bool = False  # not even its heartbeat's thread has run
    process: str = ""  # GONE, STOPPED, DISK, or another state's name; "" where it cannot be seen from here
    children: tuple[Child, ...] = ()
    stacks: RankStacks = field(default_factory=RankStacks)

    @property
    def place(self) -> str:
        """Where its main thread is: the innermost function, and the one of ours or the user's that has called it."""
        frames = self.stacks.main
        if not frames:
            return ""
        top, own = frames[0], next((frame for frame in frames if not _is_library(frame)), None)
        return str(top) if own is None or own == top else f"{top}, called by {own}"

    def __str__(self) -> str:
        if self.beat is None:
            return f"{self.name}: not started"
        waits = self.stacks.waits_in
        what = f", waiting in {waits}" if waits else f", in {self.place}" if self.place else ""
        state = f", process {self.process}" if self.process in (GONE, STOPPED, DISK) else ""
        return f"{self.name}: {self.beat}, no progress for {self.still_s:.0f} s{state}{what}"


# What is known.


def collect_stacks(folder: RunFolder, states: Mapping[int, RankState]) -> dict[int, RankState]:
    """The states with what the ranks themselves, py-spy or a signal tell, in at most some five seconds."""
    found = {rank: look_at_process(state) for rank, state in states.items()}
    found_stacks: dict[int, RankStacks] = {}
    with contextlib.suppress(OSError):  # a full disk, or another user's folder
        token = request_stacks(folder)
        waiting = {rank for rank, state in found.items() if state.beat and state.process not in (GONE, STOPPED)}
        until = time.monotonic() + ANSWER_S
        while waiting and time.monotonic() < until:
            time.sleep(POLL_S)
            for rank in list(waiting):
                if answer := read_stacks(folder, rank, token):
                    found_stacks[rank] = answer
                    waiting.remove(rank)
    for rank, state in found.items():
        if rank not in found_stacks and state.beat and state.beat.host == this_host() and state.process != GONE:
            found_stacks[rank] = _look_from_outside(folder, rank, state.beat.pid)
    return {rank: replace(state, stacks=found_stacks.get(rank, state.stacks)) for rank, state in found.items()}


def look_at_process(state: RankState) -> RankState:
    """With the state of its process and of those that it has started, where they are on this machine."""
    if state.beat is None or state.beat.host != this_host():
        return state
    try:
        process = psutil.Process(state.beat.pid)
        children = [_look_at_child(child) for child in process.children(recursive=True)]
        name = _name_state(process.status())
    except psutil.Error:
        name, children = GONE, []
    return replace(state, process=name, children=tuple(child for child in children if child is not None))


def _look_at_child(child: psutil.Process) -> Child | None:
    with contextlib.suppress(psutil.Error):
        command = " ".join(child.cmdline())
        task = next((task for mark, task in TASKS.items() if mark in command), "")
        return Child(child.pid, _name_state(child.status()), task)
    return None


def _name_state(status: str) -> str:
    names = {psutil.STATUS_STOPPED: STOPPED, psutil.STATUS_TRACING_STOP: STOPPED, psutil.STATUS_DISK_SLEEP: DISK}
    names |= {psutil.STATUS_ZOMBIE: GONE, psutil.STATUS_DEAD: GONE}
    return names.get(status, status)


def _look_from_outside(folder: RunFolder, rank: int, pid: int) -> RankStacks:
    """The stacks of a rank that cannot answer: by py-spy where it is installed, else by a signal."""
    if py_spy := shutil.which("py-spy"):
        command = [py_spy, "dump", "--nonblocking", "--pid", str(pid)]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=PY_SPY_S)
            if done.returncode == 0:
                return RankStacks(text=done.stdout)
    if not signal_for_stack(folder, rank, pid):
        return RankStacks()
    time.sleep(STACK_S)
    return RankStacks(threads=parse_faulthandler(read_stack(folder, rank)))


# What it means.


def find_cause(culprits: Sequence[RankState], others: Sequence[RankState], free_bytes: int | None = None) -> str:
    """The likely cause in a sentence, by the first rule that applies. ``others`` wait for ``culprits``."""
    return (
        _explain_process(culprits, others)
        or _explain_place(culprits, free_bytes)
        or _explain_collectives(culprits, others)
        or f"it hangs, or waits for an external resource{_at(culprits[0])}"
    )


def _explain_process(culprits: Sequence[RankState], others: Sequence[RankState]) -> str:
    """By the state of the ranks' processes, and of those that they have started."""
    gone = [state for state in (*culprits, *others) if state.process == GONE and not (state.beat and state.beat.done)]
    if gone:
        return f"{_names(gone)} ended without a report (killed, or crashed), and the others wait for it"
    for state in culprits:
        if state.process == STOPPED:
            pid = state.beat.pid if state.beat else "?"
            return f"its process is stopped (SIGSTOP), as by Ctrl-Z, a debugger or a scheduler: `kill -CONT {pid}`"
    if culprits[0].beat is None:
        return "it never reported a start"
    children = [(state, child) for state in culprits for child in state.children if child.task]
    for state, child in children:
        if child.state in BROKEN:
            return f"process {child.pid}, which {child.task} for {state.name}, {BROKEN[child.state]}"
    if DISK in [state.process for state in culprits] + [child.state for _, child in children]:
        why = "a network file system that does not answer, or a failing disk"
        return f"it waits for a disk: {why} (stage '{culprits[0].beat.stage}')"
    return ""


def _explain_place(culprits: Sequence[RankState], free_bytes: int | None) -> str:
    """By what the main thread of the first is in, unless all wait in a collective."""
    first = culprits[0]
    stage = first.beat.stage if first.beat else ""
    if len(culprits) == 1 or not all(state.stacks.waits_in for state in culprits):
        own = next((frame.file for frame in first.stacks.main if "/manyhands/" in frame.file), "")
        for stages, packages, text in PLACES:
            if stage in stages or any(f"/manyhands/{package}" in own for package in packages):
                free = f"; {format_gib(free_bytes)} are free there" if free_bytes is not None else ""
                return text.format(stage=stage, at=_at(first), free=free)
    if first.is_stuck:
        return f"it hangs in compiled code that keeps Python from running (a driver, CUDA, a library){_at(first)}"
    return ""


def _explain_collectives(culprits: Sequence[RankState], others: Sequence[RankState]) -> str:
    """By the collectives that ranks wait in."""
    first, at = culprits[0], _at(culprits[0])
    waiting = [(state, waits) for state in (*culprits, *others) if (waits := state.stacks.waits_in)]
    for place in dict.fromkeys((waits.group, waits.number) for _, waits in waiting):
        same = [(state, waits) for state, waits in waiting if (waits.group, waits.number) == place]
        if len({(waits.name, waits.sizes) for _, waits in same}) > 1:
            each = "; ".join(f"{state.name} in {waits}" for state, waits in same[:4])
            why = "uneven data, or code that not all ranks run alike"
            return f"ranks have taken different paths and wait for each other in different collectives ({each}): {why}"
    queued = [(state, waits) for state, waits in waiting if not waits.started]
    if not others and 0 < len(queued) < len(culprits):
        who = _names([state for state, _ in queued])
        return f"the device of {who} has not come to the collective that the others' run ({queued[0][1]}): it hangs"
    alone = "so no single rank is the cause"
    if not others and len(waiting) == len(culprits):
        hosts = {state.beat.host for state in culprits if state.beat}
        between = "between the machines" if len(hosts) > 1 else "between them"
        return f"all ranks wait in the same collective ({waiting[0][1]}), {alone}: the connection {between} hangs"
    if len(culprits) > 1:
        return f"all of them are at the same point, {alone}: they hang, or the connection between them does{at}"
    if waiting and not first.stacks.waits_in:
        who, verb = _names([state for state, _ in waiting]), "wait" if len(waiting) > 1 else "waits"
        return f"it hangs{at}, and has not entered the collective that {who} {verb} in ({waiting[0][1]})"
    return ""


def _is_library(frame: Frame) -> bool:
    return any(part in frame.file for part in ("/site-packages/", "/lib/python", "<frozen", "<string>"))


def _at(state: RankState) -> str:
    return f", in {state.place}" if state.place else ""


def _names(states: Sequence[RankState]) -> str:
    shown = ", ".join(state.name for state in states[:4])
    return shown + (f" and {len(states) - 4} more" if len(states) > 4 else "")


# What is kept.


def diagnose(
    folder: RunFolder, states: Mapping[int, RankState], culprits: Sequence[int], title: str
) -> tuple[list[RankState], list[RankState], str, Path | None]:
    """The states of ``culprits`` and of the others with their stacks, the likely cause, the file that has all of it."""
    states = collect_stacks(folder, states)
    behind, others = [states[rank] for rank in culprits], [one for rank, one in states.items() if rank not in culprits]
    free = None
    with contextlib.suppress(OSError):
        free = shutil.disk_usage(nearest_folder(folder.path)).free
    cause = find_cause(behind, others, free)
    return behind, others, cause, keep(folder, title, cause, [*behind, *others])


def keep(folder: RunFolder, title: str, cause: str, states: Iterable[RankState]) -> Path | None:
    """Writes all that is known to ``logs/hang-N.txt``; returns it, or None where it cannot be written."""
    lines = [time.strftime("%Y-%m-%d %H:%M:%S"), title, f"likely cause: {cause}", ""]
    for state in states:
        lines += [str(state), *(f"  process {child.pid}: {child.state}" for child in state.children)]
        if state.stacks.collectives:
            lines.append("  last collectives, the newest last:")
            lines += [f"    {one}, {'done' if one.done else 'not done'}" for one in state.stacks.collectives]
        for name, frames in state.stacks.threads.items():
            lines.append(f"  thread {name}, innermost call first:")
            lines += [f"    {frame.function}  {frame.file}:{frame.line}" for frame in frames]
        lines += state.stacks.text.splitlines()
        if state.beat and not state.stacks.threads and not state.stacks.text:
            lines.append("  no stacks: it did not answer (py-spy, where installed, reads them of a stopped process)")
        lines.append("")
    try:
        folder.logs.mkdir(parents=True, exist_ok=True)
        path = folder.hang_file()
        path.write_text("\n".join(lines), encoding="utf-8")
    except OSError:
        return None
    return path


@dataclass(frozen=True)
class Examination:
    lines: tuple[str, ...]
    stands_still: bool


def examine(folder: RunFolder, *, look_s: float = LOOK_S, still_s: float = STILL_S) -> Examination:
    """UserError where the folder has no run."""
    timeout_s = folder.read_config().parallel.timeout_s
    before = read_beats(folder)
    if (found := _find_no_rank(folder, before)) is not None:
        return found
    time.sleep(look_s)
    beats = read_beats(folder)
    if (found := _find_no_rank(folder, beats)) is not None:  # it has ended meanwhile, or is started again
        return found
    try:
        ranks = list(range(folder.read_plan().layout.world_size))
    except UserError:
        ranks = sorted(beats)
    states = {rank: _state(rank, before.get(rank), beats.get(rank), look_s) for rank in ranks}
    living = {rank: state for rank, state in states.items() if not (state.beat and state.beat.done)}
    if not living:
        return Examination((f"{folder.path}: all ranks are done",), stands_still=False)
    least = min(_position(state) for state in living.values())
    behind = [rank for rank, state in living.items() if _position(state) == least]
    gone = [rank for rank, state in living.items() if state.process == GONE]
    waited_s = min(living[rank].still_s for rank in behind)
    if waited_s < still_s and not gone:
        lines = [
            f"{folder.path} is making progress: {living[behind[0]].beat or 'starting'}",
            *map(str, states.values()),
        ]
        return Examination(tuple(lines), stands_still=False)
    return _explain(folder, living, gone or behind, timeout_s)


def _find_no_rank(folder: RunFolder, beats: Mapping[int, Beat]) -> Examination | None:
    """Why no rank is at work; None where some are, or should be."""
    status, restarts = folder.read_status(), read_rows(folder.restarts)
    state = str(status.get("state", "running" if beats else "planned"))
    reason = status.get("reason") or status.get("error")
    if was_killed(folder, status, beats):
        state = "killed"
    elif state == "running" and len(restarts) > status.get("restarts", 0):  # counted when the next attempt begins
        state, reason = "restarting", restarts[-1].get("cause")
    # Of a launch that has failed or was killed the heartbeats stay.
    elif beats and (state == "running" or any(lives(folder, beat) for beat in beats.values() if not beat.done)):
        return None
    why = f" ({reason})" if reason else ""
    what = "its ranks are starting" if state == "running" else "no rank is at work"
    return Examination((f"{folder.path}: {state}{why}; {what}",), stands_still=False)


def _explain(folder: RunFolder, living: dict[int, RankState], culprits: list[int], timeout_s: float) -> Examination:
    who, has = ", ".join(living[rank].name for rank in culprits[:8]), "has" if len(culprits) == 1 else "have"
    what = f"{who} {has} made no progress for {living[culprits[0]].still_s:.0f} s"
    behind, others, cause, kept = diagnose(folder, living, culprits, what)
    stack = behind[0].stacks.main[:FRAMES]
    lines = [
        f"{folder.path}: {what}; the run is ended after {timeout_s:g} s (parallel.timeout_s)",
        f"likely cause: {cause}",
        *(f"  {state}" for state in (*behind, *others)),
    ]
    if stack:
        lines.append(f"the main thread of {behind[0].name}, innermost call first:")
        lines += [f"  {frame.function}  {frame.file}:{frame.line}" for frame in stack]
    lines += [f"the stacks and last collectives of all ranks: {kept}"] if kept else []
    return Examination(tuple(lines), stands_still=True)


def _state(rank: int, before: Beat | None, now: Beat | None, look_s: float) -> RankState:
    if now is None:
        return RankState(rank, f"rank {rank}")
    still_s = 0.0
    if before is not None and (before.beat, before.position) == (now.beat, now.position):
        # The clock of another machine is another one: there the time between two looks is all that is known.
        still_s = time.monotonic() - now.beat if now.host == this_host() else look_s
    is_stuck = before is not None and before.tick == now.tick and look_s > 2 * TICK_S
    return look_at_process(RankState(rank, f"rank {rank}", now, still_s, is_stuck))


def _position(state: RankState) -> tuple[int, ...]:
    return state.beat.position if state.beat is not None else ()
