"""Method ``patterns``: which weights are trained, in which dtypes, and the same step in every layout as in one
process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from manyhands.config.schema import MethodSection
from manyhands.convert.trainable import train_by_pattern
from manyhands.core.errors import UserError
from tests.engine.test_layouts import LAYOUTS, RAGGED, assert_equal_step, merged
from tests.support.layouts import measure
from tests.support.ranks import Ranks
from tests.support.tiny import tiny_model, tiny_plan, tiny_run, write_tiny_models

PARTS = {
    "a block and norms": {"train": ["model.layers.1", "*norm"]},
    "head, embeddings": {"train": ["embed_tokens", "lm_head"]},
    "half a module": {"train": ["*.bias", "re:.*layers.[02].mlp.*"], "freeze": ["gate_proj"]},
    "all but one": {"freeze": ["model.layers.0.*"]},
}
BFLOAT16 = {"compute_dtype": "bfloat16", "frozen_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Untied with biases, and tied."""
    return write_tiny_models(tmp_path_factory.mktemp("models"), "qwen2", "llama")


def train(family: str = "llama", dtype: str = "bfloat16", **keys: Any) -> tuple[Any, list[str]]:
    model = tiny_model(family, dtype)
    return model, train_by_pattern(model, MethodSection(name="patterns", **keys))


def test_named_weights_are_float32_masters_and_the_rest_is_frozen_as_it_was() -> None:
    model, trained = train(train=["model.layers.1.mlp", "model.norm.weight"], freeze=["up_proj"])
    assert trained == [
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.down_proj.weight",
        "model.norm.weight",
    ]
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name in trained)
        assert parameter.dtype == (torch.float32 if name in trained else torch.bfloat16)
    assert model(torch.arange(9)[None]).logits.dtype == torch.bfloat16


def test_a_slice_of_layers_is_python_s() -> None:
    def layers_of(pattern: str) -> set[str]:
        return {name.split(".")[2] for name in train(train=[pattern])[1]}

    assert layers_of("layers[-2:]") == {"1", "2"} and layers_of("model.layers[:1].mlp") == {"0"}
    assert layers_of("layers[-9:]") == {"0", "1", "2"}
    assert all(".mlp." in name for name in train(train=["layers[1:].mlp"])[1])
    with pytest.raises(UserError, match=r"'blocks\[-1:\]' in method.train matches no weight"):
        layers_of("blocks[-1:]")


def test_training_starts_at_the_model_itself() -> None:
    plain, ids = tiny_model("llama", "bfloat16"), torch.arange(9)[None]
    assert torch.equal(train(train=["model.layers.1", "embed_tokens"])[0](ids).logits, plain(ids).logits)


def test_a_tied_weight_is_one_weight_by_either_name() -> None:
    for name in ("lm_head", "embed_tokens"):
        model, trained = train(train=[name])
        assert trained == ["model.embed_tokens.weight"] and model.lm_head.weight is model.model.embed_tokens.weight
    assert "model.embed_tokens.weight" not in train(freeze=["lm_head"])[1]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"train": ["mlp.upproj"]}, "'mlp.upproj' in method.train matches no weight"),
        ({"freeze": ["model.layers.9"]}, "'model.layers.9' in method.freeze matches no weight"),
        ({"train": ["lm_head"], "freeze": ["embed_tokens"]}, "no weight is trained"),
        ({"freeze": ["*"]}, "no weight is trained"),
        ({"train": ["re:("]}, "not a valid regular expression"),
    ],
)
def test_what_trains_nothing_is_refused(keys: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text.replace("(", r"\(")):
        train(**keys)


def test_new_tokens_need_trained_rows() -> None:
    model = tiny_model("qwen3")
    with pytest.raises(UserError, match="would not be trained in the head"):
        train_by_pattern(model, MethodSection(name="patterns", train=["embed_tokens"]), token_ids=(260,))


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_step_of_one_process_under_every_layout(
    world: Ranks, folders: dict[str, str], part: str, family: str
) -> None:
    if family == "llama" and "bias" in str(PARTS[part]):
        pytest.skip("Llama has no biases")
    folder, config = folders[family], tiny_run(folders[family], "patterns", **PARTS[part])
    one = measure(tiny_plan(folder), config, merged(RAGGED))
    for strategy in ("ddp", "fsdp"):
        plan = tiny_plan(folder, world_size=2, strategy=strategy)
        for found in world.run(LAYOUTS, plan, config, RAGGED, world_size=2):
            assert_equal_step(found, one, 3e-6)
            np.testing.assert_array_equal(found["logits"], found["logits_after"])


@pytest.mark.distributed
@pytest.mark.parametrize("part", ["a block and norms", "head, embeddings"])
def test_bfloat16_with_float32_masters_is_the_same_under_ddp_and_fsdp(
    world: Ranks, folders: dict[str, str], part: str
) -> None:
    config = tiny_run(folders["qwen2"], "patterns", **PARTS[part])
    ddp, fsdp = (
        world.run(
            LAYOUTS,
            tiny_plan(folders["qwen2"], world_size=2, strategy=strategy, **BFLOAT16),
            config,
            RAGGED,
            world_size=2,
        )[0]
        for strategy in ("ddp", "fsdp")
    )
    assert ddp["dtypes"] == {"torch.float32"} and ddp["loss"] == fsdp["loss"]
    assert_equal_step(fsdp, ddp, 1e-6)


@pytest.mark.ci
@pytest.mark.distributed
@pytest.mark.parametrize("keys", [{}, {"train": ["*"]}])
def test_everything_trained_is_full_training(world: Ranks, folders: dict[str, str], keys: dict[str, Any]) -> None:
    for dtypes in ({}, BFLOAT16):
        full, patterns = (
            world.run(
                LAYOUTS,
                tiny_plan(folders["llama"], world_size=2, strategy="fsdp", **dtypes),
                config,
                RAGGED,
                world_size=2,
            )[0]
            for config in (tiny_run(folders["llama"]), tiny_run(folders["llama"], "patterns", **keys))
        )
        assert (full["loss"], full["norm"], full["dtypes"]) == (patterns["loss"], patterns["norm"], patterns["dtypes"])
        assert all(
            np.array_equal(gradient, patterns["gradients"][name]) for name, gradient in full["gradients"].items()
        )
