"""Images in a language model: each document of a pack as alone in transformers' own model, none seen by another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.convert.lora import adapted_layers
from manyhands.core.errors import UserError
from manyhands.families import find
from manyhands.model.attention import ImageRows, attend_blockwise, attend_varlen
from manyhands.model.loss import LossModel
from manyhands.model.multimodal import BY_OWN_FORWARD, find_image_rows
from manyhands.model.structure import auto_class_of, find_experts, set_attention
from tests.support import other_vision, torchvision, vision
from tests.support.building import on_meta
from tests.support.images import (
    FAMILIES,
    QWEN,
    Document,
    check_engine,
    make_document,
    pack,
    probe_of,
    reference_loss,
    unpack,
)
from tests.support.layouts import build
from tests.support.multimodal import write_tiny_multimodal
from tests.support.tiny import tiny_plan, tiny_run

TRAINED = {"vision": "trained", "projector": "trained", "language": "trained"}


@pytest.fixture(scope="module")
def tiny_llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision.write_tiny_vision(tmp_path_factory.mktemp("llava"), "llava")


def documents(family: str) -> list[Document]:
    return [make_document(family, num, seed, touching=True) for seed, num in enumerate((1, 2, 0, 1))]


def engine_of(folder: Path, **changes: Any) -> Any:
    return build(tiny_plan(folder, **{"parts": TRAINED} | changes), tiny_run(folder))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pack_has_the_loss_of_its_documents_alone(folders: dict[str, Path], family: str) -> None:
    """By transformers' attention and by ours, packed and as rows; one document's images never reach another."""
    reference: Any = auto_class_of(folders[family]).from_pretrained(folders[family], attn_implementation="sdpa")
    packed = documents(family)
    with torch.no_grad():
        expected = [float(reference_loss(reference, family, document)) for document in packed]
        for attention in ("sdpa", "blockwise"):
            engine = engine_of(folders[family], attention=attention)
            assert float(engine.forward(pack(family, packed))["lm"][0]) == pytest.approx(sum(expected), rel=2e-6)
            row = unpack(pack(family, packed[1:2]))
            assert float(engine.forward(row)["lm"][0]) == pytest.approx(expected[1], rel=2e-6)
        before, bounds = engine.logits(pack(family, packed)), pack(family, packed)["cu_seq_lens"].tolist()
        changed = pack(family, packed)
        first = len(packed[0].inputs["pixel_values"])
        changed["pixel_values"] = torch.cat(
            [-packed[0].inputs["pixel_values"], pack(family, packed)["pixel_values"][first:]]
        )
        after = engine.logits(changed)
    assert torch.equal(before[:, bounds[1] :], after[:, bounds[1] :])
    assert not torch.allclose(before[:, : bounds[1]], after[:, : bounds[1]], atol=1e-3)


def test_a_planted_leak_shows(folders: dict[str, Path]) -> None:
    """Documents without their bounds: the comparison above would fail by far more than it allows."""
    packed = documents("gemma3")
    engine = engine_of(folders["gemma3"], attention="blockwise")
    batch = pack("gemma3", packed)
    with torch.no_grad():
        right = float(engine.forward(batch)["lm"][0])
        length = batch["input_ids"].shape[1]
        leak = batch | {"cu_seq_lens": torch.tensor([0, length], dtype=torch.int32), "max_length": length}
        wrong = float(engine.forward(leak)["lm"][0])
    assert abs(wrong - right) > 1e-3 * right


def test_the_tokens_of_an_image_are_cut_where_documents_touch() -> None:
    is_image = torch.tensor([[0, 1, 1, 0, 1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    rows = find_image_rows(is_image, torch.tensor([0, 6, 10, 10], dtype=torch.int32))
    assert isinstance(rows, ImageRows)
    assert rows.ids.tolist() == [-1, 0, 0, -1, 1, 1, 2, 2, -1, -1] and rows.longest == 2
    assert rows.queries.tolist() == [1, 2, 4, 5, 6, 7]
    assert rows.keys.tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7]
    assert rows.cu_queries.tolist() == [0, 2, 4, 6] and rows.cu_keys.tolist() == [0, 3, 9, 11]


@pytest.mark.parametrize("family", ["gemma3", *QWEN])
def test_a_micro_batch_without_images_is_text_and_gives_zeros(folders: dict[str, Path], family: str) -> None:
    engine = engine_of(folders[family], attention="blockwise")
    text = [make_document(family, 0, seed) for seed in (5, 6)]
    batch = pack(family, text)
    loss = engine.forward(batch)["lm"][0]
    engine.backward(loss, last=True)
    images = engine.loss_model.images
    assert images is not None
    gradients = [parameter.grad for parameter in images.trained(engine.model)]
    assert len(gradients) > 15 and all(g is not None and not g.any() for g in gradients)
    plain = {n: v for n, v in batch.items() if n not in images.entries}
    assert float(engine.forward(plain)["lm"][0].detach()) == float(loss.detach())


@pytest.mark.parametrize("way", ["kept copy", "cast as used"])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_computes_with_float32_masters(folders: dict[str, Path], family: str, way: str) -> None:
    """Towers cast images themselves, to the dtype of a weight that is a master at that moment."""
    states = TRAINED if way == "kept copy" else TRAINED | {"language": "frozen"}
    dtypes: dict[str, Any] = {"compute_dtype": "bfloat16", "frozen_dtype": "bfloat16", "reshard_after_forward": False}
    packed = documents(family)
    with torch.no_grad():
        expected = float(engine_of(folders[family], attention="blockwise").forward(pack(family, packed))["lm"][0])
    dtypes["trains_everything"] = way == "kept copy"
    plan = tiny_plan(folders[family], parts=states, attention="blockwise", **dtypes)
    if way == "kept copy":
        assert plan.layout.compute_copy == "kept"
    engine = build(plan, tiny_run(folders[family]))
    loss = engine.forward(pack(family, packed))["lm"][0]
    engine.backward(loss, last=True)
    assert float(loss) == pytest.approx(expected, rel=2e-2)
    trained = [p for p in engine.model.parameters() if p.requires_grad]
    assert all(p.dtype == torch.float32 and p.grad is not None for p in trained)
    assert any(p.dtype == torch.bfloat16 for p in engine.model.parameters()) == (way != "kept copy")


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "family",
    [
        f if f in ("gemma3", "qwen3_vl", "aya_vision") else pytest.param(f, marks=SLOW)
        for f in (*vision.FAMILIES, *vision.LIKE_THEM, *other_vision.MODELS)
    ]
    + torchvision.params(SLOW),
)
def test_the_loaded_model_is_checked(tmp_path: Path, family: str) -> None:
    """Packed and in rows, images reach the decoder as in the model's own forward pass; so do gradients their tower."""
    folder = vision.write_tiny_vision(tmp_path, family)
    engine, packs = engine_of(folder), find(family).packs is not False
    for packing in (True, False) if packs else (False,):
        found = check_engine(engine, tiny_plan(folder, packing=packing), tiny_run(folder))
        # experts round by how many rows they get: by a few last digits
        leak = 4 * torch.finfo(torch.float32).eps if find_experts(engine.model) else 0
        assert max(found.own, found.together) < 1e-5 and found.leak <= leak and found.seen > 1e-4
        assert found.num_tokens > 0 and f"an image of {found.num_tokens} tokens" in found.describe()
    expected = [
        gradients(engine, folder, [document], packing=False, own=True) for document in (([1, 2, 3], 0), ([4] * 9, 1))
    ]
    together = gradients(engine, folder, [([1, 2, 3], 0), ([4] * 9, 1)], packing=packs)
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, expected[0][name] + expected[1][name], rtol=1e-4, atol=2e-5, msg=name)
    assert together.keys() == {n for n, p in engine.model.named_parameters() if p.requires_grad}
    images = engine.loss_model.images
    smallest = images.with_grid_inputs(engine.model.config, images.smallest(engine.model.config, torch.device("cpu")))
    assert len(images.features(engine.model, smallest)[0]) > 0  # what runs where a micro-batch has no image


def gradients(
    engine: Any, folder: Path, documents: list[tuple[list[int], int]], packing: bool, own: bool = False
) -> dict[str, torch.Tensor]:
    """Of the summed loss of documents around one drawn image each, by parameter; ``own``: by the model's own forward
    pass."""
    probe, before = probe_of(tiny_plan(folder), tiny_run(folder)), engine.model.config._attn_implementation
    batch, _ = probe.batch([(np.array(ids), image) for ids, image in documents], packing)
    if own:
        set_attention(engine.model, "eager")
        logits = engine.loss_model.logits(batch | {BY_OWN_FORWARD: True})
        loss = torch.nn.functional.cross_entropy(logits[0], batch["labels"][0], reduction="sum")
    else:
        loss = engine.forward(batch)["lm"][0]
    engine.model.zero_grad()
    loss.backward()
    found = {name: p.grad.clone() for name, p in engine.model.named_parameters() if p.grad is not None}
    engine.model.zero_grad()
    set_attention(engine.model, before)
    return found


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize(
    "family",
    ["gemma4", "gemma4 experts", "mistral3 experts"]
    + [pytest.param(f, marks=(SLOW, torchvision.MISSING)) for f in ("llama4", "kimi_k25")],
)
def test_adapters_get_the_gradients_of_the_models_own_forward_pass(tmp_path: Path, family: str, method: str) -> None:
    """Beside a trained projector: of documents around one image each, alone and in a pack, or in rows."""
    folder = vision.write_tiny_vision(tmp_path, family)
    states = {"vision": "frozen", "projector": "trained", "language": "trained"}
    engine = build(tiny_plan(folder, parts=states), tiny_run(folder, method, target_modules="all-linear"))
    with torch.no_grad():
        for layer in adapted_layers(engine.model).values():
            layer.lora_B.weight.normal_(std=0.05)
    documents = [([1, 2, 3], 0), ([4] * 9, 1)]
    alone = [gradients(engine, folder, [document], packing=False, own=True) for document in documents]
    together = gradients(engine, folder, documents, packing=find(family).packs is not False)
    projector = find(family.split()[0]).projectors[0]  # of images
    assert together.keys() == alone[0].keys()
    assert all(any(word in name for name in together) for word in ("lora", projector))
    for name, gradient in together.items():
        torch.testing.assert_close(gradient, alone[0][name] + alone[1][name], rtol=1e-4, atol=2e-5, msg=name)


def _forget_bounds(loss_model: LossModel) -> None:
    """Attention that does not know where documents end."""
    images: Any = loss_model.images
    inner = images.decoder_inputs

    def leaks(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
        kwargs = inner(model, batch)
        return kwargs | {"position_ids": torch.arange(batch["input_ids"].shape[1])[None]}

    images.decoder_inputs = leaks


def _shift_features(loss_model: LossModel) -> None:
    """Features in another order than their placeholders."""
    images: Any = loss_model.images
    inner = images._features
    images._features = lambda *given: (inner(*given)[0].flip(0), [])


def _see_all_alike(loss_model: LossModel) -> None:
    images: Any = loss_model.images
    inner = images._inputs
    images._inputs = lambda given, **how: inner(given, **how) | {"pixel_values": torch.ones_like(given["pixel_values"])}


def _leak_slightly(loss_model: LossModel) -> None:
    """A little of the first embeddings in all others, less than rounding of other shapes may change."""
    images: Any = loss_model.images
    inner = images.decoder_inputs

    def leaks(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
        kwargs = inner(model, batch)
        embeds = kwargs["inputs_embeds"]
        return kwargs | {"inputs_embeds": embeds + 3e-4 * embeds[:, :9].mean(dim=1, keepdim=True)}

    images.decoder_inputs = leaks


def _drop_features(loss_model: LossModel) -> None:
    images: Any = loss_model.images
    inner = images._features
    images._features = lambda *given: (inner(*given)[0][1:], [])


@pytest.mark.parametrize(
    ("spoil", "failed"),
    [
        (_forget_bounds, "logits of documents side by side differ from those of each alone"),
        (_shift_features, "its logits differ from those of the model's own forward pass"),
        (_see_all_alike, "another image changes no logits of its own document"),
        (_leak_slightly, "another image changes the logits of the document beside its own: relative deviation"),
        (_drop_features, "makes 7 features of images that have 8 placeholders"),
    ],
)
def test_a_loaded_model_that_fails_a_check_is_refused(tiny_llava: Path, spoil: Any, failed: str) -> None:
    """By the name of the check, and by how much it failed."""
    engine = engine_of(tiny_llava)
    spoil(engine.loss_model)
    with pytest.raises(UserError) as refused:
        check_engine(engine, tiny_plan(tiny_llava), tiny_run(tiny_llava))
    assert failed in f"{refused.value.what} {refused.value.why}"


def test_drawn_weights_may_begin_with_a_projector_of_zeros(tiny_llava: Path) -> None:
    """As transformers draws that of Gemma 3."""
    engine, config = engine_of(tiny_llava), tiny_run(tiny_llava)
    _see_all_alike(engine.loss_model)
    drawn = config.model_copy(update={"model": config.model.model_copy(update={"init": "random"})})
    assert check_engine(engine, tiny_plan(tiny_llava), drawn).seen == 0


def test_families_whose_images_are_not_described_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_multimodal(tmp_path, family="paligemma")
    with pytest.raises(UserError, match=r"models of type paligemma(.|\n)*in both directions"):
        on_meta(tiny_plan(folder, parts=TRAINED), tiny_run(folder))


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 40])
def test_the_rows_of_images_by_a_kernel_are_those_in_plain_torch(window: int | None) -> None:
    """Documents that begin and end with images, in bfloat16: outputs and gradients."""
    device, length, draw = torch.device("cuda"), 700, torch.Generator("cuda").manual_seed(0)
    bounds = torch.tensor([0, 256, 300, 700], dtype=torch.int32, device=device)
    is_image = torch.zeros(1, length, dtype=torch.bool, device=device)
    for begin, end in ((0, 64), (100, 164), (236, 256), (256, 290), (500, 564), (636, 700)):
        is_image[:, begin:end] = True
    rows = find_image_rows(is_image, bounds)
    shapes = ((1, 4, length, 64), (1, 2, length, 64), (1, 2, length, 64))
    inputs = [torch.randn(shape, device=device, generator=draw).bfloat16().requires_grad_() for shape in shapes]
    weights = torch.randn((1, length, 4, 64), device=device, generator=draw)
    found = []
    for attend in (attend_varlen, attend_blockwise):
        lengths = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 512, "max_length_k": 512}
        more = {"image_rows": rows, "sliding_window": window, "scaling": 0.125}
        out, _ = attend(torch.nn.Module(), *inputs, None, **lengths, **more)  # type: ignore[arg-type]
        found.append((out.float(), *torch.autograd.grad((out.float() * weights).sum(), inputs)))
    for kernel, plain in zip(*found, strict=True):
        deviation = (kernel.double() - plain.double()).square().mean().sqrt() / plain.double().std()
        assert float(deviation) < 1e-2
