"""GPUs by kind: those that ``--gpus`` asks a plan for, and what is known of those that are here. The figures stand in
``gpus.toml``; rates of this machine's GPUs as ``manyhands doctor --calibrate`` measured them in one JSON file, an entry
for each kind and number of GPUs. What cannot be read counts as not measured.
"""

from __future__ import annotations

import difflib
import re
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from manyhands.core.errors import UserError
from manyhands.core.files import read_json, write_json
from manyhands.core.limits import GIB
from manyhands.facts.types import Calibration, GpuFacts, GpuKind, HostFacts
from manyhands.families import installed_version

MIB = 2**20
MAX_GPUS = 4096  # of a plan: more is a slip of the finger
EXAMPLES = "8xH200, 2x4xH100-80GB (2 machines of 4), H100-4x or MI300X"

# Vendors and brands, which drivers write and people leave out.
_BRANDS = re.compile(r"nvidia|amd|instinct|geforce|tesla")
CALIBRATION_FILE = "~/.cache/manyhands/calibration.json"


@dataclass(frozen=True)
class AskedGpus:
    """``2x4xH100``: 2 machines with 4 GPUs each."""

    text: str  # as asked
    kind: GpuKind
    num_nodes: int
    num_per_node: int

    @property
    def total(self) -> int:
        return self.num_nodes * self.num_per_node

    def __str__(self) -> str:
        nodes = f"{self.num_nodes} machines with " if self.num_nodes > 1 else ""
        return f"{nodes}{self.num_per_node} × {self.kind.name}"


def plain_number(text: str) -> int | str | None:
    """``8`` as a number, ``all`` as ``auto``; None for possible kinds. UserError for indices, or for no GPUs."""
    if text.strip().lower() in ("all", "auto", "max"):
        return "auto"
    if re.fullmatch(r"\s*[+-]?\d+\s*", text):
        return int(text)
    if re.fullmatch(r"(?:cuda:|gpu:?)?\d+(?:\s*,\s*\d*)*|(?:cuda|gpu):\d+", text.strip(), re.IGNORECASE):
        ids = ",".join(re.findall(r"\d+", text))
        fix = f"write CUDA_VISIBLE_DEVICES={ids} before the command, and leave --gpus out"
        raise UserError("--gpus is a number of GPUs, not which ones", where=f"--gpus {text}", fix=fix)
    if text.strip().lower() in ("cpu", "none"):
        raise UserError("--gpus is a number of GPUs", where=f"--gpus {text}", fix="write parallel.device=cpu")
    return None


def parse_gpus(text: str, where: str = "--gpus") -> AskedGpus:
    """``8xH200``, ``2x4xH100-80GB``, ``H100-4x``, ``H100x4``, ``H100:4``, ``MI300X`` (one).

    UserError if that is no kind of GPU, or no number.

    ``where`` names the option or variable for errors.
    """
    plain = re.sub(r"(?<=\w)\s*[×*]\s*(?=\w)|(?<=\w)\s+x\s*(?=\d)|(?<=\d)\s*x\s*(?=\w)", "x", text.strip(), flags=re.I)
    plain = re.sub(r"\s+", "-", plain)
    # three digits at most behind an x: RTX4090 is a name
    found = re.fullmatch(r"(?:(\d+)x)?(?:(\d+)x)?(.*?)(?:-(\d+)x|-?x(\d{1,3})|:(\d+))?", plain, re.IGNORECASE)
    assert found is not None
    first, second, name, *behind = found.groups()
    counts = [int(number) for number in (first, second, *behind) if number]
    if len(counts) > 2 or not name or (name.isdecimal() and not counts):
        raise UserError(f"cannot read the GPUs {text!r}", where=f"{where} {text}", fix=f"write for instance {EXAMPLES}")
    kind = find_kind(name, where=f"{where} {text}")
    num_nodes, num_per_node = [1] * (2 - len(counts)) + counts
    if not 1 <= num_nodes * num_per_node <= MAX_GPUS:
        raise UserError(
            f"{num_nodes * num_per_node:,} GPUs cannot be planned for",
            where=f"{where} {text}",
            fix=f"give 1 to {MAX_GPUS:,}, for instance {EXAMPLES}",
        )
    return AskedGpus(text, kind, num_nodes, num_per_node)


def find_kind(name: str, where: str = "") -> GpuKind:
    """By name, alias or driver name, in any case, without dashes, brand or memory. UserError with the nearest."""
    wanted = _plain(name)
    by_name = {_plain(spelling): kind for kind in load_kinds() for spelling in (kind.name, *kind.aliases)}
    if found := by_name.get(wanted) or kind_of(name):
        return found
    alike = [
        kind
        for kind in load_kinds()
        if _without_memory(name) in [_without_memory(spelling) for spelling in (kind.name, *kind.aliases)]
    ]
    if alike:  # A100, of which there are two, or H100-60GB
        names = list(dict.fromkeys(f"{kind.name} ({kind.memory_gb} GB)" for kind in alike))
        problem = f"there is no {name}" if _without_memory(name) != wanted else f"{name} does not say how much memory"
        fix = f"write {' or '.join(dict.fromkeys(kind.name for kind in alike))}"
        raise UserError(problem, where=where, why=f"known are {', '.join(names)}", fix=fix)
    near = [by_name[spelling].name for spelling in difflib.get_close_matches(wanted, by_name, n=3, cutoff=0.5)]
    near = list(dict.fromkeys(near))
    raise UserError(
        f"unknown kind of GPU: {name}",
        where=where,
        why=f"known are {', '.join(kind.name for kind in load_kinds())}",
        fix=f"write {' or '.join(near)}" if near else f"choose one of these, for instance {EXAMPLES}",
    )


def kind_of(driver_name: str) -> GpuKind | None:
    """The kind of a GPU by its driver's name for it (``NVIDIA H100 80GB HBM3``); None if it is in no list."""
    wanted = _plain(driver_name)
    spellings = [(_plain(name), kind) for kind in load_kinds() for name in kind.driver_names]
    fitting = [(spelling, kind) for spelling, kind in spellings if wanted.startswith(spelling)]
    exact = [kind for spelling, kind in fitting if spelling == wanted]
    # "MI300X OAM", "MI300X VF": AMD appends words; NVIDIA's "L40" or "A10" begin other names
    if not exact and fitting and fitting[0][1].vendor == "amd":
        exact = [max(fitting, key=lambda pair: len(pair[0]))[1]]
    return exact[0] if exact else None


def kinds_named(name: str) -> set[str]:
    """Names of the kinds that somebody may mean by ``name``, such as a cluster: ``a100`` are two, with 40 and 80 GB."""
    wanted = _plain(name)
    return {
        kind.name
        for kind in load_kinds()
        for spelling in (kind.name, *kind.aliases, *kind.driver_names)
        if wanted in (_plain(spelling), _without_memory(spelling))
    }


def kind_of_all(gpus: Sequence[GpuFacts]) -> GpuKind | None:
    """The kind of these GPUs, if it is one and known."""
    kinds = {gpu.name: kind_of(gpu.name) for gpu in gpus}
    names = {kind.name if kind else None for kind in kinds.values()}
    return next(iter(kinds.values())) if len(names) == 1 else None


def describe_host(asked: AskedGpus) -> HostFacts:
    """A machine with these GPUs, idle; cores and memory are the assumed ones of its class."""
    kind, share = asked.kind, _table()["assumed"][asked.kind.host]
    gpus = tuple(
        GpuFacts(
            index=index,
            name=kind.name,
            memory_bytes=int(kind.memory_mib.value) * MIB,
            free_bytes=int(kind.usable_mib.value) * MIB,
            vendor=kind.vendor,
            compute_capability=kind.compute_capability,
            gfx=kind.gfx,
        )
        for index in range(asked.num_per_node)
    )
    memory = share["memory_gib"] * GIB * asked.num_per_node
    return HostFacts(
        gpus=gpus,
        num_cores=share["num_cores"] * asked.num_per_node,
        memory_bytes=memory,
        free_memory_bytes=memory,
        num_nodes=asked.num_nodes,
        is_here=False,
        kind=kind,
        has_flash4=bool(installed_version("flash-attn-4")),
    )


@lru_cache
def load_kinds() -> tuple[GpuKind, ...]:
    """All kinds, in the order of the file. Where usable memory is not known, it is all less the file's margin."""
    table, kinds = _table(), []
    for entry in table["gpu"]:
        if "usable_mib" not in entry:
            memory, margin = entry["memory_mib"], table["margin_mib"]
            source = f"{memory['source']}, less {margin} MiB"
            entry = entry | {"usable_mib": {"value": memory["value"] - margin, "source": source}}
        kinds.append(GpuKind.model_validate(entry))
    return tuple(kinds)


@lru_cache
def _table() -> dict[str, Any]:
    return tomllib.loads((files("manyhands.facts") / "gpus.toml").read_text(encoding="utf-8"))


def _without_memory(name: str) -> str:
    return _plain(re.sub(r"[\s_-]\d+gb$", "", name, flags=re.IGNORECASE))


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", _BRANDS.sub("", name.lower()))


def read_calibration(gpus: Sequence[GpuFacts], file: str | Path = CALIBRATION_FILE) -> Calibration | None:
    """Of these GPUs; of fewer or more of their kind where as many were not measured."""
    known = _read_calibrations(Path(file).expanduser())
    if not gpus or any(gpu.name != gpus[0].name for gpu in gpus):
        return None
    for count in (len(gpus), *sorted(range(1, 17), reverse=True)):
        entry = known.get(_calibration_key(gpus[0].name, count))
        try:
            found = Calibration.model_validate(entry) if entry is not None else None
        except ValidationError:
            continue
        if found is not None:
            return found
    return None


def save_calibration(
    gpu_name: str, num_gpus: int, rates: dict[str, Any], file: str | Path = CALIBRATION_FILE
) -> Calibration:
    """Adds or replaces the entry. OSError where the file cannot be written."""
    path = Path(file).expanduser()
    found = Calibration.model_validate(rates | {"when": time.strftime("%Y-%m-%d %H:%M")})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, _read_calibrations(path) | {_calibration_key(gpu_name, num_gpus): found.model_dump()})
    return found


def _calibration_key(gpu_name: str, num_gpus: int) -> str:
    return f"{num_gpus} x {gpu_name}"


def _read_calibrations(path: Path) -> dict[str, Any]:
    found = read_json(path)
    return found if isinstance(found, dict) else {}
