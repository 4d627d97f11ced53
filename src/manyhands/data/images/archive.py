"""Images by relative paths in a .zip file: unpacked into the cache once, for all processes and runs."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import zipfile
from pathlib import Path

from manyhands.config.schema import DataSection
from manyhands.core.errors import UserError
from manyhands.core.files import explain_full_disk, is_disk_full, make_folder
from manyhands.data.read.hub_sets import PREFIX, fetch_file, is_hub

MAX_GROWTH = 20  # images are already compressed; an archive that grows by more does not hold images


def find_image_folder(data: DataSection) -> Path | None:
    """The folder that ``data.image_folder`` names, be it an archive; None where it names none. Raises UserError."""
    named = data.image_folder
    if named is None:
        return None
    if is_hub(named):
        parts = named.removeprefix(PREFIX).split("/", 2)
        if len(parts) < 3 or not parts[2].endswith(".zip"):
            raise UserError(
                f"{named} names no archive", where="data.image_folder", fix="write hub:OWNER/NAME/FILE.zip, or a folder"
            )
        return _unpack(fetch_file("/".join(parts[:2]), parts[2]), Path(data.cache).expanduser())
    path = Path(named).expanduser()
    return _unpack(path, Path(data.cache).expanduser()) if path.suffix == ".zip" and path.is_file() else path


def _unpack(archive: Path, cache: Path) -> Path:
    """The files of an archive, in a folder of the cache that is named by its place, size and time."""
    archive = archive.resolve()
    status = archive.stat()
    digest = hashlib.sha256(f"{archive}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()
    folder, part = cache / f"images-{digest[:32]}", None
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (cache / f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                part = make_folder(cache, f".{folder.name}-")
                with zipfile.ZipFile(archive) as opened:
                    size = sum(entry.file_size for entry in opened.infolist())
                    if size > MAX_GROWTH * status.st_size:
                        raise zipfile.BadZipFile(f"its {status.st_size:,} bytes would become {size:,}")
                    opened.extractall(part)  # leaves no folder: names are made relative, links become files
                os.replace(part, folder)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise UserError(
            "the archive of images cannot be unpacked",
            where=str(archive),
            why=str(error),
            fix="name a folder of images",
        ) from error
    except OSError as error:
        if is_disk_full(error):
            raise explain_full_disk(error, cache) from error
        raise UserError(
            "the archive of images cannot be unpacked", where=str(cache), why=str(error), fix="set data.cache"
        ) from error
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)
    return folder
