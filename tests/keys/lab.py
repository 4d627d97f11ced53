"""Whole runs of a tiny model in this process, through the worker's own stages: what a key changes is seen where a user
would.
"""

from __future__ import annotations

import io
import json
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from manyhands.config.schema import RunConfig
from manyhands.core.world import World
from manyhands.importers.load import config_from_mapping
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.run.prepare import Prepared, prepare_run
from manyhands.planner.types import Plan
from manyhands.training.step import StepWork
from manyhands.training.types import Batch, Hook, TrainState
from manyhands.worker import export_stages as finish
from manyhands.worker import stages, training
from manyhands.worker.batches import iterate_steps
from manyhands.worker.rank import BuiltModel, Data, Process, Rank
from manyhands.worker.reference import attach_reference
from tests.support.tiny import write_tiny_model
from tests.support.zygote import forking

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")
NUM_STEPS = 5  # of the base run: 40 rows in batches of 8
PEAK = 3e-3  # its learning rate


@dataclass
class LabRank:
    """A rank with what its stages have made so far."""

    config: RunConfig
    plan: Plan
    folder: RunFolder
    data: Data | None = None
    built: BuiltModel | None = None
    checkpoint: Path | None = None
    state: TrainState = field(default_factory=TrainState)
    measured: dict[str, Any] = field(default_factory=dict)
    terminal: io.StringIO = field(default_factory=io.StringIO)
    world: World = field(default_factory=lambda: World(0, 0, 1, torch.device("cpu")))

    @property
    def rank(self) -> Rank:
        return Rank(self.config, self.plan, self.folder, self.world, Process(terminal=self.terminal))

    def build(self) -> None:
        self.built = stages.build_model(self.rank, resumes=self.checkpoint is not None)
        self.measured |= self.built.measured

    def restart(self) -> None:
        """From the newest checkpoint."""
        self.checkpoint = stages.find_checkpoint(self.rank)
        self.build()
        self.resume()

    def resume(self) -> None:
        self.state = stages.resume(self.rank, self.engine, self.checkpoint)

    def steps(self) -> Iterator[StepWork]:
        return iterate_steps(self.rank, self.data, self.loss_model)

    store = property(lambda self: self.data.store)
    order = property(lambda self: self.data.order)
    tokenizer = property(lambda self: self.data.tokenizer)
    loss_model = property(lambda self: self.built.loss_model)
    engine = property(lambda self: self.built.engine)
    model = property(lambda self: self.built.model)


@dataclass(frozen=True)
class Ran:
    """A run that has ended."""

    rank: LabRank

    @property
    def folder(self) -> Path:
        return self.rank.folder.path

    def rows(self, kind: str = "step") -> list[dict[str, Any]]:
        return [
            row
            for row in map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines())
            if row["kind"] == kind
        ]

    def column(self, name: str, kind: str = "step") -> list[Any]:
        return [row[name] for row in self.rows(kind)]

    @property
    def losses(self) -> list[float]:
        return self.column("loss")

    @property
    def rates(self) -> list[float]:
        """Learning rates as shares of the peak."""
        return [rate / PEAK for rate in self.column("learning_rate")]

    def checkpoints(self) -> list[int]:
        return sorted(int(path.name.removeprefix("step-")) for path in self.rank.folder.checkpoints.iterdir())

    def adapter(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "adapter" / "adapter_model.safetensors")

    def batch(self) -> Batch:
        """The first micro-batch of the run."""
        return first_batch(self.rank)

    def prompt_of(self, index: int) -> str:
        return self.rank.tokenizer.decode(self.rank.store.train.sample(index)["tokens"].tolist())


@dataclass
class Lab:
    """``run({"batch.samples": 4})`` is the base run with one key changed; equal runs are done once.

    ``ignored`` is a key that is left at its value of the base run whatever is asked.
    """

    folder: Path
    num_runs: int = 0
    num_paths: int = 0
    done: dict[str, Ran] = field(default_factory=dict)
    ignored: str = ""

    def config(self, keys: Mapping[str, Any] = {}) -> RunConfig:
        self.num_runs += 1
        values = {
            "name": "r",
            "model.name": str(self.folder / "model"),
            "data.train": str(self.folder / "rows.jsonl"),
            "data.cache": str(self.folder / "cache"),
            "data.max_length": 256,
            "data.validation_fraction": 1 / 3,
            "method.rank": 4,
            "method.alpha": 8.0,
            "batch.samples": 8,
            "optimizer.learning_rate": PEAK,
            "parallel.device": "cpu",
            "evaluate.every_steps": 0,
            "evaluate.prompts": 0,
            "checkpoint.every_steps": 0,
            "log.tensorboard": False,
            "output.dir": str(self.folder / f"runs-{self.num_runs}"),
            **{key: value for key, value in keys.items() if key != self.ignored},
        }
        if values.get("method.name") in ("full", "patterns"):
            del values["method.rank"], values["method.alpha"]
        mapping: dict[str, Any] = {}
        for key, value in values.items():
            section, _, leaf = key.rpartition(".")
            (mapping.setdefault(section, {}) if section else mapping)[leaf] = value
        return config_from_mapping(mapping)

    def prepare(self, keys: Mapping[str, Any] = {}) -> Prepared:
        """Facts and plan, as before a launch."""
        with forking():  # a family that was not measured to pack is tried in a process, and so are converters
            prepared = prepare_run(self.config(keys), report=lambda _: None)
        prepared.release()
        return prepared

    def start(self, keys: Mapping[str, Any] = {}) -> LabRank:
        """A rank with data, model and optimizer, before its first step."""
        prepared = self.prepare(keys)
        rank = LabRank(prepared.config, prepared.plan, prepared.folder)
        rank.data = stages.open_data(rank.rank)
        rank.checkpoint = stages.find_checkpoint(rank.rank)
        rank.build()
        rank.data = attach_reference(rank.rank, rank.data, rank.built)
        return rank

    def run(self, keys: Mapping[str, Any] = {}) -> Ran:
        name = json.dumps({key: value for key, value in keys.items() if key != self.ignored}, sort_keys=True)
        if name not in self.done:
            self.done[name] = self.train(self.start(keys))
        return self.done[name]

    def check(self, rank: LabRank) -> None:
        """Self-tests of the loaded model."""
        rank.measured |= stages.check_model(rank.rank, rank.data, rank.built)

    def train(self, rank: LabRank, *hooks: Hook) -> Ran:
        with forking():  # data workers
            rank.state = training.train_model(rank.rank, rank.data, rank.built, rank.state, hooks, rank.measured)
        return Ran(rank)

    def export(self, keys: Mapping[str, Any]) -> Ran:
        """The same, and its model or adapter written."""
        ran = self.run(keys)
        finish.export(ran.rank.rank, ran.rank.data, ran.rank.built, ran.rank.state)
        return ran

    def write_rows(self, name: str, rows: list[dict[str, Any]]) -> str:
        path = self.folder / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    def new_path(self, name: str) -> Path:
        """Where nothing is yet."""
        self.num_paths += 1
        return self.folder / f"{name}-{self.num_paths}"

    def copy_model(self) -> Path:
        return Path(shutil.copytree(self.folder / "model", self.new_path("model")))

    @property
    def base(self) -> Ran:
        return self.run()


def first_batch(rank: LabRank) -> Batch:
    return next(iter(next(rank.steps()).micro_batches))


def make_rows(num_samples: int, seed: int = 0) -> list[dict[str, str]]:
    draw = random.Random(seed)
    return [
        {
            "prompt": " ".join(draw.choices(WORDS, k=draw.randint(1, 3))),
            "completion": " ".join(draw.choices(WORDS, k=draw.randint(1, 5))),
        }
        for _ in range(num_samples)
    ]


@contextmanager
def open_lab(folder: Path) -> Iterator[Lab]:
    """A model of one block, 60 rows of which 20 are held out, and a process group of one."""
    write_tiny_model(folder / "model", num_hidden_layers=1)
    lab = Lab(folder)
    lab.write_rows("rows.jsonl", make_rows(60))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield lab
    finally:
        dist.destroy_process_group()
