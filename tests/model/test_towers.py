"""Towers compute what transformers' own do, and neither they nor what leads to the decoder waits for the device."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.core.errors import UserError
from manyhands.data.images.batch import ImageWork
from manyhands.data.images.files import PixelBounds
from manyhands.data.images.places import HOST_ENTRIES, place_images, tower_sizes
from manyhands.data.tokenize.tokenizer import load_tokenizer
from manyhands.families import find
from manyhands.model.image_checks import ProbeImages
from manyhands.model.structure import auto_class_of, find_tower_blocks
from manyhands.model.towers import TOWER, attend_alike, attend_each, attend_tower, multiply_patches
from tests.support import vision
from tests.support.building import on_meta
from tests.support.images import FAMILIES, IMAGE, QWEN, make_document, pack
from tests.support.layouts import build
from tests.support.tiny import tiny_plan, tiny_run

TRAINED = {"vision": "trained", "projector": "trained", "language": "trained"}


def collated(folder: Path, family: str, counts: tuple[int, ...] = (1, 2, 0, 1)) -> dict[str, Any]:
    """A pack of documents with so many images, with all that data workers add."""
    from transformers import AutoConfig

    batch = pack(family, [make_document(family, num, seed, touching=True) for seed, num in enumerate(counts)])
    layout = find(family).images
    assert layout is not None
    arrays = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    sizes = tower_sizes(AutoConfig.from_pretrained(folder).vision_config)
    added = place_images(arrays, layout, {layout.token_field: IMAGE}, sizes)
    return batch | {n: v if isinstance(v, int) else torch.from_numpy(v) for n, v in added.items()}


@pytest.mark.parametrize("family", QWEN)
def test_features_and_gradients_are_those_of_transformers(folders: dict[str, Path], family: str) -> None:
    """With what the host works out and without; what lies in the batch is to the bit what the model makes of grids."""
    reference: Any = auto_class_of(folders[family]).from_pretrained(folders[family], attn_implementation="sdpa")
    engine = build(tiny_plan(folders[family], parts=TRAINED), tiny_run(folders[family]))
    images, model = engine.loss_model.images, engine.model
    assert images is not None and model.model.visual.config._attn_implementation == TOWER
    batch = collated(folders[family], family)
    expected = reference.model.get_image_features(batch["pixel_values"], batch["image_grid_thw"])
    deeper = list(getattr(expected, "deepstack_features", None) or ())
    whole = [torch.cat(expected.pooler_output), *deeper]
    weights = [torch.randn(part.shape, generator=torch.Generator().manual_seed(0)) for part in whole]
    sum((part * w).sum() for part, w in zip(whole, weights, strict=True)).backward()
    plain = {name: value for name, value in batch.items() if not name.startswith("image_") or name in HOST_ENTRIES}
    for given in (batch, plain):
        model.zero_grad()
        features, more = images._features(model, given)
        for ours, theirs in zip((features, *more), whole, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        sum((part * w).sum() for part, w in zip((features, *more), weights, strict=True)).backward()
        for (name, ours), theirs in zip(
            model.model.visual.named_parameters(), reference.model.visual.parameters(), strict=True
        ):
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0, msg=name)


def test_images_of_one_size_are_computed_as_rows() -> None:
    """Each image by itself is what they give side by side."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 4, 3 * 20, 8, generator=draw) for _ in range(3))
    bounds = torch.tensor([0, 20, 40, 60], dtype=torch.int32)
    found = attend_alike(query, key, value, 3, 0.3)
    torch.testing.assert_close(found, attend_each(query, key, value, bounds, 0.3))


def test_images_do_not_see_each_other_and_lengths_have_to_arrive() -> None:
    """A planted leak: bounds that forget where one image ends change its features."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 12, 8, generator=draw) for _ in range(3))
    bounds = torch.tensor([0, 4, 12], dtype=torch.int32)
    module = torch.nn.Module()
    out, _ = attend_tower(module, query, key, value, None, cu_seq_lens_q=bounds, max_length_q=8)
    alone, _ = attend_tower(
        module, query[:, :, :4], key[:, :, :4], value[:, :, :4], None, cu_seq_lens_q=bounds[:2], max_length_q=4
    )
    torch.testing.assert_close(out[:, :4], alone, rtol=0, atol=0)
    leak = attend_each(query, key, value, bounds[[0, 2]], None)
    assert not torch.allclose(out, leak, atol=1e-2)
    with pytest.raises(RuntimeError, match="got no cumulative lengths"):
        attend_tower(module, query, key, value, None)
    with pytest.raises(RuntimeError, match="neither masks nor dropout"):
        attend_tower(module, query, key, value, None, is_causal=True, cu_seq_lens_q=bounds, max_length_q=8)


def on_device(batch: dict[str, Any], device: str) -> dict[str, Any]:
    """As the thread that reads ahead sends it."""
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) and name not in HOST_ENTRIES else value
        for name, value in batch.items()
    }


# What transformers' own code asks the device for, none of it in a layer of a tower: which squares are not padding and
# which patches are in the mask, or not padding.
WAITING_TOWERS = ("idefics3", "smolvlm", "gemma4")


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_that_leads_through_the_model_reads_the_device(folders: dict[str, Path], family: str) -> None:
    """On the meta device whatever has to know values raises, as on a GPU the host would wait for it."""
    attention = "sdpa" if family == "gemma4" else "varlen"  # which takes no heads as wide as its own
    model, _ = on_meta(tiny_plan(folders[family], parts=TRAINED, attention=attention), tiny_run(folders[family]))
    model.model.to(torch.bfloat16)
    assert model.images is not None
    for counts, always in (((1, 2, 0, 1), False), ((0, 0), False), ((0, 0), True)):
        batch = on_device(collated(folders[family], family, counts), "meta")
        batch["label_positions"] = torch.arange(5, device="meta")
        model.images.always_runs = always
        if family in WAITING_TOWERS and (always or any(counts)):
            with pytest.raises(RuntimeError, match=r"nonzero|item"):
                model.images.decoder_inputs(model.model, batch)
            continue
        inputs = model.images.decoder_inputs(model.model, batch)
        assert inputs["inputs_embeds"].shape[:2] == batch["input_ids"].shape
        if attention == "varlen":
            model(batch)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_5", "glm4v"])
def test_nor_do_towers_like_those_of_qwen(tmp_path: Path, family: str) -> None:
    """With drawn images that are collated as a run's are. GLM-4V's tower takes grids too, which are then on the device,
    and read once more when all its layers are through.
    """
    folder = vision.write_tiny_vision(tmp_path, family)
    config = tiny_run(folder)
    work = ImageWork(str(folder), PixelBounds.of(config.data))
    probe = ProbeImages(config, work, load_tokenizer(folder))
    batch, _ = probe.batch([(np.arange(1, 9), 0), (np.arange(1, 7), 1)], packed=True)
    model, _ = on_meta(tiny_plan(folder, parts=TRAINED, attention="varlen"), config)
    model.model.to(torch.bfloat16)
    assert model.images is not None
    if family == "glm4v":
        with pytest.raises(NotImplementedError) as waits:
            model.images.decoder_inputs(model.model, on_device(batch, "meta"))
        assert "split_sizes" in str([str(frame.statement) for frame in waits.traceback])
        return
    inputs = model.images.decoder_inputs(model.model, on_device(batch, "meta"))
    assert inputs["inputs_embeds"].shape[:2] == batch["input_ids"].shape


@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl", "llava_onevision", "idefics3"])
def test_features_that_are_not_as_many_as_their_places_are_an_error(folders: dict[str, Path], family: str) -> None:
    """One place too few, which an index would leave out silently, and one too many; by shapes alone."""
    engine = build(tiny_plan(folders[family], parts=TRAINED, attention="blockwise"), tiny_run(folders[family]))
    for change in (-1, 1):
        batch = collated(folders[family], family)
        num = len(batch["image_places"])
        text = int((batch["input_ids"][0] != IMAGE).nonzero()[0])
        place = int(batch["image_places"][-1]) if change < 0 else text
        batch["input_ids"][0, place] = 5 if change < 0 else IMAGE
        both = [name for name in batch if name == "image_places" or name.startswith("image_rows")]
        plain = {name: value for name, value in batch.items() if name not in both}
        places = (batch["input_ids"][0] == IMAGE).nonzero().squeeze(1)
        for given in (plain, batch | {"image_places": places}):
            with pytest.raises(UserError, match=f"makes {num} features .* have {num + change}") as error:
                engine.forward(given)
            assert "image tokens" in str(error.value.where) and "processor's files" in str(error.value.fix)


@pytest.mark.gpu
@pytest.mark.parametrize("bounds", [(0, 4, 1028, 1300), (0, 325, 650, 975, 1300)], ids=["sizes", "one size"])
@pytest.mark.parametrize("dim", [64, 72, 80])
def test_the_kernel_computes_each_image_alone(dim: int, bounds: tuple[int, ...]) -> None:
    """Outputs and gradients in bfloat16, of the head sizes of the towers of Qwen2.5-VL (80) and Qwen3-VL (64, 72)."""
    draw, cu_seq_lens = torch.Generator("cuda").manual_seed(0), torch.tensor(bounds, dtype=torch.int32).cuda()
    longest = max(end - begin for begin, end in itertools.pairwise(bounds))
    shape = (1, 4, 1300, dim)
    inputs = [
        torch.randn(shape, device="cuda", generator=draw, dtype=torch.bfloat16).requires_grad_() for _ in range(3)
    ]
    weights = torch.randn((1, 1300, 4, dim), device="cuda", generator=draw)
    out, _ = attend_tower(torch.nn.Module(), *inputs, None, cu_seq_lens_q=cu_seq_lens, max_length_q=longest)
    kernel = [out, *torch.autograd.grad((out.float() * weights).sum(), inputs)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    plain = attend_each(*exact, cu_seq_lens, None)
    for found, right in zip(kernel, [plain, *torch.autograd.grad((plain * weights).sum(), exact)], strict=True):
        assert float((found.double() - right).square().mean().sqrt() / right.std()) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gemma3", *QWEN, "internvl"])
def test_the_host_never_waits_for_images(folders: dict[str, Path], family: str) -> None:
    """In steady state, forward and backward through tower and projector: torch raises where the host would wait."""
    model, load = on_meta(tiny_plan(folders[family], parts=TRAINED, attention="varlen"), tiny_run(folders[family]))
    load(model.model, torch.device("cpu"))
    model.model.to("cuda", torch.bfloat16)
    assert model.images is not None
    for counts in ((1, 2, 0, 1), (0, 0)):
        batch = on_device(collated(folders[family], family, counts), "cuda")
        model.images.always_runs = True
        model.images.decoder_inputs(model.model, batch)["inputs_embeds"].sum().backward()  # kernels are chosen
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            model.images.decoder_inputs(model.model, batch)["inputs_embeds"].sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_patches_times_a_kernel_are_their_convolution() -> None:
    draw = torch.Generator().manual_seed(0)
    patches, weight = (torch.randn(n, 3, 2, 4, 4, generator=draw, dtype=torch.float64) for n in (5, 7))
    bias = torch.randn(7, generator=draw, dtype=torch.float64)
    for given in (bias, None):
        expected = torch.nn.functional.conv3d(patches, weight, given, stride=(2, 4, 4))
        torch.testing.assert_close(multiply_patches(patches, weight, given), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.ci
@pytest.mark.parametrize("family", ["qwen3_vl", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_frozen_towers_compiled_give_the_same_features(folders: dict[str, Path], family: str) -> None:
    """Of batches with other numbers of images, too; trained towers stay as they are."""
    frozen = {"vision": "frozen", "projector": "frozen", "language": "trained"}
    run = tiny_run(folders[family])
    plain, compiled, trained = (
        build(tiny_plan(folders[family], parts=parts, compile=compile_), run)
        for parts, compile_ in ((frozen, False), (frozen, True), (TRAINED, True))
    )
    blocks = [list(find_tower_blocks(engine.model).values()) for engine in (plain, compiled, trained)]
    are_compiled = [[block._compiled_call_impl is not None for block in each] for each in blocks]
    assert [set(each) for each in are_compiled] == [{False}, {True}, {False}]
    for counts in ((1, 2, 0, 1), (2,), (3, 1, 1)):
        batch = collated(folders[family], family, counts)
        (expected, deeper), (found, more) = (e.loss_model.images._features(e.model, batch) for e in (plain, compiled))
        for ours, theirs in zip((found, *more), (expected, *deeper), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
