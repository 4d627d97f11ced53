"""Checkpoints as folders: the manifest (what one consists of, file by file and tensor by tensor), names, retention; and
copies of complete ones in another place, with what a start on another machine needs beside them.

A checkpoint exists when its manifest does, which is written last; and so does a copy, whose manifest is removed first.
Knows no tensors.
"""

from __future__ import annotations

import errno
import itertools
import re
import shutil
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from manyhands.core.errors import DAMAGED, EXIT_FAILED, UserError
from manyhands.core.files import hash_in_pieces, write_json
from manyhands.core.progress import advance
from manyhands.core.remote import RemoteFolder

MANIFEST = "manifest.json"
TRAIN_STATE = "train_state.json"
PARTIAL = ".tmp"  # being written, or being deleted
REPLACED = ".old"  # the same step saved again; complete, but a newer one takes its place
SET_ASIDE = ".damaged"  # does not count, and is kept
STEP_NAME = re.compile(r"step-(\d+)")
FOLDER = "checkpoints"


class _FrozenModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_FrozenModel):
    """``sha256``: of the digests of the file's 64 MiB pieces (``hash_in_pieces``), which threads check side by side."""

    bytes: int
    sha256: str


class TensorEntry(_FrozenModel):
    """A full tensor, however many files hold its slices."""

    shape: tuple[int, ...]
    dtype: str  # torch's name without the prefix: float32


class Manifest(_FrozenModel):
    """``extra`` is the caller's own JSON, of a run ``launch.resume_rules.describe_run``; nothing here reads it."""

    version: Literal[2] = 2
    world_size: int  # of the ranks that saved; any other number can load
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    extra: dict[str, Any] = {}


def hash_file(path: Path) -> FileEntry:
    """Size in bytes and digest of a file. Raises OSError."""
    return FileEntry(bytes=path.stat().st_size, sha256=hash_in_pieces([path], lambda _: advance())[path])


def write_manifest(folder: Path, manifest: Manifest) -> None:
    write_json(folder / MANIFEST, manifest.model_dump(mode="json"))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. UserError if there is none, or it is no manifest of ours."""
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            "this folder is no complete checkpoint",
            where=str(folder),
            why=f"it has no {MANIFEST}, which is written last",
            fix="give a folder like RUN/checkpoints/step-000010, or start the run again:"
            " it resumes from the newest complete one",
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            "the checkpoint's manifest cannot be read",
            where=str(path),
            why=f"{'.'.join(map(str, first['loc'])) or 'file'}: {first['msg']}",
            fix=_advice(folder),
            exit_code=EXIT_FAILED,
            kind=DAMAGED if first["type"] == "json_invalid" else "",  # else of another version
        ) from None


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Every file is there and as long as the manifest says. UserError that names the first file that is not."""
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise _damaged(folder, name, "the file is missing")
        size = path.stat().st_size
        if size != entry.bytes:
            raise _damaged(folder, name, f"{size} bytes, the manifest says {entry.bytes}")


def check_hashes(folder: Path, manifest: Manifest, part: int = 0, num_parts: int = 1) -> None:
    """Compares the digest of every ``num_parts``-th file from ``part`` on, so that ranks share the reading."""
    for name in sorted(manifest.files)[part::num_parts]:
        try:
            digest = hash_file(folder / name).sha256
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            raise _damaged(folder, name, "the disk cannot read it") from error
        if digest != manifest.files[name].sha256:
            raise _damaged(
                folder, name, "its SHA-256 differs from the manifest's: the content has changed since it was saved"
            )


def _damaged(folder: Path, name: str, why: str) -> UserError:
    return UserError(
        f"checkpoint file {name} is damaged",
        where=str(folder / name),
        why=why,
        fix=_advice(folder),
        exit_code=EXIT_FAILED,
        kind=DAMAGED,
    )


def _advice(folder: Path) -> str:
    number = STEP_NAME.fullmatch(folder.name)
    older = [
        path.name for step, path in list_checkpoints(folder.parent) if number is not None and step < int(number[1])
    ]
    if older:
        return f"delete {folder.name} to resume from the previous checkpoint, {older[-1]}"
    return f"delete {folder.name} to start over: there is no earlier checkpoint"


# -- the folder of a run's checkpoints


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
        if (m := STEP_NAME.fullmatch(path.name)) and (path / MANIFEST).is_file()
    ]
    return sorted(found)


def clean_leftovers(checkpoints: Path, report: Callable[[str], object] = print) -> list[str]:
    """Removes what killed saves and deletions left; names what it removed. For rank 0, before anything is saved.

    A checkpoint's folder without a manifest comes from elsewhere: a damaged disk, a copy that is not complete yet. It
    is renamed (``set_aside``), and ``report`` hears of it.
    """
    removed = []
    for path in sorted(checkpoints.glob("step-*")) if checkpoints.is_dir() else ():
        step, mark = path.with_suffix(""), path.suffix
        if mark == REPLACED and not step.exists():
            path.rename(step)  # killed between the two renames of a second save: the first one still counts
        elif mark in (PARTIAL, REPLACED):
            shutil.rmtree(path)
            removed.append(path.name)
        elif (path / f"{MANIFEST}{SET_ASIDE}").is_file():  # set aside where it is
            continue
        elif STEP_NAME.fullmatch(path.name) and not (path / MANIFEST).is_file():
            kept = set_aside(path).name
            report(f"warning: {path.name} has no {MANIFEST}, so it is no complete checkpoint; it is kept as {kept}")
    return removed


def set_aside(folder: Path) -> Path:
    """Renames a damaged checkpoint, so that it does not count any more; returns its new place. Nothing is deleted."""
    place = folder.with_name(folder.name + SET_ASIDE)
    for number in itertools.count(2):
        if not place.exists():
            try:
                return folder.rename(place)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
            # overlayfs renames no folder of a lower layer (an image), but files of it: without its manifest it is none
            return (folder / MANIFEST).rename(folder / f"{MANIFEST}{SET_ASIDE}").parent
        place = folder.with_name(f"{folder.name}{SET_ASIDE}-{number}")
    raise AssertionError("unreachable")


def prune(checkpoints: Path, keep_last: int | Literal["all"], keep: Collection[int] = ()) -> list[int]:
    """Deletes all complete checkpoints but the newest ``keep_last`` and the steps in ``keep``; returns the steps
    deleted.

    For rank 0. A checkpoint stops counting by one rename, before its files go.
    """
    older = [] if keep_last == "all" else list_checkpoints(checkpoints)[: -keep_last or None]
    doomed = [(step, path) for step, path in older if step not in keep]
    for _, path in doomed:
        partial = path.with_name(path.name + PARTIAL)
        path.rename(partial)
        shutil.rmtree(partial)
        advance()
    return [step for step, _ in doomed]


def copy_checkpoint(
    remote: RemoteFolder, folder: Path, beside: Sequence[Path], run: Path, moved: Callable[[int], object]
) -> None:
    """Copies the complete checkpoint ``folder`` after ``beside``, files of the folder ``run``. RemoteError. OSError."""
    for path in beside:
        remote.put(path, path.relative_to(run).as_posix(), moved)
    files = sorted(folder.iterdir(), key=lambda path: (path.name == MANIFEST, path.name))
    for path in files:
        remote.put(path, f"{FOLDER}/{folder.name}/{path.name}", moved)


def prune_copies(remote: RemoteFolder, keep_last: int | Literal["all"], keep: Collection[str]) -> None:
    """Removes copies but the newest ``keep_last`` and ``keep``, and older incomplete ones. RemoteError."""
    steps = {int(match[1]): name for name in remote.list(FOLDER) if (match := STEP_NAME.fullmatch(name))}
    complete = [step for step in sorted(steps) if MANIFEST in remote.list(f"{FOLDER}/{steps[step]}")]
    kept = complete if keep_last == "all" else complete[-keep_last:] if keep_last else []
    for step in sorted(steps):
        if complete and step <= complete[-1] and step not in kept and steps[step] not in keep:
            remote.remove(f"{FOLDER}/{steps[step]}", MANIFEST)
