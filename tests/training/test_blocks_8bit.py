"""Moments in 8 bits moved between divisions into blocks: by hand, against bitsandbytes' own quantizer, within its
error.
"""

from __future__ import annotations

import bitsandbytes.functional as kernels
import pytest
import torch

from manyhands.optim.adamw_8bit import Blocks, blocks_in, requantize

SIGNED, UNSIGNED = kernels.create_dynamic_map(signed=True), kernels.create_dynamic_map(signed=False)


def quantize(values: torch.Tensor, levels: torch.Tensor, cut: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales, as the shards of ``cut`` values would have them, by bitsandbytes."""
    parts = [kernels.quantize_blockwise(part, code=levels, blocksize=256) for part in values.split(cut)]
    per_cut = -(-cut // 256)
    scales = [torch.nn.functional.pad(state.absmax, (0, per_cut - len(state.absmax))) for _, state in parts]
    return torch.cat([codes for codes, _ in parts]), torch.cat(scales)


def dequantize(codes: torch.Tensor, scales: torch.Tensor, levels: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    return levels[codes.long()] * scales[blocks.index_of(torch.arange(len(codes)))]


def test_shapes_of_scales_say_where_blocks_begin() -> None:
    odd = torch.empty(70, 70)
    assert blocks_in(odd, (20,)) == Blocks(4900, 5120)  # one shard
    assert blocks_in(odd, (4, 5)) == Blocks(4900, 18 * 70)
    assert blocks_in(odd, (4, 6)) is None and blocks_in(odd, (21,)) is None
    assert blocks_in(torch.empty(18, 256), (18, 1)) == Blocks(18 * 256, 18 * 256)
    begins, ends = Blocks(4900, 1260).spans_of(torch.tensor([0, 255, 256, 1259, 1260, 4899]))
    assert begins.tolist() == [0, 0, 256, 1024, 1260, 3780 + 1024]
    assert ends.tolist() == [256, 256, 512, 1260, 1516, 4900]


def test_blocks_that_lie_alike_keep_their_bits_and_the_others_are_bitsandbytes_own() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    values[300] = -9.0  # the largest of a block, which the levels reach on the positive side only
    old = Blocks(1000, 512)  # shards of 600 values have its blocks at 0 and 256, too
    codes, scales = quantize(values, SIGNED, old.cut)
    before, as_before = codes.clone(), dequantize(codes, scales, SIGNED, old)
    own = torch.zeros(3)
    requantize(codes[:600], 0, own, old, scales, SIGNED)
    assert torch.equal(codes[:512], before[:512]) and torch.equal(own[:2], scales[:2])
    again, state = kernels.quantize_blockwise(as_before[512:600], code=SIGNED, blocksize=256)
    assert torch.equal(codes[512:600], again) and own[2] == state.absmax[0]
    rest = torch.zeros(2)
    requantize(codes[600:], 600, rest, old, scales, SIGNED)
    assert rest.tolist() == [part.abs().max() for part in as_before[600:].split(256)]


@pytest.mark.parametrize(("levels", "bound"), [(SIGNED, 0.0071), (UNSIGNED, 0.0036)], ids=["first", "second"])
def test_from_one_division_to_any_other_the_error_is_the_quantizers(levels: torch.Tensor, bound: float) -> None:
    """And what is divided by does not become zero."""
    values = torch.randn(4900, generator=torch.Generator().manual_seed(1)) ** 3
    values = values if levels is SIGNED else values.square()
    cuts = [5120, 1260, 630, 2450]
    for before in cuts:
        old = Blocks(4900, before)
        saved, scales = quantize(values, levels, before)
        exact = dequantize(saved, scales, levels, old)
        for cut in cuts:
            codes, per_cut = saved.clone(), -(-cut // 256)
            own = torch.zeros(-(-4900 // cut), per_cut)
            for shard, first in enumerate(range(0, 4900, cut)):
                requantize(codes[first : first + cut], first, own[shard], old, scales, levels)
            new = Blocks(4900, cut)
            found, largest = (
                dequantize(codes, own.view(-1), levels, new),
                own.view(-1)[new.index_of(torch.arange(4900))],
            )
            assert ((found - exact).abs() <= bound * largest).all()
            assert cut != before or (torch.equal(codes, saved) and torch.equal(own.view(-1), scales))
            assert levels is SIGNED or ((found > 0) == (exact > 0)).all()


def test_states_of_zeros_stay_so() -> None:
    codes, own = torch.zeros(300, dtype=torch.uint8), torch.ones(2)  # as they are made
    requantize(codes, 0, own, Blocks(300, 200), torch.zeros(2), SIGNED)
    assert torch.equal(own, torch.zeros(2))
