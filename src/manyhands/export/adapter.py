"""Writes an adapter in PEFT's format and names: adapter_model.safetensors, adapter_config.json. Collective."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands.config.schema import MethodSection, ModelSection
from manyhands.convert.adapter import (
    PEFT_PREFIX,
    adapter_parameters,
    adapter_state,
    second_names,
    tied_names,
    whole_parts,
)
from manyhands.convert.lora import adapted_layers
from manyhands.convert.new_tokens import token_indices
from manyhands.convert.trainable import fully_trained_modules
from manyhands.core.collective_errors import run_on_rank_0
from manyhands.core.files import write_atomically, write_json
from manyhands.core.holding import reshard
from manyhands.export.card import changes_tokenizer, name_on_hub
from manyhands.export.files import begin_folder, commit_folder, write_tensors, write_tokenizer
from manyhands.export.record import CARD
from manyhands.export.reference import Reference, describe_tensor
from manyhands.export.tensors import narrow, refuse_beyond
from manyhands.facts.adapter import (
    BASE_FILES,
    BESIDE_NF4,
    CONFIG,
    EXPERTS_SINCE,
    QUANTIZED_BASE,
    WEIGHTS,
    nf4_options,
)
from manyhands.facts.experts import vllm_reads
from manyhands.model.structure import inside, left_out, text_modules
from manyhands.model.weights import quantized_layers, stacked_layers


def export_adapter(
    folder: Path,
    model: nn.Module,
    method: MethodSection,
    base_name: str,
    *,
    rank: int,
    dtype: str = "float32",
    source: Path | None = None,
    asked: ModelSection | None = None,
    replace: bool = False,
    reference_path: Path | None = None,
    card: Callable[..., str] | None = None,
    base_files: Mapping[str, str] | None = None,
) -> Reference | None:
    """Writes the adapter as ``folder``; the reference on rank 0, None elsewhere.

    ``base_name`` (hub name or folder) is what PEFT will load the base from. ``source`` is the base's folder; its
    tokenizer goes with the adapter where ``asked`` changes it. ``replace`` says that the caller owns what is there.
    ``card(vllm_misreads=...)`` makes the model card's text, on rank 0. ``base_files``: SHA-256 of the base's files,
    which the weights carry. UserError on every rank if the folder cannot be written.
    """
    saved_dtype = getattr(torch, dtype)
    reshard(model)
    state = adapter_state(model)

    def write() -> Reference:
        beyond: dict[str, float] = {}
        tensors = {
            name: narrow(name, tensor.detach(), saved_dtype, beyond).cpu().contiguous()
            for name, tensor in state.items()
        }
        refuse_beyond(beyond, saved_dtype, str(folder))
        tensors |= {name: tensors[first].clone() for name, first in tied_names(model).items()}
        seconds = second_names(model, tensors)
        tensors |= {name: tensors[first].clone() for name, first in seconds.items()}
        described = {name: describe_tensor(tensor) for name, tensor in tensors.items()}
        partial = begin_folder(folder, replace=replace)
        own = asked is not None and changes_tokenizer(asked)
        tokens = write_tokenizer(source, partial, asked) if own and source is not None else {}
        storages = [layer.storage for layer in quantized_layers(model).values()]
        reference = Reference(
            kind="adapter",
            dtype=dtype,
            tensors=described,
            base=storages[0] if storages else "unquantized",
            tokens=tokens,
            seconds=tuple(seconds),
        )
        if reference_path is not None:
            reference.write(reference_path)
        metadata = dict(QUANTIZED_BASE[method.double_quant] if method.name == "qlora" else {})
        metadata |= {BASE_FILES: json.dumps(dict(base_files))} if base_files else {}
        write_tensors(partial / WEIGHTS, tensors, metadata | (BESIDE_NF4 if method.init == "loftq" else {}))
        _sort_metadata(partial / WEIGHTS)
        config = describe_adapter(model, method, base_name, asked.revision if asked else None)
        write_json(partial / CONFIG, config)
        if card is not None:
            misread = not vllm_reads(getattr(model.config, "model_type", ""), config["target_parameters"] or ())
            write_atomically(partial / CARD, card(vllm_misreads=misread))
        commit_folder(partial, folder)
        return reference

    return run_on_rank_0(write)


def _sort_metadata(path: Path) -> None:
    """Sort a file's metadata by name: safetensors has a hash map, so equal weights would differ in bytes."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > size:
            raise ValueError(f"{path}: the header does not fit")
        file.seek(8)
        file.write(text.ljust(size))  # the format pads a header with spaces


def describe_adapter(
    model: nn.Module, method: MethodSection, base_name: str, revision: str | None = None
) -> dict[str, Any]:
    """The fields of PEFT's LoraConfig (https://huggingface.co/docs/peft) that say how our factors are used."""
    saved, parameters = name_saved(model), name_target_parameters(model)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "revision": revision,
        "inference_mode": True,
        "r": method.rank,
        "lora_alpha": int(method.alpha) if method.alpha == int(method.alpha) else method.alpha,
        "lora_dropout": 0.0 if parameters else method.dropout,  # PEFT has none beside target_parameters
        "target_modules": name_targets(model),
        "target_parameters": parameters or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "auto_mapping": _describe_base(model, method) if method.name == "qlora" else None,
        "modules_to_save": saved or None,
        "ensure_weight_tying": bool(tied_names(model)),  # PEFT would untie them unless told
        "trainable_token_indices": {name: list(ids) for name, ids in token_indices(model).items()} or None,
        "use_dora": method.dora,
        "use_rslora": method.rslora,
        "rank_pattern": {},
        "alpha_pattern": {},
    } | ({"peft_version": EXPERTS_SINCE} if parameters else {})


def _describe_base(model: nn.Module, method: MethodSection) -> dict[str, Any]:
    """PEFT's auto_mapping, which helps to open the base: its class, and here the 4 bits that it is to be opened in."""
    own = next(kind for kind in type(model).__mro__ if not kind.__name__.startswith("FSDP"))
    options = nf4_options(double_quant=method.double_quant)
    return {"base_model_class": own.__name__, "parent_library": own.__module__, "base_quantization": options}


def name_base(name: str, model_folder: str) -> str:
    """The base in adapter_config.json: the hub name, or the absolute path of a folder."""
    return name if name_on_hub(name, model_folder) == name else model_folder


def name_saved(model: nn.Module) -> list[str]:
    """PEFT's modules_to_save: full names of modules with a weight trained whole; the embedding of a tied pair."""
    names = (name.removeprefix(PEFT_PREFIX).rpartition(".")[0] for name in adapter_parameters(model))
    parts, whole = whole_parts(model), fully_trained_modules(model)
    return [*dict.fromkeys(name for name in names if name in whole and not inside(name, parts)), *parts]


def name_targets(model: nn.Module) -> list[str]:
    """PEFT's target_modules: last parts of names (``q_proj``) where these mean exactly our layers, else the full names.

    PEFT adapts a module whose name is a target or ends with ``.`` and a target; in a multimodal model towers have some
    too.
    """
    adapted = set(adapted_layers(model)) - set(_by_parameter(model))
    if left_out(model) or text_modules(model) is not None:
        return sorted(adapted)
    endings = sorted({name.rpartition(".")[2] for name in adapted})
    hit = {name for name, module in model.named_modules() if name.rpartition(".")[2] in endings}
    return endings if hit == adapted else sorted(adapted)


def name_target_parameters(model: nn.Module) -> list[str]:
    """PEFT's target_parameters, by the last parts of names where these mean exactly our layers, else by full names.

    They are stacks of experts, and beside experts every other layer of an MLP too: in some families PEFT takes a target
    module with such a name for the routed experts, and drops what it has of others.
    """
    adapted, stacks = _by_parameter(model), stacked_layers(model)
    hit = {
        f"{name}.weight" if isinstance(module, nn.Linear) and name not in stacks else name
        for name, module in model.named_modules()
    }
    endings = {".".join(name.split(".")[-3 if name.endswith(".weight") else -2 :]) for name in adapted.values()}
    reached = {name for name in hit if any(name.endswith(f".{ending}") for ending in endings)}
    return sorted(endings if reached == set(adapted.values()) else adapted.values())


def _by_parameter(model: nn.Module) -> dict[str, str]:
    """The adapted layers that PEFT has as parameters, by name, and the parameters' names."""
    stacks = stacked_layers(model)
    return {
        name: name if name in stacks else f"{name}.weight"
        for name in adapted_layers(model)
        if stacks and (name in stacks or name.endswith(("gate_proj", "up_proj", "down_proj")))
    }
