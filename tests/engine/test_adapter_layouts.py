"""Options of adapters that weights' shards could break: every layout gives the weights, the loss and the gradients of
one process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from manyhands.facts.types import NewTokens
from tests.engine.test_layouts import LAYOUTS, assert_equal_step, documents, merged
from tests.support.layouts import measure
from tests.support.ranks import Ranks
from tests.support.tiny import tiny_plan, tiny_run, write_tiny_models

GROWN = NewTokens(ids=(257, 260, 262), fresh_ids=(260, 262), vocab_size=263)
STEP = [[documents(1, [5, 20, 3], 0.7), documents(2, [30], 1.0)], [documents(3, [9, 9], 0.5), documents(4, [12], 0.0)]]
NEW = [([257, 4, 260, 9, 262, 7, 260], [True] * 7), ([262, 1], [True] * 2)]

CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dora": ("llama", "lora", {"dora": True, "rslora": True}),
    "whole modules": (
        "qwen3",
        "lora",
        {"modules_to_save": ["lm_head", "input_layernorm", "model.layers.1.mlp.up_proj"]},
    ),
    "tied and whole": ("gemma3", "lora", {"modules_to_save": ["embed_tokens"]}),
    "new tokens": ("qwen3", "lora", {}),
    "new tokens, tied": ("gemma3", "lora", {}),
    "new tokens, whole head": ("qwen3", "lora", {"modules_to_save": ["lm_head"]}),
    "new tokens, full": ("qwen3", "full", {}),
    "new tokens, full and tied": ("llama", "full", {}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_tiny_models(tmp_path_factory.mktemp("models"), "llama", "qwen3", "gemma3")


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_the_step_of_one_process_under_every_layout(world: Ranks, folders: dict[str, str], case: str) -> None:
    family, method, keys = CASES[case]
    folder, config = folders[family], tiny_run(folders[family], method, **keys)
    tokens = GROWN if "new tokens" in case else None
    step = [[[*STEP[0][0], *NEW], STEP[0][1]], STEP[1]] if tokens else STEP
    one = measure(tiny_plan(folder, new_tokens=tokens), config, merged(step))
    for strategy in ("ddp", "fsdp"):
        plan = tiny_plan(folder, new_tokens=tokens, world_size=2, strategy=strategy)
        for found in world.run(LAYOUTS, plan, config, step, world_size=2):
            assert_equal_step(found, one, 3e-6)
            assert found["weights"].keys() == one["weights"].keys()
            assert all(np.array_equal(found["weights"][name], one["weights"][name]) for name in one["weights"])
            np.testing.assert_array_equal(found["logits"], found["logits_after"])


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_new_rows_are_the_mean_of_the_old_ones(folders: dict[str, str], family: str) -> None:
    stored = load_file(f"{folders[family]}/model.safetensors")
    expected = stored["model.embed_tokens.weight"].double().mean(0).float().numpy()
    for method in ("full", "lora"):
        found = measure(
            tiny_plan(folders[family], new_tokens=GROWN), tiny_run(folders[family], method), merged([[NEW]])
        )["weights"]
        table = found["model.embed_tokens.weight"]
        assert table.shape == (263, 64) and np.array_equal(table[:260], stored["model.embed_tokens.weight"].numpy())
        assert all(np.array_equal(table[row], expected) for row in (260, 261, 262))


def test_rows_to_spare_are_used_and_the_model_keeps_its_size(folders: dict[str, str]) -> None:
    """As Qwen has them: 260 rows, and a tokenizer of 250 tokens that gets two more."""
    spare = NewTokens(ids=(250, 251), fresh_ids=(250, 251), vocab_size=260)
    stored = load_file(f"{folders['qwen3']}/model.safetensors")["lm_head.weight"]
    head = measure(tiny_plan(folders["qwen3"], new_tokens=spare), tiny_run(folders["qwen3"]), merged(STEP[:1]))[
        "weights"
    ]["lm_head.weight"]
    assert head.shape == (260, 64) and np.array_equal(head[[249, 252]], stored[[249, 252]].numpy())
    assert np.array_equal(head[[250, 251]], np.stack([stored[:250].double().mean(0).float().numpy()] * 2))


@pytest.mark.distributed
@pytest.mark.parametrize("case", ["dora", "whole modules", "new tokens"])
def test_bfloat16_with_float32_masters_is_the_same_under_ddp_and_fsdp(
    world: Ranks, folders: dict[str, str], case: str
) -> None:
    family, method, keys = CASES[case]
    config, dtypes = (
        tiny_run(folders[family], method, **keys),
        {"compute_dtype": "bfloat16", "frozen_dtype": "bfloat16"},
    )
    tokens = GROWN if "new tokens" in case else None
    ddp, fsdp = (
        world.run(
            LAYOUTS,
            tiny_plan(folders[family], new_tokens=tokens, world_size=2, strategy=strategy, **dtypes),
            config,
            STEP,
            world_size=2,
        )[0]
        for strategy in ("ddp", "fsdp")
    )
    assert ddp["dtypes"] == {"torch.float32"} and ddp["loss"] == fsdp["loss"]
    assert_equal_step(fsdp, ddp, 1e-6)
