"""A block's MLP by tiles of the sequence: the numbers of the whole, no tile computed more often than it must be, and a
peak that is a tile's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from manyhands.config.schema import MethodSection
from manyhands.convert.fused_modules import fuse_modules
from manyhands.convert.lora import apply_lora
from manyhands.core.errors import UserError
from manyhands.engine.activations import checkpoint_blocks
from manyhands.engine.apply import compile_blocks
from manyhands.engine.tiles import TiledForward, tile_mlps
from manyhands.families import known_modules
from manyhands.model.structure import find_blocks, find_mlps
from tests.engine.tiles_peak import peak_bytes
from tests.support.layouts import measure
from tests.support.tiny import tiny_model, tiny_plan, tiny_run, write_tiny_model

NUM_TOKENS, TILE = 50, 16  # tiles of 13, 13, 13 and 11


def train(
    tile: int, family: str = "llama", *, rank: int = 0, compiled: bool = False, layers: int = 2
) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[int]]:
    """The loss, gradients by name, and how many tokens each call of the first block's MLP computed."""
    model = tiny_model(family, num_hidden_layers=layers).double().train()
    if rank:
        apply_lora(model, MethodSection(rank=rank), seed=0)
        fuse_modules(model, known_modules())
        for name, factor in model.named_parameters():
            if "lora_B" in name:
                nn.init.constant_(factor, 0.01)
    calls: list[int] = []
    (mlp,) = find_mlps(next(iter(find_blocks(model).values())))
    whole = mlp.forward
    mlp.forward = lambda x: (calls.append(x.shape[1]), whole(x))[1]  # type: ignore[assignment]
    checkpoint_blocks(model, ["full"] * layers, compiled=compiled)
    if tile:
        tile_mlps(model, tile)
    if compiled:
        torch._dynamo.reset()
        compile_blocks(model, dynamic=True, backend="aot_eager")
    loss = model(input_ids=torch.arange(NUM_TOKENS)[None], use_cache=False).logits.square().mean()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, calls


@pytest.mark.parametrize(
    ("family", "rank", "compiled"),
    [
        *(("llama", 0, False), ("llama", 4, False), ("phi3", 4, False), ("gemma3", 0, False)),
        pytest.param("llama", 0, True, marks=pytest.mark.ci),
    ],
)
def test_tiles_give_the_numbers_of_the_whole(family: str, rank: int, compiled: bool) -> None:
    layers = 1 if compiled else 2
    loss, gradients, _ = train(TILE, family, rank=rank, compiled=compiled, layers=layers)
    expected, whole, _ = train(0, family, rank=rank, layers=layers)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    assert gradients.keys() == whole.keys()
    for name, gradient in whole.items():
        assert (gradients[name] - gradient).norm() <= 1e-10 * gradient.norm() > 0, name


def test_a_tile_is_computed_once_forward_and_once_backward() -> None:
    """Not a third time where its block is computed again."""
    _, _, calls = train(TILE)
    assert calls == [13, 13, 13, 11] * 2
    assert train(0)[2] == [50, 50]


def test_tiles_of_trained_weights_are_summed_in_float32() -> None:
    """In bfloat16, 64 tiles: no further from the exact sum than one product over all tokens is."""
    torch.manual_seed(0)
    mlp: Any = find_mlps(next(iter(find_blocks(tiny_model("llama")).values())))[0]
    x = torch.randn(1, 64 * 16, mlp.gate_proj.in_features)
    found = {}
    for tile, dtype in ((0, torch.float64), (0, torch.bfloat16), (16, torch.bfloat16)):
        mlp = mlp.to(torch.bfloat16).to(dtype)
        mlp.zero_grad()
        forward = TiledForward(mlp, tile) if tile else mlp
        forward(x.bfloat16().to(dtype)).sum().backward()
        found[tile, dtype] = mlp.up_proj.weight.grad.double()
    exact = found[0, torch.float64]
    whole, tiled = ((found[tile, torch.bfloat16] - exact).norm() / exact.norm() for tile in (0, 16))
    assert tiled < 1.2 * whole


def test_masters_with_a_bfloat16_copy_train_by_tiles(tmp_path: Path) -> None:
    """The copy is in the modules while tiles are computed again."""
    folder = str(write_tiny_model(tmp_path, "llama", with_tokenizer=False))
    ids = [(list(range(40)), [True] * 40)]
    kept: Any = {"compute_dtype": "bfloat16", "reshard_after_forward": False}
    plans = (tiny_plan(folder, **kept, activation_checkpointing="full", mlp_tile_tokens=tile) for tile in (0, 16))
    whole, tiled = (measure(plan, tiny_run(folder), [[ids]]) for plan in plans)
    assert tiled["loss"] == pytest.approx(whole["loss"], rel=1e-3)
    assert tiled["norm"] == pytest.approx(whole["norm"], rel=1e-2)
    assert tiled["dtypes"] == whole["dtypes"] == {"torch.float32"}


def test_the_peak_is_a_tiles() -> None:
    """512 tokens, 4,096 wide: 8 MiB each of gate, up, activation, product and of gradients; of 32 tokens 0.5 MiB. Of
    weights two blocks' gradients, 3 MiB each, and for tiles a block's sums beside a tile's.
    """
    whole, tiled = (peak_bytes(512, tile) for tile in (0, 32))
    assert whole > 5 * 2**23 and 2**23 < tiled < 2**24


def test_a_block_without_an_mlp_of_its_own_is_refused() -> None:
    """Experts are chosen by a router, and are no MLP that takes hidden states alone."""
    model = tiny_model("qwen3_moe", num_hidden_layers=1)
    assert not find_mlps(next(iter(find_blocks(model).values())))
    with pytest.raises(UserError, match="no MLP that can be computed by tiles"):
        tile_mlps(model, TILE)
