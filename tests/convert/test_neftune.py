"""NEFTune: noise of the right size for each document, whatever it is packed with, and none outside of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyhands.convert.neftune import Noise, mix_tokens, uniform_noise
from manyhands.data.batch.batches import to_tensors
from manyhands.data.batch.collate import NOISE_KEY, BatchShape, collate_samples
from manyhands.data.store.streams import MASK, TOKENS, make_sample
from manyhands.model.loss import LossModel
from tests.support import equality
from tests.support.equality import Case
from tests.support.ranks import Ranks
from tests.support.tiny import tiny_model

LENGTHS = (23, 2, 64, 7, 41)
ALPHA = 8.0


class Rows:
    streams = (TOKENS, MASK)

    def sample(self, index: int) -> Any:
        draw = np.random.default_rng(index)
        return make_sample(draw.integers(0, 256, LENGTHS[index]).astype("<i4"), np.ones(LENGTHS[index], bool))


def embed(model: LossModel, numbers: list[int], packed: bool, key: int | None, dtype: str = "float32") -> torch.Tensor:
    """What reaches the first block, (b, t, e)."""
    batch: Any = to_tensors(collate_samples(Rows(), numbers, BatchShape(packed, tells_documents=True)))
    batch |= {} if key is None else {NOISE_KEY: key}
    with torch.no_grad(), model.documents.of(batch):
        return model.model.get_input_embeddings()(batch["input_ids"])  # type: ignore[no-any-return]


@pytest.fixture
def noisy() -> LossModel:
    model = LossModel(tiny_model("llama")).train()
    model.model.get_input_embeddings().register_forward_hook(Noise(ALPHA, model.documents).add)
    return model


def test_a_documents_noise_is_its_own_bit_for_bit(noisy: LossModel) -> None:
    alone = [embed(noisy, [number], packed=False, key=11)[0] for number in range(5)]
    packed = embed(noisy, [3, 0, 2, 1, 4], packed=True, key=11)[0]
    assert torch.equal(packed, torch.cat([alone[number] for number in (3, 0, 2, 1, 4)]))
    rows = embed(noisy, [2, 4, 1], packed=False, key=11)
    for row, number in zip(rows, (2, 4, 1), strict=True):
        assert torch.equal(row[: LENGTHS[number]], alone[number])


def test_noise_is_as_large_as_transformers_of_a_document_alone(noisy: LossModel) -> None:
    plain = LossModel(tiny_model("llama")).train()
    for number, length in enumerate(LENGTHS):
        noise = embed(noisy, [number], True, 5)[0, :length] - embed(plain, [number], True, 5)[0, :length]
        bound = ALPHA / (length * noise.shape[1]) ** 0.5
        assert 0.95 * bound < noise.abs().max() <= bound * (1 + 1e-5)


def test_no_noise_in_evaluation_and_other_noise_in_other_steps(noisy: LossModel) -> None:
    quiet = embed(noisy, [0], True, None)
    assert torch.equal(embed(noisy.eval(), [0], True, 5), quiet)
    noisy.train()
    first, second = (embed(noisy, [0], True, key) - quiet for key in (5, 6))
    assert abs(float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])) < 0.1


def test_noise_is_uniform_and_neighbors_share_nothing() -> None:
    tokens = mix_tokens(2**62 + 12345, torch.arange(64).repeat_interleave(64), torch.arange(64).repeat(64))
    noise = uniform_noise(tokens, 256, torch.ones(len(tokens)), torch.float64)
    assert len(tokens.unique()) == len(tokens) and noise.abs().max() < 1
    assert abs(float(noise.mean())) < 2e-3 and float(noise.var()) == pytest.approx(1 / 3, rel=5e-3)
    counts = torch.histc(noise, 64, -1, 1)
    assert 20 < float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 130  # chi square of 63
    for one, other in ((noise[1:], noise[:-1]), (noise[:, 1:], noise[:, :-1]), (noise[64:], noise[:-64])):
        assert abs(float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1])) < 5e-3


@pytest.mark.ci
@pytest.mark.distributed
def test_layouts_agree_with_noise(tmp_path: Path, world: Ranks) -> None:
    equality.write_workspace(tmp_path, "llama", num_hidden_layers=2)
    noise = {"method.neftune_alpha": 15.0}
    cases = {case.name: case for case in equality.cases()}
    names = ["single 1, accumulation 1", "single 1, packed 256", "ddp 2, accumulation 2"]
    names.append("fsdp 4, packed 512, activation_checkpointing full")
    reference, *others = (
        equality.run_case(
            world, tmp_path, Case(name, cases[name].world_size, cases[name].keys | noise), "float32", "full"
        )
        for name in names
    )
    plain = equality.run_case(world, tmp_path, cases[names[0]], "float32", "full")
    assert not equality.compare(reference, plain).within("float32")
    for other in others:
        assert equality.compare(reference, other).within("float32")
