"""What one rank does for ``test_image_pairs``: the loss of pairs with images, and the same by the model's own forward
pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy, logsigmoid

from manyhands.config.schema import RunConfig
from manyhands.convert.lora import adapted_layers
from manyhands.data.batch.batches import collate
from manyhands.data.batch.collate import BatchShape
from manyhands.data.images.batch import ImageBatcher, ImageWork
from manyhands.data.images.files import PixelBounds
from manyhands.data.store.store import TokenStore
from manyhands.data.store.streams import from_streams, split_documents
from manyhands.infer.images import image_inputs
from manyhands.model.loss import LossModel
from manyhands.model.structure import set_attention
from manyhands.planner.types import Plan
from tests.support.layouts import build


def open_model(plan: Plan, config: RunConfig) -> LossModel:
    """The run's model, whose adapters change it."""
    loss_model = build(plan, config).loss_model
    for number, layer in enumerate(adapted_layers(loss_model.model).values()):
        drawn = torch.randn(layer.lora_B.weight.shape, generator=torch.Generator().manual_seed(number))
        layer.lora_B.weight.data.copy_(drawn * 0.3)
    return loss_model


def gradient_of(model: Any) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def compute(plan: Plan, config: RunConfig, cuts: Sequence[Sequence[int]], packed: bool) -> Any:
    """(loss, figures, gradient) of pairs in micro-batches of ``cuts``, each divided over the ranks."""
    loss_model, store = open_model(plan, config), TokenStore.open(plan.data_folder)
    shape = BatchShape(packed, images=ImageWork(plan.model_folder, PixelBounds.of(config.data)))
    rank, size = dist.get_rank(), dist.get_world_size()
    loss, figures = torch.zeros((), dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for numbers in cuts:
        batch = collate(store.train, np.array(numbers[rank::size], dtype=np.int64), shape)
        found = loss_model(batch | {"has_images": True}, metrics=True)
        share = found["preference"][0] / sum(map(len, cuts))
        share.backward()
        loss += share.detach().double()
        figures += torch.stack([found[name][0].double() for name in ("preferred", "margin")])
    gradient = gradient_of(loss_model.model)
    for tensor in (loss, figures, gradient):
        dist.all_reduce(tensor)
    return float(loss), figures.tolist(), gradient


def reference(plan: Plan, config: RunConfig) -> Any:
    """The same of DPO, answer by answer."""
    loss_model, store = open_model(plan, config), TokenStore.open(plan.data_folder)
    model: Any = loss_model.model
    set_attention(model, "eager")
    batcher = ImageBatcher(ImageWork(plan.model_folder, PixelBounds.of(config.data)))

    def score(document: Any, images: Any) -> torch.Tensor:
        ids, mask = (torch.from_numpy(np.array(document[name])) for name in ("tokens", "mask"))
        inputs = image_inputs(batcher, model, ids.tolist(), images) if images else {}
        logits = model(input_ids=ids[None].long(), use_cache=False, **inputs).logits[0, :-1]
        return -cross_entropy(logits, ids[1:].long(), reduction="none")[mask[1:]].double().sum()

    margins = []
    for number in range(store.train.num_samples):
        sample = store.train.sample(number)
        documents, images = split_documents(sample, store.train.streams), from_streams(sample)
        chosen, rejected = (score(document, images) for document in documents)
        assert loss_model.without_adapters is not None
        with torch.no_grad(), loss_model.without_adapters():
            before = [score(document, images) for document in documents]
        margins.append(config.preference.beta * ((chosen - before[0]) - (rejected - before[1])))
    loss = -logsigmoid(torch.stack(margins)).mean()
    loss.backward()
    figures = [sum(float(margin > 0) for margin in margins), float(sum(margins).detach())]
    return float(loss.detach()), figures, gradient_of(model)


def write_pictures(folder: Path) -> list[str]:
    """Files of three images of different sizes."""
    from PIL import Image

    draw, paths = np.random.default_rng(0), []
    for number, size in enumerate(((40, 60, 3), (30, 30, 3), (35, 90, 3))):
        paths.append(str(folder / f"{number}.png"))
        Image.fromarray(draw.integers(0, 256, size, dtype=np.uint8)).save(paths[-1])
    return paths
