"""The speed table from raw rows: which rows count, what is open, ratios within one run, and the check against stored
ones. Pure.
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers import GOALS
from manyhands.bench.rows import BenchRow

OURS = "manyhands"
PEERS = ("trl", "trl-packing", "unsloth")
FLOOR = 1.05  # of the best peer in the same run
TOLERANCE = 0.05  # a ratio may fall by this share before the check fails
NOT_OURS = ("by_hand", "lengths", "limit_gib", "layers")  # what makes a row of ours another piece of work

Stored = dict[str, Any]


def of_row(stored: list[Stored], row: BenchRow) -> list[Stored]:
    """Stored rows of this one, not those of another shape, length or number of rows."""
    return [
        r
        for r in stored
        if r.get("row") == row.name
        and all(r.get(key, getattr(row, key)) == getattr(row, key) for key in ("shape", "length", "rows"))
    ]


def side_of(stored: Stored) -> str:
    """Whose row it is. Ours is what our plan made alone, under whatever label; with keys set by hand, other lengths,
    fewer layers or a limited memory it is nobody's.
    """
    if "planned_gib" not in stored:
        return str(stored.get("label"))
    return "" if any(stored.get(key) for key in NOT_OURS) else OURS


def measured(stored: list[Stored], row: BenchRow, side: str, num_gpus: int | None = None) -> list[Stored]:
    """Rows of one side that have a speed, in the order in which they were stored."""
    return [
        r
        for r in of_row(stored, row)
        if side_of(r) == side and not r.get("failure") and r.get("tokens_per_s_gpu") and num_gpus in (None, r["gpus"])
    ]


def newest(stored: list[Stored], row: BenchRow, side: str) -> Stored | None:
    found = measured(stored, row, side)
    return found[-1] if found else None


def is_measured(stored: list[Stored], row: BenchRow, sides: list[str], num_gpus: int) -> bool:
    """Whether one run has measured all these sides on so many GPUs: ratios hold within one run alone."""
    runs = [{r["run"] for r in measured(stored, row, side, num_gpus) if r.get("run")} for side in sides]
    return bool(set.intersection(*runs))


def best_peer(stored: list[Stored], row: BenchRow) -> Stored | None:
    """The fastest peer of the run that our newest row is of, on as many GPUs. A row that names no run proves
    nothing.
    """
    ours = newest(stored, row, OURS)
    if ours is None or not ours.get("run"):
        return None
    beside = [r for side in PEERS for r in measured(stored, row, side, ours["gpus"]) if r.get("run") == ours["run"]]
    return max(beside, key=lambda r: float(r["tokens_per_s_gpu"]), default=None)


def ratio(stored: list[Stored], row: BenchRow) -> float | None:
    """Ours by the best peer's, where both were measured in one run on as many GPUs."""
    ours, peer = newest(stored, row, OURS), best_peer(stored, row)
    return float(ours["tokens_per_s_gpu"] / peer["tokens_per_s_gpu"]) if ours and peer else None


def print_table(stored: list[Stored], rows: list[BenchRow]) -> None:
    print("\n| row | GPUs | ours, tokens/s a GPU | best peer, same run | ratio | goal | peak GiB | smallest GPU, GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        ours, peer = newest(stored, row, OURS), best_peer(stored, row)
        if ours is None:
            print(f"| {row.what} | {row.gpus} | open | | | {show_goal(row)} | | {show_smallest(stored, row)} |")
            continue
        theirs = f"{peer['label']} {peer['tokens_per_s_gpu']:,}" if peer else "open"
        print(
            f"| {row.what} | {ours['gpus']} | {ours['tokens_per_s_gpu']:,} | {theirs} | "
            f"{show_ratio(ratio(stored, row))} | {show_goal(row)} | "
            f"{ours.get('peak_allocated_gib')} | {show_smallest(stored, row)} |"
        )


def show_goal(row: BenchRow) -> str:
    """Rows beside another of ours, such as DeepSpeed's, have none."""
    return f"{GOALS[row.name]:,}" if row.name in GOALS else ""


def show_smallest(stored: list[Stored], row: BenchRow) -> str:
    ran = [r["limit_gib"] for r in of_row(stored, row) if r.get("outcome") == "ran"]
    return f"{min(ran):.1f}" if ran else ""


def show_ratio(against: float | None) -> str:
    if against is None:
        return ""
    return f"{against:.2f}" + (f", below {FLOOR}" if against < FLOOR else "")


def check(stored: list[Stored], before: list[Stored], rows: list[BenchRow]) -> int:
    """Exit code 1 where a ratio to the best peer fell, or none can be compared: machines differ, ratios within one run
    hardly do.

    Compared are rows that both files have beside the same peer's, on as many GPUs: beside another best peer a ratio
    means another thing.
    """
    fallen = compared = 0
    for row in rows:
        ours, others = newest(stored, row, OURS), newest(before, row, OURS)
        peer, their_peer = best_peer(stored, row), best_peer(before, row)
        if not (ours and others and peer and their_peer) or ours["gpus"] != others["gpus"]:
            continue
        if peer["label"] != their_peer["label"]:
            print(f"{row.name}: not compared, the best peer is {peer['label']} and was {their_peer['label']}")
            continue
        compared += 1
        now, then = ratio(stored, row) or 0.0, ratio(before, row) or 0.0
        if now < then * (1 - TOLERANCE):
            fallen += 1
            print(f"{row.name}: {now:.2f} of {peer['label']}, was {then:.2f}")
    print(f"{compared} ratios compared, {fallen} fell by more than {TOLERANCE:.0%}")
    return 1 if fallen or not compared else 0
