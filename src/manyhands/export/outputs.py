"""What a run leaves: an adapter, the model with the adapter merged, or the trained model. One function writes each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from torch import nn

from manyhands.config.schema import RunConfig
from manyhands.export.adapter import export_adapter, name_base
from manyhands.export.model import choose_dtype, export_model
from manyhands.export.reference import round_weights
from manyhands.planner.types import Plan, method_of

Output = Literal["model", "merged", "adapter"]


def list_outputs(config: RunConfig) -> tuple[Output, ...]:
    """What the run writes at its end; each has a folder of this name."""
    if not config.method.trains_adapters:
        return ("model",)
    return ("merged", "adapter") if config.output.merge else ("adapter",)


def choose_output_dtype(output: Output, plan: Plan, config: RunConfig) -> str:
    """Of the saved weights."""
    return plan.output_dtype if output == "adapter" else choose_dtype(plan, config, merge=output == "merged")


def base_of(output: Output, plan: Plan, config: RunConfig) -> Path | None:
    """The model that ``output`` is put on when it is opened; None where it stands alone, or where no file holds it."""
    return Path(plan.model_folder) if output == "adapter" and config.model.init == "pretrained" else None


def write_output(
    output: Output,
    folder: Path,
    model: nn.Module,
    plan: Plan,
    config: RunConfig,
    *,
    rank: int,
    reference_path: Path,
    card: Callable[..., str],
    replace: bool = False,
) -> None:
    """Writes ``folder`` with hashes for verification; rounds ``model`` in place for good. Collective."""
    dtype, source = choose_output_dtype(output, plan, config), Path(plan.model_folder)
    options: dict[str, Any] = {"asked": config.model, "reference_path": reference_path, "card": card}
    if output == "adapter":
        method = method_of(plan, config)
        base = name_base(config.model.name, plan.model_folder)
        options |= {"base_files": plan.model_files}
        export_adapter(folder, model, method, base, rank=rank, dtype=dtype, source=source, replace=replace, **options)
        return
    export_model(folder, model, source, dtype, rank=rank, merge=output == "merged", replace=replace, **options)
    if output == "model":
        round_weights(model, dtype)
