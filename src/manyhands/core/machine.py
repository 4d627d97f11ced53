"""Cores and memory within container limits, GPU architectures, and a parent's end. Knows no driver or torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

CGROUP = Path("/sys/fs/cgroup")
PR_SET_PDEATHSIG = 1  # linux/prctl.h

Vendor = Literal["nvidia", "amd"]
# MI100 and newer, RDNA 3 and 4. RDNA 1 and 2 (gfx10) compute bfloat16 as float32.
AMD_WITH_BFLOAT16 = ("gfx908", "gfx90a", "gfx94", "gfx95", "gfx11", "gfx12")
AMD_WITH_PCIE_5 = ("gfx94", "gfx95", "gfx12")  # MI300 and newer, RDNA 4


@dataclass(frozen=True)
class GpuArchitecture:
    """What a GPU can compute, by vendor and architecture: the one place that compares these.

    On AMD torch makes compute capabilities up: (9, 4) for gfx942, which is no Hopper. So ``capability`` is NVIDIA's
    alone, None where it is not known (a MIG slice does not say): then nothing is held against the GPU. ``gfx``: AMD's.
    """

    vendor: Vendor
    capability: tuple[int, int] | None = None
    gfx: str = ""

    @property
    def has_bfloat16(self) -> bool:
        if self.vendor == "amd":
            return not self.gfx or self.gfx.startswith(AMD_WITH_BFLOAT16)
        return self._is_at_least((8, 0))

    @property
    def has_varlen_attention(self) -> bool:
        """torch's varlen, which is FlashAttention 2. AMD's was never tried, and nothing tests it before it runs."""
        return self.vendor == "nvidia" and self._is_at_least((8, 0))

    @property
    def has_flash4(self) -> bool:
        """Hopper and Blackwell of data centers."""
        return self.vendor == "nvidia" and self.capability is not None and self.capability[0] in (9, 10)

    @property
    def is_hopper(self) -> bool:
        return self.vendor == "nvidia" and self.capability == (9, 0)

    @property
    def multiplies_fp8(self) -> bool:
        """In the formats that are used here, e4m3fn and e5m2. AMD's gfx94x has others (e4m3fnuz, e5m2fnuz)."""
        return self.vendor == "nvidia" and self._is_at_least((8, 9))

    @property
    def multiplies_fp8_groups(self) -> bool:
        """By ``torch._scaled_grouped_mm`` with a scale a row: Hopper's kernel alone is built."""
        return self.multiplies_fp8 and (self.capability is None or self.capability == (9, 0))

    @property
    def pcie_generation(self) -> int:
        """Of the link to the host that GPUs of this architecture have; the older one where they differ."""
        if self.vendor == "amd":
            return 5 if self.gfx.startswith(AMD_WITH_PCIE_5) else 4
        return 5 if self._is_at_least((9, 0)) else 4 if self._is_at_least((8, 0)) else 3

    def __str__(self) -> str:
        if self.vendor == "amd":
            return self.gfx or "an unknown architecture of AMD's"
        return (
            f"compute capability {'.'.join(map(str, self.capability))}" if self.capability else "an unknown capability"
        )

    def _is_at_least(self, capability: tuple[int, int]) -> bool:
        return self.capability is None or self.capability >= capability


def read_line(path: Path) -> str:
    """The text of a small file of the system without blanks around it, "" where it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def count_cores() -> int:
    """Cores this process may use: its affinity, and the container's quota if it is smaller."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = read_line(CGROUP / "cpu.max").split()
    if len(quota) == 2 and quota[0].isdecimal():
        cores = min(cores, max(1, int(quota[0]) // int(quota[1])))
    return cores


def memory_bytes() -> tuple[int, int]:
    """Total and free bytes: the host's, or the container's where its limit is nearer. Page cache counts as free."""
    host = psutil.virtual_memory()
    limit, used = read_line(CGROUP / "memory.max"), read_line(CGROUP / "memory.current")
    if not limit.isdecimal() or not used.isdecimal():
        return int(host.total), int(host.available)
    pairs = (line.split() for line in read_line(CGROUP / "memory.stat").splitlines())
    stat = {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}
    free = int(limit) - int(used) + stat.get("inactive_file", 0)
    return min(int(host.total), int(limit)), max(0, min(int(host.available), free))


def end_with(parent: int, number: int) -> bool:
    """Sends ``number`` to this process when the thread that started it ends (Linux). False if ``parent`` has ended."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    return os.getppid() == parent
