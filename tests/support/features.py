"""Features of images that are kept, for documents and engines of ``tests/support/images.py``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from manyhands.data.images.batch import NAMED, FeatureFiles, FeatureWork, NamedImage
from manyhands.model.features import KeptFeatures, digest_of_weights

if TYPE_CHECKING:
    from tests.support.images import Document


def keep(engine: Any, folder: str | Path) -> FeatureFiles:
    """From now on, features of the engine's images are kept in ``folder``."""
    images = engine.loss_model.images
    files = FeatureFiles(FeatureWork(str(folder), digest_of_weights(images, engine.model), 10**9))
    images.kept = KeptFeatures(images, engine.model, files)
    return files


def name_images(family: str, documents: Sequence[Document]) -> tuple[NamedImage, ...]:
    """Each image of the documents, named after its document."""
    named = []
    for document in documents:
        alone = document.num_images == 1 or family != "llava_onevision"
        for number in range(document.num_images):
            sizes = {n: v[number : number + 1].numpy() for n, v in document.inputs.items() if n.startswith("image_")}
            units = int(np.prod(sizes["image_grid_thw"])) if "image_grid_thw" in sizes else 1
            units = int(np.prod(sizes["image_sizes"])) if family == "gemma4" else units
            units = 2 if family == "llava_onevision" and alone else units
            name = hashlib.sha256(f"{document.ids} {number}".encode()).digest()
            named.append(NamedImage(name, units, alone, sizes))
    return tuple(named)


def with_features(
    family: str, documents: Sequence[Document], batch: dict[str, Any], files: FeatureFiles
) -> dict[str, Any]:
    """The batch of these documents without a pixel where all of their features are kept, else with images' names."""
    named = name_images(family, documents)
    found = files.find([image.name for image in named]) if named else None
    if found is None:
        return batch | ({NAMED: named} if named else {})
    sizes, entries = found
    for name in sizes[0]:
        assert np.array_equal(np.concatenate([size[name] for size in sizes]), batch[name])
    arrays = {n: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for n, v in entries.items()}
    return batch | {"pixel_values": batch["pixel_values"][:0]} | arrays
