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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from manyhands.config.schema import RunConfig
from manyhands.core.world import World
from manyhands.importers.load import config_from_mapping
from manyhands.launch.prepare import Prepared, prepare_run
from manyhands.training.types import Batch, TrainState
from manyhands.worker import export_stages as finish
from manyhands.worker import stages, training
from manyhands.worker.batches import iterate_steps
from manyhands.worker.context import RankContext
from tests.support.tiny import write_tiny_model

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")
NUM_STEPS = 5  # of the base run: 40 rows in batches of 8
PEAK = 3e-3  # its learning rate


@dataclass(frozen=True)
class Ran:
    """A run that has ended."""

    rank: RankContext

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
        prepared = prepare_run(self.config(keys), report=lambda _: None)
        prepared.release()
        return prepared

    def start(self, keys: Mapping[str, Any] = {}) -> RankContext:
        """A rank with data, model and optimizer, before its first step."""
        prepared = self.prepare(keys)
        rank = RankContext(terminal=io.StringIO())
        rank.config, rank.plan, rank.folder = prepared.config, prepared.plan, prepared.folder
        rank.world = World(0, 0, 1, torch.device("cpu"))
        stages.open_data(rank)
        stages.find_checkpoint(rank)
        stages.build_model(rank)
        return rank

    def run(self, keys: Mapping[str, Any] = {}) -> Ran:
        name = json.dumps({key: value for key, value in keys.items() if key != self.ignored}, sort_keys=True)
        if name not in self.done:
            self.done[name] = self.train(self.start(keys))
        return self.done[name]

    def check(self, rank: RankContext) -> None:
        """Self-tests of the loaded model."""
        stages.check_model(rank)

    def train(self, rank: RankContext) -> Ran:
        training.train_model(rank)
        return Ran(rank)

    def export(self, keys: Mapping[str, Any]) -> Ran:
        """The same, and its model or adapter written."""
        ran = self.run(keys)
        finish.export(ran.rank)
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


def first_batch(rank: RankContext) -> Batch:
    fresh = replace(rank, state=TrainState())
    return next(iter(next(iterate_steps(fresh)).micro_batches))


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
