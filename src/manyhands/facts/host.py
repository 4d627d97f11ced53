"""This machine: its GPUs as CUDA would number them, its cores and its memory. Asks NVML, never CUDA: no context is
made.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.core.files import nearest_folder
from manyhands.core.machine import count_cores, memory_bytes
from manyhands.facts.types import GpuFacts, HostFacts


def read_host_facts(environ: Mapping[str, str] = os.environ) -> HostFacts:
    """GPUs that ``CUDA_VISIBLE_DEVICES`` leaves visible (none without a driver), cores and memory of this process's
    share.
    """
    memory, free = memory_bytes()
    return HostFacts(
        gpus=_gpus(environ.get("CUDA_VISIBLE_DEVICES")),
        num_cores=count_cores(),
        memory_bytes=memory,
        free_memory_bytes=free,
    )


def free_disk_bytes(folder: Path) -> int | None:
    """What may be written into a run's folder, which need not exist: its earlier checkpoints and results make room for
    new ones.

    None where the file system does not say: some network drivers answer with zeros.
    """
    usage = shutil.disk_usage(nearest_folder(folder))
    if usage.total == 0:
        return None
    replaced = 0
    for path in (path for name in ("checkpoints", "model", "adapter", "merged") for path in (folder / name).rglob("*")):
        with contextlib.suppress(OSError):  # a run beside this one may just remove it
            replaced += path.stat().st_size if path.is_file() else 0
    return usage.free + replaced


def select_visible(visible: str | None, uuids: list[str]) -> list[int]:
    """Indices into ``uuids`` that ``CUDA_VISIBLE_DEVICES=visible`` leaves, in its order.

    As CUDA reads it: indices or (the start of) UUIDs; everything from the first entry that names no GPU on is ignored.
    """
    if visible is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdecimal():
            hits = [int(entry)] if int(entry) < len(uuids) else []
        else:
            hits = [index for index, uuid in enumerate(uuids) if entry and uuid.lower().startswith(entry.lower())]
        if len(hits) != 1 or hits[0] in chosen:
            break
        chosen += hits
    return chosen


def _gpus(visible: str | None) -> tuple[GpuFacts, ...]:
    # NVML numbers GPUs by bus; CUDA by speed, unless CUDA_DEVICE_ORDER=PCI_BUS_ID. Among equal GPUs both are the same.
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        if visible and visible.strip().upper().startswith("MIG-"):
            handles = _mig_handles(visible)
        else:
            chosen = select_visible(visible, [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles])
            handles = [handles[index] for index in chosen]
        return tuple(_gpu(index, handle) for index, handle in enumerate(handles))
    except pynvml.NVMLError:
        return ()
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _mig_handles(visible: str) -> list[Any]:
    import pynvml

    return [pynvml.nvmlDeviceGetHandleByUUID(entry.strip()) for entry in visible.split(",")]


def _gpu(index: int, handle: Any) -> GpuFacts:
    import pynvml

    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    capability = None
    with contextlib.suppress(pynvml.NVMLError):  # a MIG slice does not say
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        capability = (int(major), int(minor))
    name = _text(pynvml.nvmlDeviceGetName(handle))
    return GpuFacts(
        index=index,
        name=name,
        memory_bytes=int(memory.total),
        free_bytes=int(memory.free),
        compute_capability=capability,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
