"""manyhands.json in a written folder: which files we wrote, by hash, and what verification found. So a second export
keeps what was written by hand, and `push` uploads only what was verified. Knows files, no models.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from manyhands.core.files import hash_files, read_json, write_json

RECORD = "manyhands.json"
CARD = "README.md"


class FolderRecord(BaseModel):
    """``files``: SHA-256 of each by its name in the folder; ``verified``: how the folder was verified, empty if it was
    not.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = 1
    files: dict[str, str]
    verified: str = ""


def write_record(folder: Path) -> None:
    """Of everything in ``folder``, unverified."""
    write_json(folder / RECORD, FolderRecord(files=hash_folder(folder)).model_dump())


def mark_verified(folder: Path, notes: str) -> None:
    """Adds what verification found. The hashes stay those of writing: a file changed since then is not covered."""
    found = read_record(folder)
    if found is not None:
        write_json(folder / RECORD, found.model_copy(update={"verified": notes}).model_dump())


def read_record(folder: Path) -> FolderRecord | None:
    """None where there is none, or none that this version reads."""
    try:
        return FolderRecord.model_validate(read_json(folder / RECORD))
    except ValidationError:
        return None


def hash_folder(folder: Path) -> dict[str, str]:
    """SHA-256 of every file by its name relative to ``folder``, the record left out."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / RECORD)
    return {path.relative_to(folder).as_posix(): digest for path, digest in hash_files(paths).items()}


def find_changed(folder: Path, record: FolderRecord) -> dict[str, str]:
    """Files that are not as they were written: their names, and ``changed``, ``missing`` or ``added``."""
    found = hash_folder(folder)
    names: Mapping[str, str] = record.files
    return {
        name: "added" if name not in names else "missing" if name not in found else "changed"
        for name in sorted({*found, *names})
        if found.get(name) != names.get(name)
    }


def keep_by_hand(old: Path, new: Path) -> list[str]:
    """Copies into ``new``, which takes the place of ``old``, what was added to ``old`` or changed in it by hand.

    Added files and a changed README.md stay as they are; of another changed file, whose new content is what was
    trained, the old one is kept as NAME.old. Returns what was kept, for people. Nothing where ``old`` has no record.
    """
    record = read_record(old)
    kept = []
    for name, what in find_changed(old, record).items() if record is not None else ():
        if what == "missing":
            continue
        stays = name == CARD or (what == "added" and not (new / name).exists())
        target = new / (name if stays else f"{name}.old")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(old / name, target)
        kept.append(name if stays else f"{name} as {name}.old")
    return kept
