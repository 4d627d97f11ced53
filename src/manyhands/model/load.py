"""Build a model without memory, then fill it: from safetensors files, each rank reading only its slices, or from the
seed.

The model is made on meta, may be sharded there, and is materialised once its parameters know where they live. Names and
shapes are compared before a weight is read. Must not know how parameters came to be sharded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands.config.schema import RunConfig
from manyhands.convert.adapter import added_parameters
from manyhands.convert.new_tokens import ROWS
from manyhands.convert.nf4 import Nf4Linear
from manyhands.convert.quantize import STORED, nf4_weights, stored_names
from manyhands.core.errors import UserError
from manyhands.core.holding import fill_from, local, local_part, local_slices
from manyhands.core.progress import advance
from manyhands.core.seeds import named_seed
from manyhands.facts.model import shares_head
from manyhands.facts.types import NewTokens
from manyhands.model.attention import IMPLEMENTATIONS, register_attention
from manyhands.model.resize_embeddings import read_resized, rows_by_token
from manyhands.model.source import Checkpoint, needs_conversion, open_weights, read_checkpoint, read_converted
from manyhands.model.structure import auto_class, is_multimodal
from manyhands.plan.types import Plan

ADDED = (ROWS, "lora_magnitude_vector")  # filled with the adapters
MARK = "_is_hf_initialized"  # transformers' initialisation passes tensors with this attribute by


def build_meta(plan: Plan, config: RunConfig, say: Callable[[str], object] = lambda _: None) -> nn.Module:
    """The Hugging Face model on meta, in training mode, every parameter in the dtype it will be kept in.

    That is ``plan.layout.master_dtype`` for full training and ``plan.layout.frozen_dtype`` where weights stay frozen. What changes the
    model after that are the plan's converters.
    """
    from transformers import AutoConfig

    trust = config.model.trust_remote_code
    try:
        model_config = AutoConfig.from_pretrained(plan.model_folder, trust_remote_code=trust)
    except Exception as error:  # whatever config.json holds: transformers raises many kinds
        code = "" if trust else "; if you trust the code that it brings, set model.trust_remote_code=true"
        raise UserError(
            "transformers cannot read the model's configuration",
            where=plan.model_folder,
            why=str(error) or type(error).__name__,
            fix=f"use a model that the installed transformers knows{code}",
        ) from error
    if silenced := silence_dropout(model_config):
        say(f"dropout of the model's own is off: {', '.join(silenced)}; what is asked for is method.dropout")
    if plan.new_tokens is not None:
        model_config.get_text_config().vocab_size = plan.new_tokens.vocab_size
    if config.model.init == "pretrained":
        untie_as_stored(model_config, Path(plan.model_folder))
    implementation = IMPLEMENTATIONS[plan.attention]
    register_attention()
    dtype = getattr(torch, plan.layout.master_dtype if config.method.name == "full" else plan.layout.frozen_dtype)
    try:
        with torch.device("meta"):
            opener = auto_class(model_config)
            model = opener.from_config(
                model_config, dtype=dtype, attn_implementation=implementation, trust_remote_code=trust
            )
    except Exception as error:  # as above
        raise UserError(
            f"transformers cannot build a language model of {model_config.model_type}",
            where=plan.model_folder,
            why=(str(error).strip().splitlines() or [""])[0].split(". ")[0] or type(error).__name__,
            fix="use a model that transformers' AutoModelForCausalLM or AutoModelForMultimodalLM opens",
        ) from error
    if config.model.init == "pretrained" and needs_conversion(model):
        say(
            "weights are laid out anew while they are read, by transformers' rules: every rank reads these whole, one group at a time"
        )
    return model.train()


def silence_dropout(model_config: Any) -> list[str]:
    """Set every dropout of a transformers config to 0, in place; returns what was on, such as
    ``attention_dropout=0.1``.

    A few families have some by default, and ``.train()`` turns it on: dropout comes from our config only.
    """
    text, found = model_config.get_text_config(), []
    for part in (model_config,) if text is model_config else (model_config, text):
        on = {
            key: value
            for key, value in part.to_dict().items()
            if ("drop" in key) and isinstance(value, float) and value > 0
        }
        for key in on:
            setattr(part, key, 0.0)
        found += [f"{key}={value:g}" for key, value in on.items()]
    return found


def untie_as_stored(model_config: Any, folder: Path) -> None:
    """Untie a multimodal model's head, in place, where the files hold one that is not its embeddings: so transformers
    loads it too.

    Parts of published configurations contradict each other, and what they leave out is tied by some families' default.
    """
    if not is_multimodal(model_config) or not getattr(model_config, "tie_word_embeddings", False):
        return
    if not shares_head(folder, {"model_type": model_config.model_type, "tie_word_embeddings": True}):
        model_config.tie_word_embeddings = False


def materialize(model: nn.Module, plan: Plan, config: RunConfig, device: torch.device) -> None:
    """Give a meta model memory on ``device`` and its weights; what no file holds is left for converters to fill.

    ``model`` is the Hugging Face model or the ``LossModel`` around it: whichever is the root of the sharding.
    Parameters may be held in parts (``core/holding.py``). Raises ``UserError`` before reading if names or shapes in the files are not the model's.
    """
    inner = hugging_face_model(model)
    pretrained = config.model.init == "pretrained"
    checkpoint = match_checkpoint(inner, plan.model_folder, plan.new_tokens) if pretrained else None
    model.to_empty(device=device)
    inner.tie_weights()  # a plain to_empty unties
    rebuild_buffers(inner)
    if checkpoint is not None:
        read_weights(inner, checkpoint, plan.new_tokens)
    else:
        initialize_randomly(inner, config.seed)


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
    for _, module, owner in with_owners(model):
        if module._non_persistent_buffers_set:
            parameters = list(module.parameters(recurse=False))
            for parameter in parameters:
                setattr(parameter, MARK, True)
            owner._init_weights(module)
            for parameter in parameters:
                delattr(parameter, MARK)


def with_owners(model: Any) -> Iterator[tuple[str, nn.Module, Any]]:
    """Every module by name, with the innermost transformers model around it: a text decoder within another has a rule
    of its own.
    """
    from transformers import PreTrainedModel

    owners: dict[str, Any] = {}
    for name, module in model.named_modules():
        owners[name] = module if isinstance(module, PreTrainedModel) else owners[name.rpartition(".")[0]]
        yield name, module, owners[name]


# ---- pretrained ----------------------------------------------------------------------------------------------------------


def loaded_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What files hold of a model, by its names: parameters and persistent buffers, without what adapters added.

    A weight in NF4 stands on meta under its own name; tied tensors stand under each of theirs.
    """
    left = stored_names(model).union(added_parameters(model))
    found = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in left}
    for name, layer in nf4_weights(model).items():
        found[name] = torch.empty(layer.out_features, layer.in_features, device="meta")
    return found


def match_checkpoint(model: nn.Module, folder: str, new_tokens: NewTokens | None = None) -> Checkpoint:
    """Where each tensor of the model lies. A tied one is read under whichever of its names is stored.

    With ``new_tokens`` embeddings and head may have more rows than the files. Raises ``UserError`` that lists
    everything missing, unexpected or of another shape.
    """
    wanted = loaded_tensors(model)
    checkpoint = read_checkpoint(model, wanted, folder)
    shapes = checkpoint.shapes
    # on meta, tied parameters are one object; a wrong tie would show as a shape or as a missing name
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        by_tensor.setdefault(id(tensor), []).append(name)
    wrong = [f"missing: {names[0]}" for names in by_tensor.values() if not shapes.keys() & set(names)]
    wrong += [f"unexpected: {name}" for name in (*checkpoint.unexpected, *(shapes.keys() - wanted.keys()))]
    growing = rows_by_token(model) if new_tokens is not None else set()
    for name in shapes.keys() & wanted.keys():
        stored, needed = shapes[name], tuple(wanted[name].shape)
        if stored != needed and not (name in growing and stored[1:] == needed[1:] and stored[0] < needed[0]):
            wrong.append(f"shape of {name}: {stored} in the file, {needed} by config.json")
    if wrong:
        raise UserError(
            f"The weights do not fit {type(model).__name__}: {len(wrong)} tensors disagree.",
            where=folder,
            why="config.json and the safetensors files belong to different models, or a download is incomplete.",
            fix="Take both from the same model; nothing was loaded.",
            details=sorted(wrong)[:20],
        )
    return checkpoint


@torch.no_grad()
def read_weights(model: nn.Module, checkpoint: Checkpoint, new_tokens: NewTokens | None = None) -> None:
    """Copy this rank's slice of every stored tensor into the model, file by file, cast to the parameter's dtype.

    What transformers converts is read whole, one conversion at a time. Weights in NF4 are quantised one after the
    other, by all ranks together: a rank holds its slice of one of them at a time.
    """
    filling = _Filling(model, new_tokens)
    for path in sorted({stored.file for stored in checkpoint.plain.values()}):
        with open_weights(path) as file:
            for name, stored in checkpoint.plain.items():
                if stored.file == path:
                    filling.fill(name, file.get_slice(stored.name) if stored.shape else file.get_tensor(stored.name))
    for conversion in checkpoint.conversions:
        for name, tensor in read_converted(model, conversion).items():
            filling.fill(name, tensor)


class _Filling:
    """Fills a model's tensors by name from whatever can be sliced: a safetensors slice, or a whole tensor."""

    def __init__(self, model: nn.Module, new_tokens: NewTokens | None) -> None:
        self.targets, self.quantised, self.new_tokens = (
            model.state_dict(keep_vars=True),
            nf4_weights(model),
            new_tokens,
        )
        self.growing = rows_by_token(model) if new_tokens is not None else set()
        self.filled: set[int] = set()

    def fill(self, name: str, stored: Any) -> None:
        self._fill(name, stored)
        advance()

    def _fill(self, name: str, stored: Any) -> None:
        if name in self.quantised:
            self.quantised[name].fill(stored)
            return
        target = self.targets[name]
        own = local(target)
        if target.dim() and own.numel() == 0:
            return  # more ranks than rows
        if self.new_tokens is not None and name in self.growing:
            part = read_resized(stored, local_slices(target), self.new_tokens)
        else:
            part = local_part(target, stored)
        if id(target) not in self.filled:
            own.copy_(part)
            self.filled.add(id(target))
        elif not torch.equal(own, part.to(own.device, own.dtype)):
            raise UserError(
                f"{name} is tied to another weight by config.json, but the files hold two different ones.",
                fix="Set tie_word_embeddings to false in the model's config.json.",
            )


# ---- random --------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def initialize_randomly(model: Any, seed: int) -> None:
    """New weights by the family's own rule, drawn from (seed, name): the same for any sharding and number of processes.

    One module's parameters at a time are made whole on the device they live on, initialised and cut to this rank's
    part. (CPU and GPU draw different numbers from one seed.)
    """
    seen: set[int] = set()
    for name, module, owner in with_owners(model):
        own = {
            key: p for key, p in module._parameters.items() if p is not None and id(p) not in seen and key not in ADDED
        }
        if not own or ".lora_" in name:
            continue
        seen |= {id(p) for p in own.values()}
        stand_in = draw_module(name, module, owner, own, seed)
        for key in own.keys() - set(STORED):
            fill_from(own[key], stand_in.get_parameter(key))
        if isinstance(module, Nf4Linear):
            module.fill(stand_in.get_parameter("weight"))
        advance()


def draw_module(name: str, module: nn.Module, owner: Any, own: Mapping[str, torch.Tensor], seed: int) -> nn.Module:
    """``module`` alone, its ``own`` parameters new and whole, by its ``owner``'s rule; of a layer in NF4, the plain
    linear layer.
    """
    stand_in = _make_whole(module, own)
    device = next(stand_in.parameters(recurse=False)).device
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(named_seed(seed, name))
        owner._init_weights(stand_in)
    return stand_in


def _make_whole(module: nn.Module, own: Mapping[str, torch.Tensor]) -> nn.Module:
    """A copy of ``module`` alone whose ``own`` parameters are whole and zero; of a layer in NF4, the plain linear
    layer.
    """

    def zeros(shape: tuple[int, ...], like: torch.Tensor) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape, dtype=like.dtype, device=like.device), requires_grad=False)

    whole = {key: zeros(p.shape, p) for key, p in own.items() if key not in STORED}
    if isinstance(module, Nf4Linear):
        stand_in: nn.Module = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
        whole["weight"] = zeros((module.out_features, module.in_features), module.weight_codes)
    else:
        stand_in = copy.copy(module)
        stand_in._parameters = dict(module._parameters)
    stand_in._parameters.update(whole)
    stand_in._non_persistent_buffers_set = set()
    return stand_in
