"""The manifest: what a checkpoint consists of, file by file and tensor by tensor. Written last; knows no tensors."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from manyhands.core.errors import EXIT_FAILED, UserError
from manyhands.core.files import write_json
from manyhands.core.progress import advance

MANIFEST = "manifest.json"
TRAIN_STATE = "train_state.json"
CHUNK_BYTES = 2**22


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Part):
    bytes: int
    sha256: str


class TensorEntry(_Part):
    """A whole tensor, however many files hold its slices."""

    shape: tuple[int, ...]
    dtype: str  # torch's name without the prefix: float32


class Manifest(_Part):
    """``extra`` is the caller's own JSON (digests of run and plan, versions); nothing here reads it."""

    version: Literal[1] = 1
    world_size: int  # of the ranks that saved; any other number can load
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    extra: dict[str, Any] = {}


def hash_file(path: Path) -> FileEntry:
    """Size in bytes and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            advance()
        return FileEntry(bytes=file.tell(), sha256=digest.hexdigest())


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
            fix="give a folder like RUN/checkpoints/step-000010, or start the run again: it resumes from the newest complete one",
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        raise UserError(
            "the checkpoint's manifest cannot be read",
            where=str(path),
            why=f"{'.'.join(map(str, first['loc'])) or 'file'}: {first['msg']}",
            fix=_advice(folder),
            exit_code=EXIT_FAILED,
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
    """Compares the SHA-256 of every ``num_parts``-th file from ``part`` on, so that ranks share the reading."""
    for name in sorted(manifest.files)[part::num_parts]:
        if hash_file(folder / name).sha256 != manifest.files[name].sha256:
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
    )


def _advice(folder: Path) -> str:
    older = sorted(p.name for p in folder.parent.glob("step-*") if p.name < folder.name and (p / MANIFEST).is_file())
    if older:
        return f"delete {folder.name} to resume from the previous checkpoint, {older[-1]}"
    return f"delete {folder.name} to start over: there is no earlier checkpoint"
