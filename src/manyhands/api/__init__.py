"""manyhands from Python: plan, train, load, and a trainer as in other tools' guides. Imports no torch by itself."""

from manyhands.api.arguments import TrainingArguments
from manyhands.api.distributed import (
    distributed_info,
    get_local_rank,
    get_rank,
    get_world_size,
    is_distributed_available,
    print_distributed_info,
)
from manyhands.api.foreign import (
    UnslothVisionDataCollator,
    get_chat_template,
    is_bfloat16_supported,
    standardize_sharegpt,
    train_on_responses_only,
)
from manyhands.api.model import LanguageModel, load
from manyhands.api.results import TrainerState, TrainOutput
from manyhands.api.runs import plan
from manyhands.api.trained import TrainedRun, train
from manyhands.api.trainer import FastLanguageModel, FastModel, FastVisionModel, Trainer
from manyhands.core.errors import UserError

SFTTrainer, SFTConfig = Trainer, TrainingArguments  # TRL's names

__all__ = [
    "FastLanguageModel",
    "FastModel",
    "FastVisionModel",
    "LanguageModel",
    "SFTConfig",
    "SFTTrainer",
    "TrainOutput",
    "TrainedRun",
    "Trainer",
    "TrainerState",
    "TrainingArguments",
    "UnslothVisionDataCollator",
    "UserError",
    "distributed_info",
    "get_chat_template",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "is_bfloat16_supported",
    "is_distributed_available",
    "load",
    "plan",
    "print_distributed_info",
    "standardize_sharegpt",
    "train",
    "train_on_responses_only",
]
