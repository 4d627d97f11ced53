"""A launcher's memory for snapshots, for as long as a test lasts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from manyhands.core.segments import RankSegments
from manyhands.launch.neighbors import NodeMemory


@contextlib.contextmanager
def open_segments(num_local: int) -> Iterator[RankSegments | None]:
    """None where the system has none."""
    with contextlib.closing(NodeMemory()) as memory:
        memory.open(num_local, 0)
        yield memory.own
