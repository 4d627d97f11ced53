"""Whatever a file holds, the pixels show what a person sees: transparent grounds are white, deep greys are scaled."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("PIL")
from PIL import Image, ImageDraw

from manyhands.data.images import batch as image_batch
from manyhands.data.images import files as image_files
from manyhands.data.images import processor as image_processor
from manyhands.data.images.files import BadImage, PixelBounds, decode, is_animated

BOUNDS = PixelBounds(10**6)


def encode(image: Any, format: str = "png", **more: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **more)
    return file.getvalue()


def pixels(raw: bytes) -> np.ndarray:
    return decode(raw, "it", BOUNDS)


def write_png(bits: int, color: int, row: bytes, clear: bytes, width: int) -> bytes:
    """A PNG of one row, with a chunk tRNS."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, 1, bits, color, 0, 0, 0)
    parts = (b"IHDR", head), (b"tRNS", clear), (b"IDAT", zlib.compress(b"\0" + row)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts)


def words(mode: str, text: str) -> Any:
    """Black words on a transparent ground."""
    shown = Image.new("L", (60, 20), 0)
    ImageDraw.Draw(shown).text((2, 2), text, fill=255)
    black = Image.new("RGBA", shown.size, (0, 0, 0, 0))
    black.putalpha(shown)
    if mode == "P":
        indexed = shown.point(lambda value: 1 if value else 0).convert("P")
        indexed.putpalette([0, 0, 0, 0, 0, 0])
        indexed.info["transparency"] = 0
        return indexed
    return black if mode == "RGBA" else black.convert(mode)


SAVED = {
    "RGBA": "png",
    "RGBA in webp": "webp",
    "RGBA in tiff": "tiff",
    "LA": "png",
    "PA": "tiff",
    "P": "png",
    "P in gif": "gif",
}


@pytest.mark.parametrize("mode", SAVED)
def test_a_transparent_ground_is_white(mode: str) -> None:
    if mode == "PA":
        hello, bye = (words("RGBA", text).convert("PA") for text in ("HELLO", "BYE"))
        seen = [np.array(image_files._show_on_white(image, "")) for image in (hello, bye)]
    else:
        more = {"lossless": True} if SAVED[mode] == "webp" else {}
        seen = [pixels(encode(words(mode.split()[0], text), SAVED[mode], **more)) for text in ("HELLO", "BYE")]
    assert not np.array_equal(*seen)
    assert all(image[0, 0].tolist() == [255, 255, 255] and image.min() < 50 for image in seen)


def test_half_transparent_is_mixed_as_by_other_tools() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (9, 9, 4), dtype=np.uint8), "RGBA")
    ground = Image.new("RGB", image.size, (255, 255, 255))
    ground.paste(image, mask=image.split()[3])  # as qwen-vl-utils does
    assert np.array_equal(pixels(encode(image)), np.array(ground))


CLEAR = {
    "grey, 1 bit": (1, 0, b"\x40", b"\0\0", [0, 255]),
    "grey, 2 bits": (2, 0, b"\x10", b"\0\0", [0, 85]),
    "grey, 2 bits, white": (2, 0, b"\xc0", b"\0\3", [255, 0]),
    "grey, 4 bits": (4, 0, b"\x51", b"\0\5", [85, 17]),
    "grey, 8 bits": (8, 0, b"\x05\x11", b"\0\5", [5, 17]),
    "grey, 16 bits": (16, 0, b"\x05\x00\x11\x11", b"\5\0", [5, 17]),
    "colors, 8 bits": (8, 2, b"\1\1\1\x11\x11\x11", b"\0\1\0\1\0\1", [1, 17]),
    "colors, 16 bits": (16, 2, b"\1\0\1\0\1\0" + b"\x11" * 6, b"\1\0\1\0\1\0", [1, 17]),
}


@pytest.mark.parametrize("kind", CLEAR)
def test_one_transparent_value_is_white_and_no_other(kind: str) -> None:
    bits, color, row, clear, values = CLEAR[kind]
    assert pixels(write_png(bits, color, row, clear, 2))[0, :, 0].tolist() == [255, values[1]]
    absent = {1: None, 2: b"\0\2", 4: b"\0\2"}.get(bits, b"\0\2\0\2\0\2"[: 2 + 4 * (color == 2)])
    if absent is not None:
        assert pixels(write_png(bits, color, row, absent, 2))[0, :, 0].tolist() == values


RAMP = (np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)


@pytest.mark.parametrize("format", ["png", "tiff", "ppm", "jpeg2000"])
def test_greys_of_16_bits_are_scaled(format: str) -> None:
    found = pixels(encode(Image.fromarray(RAMP), format))
    assert np.array_equal(found, np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2))
    dark = pixels(encode(Image.fromarray(RAMP // 2), format))
    assert 126 <= dark.max() <= 128


def test_a_deep_grey_is_turned_as_exif_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    found = pixels(encode(Image.fromarray(RAMP[:4]), exif=exif))
    assert found.shape == (16, 4, 3) and np.array_equal(found[:, :, 0], np.rot90(RAMP[:4] // 257, -1))


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_values_of_an_unknown_range_are_refused(kind: Callable[[Any], Any]) -> None:
    with pytest.raises(BadImage, match="whose range is not known: save it with 8 or 16 bits"):
        pixels(encode(Image.fromarray(RAMP.astype(kind)), "tiff"))


def test_other_modes_are_converted() -> None:
    colors = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8))
    for mode, format in (
        ("CMYK", "tiff"),
        ("CMYK", "jpeg"),
        ("YCbCr", "jpeg"),
        ("1", "png"),
        ("L", "png"),
        ("P", "png"),
    ):
        raw = encode(colors.convert(mode), format)
        assert np.array_equal(pixels(raw), np.array(Image.open(io.BytesIO(raw)).convert("RGB")))


@pytest.mark.parametrize("format", ["gif", "webp", "png", "tiff"])
def test_of_an_animated_image_it_is_the_first_frame(format: str) -> None:
    frames = [Image.new("RGB", (8, 8), color) for color in ("red", "blue")]
    more = {"lossless": True} if format == "webp" else {}
    raw = encode(frames[0], format, save_all=True, append_images=frames[1:], **more)
    assert is_animated(raw) and not is_animated(encode(frames[0], format)) and not is_animated(b"no image")
    assert pixels(raw)[0, 0].tolist() == [255, 0, 0]


def test_what_decodes_otherwise_has_another_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def names() -> tuple[str, str, str]:
        work = image_batch.ImageWork(str(tmp_path), BOUNDS)
        of_features = image_batch.digest_of_pixels(tmp_path, BOUNDS)
        return image_processor.processor_digest(tmp_path), image_batch._name_preparation(work), of_features

    before = names()
    for module in (image_processor, image_batch):
        monkeypatch.setattr(module, "DECODING", "another")
    assert all(one != other for one, other in zip(before, names(), strict=True))
