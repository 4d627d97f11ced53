"""Names of what a preparation gives: equal names, equal tokens or equal stores. Knows files as bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from manyhands.config.schema import RunConfig, Source
from manyhands.core.errors import UserError
from manyhands.core.hashing import hash_files
from manyhands.data.files import kind_of
from manyhands.data.store import FORMAT_VERSION
from manyhands.data.streams import TEXT, describe_streams
from manyhands.data.tokenizer import tokenizer_digest


def name_tokens(
    config: RunConfig,
    model_folder: str | Path,
    sources: Sequence[Source],
    files: Sequence[Sequence[Path]],
    num_train: int,
) -> str:
    """64 hex digits of all that decides about the tokens of every row and their order: the content of the files and the
    rendering, not where the files are, how often a row is taken or which rows are held out."""
    data = config.data
    try:
        hashes = hash_files([path for group in files for path in group])
    except OSError as error:
        raise UserError("the data file cannot be read", where=str(error.filename), why=str(error)) from error
    described = [
        {
            "files": [(hashes[path], kind_of(path), path.name.lower().endswith((".tsv", ".tsv.gz"))) for path in group],
            "format": source.format,
            "fields": source.fields,
            "ignore": sorted(source.ignore or ()),
        }
        for source, group in zip(sources, files, strict=True)
    ]
    return _hash(
        version=FORMAT_VERSION,
        streams=describe_streams(TEXT),
        sources=described,
        num_train=num_train,
        tokenizer=tokenizer_digest(model_folder, config.model.chat_template, config.model.new_tokens),
        task=config.task,
        train_on=data.train_on,
        chat_template_kwargs=data.chat_template_kwargs,
        date=data.date,
        max_length=data.max_length,
        too_long=data.too_long,
    )


def name_store(config: RunConfig, tokens: str, sources: Sequence[Source]) -> str:
    """64 hex digits of the tokens, which rows of them are trained and held out, and how often they are taken."""
    data = config.data
    return _hash(
        tokens=tokens,
        seed=config.seed,
        validation_fraction=data.validation_fraction if data.validation is None else None,
        max_samples=data.max_samples,
        sources=[(source.name, source.weight, source.max_samples) for source in sources],
    )


def _hash(**named: Any) -> str:
    return hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()
