"""Numbers with their units, as messages show them. Knows nothing but text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from manyhands.core.limits import GIB

BARS = "▁▂▃▄▅▆▇█"


def format_gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def compare_gib(one: int, other: int) -> list[str]:
    """``25.3 GiB`` and ``24.0 GiB``, with as many decimals as tell the two apart, 4 at most."""
    pairs = [[f"{size / GIB:.{digits}f} GiB" for size in (one, other)] for digits in range(1, 5)]
    return next((pair for pair in pairs if pair[0] != pair[1]), pairs[-1])


def format_size(size: int) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"


def format_duration(seconds: float) -> str:
    """``42 s``, ``12 min``, ``3.4 h``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def describe_ranks(device: str, world_size: int) -> str:
    one, many = ("GPU", "GPUs") if device == "cuda" else ("process", "processes")
    return f"{world_size} {one if world_size == 1 else many}"


def count_of(number: int, noun: str, plural: str = "") -> str:
    """``1 sample``, ``1,024 samples``; ``plural`` where it is not the noun and an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def format_share(share: float) -> str:
    """In per cent; with a decimal between 90 and 100 %, where it matters."""
    return f"{share:.{0 if share <= 0.9 or share == 1 else 1}%}"


def describe_counts(counts: Mapping[str, int], noun: str = "samples") -> str:
    """The sum of counts by source, and each where there are several: ``12 samples (a 8, b 4)``."""
    each = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    total = sum(counts.values())
    return f"{total:,} {noun.removesuffix('s') if total == 1 else noun}" + (f" ({each})" if each else "")


def draw_line(values: Sequence[float | None]) -> str:
    """One character a value, its height between the least and the largest; a blank where there is none."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    least, span = min(known), max(known) - min(known)
    heights = [
        None if value is None else round((value - least) / span * (len(BARS) - 1)) if span else 0 for value in values
    ]
    return "".join(" " if height is None else BARS[height] for height in heights)
