"""AMD's GPUs as HIP numbers them, from amd-smi or torch in a process. Tested on recorded output alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.core.errors import UserError
from manyhands.core.machine import read_line
from manyhands.facts.gpu_kinds import MIB, kind_of
from manyhands.facts.types import GpuFacts
from manyhands.facts.visible import select_amd

TOOL_TIMEOUT_S, PROBE_TIMEOUT_S = 20.0, 120.0
MIN_DISCRETE_BYTES = 4 * 2**30  # graphics in a processor take 0.5 to 2 GiB of its memory, if nobody sets more
# Graphics in processors; the rest of such a machine is no machine for training.
INTEGRATED = (
    *("gfx902", "gfx909", "gfx90c", "gfx1013", "gfx1033", "gfx1035", "gfx1036", "gfx1037"),
    *("gfx1103", "gfx1150", "gfx1151", "gfx1152", "gfx1153"),
)
PROBE = """
import json, torch
found = []
for index in range(torch.cuda.device_count()):
    gpu, free = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)[0]
    found.append({"name": gpu.name, "gfx": getattr(gpu, "gcnArchName", ""), "total": gpu.total_memory, "free": free})
print(json.dumps(found))
"""

Run = Callable[[Sequence[str], float], str]  # command and seconds -> standard output; OSError or ValueError if it fails


@dataclass(frozen=True)
class AmdGpu:
    """``uuid`` is ROCm's, ``GPU-`` and 16 hexadecimal digits, empty where it is not known."""

    name: str
    gfx: str
    memory_bytes: int
    used_bytes: int
    uuid: str = ""

    @property
    def is_integrated(self) -> bool:
        return self.gfx in INTEGRATED or self.memory_bytes < MIN_DISCRETE_BYTES


@dataclass
class AmdSearch:
    """What was found, and why each source that was asked gave nothing."""

    gpus: tuple[GpuFacts, ...] = ()
    num_hidden: int = 0  # GPUs that the user's variables leave out
    reasons: list[str] = field(default_factory=list)


def run_tool(command: Sequence[str], timeout_s: float) -> str:
    """Standard output of a tool. ValueError with its last line if it fails, OSError if it cannot be started."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"no answer within {timeout_s:.0f} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise ValueError(lines[-1][:200] if lines else f"exit code {done.returncode}")
    return done.stdout


def find_amd_gpus(
    environ: Mapping[str, str] = os.environ, root: Path = Path("/"), run: Run = run_tool, *, probes: bool = True
) -> AmdSearch:
    """The GPUs that a HIP program would see, but for integrated graphics. UserError if variables contradict each other.

    ``root``: where ``dev`` and ``sys`` are. ``probes``: ask torch, in a process of its own, if nothing else answers.
    """
    search = AmdSearch()
    kfd = root / "dev/kfd"
    if kfd.exists() and not os.access(kfd, os.R_OK | os.W_OK):
        search.reasons.append("no permission to open /dev/kfd")
    readers: list[tuple[str, Callable[[Run], list[AmdGpu]]]] = []
    if shutil.which("amd-smi", path=environ.get("PATH")):
        readers.append(("amd-smi", read_amd_smi))
    if probes and kfd.exists():
        readers.append(("torch", probe))
    for name, read in readers:
        try:
            found = read(run)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            search.reasons.append(f"{name}: {error or type(error).__name__}")
            continue
        if found:
            # torch sees what the variables leave
            chosen = select_amd(environ, [gpu.uuid for gpu in found]) if name == "amd-smi" else range(len(found))
            search.gpus = _leave_integrated_out([found[index] for index in chosen])
            search.num_hidden = len(found) - len(chosen)
            break
    return search


def _leave_integrated_out(gpus: list[AmdGpu]) -> tuple[GpuFacts, ...]:
    discrete = [index for index, gpu in enumerate(gpus) if not gpu.is_integrated]
    if discrete and discrete != list(range(len(discrete))):
        raise UserError(
            "HIP numbers a processor's integrated graphics before a GPU",
            where=", ".join(f"{index}: {gpu.name} ({gpu.gfx})" for index, gpu in enumerate(gpus)),
            why="rank 0 would train on the first of them",
            fix=f"set HIP_VISIBLE_DEVICES={','.join(map(str, discrete))}",
        )
    return tuple(
        GpuFacts(
            index=index,
            name=gpu.name,
            memory_bytes=gpu.memory_bytes,
            free_bytes=max(0, gpu.memory_bytes - gpu.used_bytes),
            vendor="amd",
            gfx=gpu.gfx,
        )
        for index, gpu in enumerate(gpus[: len(discrete)])
    )


def find_amd_nodes(root: Path) -> list[str]:
    """Device nodes of AMD's GPUs with memory of their own, usable or not."""
    nodes = []
    for path in sorted((root / "dev/dri").glob("renderD*")):
        device = root / "sys/class/drm" / path.name / "device"
        memory = read_line(device / "mem_info_vram_total")
        if read_line(device / "vendor") == "0x1002" and not (memory.isdecimal() and int(memory) < MIN_DISCRETE_BYTES):
            nodes.append(f"/dev/dri/{path.name}")
    return nodes


def read_amd_smi(run: Run) -> list[AmdGpu]:
    """From ``amd-smi list``, ``static`` and ``metric``; the list of GPUs is the answer, or ``gpu_data`` in it."""
    listed, static, metric = (
        {entry["gpu"]: entry for entry in (answer["gpu_data"] if isinstance(answer, dict) else answer)}
        for command in (("list",), ("static", "--asic", "--vram"), ("metric", "--mem-usage"))
        for answer in [_first_json(run(["amd-smi", *command, "--json"], TOOL_TIMEOUT_S))]
    )
    gpus = []
    nodes: dict[int, Any] = {number: listed.get(number, {}).get("node_id") for number in static}
    known = all(isinstance(node, int) for node in nodes.values())
    for number in sorted(static, key=lambda number: nodes[number] if known else number):
        asic, vram = _section(static[number], "asic"), _section(static[number], "vram")
        usage = _section(metric.get(number, {}), "mem_usage")
        memory = _mib(usage.get("total_vram", "N/A")) or _mib(vram.get("size", vram.get("size_mb", "N/A")))
        if not memory:
            raise ValueError(f"it does not say how much memory GPU {number} has")
        serial = str(asic.get("asic_serial", "")).removeprefix("0x").lower()
        name, gfx = str(asic.get("market_name", "N/A")), str(asic.get("target_graphics_version", "N/A"))
        gfx = gfx if gfx.startswith("gfx") else ""
        gpus.append(
            AmdGpu(
                name=name if name != "N/A" else f"AMD {gfx}".strip(),
                gfx=gfx or (kind.gfx if (kind := kind_of(name)) else ""),
                memory_bytes=memory * MIB,
                used_bytes=_mib(usage.get("used_vram", "N/A")) * MIB,
                uuid=f"GPU-{serial:0>16}" if re.fullmatch("[0-9a-f]+", serial) else "",
            )
        )
    return gpus


def probe(run: Run) -> list[AmdGpu]:
    """From torch in a process of its own, which sees what the variables leave."""
    found = _first_json(run([sys.executable, "-c", PROBE], PROBE_TIMEOUT_S))
    return [AmdGpu(gpu["name"], gpu["gfx"].split(":")[0], gpu["total"], gpu["total"] - gpu["free"]) for gpu in found]


def _section(entry: dict[str, Any], name: str) -> dict[str, Any]:
    """One field of a GPU; empty for ``"N/A"``."""
    part = entry.get(name)
    return part if isinstance(part, dict) else {}


def _first_json(text: str) -> Any:
    """The first JSON value in ``text``; tools write warnings before it."""
    for begin in re.finditer(r"[\[{]", text):
        try:
            return json.JSONDecoder().raw_decode(text[begin.start() :])[0]
        except ValueError:
            continue
    raise ValueError("its answer is not JSON")


def _mib(value: Any) -> int:
    """``65520``, or ``{"value": 65520, "unit": "MB"}``, where MB means MiB and GB GiB; 0 for N/A."""
    if isinstance(value, dict):
        factor = 1024 if str(value.get("unit", "MB")).upper().startswith("G") else 1
        return factor * _mib(value.get("value", "N/A"))
    return int(value) if isinstance(value, int | float) or str(value).isdecimal() else 0
