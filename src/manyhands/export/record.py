"""manyhands.json in a written folder: which files we wrote, by hash, and what verification found. So a second export
keeps what was written by hand, and `push` uploads only what was verified. Knows files, no models.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from manyhands.core.errors import UserError
from manyhands.core.files import hash_files, read_json, refuse_links, write_json
from manyhands.launch.run.resume import MANIFEST

RECORD = "manyhands.json"
CARD = "README.md"
ADAPTER = "adapter_config.json"


class FolderRecord(BaseModel):
    """``files``: SHA-256 by name; ``verified``: how, or empty; ``source``: what an export was made of, and as what."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = 1
    files: dict[str, str]
    verified: str = ""
    source: str = ""


def write_record(folder: Path) -> None:
    """Of everything in ``folder``, unverified."""
    write_json(folder / RECORD, FolderRecord(files=hash_folder(folder)).model_dump())


def mark_verified(folder: Path, notes: str, source: str = "") -> None:
    """Adds what verification found. The hashes stay those of writing: a file changed since then is not covered."""
    found = read_record(folder)
    if found is not None:
        write_json(folder / RECORD, found.model_copy(update={"verified": notes, "source": source}).model_dump())


def name_source(kind: str, dtype: str, checkpoint: Path) -> str:
    """What an export is, and of which checkpoint by step and content."""
    manifest = checkpoint / MANIFEST
    return f"{kind} in {dtype} of {checkpoint.name} {hash_files([manifest])[manifest][:16]}"


def name_folder(kind: str, folder: Path) -> str:
    """The same of a model's folder, by the content of its files."""
    names = "\n".join(f"{name} {digest}" for name, digest in hash_folder(folder).items())
    return f"{kind} of a model's folder {hashlib.sha256(names.encode()).hexdigest()[:16]}"


def find_export(folder: Path, source: str) -> str | None:
    """What verification found of ``folder``, if it comes from this ``source`` and is unchanged; else None."""
    record = read_record(folder)
    if record is None or not record.verified or record.source != source or find_changed(folder, record):
        return None
    return record.verified


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
        shutil.copy2(old / name, target, follow_symlinks=False)
        kept.append(name if stays else f"{name} as {name}.old")
    return kept


def copy_output(folder: Path, target: Path) -> None:
    """Copies a written folder over ``target``, as ``save_pretrained`` of other libraries does; a README.md written by
    hand stays. UserError where ``target`` is a file, or one of ``target`` and ``folder`` holds an adapter and the other
    a model: the two would be opened as the adapter.
    """
    if target.exists() and not target.is_dir():
        raise UserError("the output folder is a file", where=str(target), fix="name a folder")
    if target.exists() and target.samefile(folder):
        return
    there, here = (target / ADAPTER).is_file(), (folder / ADAPTER).is_file()
    if there != here and (there or any(target.glob("model*.safetensors"))):
        held, saved = ("an adapter", "a model") if there else ("a model", "an adapter")
        raise UserError(
            f"the output folder holds {held}, and this is {saved}",
            where=str(target / ADAPTER if there else target),
            why="a folder with both is opened as the adapter",
            fix="name another folder",
        )
    before, card = read_record(target), target / CARD
    is_ours = not card.is_file() or (before is not None and before.files.get(CARD) == hash_files([card])[card])
    refuse_links(folder, [path.relative_to(folder).as_posix() for path in folder.rglob("*")])
    shutil.copytree(folder, target, dirs_exist_ok=True, ignore=None if is_ours else shutil.ignore_patterns(CARD))
