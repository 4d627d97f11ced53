"""The memory tables of TheWorld's guide as plans: `python -m benchmarks.vision_tables` prints them in Markdown.

The guide trains Gemma-3-4B with images: the projector alone, the vision tower too, or everything. Its configuration's
shape is written as a folder whose weights file has a header and no values; nothing is computed but plans.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.config.schema import RunConfig
from manyhands.core.limits import GIB
from manyhands.facts.gpu_kinds import describe_host, parse_gpus
from manyhands.facts.model import read_model_facts
from manyhands.facts.types import DataFacts, Facts, HostFacts, ModelFacts
from manyhands.planner.search import plan
from manyhands.planner.types import Plan

GEMMA_4B: dict[str, Any] = {
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
        "vocab_size": 262208,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "image_size": 896,
        "patch_size": 14,
        "vision_use_head": False,
    },
    "mm_tokens_per_image": 256,
}
TOKENS, SAMPLES = 2048, 2  # of a sample with one image, and of a micro-batch: the guide's batch and length
ANY = 1 << 40  # bytes of a GPU on which everything fits: what a layout needs is asked, not whether it fits
PARTS = {
    "Projector only": {"vision": "frozen", "projector": "trained", "language": "frozen"},
    "+ vision tower": {"vision": "trained", "projector": "trained", "language": "frozen"},
    "Everything": {"vision": "trained", "projector": "trained", "language": "full"},
}
SHORT = {"Projector only": "projector", "+ vision tower": "vision", "Everything": "everything"}  # in names of cases
RESULTS = Path(__file__).parent / "results" / "h200-vision.jsonl"


@dataclass(frozen=True)
class Row:
    """A row of the guide's tables, with its own figures in GB."""

    parts: str
    strategy: str
    gpus: int
    again: bool  # gradient checkpointing
    theirs: str


ROWS = (
    Row("Projector only", "single", 1, False, "17–21"),
    Row("Projector only", "ddp", 2, False, "17–21"),
    Row("Projector only", "ddp", 4, False, "17–21"),
    Row("Projector only", "fsdp", 2, False, "15–18"),
    Row("+ vision tower", "single", 1, False, "35–40"),
    Row("+ vision tower", "single", 1, True, "25–30"),
    Row("+ vision tower", "ddp", 2, False, "35–40"),
    Row("+ vision tower", "ddp", 2, True, "25–30"),
    Row("Everything", "single", 1, False, "60–65"),
    Row("Everything", "single", 1, True, "42–47"),
    Row("Everything", "ddp", 2, False, "60–65"),
    Row("Everything", "fsdp", 2, False, "34–38"),
    Row("Everything", "fsdp", 2, True, "26–30"),
    Row("Everything", "fsdp", 4, False, "20–24"),
)


def write_shape(folder: Path) -> ModelFacts:
    """Facts of the shape, read from config.json and a weights file of which only the header is on the disk."""
    from transformers import Gemma3Config

    config = Gemma3Config(**GEMMA_4B)
    config.save_pretrained(folder)
    write_header(folder, config)
    return read_model_facts(folder, "gemma-3-4b-it", "pretrained")


def write_header(folder: Path, config: Any) -> None:
    """A weights file with names and shapes, whose values are a hole."""
    import torch
    from transformers import AutoModelForMultimodalLM

    with torch.device("meta"):
        model = AutoModelForMultimodalLM.from_config(config)
    header: dict[str, Any] = {}
    end = 0
    for name, parameter in model.named_parameters():  # names a tied weight once
        start, end = end, end + 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def facts_of(model: ModelFacts, gpus: int, kind: str) -> Facts:
    data = DataFacts(
        folder="",
        digest="",
        num_samples=10_000,
        num_tokens=10_000 * TOKENS,
        num_loss_tokens=10_000 * TOKENS // 2,
        max_length=TOKENS,
        mean_length=TOKENS,
        num_validation_samples=0,
        num_validation_tokens=0,
        num_images=10_000,
        max_image_units=1,
        mean_image_units=1.0,
        max_image_tokens=256,
    )
    host = describe_host(parse_gpus(f"{gpus}x{kind}"))
    return Facts(model=model, data=data, host=_with_room(host))


def _with_room(host: HostFacts) -> HostFacts:
    roomy = tuple(gpu.model_copy(update={"memory_bytes": ANY, "free_bytes": ANY}) for gpu in host.gpus)
    return host.model_copy(update={"gpus": roomy})


def planned(row: Row, model: ModelFacts, kind: str) -> Plan:
    config = RunConfig.model_validate(
        {
            "name": "table",
            "model": {"name": "gemma-3-4b-it"},
            "data": {"train": "rows.jsonl", "max_length": TOKENS, "packing": False, "validation_fraction": 0},
            "method": {"parts": PARTS[row.parts]},
            "batch": {"samples": SAMPLES * row.gpus, "micro_samples": SAMPLES},
            "parallel": {
                "strategy": row.strategy,
                "gpus": row.gpus,
                "activation_checkpointing": "full" if row.again else "none",
                "offload_activations": False,
                **({"reshard_after_forward": True} if row.strategy == "fsdp" else {}),  # the guide's FULL_SHARD
            },
        }
    )
    return plan(config, facts_of(model, row.gpus, kind))


def limits() -> dict[str, int]:
    """Bytes of each kind that a run may use: as the planner has it, 97 % of what is free."""
    kinds = {name: parse_gpus(name).kind for name in ("H100", "H200")}
    return {name: int(0.97 * kind.usable_mib.value * 2**20) for name, kind in kinds.items()}


COLUMNS = (
    *("trained", "strategy", "GPUs", "recomputation", "guide, GB", "planned, GiB", "weights and states"),
    *("activations and logits", "fits 80 GB", "fits H200", "planned samples/hour, H200", "measured"),
)


def table(model: ModelFacts) -> Iterator[str]:
    yield f"| {' | '.join(COLUMNS)} |"
    yield "|---" * len(COLUMNS) + "|"
    usable = limits()
    for row in ROWS:
        made = planned(row, model, "H200")
        terms, total = made.memory.terms, made.memory.total
        standing, passing = (
            sum(terms[name] for name in names) for names in (("weights", "optimizer"), ("activations", "logits"))
        )
        fits = ["yes" if total <= usable[name] else "no" for name in ("H100", "H200")]
        assert made.step_s is not None
        cells = [row.parts, row.strategy, str(row.gpus), "full" if row.again else "none", row.theirs]
        cells += [f"{size / GIB:.1f}" for size in (total, standing, passing)]
        cells += [*fits, f"{3600 * SAMPLES * row.gpus / made.step_s:,.0f}", measured(row)]
        yield f"| {' | '.join(cells)} |"


def measured(row: Row) -> str:
    """What a GPU held and what all gave, of the newest raw row."""
    name = f"gemma4b-{SHORT[row.parts]}" + ("" if row.strategy == "single" else f"-{row.strategy}")
    name += "-recompute" if row.again else ""
    raw = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    found = [each for each in raw if (each["row"], each["gpus"]) == (name, row.gpus)]
    if not found:
        return "not measured"
    last = found[-1]
    held = last["peak_reserved_gib"] + last["outside_gib"]
    return f"{held:.1f} GiB, {3600 * SAMPLES * row.gpus / last['step_s']:,.0f} samples/hour"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = write_shape(Path(folder))
        assert model.tower is not None
        sizes = (model.num_parameters, model.tower.num_parameters, model.tower.num_projector_parameters)
        print("text {:,}, vision tower {:,}, projector {:,} parameters".format(*sizes))
        print("\n".join(table(model)))


if __name__ == "__main__":
    main()
