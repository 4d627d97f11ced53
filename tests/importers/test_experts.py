"""What files of other tools say of experts: their router's loss, adapters on stacks, and how they are computed."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.config.read import ParsedFile
from manyhands.importers.hints import hint
from manyhands.importers.recognize import load_importer, translate
from manyhands.importers.translation import ImportContext, Translation

MIXTURE = {"num_experts_per_tok": 8, "router_aux_loss_coef": 0.001}
FILES: dict[str, dict[str, Any]] = {
    "axolotl.run": {
        "base_model": "org/model",
        "datasets": [{"path": "rows.jsonl", "type": "chat_template"}],
        "adapter": "qlora",
        "load_in_4bit": True,
        "lora_r": 8,
        "lora_alpha": 16,
        "lora_target_modules": ["q_proj", "v_proj"],
        "sequence_len": 512,
        "learning_rate": 1e-4,
        "output_dir": "out",
    },
    "llamafactory.run": {"model_name_or_path": "org/model", "stage": "sft", "finetuning_type": "lora",
                         "template": "llama3", "dataset": "rows", "dataset_dir": {"rows": {"file_name": "rows.json"}},
                         "do_train": True, "output_dir": "out"},
    "trl": {"model_name_or_path": "org/model", "dataset_name": "org/data", "use_peft": True,
            "lora_target_modules": ["q_proj", "v_proj"]},
}  # fmt: skip
LOSS = {
    "axolotl.run": ("model_config", {"output_router_logits": True, "router_aux_loss_coef": 0.02}),
    "llamafactory.run": ("moe_aux_loss_coef", 0.02),
    "trl": ("router_aux_loss_coef", 0.02),
}
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def read(tool: str, keys: dict[str, Any], config: dict[str, Any] | None = None) -> Translation:
    context = ImportContext(gpus=1, model_config=lambda _: config)
    return translate(ParsedFile(FILES[tool] | keys, "run.yaml"), load_importer(tool), context)


def outcome(done: Translation, key: str) -> tuple[str, str]:
    return next((one.kind, one.why) for one in done.outcomes if one.key == key)


@pytest.mark.parametrize("tool", FILES)
def test_a_router_loss_keeps_its_strength(tool: str) -> None:
    """transformers' loss of an even router is as large as a token has experts, ours is 1."""
    key, value = LOSS[tool]
    for config in (MIXTURE, {"text_config": MIXTURE}):
        done = read(tool, {key: value}, config)
        assert done.mapping["moe"] == {"balance": pytest.approx(0.16)}
        assert outcome(done, key)[0] == "substituted" and "8 experts per token" in outcome(done, key)[1]
    dense = read(tool, {key: value}, {"hidden_size": 8})
    assert "moe" not in dense.mapping and outcome(dense, key) == ("no_op", "the model has no experts")
    kind, why = outcome(read(tool, {key: value}), key)
    assert kind == "refused" and "set moe.balance to router_aux_loss_coef times num_experts_per_tok" in why
    assert why.endswith("no config.json of the model could be fetched")
    assert "moe" not in read(tool, {key: None if tool == "axolotl.run" else 0.0}, MIXTURE).mapping


def test_a_native_file_with_their_key_is_told_ours() -> None:
    for path in ("router_aux_loss_coef", "moe.router_aux_loss_coef", "moe_aux_loss_coef"):
        assert hint(path) == ": `moe.balance` is this value times the experts of a token (num_experts_per_tok)"


def test_axolotl_takes_the_strength_of_config_json() -> None:
    key = {"model_config": {"output_router_logits": True}}
    for keys in (key, {"overrides_of_model_config": key["model_config"]}):
        assert read("axolotl.run", keys, MIXTURE).mapping["moe"] == {"balance": pytest.approx(0.008)}
    kind, why = outcome(read("axolotl.run", key, {"num_experts_per_tok": 8}), "model_config")
    assert kind == "refused" and why.endswith("the model's config.json does not have them")


@pytest.mark.parametrize(
    ("tool", "keys"),
    [
        ("axolotl.run", {"lora_target_linear": True}),
        ("axolotl.run", {"lora_target_modules": "all-linear"}),
        ("llamafactory.run", {"lora_target": "all"}),
        ("trl", {"lora_target_modules": "all-linear"}),
    ],
)
def test_all_linear_layers_of_a_mixture_are_more_than_in_other_tools(tool: str, keys: dict[str, Any]) -> None:
    (key,) = keys
    for config in (MIXTURE, {"text_config": MIXTURE}):
        done = read(tool, keys, config)
        assert done.mapping["method"]["target_modules"] == "all-linear"
        assert outcome(done, key)[0] == "substituted" and "with all experts, which" in outcome(done, key)[1]
    if tool != "llamafactory.run":
        assert outcome(read(tool, keys | {"lora_target_parameters": STACKS}, MIXTURE), key)[0] == "mapped"
    for dense in ({"hidden_size": 8, "num_experts_per_tok": None}, None):
        assert outcome(read(tool, keys, dense), key)[0] == "mapped"


def test_llamafactorys_default_adapts_more_of_a_mixture_too() -> None:
    for config, is_mixture in ((MIXTURE, True), ({"hidden_size": 8}, False)):
        done = read("llamafactory.run", {"lora_rank": 8}, config)
        assert done.mapping["method"]["target_modules"] == "all-linear"
        assert ("with all experts, which" in done.tool_defaults["method.target_modules"]) == is_mixture


@pytest.mark.parametrize("tool", ["axolotl.run", "trl"])
@pytest.mark.parametrize(
    ("modules", "parameters", "targets"),
    [
        (["q_proj"], STACKS, ["q_proj", *STACKS]),
        (["q_proj"], STACKS[1:], ["q_proj", STACKS[1]]),
        ("all-linear", STACKS, "all-linear"),
        ("all-linear", STACKS[1:], "all linear layers include all experts here"),
        (None, STACKS, "name the other target modules too"),
        (["q_proj"], "mlp.experts.down_proj", "allowed: a list of names"),
    ],
)
def test_target_parameters_are_target_modules(tool: str, modules: Any, parameters: Any, targets: Any) -> None:
    done = read(tool, {"lora_target_modules": modules, "lora_target_parameters": parameters})
    kind, why = outcome(done, "lora_target_parameters")
    if kind == "refused":
        assert targets in why
    elif modules is None:  # Axolotl hands an empty list to PEFT, TRL nothing
        assert tool == "axolotl.run" and done.mapping["method"]["target_modules"] == parameters
    else:
        assert done.findings() == [] and done.mapping["method"]["target_modules"] == targets


@pytest.mark.parametrize(
    ("keys", "key", "kind", "told"),
    [
        ({"quantize_moe_experts": True}, "quantize_moe_experts", "no_op", "holds experts in NF4"),
        (
            {"quantize_moe_experts": True, "adapter": "lora", "load_in_4bit": False, "load_in_8bit": True},
            "quantize_moe_experts",
            "substituted",
            "experts stay in 16 bits",
        ),
        ({"use_scattermoe": True}, "use_scattermoe", "ignored", "kernels that pass a self-test"),
        ({"use_sonicmoe": True}, "use_sonicmoe", "ignored", "kernels that pass a self-test"),
        ({"experts_implementation": "grouped_mm"}, "experts_implementation", "ignored", "one implementation"),
        ({"plugins": ["axolotl.integrations.kernels.KernelsPlugin"]}, "plugins", "no_op", "self-test"),
        ({"expert_parallel_size": 1}, "expert_parallel_size", "no_op", ""),
        ({"expert_parallel_size": 4}, "expert_parallel_size", "mapped", ""),
        ({"expert_parallel_backend": "deep_ep"}, "expert_parallel_backend", "ignored", "sent by torch.distributed"),
        ({"expert_parallel_token_capacity": 64}, "expert_parallel_token_capacity", "no_op", "is not set"),
        ({"dense_mixer": True}, "dense_mixer", "refused", "not available for experts"),
    ],
)
def test_axolotl_s_keys_of_experts(keys: dict[str, Any], key: str, kind: str, told: str) -> None:
    found, why = outcome(read("axolotl.run", keys), key)
    assert found == kind and told in why
