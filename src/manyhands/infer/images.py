"""Images of prompts: found and opened while prompts are encoded, prepared where they are answered.

They are those of training rows (``data/images/rows.py``): parts of a content ``{type: image, image: ...}``, or a row's
column ``images`` or ``image``. Placeholders become what the family's processor writes for each image.
"""

import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.core.files import read_object
from manyhands.data.chat.render import Text, put_images
from manyhands.data.images.batch import ImageBatcher, ImageWork
from manyhands.data.images.files import BadImage, PixelBounds, is_address, name_of
from manyhands.data.images.open import ImageOpener, OpenedImage
from manyhands.data.images.processor import PROCESSOR_FILES, family_of
from manyhands.data.images.rows import parts_of, place_images, read_column
from manyhands.data.read.formats import Conversation
from manyhands.data.read.messages import RowRefused
from manyhands.data.store.streams import StoredImage
from manyhands.families.images import PIXELS

Message = dict[str, Any]


class PromptImages:
    """Opens images of prompts for the model in a folder with its processor. ``sizes``: see ``sizes_of``."""

    def __init__(self, folder: Path, tokenizer: Any, sizes: Mapping[str, int | None]) -> None:
        self._folder, self._tokenizer, self._sizes = folder, tokenizer, sizes

    @cached_property
    def _opener(self) -> ImageOpener:
        return ImageOpener(self._config.data, self._folder, self._tokenizer)

    @cached_property
    def _batcher(self) -> ImageBatcher:
        return ImageBatcher(ImageWork(str(self._folder), PixelBounds.of(self._config.data)))

    @cached_property
    def _config(self) -> RunConfig:
        """A run that says nothing of its images but their sizes: no address is fetched, no bomb decoded."""
        data: dict[str, Any] = {"train": "-", **self._sizes}
        mapping = {"name": "prompts", "model": {"name": str(self._folder)}, "data": data}
        return RunConfig.model_validate(mapping)

    def open(
        self, messages: Sequence[Message], row: Mapping[str, Any], folder: Path
    ) -> tuple[list[Message], tuple[OpenedImage, ...]]:
        """The messages with a part ``{type: image}`` each, and the images; paths from ``folder``. RowRefused."""
        placed, refs = place_images([_copy(message) for message in messages], *read_column(row, {}), "messages")
        if not refs:
            return placed, ()
        if address := next((ref.place for ref in refs if is_address(ref.place)), None):
            raise RowRefused(f"{name_of(address)} is an address, and images of prompts are not fetched: give a file")
        try:
            opened = self._opener.open(Conversation(messages=placed, images=refs), str(folder / "prompts"))
        except BadImage as bad:
            raise RowRefused(str(bad)) from None
        return placed, opened.images

    def put(self, text: str, images: Sequence[OpenedImage]) -> str:
        """The rendered prompt with what stands for each image. Raises RowRefused where the template left one out."""
        if not images:
            return text
        return put_images(Text(text, (), ()), self._opener.placeholder, [image.text for image in images]).text

    def check_placeholders(self, ids: Sequence[int], images: Sequence[OpenedImage]) -> None:
        """RowRefused where a prompt's text holds more placeholders than its images take."""
        if not images:
            return
        expected, found = sum(image.stored.num_tokens for image in images), list(ids).count(self._opener.token_id)
        if found != expected:
            raise RowRefused(
                f"{found:,} placeholders for images are in the prompt, and its images take {expected:,}: leave those "
                "out of the text"
            )

    def inputs(self, model: Any, ids: Sequence[int], images: Sequence[StoredImage]) -> dict[str, Any]:
        """Inputs of ``model``'s forward for one prompt's images, on its device. UserError for a changed image."""
        return image_inputs(self._batcher, model, ids, images)


def image_inputs(
    batcher: ImageBatcher, model: Any, ids: Sequence[int], images: Sequence[StoredImage]
) -> dict[str, Any]:
    """Inputs of ``model``'s forward pass for one prompt's images, on its device. UserError for a changed image."""
    import torch

    from manyhands.data.batch.batches import scale_pixels, to_tensors
    from manyhands.model.multimodal import KINDS_OF_TOKENS

    layout = batcher.layout
    arrays = batcher.join([[batcher.prepare(image, len(images) == 1) for image in images]])
    batch = scale_pixels(to_tensors(arrays, model.device))
    found = {name: batch[name] for name in layout.names}
    found = layout.kind.inputs(found | {PIXELS: found[PIXELS].to(model.dtype)})
    takes = inspect.signature(model.forward).parameters
    kinds = (torch.tensor([list(ids)], device=model.device) == batcher.token_id).long()
    return found | {name: kinds for name in KINDS_OF_TOKENS if name in takes}


def sizes_of(config: RunConfig) -> dict[str, int | None]:
    """The keys of ``data`` that resize images before the processor, and the most pixels that are decoded."""
    names = ("shrink_images_above", "enlarge_images_below", "max_image_pixels")
    return {name: getattr(config.data, name) for name in names}


def open_images(
    folder: Path, tokenizer: Any, sizes: Mapping[str, int | None] = MappingProxyType({})
) -> PromptImages | None:
    """None where the model takes no images, or its folder has no processor. ``sizes``: those that it was trained on."""
    takes = family_of(folder).images is not None and any((folder / name).is_file() for name in PROCESSOR_FILES)
    return PromptImages(folder, tokenizer, sizes) if takes and tokenizer.chat_template else None


def image_token_of(folder: Path) -> int:
    """The id that stands where an image's features go; -1 of a model that takes none."""
    layout = family_of(folder).images
    return -1 if layout is None else int(read_object(folder / "config.json").get(layout.token_field, -1))


def has_images(messages: Sequence[Message]) -> bool:
    return any(part.get("type") == "image" for message in messages for part in parts_of(message))


def refuse_images() -> UserError:
    return UserError(
        "the prompt has images, and the model reads text alone",
        fix="use a vision-language model whose folder has its processor's files and a chat template",
    )


def _copy(message: Message) -> Message:
    content = message.get("content")
    return {**message, "content": [dict(part) for part in content]} if isinstance(content, list) else message
