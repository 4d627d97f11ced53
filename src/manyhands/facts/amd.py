"""AMD's GPUs as HIP numbers them, from the kernel (KFD's topology and DRM in ``/sys``), else from amd-smi, rocm-smi, or
a process with torch. Makes no HIP context in this process. No machine with an AMD GPU has run this: it is tested on
recorded output of the tools and on trees of files like the kernel's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from manyhands.core.errors import UserError
from manyhands.facts.gpu_kinds import MIB, kind_of, load_kinds
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
    sources: list[tuple[str, Callable[[], list[AmdGpu]]]] = [("sysfs", lambda: read_sysfs(root))]
    tools: dict[str, Callable[[Run], list[AmdGpu]]] = {"amd-smi": read_amd_smi, "rocm-smi": read_rocm_smi}
    path = environ.get("PATH")
    sources += [(name, partial(read, run)) for name, read in tools.items() if shutil.which(name, path=path)]
    for name, source in sources:
        try:
            found = source()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            search.reasons.append(f"{name}: {error or type(error).__name__}")
            continue
        if found:
            chosen = select_amd(environ, [gpu.uuid for gpu in found])
            search.gpus = _leave_integrated_out([found[index] for index in chosen])
            search.num_hidden = len(found) - len(chosen)
            return search
    if probes and (root / "dev/kfd").exists():
        try:
            search.gpus = _leave_integrated_out(probe(run))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            search.reasons.append(f"torch: {error or type(error).__name__}")
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


# -- the sources: each gives all GPUs of the machine, in KFD's order, which is the runtime's; or raises


def read_sysfs(root: Path) -> list[AmdGpu]:
    """From KFD's nodes that compute and whose device this process may open. ValueError if one does not tell all.

    OSError where the devices may not be opened. A node of a partitioned GPU has no memory of its own here: ValueError.
    """
    gpus = []
    for node in sorted(_kfd_nodes(root), key=lambda path: int(path.name)):
        properties = _read_properties(node / "properties")
        if not int(properties.get("simd_count", 0)) or not int(properties.get("gfx_target_version", 0)):
            continue  # a processor
        render = f"renderD{properties.get('drm_render_minor', '')}"
        if not (root / "dev/dri" / render).exists():
            continue  # not given to this container
        _check_access(root / "dev/kfd")
        _check_access(root / "dev/dri" / render)
        device = root / "sys/class/drm" / render / "device"
        memory, used = (_read(device / f"mem_info_vram_{name}") for name in ("total", "used"))
        if not memory.isdecimal() or not used.isdecimal():
            raise ValueError(f"{render} does not say how much memory it has")
        gfx = gfx_of(int(properties["gfx_target_version"]))
        unique = int(properties.get("unique_id", 0))
        gpus.append(
            AmdGpu(
                name=_read(device / "product_name") or _name_by_size(gfx, int(memory)),
                gfx=gfx,
                memory_bytes=int(memory),
                used_bytes=int(used),
                uuid=f"GPU-{unique:016x}" if unique else "",
            )
        )
    return gpus


def gfx_of(version: int) -> str:
    """90402 -> gfx942, 90010 -> gfx90a: two digits each of major, minor and stepping; the last two as hexadecimal."""
    return f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}"


def find_amd_nodes(root: Path) -> list[str]:
    """Device nodes of AMD's discrete GPUs, usable or not; not of integrated graphics, nor of other vendors."""
    integrated = {
        f"renderD{properties.get('drm_render_minor', '')}"
        for properties in (_read_properties(node / "properties") for node in _kfd_nodes(root))
        if gfx_of(int(properties.get("gfx_target_version", 0))) in INTEGRATED
    }
    nodes = []
    for path in sorted((root / "dev/dri").glob("renderD*")):
        device = root / "sys/class/drm" / path.name / "device"
        memory = _read(device / "mem_info_vram_total")
        small = memory.isdecimal() and int(memory) < MIN_DISCRETE_BYTES
        if _read(device / "vendor") == "0x1002" and path.name not in integrated and not small:
            nodes.append(f"/dev/dri/{path.name}")
    return nodes


def read_amd_smi(run: Run) -> list[AmdGpu]:
    """From ``amd-smi list``, ``static`` and ``metric``; the list of GPUs is the answer, or ``gpu_data`` in it."""
    listed, static, metric = (
        {entry["gpu"]: entry for entry in _gpu_data(run(["amd-smi", *command, "--json"], TOOL_TIMEOUT_S))}
        for command in (("list",), ("static", "--asic", "--vram"), ("metric", "--mem-usage"))
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
                name=name if name != "N/A" else _name_by_size(gfx, memory * MIB),
                gfx=gfx or _gfx_by_name(name),
                memory_bytes=memory * MIB,
                used_bytes=_mib(usage.get("used_vram", "N/A")) * MIB,
                uuid=f"GPU-{serial:0>16}" if _is_hex(serial) else "",
            )
        )
    return gpus


def read_rocm_smi(run: Run) -> list[AmdGpu]:
    """From ``rocm-smi --json``: ``card0``, ``card1``, ... whose keys are spelled in several ways."""
    options = ("--showproductname", "--showmeminfo", "vram", "--showuniqueid", "--json")
    answer = _first_json(run(["rocm-smi", *options], TOOL_TIMEOUT_S))
    cards = [{key.lower(): value for key, value in card.items()} for name, card in answer.items() if name[:4] == "card"]
    gpus = []
    for card in sorted(cards, key=lambda card: int(card.get("node id", 0))):  # in its own order where that is not said
        memory, gfx = int(card["vram total memory (b)"]), str(card.get("gfx version", ""))
        serial = str(card.get("unique id", "")).removeprefix("0x").lower()
        name = str(card.get("card series", "N/A"))
        gpus.append(
            AmdGpu(
                name=name if name != "N/A" else _name_by_size(gfx, memory),
                gfx=gfx if gfx.startswith("gfx") else _gfx_by_name(name),
                memory_bytes=memory,
                used_bytes=int(card["vram total used memory (b)"]),
                uuid=f"GPU-{serial:0>16}" if _is_hex(serial) else "",
            )
        )
    return gpus


def probe(run: Run) -> list[AmdGpu]:
    """From torch in a process of its own, which sees what the variables leave."""
    found = _first_json(run([sys.executable, "-c", PROBE], PROBE_TIMEOUT_S))
    return [AmdGpu(gpu["name"], gpu["gfx"].split(":")[0], gpu["total"], gpu["total"] - gpu["free"]) for gpu in found]


def _gpu_data(text: str) -> list[dict[str, Any]]:
    answer = _first_json(text)
    return answer["gpu_data"] if isinstance(answer, dict) else answer


def _section(entry: dict[str, Any], name: str) -> dict[str, Any]:
    """A part of what is said of a GPU; empty for ``"N/A"``."""
    part = entry.get(name)
    return part if isinstance(part, dict) else {}


def _first_json(text: str) -> Any:
    """The first JSON value in ``text``; tools write warnings before it."""
    begin = min((at for at in (text.find("["), text.find("{")) if at >= 0), default=-1)
    while begin >= 0:
        try:
            return json.JSONDecoder().raw_decode(text[begin:])[0]
        except ValueError:
            begin = min((at for at in (text.find("[", begin + 1), text.find("{", begin + 1)) if at >= 0), default=-1)
    raise ValueError("its answer is not JSON")


def _mib(value: Any) -> int:
    """``65520``, or ``{"value": 65520, "unit": "MB"}``, where MB means MiB and GB GiB; 0 for N/A."""
    if isinstance(value, dict):
        factor = 1024 if str(value.get("unit", "MB")).upper().startswith("G") else 1
        return factor * _mib(value.get("value", "N/A"))
    return int(value) if isinstance(value, int | float) or str(value).isdecimal() else 0


def _is_hex(text: str) -> bool:
    return bool(text) and all(digit in "0123456789abcdef" for digit in text)


def _name_by_size(gfx: str, memory_bytes: int) -> str:
    """Of a GPU that nobody names: that of the kind with this architecture and memory, within 2 %."""
    for kind in load_kinds():
        if kind.gfx == gfx and abs(kind.memory_mib.value * MIB - memory_bytes) < 0.02 * memory_bytes:
            return f"AMD Instinct {kind.name}"
    return f"AMD {gfx}".strip()


def _gfx_by_name(name: str) -> str:
    kind = kind_of(name)
    return kind.gfx if kind else ""


def _kfd_nodes(root: Path) -> list[Path]:
    return [path for path in (root / "sys/class/kfd/kfd/topology/nodes").glob("*") if path.name.isdecimal()]


def _read_properties(path: Path) -> dict[str, str]:
    pairs = (line.split() for line in _read(path).splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def _check_access(path: Path) -> None:
    if not os.access(path, os.R_OK | os.W_OK):
        raise OSError(f"no permission to open /{'/'.join(path.parts[-2 if path.name == 'kfd' else -3 :])}")


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
