"""What a row carries and the run does not read is named; what changes its meaning is refused, unless data.ignore leaves
it out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from manyhands.core.errors import UserError
from manyhands.data.read.columns import Columns, carries
from manyhands.data.read.files import Row
from manyhands.data.read.messages import RowRefused
from manyhands.data.tokenize.tokenizer import tokenizer_digest
from tests.data.conftest import make_tokenizer, run

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TURNS = [{"from": "human", "value": "<image>\nWhat is it?"}, {"from": "gpt", "value": "b"}]


def numbered(fields: dict[str, Any], count: int = 20) -> list[dict[str, Any]]:
    """Rows that differ, each with the given fields."""
    return [{"n": n, **json.loads(json.dumps(fields).replace('"b"', f'"b{n}"'))} for n in range(count)]


REFUSED = [
    ({"messages": TALK, "label": True}, "this is preference data: the column label", "[label]"),
    ({"prompt": "a", "completion": "b", "label": False}, "this is preference data: the column label", "[label]"),
    ({"prompt": "a", "completion": "b", "label": 0}, "this is preference data: the column label", "[label]"),
    ({"question": "a", "answer": "b", "label": "spam"}, "the column label would not be used", "answer: label"),
    ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference data: the columns chosen, rejected",
     "{completion: chosen}"),
    ({"prompt": "a", "chosen": TALK, "rejected": TALK}, "preference data: the columns chosen, rejected",
     "{messages: chosen}"),
    ({"messages": TALK, "Rejected": "c"}, "preference data: the column Rejected", "[Rejected]"),
    ({"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": TURNS[1]}, "this is preference data",
     "the last turn"),
    ({"conversations": TURNS, "image": "1.jpg", "id": 3}, "these rows come with images", "data.ignore: [image]"),
    ({"messages": TALK, "images": ["1.jpg"], "audios": ["1.mp3"]}, "these rows come with images and audio",
     "[images, audios]"),
    ({"text": "b", "video": "1.mp4"}, "these rows come with videos", "data.ignore: [video]"),
    *(
        (fields | {name: [0, 1]}, f"the column {name} would not be used, and it says what", f"data.ignore: [{name}]")
        for fields in ({"messages": TALK}, {"text": "b"}, {"prompt": "a", "completion": "b"})
        for name in ("assistant_masks", "loss_mask", "loss_weights", "sample_weight")
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "what", "fix"), REFUSED)
def test_columns_that_change_the_meaning_are_refused_by_name(
    fields, what, fix, write_rows, make_config, model_folder: Path
) -> None:
    task = "cpt" if "text" in fields else "sft"
    with pytest.raises(UserError) as caught:
        run(make_config(write_rows(numbered(fields)), task=task), model_folder)
    assert what in caught.value.what and fix in caught.value.fix and caught.value.where.endswith("train.jsonl:1")


def test_a_late_row_is_refused_too(write_rows, make_config, model_folder: Path) -> None:
    rows = numbered({"question": "a", "answer": "b"}, 150)
    rows[120] |= {"label": False}
    rows[130] |= {"images": []}
    with pytest.raises(UserError, match="1 row cannot be trained") as caught:
        run(make_config(write_rows(rows)), model_folder)
    assert "train.jsonl:121: this is preference data: the column label would not be used" in caught.value.details[0]


def test_labels_beside_the_text_that_they_were_made_of_are_not_passed_over(
    write_rows, make_config, model_folder: Path
) -> None:
    tokens = {"input_ids": [1, 2], "attention_mask": [1, 1], "labels": [-100, 2]}
    rows = numbered({"messages": TALK} | tokens)
    with pytest.raises(UserError, match="20 rows cannot be trained") as caught:
        run(make_config(write_rows(rows)), model_folder)
    assert "the column labels says by -100 what is trained" in caught.value.details[0]
    run(make_config(write_rows(rows), ignore=["labels"]), model_folder)
    assert run(make_config(write_rows(rows), format="tokens", ignore=["n"]), model_folder)[1].train.num_samples


def test_what_is_left_out_is_as_if_it_were_not_there(write_rows, make_config, model_folder: Path) -> None:
    plain = numbered({"question": "a", "answer": "b"})
    marked = [row | {"system": "s", "images": ["1.jpg"], "question": "<image>a"} for row in plain]
    wanted, _, _ = run(
        make_config(write_rows([row | {"question": "<image>a"} for row in plain], "a.jsonl")), model_folder
    )
    config = make_config(write_rows(marked, "b.jsonl"), ignore=["system", "images"])
    facts, store, lines = run(config, model_folder)
    assert facts.num_tokens == wanted.num_tokens and store.meta["sources"][0]["left_out"] == ["images", "system"]
    assert "columns of b that are left out by data.ignore: images, system" in lines
    assert any(line.startswith("20 rows with <image>") for line in lines)
    source = {"path": config.data.train, "ignore": ["images"]}
    data = config.data.model_dump() | {"train": [source]}
    own, _, _ = run(config.model_validate(config.model_dump() | {"data": data}), model_folder)
    assert own.num_tokens > facts.num_tokens  # a source's own list stands in place of the general one: system is read


def test_a_column_to_leave_out_that_no_row_has_is_refused(write_rows, make_config, model_folder: Path) -> None:
    rows = numbered({"question": "a", "answer": "b", "empty": None})
    rows[17]["Score"] = 1
    file = write_rows(rows)
    for names, near in ((["emty"], "did you mean empty?"), (["empty", "zzz"], "correct the name, or remove it")):
        with pytest.raises(UserError, match=f"no row has the column {names[-1]}, which data.ignore") as caught:
            run(make_config(file, ignore=names), model_folder)
        assert caught.value.fix == near and "question" in caught.value.why
    run(make_config(file, ignore=["Score", "empty"]), model_folder)
    for source in ({"split": "train[:8]"}, {"ignore": ["weight"]}):  # one row may have it that is not read; an importer
        config = make_config(file, ignore=["Score"])
        data = config.data.model_dump() | {"train": [{"path": str(file), **source}]}
        run(config.model_validate(config.model_dump() | {"data": data}), model_folder)


def test_columns_that_are_not_read_are_named_by_source(write_rows, make_config, model_folder: Path) -> None:
    first = numbered({"question": "a", "answer": "b", "url": "x", "empty": None, "score": 0}, 150)
    first[140]["late"] = "x"
    second = [
        {"text": f"t {n}", "label": n % 2} for n in range(20)
    ]  # the class of a text says nothing about training it
    sources = [str(write_rows(first, "a.jsonl")), str(write_rows(second, "b.jsonl"))]
    config = make_config(Path(), task="mixed")
    config = config.model_validate(config.model_dump() | {"data": config.data.model_dump() | {"train": sources}})
    facts, _, lines = run(config, model_folder)
    assert facts.unread == {"a": ("late", "n", "score", "url"), "b": ("label",)}
    assert (
        "columns of a that are not read: late, n, score, url" in lines
        and "columns of b that are not read: label" in lines
    )
    assert run(config, model_folder)[2][1:] == lines[1:]  # from the cache too


def test_the_index_of_pandas_is_left_out_and_named(tmp_path: Path, make_config, model_folder: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [{"prompt": f"a {n}", "completion": "b"} for n in range(20)]
    (tmp_path / "a.csv").write_text(",prompt,completion\n" + "".join(f"{7 * n},a {n},b\n" for n in range(20)))
    pq.write_table(
        pa.Table.from_pylist([row | {"__index_level_0__": n} for n, row in enumerate(rows)]), tmp_path / "b.parquet"
    )
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = [run(make_config(tmp_path / name), model_folder) for name in ("a.csv", "b.parquet", "c.jsonl")]
    assert len({store.meta["files"]["tokens.bin"] for _, store, _ in found}) == 1
    assert found[0][0].unread == {"a": ("Unnamed: 0",)} and found[1][0].unread == {"b": ("__index_level_0__",)}
    assert "columns of a that are not read: Unnamed: 0" in found[0][2]


def test_a_column_that_fields_names_is_read(write_rows, make_config, model_folder: Path) -> None:
    rows = numbered({"prompt": "a", "chosen": "b", "rejected": "c"})
    config = make_config(write_rows(rows), fields={"completion": "chosen"}, ignore=["rejected"])
    assert run(config, model_folder)[0].unread == {"train": ("n",)}
    labeled = make_config(
        write_rows(numbered({"text": "x", "label": "b"}), "l.jsonl"), fields={"question": "text", "answer": "label"}
    )
    assert run(labeled, model_folder)[0].num_samples == 18


def test_empty_values_carry_nothing() -> None:
    assert not any(map(carries, (None, "", [], {}))) and all(map(carries, (0, False, 0.0, "x", [0], {"a": None}, b"x")))
    unread: set[str] = set()
    Columns({}).check(Row({"text": "a", "images": [], "rejected": ""}, "f", 1), "text", unread)
    assert not unread
    with pytest.raises(RowRefused, match="the column rejected would not be used"):
        Columns({}).check(Row({"text": "a", "images": [], "rejected": "x"}, "f", 1), "text", unread)


def test_images_under_another_name_are_refused_with_the_key_that_names_them() -> None:
    row = Row({"question": "a", "answer": "b", "image_path": "1.png"}, "f", 1)
    with pytest.raises(UserError, match="in a column that is not named images or image") as caught:
        Columns({}, images=True).refuse([row], "question")
    assert caught.value.fix.startswith("set data.fields.images: image_path; ")
    with pytest.raises(RowRefused) as refused:
        Columns({}).check(row, "question", set())
    assert "data.fields.images: image_path trains it where the model takes images" in str(refused.value)
    Columns({"images": "image_path"}, images=True).refuse([row], "question")


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """The tokenizer of a model that reads images: one of its tokens stands for them."""
    tokenizer = make_tokenizer("chatml")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|vision_start|>", "[PATCH]"]})
    tokenizer.save_pretrained(tmp_path / "vlm")
    config = {"model_type": "x", "vision_config": {}, "image_token_id": tokenizer.convert_tokens_to_ids("[PATCH]")}
    (tmp_path / "vlm" / "config.json").write_text(json.dumps(config))
    return tmp_path / "vlm"


@pytest.mark.parametrize("token", ["<|vision_start|>", "[PATCH]"])
def test_a_placeholder_of_the_model_in_a_text_is_refused(
    token, image_folder: Path, write_rows, make_config, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = numbered({"question": "a", "answer": "b"})
    run(make_config(write_rows([row | {"question": "a <image> b"} for row in rows], "other.jsonl")), image_folder)
    rows[7]["question"] = f"what is {token}?"
    with pytest.raises(UserError, match="1 row cannot be trained") as caught:
        run(make_config(write_rows(rows)), image_folder)
    assert f"train.jsonl:8: the text holds {token}, this model's placeholder for an image" in caught.value.details[0]
    for module in ("part", "long_text"):
        monkeypatch.setattr(f"manyhands.data.tokenize.{module}.LONG_CHARACTERS", 1000)
    long = write_rows([{"text": "word " * 1000 + token + " word" * 1000}], "long.jsonl")
    with pytest.raises(UserError, match="1 row cannot be trained"):
        run(make_config(long, task="cpt", too_long="split"), image_folder)
    (image_folder / "config.json").write_text('{"model_type": "x"}')  # the same tokens, and a model of text alone
    run(make_config(write_rows(rows, "text.jsonl")), image_folder)


@pytest.mark.parametrize("place", ["reasoning", "arguments", "tools"])
def test_a_placeholder_beside_the_contents_is_refused(place, image_folder: Path, write_rows, make_config) -> None:
    call = {"name": "look", "arguments": {"at": "[PATCH]" if place == "arguments" else "b"}}
    answer = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
    answer["reasoning_content"] = "hm [PATCH]" if place == "reasoning" else "hm"
    tools = [{"name": "look", "description": "[PATCH]" if place == "tools" else "c", "parameters": {}}]
    row = {"messages": [{"role": "user", "content": "a"}, answer], "tools": tools}
    template = write_rows([], "t.jinja")
    template.write_text(
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.reasoning_content or '' }}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    with pytest.raises(UserError, match="1 row cannot be trained") as caught:
        run(make_config(write_rows([row]), model={"chat_template": str(template)}), image_folder)
    assert "train.jsonl:1: the text holds [PATCH]" in caught.value.details[0]


def test_placeholders_of_the_model_are_a_part_of_the_tokenizers_digest(image_folder: Path) -> None:
    seen = {tokenizer_digest(image_folder)}
    for config in (
        {"model_type": "x"},
        {"model_type": "x", "vision_config": {}},
        {"model_type": "x", "image_token_id": 7},
    ):
        (image_folder / "config.json").write_text(json.dumps(config))
        seen.add(tokenizer_digest(image_folder))
    assert len(seen) == 4
