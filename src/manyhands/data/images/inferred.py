"""Images by the processor that transformers has for a model, where no file of ours describes the family.

The processor is asked for its pixels and for what it writes in place of a placeholder, one image at a time. What the
rest of the data path takes for granted is asked of it first, on a few drawn images: every image becomes squares of one
size, nothing beside them reaches the model, and pixels are bytes that a table turns into the processor's floats.
"""

import inspect
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.core.errors import UserError
from manyhands.core.files import read_object
from manyhands.data.images.processor import NO_FLOATS, ImageProcessor, find_class
from manyhands.data.tokenize.tokenizer import load_tokenizer
from manyhands.families import ImageLayout
from manyhands.families.images import PIXELS, ImageShape, stack_squares

SIZES = ((48, 64), (64, 48), (200, 61))  # (height, width) of the drawn images
IGNORED = ("attention_mask", "input_ids")


class InferredProcessor(ImageProcessor):
    """As ``ImageProcessor``. UserError where the model's processor does not do what is needed, with the reason."""

    def __init__(self, model_folder: str | Path, layout: ImageLayout) -> None:
        super().__init__(model_folder, layout)
        self._tokenizer = load_tokenizer(self.folder)
        try:
            self._whole = self._open_whole()
            self._arguments = self._whole._merge_kwargs(
                self._whole.valid_processor_kwargs, tokenizer_init_kwargs=self._tokenizer.init_kwargs
            )["images_kwargs"]
            self._ask()
        except UserError:
            raise
        except Exception as error:  # whatever the class does with arguments that it does not expect
            raise self._unfit(f"{type(error).__name__}: {error}") from error

    def words(self, tokenizer: Any) -> dict[str, str]:
        """The text that chat templates write for an image, and the token in whose place features go."""
        token_id = read_object(self.folder / "config.json").get(self.layout.token_field)
        return {"placeholder": self._placeholder, "token": str(tokenizer.convert_ids_to_tokens(token_id))}

    def expand(self, shape: ImageShape, words: Any) -> str:
        blank = np.zeros((*shape.size, 3), dtype=np.uint8)
        return self.layout.expand(shape, {"written": self._process(blank, **NO_FLOATS)[1]})

    @property
    def _placeholder(self) -> str:
        return str(getattr(self._whole, "image_placeholder_token", None) or self._whole.image_token)

    def run(self, pixels: np.ndarray, alone: bool) -> dict[str, Any]:
        made, _ = self._process(pixels, **NO_FLOATS)
        return {PIXELS: _stack(made[PIXELS])}

    def _process(self, pixels: np.ndarray, **changes: Any) -> tuple[dict[str, Any], str]:
        """The processor's entries of one image, and what it writes in its place."""
        from PIL import Image

        made, (text,) = self._whole._process_images([Image.fromarray(pixels)], **{**self._arguments, **changes})
        return dict(made), text

    def _open_whole(self) -> Any:
        """The processor around the image processor. Its other parts, such as that of videos, are never asked."""
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES as BY_TYPE

        told = read_object(self.folder / "processor_config.json")
        kind = str(read_object(self.folder / "config.json").get("model_type"))
        name = BY_TYPE.get(kind)
        if not name:
            raise self._unfit(f"transformers has no processor for models of type {kind}")
        base = find_class(name, [kind for kind, found in BY_TYPE.items() if found == name], "processing")
        whole = type(base.__name__, (base,), {"check_argument_for_proper_class": lambda *_: None})
        takes = inspect.signature(base.__init__).parameters
        values = {key: value for key, value in told.items() if key in takes}
        parts = dict.fromkeys(base.get_attributes()) | {"image_processor": self.own, "tokenizer": self._tokenizer}
        return whole(**{**values, **parts})

    def _ask(self) -> None:
        """UserError where images are no squares of one size that are all the model gets, or pixels no bytes."""
        draw = np.random.default_rng(0)
        shapes, words = set(), self.words(self._tokenizer)
        for size in SIZES:
            pixels = draw.integers(0, 256, (*size, 3), dtype=np.uint8)
            made, text = self._process(pixels)
            if more := made.keys() - {PIXELS, *IGNORED, *self._whole.unused_input_names}:
                raise self._unfit(f"its processor makes {', '.join(sorted(more))} beside {PIXELS}")
            if words["token"] not in text:
                raise self._unfit(f"its processor does not write {words['token']} in place of {words['placeholder']}")
            floats, squares = _stack(made[PIXELS]), stack_squares(self.run(pixels, True))
            shapes.add(squares.shape[1:])
            channel = np.arange(3)[:, None, None]
            if squares.ndim != 4 or squares.shape[1] != 3 or not np.array_equal(self.table[channel, squares], floats):
                raise self._unfit("its pixels do not follow from whole numbers, as which prepared images are kept")
        if len(shapes) > 1:
            listed = ", ".join(sorted(" x ".join(map(str, shape[1:])) for shape in shapes))
            raise self._unfit(f"its processor makes squares of several sizes ({listed})")

    def _unfit(self, why: str) -> UserError:
        kind = read_object(self.folder / "config.json").get("model_type")
        return UserError(
            f"images cannot be trained with models of type {kind}",
            where=str(self.folder),
            why=why,
            fix="set data.images: false, or use a model of a type in the table of docs/vision.md",
        )


def _stack(pixels: Any) -> np.ndarray:
    """Squares (n, 3, H, W) of one image."""
    values = np.stack([np.asarray(square) for square in pixels])
    return values.reshape(-1, *values.shape[-3:])
