"""Build a model without memory, then fill it: from safetensors files, each rank reading only its slices, or from the
seed.

The model is made on meta, may be changed and sharded there, and is materialized once its parameters know where they are
held. Names and shapes are compared before a weight is read. Must not know how parameters came to be sharded, nor which
features changed the model: a changed layer says itself what loading has to know of it (``QuantizedLayer``,
``UNSTORED``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands import families
from manyhands.config.schema import RunConfig
from manyhands.core.errors import UserError
from manyhands.core.holding import fill_from, full_shape, local, local_part
from manyhands.core.progress import advance
from manyhands.core.seeds import named_seed
from manyhands.facts.model import shares_head
from manyhands.facts.stored_mxfp4 import StoredMxfp4
from manyhands.facts.types import NewTokens
from manyhands.kernels.mxfp4.reference import dequantize_reference
from manyhands.model.attention import register_attention
from manyhands.model.multimodal import choose_attention, takes_images
from manyhands.model.resize_embeddings import Resized, rows_by_token
from manyhands.model.source import (
    Checkpoint,
    needs_conversion,
    open_parts,
    open_weights,
    read_checkpoint,
    read_converted,
)
from manyhands.model.structure import auto_class, find_experts, hugging_face_model, is_multimodal
from manyhands.model.weights import (
    QuantizedLayer,
    StackedLayer,
    StackedRows,
    quantized_layers,
    stacked_layers,
    stored_shape,
)
from manyhands.planner.types import Plan

MARK = "_is_hf_initialized"  # transformers' initialization skips tensors with this attribute
UNSTORED = "unstored_parameters"
"""The attribute by which a module names parameters, its own or its children's, that no file of the model holds. They
are left alone here; whoever added them fills them once the weights are there."""


def build_meta(plan: Plan, config: RunConfig, report: Callable[[str], object] = lambda _: None) -> nn.Module:
    """The Hugging Face model on meta, in training mode, every parameter in the dtype it will be kept in.

    That is ``master_dtype`` of the plan's layout for full training and its ``frozen_dtype`` where weights stay frozen.
    What changes the model after that are the plan's converters.
    """
    layout, model_config = plan.layout, read_transformers_config(plan, config)
    whole = config.method.name == "full" and (layout.trains_everything or not takes_images(plan))
    if disabled := disable_dropout(model_config, towers=takes_images(plan)):
        other = "; set method.dropout to train with dropout" if config.method.trains_adapters else ""
        report(f"the model's own dropout is off: {', '.join(disabled)}{other}")
    if plan.new_tokens is not None:
        model_config.get_text_config().vocab_size = plan.new_tokens.vocab_size
    if config.model.init == "pretrained":
        untie_as_stored(model_config, Path(plan.model_folder))
    register_attention()
    try:
        with torch.device("meta"):
            model = auto_class(model_config).from_config(
                model_config,
                dtype=getattr(torch, layout.master_dtype if whole else layout.frozen_dtype),
                attn_implementation=choose_attention(plan, model_config),
                trust_remote_code=config.model.trust_remote_code,
            )
    except Exception as error:  # whatever config.json holds: transformers raises many kinds
        raise UserError(
            f"transformers cannot build a language model of {model_config.model_type}",
            where=plan.model_folder,
            why=(str(error).strip().splitlines() or [""])[0].split(". ")[0] or type(error).__name__,
            fix="use a model that transformers' AutoModelForCausalLM or AutoModelForMultimodalLM opens",
        ) from error
    if config.model.init == "pretrained" and needs_conversion(model) and not find_experts(model):
        report(
            "weights are converted while they are loaded, by transformers' rules:"
            " every rank reads those in full, one group at a time"
        )
    return model.train()


def read_transformers_config(plan: Plan, config: RunConfig) -> Any:
    """The transformers config of the plan's model. UserError where transformers cannot read it."""
    from transformers import AutoConfig

    trust = config.model.trust_remote_code
    try:
        return AutoConfig.from_pretrained(plan.model_folder, trust_remote_code=trust)
    except Exception as error:  # whatever config.json holds: transformers raises many kinds
        code = "" if trust else "; if you trust the code that it brings, set model.trust_remote_code=true"
        raise UserError(
            "transformers cannot read the model's configuration",
            where=plan.model_folder,
            why=str(error) or type(error).__name__,
            fix=f"use a model that the installed transformers knows{code}",
        ) from error


def disable_dropout(model_config: Any, *, towers: bool = False) -> list[str]:
    """Set every dropout of a config to 0, in place; returns what was on, such as ``attention_dropout=0.1``.

    A few families have some by default, and ``.train()`` turns it on: dropout comes from our config only. ``towers``:
    of the vision tower too.
    """
    text, found = model_config.get_text_config(), []
    vision = getattr(model_config, "vision_config", None) if towers else None
    parts = {id(part): part for part in (model_config, text, vision) if part is not None}
    for part in parts.values():
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


def materialize(
    model: nn.Module,
    plan: Plan,
    config: RunConfig,
    device: torch.device,
    draw_on: torch.device | None = None,
) -> None:
    """Give a meta model memory on ``device`` and its weights; what no file holds is left for converters to fill.
    ``draw_on``: where random weights are drawn, if not there.

    ``model`` is the Hugging Face model or the ``LossModel`` around it: whichever is the root of the sharding.
    Parameters may be held in parts (``core/holding.py``). Raises ``UserError`` before reading if names or shapes in
    the files are not the model's.
    """
    inner = hugging_face_model(model)
    pretrained = config.model.init == "pretrained"
    checkpoint = match_checkpoint(inner, plan.model_folder, plan.new_tokens) if pretrained else None
    if any(parameter.is_meta for parameter in model.parameters()):  # else the engine has given them memory
        model.to_empty(device=device)
        inner.tie_weights()  # a plain to_empty unties
    rebuild_buffers(inner)
    if checkpoint is not None:
        read_weights(inner, checkpoint, plan.new_tokens)
    else:
        initialize_randomly(inner, config.seed, draw_on or device)


@torch.no_grad()
def rebuild_buffers(model: Any) -> None:
    """Compute buffers that no file holds (rotary frequencies, embedding scales) by the family's own initialization.

    Hybrids fill the buffers of their blocks by the rule of the decoder around them. All parameters are marked,
    transformers' own way to leave them alone.
    """
    is_hybrid = bool(families.find(model.config.get_text_config().model_type).mixers)
    for _, module, owner in with_owners(model):
        if module._non_persistent_buffers_set or (is_hybrid and module is owner):
            parameters = list(module.parameters(recurse=module is owner))
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


# ---- pretrained ------------------------------------------------------------------------------------------------------


def loaded_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What files hold of a model, by its names: parameters and persistent buffers, without what converters added.

    A weight held in another form is there on meta under its own name; tied tensors are there under each of theirs.
    """
    layers = quantized_layers(model)
    left = unstored_parameters(model).union(
        f"{name}.{piece}" for name, x in layers.items() for piece in x.weight_pieces
    )
    found = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in left}
    for name, layer in layers.items():
        found[f"{name}.weight"] = torch.empty(layer.out_features, layer.in_features, device="meta")
    for name, stack in stacked_layers(model).items():
        del found[f"{name}.weight"]
        found[name] = torch.empty(stored_shape(stack), device="meta")
    return found


def unstored_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters that modules say are in no file, and that the model has."""
    named = {f"{name}.{key}" for name, module in model.named_modules() for key in getattr(module, UNSTORED, ())}
    return named & {name for name, _ in model.named_parameters(remove_duplicate=False)}


def match_checkpoint(model: nn.Module, folder: str, new_tokens: NewTokens | None = None) -> Checkpoint:
    """Where each tensor of the model lies. A tied one is read under whichever of its names is stored.

    With ``new_tokens`` embeddings and head may have more rows than the files. Raises ``UserError`` that lists
    everything missing, unexpected or of another shape.
    """
    checkpoint = read_checkpoint(model, loaded_tensors(model), folder)
    shapes = checkpoint.shapes
    for name, stack in stacked_layers(model).items():  # some families' files have either order of axes
        groups, size, inner = stored_shape(stack)
        if size != inner and shapes.get(name) == (groups, inner, size):
            stack.stored_transposed = not stack.stored_transposed
    wanted = loaded_tensors(model)
    # on meta, tied parameters are one object; a wrong tie would show as a shape or as a missing name
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        by_tensor.setdefault(id(tensor), []).append(name)
    wrong = [f"missing: {names[0]}" for names in by_tensor.values() if not shapes.keys() & set(names)]
    wrong += [f"unexpected: {name}" for name in (*checkpoint.unexpected, *(shapes.keys() - wanted.keys()))]
    growing = rows_by_token(model) if new_tokens is not None else set()
    for name in shapes.keys() & wanted.keys():
        stored, needed = shapes[name], full_shape(wanted[name])
        if stored != needed and not (name in growing and stored[1:] == needed[1:] and stored[0] < needed[0]):
            wrong.append(f"shape of {name}: {stored} in the file, {needed} by config.json")
    if wrong:
        raise UserError(
            f"the weights do not fit {type(model).__name__}: {len(wrong)} tensors disagree",
            where=folder,
            why="config.json and the safetensors files belong to different models, or a download is incomplete",
            fix="take both from the same model; nothing was loaded",
            details=sorted(wrong)[:20],
        )
    return checkpoint


@torch.no_grad()
def read_weights(model: nn.Module, checkpoint: Checkpoint, new_tokens: NewTokens | None = None) -> None:
    """Copy this rank's slice of every stored tensor, file by file, cast to the parameter's dtype.

    What transformers converts is read in full, one conversion at a time, but for weights of a stack. Layers that fill
    themselves do so one after the other, on all ranks together: a rank holds its slice of one weight at a time.
    """
    filling = _Filling(model, new_tokens)
    for path in sorted({stored.file for stored in checkpoint.plain.values()}):
        with open_weights(path) as file:
            for name, stored in checkpoint.plain.items():
                if stored.file == path and stored.quantized is not None:
                    filling.fill(name, stored.quantized)
                elif stored.file == path:
                    filling.fill(name, file.get_slice(stored.name) if stored.shape else file.get_tensor(stored.name))
    for conversion in checkpoint.conversions:
        pieces = conversion.pieces if conversion.name in filling.stacks else ()
        if not pieces:
            for name, tensor in read_converted(model, conversion).items():
                filling.fill(name, tensor)
            continue
        with open_parts(pieces) as files:
            filling.fill(
                conversion.name,
                StackedRows((part.shape[0], partial(_read_part, files[part.file], part.name)) for part in pieces),
            )


def _read_part(file: Any, name: str, rows: slice, columns: slice) -> torch.Tensor:
    advance()
    part: torch.Tensor = file.get_slice(name)[rows, columns]
    return part


def _dequantized_rows(stored: StoredMxfp4, files: ExitStack) -> StackedRows:
    """The weight (g o, i) in the dtype that transformers makes of it; ``files`` keeps them open."""
    blocks, scales = (
        files.enter_context(open_weights(path)).get_slice(name)
        for path, name in (stored.pieces["blocks"], stored.pieces["scales"])
    )
    groups, inner, size = stored.shape

    def read(expert: int, rows: slice, columns: slice) -> torch.Tensor:
        advance()
        own_blocks, own_scales = (each[expert : expert + 1, rows][0] for each in (blocks, scales))
        shape = (len(own_scales), inner)
        return dequantize_reference(own_blocks.flatten(1), own_scales, shape, torch.bfloat16)[:, columns]

    return StackedRows((size, partial(read, expert)) for expert in range(groups))


class _Filling:
    """Fills a model's tensors by name from whatever can be sliced: a safetensors slice, or a whole tensor."""

    def __init__(self, model: nn.Module, new_tokens: NewTokens | None) -> None:
        self.targets, self.new_tokens = model.state_dict(keep_vars=True), new_tokens
        self.layers = {f"{name}.weight": layer for name, layer in quantized_layers(model).items()}
        self.resized = rows_by_token(model) if new_tokens is not None else set()
        self.filled: set[int] = set()
        self.stacks = stacked_layers(model)

    def fill(self, name: str, stored: Any) -> None:
        if name in self.stacks:
            if isinstance(stored, StoredMxfp4) and f"{name}.weight" not in self.layers:
                with ExitStack() as files:
                    self._fill(f"{name}.weight", _dequantized_rows(stored, files))
                return
            if not isinstance(stored, StackedRows | StoredMxfp4):
                stored = StackedRows.of_stored(self.stacks[name], stored)
            name = f"{name}.weight"
        self._fill(name, stored)
        advance()

    def _fill(self, name: str, stored: Any) -> None:
        if name in self.layers:
            self.layers[name].fill(stored)
            return
        target = self.targets[name]
        own = local(target)
        if target.dim() and own.numel() == 0:
            return  # more ranks than rows
        if self.new_tokens is not None and name in self.resized:
            stored = Resized(stored, self.new_tokens)
        part = local_part(target, stored)
        if id(target) not in self.filled:
            own.copy_(part)
            self.filled.add(id(target))
        elif not torch.equal(own, part.to(own.device, own.dtype)):
            raise UserError(
                f"{name} is tied to another weight by config.json, but the files hold two different ones",
                where="config.json: tie_word_embeddings",
                fix="set tie_word_embeddings to false in the model's config.json",
            )


# ---- random ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def initialize_randomly(model: Any, seed: int, device: torch.device) -> None:
    """New weights by the family's own rule, drawn from (seed, name): the same for any
    sharding and number of processes.

    The full parameters of one module at a time are made on ``device``, initialized and cut to this rank's part. CPU and
    GPU draw different numbers from one seed, so weights in host memory begin as those on the GPU do if they are drawn
    there; and a CPU draws 8 billion values in a minute.
    """
    seen: set[int] = set()
    unstored = unstored_parameters(model)
    for name, module, owner in with_owners(model):
        own = {
            key: p
            for key, p in module._parameters.items()
            if p is not None and id(p) not in seen and f"{name}.{key}" not in unstored
        }
        if not own:
            continue
        seen |= {id(p) for p in own.values()}
        drawn = draw_module(name, module, owner, own, seed, device)
        for key in own.keys() - _pieces_of(module):
            fill_from(own[key], drawn.get_parameter(key))
        if isinstance(module, QuantizedLayer):
            module.fill(drawn.get_parameter("weight").to(own[module.weight_pieces[0]].device))
        advance()


def draw_weights(model: Any, seed: int, device: torch.device) -> Callable[[str], torch.Tensor]:
    """What gives the full ``weight`` of a module by the module's name, as ``initialize_randomly`` draws it on
    ``device``.
    """
    modules = {name: (module, owner) for name, module, owner in with_owners(model)}
    unstored = unstored_parameters(model)

    def draw(name: str) -> torch.Tensor:
        module, owner = modules[name]
        own = {k: p for k, p in module._parameters.items() if p is not None and f"{name}.{k}" not in unstored}
        return draw_module(name, module, owner, own, seed, device).get_parameter("weight").detach()

    return draw


def draw_module(
    name: str, module: nn.Module, owner: Any, own: Mapping[str, torch.Tensor], seed: int, device: torch.device
) -> nn.Module:
    """``module`` alone with full, new values of its ``own`` parameters on ``device`` by its ``owner``'s rule; in the
    place of a layer that is quantized an ``nn.Linear``.
    """
    drawn = _with_zeros(module, own, device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(named_seed(seed, name))
        owner._init_weights(drawn)
    return drawn


def _pieces_of(module: nn.Module) -> set[str]:
    return set(module.weight_pieces) if isinstance(module, QuantizedLayer) else set()


def _with_zeros(module: nn.Module, own: Mapping[str, torch.Tensor], device: torch.device) -> nn.Module:
    """A copy of ``module`` alone with zeros for its ``own`` parameters, unsharded; as ``draw_module``."""

    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
        return nn.Parameter(torch.zeros(shape, dtype=dtype, device=device), requires_grad=False)

    # in the dtype of the masters, where an engine holds those beside the weights that compute
    full = {key: zeros(full_shape(p), local(p).dtype) for key, p in own.items() if key not in _pieces_of(module)}
    copied: nn.Module
    if isinstance(module, QuantizedLayer):
        shape = (module.out_features, module.in_features)
        copied = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
        full["weight"] = zeros(shape, module.weight_dtype)
    else:
        copied = object.__new__(type(module))  # not copy.copy: FSDP2's classes make another object of their arguments
        vars(copied).update(vars(module), _parameters=dict(module._parameters))
    for child, inner in module.named_children():  # a rule of the experts may name them, and theirs is the stack's own
        if isinstance(inner, StackedLayer):
            copied._modules = {key: value for key, value in copied._modules.items() if key != child}
            copied._parameters[child] = nn.Parameter(torch.empty(stored_shape(inner), device="meta"))
    copied._parameters.update(full)
    copied._non_persistent_buffers_set = set()
    return copied
