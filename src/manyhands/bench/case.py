"""One measured row, on the processes that started this module: config, prepared data, plan, loop; no checkpoint, no
export.

    torchrun --nproc_per_node=2 -m manyhands.bench.case --row 8b-lora --output rows.jsonl
    python -m manyhands.bench.case --row 8b-lora --limit 24          # as if each GPU had 24 GiB

Every step is synchronised; the first ``--warm`` ones (compilation) are left out; the optimizer is included. One more
step, which is not timed, shows which attention kernels run, unless it is planned to take a minute. Prints one JSON
line.
With ``--limit`` the plan is made for GPUs of that memory, and torch's allocator gets no more than what the CUDA context
leaves of it. ``--plan-limit`` makes the plan for another one: what the estimate would refuse can be tried.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from manyhands.bench.rows import BY_NAME, BenchRow, mix_lengths, new_run, say
from manyhands.bench.shapes import write_model_folder, write_pairs, write_rows
from manyhands.bench.summary import dtypes, lease, memory, rates, watch
from manyhands.config.schema import RunConfig
from manyhands.core.world import World
from manyhands.facts.types import Facts
from manyhands.importers.load import config_from_mapping
from manyhands.launch.environment import detect_launcher
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.run.prepare import gather_facts
from manyhands.planner.search import plan as make_plan
from manyhands.planner.types import Plan
from manyhands.training.loop import Loop, train
from manyhands.training.schedule import make_schedule
from manyhands.training.types import Hook, StepResult, TrainState
from manyhands.worker import stages
from manyhands.worker.batches import iterate_steps
from manyhands.worker.rank import BuiltModel, Data, Process, Rank
from manyhands.worker.reference import attach_reference

MAX_TOKENS = 2**21  # of samples of one length: so many take a second to prepare
MAX_PROFILED_S = 60.0  # of a step that is run once more, to see its kernels


def make_config(folder: Path, row: BenchRow, world_size: int, num_steps: int, overrides: list[str]) -> RunConfig:
    """The run of a row. Everything that tunes is left to the plan."""
    mapping: dict[str, Any] = {
        "name": "bench",
        "task": {"images": "sft", "pairs": "preference"}.get(row.data, "cpt"),
        "model": {"name": str(folder / "model"), "init": "random"},
        "method": {"name": row.method} | ({} if row.method == "full" else {"rank": 16, "alpha": 32.0}),
        "data": {
            "train": str(folder / f"{row.data}-{row.length}.jsonl"),
            "validation_fraction": 0.0,
            "max_length": row.length,
            "cache": str(folder / "cache"),
        },
        "batch": {"samples": row.rows * world_size},
        "optimizer": {"learning_rate": 1e-5},
        "schedule": {"name": "constant", "warmup_steps": 0},
        "stop": {"epochs": 1000, "max_steps": num_steps},
        "parallel": {"gpus": world_size},
        "evaluate": {"at_start": False, "every_steps": 0},
        "output": {"dir": str(folder / "runs")},
    }
    for key, value in row.keys.items():
        section, _, name = key.partition(".")
        mapping.setdefault(section, {})[name] = value
    for override in overrides:
        key, _, text = override.partition("=")
        section, _, name = key.partition(".")
        try:
            mapping.setdefault(section, {})[name] = json.loads(text)
        except json.JSONDecodeError:
            mapping.setdefault(section, {})[name] = text
    return config_from_mapping(mapping, where=row.name)


class Timings(Hook):
    """Keeps every step's result."""

    def __init__(self) -> None:
        self.results: list[StepResult] = []

    def after_step(self, state: TrainState, result: StepResult) -> None:
        self.results.append(result)


@dataclass(frozen=True)
class Bench:
    """What a measurement works on."""

    rank: Rank
    data: Data
    built: BuiltModel


class Observer(Hook):
    """What a measurement may add; this one adds nothing."""

    def after_build(self, bench: Bench) -> None:
        """The model is built, and not yet checked."""

    def before_first_step(self, bench: Bench) -> None:
        """The model is built and checked."""

    def summarise(self, bench: Bench, loop: Loop, results: list[StepResult]) -> dict[str, Any]:
        """Fields of the raw row, after the last timed step. Called on every rank; the first one's are kept."""
        return {}


def main() -> None:
    options = parse()
    row = BY_NAME[options.row]
    row = replace(
        row, shape=options.shape or row.shape, length=options.length or row.length, rows=options.rows or row.rows
    )
    run(options, row)


def run(options: argparse.Namespace, row: BenchRow, observe: Observer | None = None) -> None:
    """Measures ``row`` on the calling processes. ``observe`` sees the run at its stages and adds to its result."""
    launcher = detect_launcher()
    config, plan = prepare(options, row, launcher.rank, launcher.world_size)
    os.environ.update(plan.environment)
    cuda = plan.layout.device == "cuda"
    device = torch.device("cuda", launcher.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
        if options.limit:
            limit_allocator(device, options.limit)
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if launcher.world_size == 1 else {}
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", **alone)
    world = World(launcher.rank, launcher.local_rank, launcher.world_size, device)
    process = Process(is_first=world.is_first)
    process.look_again_at = math.inf  # no run folder is there, whose end would end the run
    rank = Rank(config, plan, RunFolder(options.work), world, process)
    start = time.monotonic()
    data = stages.open_data(rank)
    observe = observe or Observer()
    built = stages.build_model(rank)
    epoch = plan.model_copy(update={"num_steps": max(plan.num_steps, plan.steps_per_epoch)})  # for ``more_steps``
    data = attach_reference(replace(rank, plan=epoch), data, built)
    bench = Bench(rank, data, built)
    observe.after_build(bench)
    stages.check_model(rank, data, built)
    built_s = time.monotonic() - start
    observe.before_first_step(bench)
    timings = Timings()
    built.loss_model.train()
    loop = Loop(
        engine=built.engine,
        schedule=make_schedule("constant", peak=plan.learning_rate, num_steps=plan.num_steps, warmup_steps=0),
        works=iterate_steps(rank, data, built.loss_model),
        state=TrainState(),
        stop=config.stop,
        num_steps=plan.num_steps,
        max_grad_norm=config.optimizer.max_grad_norm,
        seed=0,
        terms=built.loss_model.terms,
        figures=built.loss_model.figures,
        rank=launcher.rank,
        device=device,
        hooks=[timings, observe],
    )
    train(loop)
    result = summarise(bench, row, options, timings.results, built_s) if world.is_first else {}
    result |= observe.summarise(bench, loop, timings.results)
    if (plan.step_s or 0.0) < MAX_PROFILED_S:
        with watch(built.model, result) if world.is_first else contextlib.nullcontext():
            more_steps(bench, loop, 1)
    if world.is_first:
        say(result, options.output, "RESULT ")
    if options.profile:
        profile(bench, loop, options.profile)
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=sorted(BY_NAME), required=True)
    parser.add_argument("--shape", help="another shape, such as tiny on a CPU")
    parser.add_argument("--length", type=int, help="tokens a row")
    parser.add_argument("--rows", type=int, help="rows of one GPU in one step")
    return read_options(parser)


def read_options(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None, **defaults: Any
) -> argparse.Namespace:
    """Add the options that ``run`` reads to ``parser``, and parse ``arguments`` (default: the command line)."""
    parser.add_argument("--layers", type=int, help="only so many blocks")
    parser.add_argument(
        "--lengths", type=Path, help="JSON list of the rows' lengths in tokens, such as a real data set's"
    )
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--label", default="manyhands")
    # not --run, which torchrun takes for an abbreviation of its own --run-path
    parser.add_argument("--run-name", dest="run", default=new_run(), help="name of the call that this row belongs to")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "manyhands-bench")
    parser.add_argument("--output", type=Path, help="JSONL file to append the row to")
    parser.add_argument(
        "--limit", type=float, metavar="GIB", help="memory of a GPU: for the plan, and for torch's allocator"
    )
    parser.add_argument(
        "--plan-limit", type=float, metavar="GIB", help="memory of a GPU for the plan alone; without it --limit"
    )
    parser.add_argument("--host-limit", type=float, metavar="GIB", help="free memory of the host, for the plan alone")
    parser.add_argument("--profile", type=Path, help="write a table of kernels of three more steps")
    parser.add_argument(
        "keys", nargs="*", metavar="section.key=value", help="keys set by hand: the figure then says so"
    )
    parser.set_defaults(**defaults)
    return parser.parse_intermixed_args(arguments)  # keys may stand between options


def prepare(options: argparse.Namespace, row: BenchRow, rank: int, world_size: int) -> tuple[RunConfig, Plan]:
    """On rank 0; the others read what it wrote."""
    folder = folder_of(options.work, row, options.layers)
    handed = folder / f"case-{os.environ.get('MASTER_PORT', '0')}-{os.getppid()}.json"
    if rank == 0:
        config, facts = find_facts(
            folder, row, world_size, options.steps, options.keys, options.layers, options.lengths
        )
        memory = options.plan_limit or options.limit
        facts = with_memory(facts, memory) if memory else facts
        if options.host_limit:
            host = {"free_memory_bytes": int(options.host_limit * 2**30)}
            facts = facts.model_copy(update={"host": facts.host.model_copy(update=host)})
        plan = make_plan(config, facts)
        temporary = handed.with_suffix(".tmp")
        temporary.write_text(json.dumps([config.model_dump(mode="json"), plan.model_dump(mode="json")]))
        temporary.rename(handed)
    else:
        while not handed.exists():
            time.sleep(0.2)
    config_fields, plan_fields = json.loads(handed.read_text())
    return RunConfig.model_validate(config_fields), Plan.model_validate(plan_fields)


def folder_of(work: Path, row: BenchRow, layers: int | None = None) -> Path:
    return work / f"{row.shape}-{layers or 'all'}"


def find_facts(
    folder: Path,
    row: BenchRow,
    world_size: int,
    num_steps: int,
    keys: list[str],
    layers: int | None = None,
    lengths: Path | None = None,
) -> tuple[RunConfig, Facts]:
    """A row's model folder and data, written where they are missing; its run and what is true of it on this machine."""
    if not (folder / "model").exists():
        write_model_folder(folder / "model", row.shape, layers)
    rows = folder / f"{row.data}-{row.length}.jsonl"
    if row.data == "pairs":
        write_pairs(rows, max(16, row.rows * world_size), row.length)
    elif lengths or not rows.exists():
        write_rows(rows, row_lengths(row, lengths, world_size))
    config = make_config(folder, row, world_size, num_steps, keys)
    return config, gather_facts(config, world_size=world_size, saves=False, identify=False, report=lambda _: None)


def with_memory(facts: Facts, gib: float) -> Facts:
    """The same on GPUs that have ``gib`` GiB, all of it free; where there is no GPU, on a machine with so much free."""
    size = int(gib * 2**30)
    gpus = tuple(gpu.model_copy(update={"memory_bytes": size, "free_bytes": size}) for gpu in facts.host.gpus)
    host = {"gpus": gpus} if gpus else {"free_memory_bytes": size}
    return facts.model_copy(update={"host": facts.host.model_copy(update=host)})


def limit_allocator(device: torch.device, gib: float) -> None:
    """Let torch allocate what a GPU of ``gib`` GiB would have left beside the CUDA context."""
    torch.cuda.init()
    total = torch.cuda.mem_get_info(device)[1]
    torch.cuda.set_per_process_memory_fraction(max(0.0, gib - outside_allocator_gib(device)) * 2**30 / total, device)


def outside_allocator_gib(device: torch.device) -> float:
    """What is used of the device and not by torch's allocator: context, kernels, communication, and other processes."""
    free, total = torch.cuda.mem_get_info(device)
    return float(total - free - torch.cuda.memory_reserved(device)) / 2**30


def row_lengths(row: BenchRow, file: Path | None, world_size: int) -> list[int]:
    """Lengths in tokens of all rows: those of ``file``, all alike, or the long-tailed mix."""
    if file is not None:
        return [int(length) for length in json.loads(file.read_text())]
    if row.data == "full":
        num_samples = max(64, row.rows * world_size)
        return [row.length] * min(num_samples, max(row.rows * world_size, MAX_TOKENS // row.length))
    return [min(length, row.length) for length in mix_lengths(2048, mix=row.data)]


def summarise(
    bench: Bench, row: BenchRow, options: argparse.Namespace, results: list[StepResult], built_s: float
) -> dict[str, Any]:
    """The raw row: what ran, how fast, how much memory, in which dtypes."""
    timed = results[options.warm :]
    assert results[-1].loss < results[0].loss or max(r.grad_norm for r in results) > 0, "nothing was trained"
    world, plan = bench.rank.world, bench.rank.plan
    world_size, cuda = world.world_size, world.device.type == "cuda"
    of_layout = (
        *("strategy", "activation_checkpointing", "lighter_layers", "reshard_after_forward", "offload"),
        *(
            "offload_activations",
            "layers_on_device",
            "repeated_inputs",
            "mlp_tile_tokens",
            "compile",
            "cuda_graphs",
            "keeps_transposed",
            "micro_tokens",
            "pack_tokens",
        ),
    )
    decided = {name: getattr(plan.layout, name) for name in of_layout}
    decided |= {"attention": plan.attention, "packing": plan.packing}
    return {
        "run": options.run,
        **lease(),
        "row": row.name,
        "label": options.label,
        "shape": row.shape,
        "layers": options.layers,
        "method": row.method,
        "gpus": world_size,
        "length": row.length,
        "rows": row.rows,
        "by_hand": options.keys,
        "lengths": options.lengths.name if options.lengths else None,
        **decided,
        "dtypes": dtypes(bench.built.model, bench.built.engine.optimizer),
        **rates([(r.seconds, r.num_tokens) for r in results], row, world_size, warm=options.warm),
        **memory(),
        "outside_gib": round(outside_allocator_gib(world.device), 2) if cuda else None,
        "planned_gib": round(plan.memory.total / 2**30, 2),
        "planned_s": None if plan.step_s is None else round(plan.step_s, 4),
        "limit_gib": options.limit,
        "plan_limit_gib": options.plan_limit or options.limit,
        "input_wait_share": round(
            sum(getattr(r, "input_wait_s", 0.0) for r in timed) / sum(r.seconds for r in timed), 5
        ),
        "build_s": round(built_s, 1),
        "losses": [round(results[0].loss, 4), round(results[-1].loss, 4)],
        "grad_norms": [round(results[0].grad_norm, 4), round(results[-1].grad_norm, 4)],
        "torch": torch.__version__,
    }


def more_steps(bench: Bench, loop: Loop, num_steps: int) -> None:
    """Continues where the loop ended."""
    loop.num_steps = loop.state.step + num_steps
    rank = replace(bench.rank, plan=bench.rank.plan.model_copy(update={"num_steps": loop.num_steps}))
    loop.works = iterate_steps(rank, bench.data, bench.built.loss_model, loop.state.step)
    train(loop)


def profile(bench: Bench, loop: Loop, output: Path) -> None:
    """Three more steps under the profiler; the table of kernels by time goes into a file of rank 0."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        more_steps(bench, loop, 3)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    if bench.rank.world.is_first:
        key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        output.write_text(profiler.key_averages().table(sort_by=key, row_limit=60, max_name_column_width=110))


if __name__ == "__main__":
    main()
