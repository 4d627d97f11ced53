"""The same run in many layouts: per-step loss and gradient norm against one process, and two planted faults that must
show.

Every case goes through the product's own path: config, prepared data, plan, model on shards, loop. Only the processes
are the test world's. ``python -m tests.support.equality`` measures the rows of docs/equality.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from manyhands.config.schema import RunConfig
from manyhands.core.world import World
from manyhands.data.batch.collate import DOCUMENT_LENGTHS
from manyhands.importers.load import config_from_mapping
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.run.prepare import gather_facts
from manyhands.planner.search import plan as make_plan
from manyhands.planner.types import Plan
from manyhands.training.loop import Loop, train
from manyhands.training.schedule import make_schedule
from manyhands.training.step import StepWork
from manyhands.training.types import Batch, Hook, StepResult, Terms, TrainState
from manyhands.worker import stages
from manyhands.worker.batches import iterate_steps
from manyhands.worker.rank import Process, Rank
from tests.support import equality_page
from tests.support.equality_page import BOUNDS, NORM_BOUNDS
from tests.support.ranks import Ranks, ranks
from tests.support.tiny import write_tiny_model
from tests.support.vision import write_tiny_vision
from tests.support.zygote import forking

NUM_STEPS = 20
NUM_SAMPLES = 75  # nine steps of 8 rows and one of 3 an epoch: in the short step one rank of four has no row
BATCH_SAMPLES = 8
Fault = Literal["", "mean of means", "leak", "by ranks", "padding"]


@dataclass(frozen=True)
class Case:
    """One way to carry out the run. ``keys`` are overrides of the base config."""

    name: str
    world_size: int = 1
    keys: dict[str, Any] = field(default_factory=dict)
    fault: Fault = ""


@dataclass(frozen=True)
class Curve:
    """What one case computed, step by step, and how often each thing of interest happened."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    num_steps_with_idle_rank: int
    figures: tuple[dict[str, float], ...] = ()


def cases(device: str = "cpu") -> list[Case]:
    """The table's layouts, the first as reference. Unpacked: micro x ranks x accumulation = 8 rows."""

    def unpacked(strategy: str, world: int, accumulation: int, **more: Any) -> Case:
        keys = {"parallel.strategy": strategy, "data.packing": False, "batch.accumulation": accumulation}
        keys["batch.micro_samples"] = BATCH_SAMPLES // (world * accumulation)
        name = f"{strategy} {world}, accumulation {accumulation}" + "".join(
            f", {k.split('.')[1]} {v}" for k, v in more.items()
        )
        return Case(name, world, keys | more)

    def packed(strategy: str, world: int, micro_tokens: int, **more: Any) -> Case:
        keys = {"parallel.strategy": strategy, "data.packing": True, "batch.micro_tokens": micro_tokens}
        name = f"{strategy} {world}, packed {micro_tokens}" + "".join(
            f", {k.split('.')[1]} {v}" for k, v in more.items()
        )
        return Case(name, world, keys | more)

    table = [unpacked("single", 1, accumulation) for accumulation in (1, 2, 4, 8)]
    table += [
        packed("single", 1, 2048),
        packed("single", 1, 256),
        unpacked("single", 1, 2, **{"parallel.activation_checkpointing": "full"}),
    ]
    worlds = (2, 4) if device == "cpu" else (2,)
    for world in worlds:
        for strategy in ("ddp", "fsdp"):
            table += [unpacked(strategy, world, a) for a in (1, 2, 4, 8) if BATCH_SAMPLES % (world * a) == 0]
            table += [packed(strategy, world, 256), packed(strategy, world, 2048)]
        table += [
            packed("fsdp", world, 512, **{"parallel.activation_checkpointing": "full"}),
            packed("fsdp", world, 512, **{"parallel.reshard_after_forward": False}),
        ]
        table += [packed("ddp", world, 512, **{"parallel.activation_checkpointing": "full"})]
    return table + _other_strategies(unpacked, packed)


def _other_strategies(unpacked: Callable[..., Case], packed: Callable[..., Case]) -> list[Case]:
    """Copies in shards, cheap operations repeated, states and activations in host memory."""
    selective, activations = {"parallel.activation_checkpointing": "selective"}, {"parallel.offload_activations": True}
    states, everything = {"parallel.offload": "optimizer"}, {"parallel.offload": "all"}
    table = [packed("single", 1, 512, **keys) for keys in (selective, states, everything, activations)]
    table += [packed("fsdp", 2, 512, **keys) for keys in (selective, states, everything)]
    table += [
        packed("fsdp", 2, 512, **{"parallel.activation_checkpointing": "full"}, **activations),
        packed("ddp", 2, 512, **selective),
    ]
    pairs = {"parallel.shard_degree": 2}
    table += [unpacked("hsdp", 4, accumulation, **pairs) for accumulation in (1, 2)]
    return [*table, packed("hsdp", 4, 256, **pairs), packed("hsdp", 4, 512, **pairs, **everything)]


def cases_of_eight() -> list[Case]:
    """Eight processes, of which five have no row in the short step; the reference first."""
    named = {
        "ddp": {"parallel.strategy": "ddp"},
        "fsdp": {"parallel.strategy": "fsdp"},
        "hsdp 2 x 4": {"parallel.strategy": "hsdp", "parallel.shard_degree": 4},
        "hsdp 4 x 2": {"parallel.strategy": "hsdp", "parallel.shard_degree": 2},
    }
    rows = {"data.packing": False, "batch.micro_samples": 1, "batch.accumulation": 1}
    packs = {"data.packing": True, "batch.micro_tokens": 256, "parallel.activation_checkpointing": "full"}
    table = [Case(f"{name}, 8 processes, a row each", 8, keys | rows) for name, keys in named.items()]
    table += [Case(f"{name}, 8 processes, packed 256, recomputed", 8, keys | packs) for name, keys in named.items()]
    return [cases()[0], *table]


def cases_with_images(device: str = "cpu") -> list[Case]:
    """One process packed and alone, and what two and four ranks make of the same rows; the reference first."""
    alone, recomputed = "accumulation 2", "packed 512, activation_checkpointing full"
    names = {"single 1, accumulation 1", "single 1, accumulation 8", "single 1, packed 256", "single 1, packed 2048"}
    names |= {f"{strategy} {how}" for strategy in ("ddp 2,", "fsdp 2,") for how in (alone, "packed 256", recomputed)}
    names |= {"ddp 4, packed 256", "fsdp 4, packed 256", "hsdp 4, packed 256, shard_degree 2"}
    return [case for case in cases(device) if case.name in names]


def faulty_cases() -> list[Case]:
    """Two mistakes that today's tools make; the comparison must refuse both."""
    packed = {"parallel.strategy": "single", "data.packing": True, "batch.micro_tokens": 256}
    return [
        Case("a mean of means", 1, packed, "mean of means"),
        Case("documents that see each other", 1, packed, "leak"),
    ]


def write_workspace(folder: Path, family: str = "llama", **changes: Any) -> None:
    """A tiny model and rows of 5 to 200 tokens, some almost all trained and some with a single trained word.

    ``changes`` override fields of the model's config.
    """
    write_tiny_model(folder / "model", family, "float32", **changes)
    (
        folder / "model" / "chat_template.jinja"
    ).unlink()  # prompts and completions as they stand: rows as short as 5 tokens
    choose = random.Random(7)
    words = ["a", "the", "cat", "dog", "sat", "ran", "on", "mat", "sun", "sky"]
    with (folder / "rows.jsonl").open("w") as file:
        for row in range(NUM_SAMPLES):
            size = choose.choice((1, 2, 5, 12, 25, 47))
            trained = choose.choice((1, max(1, size // 2), size))
            text = [choose.choices(words, weights=range(len(words), 0, -1))[0] for _ in range(size + 1)]
            prompt, completion = " ".join(text[: size + 1 - trained]), " ".join(text[size + 1 - trained :])
            file.write(json.dumps({"prompt": prompt or "a", "completion": completion, "row": row}) + "\n")


def write_workspace_with_images(folder: Path, family: str) -> None:
    """A tiny model of ``family``, all parts of which train, and conversations about none to two drawn images."""
    from PIL import Image

    config = write_tiny_vision(folder / "model", family) / "config.json"
    config.write_text(config.read_text().replace('"sliding_window": 8', '"sliding_window": 64'))  # answers see images
    choose, draw = random.Random(7), np.random.default_rng(7)
    with (folder / "rows.jsonl").open("w") as file:
        for row in range(NUM_SAMPLES):
            question: list[dict[str, str]] = [{"type": "text", "text": "what is this? "[: choose.choice((4, 14))]}]
            for number in range(choose.choice((0, 0, 1, 1, 2))):
                path, (wide, high) = folder / f"{row}-{number}.png", choose.choice(((80, 60), (30, 30), (28, 84)))
                Image.fromarray(draw.integers(0, 256, (high, wide, 3), dtype=np.uint8)).save(path)
                question.append({"type": "image", "image": path.name})
            answer = "it is a cat on the mat, and no dog is near it"[: choose.choice((1, 9, 45))]
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")


def base_config(folder: Path, dtype: str, method: str, case: Case, device: str) -> RunConfig:
    """lr 1e-3 and 20 steps; the norm is clipped at a value that some steps pass and some do not."""
    mapping: dict[str, Any] = {
        "name": "equality",
        "seed": 3,
        "model": {"name": str(folder / "model"), "dtype": dtype},
        "method": {"name": method, **OF_METHOD[method]},
        "data": {
            "train": str(folder / "rows.jsonl"),
            "validation_fraction": 0.0,
            "max_length": 256,
            "cache": str(folder / "cache"),
        },
        "batch": {"samples": BATCH_SAMPLES},
        "optimizer": {"learning_rate": 1e-3, "max_grad_norm": CLIP},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "stop": {
            "epochs": 100,
            "max_steps": NUM_STEPS,
            "divergence": "warn",
        },  # planted faults are to be seen by the comparison
        "parallel": {"gpus": case.world_size, "device": device, "compile": False},
        "evaluate": {"at_start": False, "every_steps": 0},
        "output": {"dir": str(folder / "runs")},
    }
    for key, value in case.keys.items():
        section, _, name = key.partition(".")
        mapping.setdefault(section, {})[name] = value
    return config_from_mapping(mapping, where=case.name)


CLIP = 2.6
OF_METHOD: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"rank": 8, "alpha": 32.0},
    "qlora": {"rank": 8, "alpha": 32.0},
    "patterns": {"train": ["model.layers.1", "*norm", "embed_tokens"], "freeze": ["re:.*layers.1.*[qk]_proj"]},
}


class Recorder(Hook):
    def __init__(self) -> None:
        self.results: list[StepResult] = []

    def after_step(self, state: TrainState, result: StepResult) -> None:
        self.results.append(result)


def run_rank(config_json: str, plan_json: str, fault: Fault) -> Curve:
    """One rank of one case; the process group exists already."""
    import torch.distributed as dist

    rank_index, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    config, plan = RunConfig.model_validate_json(config_json), Plan.model_validate_json(plan_json)
    device = torch.device("cuda", rank_index) if plan.layout.device == "cuda" else torch.device("cpu")
    world = World(rank_index, rank_index, world_size, device)
    rank = Rank(config, plan, RunFolder(Path()), world, Process(is_first=world.is_first))  # nothing is saved
    data, built = stages.open_data(rank), stages.build_model(rank)
    stages.check_model(rank, data, built)
    engine, works = built.engine, iterate_steps(rank, data, built.loss_model)
    if fault:
        faulty = Faulty(engine, fault)
        engine, works = faulty, faulty.watch(works)  # type: ignore[assignment]
    recorder = Recorder()
    built.loss_model.train()
    train(
        Loop(
            engine=engine,
            schedule=make_schedule("constant", peak=plan.learning_rate, num_steps=plan.num_steps, warmup_steps=0),
            works=works,
            state=TrainState(),
            stop=config.stop,
            num_steps=plan.num_steps,
            max_grad_norm=config.optimizer.max_grad_norm,
            seed=config.seed,
            rank=rank_index,
            device=device,
            terms=built.loss_model.terms,
            figures=built.loss_model.figures,
            hooks=[recorder],
        )
    )
    idle = sum(any(math.isnan(loss) for loss in r.rank_losses) for r in recorder.results)
    losses, norms = tuple(r.loss for r in recorder.results), tuple(r.grad_norm for r in recorder.results)
    return Curve(losses, norms, idle, tuple(dict(r.figures) for r in recorder.results))


class Faulty:
    """An engine with a planted mistake; everything else is passed on."""

    def __init__(self, inner: Any, fault: Fault) -> None:
        self._inner, self._fault = inner, fault
        self._work: StepWork | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def watch(self, works: Iterator[StepWork]) -> Iterator[StepWork]:
        for self._work in works:
            yield self._work

    def forward(self, batch: Batch, *, metrics: bool = False) -> Terms:
        if self._fault == "leak":  # one document from the first token to the last
            length = batch["input_ids"].shape[1]
            batch = {**batch, "position_ids": torch.arange(length, device=batch["input_ids"].device)[None]}
            return self._inner.forward(batch, metrics=metrics)
        if self._fault == "padding":  # counts in what is divided by tokens
            lengths = torch.full_like(batch["input_ids"], batch["input_ids"].shape[1])
            return self._inner.forward({**batch, DOCUMENT_LENGTHS: lengths}, metrics=metrics)
        terms, work = self._inner.forward(batch, metrics=metrics), self._work
        assert work is not None
        if self._fault == "by ranks":  # all but the first term
            more = {name: (total * self._inner.world.world_size, weight) for name, (total, weight) in terms.items()}
            return {**more, "lm": terms["lm"]}
        # sum(L_k / n_k) / K for K micro-batches, in place of sum(L_k) / sum(n_k); the step divides by sum(n_k)
        return {
            name: (total / weight * (work.weights[name].total / work.num_micro_batches), weight)
            for name, (total, weight) in terms.items()
        }


def run_case(world: Ranks | None, folder: Path, case: Case, dtype: str, method: str) -> Curve:
    config = base_config(folder, dtype, method, case, world.device if world else "cpu")
    with forking():  # a family that was not measured to pack is tried in a process
        facts = gather_facts(config, saves=False, identify=False, report=lambda _: None)
    plan = make_plan(config, facts)
    arguments = (config.model_dump_json(), plan.model_dump_json(), case.fault)
    if world is None:
        return run_rank(*arguments)
    # DeepSpeed keeps the process group that it was given first: it gets fresh processes
    own = ranks(case.world_size, world.device) if plan.layout.zero_stage else contextlib.nullcontext(world)
    with own as chosen:
        curves = chosen.run("tests.support.equality:run_rank", *arguments, world_size=case.world_size)
    if any(c.losses != curves[0].losses for c in curves):
        raise AssertionError(f"{case.name}: ranks report different losses")
    return curves[0]


@dataclass(frozen=True)
class Deviation:
    """Largest relative deviation over all steps."""

    loss: float
    norm: float

    def within(self, dtype: str) -> bool:
        return self.loss <= BOUNDS[dtype] and self.norm <= NORM_BOUNDS[dtype]


def compare(reference: Curve, curve: Curve) -> Deviation:
    def largest(expected: tuple[float, ...], found: tuple[float, ...]) -> float:
        if len(expected) != len(found):
            return math.inf
        return max(abs(e - f) / abs(e) for e, f in zip(expected, found, strict=True))

    return Deviation(largest(reference.losses, curve.losses), largest(reference.norms, curve.norms))


def measure(world: Ranks, folder: Path, dtype: str, method: str, chosen: list[Case]) -> Iterator[dict[str, Any]]:
    """A row of each case but the first, which is the reference."""
    reference = run_case(world, folder, chosen[0], dtype, method)
    for case in chosen[1:]:
        curve = run_case(world, folder, case, dtype, method)
        deviation = compare(reference, curve)
        yield {
            "layout": case.name,
            "loss": float(f"{deviation.loss:.1e}"),
            "norm": float(f"{deviation.norm:.1e}"),
            "idle": curve.num_steps_with_idle_rank,
            "planted": bool(case.fault),
        }


FAMILY = {
    "float32": "llama",
    "bfloat16": "llama",
    "float64": "starcoder2",
}  # RMS norms compute in float32 even in a float64 model
WITH_IMAGES = (
    "gemma3",
    "qwen3_vl",
)  # images of one size that see themselves; patches of any size, three-axis positions
PARTS = {
    "full": {"vision": "trained", "projector": "trained", "language": "full"},
    "lora": {"vision": "frozen", "projector": "trained", "language": "lora"},
}


def with_parts(case: Case, method: str) -> Case:
    """The case with the parts of a model of text and images that ``method`` trains here."""
    return replace(case, keys=case.keys | {"method.parts": PARTS[method]})


PACKED_512 = {"data.packing": True, "batch.micro_tokens": 512}


def zero_cases() -> list[Case]:
    """DeepSpeed's stages beside FSDP2, against the same reference; states, and at stage 3 weights, in host memory."""
    one = {"parallel.strategy": "single", "data.packing": False}
    one |= {"batch.micro_samples": BATCH_SAMPLES, "batch.accumulation": 1}
    table = [Case("single 1, accumulation 1", 1, one)]

    def packed(strategy: str, world: int, **more: str) -> Case:
        name = f"{strategy} {world}, packed 512" + "".join(f", {key} {value}" for key, value in more.items())
        keys = {f"parallel.{key}": value for key, value in more.items()}
        return Case(name, world, PACKED_512 | {"parallel.strategy": strategy} | keys)

    for strategy in ("fsdp", "zero1", "zero2", "zero3"):
        rows = {"data.packing": False, "batch.micro_samples": 2, "batch.accumulation": 2}
        table.append(Case(f"{strategy} 2, accumulation 2", 2, {"parallel.strategy": strategy} | rows))
        table += [packed(strategy, world) for world in (2, 4)]
        if strategy != "fsdp":
            table.append(packed(strategy, 2, offload="optimizer"))
    return [*table, packed("zero3", 2, activation_checkpointing="full"), packed("zero3", 2, offload="all")]


def can_run(case: Case, method: str) -> bool:
    """QLoRA has no stage 3."""
    return (case.keys["parallel.strategy"], method) != ("zero3", "qlora")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--engine", choices=["torch", "deepspeed"], default="torch")
    parser.add_argument("--processes", type=int, choices=[4, 8], default=4, help="of 8 a table of their own")
    parser.add_argument("--methods", nargs="+", choices=list(OF_METHOD), default=list(OF_METHOD))
    parser.add_argument("--images", action="store_true", help="rows with images: full and LoRA, two kinds of images")
    parser.add_argument("--page", action="store_true", help="replaces the rows measured before, and writes the page")
    arguments = parser.parse_args()
    is_eight = arguments.processes == 8
    dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16") if arguments.device == "cpu" else ("bfloat16",)
    listed, faults = cases(arguments.device), faulty_cases()
    place_of, methods = "", arguments.methods
    if arguments.engine == "deepspeed":
        dtypes, listed = tuple(dtype for dtype in dtypes if dtype != "float64"), zero_cases()
        place_of = f", DeepSpeed {version('deepspeed')}"
    if arguments.images:
        dtypes, listed = ("float32",), cases_with_images(arguments.device)
        methods = [method for method in methods if method in PARTS]
        faults, place_of = [case for case in faults if case.fault == "mean of means"], ", rows with images"
    elif is_eight:
        listed = cases_of_eight()
    if arguments.device != "cpu" or arguments.engine == "deepspeed" or is_eight:
        faults = []
    size = arguments.processes if arguments.device == "cpu" else min(arguments.processes, torch.cuda.device_count())
    place = f"torch {torch.__version__}, " + (
        f"{size} CPU processes, gloo" if arguments.device == "cpu" else torch.cuda.get_device_name()
    )
    rows = []
    with tempfile.TemporaryDirectory() as temporary, ranks(size, arguments.device) as world:
        for dtype in dtypes:
            for family in WITH_IMAGES if arguments.images else (FAMILY[dtype],):
                folder = Path(temporary, family)
                if not folder.exists():
                    folder.mkdir()
                    (write_workspace_with_images if arguments.images else write_workspace)(folder, family)
                for method in methods:
                    chosen = [case for case in listed if case.world_size <= size and can_run(case, method)] + faults
                    if arguments.images:
                        chosen = [with_parts(case, method) for case in chosen]
                    where = {"place": place + place_of, "family": family, "method": method, "dtype": dtype}
                    for row in measure(world, folder, dtype, method, chosen):
                        rows.append(where | row)
                        print(json.dumps(rows[-1]), flush=True)
    if arguments.page:
        equality_page.replace(rows)


if __name__ == "__main__":
    main()
