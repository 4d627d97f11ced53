"""Several sources in one run: counts, weights, held-out rows, text beside conversations, weights of tokens, long
documents.
"""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands.core.errors import UserError
from manyhands.data.read.files import FilePart
from manyhands.data.read.sources import ResolvedSource
from manyhands.data.store.streams import weights_of
from manyhands.data.tokenize import part as tokenize_module
from manyhands.data.tokenize.divide import divide_samples
from manyhands.data.tokenize.long_text import LongText, read_documents
from manyhands.data.tokenize.prepare import prepare
from manyhands.data.tokenize.tokenizer import load_tokenizer
from manyhands.metrics.summary import describe_data
from tests.data.conftest import make_tokenizer, run

CHAT = [
    {"messages": [{"role": "user", "content": f"say {n}"}, {"role": "assistant", "content": f"it is {n}"}]}
    for n in range(120)
]
TEXT = [{"text": f"Text number {n}. " * (1 + n % 4)} for n in range(60)]


@pytest.fixture
def two(write_rows) -> list[dict[str, Any]]:
    return [{"path": str(write_rows(CHAT, "chat.jsonl"))}, {"path": str(write_rows(TEXT, "prose.jsonl"))}]


@pytest.fixture
def make_mixed(make_config, write_rows):
    def make(sources: list, **keys: Any):
        config = make_config("x", task="mixed", **keys)
        data = config.data.model_dump() | {"train": sources}
        return config.model_validate(config.model_dump() | {"data": data})

    return make


def test_each_source_has_its_own_way_with_what_is_too_long(write_rows, make_mixed, model_folder: Path) -> None:
    text = {"path": str(write_rows([{"text": "word " * 300}] * 4, "long.jsonl")), "too_long": "split"}
    chat = [*CHAT[:40], {"messages": [{"role": "user", "content": "word " * 300}, CHAT[0]["messages"][1]]}]
    sources = [{"path": str(write_rows(chat, "chat.jsonl"))}, text]
    facts, store, _ = run(make_mixed(sources, max_length=100, too_long="drop", validation_fraction=0), model_folder)
    assert facts.left_out == {"data.too_long": {"chat": 1}} and facts.num_split == 4
    assert np.bincount(store.train.sources)[0] == 40 and np.bincount(store.train.sources)[1] >= 12
    whole, _, _ = run(make_mixed([text | {"too_long": "error"}], validation_fraction=0), model_folder)
    parts, _, _ = run(make_mixed([text], max_length=100, validation_fraction=0), model_folder)
    assert parts.num_loss_tokens == whole.num_loss_tokens
    with pytest.raises(UserError, match=r"1 row is longer than data.max_length"):
        run(make_mixed([sources[0] | {"too_long": "error"}, text], max_length=100, too_long="drop"), model_folder)
    with pytest.raises(UserError, match=r"data.train\[1\].too_long: split needs task: cpt or mixed"):
        run(make_mixed(sources, max_length=100).model_copy(update={"task": "sft"}), model_folder)


def test_text_is_trained_whole_and_conversations_by_their_mask(two, make_mixed, model_folder: Path) -> None:
    facts, store, lines = run(make_mixed(two), model_folder)
    assert facts.num_samples == 162 and facts.num_validation_samples == 18 and facts.samples_per_epoch == 162
    for index in range(store.train.num_samples):
        trained = store.train.sample(index)["mask"]
        assert trained.all() if store.train.sources[index] == 1 else 0 < trained.sum() < len(trained)
    chat, prose = store.meta["sources"]
    assert (chat["name"], chat["format"], prose["name"], prose["format"]) == ("chat", "messages", "prose", "text")
    assert (
        chat["num_samples"] + prose["num_samples"] == 162
        and chat["num_tokens"] + prose["num_tokens"] == facts.num_tokens
    )
    assert (chat["num_validation_samples"], prose["num_validation_samples"]) == (
        12,
        6,
    )  # 18 in proportion to 120 and 60
    assert any(line.startswith("source chat (messages): 108 samples") for line in lines)


def test_rows_of_both_kinds_in_one_file(write_rows, make_mixed, model_folder: Path, plain_folder: Path) -> None:
    rows = [row for pair in zip(CHAT, TEXT, strict=False) for row in pair]
    path = str(write_rows(rows))
    facts, store, _ = run(make_mixed([path], validation_fraction=0), model_folder)
    whole = [bool(store.train.sample(index)["mask"].all()) for index in range(facts.num_samples)]
    assert whole == [False, True] * 60 and store.meta["sources"][0]["format"] == "messages + text"
    with pytest.raises(UserError, match="no chat template"):
        run(make_mixed([path]), plain_folder)
    strange = str(write_rows([*rows, {"other": 1}], "strange.jsonl"))
    with pytest.raises(UserError, match="1 row cannot be trained") as caught:
        run(make_mixed([strange]), model_folder)
    assert "strange.jsonl:121: the format of the rows is not known (fields found: other)" in caught.value.details[0]


def test_weights_decide_how_often_rows_are_taken_and_share_the_tokens(two, make_mixed, model_folder: Path) -> None:
    plain, before, _ = run(make_mixed(two, validation_fraction=0), model_folder)
    two[0]["weight"], two[1]["weight"] = 0.5, 3
    facts, store, lines = run(make_mixed(two, validation_fraction=0), model_folder)
    assert facts.digest != plain.digest and "tokens cached: the choice of samples is new" in lines
    assert (Path(facts.folder) / "tokens.bin").samefile(Path(plain.folder) / "tokens.bin")
    assert (facts.num_samples, facts.samples_per_epoch) == (180, 60 + 180)
    assert [source["weight"] for source in store.meta["sources"]] == [0.5, 3.0]
    order = store.order_samples(0, batch_samples=8)
    taken = np.concatenate([order.samples(0, index) for index in range(order.steps_per_epoch(0))])
    assert np.bincount(store.train.sources[taken]).tolist() == [60, 180]
    for index in range(order.steps_per_epoch(0)):
        assert 1 <= (store.train.sources[order.samples(0, index)] == 0).sum() <= 3  # two in eight
    means = [before.train.lengths[before.train.sources == source].mean() for source in (0, 1)]
    assert facts.mean_length == pytest.approx((60 * means[0] + 180 * means[1]) / 240)
    by_tokens, _, _ = run(make_mixed(two, validation_fraction=0, batch={"loss_tokens": 100}), model_folder)
    order = store.order_samples(0, batch_loss_tokens=100)
    assert by_tokens.steps_of_epochs == (order.steps_per_epoch(0),)


def test_weights_that_leave_nothing_are_refused(write_rows, make_mixed, model_folder: Path) -> None:
    source = {"path": str(write_rows(CHAT[:10])), "weight": 0.01}
    with pytest.raises(UserError, match="no sample would be trained"):
        run(make_mixed([source], validation_fraction=0), model_folder)


def test_max_rows_of_a_source_and_validation_sources(two, write_rows, make_mixed, model_folder: Path) -> None:
    two[0]["max_samples"] = 30
    validation = [
        {"path": str(write_rows(CHAT[:9], "v.jsonl")), "max_samples": 4},
        str(write_rows(TEXT[:5], "w.jsonl")),
    ]
    facts, store, _ = run(make_mixed(two, validation=validation), model_folder)
    assert (facts.num_samples, facts.num_validation_samples, facts.num_dropped) == (30 + 60, 4 + 5, 90 + 5)
    assert np.bincount(store.train.sources).tolist() == [30, 60] and set(store.validation.sources.tolist()) == {2, 3}
    assert [source["num_validation_samples"] for source in store.meta["sources"]] == [0, 0, 4, 5]
    held_out, _, _ = run(make_mixed(two), model_folder)
    assert (held_out.num_samples, held_out.num_validation_samples) == (30 + 54, 18)
    assert run(make_mixed(two, max_samples=40), model_folder)[0].num_samples == 40


def test_the_same_file_twice_is_two_sources(write_rows, make_mixed, model_folder: Path) -> None:
    path = str(write_rows(CHAT))
    facts, store, _ = run(make_mixed([path, path], validation_fraction=0), model_folder)
    assert facts.num_samples == 240 and [source["name"] for source in store.meta["sources"]] == ["train", "train-2"]


def test_a_source_with_its_own_fields_and_what_names_the_tokens(write_rows, make_mixed, model_folder: Path) -> None:
    renamed = {"path": str(write_rows([{"frage": f"a {n}", "antwort": f"b {n}"} for n in range(40)], "r.jsonl"))}
    renamed["fields"] = {"question": "frage", "answer": "antwort"}
    sources = [renamed, str(write_rows(TEXT, "t.jsonl"))]
    names = {
        run(make_mixed(sources, **keys), model_folder)[0].digest
        for keys in ({}, {"train_on": "all"}, {"date": "2024-05-05"})
    }
    assert len(names) == 3


def test_split_divides_texts_and_refuses_long_conversations(write_rows, make_mixed, model_folder: Path) -> None:
    long_chat = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "word " * 200}]}]
    text = [{"text": f"Sentence {n} of a long text. " * 40} for n in range(30)]
    keys: dict[str, Any] = {"too_long": "split", "max_length": 64}
    facts, store, _ = run(make_mixed([str(write_rows([*CHAT, *text]))], **keys), model_folder)
    assert facts.num_split == 30 and facts.max_length == 64
    sets = [
        {tuple(s.sample(i)["tokens"].tolist()) for i in range(s.num_samples)} for s in (store.train, store.validation)
    ]
    assert not sets[0] & sets[1]
    with pytest.raises(UserError, match=r"1 row is longer than data.max_length") as caught:
        run(make_mixed([str(write_rows([*CHAT, *long_chat], "l.jsonl"))], **keys), model_folder)
    assert "split, which cannot divide conversations" in str(caught.value) and "l.jsonl:121" in caught.value.details[0]


def test_documents_are_held_out_whole(make_config) -> None:
    data = make_config(Path("x")).data
    source = [data_source("x")]
    continued = np.array([n % 5 != 0 for n in range(300)])  # 60 documents of 5 rows
    division = divide_samples(data, 0, np.zeros(300, np.int16), continued, source, np.arange(300))
    assert len(division.validation) == 20 and len(division.train) == 280
    assert all(len(set(rows)) == 5 for rows in division.validation.reshape(-1, 5))
    assert {int(row) // 5 for row in division.validation}.isdisjoint({int(row) // 5 for row in division.train})
    one_book = divide_samples(data, 0, np.zeros(300, np.int16), np.arange(300) > 0, source, np.arange(300))
    assert (len(one_book.validation), len(one_book.train)) == (20, 280)
    copies = divide_samples(
        data, 0, np.zeros(300, np.int16), continued, source, np.arange(300) % 10
    )  # two documents, 30 times each
    assert len(copies.validation) == 0 and len(copies.notes) == 1 and "so many copies" in copies.notes[0]


def data_source(path: str) -> Any:
    return ResolvedSource(path, path, "train", "train", (), "auto", {}, (), {}, False, "truncate", 1.0, None)


def test_weights_of_rows_and_messages_are_kept(write_rows, make_mixed, model_folder: Path) -> None:
    chat = [
        {
            "messages": [
                *row["messages"],
                {"role": "user", "content": "and?"},
                {"role": "assistant", "content": "no", "weight": 0.25},
            ]
        }
        for row in CHAT[:5]
    ]
    rows = [*chat, {"text": "Heavy text.", "weight": 3}, {"text": "Text."}]
    facts, store, _ = run(make_mixed([str(write_rows(rows))], validation_fraction=0), model_folder)
    assert store.train.has_weights and facts.num_samples == 7
    for index in range(5):
        trained = store.train.sample(index)["mask"]
        weights = weights_of(store.train.sample(index))
        assert set(weights[trained].tolist()) == {0.25, 1.0} and not weights[~trained].any()
        assert store.train.loss_weights[index] == pytest.approx(weights[1:].sum())
    assert set(weights_of(store.train.sample(5)).tolist()) == {3.0} and set(
        weights_of(store.train.sample(6)).tolist()
    ) == {1.0}
    assert store.train.loss_weights[5] == 3 * store.train.num_loss_tokens[5]
    with pytest.raises(UserError, match="1 row cannot be trained"):
        run(make_mixed([str(write_rows([*rows, {"text": "a b", "weight": 0}], "zero.jsonl"))]), model_folder)


WORDS = [
    "Hello",
    "there,",
    "how",
    "are you?",
    "Fine.",
    "user",
    "42",
    "x = foo(bar)\té",
    "ü",
    "日本",
    "😀",
    "def",
    "",
    " ",
    "\n",
    "\n\n",
]


def draw_text(draw: random.Random, num_words: int) -> str:
    return "".join(draw.choice(WORDS) + draw.choice([" ", "", "\n", "  "]) for _ in range(num_words)) + "."


@pytest.mark.parametrize("keys", [{}, {"adds_bos": True}, {"trim_offsets": False}])
def test_windows_give_the_ids_of_the_whole_text(keys: dict[str, bool]) -> None:
    draw, tokenizer = random.Random(0), make_tokenizer(**keys)
    for number in range(80):
        text = draw_text(draw, draw.randint(1, 300))
        wanted = tokenizer(text)["input_ids"]
        if number % 3 == 0:
            text = f"<s>{text}</s>"  # which a text may bring itself
            wanted = [*tokenizer(text, add_special_tokens=False)["input_ids"]]
        wanted += [tokenizer.eos_token_id] * (wanted[-1] != tokenizer.eos_token_id)
        window = draw.choice([200, 333, 500])
        pieces: Any = text if number % 2 else iter([text[at : at + 37] for at in range(0, len(text), 37)])
        assert np.concatenate(list(LongText(tokenizer, window, 100).encode(pieces))).tolist() == wanted


@pytest.mark.real
def test_windows_of_a_real_tokenizer(smollm2: Path) -> None:
    draw, tokenizer = random.Random(1), load_tokenizer(smollm2)
    text = draw_text(draw, 20_000)
    found = np.concatenate(list(LongText(tokenizer, 5000, 500).encode(text))).tolist()
    assert found == [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]


@pytest.mark.parametrize("too_long", ["split", "truncate", "error"])
def test_long_documents_are_as_if_tokenized_whole(
    too_long: str, tmp_path: Path, make_config, plain_folder: Path, monkeypatch
) -> None:
    draw = random.Random(2)
    documents = [draw_text(draw, n).replace("\n", " ") + "\nSecond line" for n in (5, 2000, 7, 900)]
    path = tmp_path / "a.txt"
    path.write_text("\n\n\n".join(documents))
    keys: dict[str, Any] = {"task": "cpt", "max_length": 50, "too_long": too_long, "validation_fraction": 0}

    def rows(cache: str) -> Any:
        try:
            store = run(make_config(path, cache=str(tmp_path / cache), **keys), plain_folder)[1]
        except UserError as error:
            return str(error)
        return [store.train.sample(index)["tokens"].tolist() for index in range(store.train.num_samples)]

    whole = rows("whole")
    for module in ("part", "long_text"):
        monkeypatch.setattr(f"manyhands.data.tokenize.{module}.LONG_CHARACTERS", 300)
    monkeypatch.setattr(tokenize_module, "LongText", lambda tokenizer: LongText(tokenizer, 400, 150))
    assert rows("windows") == whole
    if too_long == "split":
        assert len(whole) > 50 and max(map(len, whole)) == 50
        assert all(left[-1] == right[0] for left, right in pairwise(whole) if len(left) == 50)


def test_documents_of_a_text_file_come_as_the_reader_gives_them(tmp_path: Path, monkeypatch) -> None:
    from manyhands.data.read.files import Findings
    from manyhands.data.read.sources import read_part

    path = tmp_path / "a.txt"
    path.write_bytes(b"\n\none\r\ntwo\n \n\nthree" + b" more\nlines" * 100 + b"\n\n\n  four  \n")
    part = FilePart(str(path), "text")
    plain = list(read_part(part))
    monkeypatch.setattr("manyhands.data.tokenize.long_text.LONG_CHARACTERS", 50)
    joined = []
    for row in read_documents(part, Findings()):
        text = row.fields["text"]
        joined.append((row.line, text if isinstance(text, str) else "".join(text)))
    assert joined == [(row.line, row.fields["text"]) for row in plain] and len(joined) == 3
    path.write_bytes(b"one\n\n\xff\n\nthree\n")
    findings = Findings()
    assert [row.line for row in read_documents(part, findings)] == [1] and findings.count == 1


def test_copies_in_another_source_are_held_out_with_the_sample(make_config) -> None:
    data = make_config(Path("x")).data
    sources, hashes = np.repeat(np.array([0, 1], np.int16), 300), np.tile(np.arange(300), 2)
    for seed in range(4):
        division = divide_samples(
            data, seed, sources, np.zeros(600, bool), [data_source("x"), data_source("y")], hashes
        )
        assert 20 <= len(division.validation) <= 60
        assert not set(hashes[division.validation]) & set(hashes[division.train])


def test_what_is_left_out_is_counted_by_source(write_rows, make_mixed, model_folder: Path) -> None:
    """Too long and too short texts, whole and in windows, and copies across sources; the held-out set has no copies."""
    texts = [{"text": "ab " * size} for size in (400, 2, 30, 31, 32)]
    paths = [
        str(write_rows(texts + [{"text": f"no {n} " * 12} for n in range(20)] * 2, f"{name}.jsonl")) for name in "ab"
    ]
    keys = {"max_length": 200, "too_long": "drop", "min_length": 10, "deduplicate": True, "validation_fraction": 0.2}
    facts, store, lines = run(make_mixed(paths, **keys), model_folder)
    assert facts.left_out == {
        "data.too_long": {"a": 1, "b": 1},
        "data.min_length": {"a": 1, "b": 1},
        "data.deduplicate": {"a": 20, "b": 43},
    }
    assert (facts.num_samples + facts.num_validation_samples, facts.num_repeated, facts.num_dropped) == (23, 0, 0)
    assert "left out by data.deduplicate: 63 samples (a 20, b 43)" in lines
    assert describe_data(store.meta)[1]["left_out"]["data.deduplicate"] == 43


def test_a_set_of_evaluation_keeps_samples_of_another_set(write_rows, make_mixed, model_folder: Path) -> None:
    every, hard = write_rows(CHAT[:20] * 2, "every.jsonl"), write_rows(CHAT[:5], "hard.jsonl")
    config = make_mixed([str(write_rows(CHAT[20:], "train.jsonl"))], deduplicate=True, validation_fraction=0)
    sets = {"every": str(every), "hard": str(hard)}
    config = config.model_validate(config.model_dump() | {"evaluate": {"data": sets}})
    store = run(config, model_folder)[1]
    assert {name: len(rows) for name, rows in store.divide_validation().items()} == {"every": 20, "hard": 5}


def test_sets_of_evaluation_that_are_all_trained_are_refused_by_their_own_key(
    write_rows, make_mixed, model_folder: Path
) -> None:
    path = str(write_rows(CHAT[:20]))
    config = make_mixed([path], validation_fraction=0)
    config = config.model_validate(config.model_dump() | {"evaluate": {"data": {"test": path}}})
    with pytest.raises(UserError, match="every validation sample is a training sample") as caught:
        prepare(config, model_folder, print)
    assert caught.value.where == "evaluate.data" and "validation_fraction" not in caught.value.fix


def test_a_limit_that_leaves_no_row_is_refused(write_rows, make_mixed, model_folder: Path) -> None:
    path = str(write_rows([{"text": "ab " * 400}] * 3))
    with pytest.raises(UserError, match="no row is left") as caught:
        run(make_mixed([path], max_length=100, too_long="drop"), model_folder)
    assert "3 rows are longer than data.max_length = 100" in str(caught.value)


def test_a_slice_leads_back_to_its_files_and_names_other_tokens(write_rows, make_mixed, tmp_path, model_folder) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for number in range(3):
        write_rows([{"text": f"file {number} row {row}"} for row in range(4)], f"parts/{number}.jsonl")
    source = {"path": str(folder), "split": "train[6:-1]"}
    facts, store, _ = run(make_mixed([source], validation_fraction=0), model_folder)
    assert [(store.file_number(n), store.line(n)) for n in range(5)] == [(1, 3), (1, 4), (2, 1), (2, 2), (2, 3)]
    assert facts.digest != run(make_mixed([str(folder)], validation_fraction=0), model_folder)[0].digest
