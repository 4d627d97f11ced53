"""Rates of this machine's GPUs as ``manyhands doctor --calibrate`` measured them: one JSON file, an entry for each kind
and number of GPUs. What cannot be read counts as not measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from manyhands.core.files import read_json, write_json
from manyhands.facts.types import Calibration, GpuFacts

FILE = "~/.cache/manyhands/calibration.json"


def read_calibration(gpus: Sequence[GpuFacts], file: str | Path = FILE) -> Calibration | None:
    """Of these GPUs; of fewer or more of their kind where as many were not measured."""
    known = _read(Path(file).expanduser())
    if not gpus or any(gpu.name != gpus[0].name for gpu in gpus):
        return None
    for count in (len(gpus), *sorted(range(1, 17), reverse=True)):
        entry = known.get(_key(gpus[0].name, count))
        try:
            found = Calibration.model_validate(entry) if entry is not None else None
        except ValidationError:
            continue
        if found is not None:
            return found
    return None


def save_calibration(gpu_name: str, num_gpus: int, rates: dict[str, Any], file: str | Path = FILE) -> Calibration:
    """Adds or replaces the entry. OSError where the file cannot be written."""
    path = Path(file).expanduser()
    found = Calibration.model_validate(rates | {"when": time.strftime("%Y-%m-%d %H:%M")})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, _read(path) | {_key(gpu_name, num_gpus): found.model_dump()})
    return found


def _key(gpu_name: str, num_gpus: int) -> str:
    return f"{num_gpus} x {gpu_name}"


def _read(path: Path) -> dict[str, Any]:
    found = read_json(path)
    return found if isinstance(found, dict) else {}
