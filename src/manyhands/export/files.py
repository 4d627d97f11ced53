"""Folders written whole or not at all, their tensor files, and copies from the source model. Knows no models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from manyhands.config.named_templates import BEGIN_OF_TEXT
from manyhands.config.schema import ModelSection
from manyhands.core.errors import UserError
from manyhands.core.files import TEMPLATE_FOLDER, refuse_outside_links, rename_synced, write_json
from manyhands.data.tokenize.tokenizer import (
    TOKENIZER_FILES,
    load_tokenizer,
    open_tokenizer,
    read_chat_template,
    tokens_to_add,
)
from manyhands.export.record import keep_by_hand, write_record
from manyhands.infer.decode import end_of_turn

MORE_TOKENIZER_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)


def begin_folder(folder: Path, *, replace: bool) -> Path:
    """An empty folder beside ``folder``, which ``commit_folder`` replaces. UserError if that holds anything."""
    refuse_foreign(folder, replace=replace)
    partial = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def refuse_foreign(folder: Path, *, replace: bool) -> None:
    """UserError if writing to ``folder`` would lose something that is not the caller's."""
    if folder.exists() and (not folder.is_dir() or (not replace and any(folder.iterdir()))):
        raise UserError(
            "the output folder is not empty",
            where=str(folder),
            why="nothing is overwritten",
            fix="name an empty or a new folder",
        )


def commit_folder(partial: Path, folder: Path) -> None:
    """Moves ``partial`` with its record to ``folder`` once on disk; keeps files that were added or changed there."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    write_record(partial)
    if folder.exists():
        kept = keep_by_hand(folder, partial)
        if kept:
            print(f"kept in {folder}, added or changed by hand: {', '.join(kept)}", flush=True)
        folder.rename(old)
    rename_synced(partial, folder)
    shutil.rmtree(old, ignore_errors=True)


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """A safetensors file with the mode of any new file: safetensors (0.8.0) writes one that only its owner reads."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt", **(metadata or {})})
    path.chmod(mode)


def copy_config(source: Path, target: Path, dtype: str, vocab_size: int) -> None:
    """The source's config.json with the saved dtype and vocabulary, generation_config.json and any code files."""
    refuse_outside_links(source)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config = {
        key: value
        for key, value in config.items()
        if key not in ("torch_dtype", "quantization_config") and not key.startswith("_attn_implementation")
    }
    fields = config.get(
        "text_config", config
    )  # multimodal models keep it there, and may leave it to transformers' default
    fields["vocab_size"] = vocab_size
    for part in (part for part in config.values() if isinstance(part, dict)):  # of a multimodal model: text, towers
        part |= {key: dtype for key in ("dtype", "torch_dtype") if key in part}
    write_json(target / "config.json", config | {"dtype": dtype})
    if (source / "generation_config.json").is_file():
        shutil.copyfile(source / "generation_config.json", target / "generation_config.json")
    if "auto_map" in config:
        for code in source.glob("*.py"):
            shutil.copyfile(code, target / code.name)


def write_tokenizer(source: Path, target: Path, asked: ModelSection | None = None) -> dict[str, int]:
    """The tokenizer's files as they are, or with the chat template and the new tokens that were asked for.

    Returns the ids of the new tokens. They are written by transformers, which alone knows a tokenizer's files; all else
    is copied.
    """
    refuse_outside_links(source)
    if asked is None:
        _copy_tokenizer(source, target, None)
        return {}
    if not asked.new_tokens and not asked.special_tokens:
        text = read_chat_template(asked.chat_template, source)
        if text is not None and BEGIN_OF_TEXT in text:
            text = open_tokenizer(source, asked).chat_template
        _copy_tokenizer(source, target, text)
        return {}
    before = load_tokenizer(source, trust_remote_code=asked.trust_remote_code)
    tokenizer = open_tokenizer(source, asked)
    tokenizer.save_pretrained(target)
    _copy_files(source, target, MORE_TOKENIZER_FILES)
    added = tokens_to_add(before, asked.new_tokens, asked.special_tokens)
    return {token: tokenizer.convert_tokens_to_ids(token) for token in added}


def extend_ends(target: Path, asked: ModelSection) -> None:
    """Let generation stop where an assistant's turn ends by the template that was given: its token joins
    generation_config.json.

    A base model stops at the end of a document only. Nothing is changed where neither template nor tokens were given.
    """
    if asked.chat_template is None and not asked.new_tokens and not asked.special_tokens:
        return
    tokenizer = load_tokenizer(target, trust_remote_code=asked.trust_remote_code)
    closing = [*end_of_turn(tokenizer), *([tokenizer.eos_token_id] if "eos" in asked.special_tokens else [])]
    path = target / "generation_config.json"
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(key) is not None}
    fields = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else ids
    stated = fields.get("eos_token_id")
    ends = [stated] if isinstance(stated, int) else list(stated or ())
    if not set(closing) <= set(ends):
        write_json(path, fields | {"eos_token_id": list(dict.fromkeys((*ends, *closing)))})


def _copy_tokenizer(source: Path, target: Path, text: str | None) -> None:
    """``text``, a chat template, takes the place of the source's."""
    _copy_files(source, target, TOKENIZER_FILES + MORE_TOKENIZER_FILES)
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


def _copy_files(source: Path, target: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
