"""The tensors of a folder's safetensors files: written, and read one at a time. Knows nothing of what they should
be.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.export.reference import Kind
from manyhands.facts.adapter import WEIGHTS

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class StoredTensor:
    """``tensor`` is None if it cannot be read, and ``problem`` says why."""

    name: str
    tensor: torch.Tensor | None
    problem: str = ""


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file with the mode that any new file gets here: safetensors (0.8.0) writes one that its owner alone
    can read.
    """
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt", **(metadata or {})})
    path.chmod(mode)


def weight_files(folder: Path, kind: Kind) -> list[Path]:
    """The files that a loader would read. UserError if one of them, or all, are missing."""
    if kind == "adapter":
        paths = [folder / WEIGHTS]
    elif (folder / INDEX).is_file():
        weight_map = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        paths = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        paths = [folder / "model.safetensors"]
    for path in paths:
        if not path.is_file():
            raise UserError("a weights file is missing", where=str(path), exit_code=EXIT_FAILED)
    return paths


def iterate_stored(paths: Iterable[Path]) -> Iterator[StoredTensor]:
    """Every tensor of the files, one in memory at a time; a file that cannot be opened gives one item of its name."""
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                    yield StoredTensor(name, file.get_tensor(name))
        except (OSError, SafetensorError) as error:
            yield StoredTensor(path.name, None, str(error))
