"""manyhands from Python: plan, train, load, and the trainer of other tools' guides. Imports no torch until a model is
loaded, or a launcher has made this process a rank.
"""

from __future__ import annotations

from manyhands.api.arguments import TrainingArguments
from manyhands.api.distributed import (
    distributed_info,
    get_local_rank,
    get_rank,
    get_world_size,
    is_distributed_available,
    print_distributed_info,
)
from manyhands.api.model import LanguageModel, load
from manyhands.api.runs import TrainedRun, plan, train
from manyhands.api.trainer import FastLanguageModel, Trainer
from manyhands.core.errors import UserError

__all__ = [
    "FastLanguageModel",
    "LanguageModel",
    "TrainedRun",
    "Trainer",
    "TrainingArguments",
    "UserError",
    "distributed_info",
    "get_local_rank",
    "get_rank",
    "get_world_size",
    "is_distributed_available",
    "load",
    "plan",
    "print_distributed_info",
    "train",
]
