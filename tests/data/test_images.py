"""Rows with images: tokens and pixels are those of the family's own processor, in every form that rows have them."""

from __future__ import annotations

import base64
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.core.errors import UserError
from manyhands.data.batch.batches import collate
from manyhands.data.batch.collate import BatchShape
from manyhands.data.images.batch import ImageWork, rotary_positions
from manyhands.data.images.files import PixelBounds, decode
from manyhands.data.images.open import open_processor
from manyhands.data.images.processor import family_of
from manyhands.data.store.store import TokenStore
from manyhands.data.store.streams import from_streams
from manyhands.data.tokenize.prepare import prepare
from manyhands.families.images.sized import cut
from tests.support import other_vision, torchvision
from tests.support.vision import FAMILIES, LIKE_THEM, processor_of, write_tiny_processor

Image = pytest.importorskip("PIL.Image")


def draw(size: tuple[int, int], seed: int = 0) -> Any:
    """An image of (width, height) that no other seed gives."""
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def encode(image: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


SIZES = ((40, 60), (30, 30), (90, 35), (28, 28))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 0.png, 1.png, ... of SIZES."""
    folder = tmp_path_factory.mktemp("images")
    for number, size in enumerate(SIZES):
        draw(size, number).save(folder / f"{number}.png")
    return folder


OTHERS = (*LIKE_THEM, *other_vision.MODELS)


@pytest.fixture(
    scope="module",
    params=[
        *FAMILIES,
        *(pytest.param(f, marks=() if f == "aya_vision" else pytest.mark.slow) for f in OTHERS),
        *torchvision.params(pytest.mark.slow),
    ],
)
def vision_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, write_tiny_processor(tmp_path_factory.mktemp("model") / request.param, request.param)


@pytest.fixture(scope="module")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_processor(tmp_path_factory.mktemp("model") / "qwen", "qwen2_5_vl")


def image(place: Any) -> dict[str, Any]:
    return {"type": "image", "image": place}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def turns(*asked: Any, answer: str = "it is so") -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(asked)}, {"role": "assistant", "content": [text(answer)]}]


def open_store(config: Any, folder: Path) -> tuple[Any, TokenStore]:
    facts = prepare(config, folder, lambda line: None)
    return facts, TokenStore.open(facts.folder)


def shape(folder: Path, packed: bool = True) -> BatchShape:
    return BatchShape(packed, images=ImageWork(str(folder), PixelBounds(10**6)))


def test_tokens_and_pixels_are_those_of_the_processor(
    vision_folder: tuple[str, Path], pictures: Path, write_rows, make_config
) -> None:
    family, folder = vision_folder
    conversations = [
        turns(image("0.png"), text("what is this?")),
        turns(image("1.png"), text("and this, beside "), image("2.png"), text("?")),
        turns(text("no image here")),
        [*turns(text("first"), answer="one"), *turns(text("then "), image("3.png"), answer="two")],
    ]
    rows = write_rows([{"messages": messages} for messages in conversations])
    config = make_config(rows, image_folder=str(pictures), validation_fraction=0, order="as_given")
    facts, store = open_store(config, folder)
    processor = processor_of(folder, family)
    made = [
        processor.apply_chat_template(
            [[{**turn, "content": [_open(part, pictures) for part in turn["content"]]} for turn in messages]],
            tokenize=True,
            return_dict=True,
        )
        for messages in conversations
    ]
    names = family_of(folder).images.names
    for number, expected in enumerate(made):
        sample = store.train.sample(number)
        assert sample["tokens"].tolist() == list(expected["input_ids"][0])
        batch = collate(store.train, np.array([number]), shape(folder))
        for name in names if len(from_streams(sample)) else ():
            values = _squares(expected) if name == "pixel_values" else _entry(expected, name)
            found = batch[name].numpy()
            values = values.reshape(len(found), -1, *found.shape[1:])  # (items, frames, ...), which are alike
            assert np.array_equal(np.broadcast_to(found[:, None], values.shape), values), name
    units = [0 if "pixel_values" not in each else len(_squares(each)) for each in made]
    assert store.train.image_units.tolist() == units and store.train.num_images.tolist() == [1, 2, 0, 1]
    assert (facts.num_images, facts.max_image_units) == (4, max(units))
    assert facts.mean_image_units == pytest.approx(sum(units) / 4)
    assert facts.max_units_per_token == max(store.train.image_units / store.train.lengths)
    together = collate(store.train, np.arange(4), shape(folder))
    assert together["cu_pixel_values"].tolist() == [0, *np.cumsum(units)]
    # what the host knows: a place for each feature, and of grids where each image ends
    token_id = json.loads((folder / "config.json").read_text())[family_of(folder).images.token_field]
    places = together["image_places"].tolist()
    assert places == (together["input_ids"][0] == token_id).nonzero().squeeze(1).tolist()
    assert len(places) == int(store.train.image_tokens.sum())
    if family_of(folder).images.grid_inputs:
        ends = together["image_grid_thw"].prod(1).cumsum(0).tolist()
        assert together["image_cu_seqlens"].tolist() == [0, *ends] and len(together["image_position_ids"]) == ends[-1]
    # of each document the loss is on the answer alone, never on what stands for an image
    labels = together["labels"][together["labels"] != -100]
    assert len(labels) and token_id not in labels
    assert processor.tokenizer.decode(store.train.sample(1)["tokens"][store.train.sample(1)["mask"]]) == (
        "it is so<|im_end|>"
    )


def _open(part: dict[str, Any], folder: Path) -> dict[str, Any]:
    return image(Image.open(folder / part["image"])) if part["type"] == "image" else part


def _squares(made: Any) -> np.ndarray:
    """Squares or patches end to end, without what only fills images up that are smaller or fewer squares."""
    values = made["pixel_values"]
    if isinstance(values[0], torch.Tensor) and "image_sizes" not in made:  # of torchvision
        values = torch.cat([each.reshape(-1, *each.shape[-3:]) for each in values]).float()
    values = np.asarray(values)
    if "spatial_shapes" in made:  # patches of crops, channels last
        real = values.reshape(-1, *values.shape[-2:])[np.asarray(made["pixel_attention_mask"]) > 0]
        return real.reshape(-1, 14, 14, 3).transpose(0, 3, 1, 2)
    if "image_position_ids" in made:  # patches, channels last
        real = values[np.asarray(made["image_position_ids"])[..., 0] >= 0]
        side = math.isqrt(real.shape[-1] // 3)
        return real.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
    if values.ndim == 4 and "image_sizes" in made and "batch_num_images" not in made:  # whole images of their own sizes
        return np.concatenate(
            [cut(image[:, :h, :w], 14) for image, (h, w) in zip(values, made["image_sizes"], strict=True)]
        )
    if values.ndim < 5:
        return values
    squares = values.reshape(-1, *values.shape[2:])
    return squares[squares.reshape(len(squares), -1).any(axis=1)]


def _entry(made: Any, name: str) -> np.ndarray:
    if name == "image_sizes" and "image_position_ids" in made:  # rows and columns, where there are places (column, row)
        return np.asarray(made["image_position_ids"]).max(1)[:, ::-1] + 1
    return np.asarray(made[name])


def test_rotary_positions_are_the_models(qwen_folder: Path) -> None:
    from transformers import AutoConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

    rng = np.random.default_rng(0)
    token = 7
    model = Qwen2_5_VLModel.__new__(Qwen2_5_VLModel)
    torch.nn.Module.__init__(model)
    model.config = AutoConfig.for_model("qwen2_5_vl", image_token_id=token, vision_config={"spatial_merge_size": 2})
    for _ in range(50):
        grids = rng.integers(1, 5, (rng.integers(0, 4), 2))
        pieces = [np.zeros(rng.integers(1, 5), dtype=np.int64)]
        for rows, columns in grids:
            pieces += [np.full(rows * columns, token), np.zeros(rng.integers(1, 4), dtype=np.int64)]
        ids = np.concatenate(pieces)
        thw = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids], dtype=torch.int64).reshape(-1, 3)
        types = torch.from_numpy((ids == token).astype(np.int64))[None]
        expected, _ = model.get_rope_index(
            torch.from_numpy(ids)[None], mm_token_type_ids=types, image_grid_thw=thw if len(thw) else None
        )
        assert np.array_equal(rotary_positions(ids == token, grids), expected[:, 0].numpy())


def test_a_processor_that_keeps_the_shape_of_images_is_refused(tmp_path: Path) -> None:
    """Pixtral is published as LLaVA with a tower of images of their own sizes."""
    folder = write_tiny_processor(tmp_path / "llava", "llava")
    own = {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 84}, "patch_size": 14}
    (folder / "preprocessor_config.json").write_text(json.dumps(own))
    layout = family_of(folder).images
    assert layout is not None
    with pytest.raises(UserError, match="keeps the shape of each image"):
        open_processor(folder, layout)


FORMS = {
    "path": lambda path, raw: turns(image(path), text("?")),
    "url part": lambda path, raw: turns({"type": "image_url", "image_url": {"url": f"file://{path}"}}, text("?")),
    "path part": lambda path, raw: turns({"type": "image", "path": path}, text("?")),
    "image_path part": lambda path, raw: turns({"type": "image_path", "image_path": path}, text("?")),
    "data url": lambda path, raw: turns(image("data:image/png;base64," + base64.b64encode(raw).decode()), text("?")),
    "base64": lambda path, raw: turns({"type": "image", "base64": base64.b64encode(raw).decode()}, text("?")),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_an_image_gives_the_same_sample(
    form: str, qwen_folder: Path, pictures: Path, write_rows, make_config
) -> None:
    path = pictures / "0.png"
    rows = [{"messages": messages(path)} for messages in (lambda path: FORMS[form](str(path), path.read_bytes()),)]
    _, store = open_store(make_config(write_rows(rows), validation_fraction=0), qwen_folder)
    check_sample(store, qwen_folder, path)


def check_sample(store: TokenStore, folder: Path, path: Path) -> None:
    """The only sample asks about the image at ``path``, then "?"."""
    expected = processor_of(folder, "qwen2_5_vl").apply_chat_template(
        [turns(image(Image.open(path)), text("?"))], tokenize=True, return_dict=True
    )
    assert store.train.sample(0)["tokens"].tolist() == list(expected["input_ids"][0])
    batch = collate(store.train, np.array([0]), shape(folder))
    assert np.array_equal(batch["pixel_values"].numpy(), np.asarray(expected["pixel_values"]))
    assert batch["has_images"] is True


# A row of each tool about the image {path}; what it becomes is that of the parts [image, "?"].
TOOLS: dict[str, dict[str, Any]] = {
    "LLaVA": {"id": "1", "image": "0.png",
              "conversations": [{"from": "human", "value": "<image>\n?"}, {"from": "gpt", "value": "it is so"}]},
    "LLaMA-Factory": {"images": ["0.png"],
                      "conversations": [{"from": "human", "value": "<image>?"}, {"from": "gpt", "value": "it is so"}]},
    "LLaMA-Factory alpaca": {"images": ["0.png"], "instruction": "<image>?", "output": "it is so"},
    "Axolotl": {
        "messages": [
            {"role": "user", "content": [{"type": "image", "path": "0.png"}, {"type": "text", "text": "?"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "it is so"}]},
        ]
    },
    "TRL": {"images": ["0.png"],
            "messages": [{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "?"}]},
                         {"role": "assistant", "content": [{"type": "text", "text": "it is so"}]}]},
    "TRL, text alone": {"image": "0.png", "prompt": [{"role": "user", "content": "?"}],
                        "completion": [{"role": "assistant", "content": "it is so"}]},
}  # fmt: skip


@pytest.mark.parametrize("tool", TOOLS)
def test_rows_of_other_tools(tool: str, qwen_folder: Path, pictures: Path, write_rows, make_config) -> None:
    config = make_config(write_rows([TOOLS[tool]]), validation_fraction=0, image_folder=str(pictures))
    _, store = open_store(config, qwen_folder)
    check_sample(store, qwen_folder, pictures / "0.png")


@pytest.mark.parametrize("listed", [False, True])
def test_image_columns_of_parquet(listed: bool, qwen_folder: Path, pictures: Path, tmp_path: Path, make_config) -> None:
    """As ``datasets`` writes its feature Image: a struct of bytes and path."""
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    held = {"bytes": (pictures / "0.png").read_bytes(), "path": "elsewhere.png"}
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    name, value, kind = ("images", [held], pa.list_(kind)) if listed else ("image", held, kind)
    columns = {"question": pa.array(["?"]), "answer": pa.array(["it is so"]), name: pa.array([value], kind)}
    parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    _, store = open_store(make_config(tmp_path / "rows.parquet", validation_fraction=0), qwen_folder)
    check_sample(store, qwen_folder, pictures / "0.png")
    (stored,) = from_streams(store.train.sample(0))
    assert stored.held and stored.source == held["bytes"]  # its row cannot be read again by itself


def test_a_turned_image_is_turned(qwen_folder: Path, tmp_path: Path, write_rows, make_config) -> None:
    picture = draw((60, 30))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    picture.save(tmp_path / "turned.png", exif=exif)
    _, store = open_store(
        make_config(write_rows([{"messages": turns(image("turned.png"), text("?"))}]), validation_fraction=0),
        qwen_folder,
    )
    (stored,) = from_streams(store.train.sample(0))
    assert stored.size == (60, 30)
    batch = collate(store.train, np.array([0]), shape(qwen_folder))
    upright = picture.transpose(Image.Transpose.ROTATE_270)
    made = processor_of(qwen_folder, "qwen2_5_vl").image_processor([upright])
    assert np.array_equal(batch["pixel_values"].numpy(), made["pixel_values"])


def test_the_preparation_says_that_an_animated_image_is_its_first_frame(
    qwen_folder: Path, tmp_path: Path, write_rows, make_config
) -> None:
    draw((40, 60)).save(tmp_path / "moving.gif", save_all=True, append_images=[draw((40, 60), 1)])
    config = make_config(write_rows([{"messages": turns(image("moving.gif"), text("?"))}]), validation_fraction=0)
    _, store = open_store(config, qwen_folder)
    assert "of images with several frames or pages, only the first one is trained" in store.meta["notes"]


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ((None, None), (90, 35)),
        ((3150, 3150), (90, 35)),
        ((1000, None), (50, 19)),  # 90 and 35 times sqrt(1000 / 3150), rounded down
        ((None, 5000), (113, 44)),
        ((1, None), (1, 1)),  # never a side of 0
    ],
)
def test_images_are_made_smaller_or_larger_in_proportion(bounds: tuple, expected: tuple[int, int]) -> None:
    picture = draw((90, 35))
    pixels = decode(encode(picture), "it", PixelBounds(10**6, *bounds))
    assert np.array_equal(pixels, np.array(picture.resize(expected)))


def test_text_alone_takes_the_processors_way_beside_images(
    tmp_path: Path, pictures: Path, write_rows, make_config
) -> None:
    """Llama's tokenizers add a begin-of-text token that the template of LLaVA does not write."""
    from tokenizers import processors

    from manyhands.data.tokenize.tokenizer import load_tokenizer

    folder = write_tiny_processor(tmp_path / "llava", "llava", bos="<|endoftext|>")
    tokenizer = load_tokenizer(folder)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    plain, with_image = turns(text("no image")), turns(image(str(pictures / "0.png")), text("?"))
    config = make_config(
        write_rows([{"messages": with_image}, {"messages": plain}]), validation_fraction=0, order="as_given"
    )
    _, store = open_store(config, folder)
    made = processor_of(folder, "llava").apply_chat_template([plain], tokenize=True, return_dict=True)
    assert store.train.sample(1)["tokens"].tolist() == list(made["input_ids"][0])
    assert made["input_ids"][0][0] == tokenizer.bos_token_id
    of_text = make_config(write_rows([{"messages": plain}], "text.jsonl"), validation_fraction=0)
    _, store = open_store(of_text, folder)
    assert store.train.num_images is None and store.train.sample(0)["tokens"][0] != tokenizer.bos_token_id


def test_the_table_is_what_the_processor_computes(vision_folder: tuple[str, Path]) -> None:
    from manyhands.data.batch.batches import scale_pixels
    from manyhands.data.images.batch import PIXEL_REPEATS, PIXEL_TABLE

    table = torch.arange(3 * 256, dtype=torch.float32).reshape(3, 256)
    pixels = torch.randint(0, 256, (5, 3, 2, 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    batch = {"pixel_values": pixels, PIXEL_TABLE: table, PIXEL_REPEATS: 0, "other": 1}
    scaled = scale_pixels(batch)
    assert torch.equal(scaled["pixel_values"], pixels.float() + 256 * torch.arange(3).reshape(1, 3, 1, 1))
    assert scaled.keys() == {"pixel_values", "other"}
    vectors = scale_pixels(batch | {PIXEL_REPEATS: 2})["pixel_values"].reshape(5, 3, 2, 2, 2)
    assert torch.equal(vectors[:, :, 0], scaled["pixel_values"]) and torch.equal(vectors[:, :, 0], vectors[:, :, 1])


def test_a_preview_shows_images_beside_their_tokens(tmp_path: Path, pictures: Path, write_rows, make_config) -> None:
    from manyhands.preview import contents
    from manyhands.preview.collect import _decode
    from manyhands.preview.page import render_page
    from manyhands.preview.usable import prepare_usable

    folder = write_tiny_processor(tmp_path / "gemma3", "gemma3")
    good, bad = turns(image(str(pictures / "0.png")), text("?")), turns(image("nowhere.png"), text("?"))
    config = make_config(write_rows([{"messages": good}]), validation_fraction=0)
    facts, store = open_store(config, folder)
    from manyhands.data.read.sources import resolve_sources
    from manyhands.data.tokenize.tokenizer import load_tokenizer

    sources = resolve_sources(config.data)
    shown = _decode(load_tokenizer(folder), store, sources, 0)
    (drawn,) = shown.images
    assert (drawn.width, drawn.height, drawn.num_tokens) == (40, 60, 4)
    assert "<image_soft_token> × 4" in "".join(span.text for span in shown.spans)
    counted = contents.SourceCounts("train", "train.jsonl", "messages", 1, 40, 10, 0, 1.0, 1.0)
    page = render_page(contents.Preview("run", "model", 64, rows=(shown,), sources=(counted,), facts=facts))
    assert f'src="{drawn.thumbnail}"' in page and "0.png · 40 x 60 pixels · 4 tokens" in page
    again = Image.open(io.BytesIO(base64.b64decode(drawn.thumbnail.partition(",")[2])))
    assert again.size == (40, 60)
    faulty = make_config(write_rows([{"messages": good}, {"messages": bad}]), validation_fraction=0)
    usable = prepare_usable(faulty, folder, load_tokenizer(folder), tmp_path / "made", lambda line: None)
    (refused,) = usable.refused
    assert "nowhere.png" in refused.errors[0].details[0]
    assert usable.store is not None and usable.store.train.num_images.tolist() == [1]


def test_the_column_image_under_the_name_of_the_other(
    qwen_folder: Path, pictures: Path, write_rows, make_config
) -> None:
    rows = [{"messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "so"}]}]
    path = write_rows([{**rows[0], "image": str(pictures / "0.png")}])
    facts, _ = open_store(make_config(path, validation_fraction=0, fields={"images": "image"}), qwen_folder)
    assert facts.num_images == 1
