"""An adapter to go on from: found, read, and held against the run file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.facts.adapter import find_adapter, needed_tokens

FIELDS = {
    "peft_type": "LORA",
    "r": 8,
    "lora_alpha": 4,
    "target_modules": ["v_proj", "q_proj"],
    "base_model_name_or_path": "base",
}


def write(folder: Path, **fields: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(FIELDS | fields))
    names = (f"base_model.model.model.layers.{i}.mlp.up_proj.lora_A.weight" for i in (1, 3))
    save_file({name: torch.zeros(2, 2) for name in names}, folder / "adapter_model.safetensors")
    return folder


def ask(adapter: Path, model: dict[str, Any] | None = None, **method: Any) -> RunConfig:
    sections = {
        "name": "r",
        "model": {"name": "base", **(model or {})},
        "method": {"name": "lora", "adapter": str(adapter), **method},
        "data": {"train": "rows.jsonl"},
    }
    return RunConfig.model_validate(sections)


def test_what_the_run_file_leaves_open_is_the_adapter_s(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", use_rslora=True, use_dora=True, modules_to_save=["lm_head"])
    found = find_adapter(ask(folder, alpha=4.0, dropout=0.1))
    assert found is not None
    method = found.method
    assert (method.rank, method.alpha, method.rslora, method.dora, method.dropout) == (8, 4.0, True, True, 0.1)
    assert (method.target_modules, method.modules_to_save) == (("q_proj", "v_proj"), ("lm_head",))


def test_the_folder_of_a_finished_run_means_its_adapter(tmp_path: Path) -> None:
    write(tmp_path / "run" / "adapter")
    found = find_adapter(ask(tmp_path / "run"))
    assert found is not None and found.folder == str(tmp_path / "run" / "adapter")
    (tmp_path / "full" / "model").mkdir(parents=True)
    (tmp_path / "full" / "model" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="full model") as error:
        find_adapter(ask(tmp_path / "full"))
    assert "model.name=" in str(error.value)
    with pytest.raises(UserError, match="no adapter"):
        find_adapter(ask(tmp_path / "nothing"))


def test_an_adapter_that_began_at_what_nf4_loses_is_trained_beside_nf4_alone(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    weights = folder / "adapter_model.safetensors"
    save_file(load_file(weights), weights, metadata={"format": "pt", "base": "nf4"})
    found = find_adapter(ask(folder, name="qlora"))
    assert found is not None and (found.method.name, found.method.init) == ("qlora", "loftq")
    with pytest.raises(UserError, match="belongs to a model in 4 bits") as error:
        find_adapter(ask(folder))
    assert "method.name: qlora" in str(error.value)
    plain = find_adapter(ask(write(tmp_path / "b"), name="qlora"))
    assert plain is not None and plain.method.init == "zero"


def test_contradictions_are_told_together_and_name_both(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        find_adapter(ask(write(tmp_path / "a"), rank=4, alpha=2.0, dora=True))
    assert list(error.value.details) == [
        "method.rank is 4, and the adapter's is 8",
        "method.alpha is 2.0, and the adapter's is 4.0",
        "method.dora is True, and the adapter's is False",
    ]


@pytest.mark.parametrize(
    ("fields", "targets"),
    [
        ({"target_modules": ".*_proj"}, ("re:.*_proj",)),
        ({"target_modules": "all-linear"}, "all-linear"),
        ({"layers_to_transform": [1, 3]}, ("model.layers.1.mlp.up_proj", "model.layers.3.mlp.up_proj")),
    ],
)
def test_targets_mean_what_they_mean_to_peft(tmp_path: Path, fields: dict[str, Any], targets: Any) -> None:
    found = find_adapter(ask(write(tmp_path / "a", **fields)))
    assert found is not None and found.method.target_modules == targets


@pytest.mark.parametrize("fields", [{"peft_type": "IA3"}, {"rank_pattern": {"q_proj": 2}}, {"bias": "all"}])
def test_what_is_not_computed_here_is_refused(tmp_path: Path, fields: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="cannot be used"):
        find_adapter(ask(write(tmp_path / "a", **fields)))


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_16", "OLoRA", "corda", "loftq"])
def test_an_adapter_whose_base_peft_changes_is_refused(tmp_path: Path, init: str) -> None:
    with pytest.raises(UserError, match=f"init_lora_weights is {init}"):
        find_adapter(ask(write(tmp_path / "a", init_lora_weights=init)))


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal"])
def test_other_first_weights_of_an_adapter_change_nothing(tmp_path: Path, init: bool | str) -> None:
    assert find_adapter(ask(write(tmp_path / "a", init_lora_weights=init))) is not None


def test_pickled_weights_are_not_opened(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(UserError, match="no weights") as error:
        find_adapter(ask(folder))
    assert "pickled" in str(error.value)


def test_tokens_of_the_adapter_must_be_asked_for(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", trainable_token_indices={"model.embed_tokens": [300, 301]})
    assert needed_tokens(folder, ()) == 302
    with pytest.raises(UserError, match="rows of tokens of its own"):
        find_adapter(ask(folder))
    assert find_adapter(ask(folder, {"new_tokens": ["<a>", "<b>"]})) is not None


def test_another_base_is_noted(tmp_path: Path) -> None:
    said: list[str] = []
    find_adapter(ask(write(tmp_path / "a", base_model_name_or_path="other")), said.append)
    assert len(said) == 1 and "other" in said[0]
