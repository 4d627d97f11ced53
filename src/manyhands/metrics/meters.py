"""Reads one rank's device: memory in use, its peak, utilization. Knows neither model nor run."""

from __future__ import annotations

import math
import resource
import sys

import psutil
import torch

RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024  # of getrusage's ru_maxrss


class Meter:
    """The meter of this rank's device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._handle = _find_nvml_handle(device) if device.type == "cuda" else None

    def read(self) -> dict[str, float]:
        """Numbers only, the same keys on every rank, so that they can be gathered as one tensor.

        ``memory_allocated_bytes`` and ``peak_bytes``: held by tensors on a GPU, now and at most since the peak was last
        reset (caches and the CUDA context not included); on a CPU the process's resident memory, now and at most.
        ``utilization``: share in [0, 1] of the last sampling period (some 0.2 to 1 s, see
        nvmlDeviceGetUtilizationRates) in which a kernel ran; nan where nothing can tell.
        """
        if self.device.type == "cuda":
            allocated, peak = torch.cuda.memory_allocated(self.device), torch.cuda.max_memory_allocated(self.device)
        else:
            allocated = psutil.Process().memory_info().rss
            peak = max(allocated, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT_BYTES)
        return {
            "memory_allocated_bytes": float(allocated),
            "peak_bytes": float(peak),
            "utilization": self._read_utilization(),
        }

    def _read_utilization(self) -> float:
        if self._handle is None:
            return math.nan
        import pynvml

        try:
            return float(pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100
        except pynvml.NVMLError:
            return math.nan


def _find_nvml_handle(device: torch.device) -> object | None:
    """By UUID, because NVML counts all GPUs of the host and CUDA only the visible ones. None where NVML cannot help."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except (AttributeError, pynvml.NVMLError):
        return None
