"""Files of TRL, Axolotl and LLaMA-Factory that train on preferences: what they become, by each tool's meaning and
defaults; where we differ on purpose it is said; what is refused says where to go.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from manyhands.config.read import ParsedFile
from manyhands.importers import preferences
from manyhands.importers.hints import hint
from manyhands.importers.load import config_from_mapping
from manyhands.importers.names import find_value
from manyhands.importers.recognize import recognize, translate
from manyhands.importers.translation import ImportContext, Translation, flatten

TRL = {"model_name_or_path": "org/model", "dataset_name": "org/pairs", "use_peft": True, "output_dir": "out/run"}
PAIR = {"prompt": "q", "chosen": "good", "rejected": "bad"}
INFO = {
    "pairs": {"file_name": "p.json", "ranking": True, "columns": PAIR},
    "turns": {"file_name": "t.json", "formatting": "sharegpt", "ranking": True,
              "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"}},
    "judged": {"file_name": "k.json", "formatting": "sharegpt", "columns": {"messages": "messages", "kto_tag": "label"},
               "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user",
                        "assistant_tag": "assistant"}},
    "plain": {"file_name": "s.json"},
    "shown": {"file_name": "i.json", "ranking": True, "columns": {**PAIR, "images": "pictures"}},
    "judged-shown": {"file_name": "j.json", "columns": {"prompt": "q", "kto_tag": "label", "images": "pictures"}},
}  # fmt: skip
LF = {
    "model_name_or_path": "org/model",
    "stage": "dpo",
    "do_train": True,
    "finetuning_type": "lora",
    "dataset": "pairs",
    "dataset_dir": INFO,
    "output_dir": "out/run",
}
AXOLOTL = {
    "base_model": "org/model",
    "rl": "dpo",
    "datasets": [{"path": "org/pairs", "type": "chat_template.argilla_chat"}],
    "adapter": "lora",
    "lora_r": 8,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_target_linear": True,
    "sequence_len": 2048,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "learning_rate": 1e-5,
    "output_dir": "out/run",
}
BASES: Mapping[str, dict[str, Any]] = {"trl": TRL, "lf": LF, "axolotl": AXOLOTL}


def read(tool: str, changes: dict[str, Any], row: dict[str, Any] | None = None) -> Translation:
    mapping = {**BASES[tool], **changes}
    importer = recognize(mapping)
    assert importer is not None
    return translate(ParsedFile(mapping, "f.yaml"), importer, ImportContext(gpus=2, first_row=lambda _: row))


def native(tool: str, changes: dict[str, Any], row: dict[str, Any] | None = None) -> dict[str, Any]:
    """Keys of ours that the file sets, which are a valid run."""
    done = read(tool, changes, row)
    assert done.findings() == []
    config_from_mapping(json.loads(json.dumps(done.mapping)) | {"name": "run"})
    return flatten(done.mapping)


P = "preference."
FILES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    # of each tool its losses with the settings that act on them
    ("trl", {"loss_type": "sigmoid"}, {"task": "preference", "optimizer.learning_rate": 1e-6, "data.max_length": 1024}),
    ("trl", {"loss_type": "ipo", "beta": 0.3}, {P + "loss": "ipo", P + "beta": 0.3}),
    ("trl", {"loss_type": ["robust"], "label_smoothing": 0.1}, {P + "loss": "robust", P + "label_smoothing": 0.1}),
    ("trl", {"loss_type": "sigmoid", "label_smoothing": 0.1}, {P + "loss": "sigmoid", P + "label_smoothing": None}),
    ("trl", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}, {P + "sft_weight": 0.5}),
    ("trl", {"precompute_ref_log_probs": True}, {"task": "preference", P + "reference": "stored"}),
    ("trl", {"rpo_alpha": 1.0, "beta": 0.05}, {P + "sft_weight": 1.0, P + "beta": 0.05}),
    ("trl", {"cpo_alpha": 0.0, "loss_type": "simpo"}, {P + "loss": "simpo", P + "sft_weight": 0.0}),
    ("trl", {"simpo_gamma": 1.2, "loss_type": "simpo"}, {P + "margin": 1.2, P + "sft_weight": 1.0}),
    ("trl", {"cpo_alpha": 0.5, "label_smoothing": 0.1}, {P + "loss": "cpo", P + "label_smoothing": 0.1}),
    ("trl", {"loss_type": "orpo", "beta": 0.2}, {P + "loss": "orpo", P + "beta": 0.2}),
    ("trl", {"desirable_weight": 1.5, "beta": 0.2}, {"task": "kto", P + "desirable_weight": 1.5, P + "beta": 0.2}),
    ("lf", {}, {"task": "preference", P + "loss": "sigmoid", "data.train[0].format": "preference"}),
    ("lf", {"pref_loss": "sigmoid", "dpo_label_smoothing": 0.1}, {P + "label_smoothing": 0.1}),
    ("lf", {"pref_loss": "orpo", "pref_beta": 0.2}, {P + "loss": "orpo", P + "beta": 0.2}),
    ("lf", {"pref_loss": "simpo", "simpo_gamma": 0.7}, {P + "margin": 0.7, P + "sft_weight": 0.0}),
    ("lf", {"pref_ftx": 1.0, "ref_model": "org/model"}, {P + "sft_weight": 1.0}),
    ("lf", {"finetuning_type": "full"}, {"method.name": "full", "task": "preference"}),
    ("lf", {"stage": "kto", "dataset": "judged", "kto_rejected_weight": 2.0}, {P + "undesirable_weight": 2.0}),
    ("axolotl", {}, {"task": "preference", "batch.samples": 16, "data.train[0].format": "preference"}),
    ("axolotl", {"rl": "ipo", "rl_beta": 0.2}, {P + "loss": "ipo", P + "beta": 0.2}),
    ("axolotl", {"dpo_loss_type": ["hinge"], "trl": {"beta": 0.3}}, {P + "loss": "hinge", P + "beta": 0.3}),
    ("axolotl", {"rl": "simpo", "simpo_gamma": 1.0, "cpo_alpha": 0}, {P + "margin": 1.0, P + "sft_weight": 0}),
    ("axolotl", {"rl": "orpo", "orpo_alpha": 0.2, "datasets": [{"path": "org/p", "type": "chat_template.argilla"}]},
     {P + "loss": "orpo", P + "beta": 0.2}),
    ("axolotl", {"rl": "kto", "kto_desirable_weight": 0.2, "datasets": [{"path": "org/k", "type": "llama3.ultra"}]},
     {"task": "kto", P + "desirable_weight": 0.2, "model.chat_template": "llama3"}),
)  # fmt: skip


@pytest.mark.parametrize(("tool", "changes", "wanted"), FILES, ids=[f"{tool}-{keys}" for tool, keys, _ in FILES])
def test_a_file_becomes_its_loss_with_its_settings(tool: str, changes: dict[str, Any], wanted: dict[str, Any]) -> None:
    found = native(tool, changes)
    sources = found.get("data.train")
    if isinstance(sources, list):
        found |= {f"data.train[0].{key}": value for key, value in sources[0].items()}
    assert {key: found.get(key) for key in wanted} == wanted
    assert not found.get("method.dropout"), "their trainers switch dropout off, that of adapters too"


@pytest.mark.parametrize(
    ("tool", "changes", "why"),
    [
        ("trl", {"loss_type": "orpo"}, preferences.ANSWER_ALONE),
        ("trl", {"desirable_weight": 1.0}, "its KL takes the answers of the whole step"),
        ("trl", {"rpo_alpha": 1.0}, "a mean over all tokens of a step's chosen answers"),
        ("trl", {"loss_type": "sigmoid", "max_prompt_length": 512}, "bounded together"),
        ("lf", {"pref_loss": "orpo"}, "a mean over all tokens"),
        ("axolotl", {"rl": "orpo", "datasets": [{"path": "p", "type": "chat_template"}]}, preferences.ANSWER_ALONE),
        ("axolotl", {"dpo_beta": 0.2}, "read as `rl_beta`"),
    ],
)
def test_a_substitution_says_what_is_done_instead(tool: str, changes: dict[str, Any], why: str) -> None:
    assert any(why in one.why for one in read(tool, changes).outcomes if one.kind == "substituted")


@pytest.mark.parametrize(
    ("tool", "changes"),
    [
        ("trl", {"loss_type": "sigmoid"}),
        ("trl", {"desirable_weight": 1.5}),
        ("lf", {}),
        ("lf", {"stage": "kto", "dataset": "judged"}),
        ("axolotl", {}),
        ("axolotl", {"rl": "ipo"}),
    ],
)
def test_the_report_says_what_the_loss_is_a_mean_of(tool: str, changes: dict[str, Any]) -> None:
    done = read(tool, changes)
    assert preferences.MEAN in " | ".join([*done.tool_defaults.values(), *(one.why for one in done.outcomes)])


def test_the_report_says_that_sigmoid_does_not_smooth_labels() -> None:
    [smoothing] = [
        one for one in read("trl", {"loss_type": "sigmoid", "label_smoothing": 0.1}).outcomes
        if one.key == "label_smoothing"
    ]  # fmt: skip
    assert "only robust does" in smoothing.why


@pytest.mark.parametrize(
    ("tool", "changes", "why"),
    [
        ("trl", {"beta": 0.1}, "add `loss_type: sigmoid` for DPO"),
        ("trl", {"loss_type": ["sigmoid", "bco_pair"]}, "allowed is one of sigmoid, hinge, ipo"),
        ("trl", {"loss_type": "sigmoid", "sync_ref_model": True}, "the reference stays the model before training"),
        ("trl", {"loss_type": "sigmoid", "num_generations": 8}, "DPOConfig has no such key"),
        ("trl", {"loss_type": "sigmoid", "assistant_only_loss": True}, "a key of SFTConfig"),
        ("trl", {"num_generations": 8}, "(PPO, GRPO) need TRL, verl or prime-rl"),
        ("lf", {"stage": "ppo"}, "use TRL, verl or prime-rl"),
        ("lf", {"stage": "rm"}, "TRL's RewardTrainer trains them"),
        ("axolotl", {"rl": "reward"}, "reward models are not available"),
        ("axolotl", {"reward_model": True}, "reward models are not available"),
        ("lf", {"pref_loss": "kto_pair"}, "write sigmoid, hinge, ipo, orpo or simpo"),
        ("lf", {"ref_model": "org/other"}, "the reference is the model before training"),
        ("lf", {"dataset": "plain"}, "choose a data set with ranking: true"),
        ("lf", {"stage": "kto"}, "choose a data set with the column kto_tag"),
        ("lf", {"stage": "kto", "dataset": "judged-shown"}, "judged answers are trained on text alone"),
        ("lf", {"stage": "sft"}, "write stage dpo (pairs) or kto"),
        ("axolotl", {"rl": "grpo"}, "use TRL, verl or prime-rl"),
        ("axolotl", {"rl": "ebft"}, "use TRL, verl or prime-rl"),
        ("axolotl", {"sample_packing": True}, "Axolotl packs no preferences"),
        ("axolotl", {"datasets": [{"path": "p", "type": "zephyr.nectar"}]}, "is not available with `rl: dpo"),
        ("axolotl", {"rpo_alpha": 1.0}, "write dpo_loss_type: [sigmoid, sft]"),
    ],
)
def test_what_is_not_here_says_where_to_go(tool: str, changes: dict[str, Any], why: str) -> None:
    assert why in " | ".join(read(tool, changes).findings())


def test_columns_of_data_sets_are_the_tool_s() -> None:
    of_lf = [native("lf", {"dataset": name})["data.train"][0] for name in ("pairs", "turns")]
    assert of_lf[0]["fields"] == {"instruction": "q", "chosen": "good", "rejected": "bad"}
    assert of_lf[1]["format"] == "preference" and "fields" not in of_lf[1]
    [shown] = native("lf", {"dataset": "shown"})["data.train"]
    assert shown["fields"] == {**of_lf[0]["fields"], "images": "pictures"}
    judged = native("lf", {"stage": "kto", "dataset": "judged"})["data.train"][0]
    assert judged["format"] == "label" and judged["fields"]["conversations"] == "messages"
    entry = {"path": "org/p", "type": "chat_template.default", "field_messages": "conversation", "field_chosen": "good"}
    [source] = native("axolotl", {"datasets": [entry]})["data.train"]
    assert source["fields"] == {"messages": "conversation", "chosen": "good"}
    [source] = native("axolotl", {"datasets": [{"path": "org/p", "type": "chatml.icr"}]})["data.train"]
    assert source["fields"] == {"prompt": "input"}


def test_trl_joins_texts_as_they_are() -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    assert "message['content']" in native("trl", {"loss_type": "sigmoid"}, row)["model.chat_template"]
    turns = {name: [{"role": "user", "content": "a"}] for name in row}
    assert "model.chat_template" not in native("trl", {"loss_type": "sigmoid"}, turns)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("beta", "preference.beta"),
        ("preference.loss_type", "preference.loss"),
        ("pref_ftx", "preference.sft_weight"),
        ("simpo_gamma", "preference.margin"),
        ("precompute_ref_log_probs", "preference.reference"),
        ("kto_rejected_weight", "preference.undesirable_weight"),
    ],
)
def test_a_native_file_with_keys_of_other_tools_is_told_ours(path: str, key: str) -> None:
    assert hint(path).startswith(f": here it is `{key}`.")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("task", "dpo", "write preference"),
        ("task", "simpo", "write preference, with preference.loss: simpo"),
        ("task", "grpo", "answers that are sampled while it runs"),
        ("method.name", "kto", "write task: kto"),
    ],
)
def test_a_native_file_with_their_name_of_a_method_is_told_ours(key: str, value: str, told: str) -> None:
    assert told in (find_value(key, value) or "")
