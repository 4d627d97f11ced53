"""Copies of complete checkpoints in another place, with what a start on another machine needs beside them.

A copy exists when its manifest does, as a checkpoint does: it is written last and removed first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from manyhands.checkpoint.manifest import MANIFEST, STEP_NAME
from manyhands.core.remote import RemoteFolder

FOLDER = "checkpoints"


def copy_checkpoint(
    remote: RemoteFolder, folder: Path, beside: Sequence[Path], run: Path, moved: Callable[[int], object]
) -> None:
    """Copies the complete checkpoint ``folder``, and before it the files ``beside`` of the run's folder ``run``.
    RemoteError. OSError.
    """
    for path in beside:
        remote.put(path, path.relative_to(run).as_posix(), moved)
    files = sorted(folder.iterdir(), key=lambda path: (path.name == MANIFEST, path.name))
    for path in files:
        remote.put(path, f"{FOLDER}/{folder.name}/{path.name}", moved)


def prune_copies(remote: RemoteFolder, keep_last: int, keep: Collection[str]) -> None:
    """Removes all complete copies but the newest ``keep_last`` and those named in ``keep``, and what is left of
    incomplete ones that are older than the newest complete one. RemoteError.
    """
    steps = {int(match[1]): name for name in remote.list(FOLDER) if (match := STEP_NAME.fullmatch(name))}
    complete = [step for step in sorted(steps) if MANIFEST in remote.list(f"{FOLDER}/{steps[step]}")]
    kept = complete[-keep_last:] if keep_last else []
    for step in sorted(steps):
        if complete and step <= complete[-1] and step not in kept and steps[step] not in keep:
            remote.remove(f"{FOLDER}/{steps[step]}", MANIFEST)
