"""``python -m manyhands.infer.evaluate RUN_FOLDER``: the validation loss of what a run has saved, measured again.

A process of its own opens the written files, as whoever uses them does, and reads the run's own validation samples.
One device; the loss is summed over the same loss tokens as in training.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from manyhands.config.schema import RunConfig
from manyhands.core.errors import EXIT_INTERRUPTED, UserError
from manyhands.core.files import read_json
from manyhands.data.batches import collate
from manyhands.data.collate import BatchShape
from manyhands.data.store import SampleSet, TokenStore
from manyhands.infer.load import find_parts, load_model
from manyhands.launch.run_folder import RunFolder
from manyhands.metrics.summary import read_evaluations
from manyhands.model.loss import LossModel
from manyhands.plan.types import Plan
from manyhands.train.types import Evaluation

BATCH_TOKENS = 8192  # of a forward pass, padding included


@dataclass(frozen=True)
class Recorded:
    """What the run itself measured of the weights that it saved."""

    step: int
    loss: float


def evaluate_run(path: Path, base: str | None = None) -> tuple[Evaluation, Recorded | None]:
    """Measures what the run in the folder has written. UserError where there is nothing saved, or no validation
    samples.
    """
    begin, folder = time.monotonic(), RunFolder(path)
    config, plan = folder.read_config(), folder.read_plan()
    samples = _open_samples(config, plan)
    numbers = samples.take_tokens(config.evaluate.max_tokens)
    if len(numbers) == 0:
        raise UserError(
            "the run has no validation samples",
            where=str(path),
            why="data.validation is not set and data.validation_fraction is 0",
            fix="hold some out in the next run",
        )
    model: Any = load_model(find_parts(path, base))
    loss, weight, correct, num_labels = _sum_losses(model, samples, numbers)
    recorded = _find_recorded(folder, config)
    mean = loss / weight
    found = Evaluation(
        step=recorded.step if recorded else plan.num_steps,
        loss=mean,
        perplexity=math.exp(min(mean, 700.0)),
        accuracy=correct / num_labels,
        num_samples=len(numbers),
        num_tokens=int(samples.lengths[numbers].sum()),
        num_loss_tokens=int(num_labels),
        seconds=time.monotonic() - begin,
    )
    return found, recorded


def _open_samples(config: RunConfig, plan: Plan) -> SampleSet:
    """The run's own validation samples, tokenized again if the cache is gone."""
    from manyhands.data.prepare import prepare

    store_folder = Path(plan.data_folder)
    if not store_folder.is_dir():
        store_folder = Path(prepare(config, plan.model_folder, lambda text: print(text, file=sys.stderr)).folder)
    store = TokenStore.open(store_folder)
    if plan.data_content and store.content != plan.data_content:
        raise UserError(
            "the data are not those of the run any more",
            where=str(store_folder),
            why="the tokens differ from those that it was trained and evaluated on",
            fix="put the data files back as they were",
        )
    return store.validation


def _sum_losses(model: Any, samples: SampleSet, numbers: np.ndarray) -> tuple[float, float, float, float]:
    """Loss, its weight, right answers and loss tokens, summed in float64."""
    loss_model = LossModel(model).eval()
    device = next(model.parameters()).device
    totals = torch.zeros(4, dtype=torch.float64)
    with torch.no_grad():
        for chosen in group_by_length(samples.lengths, numbers):
            batch: Mapping[str, Any] = {
                name: value.to(device) if isinstance(value, torch.Tensor) else value
                for name, value in collate(samples, chosen, BatchShape(packed=False)).items()
            }
            terms = loss_model(batch, metrics=True)
            totals += torch.stack([*terms["lm"], *terms["correct"]]).double().cpu()
    loss, weight, correct, num_labels = totals.tolist()
    return loss, weight, correct, num_labels


def group_by_length(lengths: np.ndarray, numbers: np.ndarray, max_tokens: int = BATCH_TOKENS) -> Iterator[np.ndarray]:
    """Samples of like lengths together, each group at most ``max_tokens`` with its padding, or one sample."""
    ordered, start = numbers[np.argsort(-lengths[numbers], kind="stable")], 0
    while start < len(ordered):
        size = max(1, max_tokens // max(1, int(lengths[ordered[start]])))
        yield ordered[start : start + size]
        start += size


def _find_recorded(folder: RunFolder, config: RunConfig) -> Recorded | None:
    """The run's evaluation of the step whose weights it has saved; None where there is none."""
    report = read_json(folder.report_json)
    if not isinstance(report, dict):
        return None
    best = report.get("best") if config.checkpoint.keep_best else None
    step = best["step"] if best else report["measured"]["steps"]
    losses = {evaluation.step: evaluation.loss for evaluation in read_evaluations(folder.metrics)}
    return Recorded(step, losses[step]) if step in losses else None


def describe(path: Path, found: Evaluation, recorded: Recorded | None, quantized: bool) -> str:
    counts = f"{found.num_samples} samples, {found.num_loss_tokens:,} loss tokens, {found.seconds:.1f} s"
    lines = [
        f"{path}: held-out loss {found.loss:.4f}, perplexity {found.perplexity:.2f}, "
        f"token accuracy {found.accuracy:.1%} ({counts})"
    ]
    if recorded is None:
        lines.append("the run recorded no evaluation of these weights")
    else:
        difference = found.loss - recorded.loss
        lines.append(f"recorded by the run after step {recorded.step}: {recorded.loss:.4f} ({difference:+.4f} now)")
    if quantized:
        lines.append("the base is not quantized here, as it was in training")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser("manyhands evaluate", description=__doc__)
    parser.add_argument("folder", type=Path, help="a run's folder")
    parser.add_argument("--base", help="base model of an adapter: a folder or a hub name (default: the run's)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_args(argv)
    try:
        found, recorded = evaluate_run(arguments.folder, arguments.base)
        if arguments.json:
            values = {name: getattr(found, name) for name in ("loss", "perplexity", "accuracy", "num_samples")}
            values |= {"num_loss_tokens": found.num_loss_tokens, "step": recorded.step if recorded else None}
            print(json.dumps(values | {"recorded_loss": recorded.loss if recorded else None}))
        else:
            method = RunFolder(arguments.folder).read_config().method
            print(describe(arguments.folder, found, recorded, method.name == "qlora" and method.init != "loftq"))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
