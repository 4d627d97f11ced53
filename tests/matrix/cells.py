"""A cell of the matrix: one method under one strategy, planned and run as a user's run is, and what it leaves on
disk.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file

from manyhands.export.reference import Reference
from manyhands.export.verify import Verification, verify
from manyhands.launch.run.prepare import prepare_run
from manyhands.planner import choices
from tests.e2e.runs import Run
from tests.matrix.cell_ranks import Fault, Seen, StandIn
from tests.support.equality import BOUNDS, NORM_BOUNDS, Case, Curve, base_config, compare, write_workspace
from tests.support.ranks import Ranks

# Rows of codes of 16384 values: 1 in attention, fewer than ranks, and 3 in the MLP, of which the last is not full.
WIDTHS = {"hidden_size": 96, "intermediate_size": 350, "num_hidden_layers": 2}
# Optimizers that ranks do not run as they are: see ``cell_ranks``.
STAND_INS: dict[str, StandIn] = {"adamw_8bit": "kernels", "paged_adamw": "kernels"}
NUM_STEPS, SAVED_STEP = 8, 4
KEYS: dict[str, Any] = {
    "data.max_samples": 51,  # six steps of 8 rows and one of 3
    "data.max_length": 208,
    "data.validation_fraction": 0.25,
    "optimizer.max_grad_norm": 4.0,  # some steps are clipped and some are not
    # With the usual 1e-8 AdamW takes whole steps where a gradient is rounding alone, and then weights tell one
    # processor's rounding # from another's: 1.3e-5 of a LoRA cell's, whose losses agree within 8e-8.
    "optimizer.eps": 1e-5,
    "stop.max_steps": NUM_STEPS,
    "evaluate.at_start": True,
    "evaluate.every_steps": SAVED_STEP,
    "evaluate.prompts": 1,
    "evaluate.max_new_tokens": 4,
    "checkpoint.every_steps": SAVED_STEP,
    "log.tensorboard": False,
}


def unpacked(strategy: str, ranks: int, micro_samples: int, **more: Any) -> Case:
    """Steps of 8 rows, one to a line of a padded micro-batch."""
    rows = {
        "data.packing": False,
        "batch.micro_samples": micro_samples,
        "batch.accumulation": 8 // (micro_samples * ranks),
    }
    return Case(strategy, ranks, {"parallel.strategy": strategy, **rows, **more})


CASES = {
    "single": unpacked("single", 1, 2),
    "ddp": unpacked("ddp", 2, 2),
    "fsdp": Case("fsdp", 2, {"parallel.strategy": "fsdp", "data.packing": True, "batch.micro_tokens": 208}),
    "hsdp": unpacked("hsdp", 4, 1, **{"parallel.shard_degree": 2}),
}


@dataclass(frozen=True)
class Ended:
    """What a run has left, and what its ranks saw."""

    folder: Path
    method: str
    ranks: list[Seen]

    @property
    def run(self) -> Run:
        return Run(self.folder)

    @property
    def output(self) -> Path:
        return self.folder / ("adapter" if self.method in ("lora", "qlora") else "model")

    @property
    def weights_file(self) -> Path:
        return self.output / ("adapter_model.safetensors" if self.method in ("lora", "qlora") else "model.safetensors")

    def curve(self) -> Curve:
        course = self.run.course()
        idle = sum(None in row["rank_losses"] for row in self.run.rows())
        return Curve(tuple(loss for _, loss, _ in course), tuple(norm for *_, norm in course), idle)

    def evaluations(self) -> Curve:
        losses = tuple(loss for _, loss in self.run.evaluations())
        return Curve(losses, losses, 0)


@dataclass
class Workshop:
    """Where cells are run: a model, rows, the ranks, and each run's folder. A run that was made once is not made
    again.
    """

    root: Path
    world: Ranks
    made: dict[tuple[str, ...], Ended] = field(default_factory=dict)

    def __post_init__(self) -> None:
        write_workspace(self.root, **WIDTHS)

    def cell(self, method: str, strategy: str, dtype: str = "float32", optimizer: str = "adamw") -> Ended:
        """An uninterrupted run."""
        key = (method, strategy, dtype, optimizer)
        if key not in self.made:
            self.made[key] = self.run("-".join(key), method, strategy, dtype, optimizer)
        return self.made[key]

    def resumed(self, method: str, strategy: str, dtype: str = "float32", optimizer: str = "adamw") -> Ended:
        """The same run, lost after its checkpoint in the middle and started again."""
        key, folder = (
            "-".join((method, strategy, dtype, optimizer)),
            self.cell(method, strategy, dtype, optimizer).folder,
        )
        copy = self.root / "runs" / f"{key}-resumed" / folder.name
        shutil.copytree(folder, copy)
        lose(copy, SAVED_STEP)
        return self.run(f"{key}-resumed", method, strategy, dtype, optimizer)

    def run(
        self,
        name: str,
        method: str,
        strategy: str,
        dtype: str = "float32",
        optimizer: str = "adamw",
        fault: Fault = "",
        **more: Any,
    ) -> Ended:
        case = CASES[strategy]
        keys = {**KEYS, **case.keys, **more, "output.dir": str(self.root / "runs" / name)}
        config = base_config(self.root, dtype, method, Case(name, case.world_size, keys), "cpu")
        # Not by a key, and planned without its check: those of bitsandbytes are refused on a CPU, where the tests stand
        # in for its kernels.
        rate = {"learning_rate": 4e-3} if optimizer == "muon" else {}  # adapters would hardly learn in so few steps
        section = config.optimizer.model_copy(update={"name": optimizer, **rate})
        stand_in = STAND_INS.get(optimizer, "")
        with mock.patch.object(choices, "check_optimizer") if stand_in == "kernels" else contextlib.nullcontext():
            prepared = prepare_run(config.model_copy(update={"optimizer": section}), report=lambda _: None)
        prepared.release()
        arguments = (prepared.folder.path, fault, stand_in)
        ranks = self.world.run("tests.matrix.cell_ranks:run_stages", *arguments, world_size=case.world_size)
        return Ended(prepared.folder.path, method, ranks)

    def reopen(self, ended: Ended) -> Verification:
        """The product's verification in this process, which has never held the trained model."""
        base = self.root / "model" if ended.output.name == "adapter" else None
        reference = Reference.read(ended.folder / "verify" / f"{ended.output.name}.json")
        return verify(ended.output, reference, base=base, probe_path=ended.folder / "verify" / "probe.safetensors")

    def source(self) -> dict[str, torch.Tensor]:
        return load_file(self.root / "model" / "model.safetensors")


def lose(folder: Path, step: int) -> None:
    """Nothing is left of a run but what it had when ``step`` had been saved."""
    for path in folder.glob("checkpoints/step-*"):
        if path.name > f"step-{step:06d}":
            shutil.rmtree(path)
    for later in ("model", "adapter", "verify"):
        shutil.rmtree(folder / later, ignore_errors=True)
    for later in ("status.json", "report.json"):
        (folder / later).unlink()


def deviations(reference: Ended, found: Ended, is_trained: Callable[[str], bool]) -> dict[str, float]:
    """Largest relative deviations of losses, gradient norms and evaluations, and that of all trained weights in the
    2-norm.
    """
    curve, evaluations = (
        compare(reference.curve(), found.curve()),
        compare(reference.evaluations(), found.evaluations()),
    )
    expected, actual = load_file(reference.weights_file), load_file(found.weights_file)
    assert expected.keys() == actual.keys()
    trained = [name for name in expected if is_trained(name)]
    weights = length(actual[name].double() - expected[name].double() for name in trained) / length(
        expected[name] for name in trained
    )
    return {"loss": curve.loss, "norm": curve.norm, "evaluation": evaluations.loss, "weights": weights}


def length(tensors: Iterable[torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def beyond(found: Mapping[str, float], dtype: str) -> dict[str, float]:
    """Those of ``deviations`` that pass the bounds of docs/equality.md; weights, which follow gradients, have that of
    their norm.
    """
    bounds = {
        "loss": BOUNDS[dtype],
        "evaluation": BOUNDS[dtype],
        "norm": NORM_BOUNDS[dtype],
        "weights": NORM_BOUNDS[dtype],
    }
    return {name: value for name, value in found.items() if not value <= bounds[name]}
