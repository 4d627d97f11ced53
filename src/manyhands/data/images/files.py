"""Encoded images: their bytes, whatever holds them, and their pixels. Trusts nothing in them. Knows no model.

Pixels are what transformers' ``load_image`` gives for a path, turned as EXIF says and converted to RGB, but for what
``convert("RGB")`` loses: what is transparent shows a white ground, as in vLLM, and greys of 16 bits
are scaled to 8. Of an animation, or a file of several pages, it is the first. ``PixelBounds`` may ask for another size.
"""

from __future__ import annotations

import hashlib
import io
import math
import operator
import os
import stat
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.config.schema import MOST_PIXELS, DataSection
from manyhands.core.errors import UserError
from manyhands.core.remote import RemoteError, fetch
from manyhands.data.images.rows import ImageRef
from manyhands.data.store.streams import IMAGE_SOURCES, IMAGES

MAX_BYTES = 256 << 20  # of one encoded image
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "MPO", "JPEG2000", "AVIF")  # that start no program
MAX_RATIO = 200  # of an image's sides
CONTENT_BYTES = 16
DECODING = "2"  # changes whenever the pixels of some image do: what was prepared from them is made again
MOVING = ("GIF", "WEBP", "PNG", "AVIF", "TIFF")  # formats that hold several images of equal standing
BITS_PER_SAMPLE, PHOTOMETRIC = 258, 262  # tags of TIFF


@dataclass(frozen=True)
class PixelBounds:
    """How many pixels an image may have: with more than ``most`` it is bad; with more than ``shrink_above`` it is made
    smaller, with fewer than ``enlarge_below`` larger, in proportion, before the processor sees it."""

    most: int
    shrink_above: int | None = None
    enlarge_below: int | None = None

    @classmethod
    def of(cls, data: DataSection) -> PixelBounds:
        return cls(data.max_image_pixels, data.shrink_images_above, data.enlarge_images_below)

    def fit(self, image: Any) -> Any:
        """A PIL image within the bounds: sides are rounded down, interpolation is bicubic."""
        for bound, is_beyond in ((self.shrink_above, operator.gt), (self.enlarge_below, operator.lt)):
            num_pixels = image.width * image.height
            if bound is not None and is_beyond(num_pixels, bound):
                factor = math.sqrt(bound / num_pixels)
                image = image.resize(tuple(max(1, int(side * factor)) for side in image.size))
        return image


class BadImage(Exception):
    """An image cannot be used; the message says which, and why."""


def check_pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError("images need Pillow, which is not installed", fix="pip install 'manyhands[vision]'") from error


def is_address(place: str) -> bool:
    return place.startswith(("http://", "https://"))


def locate(ref: ImageRef, folder: Path, allow_urls: bool | Sequence[str]) -> str:
    """The place of an image: an absolute path, or an address; "" of one that a row holds itself. Raises BadImage."""
    if not ref.place:
        return ""
    if is_address(ref.place):
        if not allow_urls:
            raise BadImage(
                f"{name_of(ref.place)} is an address, and images are fetched only if data.image_urls is true or names "
                "the host"
            )
        return ref.place
    try:
        return str((folder / Path(ref.place).expanduser()).absolute())
    except RuntimeError as error:  # a user that is not known here
        raise BadImage(f"{name_of(ref.place)} cannot be found: {error}") from None


def read_bytes(place: str) -> bytes:
    """The encoded image in a file. Raises BadImage."""
    try:
        if not stat.S_ISREG(os.stat(place).st_mode):  # reading a pipe may never end
            raise BadImage(f"{name_of(place)} is not a file")
        with open(place, "rb") as file:
            return _check_bytes(file.read(MAX_BYTES + 1), place)
    except FileNotFoundError:
        raise BadImage(f"{name_of(place)} does not exist") from None
    except (OSError, ValueError) as error:
        raise BadImage(f"{name_of(place)} cannot be read: {error}") from None


def fetch_bytes(address: str, hosts: Sequence[str] | None) -> bytes:
    """The encoded image at an address, of ``hosts`` where they are given, else of a public host. Raises BadImage."""
    try:
        return _check_bytes(fetch(address, MAX_BYTES, hosts), address)
    except RemoteError as error:
        hint = "data.image_urls: [HOST, ...] names hosts that may be asked"
        raise BadImage(f"{name_of(address)} cannot be fetched: {error} ({hint})") from None


def _check_bytes(raw: bytes, place: str) -> bytes:
    if not raw:
        raise BadImage(f"{name_of(place)} is empty")
    if len(raw) > MAX_BYTES:
        raise BadImage(f"{name_of(place)} has more than {MAX_BYTES:,} bytes")
    return raw


def content_of(raw: bytes) -> bytes:
    """16 bytes that name the content of an encoded image."""
    return hashlib.blake2b(raw, digest_size=CONTENT_BYTES).digest()


def decode(raw: bytes, name: str, bounds: PixelBounds) -> np.ndarray:
    """Pixels (height, width, 3) uint8 within ``bounds``. ``name`` is for messages. Raises BadImage."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large images and odd metadata: sizes are checked here
            with Image.open(io.BytesIO(raw), formats=_known_formats()) as image:
                _check_size(image.size, name, bounds.most)
                tile = image.tile[0] if image.tile else None
                args = tile.args if tile is not None else ""
                stored = args if isinstance(args, str) else str(args[0]) if args else ""
                tags = getattr(image, "tag_v2", {})
                is_16_bit = image.format in ("PNG", "PPM")
                turned: Any = ImageOps.exif_transpose(image)
                if turned.mode[0] in "IF":
                    turned = _scale_grey(turned, tags, is_16_bit, name)
                return np.array(bounds.fit(_show_on_white(turned, stored)))
    except UnidentifiedImageError:
        raise BadImage(f"{name} is not an image ({', '.join(FORMATS)} are read)") from None
    except Image.DecompressionBombError:  # raised before anything is decoded
        raise BadImage(f"{name} has too many pixels: more than {MOST_PIXELS:,}, as decompression bombs have") from None
    except BadImage:
        raise
    except Exception as error:  # a decoder of foreign bytes: whatever it raises is about this image
        raise BadImage(f"{name} cannot be decoded: {error}") from None


def _scale_grey(image: Any, tags: Any, is_16_bit: bool, name: str) -> Any:
    """A grey image of more than 8 bits with 8, white where PNG says that a value is transparent. ``tags`` are those of
    TIFF; ``is_16_bit``: so is whatever Pillow holds in 32 bits. Raises BadImage where the range of values is not known.
    """
    from PIL import Image

    if image.mode == "F" or (image.mode == "I" and not is_16_bit):
        kind = "floating-point" if image.mode == "F" else "32-bit"
        raise BadImage(f"{name} has {kind} pixels, whose range is not known: save it with 8 or 16 bits")
    top = (1 << int(tags.get(BITS_PER_SAMPLE, (16,))[0])) - 1
    values = np.asarray(image).astype(np.int64).clip(0, top)
    if tags.get(PHOTOMETRIC) == 0:  # white is zero
        values = top - values
    scaled = ((values * 255 + top // 2) // top).astype(np.uint8)
    if (clear := image.info.get("transparency")) is not None:
        scaled[values == clear] = 255
    return Image.fromarray(scaled)


def _show_on_white(image: Any, stored: str) -> Any:
    """An image as RGB. ``stored``: how Pillow calls the way in which the file has its pixels, ``L;4`` for 4 bits."""
    from PIL import Image

    if not image.has_transparency_data:
        return image.convert("RGB")
    clear, (kind, _, bits) = image.info.get("transparency"), stored.partition(";")
    if kind == "L" and bits in ("2", "4") and isinstance(clear, int):  # PNG's value as it is stored, not as it is read
        image.info["transparency"] = clear * 255 // ((1 << int(bits)) - 1)
    elif kind == "RGB" and bits.startswith("16") and isinstance(clear, tuple):
        image.info["transparency"] = tuple(value >> 8 for value in clear)
    seen = image.convert("RGBA")
    ground = Image.new("RGB", seen.size, "white")
    ground.paste(seen, mask=seen.getchannel("A"))
    return ground


def is_animated(raw: bytes) -> bool:
    """Whether an encoded image holds several, of which the first is read."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            formats = [name for name in _known_formats() if name in MOVING]
            with Image.open(io.BytesIO(raw), formats=formats) as image:
                return bool(getattr(image, "is_animated", False))
    except Exception:  # reported where it is decoded
        return False


def find_changed(store: Path) -> str | None:
    """The name of an image that the store refers to and that is another now, or is gone; None where there is none.

    Files that are older than the store are not read: what training reads is compared with the store again."""
    items = store / f"{IMAGES.name}.bin"
    if not items.is_file():
        return None
    made_ns = (store / "meta.json").stat().st_mtime_ns
    images = np.fromfile(items, dtype=IMAGES.item_dtype).reshape(-1, *IMAGES.item_shape)
    ends = np.cumsum(images[:, 1])
    seen: set[bytes] = set()
    with (store / f"{IMAGE_SOURCES.name}.bin").open("rb") as file:
        for image, end in zip(images[images[:, 0] == 0], ends[images[:, 0] == 0].tolist(), strict=True):
            source = os.pread(file.fileno(), int(image[1]), end - int(image[1]))
            if source in seen:
                continue
            seen.add(source)
            place = source.decode()
            try:
                if os.stat(place).st_mtime_ns > made_ns and content_of(read_bytes(place)) != image[2:4].tobytes():
                    return name_of(place)
            except (OSError, BadImage):
                return name_of(place)
    return None


def _known_formats() -> tuple[str, ...]:
    from PIL import Image

    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


def _check_size(size: tuple[int, int], name: str, max_pixels: int) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise BadImage(f"{name} has no pixels ({width} x {height})")
    if max(size) > MAX_RATIO * min(size):  # processors that fit the shorter side would make it huge
        raise BadImage(f"{name} is {width} x {height} pixels: one side is more than {MAX_RATIO} times the other")
    if width * height > max_pixels:
        raise BadImage(
            f"{name} has {width * height:,} pixels ({width} x {height}), and data.max_image_pixels is {max_pixels:,}"
        )


def name_of(place: str) -> str:
    """What messages call the image at a place."""
    return f"the image {place}" if place else "the image in the row"
