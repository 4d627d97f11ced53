"""One measured row, on the processes that started this module: config, prepared rows, plan, loop; no checkpoint, no export.

    torchrun --nproc_per_node=2 -m manyhands.bench.case --row 8b-lora --gpus 2 --output rows.jsonl

Every step is synchronised; the first ``--warm`` ones (compilation) are left out; the optimizer is included. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from manyhands.bench.rows import BY_NAME, Row, mix_lengths
from manyhands.bench.shapes import flops_per_token, write_model_folder, write_rows
from manyhands.config.load import config_from_mapping
from manyhands.config.schema import RunConfig
from manyhands.facts.gather import gather_facts
from manyhands.launch.foreign import detect_launcher
from manyhands.parallel.world import World
from manyhands.plan.search import plan as make_plan
from manyhands.plan.types import Plan
from manyhands.train.loop import Loop, train
from manyhands.train.schedule import make_schedule
from manyhands.train.types import Hook, StepResult, TrainState
from manyhands.worker import build
from manyhands.worker.rank import Rank
from manyhands.worker.steps import iterate_steps


def make_config(folder: Path, row: Row, world_size: int, num_steps: int, overrides: list[str]) -> RunConfig:
    """The run of a row. Everything that tunes is left to the plan."""
    mapping: dict[str, Any] = {
        "name": "bench",
        "task": "cpt",
        "model": {"name": str(folder / "model"), "init": "random"},
        "method": {"name": row.method} | ({} if row.method == "full" else {"rank": 16, "alpha": 32.0}),
        "data": {
            "train": str(folder / f"{row.data}-{row.length}.jsonl"),
            "validation_fraction": 0.0,
            "max_length": row.length,
            "cache": str(folder / "cache"),
        },
        "batch": {"rows": row.rows * world_size},
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


def main() -> None:
    options = parse()
    row = BY_NAME[options.row]
    row = replace(row, shape=options.shape or row.shape, length=options.length or row.length, rows=options.rows or row.rows)
    launcher = detect_launcher()
    rank = Rank(launcher)
    rank.config, rank.plan = prepare(options, row, launcher.rank, launcher.world_size)
    os.environ.update(rank.plan.environment)
    cuda = rank.plan.device == "cuda"
    device = torch.device("cuda", launcher.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if launcher.world_size == 1 else {}
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", **alone)
    rank.world = World(launcher.rank, launcher.local_rank, launcher.world_size, device)
    start = time.monotonic()
    build.open_data(rank)
    build.build_model(rank)
    build.check_model(rank)
    built_s = time.monotonic() - start
    timings = Timings()
    rank.loss_model.train()
    loop = Loop(
        parallel=rank.parallel,
        optimizer=rank.optimizer,
        schedule=make_schedule("constant", peak=rank.plan.learning_rate, num_steps=rank.plan.num_steps, warmup_steps=0),
        works=iterate_steps(rank),
        state=rank.state,
        stop=rank.config.stop,
        num_steps=rank.plan.num_steps,
        max_grad_norm=1.0,
        seed=0,
        rank=launcher.rank,
        device=device,
        hooks=[timings],
    )
    train(loop)
    if launcher.rank == 0:
        show(summarise(rank, row, options, timings.results, built_s), options.output)
    if options.profile:
        profile(rank, loop, options.profile)
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", choices=sorted(BY_NAME), required=True)
    parser.add_argument("--shape", help="another shape, such as tiny on a CPU")
    parser.add_argument("--layers", type=int, help="only so many blocks")
    parser.add_argument("--length", type=int, help="tokens a row")
    parser.add_argument("--rows", type=int, help="rows of one GPU in one step")
    parser.add_argument("--lengths", type=Path, help="JSON list of the rows' lengths in tokens, such as a real data set's")
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--label", default="manyhands")
    parser.add_argument("--work", type=Path, default=Path("/tmp/manyhands-bench"))
    parser.add_argument("--output", type=Path, help="JSONL file to append the row to")
    parser.add_argument("--profile", type=Path, help="write a table of kernels of three more steps")
    parser.add_argument("keys", nargs="*", metavar="section.key=value", help="keys set by hand: the figure then says so")
    return parser.parse_args()


def prepare(options: argparse.Namespace, row: Row, rank: int, world_size: int) -> tuple[RunConfig, Plan]:
    """On rank 0; the others read what it wrote."""
    folder = options.work / f"{row.shape}-{options.layers or 'all'}"
    handed = folder / f"case-{os.environ.get('MASTER_PORT', '0')}-{os.getppid()}.json"
    if rank == 0:
        if not (folder / "model").exists():
            write_model_folder(folder / "model", row.shape, options.layers)
        rows = folder / f"{row.data}-{row.length}.jsonl"
        if options.lengths or not rows.exists():
            write_rows(rows, row_lengths(row, options.lengths, world_size))
        config = make_config(folder, row, world_size, options.steps, options.keys)
        plan = make_plan(config, gather_facts(config, world_size=world_size, report=lambda _: None))
        temporary = handed.with_suffix(".tmp")
        temporary.write_text(json.dumps([config.model_dump(mode="json"), plan.model_dump(mode="json")]))
        temporary.rename(handed)
    else:
        while not handed.exists():
            time.sleep(0.2)
    config_fields, plan_fields = json.loads(handed.read_text())
    return RunConfig.model_validate(config_fields), Plan.model_validate(plan_fields)


def row_lengths(row: Row, file: Path | None, world_size: int) -> list[int]:
    """Lengths in tokens of all rows: those of ``file``, all alike, or the long-tailed mix."""
    if file is not None:
        return [int(length) for length in json.loads(file.read_text())]
    if row.data == "full":
        return [row.length] * max(64, row.rows * world_size)
    return [min(length, row.length) for length in mix_lengths(2048)]


def summarise(rank: Rank, row: Row, options: argparse.Namespace, results: list[StepResult], built_s: float) -> dict[str, Any]:
    """The raw row: what ran, how fast, how much memory, in which dtypes."""
    timed = results[options.warm :]
    assert results[-1].loss < results[0].loss or max(r.grad_norm for r in results) > 0, "nothing was trained"
    step_s = statistics.median(r.seconds for r in timed)
    world_size, cuda = rank.world.world_size, rank.world.device.type == "cuda"
    rate = sum(r.num_tokens for r in timed) / sum(r.seconds for r in timed) / world_size
    equal = len({r.num_tokens for r in timed}) == 1
    rate = timed[0].num_tokens / step_s / world_size if equal else rate
    dtypes = _dtypes(rank)
    plan = rank.plan
    decided = {
        name: getattr(plan, name) for name in ("strategy", "recompute", "reshard", "compile", "attention", "packing", "micro_tokens")
    }
    return {
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
        "dtypes": dtypes,
        "num_timed_steps": len(timed),
        "step_s": round(step_s, 4),
        "step_s_min_max": [round(min(r.seconds for r in timed), 4), round(max(r.seconds for r in timed), 4)],
        "tokens_per_s_gpu": round(rate),
        "tflops": round(rate * flops_per_token(row.shape, row.length, full=row.method == "full") / 1e12, 1) if equal else None,
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2) if cuda else None,
        "planned_gib": round(plan.memory.total / 2**30, 2),
        "input_wait_share": round(sum(getattr(r, "input_wait_s", 0.0) for r in timed) / sum(r.seconds for r in timed), 5),
        "build_s": round(built_s, 1),
        "losses": [round(results[0].loss, 4), round(results[-1].loss, 4)],
        "grad_norms": [round(results[0].grad_norm, 4), round(results[-1].grad_norm, 4)],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }


def _dtypes(rank: Rank) -> dict[str, Any]:
    def names(dtypes: Any) -> list[str]:
        return sorted({str(dtype).removeprefix("torch.") for dtype in dtypes})

    parameters = list(rank.model.parameters())
    return {
        "compute": rank.plan.compute_dtype,
        "trained": names(p.dtype for p in parameters if p.requires_grad),
        "frozen": names(p.dtype for p in parameters if not p.requires_grad),
        "optimizer": names(
            v.dtype for s in rank.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor) and v.numel() > 1
        ),
    }


def show(row: dict[str, Any], output: Path | None) -> None:
    print("RESULT " + json.dumps(row), flush=True)
    if output:
        with output.open("a") as file:
            file.write(json.dumps(row) + "\n")


def profile(rank: Rank, loop: Loop, output: Path) -> None:
    """Three more steps under the profiler; the table of kernels by time goes into a file of rank 0."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    plan = rank.plan.model_copy(update={"num_steps": loop.state.step + 3})
    rank.plan, loop.num_steps = plan, plan.num_steps
    loop.works = iterate_steps(rank)
    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        train(loop)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    if rank.is_first:
        key = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        output.write_text(profiler.key_averages().table(sort_by=key, row_limit=60, max_name_column_width=110))


if __name__ == "__main__":
    main()
