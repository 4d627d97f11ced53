"""The losses of a few short runs on one kind of hardware, recorded and compared.

A change that is meant to leave the numbers as they are leaves ``losses.json`` as it is. Each run goes through the
product's own path (see ``tests/support/equality``), and each loss is kept as a hexadecimal float, every bit of it.

On a CPU the losses are equal bit for bit where the processor's make, its vector instructions and torch's version are
those of an entry. Elsewhere, and on a GPU, whose kernels are chosen by timing, they agree within the bounds of
``equality``.
"""

from __future__ import annotations

import json
import math
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support.equality import BOUNDS, Case, run_case
from tests.support.ranks import Ranks

FILE = Path(__file__).parent / "losses.json"
NUM_STEPS = 8
Losses = dict[str, list[str]]  # run: the loss of each step


def _case(name: str, strategy: str = "single", world_size: int = 1, **keys: object) -> Case:
    """Everything that a plan would derive from the machine's memory is given."""
    common = {"parallel.strategy": strategy, "parallel.activation_checkpointing": "none", "stop.max_steps": NUM_STEPS}
    return Case(name, world_size, common | keys)


UNPACKED = {"data.packing": False, "batch.micro_samples": 4}
PACKED = {"data.packing": True, "batch.micro_tokens": 512}
RUNS = {  # name: (method, case)
    "full": ("full", _case("full", **UNPACKED)),
    "lora": ("lora", _case("lora", **UNPACKED)),
    "qlora": ("qlora", _case("qlora", **UNPACKED)),
    "packed": ("full", _case("packed", **PACKED)),
    "2 ranks": ("full", _case("2 ranks", "fsdp", 2, **PACKED)),
}


def name_hardware(device: str) -> str:
    """``cpu AuthenticAMD 25/17 AVX512, torch 2.13.0`` or ``NVIDIA H200, torch 2.13.0``: another make, or other vector
    instructions, may round otherwise.
    """
    version = torch.__version__.partition("+")[0]
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {version}"
    return f"cpu {_name_processor()} {torch.backends.cpu.get_cpu_capability()}, torch {version}"


def _name_processor() -> str:
    """Vendor, family and model, as Linux has them; the architecture elsewhere."""
    path = Path("/proc/cpuinfo")
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    found = [re.search(rf"^{name}\s*: (.+)$", text, re.MULTILINE) for name in ("vendor_id", "cpu family", "model")]
    if not all(found):
        return platform.machine()
    vendor, family, model = (match[1] for match in found if match)
    return f"{vendor} {family}/{model}"


def run(world: Ranks, folder: Path, name: str) -> list[float]:
    """The losses of one of ``RUNS``, in a workspace that ``equality.write_workspace`` has written."""
    method, case = RUNS[name]
    dtype = "bfloat16" if world.device == "cuda" else "float32"
    return list(run_case(world, folder, case, dtype, method).losses)


def to_text(losses: list[float]) -> list[str]:
    return [loss.hex() for loss in losses]


def read() -> dict[str, Losses]:
    """Losses by hardware, then by run."""
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}


def write(entries: Mapping[str, Losses]) -> None:
    FILE.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class Comparison:
    """``deviation`` is relative, the largest of all steps; ``where`` names the entry that was compared with."""

    where: str
    is_exact: bool  # whether every bit must agree
    deviation: float
    bound: float

    @property
    def agrees(self) -> bool:
        return self.deviation == 0 if self.is_exact else self.deviation <= self.bound


def compare(entries: Mapping[str, Losses], hardware: str, name: str, losses: list[float]) -> Comparison | None:
    """With the entry of this hardware; else with the nearest of the same kind of device; None where there is none."""
    kind = hardware.startswith("cpu ")
    nearest = sorted(
        (key for key in entries if key.startswith("cpu ") == kind and name in entries[key]),
        key=lambda key: (key != hardware, key.split(", torch")[0] != hardware.split(", torch")[0], key),
    )
    if not nearest:
        return None
    expected = [float.fromhex(text) for text in entries[nearest[0]][name]]
    deviation = float("inf")
    if len(expected) == len(losses) and all(map(math.isfinite, losses)):
        deviation = max(abs(a - b) / abs(a) for a, b in zip(expected, losses, strict=True))
    bound = BOUNDS["float32" if kind else "bfloat16"]
    return Comparison(nearest[0], kind and nearest[0] == hardware, deviation, bound)
