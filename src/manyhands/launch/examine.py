"""``manyhands doctor --run``: what a live run does, or waits for if it stands still. Ends nothing. Knows no torch."""

from __future__ import annotations

import time
from dataclasses import dataclass

from manyhands.core.errors import UserError
from manyhands.launch import hang
from manyhands.launch.hang import RankState
from manyhands.launch.heartbeat import TICK_S, Beat, read_beats, this_host
from manyhands.launch.run_folder import RunFolder

LOOK_S = 3.0  # between two looks, several ticks
STILL_S = 10.0  # without progress: worth a closer look; long steps take longer, which the text says
FRAMES = 12  # of the stack that is printed


@dataclass(frozen=True)
class Examination:
    lines: tuple[str, ...]
    stands_still: bool


def examine(folder: RunFolder, *, look_s: float = LOOK_S, still_s: float = STILL_S) -> Examination:
    """UserError where the folder has no run."""
    timeout_s = folder.read_config().parallel.timeout_s
    status = folder.read_status()
    before = read_beats(folder)
    if not before:
        reason = status.get("reason") or status.get("error")
        state = f"{folder.path}: {status.get('state', 'planned')}" + (f" ({reason})" if reason else "")
        return Examination((f"{state}; no rank is at work",), stands_still=False)
    time.sleep(look_s)
    beats = read_beats(folder) or before
    states = {
        rank: _state(folder, rank, before.get(rank), beats.get(rank), look_s) for rank in _all_ranks(folder, beats)
    }
    living = {rank: state for rank, state in states.items() if not (state.beat and state.beat.done)}
    if not living:
        return Examination((f"{folder.path}: all ranks are done",), stands_still=False)
    least = min(_position(state) for state in living.values())
    behind = [rank for rank, state in living.items() if _position(state) == least]
    gone = [rank for rank, state in living.items() if state.process == hang.GONE]
    waited_s = min(living[rank].still_s for rank in behind)
    if waited_s < still_s and not gone:
        lines = [f"{folder.path} goes on: {living[behind[0]].beat or 'starting'}", *map(str, states.values())]
        return Examination(tuple(lines), stands_still=False)
    return _explain(folder, living, gone or behind, timeout_s)


def _explain(folder: RunFolder, living: dict[int, RankState], culprits: list[int], timeout_s: float) -> Examination:
    states = hang.look_closer(folder, living)
    behind, others = [states[r] for r in culprits], [state for r, state in states.items() if r not in culprits]
    cause = hang.find_cause(behind, others, hang.free_bytes(folder))
    who = ", ".join(state.name for state in behind[:8])
    what = f"{who} {'has' if len(behind) == 1 else 'have'} made no progress for {behind[0].still_s:.0f} s"
    kept = hang.keep(folder, what, cause, [*behind, *others])
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


def _all_ranks(folder: RunFolder, beats: dict[int, Beat]) -> list[int]:
    try:
        return list(range(folder.read_plan().layout.world_size))
    except UserError:
        return sorted(beats)


def _state(folder: RunFolder, rank: int, before: Beat | None, now: Beat | None, look_s: float) -> RankState:
    if now is None:
        return RankState(rank, f"rank {rank}")
    still_s = 0.0
    if before is not None and (before.beat, before.position) == (now.beat, now.position):
        # The clock of another machine is another one: there the time between two looks is all that is known.
        still_s = time.monotonic() - now.beat if now.host == this_host() else look_s
    is_stuck = before is not None and before.tick == now.tick and look_s > 2 * TICK_S
    return hang.look_at_process(RankState(rank, f"rank {rank}", now, still_s, is_stuck))


def _position(state: RankState) -> tuple[int, ...]:
    return state.beat.position if state.beat is not None else ()
