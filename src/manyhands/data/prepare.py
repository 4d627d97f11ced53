"""Tokenises the data of a run once and caches the result by content. Knows the files and the cache, not how rows look.

The cache folder's name is a hash of all that decides about the tokens; it appears by one rename of a finished folder, so
whatever has the name is whole. Two preparations at once both work; the second finds the first's and throws its own away.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.config.schema import RunConfig
from manyhands.data.order import HELD_OUT_STREAM, RowOrder, permute
from manyhands.data.render import Renderer
from manyhands.data.sources import check_file
from manyhands.data.store import FORMAT_VERSION, StoreWriter, TokenStore
from manyhands.data.tokenise import Counts, Tokenising, choose_format
from manyhands.data.tokenizer import load_tokenizer, tokenizer_digest
from manyhands.errors import UserError
from manyhands.facts.types import DataFacts

MIN_HELD_OUT = 20
UNFINISHED = ".unfinished-"
UNFINISHED_MAX_AGE_S = 3600.0  # since the last write into it


def prepare(config: RunConfig, model_folder: str | Path, report: Callable[[str], None] = print) -> DataFacts:
    """Tokens of all rows of ``config.data``, from the cache or made now, and what they add up to.

    ``report`` gets one line of progress at a time. Raises UserError for data that cannot be used.
    """
    if config.task != "cpt" and config.data.too_long == "split":
        raise UserError("data.too_long: split needs task: cpt", why="a part of a conversation is not a conversation", fix="use truncate")
    if config.data.max_length < 2:
        raise UserError("data.max_length must be at least 2", why="one token has nothing to be predicted from")
    cache = Path(config.data.cache).expanduser()
    sources = {name: check_file(path) for name, path in (("train", config.data.train), ("validation", config.data.validation)) if path}
    stamps = {name: _stamp(path) for name, path in sources.items()}
    digest = name_content(config, model_folder, sources)
    folder = cache / digest
    store = _open_cached(folder, report)
    if store is None:
        store = _make(config, Path(model_folder), sources, stamps, folder, report)
    else:
        report(f"tokens cached: {store.train.num_rows:,} rows, {_millions(int(store.train.lengths.sum()))} tokens")
    for line in store.meta["notes"]:
        report(line)
    return _summarise(config, store)


def name_content(config: RunConfig, model_folder: str | Path, sources: dict[str, Path]) -> str:
    """64 hex digits that are equal exactly when the same tokens, in the same sets, would come out."""
    data = config.data
    named = {
        "version": FORMAT_VERSION,
        "files": {name: _hash_file(path) for name, path in sources.items()},
        "plain_text": {name: path.suffix.lower() == ".txt" for name, path in sources.items()},
        "tokenizer": tokenizer_digest(model_folder, config.model.chat_template),
        "task": config.task,
        "seed": config.seed,
        "format": data.format,
        "max_length": data.max_length,
        "too_long": data.too_long,
        "validation_fraction": data.validation_fraction if data.validation is None else None,
        "max_rows": data.max_rows,
    }
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()


def _open_cached(folder: Path, report: Callable[[str], None]) -> TokenStore | None:
    if not folder.exists():
        return None
    try:
        return TokenStore.open(folder)
    except UserError as error:
        report(f"{error.what} ({error.why}): made again")
        shutil.rmtree(folder, ignore_errors=True)
        return None


def _make(
    config: RunConfig, model_folder: Path, sources: dict[str, Path], stamps: dict, folder: Path, report: Callable[[str], None]
) -> TokenStore:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _clean_unfinished(folder.parent)
        unfinished = Path(tempfile.mkdtemp(prefix=f"{UNFINISHED}{folder.name[:16]}-", dir=folder.parent))
    except OSError as error:
        raise UserError("the token cache cannot be written", where="data.cache", why=str(error), fix="name another folder") from error
    try:
        _write(config, model_folder, sources, unfinished, folder.name, report)
        if any(_stamp(path) != stamps[name] for name, path in sources.items()):
            raise UserError("a data file changed while it was read", where=str(sources["train"]), fix="start again when it is complete")
        _publish(unfinished, folder)
    except OSError as error:
        raise UserError(
            "the token cache cannot be written", where=str(unfinished), why=str(error), fix="free space, or move data.cache"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return TokenStore.open(folder)


def _write(
    config: RunConfig, model_folder: Path, sources: dict[str, Path], folder: Path, digest: str, report: Callable[[str], None]
) -> None:
    tokenizer = load_tokenizer(model_folder, config.model.chat_template, config.model.trust_remote_code)
    start, writer, counts = time.monotonic(), StoreWriter(folder), Counts()
    formats, num_rows = {}, {}
    try:
        for name, path in sources.items():
            format, rows = choose_format(str(path), config, bool(tokenizer.chat_template))
            renderer = Renderer(tokenizer, plain_prompts=format == "prompt")
            num_rows[name] = Tokenising(config, renderer, writer, counts, report).run(rows, format, str(path))
            formats[name] = format
        train, validation, notes = divide_rows(config, num_rows["train"], num_rows.get("validation"), str(sources["train"]))
        meta = {
            "digest": digest,
            "seed": config.seed,
            "task": config.task,
            "formats": formats,
            "files": {name: str(path) for name, path in sources.items()},
            "num_file_rows": num_rows,
            "num_dropped": writer.num_rows - len(train) - len(validation),
            "num_truncated": counts.truncated,
            "num_split": counts.split,
            "num_straddling_tokens": counts.straddling,
            "num_rows_with_markers": counts.with_markers,
            "notes": notes + _note_plain(formats, tokenizer) + _note(config, counts),
        }
        writer.finish(train, validation, meta)
        report(f"tokenised {writer.num_rows:,} rows, {_millions(writer.num_tokens)} tokens in {time.monotonic() - start:.1f} s")
    finally:
        writer.close()


def divide_rows(config: RunConfig, num_rows: int, num_validation_rows: int | None, where: str) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """(training rows, validation rows, notes) as sorted positions in the store, where a validation file follows the training file.

    Without a validation file the first rows of a seeded permutation are held out, ``validation_fraction`` of them but at
    least 20 and at most half; ``data.max_rows`` then keeps the next ones.
    """
    fraction, max_rows, notes = config.data.validation_fraction, config.data.max_rows, []
    num_held_out = 0
    if num_validation_rows is None and fraction > 0:
        if num_rows < 2:
            raise UserError(
                "one row cannot be divided into training and validation",
                where=where,
                fix="give more rows, or data.validation, or set data.validation_fraction: 0",
            )
        wanted = max(round(fraction * num_rows), MIN_HELD_OUT)
        num_held_out = min(wanted, num_rows // 2)
        if num_held_out < wanted:
            notes.append(
                f"only {num_held_out:,} rows held out for validation instead of {wanted:,}: half of the {num_rows:,} rows there are"
            )
    order = permute(num_rows, config.seed, HELD_OUT_STREAM)
    end = num_rows if max_rows is None else min(num_rows, num_held_out + max_rows)
    held_out = order[:num_held_out] if num_validation_rows is None else num_rows + np.arange(num_validation_rows)
    return np.sort(order[num_held_out:end]), np.sort(held_out), notes


def _note_plain(formats: Mapping[str, str], tokenizer: Any) -> list[str]:
    """A chat model whose template got lost would train on rows that no chat ever shows it."""
    if "prompt" not in formats.values() or tokenizer.chat_template:
        return []
    return ["no chat template: prompt and completion are joined as they stand (model.chat_template gives one)"]


def _note(config: RunConfig, counts: Counts) -> list[str]:
    notes = []
    if counts.truncated:
        notes.append(f"{counts.truncated:,} rows cut at {config.data.max_length:,} tokens")
    if counts.split:
        notes.append(f"{counts.split:,} documents split into rows of at most {config.data.max_length:,} tokens")
    if counts.straddling:
        notes.append(f"{counts.straddling:,} tokens lie across the beginning of a trained part (answers that begin with blanks)")
    if counts.with_markers:
        notes.append(
            f"{counts.with_markers:,} rows contain the spelling of a special token, which the tokenizer takes for the token itself"
        )
    return notes


def _publish(unfinished: Path, folder: Path) -> None:
    """Gives the folder its name. Where another preparation was first, its folder stays: both hold the same."""
    _sync_folder(unfinished)
    try:
        os.rename(unfinished, folder)
    except OSError:
        if not folder.is_dir():
            raise
        return
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clean_unfinished(cache: Path) -> None:
    """Removes what killed preparations left, once nothing was written into it for an hour."""
    for folder in cache.glob(f"{UNFINISHED}*"):
        try:
            newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
        except OSError:  # its owner is just done with it
            continue
        if time.time() - newest > UNFINISHED_MAX_AGE_S:
            shutil.rmtree(folder, ignore_errors=True)


def _summarise(config: RunConfig, store: TokenStore) -> DataFacts:
    train, validation, meta = store.train, store.validation, store.meta
    steps = None
    if config.batch.tokens is not None:
        order = RowOrder(train.num_rows, config.seed, batch_tokens=config.batch.tokens, num_targets=train.num_targets)
        steps = order.steps_per_epoch(0)
    num_tokens = int(train.lengths.sum(dtype=np.int64))
    return DataFacts(
        folder=str(store.folder),
        digest=store.digest,
        num_rows=train.num_rows,
        num_tokens=num_tokens,
        num_targets=int(train.num_targets.sum(dtype=np.int64)),
        max_length=int(max(train.lengths.max(), validation.lengths.max(initial=0))),
        mean_length=num_tokens / train.num_rows,
        num_validation_rows=validation.num_rows,
        num_validation_tokens=int(validation.lengths.sum(dtype=np.int64)),
        num_dropped=meta["num_dropped"],
        num_truncated=meta["num_truncated"],
        num_split=meta["num_split"],
        steps_per_epoch_by_tokens=steps,
    )


def _hash_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError("the data file cannot be read", where=str(path), why=str(error)) from error


def _stamp(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M" if count >= 100_000 else f"{count:,}"
