"""The images of a sample as a preview shows them: sizes for the terminal, thumbnails for the page."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace

from manyhands.config.data_schema import MOST_PIXELS
from manyhands.data.image_files import BadImage, PixelBounds, decode, read_bytes
from manyhands.data.image_streams import StoredImage, from_streams
from manyhands.data.streams import Sample
from manyhands.preview.contents import ShownImage, Span, harmless

RUN = re.compile(r"(<[^<>\s]{1,40}>)\1{3,}")
THUMBNAIL = 160  # pixels of the longer side


def show_images(sample: Sample) -> tuple[ShownImage, ...]:
    """The images of a sample in the order of their tokens; () where it has none."""
    return tuple(
        ShownImage(
            harmless(image.place or "of the row"),
            image.size[1],
            image.size[0],
            image.num_tokens,
            _draw_thumbnail(image),
        )
        for image in from_streams(sample)
    )


def shorten(span: Span) -> Span:
    """The span with runs of one marker, such as an image's placeholders, as one and their number."""
    return replace(span, text=RUN.sub(lambda found: f"{found[1]} × {len(found[0]) // len(found[1])}", span.text))


def _draw_thumbnail(image: StoredImage) -> str:
    """A data URL; "" where the image cannot be read. What is shown was made of pixels: nothing foreign is copied."""
    from PIL import Image

    try:
        raw = read_bytes(image.place) if image.place else image.source
        picture = Image.fromarray(decode(raw, "", PixelBounds(MOST_PIXELS)))
    except BadImage:
        return ""
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    file = io.BytesIO()
    picture.save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
