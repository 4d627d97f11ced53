"""Build a model without memory, then fill it: from safetensors files, each rank reading only its slices, or from the seed.

The model is made on meta, may be sharded there, and is materialised once its parameters know where they live. Names and
shapes are compared before a weight is read. Must not know how parameters came to be sharded.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor

from manyhands.config.schema import RunConfig
from manyhands.errors import UserError
from manyhands.model.attention import IMPLEMENTATIONS, VARLEN, register_varlen
from manyhands.model.lora import LoraLinear, initialize_adapters
from manyhands.model.shards import fill_from, local, local_slices, named_seed
from manyhands.plan.types import Plan

# Attention dropout is 0.1 by default in a few families, and .train() turns it on: dropout comes from our config only.
DROPOUT_KEYS = ("attention_dropout", "attn_dropout", "attn_pdrop", "hidden_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout")
MARK = "_is_hf_initialized"  # transformers' initialisation passes tensors with this attribute by
OLD_BUFFERS = re.compile(r"rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")  # once saved, now computed


def build_meta(plan: Plan, config: RunConfig) -> nn.Module:
    """The Hugging Face model on meta, in training mode, every parameter in the dtype it will be kept in.

    That is ``plan.master_dtype`` for full training and ``plan.frozen_dtype`` for adapters, which ``apply_lora`` adds.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.conversion_mapping import get_model_conversion_mapping

    trust = config.model.trust_remote_code
    try:
        model_config = AutoConfig.from_pretrained(plan.model_folder, trust_remote_code=trust)
    except (ValueError, KeyError, OSError, ImportError) as error:
        code = "" if trust else "; if you trust the code that it brings, set model.trust_remote_code=true"
        raise UserError(
            "transformers cannot read the model's configuration",
            where=plan.model_folder,
            why=str(error),
            fix=f"use a model that the installed transformers knows{code}",
        ) from error
    for key in DROPOUT_KEYS:
        if getattr(model_config, key, None):
            setattr(model_config, key, 0.0)
    implementation = IMPLEMENTATIONS[plan.attention]
    if implementation == VARLEN:
        register_varlen()
    dtype = getattr(torch, plan.master_dtype if config.method.name == "full" else plan.frozen_dtype)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(model_config, dtype=dtype, attn_implementation=implementation, trust_remote_code=trust)
    if get_model_conversion_mapping(model, add_legacy=False):
        raise UserError(
            f"{type(model).__name__} cannot be trained yet.",
            where=plan.model_folder,
            why="Its files name or lay out weights in another way than the model does (merged experts, prefixes).",
            fix="Use a dense text model: Llama, Qwen3, Mistral, Gemma 3 text, ...",
        )
    return model.train()


def materialize(model: nn.Module, plan: Plan, config: RunConfig, device: torch.device) -> None:
    """Give a meta model memory on ``device`` and its weights; frozen parameters stay frozen.

    ``model`` is the Hugging Face model or the ``LossModel`` around it: whichever is the root of the sharding. Parameters
    may be DTensors. Raises ``UserError`` before reading if names or shapes in the files are not the model's.
    """
    inner = hugging_face_model(model)
    files = index_files(Path(plan.model_folder)) if config.model.init == "pretrained" else {}
    names = match_names(inner, files, plan.model_folder) if files else {}
    model.to_empty(device=device)
    inner.tie_weights()  # a plain to_empty unties
    rebuild_buffers(inner)
    if config.model.init == "pretrained":
        read_weights(inner, files, names)
    else:
        initialize_randomly(inner, config.seed)
    initialize_adapters(inner, config.seed)


def hugging_face_model(model: Any) -> Any:
    """The transformers model itself, or the one inside a wrapper that calls it ``model``."""
    from transformers import PreTrainedModel

    inner = model if isinstance(model, PreTrainedModel) else model.model
    assert isinstance(inner, PreTrainedModel)
    return inner


@torch.no_grad()
def rebuild_buffers(model: Any) -> None:
    """Compute buffers that no file holds (rotary frequencies, embedding scales) by the family's own initialisation.

    The parameters beside them are marked, transformers' own way to leave them alone.
    """
    for module in model.modules():
        if module._non_persistent_buffers_set:
            parameters = list(module.parameters(recurse=False))
            for parameter in parameters:
                setattr(parameter, MARK, True)
            model._init_weights(module)
            for parameter in parameters:
                delattr(parameter, MARK)


# ---- pretrained ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies and what the file's header says of it."""

    file: Path
    shape: tuple[int, ...]


def index_files(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a model folder by name, from the headers alone."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        paths = [folder / file for file in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    else:
        paths = [folder / "model.safetensors"]
    missing = [str(path.name) for path in paths if not path.is_file()]
    if missing:
        raise UserError(
            "The model's weights are not all there.",
            where=str(folder),
            fix="Download the model again, or set model.init=random to start from new weights.",
            details=missing[:20],
        )
    stored = {}
    for path in paths:
        with open_weights(path) as file:
            for name in file.keys():  # noqa: SIM118  (the file has no iterator)
                stored[name] = StoredTensor(path, tuple(file.get_slice(name).get_shape()))
    return stored


@contextmanager
def open_weights(path: Path) -> Iterator[safe_open]:
    """A safetensors file, closed again at the end: its mapped pages would count as this process's memory."""
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except SafetensorError as error:
        raise UserError("A weights file cannot be read.", where=str(path), why=str(error), fix="Download the model again.") from error


def match_names(model: nn.Module, stored: dict[str, StoredTensor], folder: str) -> dict[str, torch.Tensor]:
    """The tensors to fill, by their names in the files. A tied tensor is read once, under whichever of its names is stored.

    Raises ``UserError`` that lists everything missing, unexpected or of another shape.
    """
    adapters = tuple(f"{name}.lora_{side}.weight" for name, m in model.named_modules() if isinstance(m, LoraLinear) for side in "AB")
    wanted = {name: t for name, t in model.state_dict(keep_vars=True).items() if name not in adapters}
    # on meta, tied parameters are one object; a wrong tie would show as a shape or as a missing name
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        by_tensor.setdefault(id(tensor), []).append(name)
    ignored = [re.compile(p) for p in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()] + [OLD_BUFFERS]
    chosen: dict[str, torch.Tensor] = {}
    wrong: list[str] = []
    for names in by_tensor.values():
        present = [name for name in names if name in stored]
        if present:
            chosen |= {name: wanted[name] for name in present}
        else:
            wrong.append(f"missing: {names[0]}")
    wrong += [f"unexpected: {name}" for name in stored if name not in wanted and not any(p.search(name) for p in ignored)]
    for name, tensor in chosen.items():
        if tuple(tensor.shape) != stored[name].shape:
            wrong.append(f"shape of {name}: {stored[name].shape} in the file, {tuple(tensor.shape)} by config.json")
    if wrong:
        raise UserError(
            f"The weights do not fit {type(model).__name__}: {len(wrong)} tensors disagree.",
            where=folder,
            why="config.json and the safetensors files belong to different models, or a download is incomplete.",
            fix="Take both from the same model; nothing was loaded.",
            details=sorted(wrong)[:20],
        )
    return chosen


@torch.no_grad()
def read_weights(model: nn.Module, stored: dict[str, StoredTensor], names: dict[str, torch.Tensor]) -> None:
    """Copy this rank's slice of every stored tensor into the model, file by file, cast to the parameter's dtype."""
    targets = model.state_dict(keep_vars=True)
    filled: set[int] = set()
    for path in sorted({stored[name].file for name in names}):
        with open_weights(path) as file:
            for name in (name for name in names if stored[name].file == path):
                target = targets[name]
                if local(target.detach()).numel() == 0 and isinstance(target, DTensor):
                    continue  # more ranks than rows
                view = file.get_slice(name)
                part = view[local_slices(target)] if stored[name].shape else file.get_tensor(name)
                if id(target) not in filled:
                    local(target.detach()).copy_(part)
                    filled.add(id(target))
                elif not torch.equal(local(target.detach()), part.to(target.device, target.dtype)):
                    raise UserError(
                        f"{name} is tied to another weight by config.json, but the files hold two different ones.",
                        where=str(path),
                        fix="Set tie_word_embeddings to false in the model's config.json.",
                    )


# ---- random --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def initialize_randomly(model: Any, seed: int) -> None:
    """New weights by the family's own rule, drawn from (seed, name): the same for any sharding and number of processes.

    One module's parameters at a time are made whole on the device they live on, initialised and cut to this rank's part.
    (CPU and GPU draw different numbers from one seed.)
    """
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = {key: p for key, p in module._parameters.items() if p is not None and id(p) not in seen}
        if not own or ".lora_" in name:
            continue
        seen |= {id(p) for p in own.values()}
        whole = {key: nn.Parameter(torch.zeros(p.shape, dtype=p.dtype, device=p.device), requires_grad=False) for key, p in own.items()}
        stand_in = copy.copy(module)
        stand_in._parameters = dict(module._parameters) | whole
        stand_in._non_persistent_buffers_set = set()
        device = next(iter(whole.values())).device
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(named_seed(seed, name))
            model._init_weights(stand_in)
        for key, parameter in own.items():
            fill_from(parameter, whole[key])
