"""The folder of a run's checkpoints: naming, listing, retention. Knows no tensors."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from pathlib import Path

from manyhands.checkpoint.manifest import MANIFEST
from manyhands.core.progress import advance

PARTIAL = ".tmp"  # being written, or being deleted
REPLACED = ".old"  # the same step saved again; complete, but a newer one takes its place
_NAME = re.compile(r"step-(\d+)")


def checkpoint_folder(checkpoints: Path, step: int) -> Path:
    """``CHECKPOINTS/step-000010``."""
    return checkpoints / f"step-{step:06d}"


def list_checkpoints(checkpoints: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints as (step, folder), oldest first."""
    if not checkpoints.is_dir():
        return []
    found = [
        (int(m[1]), path)
        for path in checkpoints.iterdir()
        if (m := _NAME.fullmatch(path.name)) and (path / MANIFEST).is_file()
    ]
    return sorted(found)


def clean_leftovers(checkpoints: Path) -> list[str]:
    """Removes what killed saves and deletions left; names what it removed. For rank 0, before anything is saved."""
    removed = []
    for path in sorted(checkpoints.glob("step-*")) if checkpoints.is_dir() else ():
        step, mark = path.with_suffix(""), path.suffix
        if mark == REPLACED and not step.exists():
            path.rename(step)  # killed between the two renames of a second save: the first one still counts
        elif mark in (PARTIAL, REPLACED) or (_NAME.fullmatch(path.name) and not (path / MANIFEST).is_file()):
            shutil.rmtree(path)
            removed.append(path.name)
    return removed


def prune(checkpoints: Path, keep_last: int, keep: Collection[int] = ()) -> list[int]:
    """Deletes all complete checkpoints but the newest ``keep_last`` and the steps in ``keep``; returns the steps
    deleted.

    For rank 0. A checkpoint stops counting by one rename, before its files go.
    """
    doomed = [(step, path) for step, path in list_checkpoints(checkpoints)[: -keep_last or None] if step not in keep]
    for _, path in doomed:
        partial = path.with_name(path.name + PARTIAL)
        path.rename(partial)
        shutil.rmtree(partial)
        advance()
    return [step for step, _ in doomed]
