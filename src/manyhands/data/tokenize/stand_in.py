"""A tokenizer for plans without one: a token every four characters, about what trained ones reach on English."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from manyhands.data.tokenize.tokenizer import TOKENIZER_FILES

CHARACTERS = 4  # of a token
_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' ~ message.role ~ '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}"
    "{%- elif message.content %}{%- for part in message.content %}{{- part.text or '' }}{%- endfor %}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}{{- call | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in TOKENIZER_FILES if not name.startswith("chat_template"))


def write_stand_in(model: Path, folder: Path) -> None:
    """Fills ``folder`` with the configuration of ``model`` and the tokenizer. The model's chat template is kept."""
    for path in (*model.glob("*.json"), *model.glob("*.jinja")):
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    fields = json.loads((model / "config.json").read_text(encoding="utf-8"))
    size = fields.get("vocab_size") or (fields.get("text_config") or {}).get("vocab_size") or 0
    others = [f"<{number}>" for number in range(len(special), int(size))]  # rows that are tokenized may have any id
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": True}
            for number, token in enumerate(special)
        ],
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": rf"\n|[^\n]{{1,{CHARACTERS}}}"},
            "behavior": "Isolated",
            "invert": False,
        },
        "model": {
            "type": "WordLevel",
            "vocab": {token: n for n, token in enumerate(special + others)},
            "unk_token": "<unk>",
        },
    }
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<|im_end|>"}
    config["pad_token"] = "<|im_end|>"
    if not (folder / "chat_template.jinja").is_file():
        config["chat_template"] = _TEMPLATE
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
