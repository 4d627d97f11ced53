"""Training with images gives the numbers of transformers' own model and plain AdamW, for every model type and in every
layout.

Steps have documents with one, two and no images, micro-batches and ranks without any, and one step without images on
any rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.config.schema import RunConfig
from manyhands.data.batch.batches import collate
from manyhands.data.batch.collate import BatchShape
from manyhands.data.images.batch import ImageWork
from manyhands.data.images.files import PixelBounds
from manyhands.data.store.store import TokenStore
from manyhands.facts.towers import part_of
from manyhands.families import find
from manyhands.model.loss import IGNORED
from manyhands.model.structure import auto_class_of
from tests.support import other_vision, torchvision
from tests.support.images import (
    FAMILIES,
    Document,
    count_loss_tokens,
    make_document,
    reference_loss,
    sum_loss,
    train,
    train_on_batches,
)
from tests.support.multimodal import write_tiny_multimodal
from tests.support.processed import prepare_rows
from tests.support.ranks import Ranks
from tests.support.tiny import tiny_plan, tiny_run
from tests.support.vision import LIKE_THEM, write_tiny_vision

NUM_STEPS, WITHOUT_IMAGES, RATE = 20, 7, 1e-3
STATES = {
    "everything": {"vision": "trained", "projector": "trained", "language": "trained"},
    "projector": {"vision": "frozen", "projector": "trained", "language": "frozen"},
    "vision and projector": {"vision": "trained", "projector": "trained", "language": "frozen"},
    "projector and language": {"vision": "frozen", "projector": "trained", "language": "trained"},
    "language": {"vision": "frozen", "projector": "frozen", "language": "trained"},
}
COUNTS = ((1, 2, 0, 1), (0, 0, 1, 1), (2, 1, 0, 0))  # images of a step's four micro-batches, in turn


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {f: write_tiny_multimodal(tmp_path_factory.mktemp(f), family=f) for f in FAMILIES}


def make_steps(family: str, num_steps: int = NUM_STEPS) -> list[list[list[Document]]]:
    """Four micro-batches a step, of one or two documents each."""
    steps = []
    for step in range(num_steps):
        counts = (0, 0, 0, 0) if step == WITHOUT_IMAGES else COUNTS[step % len(COUNTS)]
        steps.append(
            [
                [make_document(family, num, 100 * step + 10 * i + j, touching=True) for j in range(1 + (i + step) % 2)]
                for i, num in enumerate(counts)
            ]
        )
    return steps


def run_of(folder: Path, method: str = "full") -> RunConfig:
    config = tiny_run(folder, method)
    optimizer = config.optimizer.model_copy(update={"learning_rate": RATE, "weight_decay": 0.01})
    return config.model_copy(update={"optimizer": optimizer})


def reference(
    folder: Path, family: str, states: dict[str, str], steps: Any, loss_of: Callable[[Any, str, Document], torch.Tensor]
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of transformers' model, document by document, under torch's AdamW."""
    model: Any = auto_class_of(folder).from_pretrained(folder, attn_implementation="sdpa")
    decoder = {id(p) for m in (model.get_decoder(), model.get_output_embeddings()) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        part = "language" if id(parameter) in decoder else part_of(name, find(family))
        parameter.requires_grad_(states[part] == "trained")
    embeddings = {id(p) for m in model.modules() if isinstance(m, torch.nn.Embedding) for p in m.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() >= 2 and id(p) not in embeddings]
    others = [p for p in trained if p.dim() < 2 or id(p) in embeddings]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=RATE)
    losses, norms = [], []
    for micros in steps:
        documents = [document for micro in micros for document in micro]
        total, loss_sum = count_loss_tokens(documents), 0.0
        for document in documents:
            loss = loss_of(model, family, document)
            if loss.requires_grad:  # else nothing that is trained was passed
                (loss / total).backward()
            loss_sum += float(loss.detach())
        losses.append(loss_sum / total)
        squares = [p.grad.double().square().sum() for p in trained if p.grad is not None]
        norms.append(float(torch.stack(squares).sum().sqrt()) if squares else 0.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return losses, norms


SLOW, FAST = pytest.mark.slow, ("aya_vision", "lighton_ocr")


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "states"),
    [
        *((family, "everything") for family in ("gemma3", "qwen3_vl")),
        ("llava_onevision", "projector"),
        ("gemma3", "projector and language"),
        *(pytest.param(f, "projector", marks=SLOW) for f in FAMILIES if f != "llava_onevision"),
    ],
)
def test_twenty_steps_are_those_of_transformers_and_plain_adamw(
    folders: dict[str, Path], family: str, states: str
) -> None:
    steps = make_steps(family)
    plan = tiny_plan(folders[family], parts=STATES[states], learning_rate=RATE)
    found = train(plan, run_of(folders[family]), family, steps)
    losses, norms = reference(folders[family], family, STATES[states], steps, reference_loss)
    np.testing.assert_allclose(found["losses"], losses, rtol=1e-5)
    np.testing.assert_allclose(found["norms"], norms, rtol=1e-4)
    before = dict(auto_class_of(folders[family]).from_pretrained(folders[family]).named_parameters())
    for name, values in found["frozen"].items():
        np.testing.assert_array_equal(values, before[name].detach().numpy(), err_msg=name)
    moved = [name for name, values in found["trained"].items() if not np.array_equal(values, before[name].detach())]
    assert moved and len(moved) == len(found["trained"])


TYPES = (*FAMILIES, *LIKE_THEM, *other_vision.MODELS)
SHARDED = (
    "llava_next",
    "mistral3",
    "glm4v",
    "qwen3_5",
    "aya_vision",
    "janus",
    "gemma4 experts",
)  # each way that images are cut or inferred, beside FAMILIES'
# Images of a conversation (width, height), between its words; numbers of those of two micro-batches of a step, in turn.
SHOWN: tuple[tuple[tuple[int, int], ...], ...] = (((80, 60),), ((30, 30), (90, 60)), (), ((28, 84),), ())
TURNS: tuple[tuple[tuple[int, ...], ...], ...] = (((0, 2), (3,)), ((4,), (1,)), ((2,), (3, 0)))


def batches_of(folder: Path, family: str, store: TokenStore, steps: Any) -> list[tuple[list[dict[str, Any]], int]]:
    """(the micro-batches, their loss tokens) of steps of numbers of samples, as a run collates them."""
    shape = BatchShape(find(family).packs is not False, images=ImageWork(str(folder), PixelBounds(10**6)))
    made = []
    for micros in steps:
        batches = [collate(store.train, np.array(micro, dtype=np.int64), shape) for micro in micros]
        has_images = any(batch["has_images"] for batch in batches)
        num_loss_tokens = sum(int((batch["labels"] != IGNORED).sum()) for batch in batches)
        made.append(([batch | {"has_images": has_images} for batch in batches], num_loss_tokens))
    return made


@pytest.mark.ci
@pytest.mark.parametrize(
    "family", [f if f in FAST else pytest.param(f, marks=SLOW) for f in TYPES] + torchvision.params(SLOW)
)
def test_twenty_steps_on_rows_are_those_of_the_types_own_processor_and_plain_adamw(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From rows on: samples and micro-batches as a run has them, against what the family's processor in transformers
    makes of the same conversations.
    """
    if family == "qwen3_5_moe":  # experts are chosen by scores that may be nearly equal, which amplifies rounding
        monkeypatch.setattr(f"{__name__}.RATE", RATE / 10)
    folder = write_tiny_vision(tmp_path / "model", family)
    store, documents = prepare_rows(folder, family, tmp_path, SHOWN)
    steps = [((2,), (4,)) if step == WITHOUT_IMAGES else TURNS[step % len(TURNS)] for step in range(NUM_STEPS)]
    plan = tiny_plan(folder, parts=STATES["everything"], learning_rate=RATE)
    found = train_on_batches(plan, run_of(folder), batches_of(folder, family, store, steps))
    shown = [[[documents[place] for place in micro] for micro in micros] for micros in steps]
    losses, norms = reference(
        folder,
        family,
        STATES["everything"],
        shown,
        lambda model, _, document: sum_loss(model, document, document.inputs),
    )
    np.testing.assert_allclose(found[0], losses, rtol=1e-5)
    np.testing.assert_allclose(found[1], norms, rtol=1e-4)


@pytest.mark.distributed
@pytest.mark.parametrize("family", [pytest.param(f, marks=SLOW) for f in SHARDED] + torchvision.params(SLOW)[:3])
def test_two_ranks_take_the_same_steps_on_rows(tmp_path: Path, world: Ranks, family: str) -> None:
    """Sharded, where tower and projector run on each rank: also on one without images, and without samples."""
    folder = write_tiny_vision(tmp_path / "model", family)
    store, _ = prepare_rows(folder, family, tmp_path, SHOWN)
    steps = batches_of(folder, family, store, (((0, 2), (4,)), ((), (1,)), ((2,), (4,)), ((3,), (1, 0))))
    plan = {"parts": STATES["everything"], "learning_rate": RATE, "attention": "blockwise"}
    expected = train_on_batches(tiny_plan(folder, **plan), run_of(folder), steps)
    sharded = tiny_plan(folder, world_size=2, strategy="fsdp", **plan)
    for found in world.run("tests.support.images:train_on_batches", sharded, run_of(folder), steps, world_size=2):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"strategy": "ddp"}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "fsdp, recomputed, kept": (
        2,
        {"strategy": "fsdp", "reshard_after_forward": False, "activation_checkpointing": "full"},
    ),
    "hsdp": (4, {"strategy": "hsdp", "shard_degree": 2}),
}


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("family", "states", "method", "layout"),
    [
        ("gemma3", "everything", "full", "fsdp"),
        ("gemma3", "projector", "full", "ddp"),
        ("gemma3", "projector and language", "lora", "fsdp"),
        ("qwen2_5_vl", "everything", "full", "ddp"),
        ("qwen2_5_vl", "vision and projector", "full", "hsdp"),
        ("qwen3_vl", "projector", "full", "fsdp"),
        ("qwen3_vl", "everything", "full", "fsdp, recomputed, kept"),
        *(pytest.param(f, "everything", "full", "fsdp", marks=SLOW) for f in FAMILIES if f != "gemma3"),
        *(pytest.param(f, "everything", "full", "ddp", marks=SLOW) for f in FAMILIES if f != "qwen2_5_vl"),
        *(pytest.param(f, "language", "full", "fsdp", marks=SLOW) for f in ("gemma3", "qwen3_vl")),
    ],
)
def test_every_layout_takes_the_same_steps(
    folders: dict[str, Path], world: Ranks, family: str, states: str, method: str, layout: str
) -> None:
    steps = make_steps(family, WITHOUT_IMAGES + 2)[WITHOUT_IMAGES - 2 :]  # images, none, images
    config = run_of(folders[family], method)
    world_size, changes = LAYOUTS[layout]
    plan = {"parts": STATES[states], "learning_rate": RATE, "attention": "blockwise"}
    arguments = (config, family, steps)
    expected = train(tiny_plan(folders[family], **plan), *arguments)
    found = world.run(
        "tests.support.images:train",
        tiny_plan(folders[family], world_size=world_size, **plan, **changes),
        *arguments,
        world_size=world_size,
    )[0]
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=1e-5)
    np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-5)
    assert found["trained"].keys() == expected["trained"].keys()
    for name, values in expected["trained"].items():
        if name.endswith(("k_proj.bias", "qkv.bias")):
            continue  # it shifts all scores of a query alike: its gradient is rounding, of which Adam makes full steps
        np.testing.assert_allclose(found["trained"][name], values, atol=2e-4, err_msg=name)
    for name, values in expected["frozen"].items():
        np.testing.assert_array_equal(found["frozen"][name], values, err_msg=name)


@pytest.mark.distributed
@pytest.mark.parametrize(("family", "layout"), [("gemma3", "ddp"), ("qwen3_vl", "fsdp")])
def test_ranks_that_read_features_and_ranks_that_compute_them_agree(
    folders: dict[str, Path], world: Ranks, family: str, layout: str, tmp_path: Path
) -> None:
    """Some of them are kept from before: one rank runs its tower while another has none, and a third no image."""
    steps = make_steps(family, WITHOUT_IMAGES + 2)[WITHOUT_IMAGES - 2 :]
    config, plan = run_of(folders[family]), {"parts": STATES["projector"], "learning_rate": RATE}
    world_size, changes = LAYOUTS[layout]
    alone = train(tiny_plan(folders[family], **plan), config, family, steps, kept_in=str(tmp_path))
    assert alone["features"][1] == 0
    for path in sorted(tmp_path.glob("*/*/*"))[::3]:
        path.unlink()
    whole = tiny_plan(folders[family], world_size=world_size, **plan, **changes)
    ranks = world.run("tests.support.images:train", whole, config, family, steps, True, str(tmp_path), world_size=2)
    assert all(sum(counts) > 0 for counts in zip(*(found["features"] for found in ranks), strict=True))
    np.testing.assert_allclose(ranks[0]["losses"], alone["losses"], rtol=1e-5)
    np.testing.assert_allclose(ranks[0]["norms"], alone["norms"], rtol=1e-5)
    for name, values in alone["trained"].items():
        np.testing.assert_allclose(ranks[0]["trained"][name], values, atol=2e-4, err_msg=name)


@pytest.mark.distributed
@pytest.mark.parametrize("family", ["gemma3", pytest.param("janus", marks=SLOW), pytest.param("mistral3", marks=SLOW)])
def test_the_loaded_model_is_checked_where_it_is_sharded(world: Ranks, tmp_path: Path, family: str) -> None:
    """By every rank alike, the model's own forward pass among them; of a described family and of an inferred one."""
    folder = write_tiny_vision(tmp_path, family)
    plan = tiny_plan(folder, world_size=2, parts=STATES["everything"], strategy="fsdp", attention="blockwise")
    first, second = world.run("tests.support.images:check", plan, tiny_run(folder), world_size=2)
    assert max(first.own, first.together) < 1e-5 and first.leak == 0 and first.seen > 1e-4
    assert (first.own, first.together, first.seen) == (second.own, second.together, second.seen)
