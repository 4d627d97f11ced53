"""What this machine lets this process have: cores and memory, as its container limits them."""

from __future__ import annotations

import os
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def count_cores() -> int:
    """Cores this process may use: its affinity, and the container's quota if it is smaller."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _read(CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0].isdecimal():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def memory_bytes() -> tuple[int, int]:
    """Total and free bytes: the host's, or the container's where its limit is nearer. Page cache counts as free."""
    host = psutil.virtual_memory()
    limit, used = _read(CGROUP / "memory.max").strip(), _read(CGROUP / "memory.current").strip()
    if not limit.isdecimal() or not used.isdecimal():
        return int(host.total), int(host.available)
    pairs = (line.split() for line in _read(CGROUP / "memory.stat").splitlines())
    stat = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    free = int(limit) - int(used) + stat.get("inactive_file", 0)
    return min(int(host.total), int(limit)), max(0, min(int(host.available), free))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
