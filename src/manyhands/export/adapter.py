"""Writing an adapter in PEFT's format, by PEFT's names: adapter_model.safetensors and adapter_config.json. Collective."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from manyhands.checkpoint.tensors import reshard
from manyhands.checkpoint.together import run_on_first
from manyhands.config.schema import MethodSection
from manyhands.export.files import begin_folder, commit_folder
from manyhands.export.reference import Reference, describe_tensor
from manyhands.files import write_json
from manyhands.model.lora import adapted_layers, adapter_state

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def export_adapter(
    folder: Path,
    model: nn.Module,
    method: MethodSection,
    base_name: str,
    *,
    rank: int,
    dtype: str = "float32",
    revision: str | None = None,
    replace: bool = False,
    reference_path: Path | None = None,
) -> Reference | None:
    """Writes the adapter as ``folder``; the reference on rank 0, None elsewhere.

    ``base_name`` (hub name or folder) is what PEFT will load the base from. ``replace`` says that the caller owns what is
    there. UserError on every rank if the folder cannot be written.
    """
    saved_dtype = getattr(torch, dtype)
    reshard(model)
    state = adapter_state(model)

    def write() -> Reference:
        tensors = {name: tensor.detach().to(saved_dtype).cpu().contiguous() for name, tensor in state.items()}
        reference = Reference(kind="adapter", dtype=dtype, tensors={name: describe_tensor(t) for name, t in tensors.items()})
        partial = begin_folder(folder, replace=replace)
        if reference_path is not None:
            reference.write(reference_path)
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        write_json(partial / CONFIG, describe_adapter(model, method, base_name, revision))
        commit_folder(partial, folder)
        return reference

    return run_on_first(write)


def describe_adapter(model: nn.Module, method: MethodSection, base_name: str, revision: str | None = None) -> dict[str, Any]:
    """The fields of PEFT's LoraConfig (https://huggingface.co/docs/peft) that say how our factors are used."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "revision": revision,
        "inference_mode": True,
        "r": method.rank,
        "lora_alpha": int(method.alpha) if method.alpha == int(method.alpha) else method.alpha,
        "lora_dropout": method.dropout,
        "target_modules": name_targets(model),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def name_targets(model: nn.Module) -> list[str]:
    """PEFT's target_modules: last parts of names (``q_proj``) where these mean exactly our layers, else the full names.

    PEFT adapts a module whose name is a target or ends with ``.`` and a target.
    """
    adapted = set(adapted_layers(model))
    endings = sorted({name.rpartition(".")[2] for name in adapted})
    hit = {name for name, module in model.named_modules() if name.rpartition(".")[2] in endings}
    return endings if hit == adapted else sorted(adapted)
