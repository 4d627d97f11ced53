"""One measured case of ours: random weights of a published shape, every row full, every token trained. Prints one JSON line.

    torchrun --nproc_per_node=2 bench/ours.py --shape llama8b --method lora --length 4096 --rows 2 --steps 25

It goes through the product's own path (config, prepared rows, plan, loop) and leaves out only checkpoints and export.
Timings: every step is synchronised, the first ``--warm`` ones (compilation) are left out, the optimizer is included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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

NUM_WORDS = 512

# Published shapes: the models' config.json on their public pages.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, vocab_size=520),
    "llama1b": dict(
        hidden_size=2048,
        intermediate_size=8192,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=16,
        vocab_size=128256,
        head_dim=64,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
    ),
    "llama8b": dict(
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_hidden_layers=32,
        vocab_size=128256,
        rms_norm_eps=1e-5,
    ),
}


def write_workspace(folder: Path, shape: str, length: int, num_rows: int) -> None:
    """A model folder without weights (they are drawn on the device) and rows of exactly ``length`` tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    model = folder / "model"
    config = LlamaConfig(max_position_embeddings=131072, dtype="bfloat16", architectures=["LlamaForCausalLM"], **SHAPES[shape])
    config.save_pretrained(model)
    vocabulary = {"<unk>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, NUM_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>").save_pretrained(model)
    numbers = torch.randint(2, NUM_WORDS, (num_rows, length - 1), generator=torch.Generator().manual_seed(1)).tolist()
    with (folder / "rows.jsonl").open("w") as file:
        for row in numbers:
            file.write(json.dumps({"text": " ".join(f"w{i}" for i in row)}) + "\n")


def make_config(folder: Path, options: argparse.Namespace, world_size: int) -> RunConfig:
    rows = options.rows * world_size * options.accumulation
    mapping: dict[str, Any] = {
        "name": "bench",
        "task": "cpt",
        "model": {"name": str(folder / "model"), "init": "random"},
        "method": {"name": options.method} | ({"rank": 16, "alpha": 32.0} if options.method == "lora" else {}),
        "data": {
            "train": str(folder / "rows.jsonl"),
            "validation_fraction": 0.0,
            "max_length": options.length,
            "cache": str(folder / "cache"),
        },
        "batch": {"rows": rows, "micro_tokens": options.rows * options.length},
        "optimizer": {"learning_rate": 1e-5},
        "stop": {"epochs": 1000, "max_steps": options.steps},
        "parallel": {"gpus": world_size},
        "evaluate": {"at_start": False, "every_steps": 0},
        "output": {"dir": str(folder / "runs")},
    }
    for override in options.keys:
        key, _, value = override.partition("=")
        section, _, name = key.partition(".")
        mapping.setdefault(section, {})[name] = json.loads(value) if value[:1] in "0123456789tf[" else value
    return config_from_mapping(mapping, where="bench")


class Timings(Hook):
    def __init__(self) -> None:
        self.results: list[StepResult] = []

    def after_step(self, state: TrainState, result: StepResult) -> None:
        self.results.append(result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--method", choices=["lora", "full"], default="lora")
    parser.add_argument("--length", type=int, default=4096, help="tokens a row")
    parser.add_argument("--rows", type=int, default=2, help="rows of one micro-batch")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--warm", type=int, default=5)
    parser.add_argument("--label", default="manyhands")
    parser.add_argument("--work", type=Path, default=Path("/tmp/manyhands-bench"))
    parser.add_argument("--output", type=Path, help="JSONL file to append the row to")
    parser.add_argument("--profile", type=Path, help="write a table of kernels of one more step")
    parser.add_argument("keys", nargs="*", metavar="section.key=value")
    options = parser.parse_args()
    launcher = detect_launcher()
    rank = Rank(launcher)
    folder = options.work / f"{options.shape}-{options.length}"
    rank.config, rank.plan = prepare(folder, options, launcher.rank, launcher.world_size)
    os.environ.update(rank.plan.environment)
    cuda = rank.plan.device == "cuda"
    device = torch.device("cuda", launcher.local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    alone = {"store": dist.HashStore(), "rank": 0, "world_size": 1} if launcher.world_size == 1 else {}
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", **alone)
    rank.world = World(launcher.rank, launcher.local_rank, launcher.world_size, device)
    build.open_data(rank)
    build.build_model(rank)
    build.check_model(rank)
    timings = Timings()
    rank.loss_model.train()
    schedule = make_schedule("constant", peak=rank.plan.learning_rate, num_steps=options.steps, warmup_steps=0)
    loop = Loop(
        parallel=rank.parallel,
        optimizer=rank.optimizer,
        schedule=schedule,
        works=iterate_steps(rank),
        state=rank.state,
        stop=rank.config.stop,
        num_steps=options.steps,
        max_grad_norm=1.0,
        seed=0,
        rank=launcher.rank,
        device=device,
        hooks=[timings],
    )
    train(loop)
    if launcher.rank == 0:
        show(summarise(rank, options, timings.results), options.output)
    if options.profile:
        profile(rank, loop, options)
    dist.destroy_process_group()


def prepare(folder: Path, options: argparse.Namespace, rank: int, world_size: int) -> tuple[RunConfig, Plan]:
    """On rank 0; the others read what it wrote."""
    handed = folder / f"case-{os.environ.get('TORCHELASTIC_RUN_ID', 'one')}-{os.environ.get('MASTER_PORT', '0')}-{os.getppid()}.json"
    if rank == 0:
        rows = max(64, options.rows * world_size * options.accumulation)
        if not (folder / "rows.jsonl").exists():
            write_workspace(folder, options.shape, options.length, rows)
        config = make_config(folder, options, world_size)
        plan = make_plan(config, gather_facts(config, world_size=world_size, report=lambda _: None))
        temporary = handed.with_suffix(".tmp")
        temporary.write_text(json.dumps([config.model_dump(mode="json"), plan.model_dump(mode="json")]))
        temporary.rename(handed)
    else:
        import time

        while not handed.exists():
            time.sleep(0.2)
    config_fields, plan_fields = json.loads(handed.read_text())
    return RunConfig.model_validate(config_fields), Plan.model_validate(plan_fields)


def summarise(rank: Rank, options: argparse.Namespace, results: list[StepResult]) -> dict[str, Any]:
    timed = results[options.warm :]
    step_s = statistics.median(r.seconds for r in timed)
    tokens = timed[0].num_tokens / rank.world.world_size
    cuda = rank.world.device.type == "cuda"
    assert results[-1].loss < results[0].loss or max(r.grad_norm for r in results) > 0, "nothing was trained"
    trained = {str(p.dtype).removeprefix("torch.") for p in rank.model.parameters() if p.requires_grad}
    frozen = {str(p.dtype).removeprefix("torch.") for p in rank.model.parameters() if not p.requires_grad}
    states = {str(v.dtype).removeprefix("torch.") for s in rank.optimizer.state.values() for k, v in s.items() if k.startswith("exp")}
    plan = rank.plan
    return {
        "label": options.label,
        "shape": options.shape,
        "method": options.method,
        "gpus": rank.world.world_size,
        "length": options.length,
        "micro_rows": options.rows,
        "accumulation": options.accumulation,
        "strategy": plan.strategy,
        "recompute": plan.recompute,
        "reshard": plan.reshard,
        "compile": plan.compile,
        "attention": plan.attention,
        "packing": plan.packing,
        "dtypes": {"compute": plan.compute_dtype, "trained": sorted(trained), "frozen": sorted(frozen), "optimizer": sorted(states)},
        "num_timed_steps": len(timed),
        "step_s": round(step_s, 4),
        "step_s_min_max": [round(min(r.seconds for r in timed), 4), round(max(r.seconds for r in timed), 4)],
        "tokens_per_s_gpu": round(tokens / step_s),
        "peak_allocated_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
        "peak_reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2) if cuda else None,
        "planned_gib": round(plan.memory.total / 2**30, 2),
        "losses": [round(results[0].loss, 4), round(results[-1].loss, 4)],
        "grad_norms": [round(results[0].grad_norm, 4), round(results[-1].grad_norm, 4)],
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
    }


def show(row: dict[str, Any], output: Path | None) -> None:
    print("RESULT " + json.dumps(row), flush=True)
    if output:
        with output.open("a") as file:
            file.write(json.dumps(row) + "\n")


def profile(rank: Rank, loop: Loop, options: argparse.Namespace) -> None:
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
        options.profile.write_text(profiler.key_averages().table(sort_by=key, row_limit=45, max_name_column_width=110))
        print(json.dumps(asdict(rank.state)))


if __name__ == "__main__":
    main()
