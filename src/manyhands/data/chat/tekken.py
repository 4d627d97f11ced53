"""Tokenizers of mistral-common (``tekken.json``) and their versions' chat templates. Imports torch when called."""

from pathlib import Path
from typing import Any

from manyhands.config.named_templates import TEMPLATES, NamedTemplate, read_template
from manyhands.core.errors import UserError
from manyhands.core.files import read_json

FILE = "tekken.json"
NAME = "tekken"  # of the template of the file's version
HF_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "spiece.model")
BY_VERSION: dict[int, NamedTemplate] = {  # from this version on
    3: NamedTemplate(read_template("tekken-v3"), ("[INST]", "[/INST]")),
    7: TEMPLATES["mistral-v7"],
    13: NamedTemplate(read_template("tekken-v13"), TEMPLATES["mistral-v7"].tokens),
}


def is_tekken_only(folder: Path) -> bool:
    """Whether the folder's tokenizer is ``tekken.json`` alone."""
    return (folder / FILE).is_file() and not any((folder / name).is_file() for name in HF_FILES)


def tekken_template(folder: Path) -> NamedTemplate:
    """The template of the version in the folder's ``tekken.json``. Raises UserError."""
    path = folder / FILE
    read = read_json(path) if path.is_file() else None
    config = read.get("config") if isinstance(read, dict) else None
    version = str(config.get("version", "")) if isinstance(config, dict) else ""
    number = version.removeprefix("v").partition("m")[0]
    if not number.isdecimal():
        raise UserError(
            f"the chat template {NAME} is that of the version in {FILE}, which "
            + ("states none" if path.is_file() else "the model folder does not have"),
            where=str(path),
            fix="leave model.chat_template out, or name another one, such as mistral-v7",
        )
    return BY_VERSION[max((first for first in BY_VERSION if first <= int(number)), default=min(BY_VERSION))]


def load_tekken(folder: Path) -> Any:
    """``tekken.json`` as transformers converts it, with its version's template or the folder's. Raises UserError."""
    try:
        from transformers.integrations.mistral.tokenizer import convert_tekken_tokenizer

        tokenizer: Any = convert_tekken_tokenizer(str(folder / FILE))
    except Exception as error:  # whatever the file holds
        raise UserError(
            "the tokenizer cannot be loaded",
            where=str(folder / FILE),
            why=f"{type(error).__name__}: {error}",
            fix="copy the model's tokenizer.json into the folder, if it has one",
        ) from error
    tokenizer.name_or_path = str(folder)
    if not tokenizer.chat_template:
        tokenizer.chat_template = tekken_template(folder).text
    return tokenizer
