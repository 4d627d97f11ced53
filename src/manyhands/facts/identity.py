"""What a base model's files hold: the identity by content that a plan keeps, and how it is checked again. Knows no
torch.

A file is identified by its SHA-256. In the hub's cache a large file is a link to a blob of that name, so nothing is
read. Any other file is hashed once: ``data.cache``/weights remembers the digest by path, size, times and inode.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from manyhands.config.schema import DataSection, RunConfig
from manyhands.core.errors import UserError
from manyhands.core.files import Progress, hash_files, is_in_hub_cache, read_json, write_json
from manyhands.core.limits import GIB
from manyhands.facts.adapter import read_base_files
from manyhands.facts.safetensors import find_weight_files

SHA256 = re.compile("[0-9a-f]{64}")
SETTLED_S = 2.0  # a file that changed later may change again without another time: it is not remembered
LARGE_BYTES = 4 << 30  # takes seconds to hash, which is reported
SHOWN_DIGITS = 12

Report = Callable[[str], Any]


def identify_files(
    folder: Path, config: RunConfig, report: Report = lambda line: None, progress: Progress = lambda num_bytes: None
) -> dict[str, str]:
    """SHA-256 of each file that says what the model in ``folder`` computes: config.json, its weights, and its code if
    that is run.

    ``progress`` as for ``hash_files``. Raises UserError where a file cannot be read.
    """
    files = [folder / "config.json"]
    if config.model.init == "pretrained":
        files += find_weight_files(folder)
    if config.model.trust_remote_code:
        files += sorted(folder.glob("*.py"))
    return _identify(folder, files, config.data.cache, report, progress)


def _identify(folder: Path, files: Sequence[Path], cache: str, report: Report, progress: Progress) -> dict[str, str]:
    kept = Path(cache).expanduser() / "weights"
    try:
        found = {path: _name_of_blob(path) or _remembered(path, kept) for path in files}
        unknown = [path for path in files if found[path] is None]
        num_bytes = sum(path.stat().st_size for path in unknown)
        if num_bytes > LARGE_BYTES:
            report(f"hashing {num_bytes / GIB:.0f} GiB of weights, once: a resumed run must have the same")
        stamps = {path: _stamp(path) for path in unknown}
        for path, digest in hash_files(unknown, progress).items():
            found[path] = digest
            if _stamp(path) == stamps[path]:
                _remember(path, kept, digest)
    except OSError as error:
        raise UserError("the model's files cannot be read", where=str(folder), why=str(error)) from error
    return {path.name: str(digest) for path, digest in found.items()}


def differing_files(before: Mapping[str, str], after: Mapping[str, str], *, weights: bool = True) -> list[str]:
    """``name: digest before -> digest now`` of each changed file; ``weights``: compares those too."""
    return [
        f"{name}: {before.get(name, 'none')[:SHOWN_DIGITS]} -> {after.get(name, 'none')[:SHOWN_DIGITS]}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name) and (weights or not name.endswith(".safetensors"))
    ]


def check_adapter_base(adapter: Path, base: Path) -> None:
    """UserError where ``base`` is not the model that the adapter was trained on, if its weights tell."""
    planned = read_base_files(adapter)
    if not planned:
        return
    files = [base / name for name in planned if (base / name).is_file()]
    found = _identify(base, files, DataSection.model_fields["cache"].default, lambda line: None, lambda num_bytes: None)
    if changed := differing_files(planned, found):
        raise UserError(
            "the base model is not the one that the adapter was trained on",
            where=str(base),
            why="its files differ (trained on -> found here, by SHA-256)",
            fix="put the adapter's own base model there (model.revision pins a commit of the hub), or name another"
            " with --base",
            details=changed,
        )


def check_files(
    folder: Path,
    config: RunConfig,
    planned: Mapping[str, str],
    *,
    weights: bool = True,
    progress: Progress = lambda num_bytes: None,
) -> None:
    """UserError where files in ``folder`` are not those of the plan, if it names any (older ones do not)."""
    if planned and (
        changed := differing_files(planned, identify_files(folder, config, progress=progress), weights=weights)
    ):
        raise UserError(
            "the base model is not the one that the run was trained on",
            where=str(folder),
            why="its files differ (planned -> found here, by SHA-256)",
            fix="put the run's own base model there, on every machine (model.revision pins a commit of the hub)",
            details=changed,
        )


def _name_of_blob(path: Path) -> str | None:
    """What the hub names the content by, if ``path`` lies in its cache: snapshots/COMMIT/FILE -> blobs/SHA-256. In a
    folder elsewhere that looks like it, whoever made it has chosen the names.
    """
    if not path.is_symlink() or path.parent.parent.name != "snapshots" or not is_in_hub_cache(path.parent):
        return None
    blob = path.resolve()
    return (
        blob.name
        if blob.parent == path.parent.parent.parent.resolve() / "blobs" and SHA256.fullmatch(blob.name)
        else None
    )


def _stamp(path: Path) -> list[int | str]:
    """What changes when the file does: nobody sets the time of a change of the inode (ctime) back."""
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev]


def _entry(kept: Path, stamp: list[int | str]) -> Path:
    return kept / f"{hashlib.sha256(json.dumps(stamp).encode()).hexdigest()[:32]}.json"


def _remembered(path: Path, kept: Path) -> str | None:
    stamp = _stamp(path)
    try:
        found = read_json(_entry(kept, stamp))
    except OSError:  # a cache that cannot be read: hashed again
        return None
    digest = found.get("sha256") if isinstance(found, dict) else None
    return digest if isinstance(digest, str) and SHA256.fullmatch(digest) else None


def _remember(path: Path, kept: Path, digest: str) -> None:
    if time.time() - path.stat().st_ctime < SETTLED_S:
        return
    try:
        kept.mkdir(parents=True, exist_ok=True)
        write_json(_entry(kept, _stamp(path)), {"file": str(path), "sha256": digest})
    except OSError:
        pass  # a cache that cannot be written: hashed again the next time
