"""Folders with tekken.json alone: ids and texts as mistral-common has them (compared with it, 1.13.1, on its own
vocabulary of September 2024 under the versions 7, 11 and 13), from a vocabulary of single bytes and a few words.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from manyhands.core.errors import UserError
from manyhands.data.chat.render import render
from manyhands.data.chat.tekken import BY_VERSION
from manyhands.data.read.formats import Conversation
from manyhands.data.tokenize.tokenizer import load_tokenizer, tokenizer_digest

SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]",
           "[/THINK]")  # fmt: skip
WORDS = (b"He", b"ll", b"Hell", b"Hello")
NUM_SPECIAL = 20  # the rest are fillers
TURNS = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."), ("user", "Why?"), ("assistant", "So.")]
LATER = "<s>[SYSTEM_PROMPT]Be brief.[/SYSTEM_PROMPT][INST]Hi[/INST]Hello.</s>[INST]Why?[/INST]So.</s>"


def write_tekken(folder: Path, version: str | None = "v13") -> Path:
    tokens = [bytes([value]) for value in range(256)] + list(WORDS)
    entries = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(tokens)]
    special = [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(SPECIAL)]
    config: dict[str, Any] = {
        "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+",
        "num_vocab_tokens": len(tokens),
        "default_vocab_size": NUM_SPECIAL + len(tokens),
        "default_num_special_tokens": NUM_SPECIAL,
    } | ({"version": version} if version else {})
    folder.mkdir(exist_ok=True)
    text = json.dumps({"config": config, "vocab": entries, "special_tokens": special})
    (folder / "tekken.json").write_text(text)
    return folder


def messages(*turns: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize(
    ("version", "text"),
    [
        ("v3", "<s>[INST]Hi[/INST]Hello.</s>[INST]Be brief.\n\nWhy?[/INST]So.</s>"),
        ("v7", LATER),
        ("v7m1", LATER),
        ("v11", LATER),
        ("v13", LATER),
    ],
)
def test_the_version_decides_the_template(tmp_path: Path, version: str, text: str) -> None:
    folder = write_tekken(tmp_path, version)
    for name in (None, "tekken"):
        tokenizer = load_tokenizer(folder, name)
        rendered = render(Conversation(messages(*TURNS)), tokenizer)
        assert tokenizer.decode(rendered.ids) == text
        assert tokenizer.decode(rendered.ids[rendered.trained]) == "Hello.</s>So.</s>"


def test_ids_are_those_of_the_file(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tekken(tmp_path))
    rendered = render(Conversation(messages(("user", "Hi"), ("assistant", "Hello"))), tokenizer)
    byte = NUM_SPECIAL  # the id of byte 0
    assert rendered.ids.tolist() == [1, 3, byte + ord("H"), byte + ord("i"), 4, byte + 256 + 3, 2]
    assert len(tokenizer) == NUM_SPECIAL + 260 and tokenizer.eos_token == "</s>" and tokenizer.is_fast


def test_thoughts_are_written_from_version_13_on(tmp_path: Path) -> None:
    thought = [*messages(("user", "Hi")), {"role": "assistant", "content": "A", "reasoning_content": "hm"}]
    tokenizer = load_tokenizer(write_tekken(tmp_path))
    rendered = render(Conversation(thought), tokenizer)
    assert tokenizer.decode(rendered.ids) == "<s>[INST]Hi[/INST][THINK]hm[/THINK]A</s>"
    assert tokenizer.decode(rendered.ids[rendered.trained]) == "[THINK]hm[/THINK]A</s>"
    assert "[THINK]" not in BY_VERSION[7].text


def test_a_template_of_the_folder_s_own_or_of_the_run_takes_precedence(tmp_path: Path) -> None:
    folder = write_tekken(tmp_path)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}</s>{% endfor %}")
    assert load_tokenizer(folder).chat_template.startswith("{% for m in messages")
    assert load_tokenizer(folder, "tekken").chat_template == BY_VERSION[13].text
    assert load_tokenizer(folder, "mistral-tekken").chat_template != BY_VERSION[13].text


def test_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the model folder does not have"):
        (tmp_path / "tokenizer.json").write_text("{}")
        load_tokenizer(tmp_path, "tekken")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="which states none"):
        load_tokenizer(write_tekken(tmp_path, version=None), "tekken")
    before = tokenizer_digest(write_tekken(tmp_path))
    assert tokenizer_digest(write_tekken(tmp_path, "v11")) != before
    (tmp_path / "tekken.json").write_text('{"config": {"version": "v13"}}')
    with pytest.raises(UserError, match="cannot be loaded"):
        load_tokenizer(tmp_path)
