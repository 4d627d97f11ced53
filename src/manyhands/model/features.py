"""Features of images that a frozen vision tower gives: computed once and kept, read from then on.

Kept is what goes into the projector where that is trained, else what comes out of it. A tower computes each image by
itself: its features then are a function of image and weights alone, the same to the bit whichever images stood beside
it in a batch, on whichever rank, in this run or in an earlier one. So neither what is already kept nor a restart
changes a run. Knows no files but by ``data/images/batch.py``, and no ranks.
"""

from __future__ import annotations

import hashlib
import json
import math
import queue
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import nn

from manyhands import families
from manyhands.data.images.batch import KEPT, KEPT_ROWS, KEPT_SHAPES, NAMED, FeatureFiles, NamedImage
from manyhands.model.multimodal import Images

NUM_AHEAD = 8  # images whose features wait to be written
# What of a configuration decides how patches become features, beside vision_config.
CONFIG_WORDS = ("vision", "image", "mm_", "downsample", "scale_factor", "projector")
# By the names of numpy's, which has no bfloat16: integers stand in for it.
_DTYPES = {"int16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


Rows = list[torch.Tensor]  # arrays of features, whose first dimension counts rows


class KeptFeatures:
    """Features of the images of ``model``, where batches say what is kept of them (``data/images/batch.py``).

    ``num_computed`` counts images since the start, ``num_read`` micro-batches.
    """

    def __init__(self, images: Images, model: Any, files: FeatureFiles) -> None:
        self._images = images
        self._base = getattr(model, model.base_model_prefix, model)
        self._projectors = _find_projectors(images, model) if images.trained(model) else []
        self._writer, self.work = Writer(files), files.work
        self.num_computed = self.num_read = 0

    def features(self, model: Any, batch: Mapping[str, Any]) -> tuple[torch.Tensor, Rows]:
        """Features (n, e) of all images of ``batch``, and those that further layers of the decoder add."""
        if KEPT in batch:
            self.num_read += 1
            arrays, rows = _unpack(batch[KEPT], batch[KEPT_SHAPES]), batch[KEPT_ROWS]
        else:
            each = [self._compute(model, one, image) for one, image in self._divide(model, batch)]
            arrays = [torch.cat(parts) for parts in zip(*each, strict=True)]
            rows = [len(parts[0]) for parts in each]
        if not self._projectors:
            return arrays[0], arrays[1:]
        made = [_project(*pair, values) for pair, values in zip(self._projectors, arrays, strict=True)]
        parts = self._images.layout.kind.merge(self._base, made[-1], rows, batch)
        features = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        return features, [part.flatten(0, -2) for part in made[:-1]]

    def close(self) -> None:
        """Waits until everything is written."""
        self._writer.close()

    def _divide(self, model: Any, batch: Mapping[str, Any]) -> list[tuple[dict[str, Any], NamedImage]]:
        """Each image of a batch as a batch of its own."""
        divided, entries = [], self._images.layout.entries
        begins = dict.fromkeys((entry.name for entry in entries), 0)
        for image in batch[NAMED]:
            one = {}
            for entry in entries:
                count = image.num_units if entry.item == "unit" else len(image.sizes.get(entry.name, ()))
                begin, begins[entry.name] = begins[entry.name], begins[entry.name] + count
                one[entry.name] = batch[entry.name][begin : begin + count]
            images = torch.tensor([1 if image.alone else 2])  # of a document: one image, or several
            one |= {entry.name: images for entry in entries if entry.item == "document"}
            divided.append((self._images.with_grid_inputs(model.config, one), image))
        return divided

    @torch.no_grad()
    def _compute(self, model: Any, one: dict[str, Any], image: NamedImage) -> Rows:
        """What is kept of one image, which is being written from now on."""
        if self._projectors:
            arrays = self._into_projectors(model, one)
        else:
            features, deeper = self._images.features(model, one)
            arrays = [features, *deeper]
        self.num_computed += 1
        self._writer.put(image, arrays)
        return arrays

    def _into_projectors(self, model: Any, one: dict[str, Any]) -> Rows:
        """What goes into each projector, rows in the order in which features leave."""
        taken: dict[int, torch.Tensor] = {}
        hooks = [
            inner.register_forward_pre_hook(
                lambda _, args, named, number=number: taken.update({number: next(iter((*args, *named.values())))}),
                with_kwargs=True,
            )
            for number, (_, inner) in enumerate(self._projectors)
        ]
        numbered = self._images.layout.kind.reorders_patches
        if numbered:
            hooks += [module.register_forward_hook(_number_rows) for module, _ in self._projectors]
        try:
            features, _ = self._images.features(model, one)
        finally:
            for hook in hooks:
                hook.remove()
        arrays = [taken[number] for number in range(len(self._projectors))]
        order = features.flatten()
        return [_reorder(values, order) for values in arrays] if numbered else arrays


def _find_projectors(images: Images, model: Any) -> list[tuple[nn.Module, nn.Module]]:
    """(what is called, what of it gets what is kept), that of the features themselves last."""
    found = []
    for name in reversed(families.find(model.config.model_type).projectors):
        if not any(each.startswith(f"{name}.") for each in images.parts["projector"]):
            continue  # of sound, or of none in this model
        module = model.get_submodule(name)
        for called in module if isinstance(module, nn.ModuleList) else [module]:
            after = images.layout.after_pooling
            found.append((called, called.get_submodule(after) if after else called))
    return found


def _project(module: Any, inner: nn.Module, values: torch.Tensor) -> torch.Tensor:
    """What the projector makes of what is kept. One that averages patches gets their averages, which it passes on."""
    if inner is module:
        projected: torch.Tensor = module(values)
        return projected
    pool, side = module.avg_pool, module.patches_per_image
    module.avg_pool, module.patches_per_image = nn.Identity(), module.tokens_per_side
    try:
        return module(values)  # type: ignore[no-any-return]
    finally:
        module.avg_pool, module.patches_per_image = pool, side


def _number_rows(_: nn.Module, __: Any, projected: torch.Tensor) -> torch.Tensor:
    """In place of a projector's rows their numbers (rows, 1)."""
    return torch.arange(len(projected), device=projected.device)[:, None]


def _reorder(values: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """``values`` of which as many rows belong to each entry of ``order`` as there are more of them."""
    return values.reshape(len(order), -1)[order].view_as(values)


def digest_of_weights(images: Images, model: Any) -> str:
    """64 hex digits of all that makes features of pixels: weights, configuration, code, device and dtype."""
    digest, config = hashlib.sha256(), model.config.to_dict()
    kept = {name: value for name, value in config.items() if any(word in name for word in CONFIG_WORDS)}
    digest.update(json.dumps(kept, sort_keys=True, default=str).encode())
    names = images.parts["vision"] + ([] if images.trained(model) else images.parts["projector"])
    device = model.get_parameter(names[0]).device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    versions = [f"{name} {version(name)}" for name in ("torch", "transformers", "manyhands")]
    attention = model.config.vision_config._attn_implementation
    digest.update("\0".join([*versions, kind, str(attention), str(bool(images.trained(model)))]).encode())
    towers = tuple(f"{tower}." for tower in families.find(model.config.model_type).towers)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name.startswith(towers or "-")}
    for name, values in sorted(({name: model.get_parameter(name).detach() for name in names} | buffers).items()):
        digest.update(f"\0{name} {values.dtype} {tuple(values.shape)}\0".encode())
        digest.update(memoryview(values.contiguous().reshape(-1).view(torch.uint8).cpu().numpy()))
    return digest.hexdigest()


def _unpack(raw: torch.Tensor, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> Rows:
    """Arrays of these dtypes and shapes from their bytes end to end."""
    arrays, start = [], 0
    for name, shape in shapes:
        dtype = _DTYPES[name]
        end = start + math.prod(shape) * dtype.itemsize
        arrays.append(raw[start:end].view(dtype).view(shape))
        start = end
    return arrays


class Writer:
    """A thread that writes features; ``put`` waits while there are too many that are not written yet."""

    def __init__(self, files: FeatureFiles) -> None:
        self._files = files
        self._waiting: queue.Queue[tuple[NamedImage, Rows, torch.cuda.Event | None] | None] = queue.Queue(NUM_AHEAD)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def put(self, image: NamedImage, arrays: Rows) -> None:
        """Nothing may write to ``arrays`` afterwards. Raises what writing an earlier image has raised."""
        if self._error is not None:
            raise self._error
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="manyhands-features", daemon=True)
            self._thread.start()
        arrived = None
        if arrays[0].is_cuda:
            arrays = [torch.empty(a.shape, dtype=a.dtype, pin_memory=True).copy_(a, non_blocking=True) for a in arrays]
            arrived = torch.cuda.Event()
            arrived.record()
        self._waiting.put((image, arrays, arrived))

    def close(self) -> None:
        """Waits until all are written, and ends the thread; ``put`` starts another one."""
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            image, arrays, arrived = item
            try:
                if arrived is not None:
                    arrived.synchronize()
                self._files.put(image, [_to_numpy(values) for values in arrays])
            except BaseException as error:  # raised where the next image is put
                self._error = error


def _to_numpy(values: torch.Tensor) -> np.ndarray:
    """bfloat16, which numpy does not know, as integers of 16 bits."""
    values = values.contiguous()
    return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()
