"""Rows that bring tokens or texts with what is trained of them: taken as they are, or refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manyhands.core.errors import UserError
from manyhands.data.files import Row
from manyhands.data.formats import RowRefused, detect_format, to_conversation
from manyhands.data.prepare import prepare
from manyhands.data.store import TokenStore

SEGMENTS = [{"text": "Q: a", "label": False}, {"text": "b c", "label": True}, {"text": "!", "label": False}]


def store_of(config: Any, folder: Path) -> TokenStore:
    return TokenStore.open(prepare(config, folder, lambda _: None).folder)


def test_tokens_are_taken_as_they_are(write_rows, make_config, model_folder: Path) -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8], "attention_mask": [1, 1, 1, 1]},
        {"input_ids": [9, 10], "weight": 2},
    ]
    config = make_config(write_rows(rows), validation_fraction=0, format="tokens")
    first, second = (store_of(config, model_folder).train.sample(number) for number in (0, 1))
    assert (first["tokens"].tolist(), first["mask"].tolist()) == ([5, 6, 7, 8], [False, False, True, True])
    assert (second["tokens"].tolist(), second["mask"].tolist()) == ([9, 10], [True, True])
    assert first["weights"].tolist() == [0, 0, 1, 1] and second["weights"].tolist() == [2, 2]


def test_segments_are_tokenized_each_for_itself_and_nothing_is_added(
    write_rows, make_config, model_folder: Path
) -> None:
    from manyhands.data.tokenizer import load_tokenizer

    config = make_config(write_rows([{"segments": SEGMENTS}] * 2), validation_fraction=0)
    sample = store_of(config, model_folder).train.sample(0)
    tokenizer = load_tokenizer(model_folder)
    parts = [tokenizer.encode(part["text"], add_special_tokens=False) for part in SEGMENTS]
    assert sample["tokens"].tolist() == [number for part in parts for number in part]
    assert tokenizer.decode(sample["tokens"][sample["mask"]]) == "b c"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"input_ids": [1, 2], "labels": [-100]}, "labels has 1 entries, input_ids 2"),
        ({"input_ids": [1, 2], "labels": [-100, 3]}, "label 1 is 3, neither -100 nor the token 2"),
        ({"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]}, "leave padding out"),
        ({"input_ids": "1 2"}, "input_ids must be a list of integers"),
        ({"input_ids": [True, False, True]}, "input_ids must be a list of integers"),
        ({"input_ids": [1, 10**30]}, "of 32 bits"),
        ({"input_ids": [1, 2], "attention_mask": 1}, "attention_mask must be a list"),
        ({"segments": [{"text": "a", "label": 1}]}, "label: true or false"),
        ({"segments": [*SEGMENTS, {"label": True}]}, "not so number 4"),
    ],
)
def test_what_cannot_be_taken_is_refused(fields: dict[str, Any], words: str) -> None:
    format = "segments" if "segments" in fields else "tokens"
    with pytest.raises(RowRefused, match=words):
        to_conversation(Row(fields, "f", 1), format)


def test_ids_that_the_tokenizer_does_not_have_are_refused(write_rows, make_config, model_folder: Path) -> None:
    with pytest.raises(UserError, match="cannot be trained") as caught:
        store_of(make_config(write_rows([{"input_ids": [1, 10**6]}]), validation_fraction=0), model_folder)
    assert "outside of the tokenizer's" in caught.value.details[0]


def test_tokens_beside_the_text_that_they_were_made_of_are_not_taken_for_the_rows() -> None:
    assert detect_format([Row({"text": "a", "input_ids": [1]}, "f", 1)]) == "text"
    assert detect_format([Row({"input_ids": [1], "labels": [1]}, "f", 1)]) == "tokens"


def test_rows_of_many_ids_do_not_wait_by_the_thousand() -> None:
    from manyhands.data.tokenize import count_held

    content = to_conversation(Row({"input_ids": [7] * 8192}, "f", 1), "tokens")
    assert not isinstance(content, str) and count_held(content) > 8192
