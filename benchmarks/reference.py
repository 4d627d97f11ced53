"""Our run and a plain ``transformers.Trainer``'s (LoRA: with PEFT) on the same rows, step by step. Prints one JSON
line.

    python benchmarks/reference.py --model SMOLLM2 --data gsm8k/train.jsonl --method full --output rows.jsonl

Ours goes through the product's own path: config, prepared rows, plan, model, loop. Theirs is built from the same model
folder by transformers alone; it shares our rows in our order and, for LoRA, our first factors A, and no code. Both
compute in float32 with TF32 off and attention by sdpa, on the CPU or on one GPU. Exit code 1 where a bound is not kept.

What a run file can say but the two mean differently is left out: a warm-up (the Trainer's first step has rate 0) and,
for full training, weight decay (the Trainer decays embeddings too).
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from manyhands.bench.rows import say
from manyhands.config.schema import RunConfig
from manyhands.convert.adapter import adapter_state
from manyhands.core.errors import UserError
from manyhands.core.world import World
from manyhands.data.store.streams import MASK, PACKED_BY
from manyhands.export.adapter import name_targets
from manyhands.importers.load import config_from_mapping
from manyhands.launch.run.folder import RunFolder
from manyhands.launch.run.prepare import gather_facts
from manyhands.planner.search import plan as make_plan
from manyhands.planner.types import Plan
from manyhands.training.loop import Loop, train
from manyhands.training.schedule import make_schedule
from manyhands.training.types import TrainState
from manyhands.worker import stages
from manyhands.worker.batches import iterate_steps
from manyhands.worker.rank import Data, Process, Rank
from tests.support.equality import Recorder

IGNORED = -100
FIRST_LOSS, FIRST_NORM, EVERY_STEP = 1e-5, 1e-4, 1e-3  # bounds of relative deviations


@dataclass(frozen=True)
class Settings:
    """One comparison. ``rows`` form a step; the Trainer, and ours unless ``packed``, takes rows / accumulation at
    once.
    """

    model: Path
    data: Path
    work: Path
    method: str = "full"
    steps: int = 50
    rows: int = 8
    accumulation: int = 4
    packed: bool = False
    max_length: int = 512
    max_characters: int | None = (
        None  # of a line of ``data``; longer ones are left out, for a short comparison on the CPU
    )
    learning_rate: float | None = None  # None: the product's own choice for the method
    schedule: str = "cosine"
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lora_rank: int = 16
    lora_alpha: float = 32.0
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.rows % self.accumulation:
            raise SystemExit(f"--rows {self.rows} is not a multiple of --accumulation {self.accumulation}")
        if self.weight_decay and self.method == "full":
            raise SystemExit(
                "--weight-decay is compared for lora only: the Trainer decays embeddings, manyhands does not"
            )


@dataclass(frozen=True)
class Curve:
    """Each step's loss (mean over all trained tokens of the step, in nats) and gradient norm before clipping."""

    losses: tuple[float, ...]
    norms: tuple[float, ...]


@dataclass(frozen=True)
class Ours:
    """What our side computed, and what the other side needs to do the same."""

    curve: Curve
    rows: list[dict[str, list[int]]]  # input_ids and labels, step after step
    num_loss_tokens: tuple[int, ...]  # trained tokens of each step
    learning_rate: float
    device: str
    num_micro_batches: tuple[int, ...]
    targets: list[str] = field(default_factory=list)  # PEFT's target_modules
    adapter: dict[str, torch.Tensor] = field(default_factory=dict)  # before the first step, under PEFT's names


def make_config(settings: Settings) -> RunConfig:
    lora = {"rank": settings.lora_rank, "alpha": settings.lora_alpha} if settings.method == "lora" else {}
    batch: dict[str, Any] = {"samples": settings.rows}
    if settings.packed:
        batch["micro_tokens"] = settings.max_length
    else:
        batch |= {"micro_samples": settings.rows // settings.accumulation, "accumulation": settings.accumulation}
    mapping: dict[str, Any] = {
        "name": "reference",
        "seed": settings.seed,
        "model": {"name": str(settings.model), "dtype": "float32"},
        "method": {"name": settings.method} | lora,
        "data": {
            "train": str(choose_data(settings)),
            "validation_fraction": 0.0,
            "max_length": settings.max_length,
            "too_long": "truncate",
            "packing": settings.packed,
            "cache": str(settings.work / "cache"),
        },
        "batch": batch,
        "optimizer": {
            "learning_rate": settings.learning_rate or "auto",
            "weight_decay": settings.weight_decay,
            "max_grad_norm": settings.max_grad_norm,
        },
        "schedule": {"name": settings.schedule, "warmup_steps": 0},
        "stop": {"epochs": 1, "max_steps": settings.steps},
        "parallel": {"gpus": 1, "device": settings.device, "strategy": "single", "compile": False},
        "evaluate": {"at_start": False, "every_steps": 0},
        "output": {"dir": str(settings.work / "runs")},
    }
    return config_from_mapping(mapping, where="benchmarks/reference.py")


def choose_data(settings: Settings) -> Path:
    """The data file, or one in the work folder with its short lines."""
    if settings.max_characters is None:
        return settings.data
    lines = [
        line for line in settings.data.read_text().splitlines(keepends=True) if len(line) <= settings.max_characters
    ]
    path = settings.work / f"{settings.data.stem}-{settings.max_characters}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines))
    return path


def run_ours(settings: Settings) -> Ours:
    """The product's stages in this process, without run folder, checkpoints and export."""
    config = make_config(settings)
    plan = make_plan(config, gather_facts(config, saves=False, report=lambda text: print(text, file=sys.stderr)))
    world = World(0, 0, 1, torch.device("cuda", 0) if plan.layout.device == "cuda" else torch.device("cpu"))
    rank = Rank(config, plan, RunFolder(settings.work), world, Process(terminal=sys.stderr))
    check_precision(world.device)
    data = stages.open_data(rank)
    rows = list_rows(plan, data, settings)
    built = stages.build_model(rank)
    stages.check_model(rank, data, built)
    adapter = {name: tensor.detach().cpu().clone() for name, tensor in adapter_state(built.model).items()}
    recorder = Recorder()
    built.loss_model.train()
    loop = Loop(
        engine=built.engine,
        schedule=make_schedule(
            config.schedule.name, peak=plan.learning_rate, num_steps=plan.num_steps, warmup_steps=plan.warmup_steps
        ),
        works=iterate_steps(rank, data, built.loss_model),
        state=TrainState(),
        stop=config.stop,
        num_steps=plan.num_steps,
        max_grad_norm=config.optimizer.max_grad_norm,
        seed=config.seed,
        rank=0,
        device=world.device,
        hooks=[recorder],
    )
    train(loop)
    results = recorder.results
    return Ours(
        curve=Curve(tuple(r.loss for r in results), tuple(r.grad_norm for r in results)),
        rows=rows,
        num_loss_tokens=tuple(r.num_loss_tokens for r in results),
        learning_rate=plan.learning_rate,
        device=plan.layout.device,
        num_micro_batches=tuple(r.num_micro_batches for r in results),
        targets=name_targets(built.model) if adapter else [],
        adapter=adapter,
    )


def check_precision(device: torch.device) -> None:
    """Turns TF32 off and looks at a product that it would round. RuntimeError where float32 is not float32."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    fine = torch.full((512, 512), 1 + 2.0**-12, device=device)  # TF32 keeps 10 bits of the mantissa
    if not torch.equal(fine @ torch.eye(512, device=device), fine):
        raise RuntimeError("products of float32 matrices are rounded (TF32?): the comparison would say nothing")


def list_rows(plan: Plan, data: Data, settings: Settings) -> list[dict[str, list[int]]]:
    """The rows of all steps in our order, as the Trainer takes them: it shifts ``labels`` by one itself."""
    listed = []
    for step in range(plan.num_steps):
        rows = data.order.samples(*data.order.locate(step))
        if len(rows) != settings.rows:  # the Trainer would fill up a short last step with rows of the next
            raise SystemExit(
                f"step {step + 1} has {len(rows)} rows, not {settings.rows}: give more rows or fewer --steps"
            )
        for sample in map(data.store.train.sample, rows):
            ids, mask = (torch.from_numpy(sample[stream].copy()) for stream in (PACKED_BY, MASK.name))
            labels = torch.where(mask, ids, IGNORED)
            listed.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    if len(listed) != settings.rows * settings.steps:
        raise SystemExit(f"one pass over the data has {plan.num_steps} steps only: lower --steps")
    return listed


def make_trainer(settings: Settings, ours: Ours) -> Any:
    """A plain Trainer over our rows, with the arguments that say the same as our config."""
    from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainingArguments

    model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32, attn_implementation="sdpa")
    if settings.method == "lora":
        model = add_peft_adapter(model, settings, ours)
    arguments = TrainingArguments(
        output_dir=str(settings.work / "trainer"),
        max_steps=settings.steps,
        per_device_train_batch_size=settings.rows // settings.accumulation,
        gradient_accumulation_steps=settings.accumulation,
        train_sampling_strategy="sequential",
        optim="adamw_torch",
        learning_rate=ours.learning_rate,
        lr_scheduler_type=settings.schedule,
        warmup_steps=0,
        weight_decay=settings.weight_decay,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        max_grad_norm=settings.max_grad_norm,
        use_cpu=ours.device == "cpu",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    if arguments.n_gpu > 1:
        raise SystemExit("the Trainer would spread over all visible GPUs: set CUDA_VISIBLE_DEVICES to one")
    trainer = Trainer(model=model, args=arguments, train_dataset=ours.rows, data_collator=pad_right)
    trainer.remove_callback(PrinterCallback)
    return trainer


def add_peft_adapter(model: Any, settings: Settings, ours: Ours) -> Any:
    """PEFT's own LoRA on the same layers, loaded by PEFT from our untrained adapter."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=0.0,
        target_modules=ours.targets,
        bias="none",
    )
    adapted = get_peft_model(model, config)
    set_peft_model_state_dict(adapted, ours.adapter)
    loaded = get_peft_model_state_dict(adapted)
    if loaded.keys() != ours.adapter.keys() or not all(
        torch.equal(loaded[name].cpu(), ours.adapter[name]) for name in loaded
    ):
        raise RuntimeError("PEFT did not take our factors: the two sides would start from different adapters")
    return adapted


def pad_right(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Rows of one micro-batch: input_ids, labels and attention_mask, (rows, longest) int64."""
    longest = max(len(row["input_ids"]) for row in rows)

    def pad(values: list[int], filler: int) -> list[int]:
        return values + [filler] * (longest - len(values))

    return {
        "input_ids": torch.tensor([pad(row["input_ids"], 0) for row in rows]),
        "labels": torch.tensor([pad(row["labels"], IGNORED) for row in rows]),
        "attention_mask": torch.tensor([pad([1] * len(row["input_ids"]), 0) for row in rows]),
    }


def run_trainer(trainer: Any) -> Curve:
    """Trains, and reads the Trainer's own log of each step.

    With ``logging_steps=1`` its ``loss`` is the sum over the micro-batches of loss_sum / trained tokens of the step, in
    float32 and not rounded: the mean over all trained tokens, as ours. ``grad_norm`` is the norm before clipping,
    summed in float32: on the CPU the norm of SmolLM2's embedding alone comes out 3e-5 too small (equal gradients,
    summed in float64, have our norm to the last digit).
    """
    check_precision(trainer.args.device)  # its own set-up may have changed what ours had set
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "grad_norm" in entry]  # without the summary at the end
    return Curve(tuple(entry["loss"] for entry in steps), tuple(entry["grad_norm"] for entry in steps))


@dataclass(frozen=True)
class Deviations:
    """Relative to the Trainer's numbers."""

    first_loss: float
    first_norm: float
    largest_loss: float
    largest_norm: float

    @property
    def within(self) -> bool:
        every = max(self.largest_loss, self.largest_norm)
        return self.first_loss <= FIRST_LOSS and self.first_norm <= FIRST_NORM and every <= EVERY_STEP


def compare(ours: Curve, theirs: Curve) -> Deviations:
    """ValueError where the numbers of steps differ."""

    def relative(mine: tuple[float, ...], other: tuple[float, ...]) -> list[float]:
        return [abs(m - o) / abs(o) for m, o in zip(mine, other, strict=True)]

    losses, norms = relative(ours.losses, theirs.losses), relative(ours.norms, theirs.norms)
    return Deviations(losses[0], norms[0], max(losses), max(norms))


def describe(settings: Settings, ours: Ours, theirs: Curve) -> dict[str, Any]:
    """The row of raw numbers: for losses and norms, [ours, theirs] of every step."""
    import peft
    import transformers

    deviations = compare(ours.curve, theirs)
    asked = {key: value for key, value in asdict(settings).items() if key not in ("work", "learning_rate", "device")}
    return {
        "label": "reference",
        **(asked | {"model": settings.model.name, "data": "/".join(settings.data.parts[-2:])}),
        "learning_rate": ours.learning_rate,
        "dtype": "float32, TF32 off",
        "micro_batches": [min(ours.num_micro_batches), max(ours.num_micro_batches)],
        "trained_tokens": [min(ours.num_loss_tokens), max(ours.num_loss_tokens)],
        "clipped_steps": sum(0 < settings.max_grad_norm < norm for norm in theirs.norms),
        "device": torch.cuda.get_device_name() if ours.device == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__},
        "deviations": asdict(deviations),
        "within": deviations.within,
        "losses": [list(pair) for pair in zip(ours.curve.losses, theirs.losses, strict=True)],
        "grad_norms": [list(pair) for pair in zip(ours.curve.norms, theirs.norms, strict=True)],
    }


def parse_settings() -> tuple[Settings, Path | None]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSONL rows, each with some trained and untrained tokens",
    )
    parser.add_argument("--work", type=Path, default=Path("/tmp/manyhands-reference"), metavar="DIR")
    parser.add_argument("--method", choices=["full", "lora"], default="full")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rows", type=int, default=8, help="rows of one step")
    parser.add_argument("--accumulation", type=int, default=4, help="micro-batches of one step")
    parser.add_argument(
        "--packed", action="store_true", help="ours packs rows into micro-batches of --max-length tokens"
    )
    parser.add_argument(
        "--max-length", type=int, default=512, help="tokens of a row; longer ones are truncated, for both sides"
    )
    parser.add_argument("--max-characters", type=int, help="leave out longer lines of the data file, for both sides")
    parser.add_argument("--learning-rate", type=float, help="default: the product's own for the method")
    parser.add_argument("--schedule", choices=["cosine", "linear", "constant"], default="cosine")
    parser.add_argument("--weight-decay", type=float, default=0.0, help="lora only")
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--lora-alpha", type=float, default=32.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--output", type=Path, help="JSONL file to append the row to")
    options = vars(parser.parse_args())
    output = options.pop("output")
    return Settings(**options), output


def main() -> int:
    settings, output = parse_settings()
    # Before CUDA starts: a Trainer that sees several GPUs spreads over them.
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    try:
        ours = run_ours(settings)
    except UserError as error:
        sys.exit(str(error))
    theirs = run_trainer(make_trainer(settings, ours))
    row = describe(settings, ours, theirs)
    for step, (loss, norm) in enumerate(zip(row["losses"], row["grad_norms"], strict=True), 1):
        print(
            f"step {step:3}  loss {loss[0]:.7f} {loss[1]:.7f}  gradient norm {norm[0]:.6f} {norm[1]:.6f}",
            file=sys.stderr,
        )
    say(row, output, "RESULT ")
    return 0 if row["within"] else 1


if __name__ == "__main__":
    sys.exit(main())
