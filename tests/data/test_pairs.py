"""Rows of two answers to one prompt, as several tools write them: samples of two documents behind the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manyhands.core.errors import UserError
from manyhands.data.batch.collate import BatchShape, collate_samples
from manyhands.data.store.store import TokenStore
from manyhands.data.store.streams import split_documents
from manyhands.data.tokenize.prepare import prepare
from manyhands.data.tokenize.tokenizer import load_tokenizer

ASKED = [{"role": "user", "content": "Name a prime"}]
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("It is seven.", "Nine"))
TURNS = [{"from": "human", "value": "Name a prime"}]
SYSTEM = [{"role": "system", "content": "Be kind."}]


def said(answer: dict[str, str]) -> dict[str, str]:
    return {"from": "gpt", "value": answer["content"]}


# What a row holds, data.fields, and the messages of the prompt.
ROWS: dict[str, tuple[dict[str, Any], dict[str, str], list[dict[str, str]]]] = {
    "TRL, strings": ({"prompt": "Name a prime", "chosen": GOOD["content"], "rejected": BAD["content"]}, {}, ASKED),
    "TRL, messages": ({"prompt": SYSTEM + ASKED, "chosen": [GOOD], "rejected": [BAD]}, {}, SYSTEM + ASKED),
    "TRL, implicit prompt": ({"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD], "score_chosen": 8.0}, {}, ASKED),
    "UltraFeedback": (
        {"prompt": "Name a prime", "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD], "messages": [*ASKED, GOOD]},
        {},
        ASKED,
    ),
    "Axolotl, chat_template.default": ({"messages": ASKED, "chosen": GOOD, "rejected": BAD}, {}, ASKED),
    "Axolotl, intel": (
        {"system": "Be kind.", "question": "Name a prime", "chosen": GOOD["content"], "rejected": BAD["content"]},
        {},
        SYSTEM + ASKED,
    ),
    "Axolotl, argilla": (
        {"instruction": "Name a prime", "chosen_response": GOOD["content"], "rejected_response": BAD["content"]},
        {"chosen": "chosen_response", "rejected": "rejected_response"},
        ASKED,
    ),
    "LLaMA-Factory, alpaca": (
        {"instruction": "Name a", "input": "prime", "chosen": GOOD["content"], "rejected": BAD["content"]},
        {},
        [{"role": "user", "content": "Name a\nprime"}],
    ),
    "LLaMA-Factory, sharegpt": ({"conversations": TURNS, "chosen": said(GOOD), "rejected": said(BAD)}, {}, ASKED),
    "ms-swift": ({"messages": [*ASKED, GOOD], "rejected_response": BAD["content"]}, {}, ASKED),
    "ms-swift, messages": (
        {"messages": [*ASKED, GOOD], "rejected_messages": [*ASKED, BAD]},
        {"rejected_response": "rejected_messages"},
        ASKED,
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_both_answers_are_the_tokenizers_own_behind_one_prompt(
    name: str, make_config, tmp_path: Path, model_folder: Path, write_rows
) -> None:
    row, fields, prompt = ROWS[name]
    path = write_rows([row])
    if name.startswith("TRL"):
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist([row]), path)
    config = make_config(path, task="preference", fields=fields, validation_fraction=0.0)
    facts = prepare(config, model_folder, lambda line: None)
    store = TokenStore.open(facts.folder)
    sample, tokenizer = store.train.sample(0), load_tokenizer(model_folder)
    documents = split_documents(sample, store.train.streams)
    asked = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    for document, answer in zip(documents, (GOOD, BAD), strict=True):
        ids = tokenizer.apply_chat_template([*prompt, answer], return_dict=False)
        assert document["tokens"].tolist() == ids
        trained = document["tokens"][document["mask"]].tolist()
        assert document["mask"].argmax() == len(asked)
        assert tokenizer.decode(trained) == answer["content"] + "<|im_end|>"
    assert facts.num_documents == 2 and facts.num_loss_tokens == sample["mask"].sum()


FAULTS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"prompt": "a", "chosen": "", "rejected": "b"}, "chosen is empty"),
    ({"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": ""}]}, "answer of rejected is empty"),
    ({"chosen": [*ASKED, GOOD], "rejected": ASKED}, "answer of rejected is empty"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "are the same answer"),
    ({"chosen": [*ASKED, GOOD], "rejected": [{"role": "user", "content": "Hi"}, BAD]}, "have no common prompt"),
    ({"chosen": "Human: a Assistant: b", "rejected": "Human: a Assistant: c"}, "need one prompt"),
    ({"prompt": "a", "question": "b", "chosen": "c", "rejected": "d"}, "need one prompt, .* has prompt and question"),
    ({"prompt": "a", "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]}, "prompt is not the prompt"),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "weight": 0.5}, "every pair weighs 1"),
    ({"prompt": "a", "chosen": [{**GOOD, "weight": 0.5}], "rejected": "c"}, "every pair weighs 1"),
    ({"prompt": "a", "chosen": "b", "rejected": None}, "rejected is null"),
    ({"prompt": "a", "chosen": "b " * 3000, "rejected": "c"}, "longer than data.max_length"),
)


@pytest.mark.parametrize(("row", "words"), FAULTS, ids=[words for _, words in FAULTS])
def test_faults_are_named_with_their_place(row: dict, words: str, make_config, model_folder: Path, write_rows) -> None:
    rows = [ROWS["TRL, strings"][0], row]
    with pytest.raises(UserError, match=words) as caught:
        prepare(make_config(write_rows(rows), task="preference"), model_folder, lambda line: None)
    assert "train.jsonl:2" in str(caught.value) and caught.value.fix


def test_pairs_are_cut_and_kept_together(make_config, model_folder: Path, write_rows) -> None:
    rows = [{"prompt": f"count {n}", "chosen": "one two " * n, "rejected": "no " * (12 - n)} for n in range(1, 11)]
    config = make_config(
        write_rows(rows), task="preference", max_length=60, too_long="truncate", validation_fraction=0.0
    )
    store = TokenStore.open(prepare(config, model_folder, lambda line: None).folder)
    train, numbers = store.train, np.array([3, 0, 9])
    samples = [split_documents(train.sample(int(number)), train.streams) for number in numbers]
    lengths = [len(document["tokens"]) for documents in samples for document in documents]
    assert max(lengths) == 60
    packed, padded = (collate_samples(train, numbers, BatchShape(packed=packed)) for packed in (True, False))
    assert np.diff(packed["cu_seq_lens"]).tolist() == padded["documents"].tolist() == lengths
    assert packed["cu_documents"].tolist() == [0, 2, 4, 6] and padded["input_ids"].shape == (6, 60)


def test_a_run_that_trains_answers_says_how_pairs_are_trained(make_config, model_folder: Path, write_rows) -> None:
    with pytest.raises(UserError) as caught:
        prepare(make_config(write_rows([ROWS["TRL, strings"][0]])), model_folder, lambda line: None)
    assert "task: preference" in caught.value.fix
