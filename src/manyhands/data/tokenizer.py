"""Loads a tokenizer from a model folder and names its content. Imports transformers (which imports torch) only when called."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

from manyhands.errors import UserError

# Everything in a model folder that can change the ids of a text or the rendering of a conversation.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)


def load_tokenizer(model_folder: str | Path, chat_template: str | None = None, trust_remote_code: bool = False) -> Any:
    """The transformers tokenizer of a folder, with ``chat_template`` (Jinja text, or a path to it) in place of its own."""
    folder = Path(model_folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            "the model folder has no tokenizer",
            where=str(folder),
            why="none of tokenizer.json, tokenizer_config.json, tokenizer.model is there",
            fix="copy the tokenizer's files into the model folder",
        )
    template = read_chat_template(chat_template)
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # whatever the files hold: transformers raises many kinds
        raise UserError("the tokenizer cannot be loaded", where=str(folder), why=f"{type(error).__name__}: {error}") from error
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def read_chat_template(chat_template: str | None) -> str | None:
    """The text of a template that is given as text or as a path; a text is told by its braces."""
    if chat_template is None or "{" in chat_template:
        return chat_template
    path = Path(chat_template).expanduser()
    if not path.is_file():
        raise UserError("no such chat template", where=str(path), fix="give model.chat_template as a file that exists, or as Jinja text")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("the chat template cannot be read", where=str(path), why=str(error)) from error


def tokenizer_digest(model_folder: str | Path, chat_template: str | None = None) -> str:
    """Hash of all that decides about ids: the tokenizer's files, the template in use, the libraries' versions."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        path = Path(model_folder) / name
        if path.is_file():
            digest.update(f"{name}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    digest.update((read_chat_template(chat_template) or "").encode())
    digest.update(f"transformers {version('transformers')} tokenizers {version('tokenizers')}".encode())
    return digest.hexdigest()
