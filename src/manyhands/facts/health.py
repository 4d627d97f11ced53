"""Whether this machine is fit to train: shared memory, limits of processes, errors and throttling of NVIDIA GPUs, and
how fast they are beside each other and beside their kind. Asks drivers, never CUDA; the judgments are pure functions.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from manyhands import families
from manyhands.core.units import format_gib
from manyhands.facts.types import Figure
from manyhands.facts.visible import open_nvml, select_visible

MIN_SHARED_BYTES = 2**28  # for each rank: NCCL's rings of a machine, and batches of data processes
MIN_FILES = 4096
MIN_LOCKED_BYTES = 2**26
MIN_DISK_BYTES = 2**30
PACKAGES = ("manyhands", "torch", "transformers", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
SLOW_BESIDE = 0.9  # of the median of all GPUs
SLOW_OF_KIND = {"measured": 0.75, "datasheet": 0.4}  # no kernel reaches a datasheet's peak
SLOW_LINK = 0.12  # of the datasheet's both directions: all-reduce over NVLink reaches some 0.25 to 0.4, over PCIe 0.03

# Bits of NVML's clock event reasons; a power limit that is reached under load is usual, and idle clocks are too.
THROTTLES = {
    0x8: "hardware slowdown (temperature or power)",
    0x20: "temperature (by the driver)",
    0x40: "temperature (by the hardware)",
    0x80: "power brake: the power supply asks for less",
}


# NVML's recovery actions without which the GPU is of no use; one that may wait for the program's end is not among them.
RECOVERIES = {1: "a reset of it", 2: "a restart of the machine", 6: "a reset of its bus", 7: "a restart of the machine"}


class HealthFinding(NamedTuple):
    state: Literal["ok", "warning", "bad"]
    text: str
    fix: str = ""


class GpuHealth(BaseModel):
    """What NVML says of a GPU; None for what it does not say."""

    model_config = ConfigDict(frozen=True)

    index: int
    name: str
    ecc_errors: int | None = None  # uncorrected, since the driver was loaded
    remap_pending: bool = False
    remap_failed: bool = False
    throttles: int = 0
    temperature_c: int | None = None
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    nvlinks: int | None = None  # active


class HostHealth(BaseModel):
    """Of one machine."""

    model_config = ConfigDict(frozen=True)

    name: str
    shared_bytes: int | None  # free in /dev/shm
    max_files: int  # RLIMIT_NOFILE, soft; -1: none
    max_locked_bytes: int  # RLIMIT_MEMLOCK, soft; -1: none
    free_disk_bytes: int | None  # where the run's folder is
    has_infiniband: bool = False
    gpus: tuple[GpuHealth, ...] = ()
    versions: dict[str, str] = {}


def read_health(name: str, folder: Path, root: Path = Path("/")) -> HostHealth:
    """Of this machine; ``folder`` is where a run writes."""
    return HostHealth(
        name=name,
        shared_bytes=_free(root / "dev/shm"),
        max_files=_limit(resource.RLIMIT_NOFILE),
        max_locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        free_disk_bytes=_free(folder),
        has_infiniband=any((root / "sys/class/infiniband").glob("*")),
        gpus=read_gpus(),
        versions={name: version for name in PACKAGES if (version := families.installed_version(name))},
    )


def read_gpus(environ: Mapping[str, str] = os.environ) -> tuple[GpuHealth, ...]:
    """Of NVIDIA's GPUs that ``CUDA_VISIBLE_DEVICES`` leaves; none without a driver, or of slices of one (MIG)."""
    import pynvml

    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible and visible.strip().upper().startswith("MIG-"):
        return ()
    with contextlib.suppress(pynvml.NVMLError), open_nvml():
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [uuid.decode() if isinstance(uuid, bytes) else uuid for uuid in map(pynvml.nvmlDeviceGetUUID, handles)]
        return tuple(_read_gpu(pynvml, index, handles[index]) for index in select_visible(visible, uuids))
    return ()


def find_lost(uuids: Sequence[str]) -> dict[str, str]:
    """NVIDIA's GPUs that the driver misses or calls lost, with its words. None where there is no driver."""
    import pynvml

    found: dict[str, str] = {}
    with contextlib.suppress(pynvml.NVMLError), open_nvml():
        for uuid in uuids:
            try:
                handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
                pynvml.nvmlDeviceGetName(handle)
                health = _read_gpu(pynvml, 0, handle)
                if health.remap_failed:
                    found[uuid] = "broken memory rows could not be replaced"
                elif needed := _read_recovery(pynvml, handle):
                    found[uuid] = f"the driver asks for {needed}"
            except (pynvml.NVMLError_NotFound, pynvml.NVMLError_GpuIsLost) as error:
                found[uuid] = f"NVML: {error}"
            except pynvml.NVMLError:  # not said of it: a slice of a GPU, an old driver
                continue
    return found


def _read_gpu(nvml: Any, index: int, handle: Any) -> GpuHealth:
    def ask(name: str, *arguments: Any) -> Any:
        """None where this GPU, driver or version of the library does not answer."""
        with contextlib.suppress(nvml.NVMLError, AttributeError):
            return getattr(nvml, name)(handle, *arguments)
        return None

    remapped = ask("nvmlDeviceGetRemappedRows") or (0, 0, 0, 0)
    reasons = ask("nvmlDeviceGetCurrentClocksEventReasons")
    reasons = ask("nvmlDeviceGetCurrentClocksThrottleReasons") if reasons is None else reasons
    links = [ask("nvmlDeviceGetNvLinkState", link) for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18))]
    known = [link for link in links if link is not None]
    name = nvml.nvmlDeviceGetName(handle)
    return GpuHealth(
        index=index,
        name=name.decode() if isinstance(name, bytes) else name,
        ecc_errors=ask(
            "nvmlDeviceGetTotalEccErrors",
            getattr(nvml, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1),
            getattr(nvml, "NVML_VOLATILE_ECC", 0),
        ),
        remap_pending=bool(remapped[2]),
        remap_failed=bool(remapped[3]),
        throttles=int(reasons or 0),
        temperature_c=ask("nvmlDeviceGetTemperature", getattr(nvml, "NVML_TEMPERATURE_GPU", 0)),
        pcie_width=ask("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_max_width=ask("nvmlDeviceGetMaxPcieLinkWidth"),
        nvlinks=sum(map(bool, known)) if known else None,
    )


def _read_recovery(nvml: Any, handle: Any) -> str:
    """What the driver asks for before the GPU is used again; "" for nothing, and where it does not say."""
    with contextlib.suppress(nvml.NVMLError, AttributeError):
        (field,) = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        return RECOVERIES.get(int(field.value.uiVal), "") if field.nvmlReturn == 0 else ""
    return ""


def _free(folder: Path) -> int | None:
    for place in (folder, *folder.absolute().parents):
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(place)
            return usage.free if usage.total else None
    return None


def _limit(which: int) -> int:
    soft = resource.getrlimit(which)[0]
    return -1 if soft == resource.RLIM_INFINITY else soft


# What it means.


def judge_host(health: HostHealth, num_ranks: int) -> Iterator[HealthFinding]:
    """What is wrong, or might be, with ``num_ranks`` ranks on the machine."""
    needed = MIN_SHARED_BYTES * num_ranks
    if health.gpus and num_ranks > 1 and health.shared_bytes is not None and health.shared_bytes < needed:
        text = (
            f"/dev/shm has {format_gib(health.shared_bytes)} free, and {num_ranks} ranks may need {format_gib(needed)}"
        )
        yield HealthFinding(
            "warning", text, "start the container with --shm-size=8g or --ipc=host, or remove files there"
        )
    if 0 <= health.max_files < MIN_FILES:
        text = f"a process may open {health.max_files:,} files (RLIMIT_NOFILE)"
        yield HealthFinding("warning", text, "ulimit -n 65536")
    if health.has_infiniband and 0 <= health.max_locked_bytes < MIN_LOCKED_BYTES:
        text = f"a process may lock {format_gib(health.max_locked_bytes)} of memory, and InfiniBand needs more"
        yield HealthFinding("warning", text, "ulimit -l unlimited (a container: --ulimit memlock=-1)")
    if health.free_disk_bytes is not None and health.free_disk_bytes < MIN_DISK_BYTES:
        yield HealthFinding(
            "warning", f"{format_gib(health.free_disk_bytes)} free where the run's folder is", "free space"
        )
    yield from judge_gpus(health.gpus)


def judge_gpus(gpus: Sequence[GpuHealth]) -> Iterator[HealthFinding]:
    """Errors and throttling of each GPU, and links that one has less of than the others."""
    most = max((gpu.nvlinks or 0 for gpu in gpus), default=0)
    for gpu in gpus:
        who = f"GPU {gpu.index} ({gpu.name})"
        if gpu.ecc_errors:
            text = f"{who} has had {gpu.ecc_errors} uncorrected memory errors (ECC) since its driver was loaded"
            yield HealthFinding(
                "warning", text, "reset it or restart the machine; if they come again, have it replaced"
            )
        if gpu.remap_failed:
            yield HealthFinding("bad", f"{who} could not replace broken memory rows", "have it replaced")
        elif gpu.remap_pending:
            text = f"{who} will replace broken memory rows at its next reset"
            yield HealthFinding("warning", text, "reset it before a long run (nvidia-smi -r, or restart the machine)")
        if causes := [text for bit, text in THROTTLES.items() if gpu.throttles & bit]:
            heat = f" at {gpu.temperature_c} °C" if gpu.temperature_c is not None else ""
            yield HealthFinding(
                "warning", f"{who} runs slower{heat}: {', '.join(causes)}", "check its cooling and power"
            )
        if gpu.pcie_width and gpu.pcie_max_width and gpu.pcie_width < gpu.pcie_max_width:
            text = f"{who} uses {gpu.pcie_width} of {gpu.pcie_max_width} PCIe lanes"
            yield HealthFinding("warning", text, "usual where the slot has no more; else it sits badly")
        if gpu.nvlinks is not None and gpu.nvlinks < most:
            text = f"{who} has {gpu.nvlinks} active NVLinks, others have {most}"
            yield HealthFinding("warning", text, "nvidia-smi nvlink -s; restart the fabric manager or the machine")


def judge_speed(tflops: Mapping[str, float], known: Figure | None, kind: str) -> Iterator[HealthFinding]:
    """GPUs by name with their bfloat16 matmul rates: those slower than the others, or all of them than their kind."""
    if not tflops:
        return
    usual = statistics.median(tflops.values())
    for name, rate in tflops.items():
        if rate < SLOW_BESIDE * usual:
            text = (
                f"{name} multiplies matrices at {rate:.0f} TFLOP/s, the others at {usual:.0f}: every step waits for it"
            )
            fix = "look for other programs on it, heat and power limits (nvidia-smi -q -d PERFORMANCE), or leave it out"
            yield HealthFinding("warning", text, fix)
    if known is None:
        return
    share = SLOW_OF_KIND["datasheet" if known.source.startswith("datasheet") else "measured"]
    if usual < share * known.value:
        text = f"the GPUs multiply matrices at {usual:.0f} TFLOP/s; {kind}: {known.value:g} ({known.source})"
        yield HealthFinding("warning", text, "look for power limits and clocks (nvidia-smi -q -d POWER,CLOCK)")


def judge_link(gb_s: float | None, known: Figure | None, kind: str) -> Iterator[HealthFinding]:
    """All-reduce between the GPUs of one machine against their link, both directions together."""
    if gb_s is not None and known is not None and gb_s < SLOW_LINK * known.value:
        text = f"all-reduce between the GPUs runs at {gb_s:.0f} GB/s; {kind}: {known.value:g} ({known.source})"
        yield HealthFinding(
            "warning", text, "nvidia-smi topo -m and nvlink -s show the links; NCCL_DEBUG=INFO what NCCL uses"
        )


def judge_versions(hosts: Sequence[HostHealth]) -> Iterator[HealthFinding]:
    """Packages that are not the same on all machines."""
    for name in sorted({name for host in hosts for name in host.versions}):
        by_version: dict[str, list[str]] = {}
        for host in hosts:
            by_version.setdefault(host.versions.get(name, "none"), []).append(host.name)
        if len(by_version) > 1:
            each = "; ".join(f"{version} on {', '.join(names)}" for version, names in by_version.items())
            yield HealthFinding(
                "warning", f"{name} is not the same everywhere: {each}", "install the same version everywhere"
            )
