"""Folders that are written whole or not at all, and what is copied from the source model's folder. Knows no tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from manyhands.data.tokenizer import TOKENIZER_FILES, read_chat_template
from manyhands.errors import UserError
from manyhands.files import write_json

MORE_TOKENIZER_FILES = ("tekken.json", "preprocessor_config.json")
TEMPLATE_FOLDER = "additional_chat_templates"


def begin_folder(folder: Path, *, replace: bool) -> Path:
    """An empty folder beside ``folder`` to write into; ``commit_folder`` puts it in its place.

    UserError if ``folder`` holds anything and the caller does not own it (``replace``).
    """
    refuse_foreign(folder, replace=replace)
    partial = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def refuse_foreign(folder: Path, *, replace: bool) -> None:
    """UserError if writing to ``folder`` would lose something that is not the caller's."""
    if folder.exists() and (not folder.is_dir() or (not replace and any(folder.iterdir()))):
        raise UserError(
            "the output folder is not empty", where=str(folder), why="nothing is overwritten", fix="name an empty or a new folder"
        )


def commit_folder(partial: Path, folder: Path) -> None:
    """Renames ``partial`` to ``folder``; what stood there before is removed last."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def copy_config(source: Path, target: Path, dtype: str) -> None:
    """The source's config.json with the saved dtype, its code files if it has any, and generation_config.json."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config = {key: value for key, value in config.items() if key != "torch_dtype" and not key.startswith("_attn_implementation")}
    write_json(target / "config.json", config | {"dtype": dtype})
    if (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", target / "generation_config.json")
    if "auto_map" in config:
        for code in source.glob("*.py"):
            shutil.copyfile(code, target / code.name)


def copy_tokenizer(source: Path, target: Path, chat_template: str | None = None) -> None:
    """The tokenizer's files as they are; ``chat_template`` (Jinja text, or a path to it) takes the place of the source's."""
    for name in TOKENIZER_FILES + MORE_TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
    text = read_chat_template(chat_template)
    if text is None:
        if (source / TEMPLATE_FOLDER).is_dir():
            shutil.copytree(source / TEMPLATE_FOLDER, target / TEMPLATE_FOLDER)
        return
    (target / "chat_template.json").unlink(missing_ok=True)
    (target / "chat_template.jinja").write_text(text, encoding="utf-8")
    path = target / "tokenizer_config.json"
    if path.is_file():
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields.pop("chat_template", None) is not None:
            write_json(path, fields)
