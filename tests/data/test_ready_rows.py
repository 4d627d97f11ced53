"""Rows that bring tokens or texts with what is trained of them: taken as they are, or refused with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from manyhands.core.errors import UserError
from manyhands.data.read.files import Row
from manyhands.data.read.formats import RowRefused, detect_format, to_conversation
from manyhands.data.store.store import TokenStore
from manyhands.data.tokenize.prepare import prepare

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


PARTLY = {"input_ids": [5, 6, 7, 8]}


@pytest.mark.parametrize(
    ("more", "trained", "weights"),
    [
        *(({name: [0, 0, 1, 1]}, [0, 0, 1, 1], None) for name in ("completion_mask", "assistant_masks", "loss_mask")),
        ({"assistant_masks": [False, True, True, False]}, [0, 1, 1, 0], None),
        ({"labels": [-100, 6, 7, 8], "completion_mask": [0, 0, 1, 1], "loss_mask": [1, 1, 1, 0]}, [0, 0, 1, 0], None),
        ({"loss_weights": [0, 0.5, 2, 0], "weight": 2}, [0, 1, 1, 0], [0, 1, 4, 0]),
        ({"loss_weights": [1.0, 1.0, 1.0, 0.0], "loss_mask": [0, 1, 1, 1]}, [0, 1, 1, 0], None),
        ({"position_ids": [0, 1, 2, 3], "seq_lengths": [4], "length": 4, "attention_mask": [True] * 4}, [1] * 4, None),
        ({"special_tokens_mask": [1, 0, 0, 1], "token_type_ids": [0] * 4, "length": [4]}, [1] * 4, None),
    ],
)
def test_masks_and_weights_say_what_is_trained(
    more: dict[str, Any], trained: list[int], weights: list[float] | None, write_rows, make_config, model_folder: Path
) -> None:
    config = make_config(write_rows([PARTLY | more]), validation_fraction=0)
    store = store_of(config, model_folder)
    sample = store.train.sample(0)
    assert sample["mask"].astype(int).tolist() == trained and not store.meta["sources"][0]["unread"]
    assert (sample["weights"].tolist() if "weights" in sample else None) == weights


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"completion_mask": [0, 1]}, "completion_mask has 2 entries, input_ids 4"),
        ({"loss_mask": [0, 1, 2, 1]}, "loss_mask must be 0 or 1 for each token"),
        ({"assistant_masks": "0011"}, "assistant_masks must be a list"),
        ({"assistant_masks": [0] * 4}, "no loss token"),
        ({"labels": [-100] * 4}, "no loss token"),
        ({"loss_weights": [1, -1, 1, 1]}, "entry 1 of loss_weights must be a number >= 0"),
        ({"loss_weights": [1e39] * 4}, "a weight is larger than"),
        ({"position_ids": [0, 1, 0, 1]}, "divide this pack"),
        ({"position_ids": [1, 2, 3, 4]}, "position_ids are not 0, 1, 2"),
        ({"seq_lengths": [2, 2]}, "divide this pack"),
        ({"length": 5}, "length is 5, and input_ids has 4 entries"),
        ({"attention_mask": [1, 1, 2, 2]}, "attention_mask is not 1"),
        ({"token_type_ids": [0, 0, 1, 1]}, "token_type_ids are not all 0"),
        ({"special_tokens_mask": [1]}, "special_tokens_mask has 1 entries"),
        ({"response_mask": [0, 0, 1, 1]}, "the column response_mask would not be used"),
        ({"token_weights": [0, 0, 1, 1]}, "the column token_weights would not be used"),
        ({"rewards": [0, 0.5, 1, 1]}, "the column rewards has a number for each token"),
        ({"segment_ids": [0, 0, 1, 1]}, "the column segment_ids has a number for each token"),
        ({"input_ids": [5, -1, 7, 8]}, "input_ids holds -1 at place 1, outside of the tokenizer's"),
    ],
)
def test_what_the_columns_of_tokens_say_is_never_passed_over(
    more: dict[str, Any], words: str, write_rows, make_config, model_folder: Path
) -> None:
    with pytest.raises(UserError) as caught:
        store_of(make_config(write_rows([PARTLY | more]), validation_fraction=0), model_folder)
    assert words in str(caught.value) and "train.jsonl:1" in str(caught.value)


def test_columns_of_tokens_may_have_other_names_or_be_left_out(write_rows, make_config, model_folder: Path) -> None:
    rows = write_rows([PARTLY | {"mine": [0, 0, 1, 1], "position_ids": [0, 1, 0, 1], "text": "a b"}])
    config = make_config(
        rows, validation_fraction=0, format="tokens", fields={"loss_mask": "mine"}, ignore=["position_ids"]
    )
    store = store_of(config, model_folder)
    assert store.train.num_loss_tokens.tolist() == [2] and store.meta["sources"][0]["unread"] == ["text"]


def test_segments_are_tokenized_each_for_itself_and_nothing_is_added(
    write_rows, make_config, model_folder: Path
) -> None:
    from manyhands.data.tokenize.tokenizer import load_tokenizer

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
        ({"segments": [*SEGMENTS, {"text": "a", "label": True, "weight": 2}]}, "segment 4 has weight, which would not"),
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
    from manyhands.data.tokenize.part import count_held

    content = to_conversation(Row({"input_ids": [7] * 8192}, "f", 1), "tokens")
    assert not isinstance(content, str) and count_held(content) > 8192
