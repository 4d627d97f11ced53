"""Documents with images for the tiny models of ``tests/support/multimodal.py``, as batches and as each family's own
inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from manyhands.config.schema import RunConfig
from manyhands.core.holding import gather
from manyhands.data.images.batch import FeatureFiles, ImageWork
from manyhands.data.images.files import PixelBounds
from manyhands.data.tokenize.tokenizer import load_tokenizer
from manyhands.families import find
from manyhands.model.image_checks import ImageVerdict, ProbeImages, check_images
from manyhands.model.loss import IGNORED
from manyhands.model.multimodal import masks_of_generation
from manyhands.planner.types import Plan
from tests.support import layouts
from tests.support.features import keep, with_features
from tests.support.layouts import build

IMAGE, SIDE = 250, 28  # the tiny models' image token; pixels of a square
FAMILIES = ("gemma3", "qwen2_5_vl", "qwen3_vl", "llava", "llava_onevision", "idefics3", "smolvlm", "internvl", "gemma4")
QWEN = ("qwen2_5_vl", "qwen3_vl")
GRIDS = ((4, 4), (2, 6), (6, 4))  # patches of an image's height and width, for Qwen
POOLED = ((3, 3), (3, 6), (6, 6))  # and for Gemma 4


@dataclass(frozen=True)
class Document:
    """Token ids, which of them are trained, and the family's inputs of its images (first dimension: items)."""

    ids: list[int]
    trained: list[bool]
    inputs: dict[str, torch.Tensor]
    positions: torch.Tensor | None = None  # (3, t), of families with positions of three axes
    num_images: int = field(default=0)


def make_document(family: str, num_images: int, seed: int, length: int = 12, touching: bool = False) -> Document:
    """Text with ``num_images`` images in it, all but the images' tokens trained. ``touching``: it begins and ends with
    one, so that images of neighbors touch.
    """
    draw = torch.Generator().manual_seed(seed)
    text = [int(token) for token in torch.randint(1, 240, (length,), generator=draw)]
    inputs, runs = _images(family, num_images, draw)
    places = sorted(int(place) for place in torch.randperm(length - 2, generator=draw)[:num_images] + 1)
    if touching and num_images:
        places[0], places[-1] = (0, length) if num_images > 1 else (0, 0)
    ids: list[int] = []
    for place in range(length + 1):
        for run in [run for run, at in zip(runs, places, strict=True) if at == place]:
            ids += [IMAGE] * run
        ids += text[place : place + 1]
    positions = rope_positions(ids, inputs["image_grid_thw"]) if family in QWEN else None
    return Document(ids, [token != IMAGE for token in ids], inputs, positions, num_images)


def _images(family: str, num: int, draw: torch.Generator) -> tuple[dict[str, torch.Tensor], list[int]]:
    """The inputs, and how many tokens each image takes."""
    if family in QWEN:
        grids = [GRIDS[int(torch.randint(len(GRIDS), (1,), generator=draw))] for _ in range(num)]
        pixels = torch.randn(sum(h * w for h, w in grids), 3 * 2 * 14 * 14, generator=draw)
        grid = torch.tensor([[1, h, w] for h, w in grids], dtype=torch.int64).reshape(-1, 3)
        return {"pixel_values": pixels, "image_grid_thw": grid}, [h * w // 4 for h, w in grids]
    if family == "gemma4":
        grids = [POOLED[int(torch.randint(len(POOLED), (1,), generator=draw))] for _ in range(num)]
        pixels = torch.rand(sum(h * w for h, w in grids), 3, 4, 4, generator=draw)
        sizes = torch.tensor(grids, dtype=torch.int64).reshape(-1, 2)
        return {"pixel_values": pixels, "image_sizes": sizes}, [h * w // 9 for h, w in grids]
    squares = 2 if family == "llava_onevision" and num == 1 else num  # alone, an image has itself in parts too
    inputs = {"pixel_values": torch.randn(squares, 3, SIDE, SIDE, generator=draw)}
    if family == "llava_onevision":
        inputs |= {"image_sizes": torch.tensor([[SIDE, SIDE]] * num, dtype=torch.int64).reshape(-1, 2)}
        inputs |= {"batch_num_images": torch.tensor([num])}
        return inputs, [4 + 2 * 3] if num == 1 else [4 + 1] * num
    tokens = {"gemma3": 4, "llava": 4, "idefics3": 1, "smolvlm": 1, "internvl": 1}[family]
    return inputs, [tokens] * num


def rope_positions(ids: Sequence[int], grids: torch.Tensor) -> torch.Tensor:
    """(3, t): text counts up; an image has the rows and columns of its tokens, and text goes on behind the larger."""
    columns: list[tuple[int, int, int]] = []
    at = place = 0
    left = iter(grids.tolist())
    while place < len(ids):
        if ids[place] != IMAGE:
            columns.append((at, at, at))
            at, place = at + 1, place + 1
            continue
        _, height, width = next(left)
        rows, wide = height // 2, width // 2
        columns += [(at, at + row, at + column) for row in range(rows) for column in range(wide)]
        at, place = at + max(rows, wide), place + rows * wide
    return torch.tensor(columns, dtype=torch.int64).T


def pack(family: str, documents: Sequence[Document], has_images: bool = True) -> dict[str, Any]:
    """A packed micro-batch of a data set with images; two pad tokens where there are no documents."""
    if not documents:
        none = make_document(family, 0, 0)
        documents = [
            Document([0, 0], [False, False], none.inputs, None if none.positions is None else none.positions[:, :2])
        ]
    batch = layouts.pack([(document.ids, document.trained) for document in documents])
    for name in documents[0].inputs:
        batch[name] = torch.cat([document.inputs[name] for document in documents])
    if documents[0].positions is not None:
        batch["rope_positions"] = torch.cat([d.positions for d in documents if d.positions is not None], 1)[:, None]
    return batch | {"has_images": has_images}


def reference_loss(model: Any, family: str, document: Document) -> torch.Tensor:
    """Summed cross-entropy of transformers' own model on a document alone, with the inputs of its own processor."""
    ids = torch.tensor([document.ids])
    inputs: dict[str, Any] = dict(document.inputs) if document.num_images else {}
    if document.num_images and family in ("idefics3", "smolvlm"):
        inputs["pixel_values"] = inputs["pixel_values"][None]
    if document.num_images and family == "llava_onevision":
        squares = inputs["pixel_values"]
        inputs["pixel_values"] = squares[None] if document.num_images == 1 else squares[:, None]
    is_image = (ids == IMAGE).long()
    if family == "gemma3":
        inputs["token_type_ids"] = is_image
    if family in (*QWEN, "gemma4"):
        inputs["mm_token_type_ids"] = is_image.int()
    if family == "gemma4" and document.num_images:
        inputs |= find(family).images.kind.inputs(document.inputs)
        del inputs["image_sizes"]
    return sum_loss(model, document, inputs)


def sum_loss(model: Any, document: Document, inputs: dict[str, Any]) -> torch.Tensor:
    """Summed cross-entropy of a model's own forward pass on ``document``, whose images are ``inputs``."""
    inputs = inputs | masks_of_generation(model, inputs)
    logits = model(input_ids=torch.tensor([document.ids]), use_cache=False, **inputs).logits[0, :-1]
    labels = torch.tensor([t if m else IGNORED for t, m in zip(document.ids[1:], document.trained[1:], strict=True)])
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def count_loss_tokens(documents: Sequence[Document]) -> int:
    return sum(sum(document.trained[1:]) for document in documents)


Steps = Sequence[Sequence[Sequence[Document]]]  # [step][micro-batch of all ranks] -> documents


def train(
    plan: Plan, config: RunConfig, family: str, steps: Steps, packed: bool = True, kept_in: str = ""
) -> dict[str, Any]:
    """Steps of AdamW as one rank; micro-batch k of a step is rank k % world_size's. ``packed`` false: each document
    is a row of its own, one a micro-batch. ``kept_in``: a folder where features of images are kept.

    Returns losses and gradient norms by step, and the trained and frozen weights at the end.
    """
    engine = build(plan, config)
    engine.make_optimizer(plan, config)
    files = keep(engine, kept_in) if kept_in else None
    losses, norms = zip(
        *(take_step(engine, config, family, *step, packed, files) for step in enumerate(steps)), strict=True
    )
    kept = engine.loss_model.images.kept if engine.loss_model.images is not None else None
    if kept is not None:
        kept.close()
    named = {name: (p.requires_grad, gather(p).float()) for name, p in engine.model.named_parameters()}
    return {
        "losses": list(losses),
        "norms": list(norms),
        "features": (kept.num_computed, kept.num_read) if kept is not None else (0, 0),
        "trained": {name: values.numpy() for name, (trained, values) in named.items() if trained},
        "frozen": {name: values.numpy() for name, (trained, values) in named.items() if not trained},
    }


def take_step(
    engine: Any,
    config: RunConfig,
    family: str,
    number: int,
    micros: Sequence[Sequence[Document]],
    packed: bool = True,
    files: FeatureFiles | None = None,
) -> tuple[float, float]:
    """One step of ``train``; returns its loss and gradient norm. ``files``: where features of images are kept."""
    rank, world_size = engine.world.rank, engine.world.world_size
    documents = [document for micro in micros for document in micro]
    has_images = any(document.num_images for document in documents)
    mine = [micro for index, micro in enumerate(micros) if index % world_size == rank]
    mine += [[]] * (-(-len(micros) // world_size) - len(mine))
    batches = [pack(family, micro, has_images) for micro in mine]
    if files is not None:
        batches = [with_features(family, *pair, files) for pair in zip(mine, batches, strict=True)]
    if not packed:
        batches = [unpack(batch) for batch in batches]
    return take_step_of(engine, config, number, batches, count_loss_tokens(documents))


def take_step_of(
    engine: Any, config: RunConfig, number: int, batches: Sequence[dict[str, Any]], num_loss_tokens: int
) -> tuple[float, float]:
    """One step on this rank's micro-batches, of all ranks' ``num_loss_tokens``; returns loss and gradient norm."""
    from manyhands.training.step import StepWork, TermWeight, compute_gradients

    weights = {"lm": TermWeight(num_loss_tokens, 0)}
    work = StepWork(number, 0.0, 1, 0, num_loss_tokens, len(batches), weights, batches)
    sums = compute_gradients(engine, work, seed=0, rank=engine.world.rank)
    loss = float(engine.all_reduce_sum(sums.terms["lm"].clone())) / num_loss_tokens
    norm = float(sums.grad_norm)
    engine.step(config.optimizer.learning_rate, max_norm=0.0)
    return loss, norm


def train_on_batches(
    plan: Plan, config: RunConfig, steps: Sequence[tuple[Sequence[dict[str, Any]], int]]
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of steps, each the micro-batches of all ranks and their loss tokens. As one rank;
    micro-batch k of a step is rank k % world_size's.
    """
    engine = build(plan, config)
    engine.make_optimizer(plan, config)
    rank, world_size = engine.world.rank, engine.world.world_size
    found = [
        take_step_of(engine, config, number, batches[rank::world_size], num_loss_tokens)
        for number, (batches, num_loss_tokens) in enumerate(steps)
    ]
    return [loss for loss, _ in found], [norm for _, norm in found]


def check(plan: Plan, config: RunConfig) -> ImageVerdict:
    """The check of a run's loaded model, whose folder has its processor's files."""
    return check_engine(build(plan, config), plan, config)


def check_engine(engine: Any, plan: Plan, config: RunConfig) -> ImageVerdict:
    probe, must_see = probe_of(plan, config), config.model.init == "pretrained"
    return check_images(engine, engine.loss_model, probe, engine.world.device, plan.packing, must_see=must_see)


def probe_of(plan: Plan, config: RunConfig) -> ProbeImages:
    work = ImageWork(plan.model_folder, PixelBounds.of(config.data))
    return ProbeImages(config, work, load_tokenizer(Path(plan.model_folder)))


def unpack(batch: dict[str, Any]) -> dict[str, Any]:
    """A pack of one document as one row without packing."""
    assert len(batch["cu_seq_lens"]) == 2
    return {name: value for name, value in batch.items() if name not in ("cu_seq_lens", "max_length")}
