"""What scripts import from Unsloth and TRL beside model and trainer, and our stand-ins. Imports no torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyhands.api.arguments import TrainingArguments
from manyhands.api.sources import list_rows
from manyhands.api.trainer import FastLanguageModel, FastModel, FastVisionModel, Trainer
from manyhands.config.text import names
from manyhands.core.errors import UserError
from manyhands.importers.preferences import NOT_HERE, REWARD

# Ours of the same format, by Unsloth's names without `-`, `_` and `.`.
TEMPLATES = {
    **dict.fromkeys(names("llama3 llama31 llama32 llama33"), "llama3.1"),
    **dict.fromkeys(names("gemma gemma2 gemma3 gemma3n"), "gemma"),
    **{name: name for name in names("chatml mistral zephyr vicuna phi4")},
    "llama3": "llama3",
    "phi3": "phi3",
    "phi35": "phi3.5",
    "qwen25": "qwen2.5",
}
ROLES = {"human": "user", "user": "user", "input": "user", "gpt": "assistant", "assistant": "assistant",
         "output": "assistant", "system": "system", "tool": "tool", "observation": "tool"}  # fmt: skip
CONVERSATIONS = ("messages", "conversations")


def get_chat_template(tokenizer: Any, chat_template: str = "chatml", **options: Any) -> Any:
    """Gives the tokenizer this chat template, which the run then uses. UserError where it lacks its tokens."""
    from manyhands.data.tokenize.tokenizer import load_tokenizer

    key = chat_template.lower().translate({ord(mark): None for mark in "-_."})
    text = getattr(tokenizer, "tokenizer", tokenizer)
    asked = [name for name, value in options.items() if value and name != "map_eos_token"]
    if key not in TEMPLATES or asked or text is not tokenizer:
        raise UserError(
            f"{asked[0]} has no effect" if asked else f"the chat template {chat_template!r} is not set by name here",
            where="get_chat_template",
            fix="leave the call out: a model's own template is used, and rows with from and value are read as they "
            "are; tokenizer.chat_template = TEXT sets another template",
        )
    tokenizer.chat_template = load_tokenizer(Path(tokenizer.name_or_path), TEMPLATES[key]).chat_template
    return tokenizer


def standardize_sharegpt(dataset: Any, **_: Any) -> Any:
    """Conversations of from and value as role and content. A run reads both."""

    def standard(row: Mapping[str, Any]) -> dict[str, Any]:
        column = next((name for name in CONVERSATIONS if row.get(name)), None)
        if column is None or not all("from" in turn for turn in row[column]):
            return dict(row)
        turns = [{"role": ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in row[column]]
        return {**row, column: turns}

    return dataset.map(standard) if hasattr(dataset, "map") else [standard(row) for row in dataset]


def train_on_responses_only(trainer: Trainer, instruction_part: Any = None, response_part: Any = None) -> Trainer:
    """The trainer with a loss on answers alone, by the chat template's own turns. It then trains the conversations of
    its rows, not a text that was made of them. UserError for rows of text.
    """
    data = trainer.train_dataset
    if not isinstance(data, str):
        columns = set(next(iter(list_rows(data, "train_dataset")), {}))
        found = next((name for name in (*CONVERSATIONS, "prompt") if name in columns), None)
        if found is None:
            raise UserError(
                "rows of text have no answers that could be trained alone",
                where="train_on_responses_only",
                why=f"the columns are {', '.join(sorted(columns))}",
                fix="give rows with messages (role, content), which the tokenizer's chat template renders",
            )
        if "text" in columns:
            trainer.train_dataset = [
                {name: value for name, value in row.items() if name != "text"}
                for row in list_rows(data, "train_dataset")
            ]
    trainer.formatting_func = None
    trainer.overrides["data.train_on"] = "assistant"
    return trainer


class UnslothVisionDataCollator:
    """Nothing: images and text are collated by the run."""

    def __init__(self, model: Any = None, processor: Any = None, **options: Any) -> None:
        if asked := [name for name, value in options.items() if value]:
            raise UserError(
                f"{asked[0]} has no effect",
                where="UnslothVisionDataCollator",
                fix="give assistant_only_loss=True to SFTConfig, or max_length; keys of a run file to overrides",
            )


def is_bfloat16_supported() -> bool:
    """Whether this machine's GPUs compute in bfloat16; a CPU does."""
    import torch

    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported()


# By the package that a script imports, also from its modules.
STANDS_FOR: Mapping[str, Mapping[str, Any]] = {
    "unsloth": {
        "FastLanguageModel": FastLanguageModel,
        "FastModel": FastModel,
        "FastVisionModel": FastVisionModel,
        "UnslothTrainer": Trainer,
        "UnslothTrainingArguments": TrainingArguments,
        "UnslothVisionDataCollator": UnslothVisionDataCollator,
        "get_chat_template": get_chat_template,
        "is_bf16_supported": is_bfloat16_supported,
        "is_bfloat16_supported": is_bfloat16_supported,
        "standardize_data_formats": standardize_sharegpt,
        "standardize_sharegpt": standardize_sharegpt,
        "train_on_responses_only": train_on_responses_only,
    },
    "trl": {"SFTConfig": TrainingArguments, "SFTTrainer": Trainer},
}
SCRIPTS = names("ModelConfig ScriptArguments TrlParser get_peft_config get_quantization_config get_kbit_device_map")
PREFERENCES = names("DPO ORPO CPO KTO GRPO PPO RLOO Reward GKD OnlineDPO Online")


def find_name(package: str, name: str) -> Any:
    """Ours for ``name`` of the package. UserError with the way where there is none."""
    if name in STANDS_FOR[package]:
        return STANDS_FOR[package][name]
    if name.startswith("_"):
        raise AttributeError(name)
    way = f"the names that are there are {', '.join(sorted(STANDS_FOR[package]))}"
    if name.endswith(("Trainer", "Config")) and name.removesuffix("Trainer").removesuffix("Config") in PREFERENCES:
        way = REWARD if name.startswith("Reward") else NOT_HERE
    elif name in SCRIPTS:
        way = "`manyhands train FILE` reads the configuration file of `trl sft`"
    raise UserError(f"manyhands has nothing for {package}.{name}", where=f"from {package} import {name}", fix=way)
