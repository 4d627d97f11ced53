"""Tokenizer files with values that no publisher writes: a message, in bounded memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from manyhands.core.errors import UserError
from manyhands.data.tokenize.prepare import prepare
from manyhands.data.tokenize.tokenizer import load_tokenizer, widen_cache
from manyhands.importers.load import config_from_mapping
from tests.support.tiny import tiny_tokenizer


def change(folder: Path, name: str, act: Callable[[dict[str, Any]], object]) -> None:
    fields = json.loads((folder / name).read_text())
    act(fields)
    (folder / name).write_text(json.dumps(fields))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_tokenizer().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "act",
    [
        lambda fields: fields["model"]["vocab"].update(a=2**31),
        lambda fields: fields["added_tokens"][0].update(id=2**32 - 1),
    ],
)
def test_an_id_that_would_take_gigabytes_is_refused(folder: Path, act: Callable[[dict[str, Any]], object]) -> None:
    change(folder, "tokenizer.json", act)
    with pytest.raises(UserError, match="tokenizer cannot be loaded") as caught:
        load_tokenizer(folder)
    assert "a token has the id" in caught.value.why


def test_long_numbers_that_are_no_ids_are_fine(folder: Path) -> None:
    change(folder, "tokenizer.json", lambda fields: fields["model"]["vocab"].update({": 12345678": 300}))
    assert load_tokenizer(folder).get_vocab()[": 12345678"] == 300


@pytest.mark.parametrize("value", ["2048", [], {"a": 1}])
def test_a_length_that_is_no_number_is_refused_before_any_row(folder: Path, value: Any) -> None:
    change(folder, "tokenizer_config.json", lambda fields: fields.update(model_max_length=value))
    with pytest.raises(UserError, match="tokenizer cannot be loaded"):
        load_tokenizer(folder)


def test_an_end_of_text_token_without_characters_is_none(folder: Path, tmp_path: Path) -> None:
    change(folder, "tokenizer_config.json", lambda fields: fields.update(eos_token=""))
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi."}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    data = {"train": str(tmp_path / "rows.jsonl"), "cache": str(tmp_path / "cache"), "validation_fraction": 0.0}
    config = config_from_mapping({"name": "run", "model": {"name": str(folder)}, "data": data})
    assert prepare(config, folder, lambda text: None).num_samples == 1


def test_a_wider_cache_keeps_the_ids() -> None:
    text = " ".join(f"word{number} Hello" for number in range(200))
    tokenizer = tiny_tokenizer()
    before = tokenizer.encode(text)
    widen_cache(tokenizer)
    assert [tokenizer.encode(text) for _ in range(2)] == [before, before]
