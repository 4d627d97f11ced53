"""``python -m manyhands.convert.rehearse``: would the workers accept this run? Asked by ``--dry-run``, before a GPU is
held.

Builds the model on meta, applies the plan's converters, and compares names and shapes with the files, by the very
functions that the workers call; reads headers and no weight. A family that no probe has tried yet is probed. Run and
plan come as one JSON object on standard input; the answer is the last line of standard output: ``null``, or the
``UserError`` as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from manyhands import families
from manyhands.config.schema import RunConfig
from manyhands.convert.adapter import check_adapter
from manyhands.convert.build import build_on_meta, make_all
from manyhands.convert.protocol import Context
from manyhands.core.errors import UserError
from manyhands.model.load import match_checkpoint
from manyhands.model.probe import probe
from manyhands.model.structure import find_blocks
from manyhands.optim.muon import split_matrices
from manyhands.optim.registry import OPTIMIZERS
from manyhands.planner.types import Plan
from manyhands.training.optimizer import group_parameters


def rehearse(config: RunConfig, plan: Plan) -> None:
    """Raises the UserError that the workers would raise before they read a weight."""
    context = Context(config, plan, torch.device("cpu"))
    model: Any = build_on_meta(context, make_all(context)).model
    if config.model.init == "pretrained":
        match_checkpoint(model, plan.model_folder, plan.new_tokens)
    if plan.adapter is not None:
        check_adapter(model, plan.adapter.folder)
    groups = group_parameters(model, config.optimizer, plan.learning_rate, plan.rated_parts)
    if OPTIMIZERS[config.optimizer.name].needs_block_matrices:
        split_matrices(groups, list(find_blocks(model)))
    family = families.find(model.config.get_text_config().model_type)
    if config.data.packing is False and not (families.was_measured(family) and family.packs):  # else facts asked
        verdict = probe(model.config, trust_remote_code=config.model.trust_remote_code)
        if not verdict["trains"]:
            raise UserError(
                f"{model.config.model_type} cannot be trained here", where=plan.model_folder, why=verdict["reason"]
            )


def main() -> None:
    from transformers import logging

    logging.set_verbosity_error()
    asked = json.load(sys.stdin)
    answer = "null"
    try:
        rehearse(RunConfig.model_validate(asked["config"]), Plan.model_validate(asked["plan"]))
    except UserError as error:
        answer = error.to_json()
    print(f"\n{answer}")


if __name__ == "__main__":
    main()
