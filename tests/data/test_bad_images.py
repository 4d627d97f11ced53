"""Images that cannot be used, and rows whose images and placeholders do not fit: named, refused or left out."""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from manyhands.core.errors import UserError
from manyhands.data.batch.batches import collate
from manyhands.data.images.open import FetchedImages, open_processor
from manyhands.data.images.processor import family_of
from manyhands.data.store.store import TokenStore
from manyhands.data.tokenize.prepare import prepare
from tests.data.test_images import draw, image, open_store, shape, text, turns
from tests.support.vision import write_tiny_processor

pytest.importorskip("PIL.Image")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_processor(tmp_path_factory.mktemp("model") / "gemma3", "gemma3")


def write_png_header(path: Path, width: int, height: int) -> None:
    """A PNG that says it is so large, and holds nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"") + chunk(b"IEND", b""))


def make_bad(kind: str, path: Path) -> None:
    if kind == "truncated":
        draw((50, 50)).save(path)
        path.write_bytes(path.read_bytes()[:-2000])
    elif kind == "bomb":
        write_png_header(path, 100_000, 100_000)
    elif kind == "too large":
        write_png_header(path, 12_000, 8_000)  # below what Pillow itself refuses
    elif kind == "zero-sized":
        path.write_bytes(
            b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, 0, 4, 1, 24, *[0] * 6)
        )
    elif kind == "a line":
        draw((1, 400)).save(path)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "no image":
        path.write_text("hello")
    elif kind == "program":
        path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")


BAD = {
    "missing": "does not exist",
    "truncated": "cannot be decoded",
    "bomb": "too many pixels",
    "too large": "96,000,000 pixels",
    "zero-sized": "no pixels|not an image|decoded",
    "a line": "one side is more than 200 times the other",
    "pipe": "is not a file",
    "empty": "is empty",
    "no image": "is not an image",
    "program": "is not an image",
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_image_is_named_and_refused_or_skipped(
    kind: str, folder: Path, tmp_path: Path, write_rows, make_config
) -> None:
    draw((40, 40)).save(tmp_path / "good.png")
    make_bad(kind, tmp_path / "bad.png")
    rows = write_rows([{"messages": turns(image(name), text("?"))} for name in ("good.png", "bad.png", "good.png")])
    with pytest.raises(UserError, match="images of 1 row cannot be used") as caught:
        open_store(make_config(rows, validation_fraction=0), folder)
    (detail,) = caught.value.details
    assert detail.startswith(f"{rows}:2: the image {tmp_path / 'bad.png'} ")
    assert any(words in detail for words in BAD[kind].split("|")), detail
    lines: list[str] = []
    facts = prepare(make_config(rows, validation_fraction=0, bad_images="skip"), folder, lines.append)
    assert facts.num_samples == 2 and facts.left_out == {"data.bad_images": {"train": 1}}
    assert any("left out by data.bad_images" in line for line in lines)
    assert any("bad.png" in line for line in lines)


def refuse(config: Any, folder: Path) -> UserError:
    with pytest.raises(UserError) as caught:
        open_store(config, folder)
    return caught.value


def test_data_of_bad_images_alone_is_refused(folder: Path, write_rows, make_config) -> None:
    rows = write_rows([{"messages": turns(image("a.png"), text("?"))}])
    error = refuse(make_config(rows, validation_fraction=0, bad_images="skip"), folder)
    assert error.what == "no row is left" and "a.png" in error.details[0]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a server with a.png, and the paths that were asked for."""
    import http.server
    import threading

    draw((40, 40)).save(tmp_path / "a.png")
    asked: list[str] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(tmp_path))

        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def test_addresses_are_fetched_only_where_that_is_allowed_and_once(
    folder: Path, served: tuple[str, list[str]], write_rows, make_config
) -> None:
    """However many rows name one; what gives no image is not asked for again either."""
    address, asked = served
    there = [{"messages": turns(image(f"{address}/a.png"), text(f"{number}?"))} for number in range(3)]
    gone = [{"messages": turns(image(f"{address}/b.png"), text(f"{number}?"))} for number in range(3)]
    rows = write_rows([*there, *gone])
    assert "data.image_urls" in refuse(make_config(rows, validation_fraction=0), folder).details[0]
    assert not asked
    config = make_config(rows, validation_fraction=0, image_urls=["127.0.0.1"], bad_images="skip")
    _, store = open_store(config, folder)
    assert sorted(asked) == ["/a.png", "/b.png"] and len(store.train.lengths) == 3
    # nor does training depend on the address
    assert len(collate(store.train, np.arange(3), shape(folder))["pixel_values"]) == 3
    assert sorted(asked) == ["/a.png", "/b.png"]


def test_copies_of_what_was_fetched_are_bounded_and_shared(tmp_path: Path, served: tuple[str, list[str]]) -> None:
    address, asked = served
    raw = (tmp_path / "a.png").read_bytes()
    hosts = ["127.0.0.1"]
    one, other = (FetchedImages(tmp_path / "copies", hosts, max_bytes=len(raw) + 1) for _ in range(2))
    assert one.read(f"{address}/a.png") == other.read(f"{address}/a.png") == raw and asked == ["/a.png"]
    for _ in range(2):
        assert one.read(f"{address}/a.png?more") == raw  # finds no room
    assert asked == ["/a.png", "/a.png?more", "/a.png?more"]
    own = FetchedImages(hosts=hosts)
    assert own.read(f"{address}/a.png") == own.read(f"{address}/a.png") == raw and len(asked) == 4


PLACES: dict[str, tuple[dict[str, Any], str]] = {
    "a place too many": ({"images": ["a.png"], "messages": [{"role": "user", "content": "<image> <image>"}]},
                         "1 image in the row's column, and 2 places"),
    "an image too many": ({"images": ["a.png", "a.png"], "messages": [{"role": "user", "content": "<image> what"}]},
                          "2 images in the row's column, and 1 place"),
    "a mark without image": ({"messages": [{"role": "user", "content": "<image> what"}]},
                             "the row has no images, and 1 place for them"),
    "a part without image": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]},
                             "the row has no images, and 1 place for them"),
    "the model's own placeholder": ({"messages": [{"role": "user", "content": "<start_of_image> what"}]},
                                    "placeholder"),
    "what stands for features": (
        {"images": ["a.png"], "messages": [{"role": "user", "content": "<image> <image_soft_token>"}]},
        "placeholders for images are in its tokens, and its images take 4",
    ),
    "both columns": ({"images": ["a.png"], "image": "a.png", "messages": [{"role": "user", "content": "?"}]}, "both"),
    "no user": ({"images": ["a.png"], "messages": [{"role": "system", "content": "be brief"}]}, "no user message"),
    "sharegpt without a mark": (
        {"image": "a.png", "conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "so"}]},
        "1 image in the row's column, and 0 places",
    ),
    "a sound": ({"messages": [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}]},
                "only text and images can be trained"),
}  # fmt: skip


@pytest.mark.parametrize("kind", PLACES)
def test_placeholders_and_images_are_counted(kind: str, folder: Path, tmp_path: Path, write_rows, make_config) -> None:
    draw((40, 40)).save(tmp_path / "a.png")
    row, words = PLACES[kind]
    if "messages" in row:
        row = row | {"messages": [*row["messages"], {"role": "assistant", "content": "so"}]}
    error = refuse(make_config(write_rows([row]), validation_fraction=0, images=True), folder)
    assert words in error.details[0], error.details[0]


def test_more_image_tokens_than_fit(folder: Path, tmp_path: Path, write_rows, make_config) -> None:
    draw((40, 40)).save(tmp_path / "a.png")
    asked = turns(*[image("a.png")] * 3, text("?"), answer="so " * 10)
    rows = write_rows([{"messages": asked}, {"messages": turns(image("a.png"), text("?"))}])
    error = refuse(make_config(rows, validation_fraction=0, max_length=60), folder)
    assert "12 of them of 3 images" in error.details[0]
    facts, _ = open_store(make_config(rows, validation_fraction=0, max_length=60, too_long="drop"), folder)
    assert facts.num_samples == 1
    later = [*turns(text("first"), answer="one"), *turns(image("a.png"), text("?"), answer="two")]
    path = write_rows([{"messages": later}], "later.jsonl")
    length = open_store(make_config(path, validation_fraction=0), folder)[1].train.lengths[0]
    for cut, fits in ((length - 4, True), (length - 26, False)):  # within the second answer, within the image
        config = make_config(path, validation_fraction=0, max_length=int(cut), too_long="truncate")
        if fits:
            assert open_store(config, folder)[1].train.lengths[0] == cut
        else:
            assert "would leave a part of an image" in refuse(config, folder).details[0]


def test_a_model_of_text_is_given_no_images(model_folder: Path, write_rows, make_config) -> None:
    rows = write_rows([{"messages": turns(image("a.png"), text("?"))}])
    part = refuse(make_config(rows, validation_fraction=0), model_folder).details[0]
    assert "has an image, and this run trains text alone: the model takes no images" in part
    column = write_rows([{"images": ["a.png"], "messages": turns(text("?"))}], "column.jsonl")
    assert "only text can be trained" in refuse(make_config(column, validation_fraction=0), model_folder).what
    asked = refuse(make_config(column, validation_fraction=0, images=True), model_folder)
    assert asked.what == "this model cannot be trained with images" and asked.where == "data.images"
    mapped = refuse(make_config(column, validation_fraction=0, fields={"images": "images"}), model_folder)
    assert mapped.where == "data.fields: images"


@pytest.mark.parametrize("values", [{"patch_size": []}, {"patch_size": 0}, {"merge_size": "x"}, {"size": "x"}])
def test_values_that_a_processor_cannot_use_are_refused(values: dict[str, Any], tmp_path: Path) -> None:
    folder = write_tiny_processor(tmp_path / "qwen", "qwen2_5_vl")
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(UserError, match=r"the image processor cannot be (loaded|used)"):
        open_processor(folder, family_of(folder).images)


def test_images_may_be_refused(folder: Path, tmp_path: Path, write_rows, make_config) -> None:
    draw((40, 40)).save(tmp_path / "a.png")
    rows = write_rows([{"messages": turns(image("a.png"), text("?"))}])
    error = refuse(make_config(rows, validation_fraction=0, images=False), folder)
    assert "data.images is false" in error.details[0]


def test_images_behind_the_first_rows_are_asked_for(folder: Path, tmp_path: Path, write_rows, make_config) -> None:
    draw((40, 40)).save(tmp_path / "a.png")
    rows = [{"messages": turns(text(f"number {number}"))} for number in range(100)]
    rows += [{"messages": turns(image("a.png"), text("?"))}, {"messages": turns(text("?")), "images": ["a.png"]}]
    path = write_rows(rows)
    part, column = refuse(make_config(path, validation_fraction=0), folder).details
    assert "none of the first 100 rows has one (then set data.images: true)" in part
    assert "trains text alone" in column and "data.images: true" in column
    facts, _ = open_store(make_config(path, validation_fraction=0, images=True), folder)
    assert (facts.num_samples, facts.num_images) == (102, 2)


def test_images_are_looked_for_however_deeply_a_row_is_nested(folder: Path, write_rows, make_config) -> None:
    meta: dict[str, Any] = {}
    for _ in range(400):
        meta = {"a": [meta]}
    rows = write_rows([{"messages": turns(text("hello")), "meta": meta}])
    assert open_store(make_config(rows, validation_fraction=0), folder)[0].num_images == 0


def test_an_image_that_changes_after_preparation_is_an_error(
    folder: Path, tmp_path: Path, write_rows, make_config
) -> None:
    draw((40, 40)).save(tmp_path / "a.png")
    config = make_config(write_rows([{"messages": turns(image("a.png"), text("?"))}]), validation_fraction=0)
    facts, store = open_store(config, folder)
    draw((40, 40), seed=1).save(tmp_path / "a.png")
    with pytest.raises(UserError, match="changed since the data was prepared") as caught:
        collate(store.train, np.array([0]), shape(folder))
    assert caught.value.where == str(tmp_path / "a.png")
    for seed in (config.seed + 1, config.seed):  # is made again, whatever samples are chosen: the image is another
        again = prepare(config.model_copy(update={"seed": seed}), folder, lambda line: None)
        assert again.content != facts.content
        assert len(collate(TokenStore.open(again.folder).train, np.array([0]), shape(folder))["pixel_values"]) == 1
