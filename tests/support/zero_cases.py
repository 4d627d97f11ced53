"""The rows of ``docs/equality.md`` that DeepSpeed trains, and those beside them."""

from __future__ import annotations

from tests.support.equality import BATCH_SAMPLES, Case

PACKED = {"data.packing": True, "batch.micro_tokens": 512}


def zero_cases() -> list[Case]:
    """DeepSpeed's stages beside FSDP2, against the same reference; states, and at stage 3 weights, in host memory."""
    one = {"parallel.strategy": "single", "data.packing": False}
    one |= {"batch.micro_samples": BATCH_SAMPLES, "batch.accumulation": 1}
    table = [Case("single 1, accumulation 1", 1, one)]

    def packed(strategy: str, world: int, **more: str) -> Case:
        name = f"{strategy} {world}, packed 512" + "".join(f", {key} {value}" for key, value in more.items())
        keys = {f"parallel.{key}": value for key, value in more.items()}
        return Case(name, world, PACKED | {"parallel.strategy": strategy} | keys)

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
