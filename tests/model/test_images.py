"""Images in a language model: each document of a pack as alone in transformers' own model, none seen by another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from manyhands.core.errors import UserError
from manyhands.model.attention import ImageRows, attend_blockwise, attend_varlen
from manyhands.model.checks import check_images
from manyhands.model.multimodal import find_image_rows
from manyhands.model.structure import auto_class_of
from tests.support.building import on_meta
from tests.support.images import FAMILIES, QWEN, Document, make_document, pack, reference_loss, unpack
from tests.support.layouts import build
from tests.support.multimodal import write_tiny_multimodal
from tests.support.tiny import tiny_plan, tiny_run

TRAINED = {"vision": "trained", "projector": "trained", "language": "trained"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {f: write_tiny_multimodal(tmp_path_factory.mktemp(f), family=f) for f in FAMILIES}


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


@pytest.mark.parametrize("family", ["gemma3", *QWEN])
def test_the_loaded_model_is_checked(folders: dict[str, Path], family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one whose attention forgets where documents end is refused."""
    engine = engine_of(folders[family])
    deviation = check_images(engine, engine.loss_model, torch.device("cpu"))
    assert deviation is not None and deviation < 1e-5
    images = engine.loss_model.images
    inner = images.decoder_inputs

    def leaks(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
        kwargs = inner(model, batch)
        places = torch.arange(batch["input_ids"].shape[1])
        kwargs["position_ids"] = places.expand_as(kwargs["position_ids"])
        length = torch.tensor([0, len(places)], dtype=torch.int32)
        return kwargs | ({"cu_seq_lens_q": length, "max_length_q": len(places)} if "cu_seq_lens_q" in kwargs else {})

    monkeypatch.setattr(images, "decoder_inputs", leaks)
    with pytest.raises(UserError, match="images do not reach"):
        check_images(engine, engine.loss_model, torch.device("cpu"))


def test_families_whose_images_are_not_described_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_multimodal(tmp_path, family="llava_next")
    with pytest.raises(UserError, match="images cannot be trained with models of type llava_next"):
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
