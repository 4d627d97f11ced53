"""Conversations about images as a run prepares them, and as the family's own processor in transformers does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyhands.data.store.store import TokenStore
from manyhands.data.tokenize.prepare import prepare
from tests.support.images import Document
from tests.support.tiny import tiny_run
from tests.support.vision import processor_of


def prepare_rows(
    folder: Path, family: str, work: Path, shown: Sequence[Sequence[tuple[int, int]]]
) -> tuple[TokenStore, list[Document]]:
    """(the samples, the same as documents whose inputs are those of the model in ``folder``), one for each of
    ``shown``: the sizes (width, height) of the drawn images that a question is about. Files are written to ``work``.
    """
    from PIL import Image

    draw, rows, opened = np.random.default_rng(0), [], []
    for number, sizes in enumerate(shown):
        images = [Image.fromarray(draw.integers(0, 256, (high, wide, 3), dtype=np.uint8)) for wide, high in sizes]
        for place, image in enumerate(images):
            image.save(work / f"{number}-{place}.png")
        rows.append({"messages": _turns(number, [f"{number}-{place}.png" for place in range(len(images))])})
        opened.append(_turns(number, images))
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(work / "rows.jsonl"), "cache": str(work / "cache"), "image_folder": str(work)}
    config = tiny_run(folder)
    changed = config.data.model_copy(update=data | {"validation_fraction": 0, "order": "as_given"})
    prepared = prepare(config.model_copy(update={"data": changed}), folder, lambda line: None)
    store, processor = TokenStore.open(prepared.folder), processor_of(folder, family)
    return store, [_document(processor, turns, store.train.sample(place)) for place, turns in enumerate(opened)]


def _turns(number: int, images: Sequence[Any]) -> list[dict[str, Any]]:
    """A question about images, each behind some words, and its answer."""
    asked = [p for i in images for p in ({"type": "text", "text": "see "}, {"type": "image", "image": i})]
    asked.append({"type": "text", "text": f"what is {number}?"})
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": [{"type": "text", "text": "it is so"}]},
    ]


def _document(processor: Any, turns: list[dict[str, Any]], sample: Any) -> Document:
    how = {"return_tensors": "pt"} if hasattr(processor.image_processor, "rescale_and_normalize") else {}
    made = processor.apply_chat_template([turns], tokenize=True, return_dict=True, **how)
    inputs = {name: torch.as_tensor(values if how else np.asarray(values)) for name, values in made.items()}
    del inputs["input_ids"]
    inputs = {name: value.float() if value.is_floating_point() else value for name, value in inputs.items()}
    num_images = sum(part["type"] == "image" for part in turns[0]["content"])
    return Document(np.asarray(made["input_ids"][0]).tolist(), sample["mask"].tolist(), inputs, num_images=num_images)
