"""A document's logits are its own: whatever its length, whatever is packed with it, and whatever came before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from manyhands.core.errors import UserError
from manyhands.data.batch.collate import ROW_TILE, lay_out_rows
from manyhands.engine.activations import checkpoint_blocks
from manyhands.engine.apply import compile_blocks
from manyhands.infer.decode import Completion, complete
from manyhands.infer.load import ModelLocation, load_model
from manyhands.infer.settings import GenerationSettings
from manyhands.model import loss as loss_module
from manyhands.model.checks import check_batches, pack_documents, pad_documents
from manyhands.model.documents import DocumentRope
from manyhands.model.loss import LossModel
from tests.support.ropes import BOUND, ROPE_CASES, ROPES, rope_fields
from tests.support.tiny import tiny_config, tiny_model, tiny_tokenizer

CPU = torch.device("cpu")
LENGTHS = (20, 100, 64, 80, 5, 65, 31)
BY_LENGTH = [(family, kind) for family, kind in ROPE_CASES if kind in ("dynamic", "longrope")]


def make_model(family: str, kind: str, dtype: str = "float64") -> Any:
    return tiny_model(family, dtype, **rope_fields(family, kind)).eval()


def documents(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    return [torch.randint(0, 256, (1, n), generator=torch.Generator().manual_seed(n)) for n in lengths]


def test_every_rope_type_of_transformers_is_a_case() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert ROPES.keys() - {"default"} == ROPE_INIT_FUNCTIONS.keys()


@torch.no_grad()
@pytest.mark.parametrize(("family", "kind"), ROPE_CASES)
def test_packed_padded_and_later_documents_are_as_alone_in_a_new_model(family: str, kind: str) -> None:
    alone = [make_model(family, kind)(ids, use_cache=False).logits for ids in documents()]
    model = make_model(family, kind)
    names, loss_model = model.state_dict().keys(), LossModel(model)
    assert model.state_dict().keys() == names
    for _ in range(2):  # the second time after a long one
        packed = loss_model.logits(pack_documents(documents()))
        torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-9, atol=1e-10)
        rows = loss_model.logits(pad_documents(documents()))
        for row, expected in zip(rows, alone, strict=True):
            torch.testing.assert_close(row[None, : expected.shape[1]], expected, rtol=1e-9, atol=1e-10)
        for ids, expected in zip(documents(), alone, strict=True):
            torch.testing.assert_close(loss_model.logits({"input_ids": ids}), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("family", "kind"), BY_LENGTH)
def test_answers_do_not_depend_on_earlier_prompts(family: str, kind: str, tmp_path: Path) -> None:
    """Rows of one length grow over the bound: after a longer prompt, and each alone in a model just opened."""
    make_model(family, kind, "float32").save_pretrained(tmp_path)
    tokenizer, settings = tiny_tokenizer(), GenerationSettings(max_new_tokens=12)

    def answer(model: nn.Module, *prompts: torch.Tensor) -> list[Completion]:
        return complete(model, tokenizer, [ids[0].tolist() for ids in prompts], settings, ())

    def opened() -> nn.Module:
        return load_model(ModelLocation(tmp_path), "cpu")

    first, longer = documents((60, 90))
    model = opened()
    answer(model, longer)
    alone = [answer(opened(), ids)[0] for ids in (first, first.flip(1))]
    assert answer(model, first, first.flip(1)) == alone
    with pytest.raises(ValueError, match="unequal lengths"):
        answer(model, first, longer)


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("family", "kind"), [("phi3", "longrope"), ("llama", "dynamic"), ("gemma3", "dynamic")])
def test_the_check_finds_a_batch_that_changes_frequencies(
    family: str, kind: str, packing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sound = LossModel(make_model(family, kind, "float32"))
    check_batches(sound, sound, CPU, packing=packing, longest=100)
    monkeypatch.setattr(loss_module, "follow_documents", lambda model: [])
    plain = LossModel(make_model(family, kind, "float32"))
    check_batches(plain, plain, CPU, packing=packing, longest=BOUND)  # no document is longer
    with pytest.raises(UserError, match="logits depend on") as refused:
        check_batches(plain, plain, CPU, packing=packing, longest=BOUND + 1)
    assert f"data.max_length={BOUND}" in refused.value.fix


class Normed(nn.Module):
    """A projection with a norm over the batch behind it."""

    def __init__(self, inner: nn.Module, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        self.inner, self.norm = inner, norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        return self.norm(out.flatten(0, 1)).view_as(out)


class Shifted(nn.Module):
    """A projection that adds what the last token of the batch before it was, as a state that nobody resets."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.last, self.num_calls = inner, None, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.inner(x)
        out, self.last = out if self.last is None else out + self.last, out[:, -1:].mean(0, keepdim=True)
        self.num_calls += 1
        return out


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(
    ("change", "on_what", "state"),
    [
        (lambda inner: Normed(inner, nn.BatchNorm1d(64, track_running_stats=False)), "what else is in its batch", ""),
        (lambda inner: Normed(inner, nn.BatchNorm1d(64)), "what was in earlier batches", "norm.running_mean"),
        (Shifted, "what was in earlier batches", "num_calls"),
    ],
)
def test_statistics_and_states_of_batches_are_refused_by_name(
    change: Any, on_what: str, state: str, packing: bool
) -> None:
    model = tiny_model("llama")
    layer = model.model.layers[1].mlp
    layer.down_proj = change(layer.down_proj)
    loss_model = LossModel(model).train()
    with pytest.raises(UserError, match=f"logits depend on {on_what} in LlamaForCausalLM") as refused:
        check_batches(loss_model, loss_model, CPU, packing=packing)
    assert bool(state) == any(f"model.layers.1.mlp.down_proj.{state}" in line for line in refused.value.details)
    assert loss_model.training


@pytest.mark.parametrize("lengths", [(5,), (300, 1, 1, 290, 40, 9, 8), (1, 70, 33), ()])
def test_rows_hold_each_document_once_from_its_beginning(lengths: tuple[int, ...]) -> None:
    total = sum(lengths) + 7  # padded
    rows = lay_out_rows(lengths, total)
    sizes = [count * length for count, length in rows["row_shapes"]]
    assert len(rows["row_tokens"]) == sum(sizes) <= max(total, sum(max(4 * n / 3, n + ROW_TILE) for n in lengths))
    assert sum(count for count, _ in rows["row_shapes"]) == max(1, len(lengths))
    starts = np.cumsum([0, *(length for count, length in rows["row_shapes"] for _ in range(count))])
    for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        places = rows["row_places"][start : start + length]
        assert places[0] in starts and (np.diff(places) == 1).all()
        assert (rows["row_tokens"][places] == np.arange(start, start + length)).all()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputed_blocks_have_the_rows_of_their_own_pack(mode: Any, compiled: bool) -> None:
    """Two packs of different documents go forward before either goes backward, but where a compiled block is in parts
    inside of the recomputation."""

    def gradients(recomputes: bool) -> list[torch.Tensor]:
        model = tiny_model("qwen3_5_text", "float64").train()
        names = list(model.state_dict())
        loss_model = LossModel(model)
        assert list(model.state_dict()) == names
        if recomputes:
            checkpoint_blocks(model, [mode] * 3, compiled=compiled)
        if compiled and recomputes:
            compile_blocks(model, dynamic=True, backend="eager")
        losses = []
        for lengths in ((20, 50, 3), (40, 9)):
            batch = pack_documents(documents(lengths))
            losses.append(loss_model(batch | {"labels": batch["input_ids"].roll(-1, 1)})["lm"][0])
            if compiled:
                losses.pop().backward()
        if losses:
            sum(losses).backward()
        return [p.grad for p in model.parameters()]

    for found, expected in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_dropout_of_adapters_is_no_state() -> None:
    from manyhands.config.schema import MethodSection
    from manyhands.convert.lora import apply_lora

    model = tiny_model("llama")
    apply_lora(model, MethodSection(name="lora", dropout=0.5), 0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    loss_model = LossModel(model).train()
    check_batches(loss_model, loss_model, CPU, packing=True)
    assert all(module.training for module in loss_model.modules())


def test_a_rotary_module_keeps_its_attributes_and_waits_for_no_device() -> None:
    model = make_model("llama", "longrope")
    old = model.model.rotary_emb
    LossModel(model)
    rope = model.model.rotary_emb
    assert isinstance(rope, DocumentRope) and rope.config is old.config and rope.inv_freq is old.inv_freq
    assert LossModel(model).model.model.rotary_emb is rope  # not wrapped twice
    assert tiny_config("llama").rope_parameters["rope_type"] == "default"
    assert not LossModel(tiny_model("llama")).needs_documents
