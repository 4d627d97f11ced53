"""This machine: its GPUs as CUDA or HIP would number them, its cores and its memory. Asks drivers, never CUDA or HIP:
no context is made. GPUs that are there and cannot be used are named, with the reason.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from manyhands.core.files import count_bytes, nearest_folder
from manyhands.core.limits import FEATURES_FOLDER
from manyhands.core.machine import count_cores, memory_bytes, read_line
from manyhands.facts.amd import AmdSearch, find_amd_gpus, find_amd_nodes
from manyhands.facts.gpu_kinds import kind_of_all, read_calibration
from manyhands.facts.types import GpuFacts, HostFacts, UnusableGpus
from manyhands.facts.visible import AMD_VARIABLES, hides_all, open_nvml, select_visible
from manyhands.families import installed_version

NVIDIA_VARIABLES = ("CUDA_VISIBLE_DEVICES",)
# GPUs that share the host's memory, DGX Spark's and Jetson's: NVML does not say how much they have.
UNIFIED_MEMORY = re.compile(r"\b(GB10|Orin|Thor|Xavier|Tegra)\b")
TORCH_FIX = {
    "nvidia": "install a torch built for CUDA (pytorch.org, Get started)",
    "amd": "install a torch built for ROCm (pytorch.org, Get started)",
}


class NvidiaGpus(NamedTuple):
    """What NVML says: GPUs, those that are listed and do not answer, and why there are none."""

    gpus: tuple[GpuFacts, ...] = ()
    lost: tuple[str, ...] = ()
    why_none: str = ""


def read_host_facts(environ: Mapping[str, str] = os.environ, root: Path = Path("/")) -> HostFacts:
    """GPUs that the user's variables leave visible, cores and memory of this process's share.

    Where there are GPUs, none of them can be used, and not because the user hides them, ``unusable_gpus`` says why.
    ``root`` is where ``dev`` and ``sys`` are. UserError where variables contradict each other.
    """
    nvidia = _nvidia_gpus(environ.get("CUDA_VISIBLE_DEVICES"))
    gpus, unusable = find_gpus(nvidia, environ, root)
    memory, free = memory_bytes()
    return HostFacts(
        gpus=gpus,
        num_cores=count_cores(),
        memory_bytes=memory,
        free_memory_bytes=free,
        kind=kind_of_all(gpus) if gpus else None,
        calibration=read_calibration(gpus),
        unusable_gpus=unusable,
        has_flash4=bool(installed_version("flash-attn-4")),
        lost_gpus=nvidia.lost if gpus else (),
    )


def find_gpus(
    nvidia: NvidiaGpus, environ: Mapping[str, str], root: Path = Path("/")
) -> tuple[tuple[GpuFacts, ...], UnusableGpus | None]:
    """NVIDIA's GPUs, else AMD's; or none, and why none of those that are there can be used."""
    gpus, why_not = nvidia.gpus, nvidia.why_none
    probes = (root / "dev/kfd").exists() and torch_build() == "amd"
    search = AmdSearch() if gpus else find_amd_gpus(environ, root, probes=probes)
    gpus = gpus or search.gpus
    if gpus:
        build = torch_build()
        if build == gpus[0].vendor:
            return gpus, None
        found = f"{len(gpus)} × {gpus[0].name}"
        what = f"torch is built for {'CUDA' if build == 'nvidia' else 'ROCm' if build == 'amd' else 'the CPU alone'}"
        why = what if build is not None else "torch is not installed in this Python"
        return (), UnusableGpus(found=found, why=why, fix=TORCH_FIX[gpus[0].vendor])
    if (nodes := find_nvidia_nodes(root)) and not hides_all(environ, NVIDIA_VARIABLES):
        fix = "check the driver with `nvidia-smi`; in a container, start it with its GPUs and driver (--gpus all)"
        if visible := environ.get("CUDA_VISIBLE_DEVICES"):
            why_not, fix = why_not or f"CUDA_VISIBLE_DEVICES={visible} names none of them", f"unset it, or {fix}"
        return (), UnusableGpus(found=_list_nodes("NVIDIA", nodes), why=why_not or "the driver lists none", fix=fix)
    if (nodes := find_amd_nodes(root)) and not hides_all(environ, AMD_VARIABLES):
        return (), _explain_amd(nodes, search, environ, root)
    return (), None


def find_nvidia_nodes(root: Path) -> list[str]:
    """Device nodes of NVIDIA's GPUs, usable or not: those of its driver, else those of another driver (nouveau)."""
    nodes = sorted(path.name for path in (root / "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))
    if nodes:
        return [f"/dev/{name}" for name in nodes]
    renders = sorted((root / "dev/dri").glob("renderD*"))
    vendors = {path.name: root / "sys/class/drm" / path.name / "device/vendor" for path in renders}
    return [f"/dev/dri/{name}" for name, file in vendors.items() if read_line(file) == "0x10de"]


def torch_build() -> Literal["nvidia", "amd", "cpu"] | None:
    """``nvidia``, ``amd`` or ``cpu``, as torch's version.py says; None without torch. Does not import it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = read_line(Path(spec.origin).parent / "version.py")
    set_of = {name: re.search(rf"^{name}\b.*= *['\"]", text, re.MULTILINE) for name in ("hip", "cuda")}
    return "amd" if set_of["hip"] else "nvidia" if set_of["cuda"] else "cpu"


def _explain_amd(nodes: list[str], search: AmdSearch, environ: Mapping[str, str], root: Path) -> UnusableGpus:
    found = _list_nodes("AMD", nodes)
    given = ", ".join(f"{name}={environ[name]}" for name in AMD_VARIABLES if name in environ)
    if search.num_hidden or (given and not search.reasons):
        return UnusableGpus(found=found, why=f"{given} leaves none of {len(nodes)}", fix="unset it")
    if not (root / "dev/kfd").exists():
        why = "there is no /dev/kfd: the driver amdgpu is without ROCm's part, or this container has not got it"
        fix = "install ROCm's driver; start a container with --device /dev/kfd --device /dev/dri"
    elif any("permission" in reason for reason in search.reasons):
        why = "; ".join(search.reasons)
        fix = "join the groups that own these devices, usually render and video (sudo usermod -aG render,video $USER)"
    else:
        why = "; ".join(search.reasons) or "neither amd-smi nor torch lists them"
        fix = "check the driver with `amd-smi list`"
    if torch_build() != "amd":
        why, fix = f"{why}; torch is not built for ROCm", f"{fix}, and {TORCH_FIX['amd']}"
    return UnusableGpus(found=found, why=why, fix=fix)


def _list_nodes(vendor: str, nodes: list[str]) -> str:
    names = nodes[0] if len(nodes) == 1 else f"{nodes[0]} to {nodes[-1]}"
    return f"{len(nodes)} {vendor} GPU{'s' * (len(nodes) != 1)} ({names})"


def free_disk_bytes(folder: Path, *replaceable: str) -> int | None:
    """Bytes that may be written into a folder; ``replaceable`` ones make room. None where the disk does not say."""
    usage = shutil.disk_usage(nearest_folder(folder))
    if usage.total == 0:
        return None
    return usage.free + sum(count_bytes(folder / name) for name in replaceable)


def read_disks(run: Path, data_cache: str, num_images: int) -> dict[str, Any]:
    """What ``Facts`` say of the disks of a run's folder and, where it has images, of ``data.cache``: earlier
    checkpoints and results, and features that are kept already, make room for new ones.
    """
    free = {"free_disk_bytes": free_disk_bytes(run, "checkpoints", "model", "adapter", "merged")}
    if not num_images:
        return free
    cache = Path(data_cache).expanduser()
    shares = nearest_folder(run).stat().st_dev == nearest_folder(cache).stat().st_dev
    return free | {"free_cache_bytes": free_disk_bytes(cache, FEATURES_FOLDER), "shares_disk": shares}


def _nvidia_gpus(visible: str | None) -> NvidiaGpus:
    """The GPUs that NVML lists and ``CUDA_VISIBLE_DEVICES=visible`` leaves; or none, and what NVML says."""
    # NVML numbers GPUs by bus; CUDA by speed, unless CUDA_DEVICE_ORDER=PCI_BUS_ID. Among equal GPUs both are the same.
    import pynvml

    try:
        with open_nvml():
            if visible and visible.strip().upper().startswith("MIG-"):
                handles = [pynvml.nvmlDeviceGetHandleByUUID(entry.strip()) for entry in visible.split(",")]
                return NvidiaGpus(tuple(_gpu(index, handle) for index, handle in enumerate(handles)))
            found = [_open(index) for index in range(pynvml.nvmlDeviceGetCount())]
            chosen = [(index, *found[index]) for index in select_visible(visible, [uuid for _, uuid, _ in found])]
            gpus = tuple(_gpu(*pair) for pair in enumerate(handle for _, handle, _, why in chosen if not why))
            lost = tuple(f"GPU {index} does not answer (NVML: {why})" for index, _, _, why in chosen if why)
            return NvidiaGpus(gpus, lost, "; ".join(lost))
    except pynvml.NVMLError as error:
        return NvidiaGpus(why_none=f"NVML: {error}")


def _open(index: int) -> tuple[Any, str, str]:
    """NVML's handle of a GPU, its UUID, and what NVML says where the GPU is lost: it has fallen off the bus."""
    import pynvml

    handle, uuid = None, ""
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = _text(pynvml.nvmlDeviceGetUUID(handle))
        pynvml.nvmlDeviceGetName(handle)
    except pynvml.NVMLError_GpuIsLost as error:
        return handle, uuid, str(error)
    return handle, uuid, ""


def _gpu(index: int, handle: Any) -> GpuFacts:
    import pynvml

    name = _text(pynvml.nvmlDeviceGetName(handle))
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        total, free = int(memory.total), int(memory.free)
    except pynvml.NVMLError_NotSupported:
        if not UNIFIED_MEMORY.search(name):
            raise
        total, free = memory_bytes()
    capability = None
    with contextlib.suppress(pynvml.NVMLError):  # a MIG slice does not say
        major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
        capability = (int(major), int(minor))
    return GpuFacts(
        index=index,
        name=name,
        memory_bytes=total,
        free_bytes=free,
        compute_capability=capability,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
