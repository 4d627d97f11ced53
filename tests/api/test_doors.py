"""One set of conversations through every door: a row is the same whatever it is stored in, and so are its token ids."""

from __future__ import annotations

import io
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from manyhands.api.sources import write_rows
from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.data.read import hub_sets
from manyhands.data.read.sources import read_rows
from manyhands.data.store.store import TokenStore
from manyhands.data.tokenize.prepare import prepare
from tests.data.conftest import make_tokenizer

TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CITIES = ("Zürich", "東京", "Reykjavík 🏔", 'a "b"\n\\c\u2028')


def make_row(number: int) -> dict[str, Any]:
    """A conversation; some have tools, and their objects nulls and fields that others lack."""
    city = CITIES[number % len(CITIES)]
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"System {number}"}] * (number % 3 == 0)
    for turn in range(1 + number % 4):
        messages += [
            {"role": "user", "content": f"{city}? {turn}"},
            {"role": "assistant", "content": f"{number} {city}", "tool_calls": None},
        ]
    row: dict[str, Any] = {"messages": messages, "id": number, "tools": None}
    if number % 2:
        arguments = {"city": city if number % 4 == 1 else None, "n": None if number % 4 == 1 else number}
        arguments["deep"] = {"unit": None, "list": [{"x": None, "y": 1.5}, {"x": "é", "y": None}]}
        called = {"name": "weather", "arguments": arguments}
        messages += [
            {"role": "user", "content": "now"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": called}]},
            {"role": "tool", "content": '{"t": null}', "tool_calls": None},
            {"role": "assistant", "content": "done"},
        ]
        properties = {"city": {"type": "string"} if number % 4 == 1 else None, "n": {"type": "integer"}}
        definition = {"name": "weather", "parameters": {"type": "object", "properties": properties}}
        row["tools"] = [{"type": "function", "function": definition}]
    return row


ROWS = [make_row(number) for number in range(200)]


def write_json(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = folder / "rows.json"
    path.write_text(json.dumps({"version": 1, "data": ROWS}, indent=1), encoding="utf-8")
    return str(path)


def write_parquet(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet")
    return str(folder / "rows.parquet")


def write_stream(path: Path) -> Path:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=30)
    return path


def save_to_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    write_stream(folder / "data-00000-of-00001.arrow")
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": null}')
    return str(folder)


def copy_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    files = types.SimpleNamespace(cache_files=[{"filename": str(write_stream(folder / "set-train.arrow"))}])
    library = types.SimpleNamespace(__version__="4.8.0", load_dataset=lambda *_, **__: files)
    monkeypatch.setitem(sys.modules, "datasets", library)
    hub_sets._fetch.cache_clear()
    return "hub:o/set"


def hold_list(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return write_rows(ROWS, folder, "train")


def hold_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return write_rows(pa.Table.from_pylist(ROWS), folder, "train")


def hold_dataset(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return write_rows(pytest.importorskip("datasets").Dataset.from_list(ROWS), folder, "train")


def hold_stream(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return write_rows(pytest.importorskip("datasets").Dataset.from_list(ROWS).to_iterable_dataset(), folder, "train")


def save_dataset(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("datasets").Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


def hold_frame(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return write_rows(pytest.importorskip("pandas").DataFrame(ROWS), folder, "train")


DOORS = [write_json, write_parquet, save_to_disk, copy_hub, hold_list, hold_table, hold_dataset, hold_stream,
         save_dataset, hold_frame]  # fmt: skip


@pytest.fixture(scope="session")
def folder_with_tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer("chatml")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def read_samples(data: str, cache: Path, model_folder: Path) -> list[tuple[list[int], list[bool]]]:
    keys = {"train": data, "cache": str(cache), "validation_fraction": 0, "order": "as_given"}
    config = RunConfig.model_validate({"name": "t", "model": {"name": "m"}, "data": keys})
    train = TokenStore.open(prepare(config, model_folder, lambda _: None).folder).train
    samples = [train.sample(number) for number in range(train.num_samples)]
    return [(sample["tokens"].tolist(), sample["mask"].tolist()) for sample in samples]


@pytest.fixture(scope="session")
def wanted(tmp_path_factory: pytest.TempPathFactory, folder_with_tools: Path) -> list[tuple[list[int], list[bool]]]:
    """The ids and masks of the rows as JSON lines."""
    path = tmp_path_factory.mktemp("lines") / "rows.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS), encoding="utf-8")
    return read_samples(str(path), path.parent, folder_with_tools)


@pytest.mark.parametrize("write", DOORS, ids=lambda write: write.__name__)
def test_every_door_gives_the_same_ids(
    write: Callable[..., str], wanted: Any, folder_with_tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, monkeypatch)
    assert len(wanted) == 200 and read_samples(path, tmp_path / "cache", folder_with_tools) == wanted


def test_a_null_inside_json_text_is_the_users_own(tmp_path: Path) -> None:
    text = '{"city": null}'
    message = {"role": "assistant", "content": None, "arguments": {"city": None}, "text": text}
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [message, None], "system": None}))
    wanted = {"messages": [{"role": "assistant", "arguments": {}, "text": text}, None], "system": None}
    assert [row.fields for row in read_rows(tmp_path / "a.jsonl")] == [wanted]


def test_a_transform_of_the_users_is_applied(tmp_path: Path) -> None:
    """Its rows are not those of the table."""
    data = pytest.importorskip("datasets").Dataset.from_list([{"text": "a"}, {"text": "b"}])
    changed = data.with_transform(lambda batch: {"text": [text.upper() for text in batch["text"]]})
    assert [row.fields["text"] for row in read_rows(write_rows(changed, tmp_path, "train"))] == ["A", "B"]
    chosen = data.add_column("n", [1, 2]).with_format("numpy", columns=["text"]).select([1])
    assert [row.fields for row in read_rows(write_rows(chosen, tmp_path, "train"))] == [{"text": "b"}]


def make_image() -> Any:
    image = pytest.importorskip("PIL.Image").new("RGB", (3, 2), (9, 8, 7))
    image.putpixel((1, 1), (200, 0, 30))
    return image


def read_image(path: str) -> Any:
    from PIL import Image

    from manyhands.data.images.rows import read_column

    (row,) = read_rows(path)
    (ref,) = read_column(row.fields, {})[1]
    return Image.open(io.BytesIO(ref.data))


def test_images_of_pillow_lose_nothing(tmp_path: Path) -> None:
    image = make_image()
    for held in (image, [image], {"bytes": b"x", "path": None} | {"bytes": _to_bytes(image)}):
        found = read_image(write_rows([{"images": held}], tmp_path, "train"))
        assert found.mode == "RGB" and found.tobytes() == image.tobytes()
    exact = image.convert("CMYK")
    assert read_image(write_rows([{"image": exact}], tmp_path, "train")).tobytes() == exact.tobytes()


def test_images_of_a_dataset_are_those_of_its_parquet(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"images": datasets.List(datasets.Image())})
    data = datasets.Dataset.from_dict({"images": [[make_image()]]}, features=features)
    data.to_parquet(str(tmp_path / "a.parquet"))
    found = [read_image(path) for path in (write_rows(data, tmp_path, "train"), str(tmp_path / "a.parquet"))]
    assert [image.tobytes() for image in found] == [make_image().tobytes()] * 2


def _to_bytes(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_a_column_of_json_is_what_its_lines_are(tmp_path: Path) -> None:
    """``datasets`` makes one of values of different types."""
    datasets = pytest.importorskip("datasets")
    rows = [{"messages": [{"role": "user", "content": "q"}], "tools": [{"name": "f", "default": value}]}
            for value in (1, "x", None, [1, {"a": None}])]  # fmt: skip
    data = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    data.to_json(str(tmp_path / "a.jsonl"))
    data.to_parquet(str(tmp_path / "a.parquet"))
    data.save_to_disk(str(tmp_path / "saved"))
    paths = [write_rows(data, tmp_path, "train"), *(str(tmp_path / name) for name in ("a.parquet", "saved"))]
    wanted = [row.fields for row in read_rows(tmp_path / "a.jsonl")]
    assert [row["tools"][0].get("default") for row in wanted] == [1, "x", None, [1, {}]]
    assert [[row.fields for row in read_rows(path)] for path in paths] == [wanted] * 3


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ([{"a": {1: "x", "1": "y"}}], "cannot be written as JSON"),
        ([{1: "x", "1": "y"}], "cannot be written as JSON"),
        (lambda: pytest.importorskip("pandas").DataFrame([["x", "y"]], columns=["a", "a"]), "have the name a"),
    ],
)
def test_of_two_values_under_one_key_neither_is_lost(tmp_path: Path, data: Any, what: str) -> None:
    with pytest.raises(UserError, match=what):
        write_rows(data() if callable(data) else data, tmp_path, "train")
