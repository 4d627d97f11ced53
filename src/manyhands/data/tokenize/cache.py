"""The folder of prepared data: the names of stores, by content; opening, publishing and cleaning up. Knows files as
bytes.

Equal names, equal tokens or equal stores. A store appears by one rename of a finished folder, so that whatever has the
name is complete.
"""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from manyhands.config.schema import DataSection, ModelSection
from manyhands.core.errors import UserError
from manyhands.core.files import hash_files, sync
from manyhands.data.images.files import find_changed
from manyhands.data.images.processor import family_of, processor_digest
from manyhands.data.read.files import kind_of
from manyhands.data.read.sources import ResolvedSource
from manyhands.data.store.segment import link_tokens
from manyhands.data.store.store import FORMAT_VERSION, TokenStore
from manyhands.data.store.streams import TEXT, describe_streams
from manyhands.data.tokenize.tokenizer import tokenizer_digest

UNFINISHED = ".unfinished-"
UNFINISHED_MAX_AGE_S = 3600.0  # since the last write into it

Report = Callable[[str], None]


def name_tokens(
    sources: Sequence[ResolvedSource], task: str, data: DataSection, model: ModelSection, model_folder: str | Path
) -> str:
    """64 hex digits of all that decides about the tokens of every row and their order: the content of the files and the
    rendering, not where the files are, how often a row is taken or which rows are held out."""
    try:
        hashes = hash_files([path for source in sources for path in source.files])
    except OSError as error:
        raise UserError("the data file cannot be read", where=str(error.filename), why=str(error)) from error
    described = [
        {
            "files": [
                (hashes[path], kind_of(path), path.name.lower().endswith((".tsv", ".tsv.gz"))) for path in source.files
            ],
            "format": source.format,
            "fields": source.fields,
            "ignore": sorted(source.ignore),
            "drop_system": source.drop_system,
            **({"roles": source.roles} if source.roles else {}),
            "too_long": source.too_long,
            "rows": [(rows.start, rows.stop) for rows, _ in source.slices],
        }
        for source in sources
    ]
    return _hash(
        **_describe_images(sources, data, model_folder),
        version=FORMAT_VERSION,
        streams=describe_streams(TEXT),
        sources=described,
        num_train=sum(source.use == "train" for source in sources),
        tokenizer=tokenizer_digest(model_folder, model.chat_template, model.new_tokens, model.special_tokens),
        task=task,
        train_on=data.train_on,
        chat_template_kwargs=data.chat_template_kwargs,
        date=data.date,
        max_length=data.max_length,
        min_length=data.min_length,
    )


def _describe_images(
    sources: Sequence[ResolvedSource], data: DataSection, model_folder: str | Path
) -> dict[str, dict[str, Any]]:
    """What decides about the images of rows; {} for a model that takes none. Relative paths lead on from the data
    files."""
    if family_of(model_folder).images is None:
        return {}
    return {
        "images": {
            "asked": data.images,
            "folders": [str(path.parent.absolute()) for source in sources for path in source.files],
            "folder": None if data.image_folder is None else str(Path(data.image_folder).expanduser().absolute()),
            "urls": data.image_urls,
            "bad": data.bad_images,
            "max_pixels": data.max_image_pixels,
            "resized": [data.shrink_images_above, data.enlarge_images_below],
            "processor": processor_digest(model_folder),
        }
    }


def name_store(tokens: str, sources: Sequence[ResolvedSource], data: DataSection, seed: int) -> str:
    """64 hex digits of the tokens, which rows of them are trained and held out, and how often they are taken."""
    sets = [source.name for source in sources if source.use == "set"]
    return _hash(
        tokens=tokens,
        seed=seed,
        validation_fraction=data.validation_fraction if data.validation is None else None,
        max_samples=data.max_samples,
        deduplicate=data.deduplicate,
        order=data.order,
        sources=[(source.name, source.weight, source.max_samples) for source in sources],
        **({"evaluation_sets": sets} if sets else {}),
    )


def _hash(**named: Any) -> str:
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def open_cached(folder: Path, report: Report) -> TokenStore | None:
    if not folder.exists():
        return None
    try:
        store = TokenStore.open(folder, check_tokens=True)
        if store.digest != folder.name:
            raise UserError("the token cache is damaged", why="it is that of other data")
        return store
    except UserError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno not in (None, errno.ENOENT):  # not damaged: not readable now
            what = "the token cache cannot be read"
            raise UserError(what, where=str(folder), why=str(cause), fix="start again") from error
        if not folder.exists():  # removed by another start, which makes it again
            return None
        if (remade := _remove_damaged(folder)) is None:
            report(f"{error.what} ({error.why}): made again")
        return remade


def _remove_damaged(folder: Path) -> TokenStore | None:
    """Removes a damaged store; the store where another process has made it again in the meantime."""
    aside = folder.with_name(f"{UNFINISHED}{folder.name[:16]}-{secrets.token_hex(8)}")
    try:
        os.rename(folder, aside)  # at once: what is removed file by file could be what another process just published
    except OSError:  # it is gone by now; or nothing can be written here, which is told when that is tried
        return None
    try:
        made_again = TokenStore.open(aside, check_tokens=True).digest == folder.name
    except UserError:
        made_again = False
    if not made_again:
        shutil.rmtree(aside, ignore_errors=True)
        return None
    if not publish(aside, folder):
        shutil.rmtree(aside, ignore_errors=True)
    return TokenStore.open(folder, check_tokens=True)


def link_other(tokens: str, unfinished: Path, report: Report) -> list[dict[str, Any]] | None:
    """Takes the tokens of an equal store; returns what its sources gave, None where there is none."""
    for path in unfinished.parent.glob("[0-9a-f]*/meta.json"):
        try:
            meta = json.loads(path.read_text(encoding="utf-8"))
            if meta.get("version") != FORMAT_VERSION or meta.get("tokens") != tokens:
                continue
            TokenStore.open(path.parent, check_tokens=True)
            if find_changed(path.parent) is not None:
                continue
        except (OSError, ValueError, UserError):
            continue
        if link_tokens(path.parent, unfinished):
            report("tokens cached: the choice of samples is new")
            return meta["made"]
    return None


def publish(unfinished: Path, folder: Path) -> bool:
    """Gives the folder its name. False where another preparation was first: its folder stays, both hold the same."""
    sync(unfinished)
    try:
        os.rename(unfinished, folder)
    except OSError:
        if not folder.is_dir():
            raise
        return False
    sync(folder.parent)
    return True


def remove(folder: Path) -> None:
    """Removes a store whole: nobody finds a part of it."""
    aside = folder.with_name(f"{UNFINISHED}{folder.name[:16]}-{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):  # another process was first
        os.rename(folder, aside)
    shutil.rmtree(aside, ignore_errors=True)


def clean_unfinished(cache: Path) -> None:
    """Removes what killed preparations left, once nothing was written into it for an hour."""
    for folder in cache.glob(f"{UNFINISHED}*"):
        try:
            newest = max(path.stat().st_mtime for path in (folder, *folder.rglob("*")))
        except OSError:  # its owner is just done with it
            continue
        if time.time() - newest > UNFINISHED_MAX_AGE_S:
            shutil.rmtree(folder, ignore_errors=True)
