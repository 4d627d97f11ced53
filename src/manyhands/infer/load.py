"""Opens what a run leaves behind: a model folder, an adapter folder, or the run's folder itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands.convert.adapter import read_adapter
from manyhands.convert.lora import apply_lora
from manyhands.convert.nf4 import round_to_nf4
from manyhands.core.errors import UserError
from manyhands.core.files import refuse_outside_links
from manyhands.data.template import ChatTemplate, chat_template_kwargs_of
from manyhands.facts.adapter import describe_method, needed_tokens, read_adapter_config
from manyhands.infer.generate import end_token_ids, generate
from manyhands.model.attention import plain_attention
from manyhands.model.resize_embeddings import resize_embeddings
from manyhands.model.structure import auto_class_of

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Answerer:
    """A model that is ready to answer."""

    model: nn.Module
    tokenizer: Any
    end_ids: frozenset[int]
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def answer(self, messages: Sequence[dict[str, str]], max_new_tokens: int) -> str:
        """Greedy answer to a conversation; a model without a chat template continues the last message's text."""
        if self.tokenizer.chat_template:
            text = ChatTemplate(self.tokenizer, self.chat_template_kwargs).render(messages, generation=True)
            ids = self.tokenizer.encode(text, add_special_tokens=False)  # the template writes its own
        else:
            ids = self.tokenizer.encode(messages[-1]["content"])
        if not ids:
            raise UserError("the prompt is empty", fix="give --prompt some text")
        return generate(self.model, self.tokenizer, ids, max_new_tokens, self.end_ids)


@dataclass(frozen=True)
class Found:
    """Folders: ``weights`` with config.json, ``adapter`` to put on it; the run's own chat template and what it is
    given.
    """

    weights: Path
    adapter: Path | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


DeviceMap = str | dict[str, Any]  # as transformers takes it: auto, balanced, sequential, or modules by device


def open_answerer(folder: Path, base: str | None = None, device_map: DeviceMap | None = None) -> Answerer:
    """Loads whatever ``folder`` is. UserError if it is none of the three, or its base cannot be found. ``device_map``:
    layers over several GPUs; without it all are on one.
    """
    from manyhands.data.tokenizer import load_tokenizer

    found = find_parts(folder, base)
    model = load_model(found, device_map)
    with_tokenizer = (
        found.adapter if found.adapter and (found.adapter / "tokenizer_config.json").is_file() else found.weights
    )
    tokenizer = load_tokenizer(with_tokenizer, found.chat_template)
    arguments = found.chat_template_kwargs
    return Answerer(model, tokenizer, end_token_ids(found.weights, tokenizer, arguments), arguments)


def find_parts(folder: Path, base: str | None = None) -> Found:
    if not folder.is_dir():
        raise UserError(
            "no such folder", where=str(folder), fix="give a run's folder, a model folder or an adapter folder"
        )
    if (folder / "run.json").is_file():
        return _find_run(folder, base)
    refuse_outside_links(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        return Found(find_base(folder, base), folder)
    if (folder / "config.json").is_file():
        if not any(folder.glob("*.safetensors")):
            raise UserError(
                "the model folder has no weights", where=str(folder), why="there is no safetensors file in it"
            )
        return Found(folder)
    raise UserError(
        "this folder is neither a run, a model nor an adapter",
        where=str(folder),
        why="it has no run.json, config.json or adapter_config.json",
        fix="give a run's folder (runs/NAME), or its model/ or adapter/ folder",
    )


def _find_run(folder: Path, base: str | None) -> Found:
    from manyhands.facts.identity import check_files
    from manyhands.launch.run_folder import RunFolder

    run = RunFolder(folder)
    config = run.read_config()
    template, arguments = config.model.chat_template, chat_template_kwargs_of(config)
    if (folder / "model" / "config.json").is_file():
        return Found(folder / "model", None, template, arguments)
    adapter = folder / "adapter"
    if not (adapter / ADAPTER_CONFIG).is_file():
        raise UserError(
            "the run has written no model yet",
            where=str(folder),
            why="there is neither model/ nor adapter/ in it",
            fix=f"let it finish, or write one from its newest checkpoint: manyhands export {folder} --output DIR",
        )
    plan = run.read_plan()
    planned = Path(plan.model_folder)
    weights = planned if base is None and planned.is_dir() else find_base(adapter, base)
    if base is None:
        check_files(weights, config, plan.model_files)
    return Found(weights, adapter, template, arguments)


def find_base(adapter: Path, base: str | None = None) -> Path:
    """The base model's folder: as given, else by the name in adapter_config.json, on this machine or the hub."""
    from manyhands.facts.hub import locate_model

    fields = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    name = base or fields.get("base_model_name_or_path")
    if not name:
        raise UserError(
            "the adapter does not name its base model", where=str(adapter / ADAPTER_CONFIG), fix="give it with --base"
        )
    return Path(locate_model(name, None if base else fields.get("revision"), True))


def load_model(found: Found, device_map: DeviceMap | None = None) -> nn.Module:
    """On the GPU if there is one, or where ``device_map`` puts each layer; on the CPU in float32, where bfloat16 is
    slow.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    on_gpu = torch.cuda.is_available()
    model: Any = auto_class_of(found.weights).from_pretrained(
        found.weights,
        dtype="auto" if on_gpu else torch.float32,
        attn_implementation="sdpa",
        **({} if device_map is None else {"device_map": device_map}),
    )
    if getattr(model, "is_quantized", False):  # in NF4: adapters of ours compute beside plain weights
        model = model.dequantize()
    if plain_attention(model.config) != "sdpa":
        model.set_attn_implementation(plain_attention(model.config))
    if found.adapter is not None:
        put_adapter(model, found.adapter)
    if device_map is not None:
        return model.eval()
    return model.to("cuda" if on_gpu else "cpu").eval()


def put_adapter(model: nn.Module, adapter: Path) -> None:
    """Adapts ``model`` in place by a LoRA adapter in PEFT's format. UserError for what our layers do not compute.

    Where the adapter belongs to a model in 4 bits, the weights beside it get the values that NF4 keeps of them.
    """
    fields = read_adapter_config(adapter)
    resize_embeddings(model, needed_tokens(adapter))
    trained = fields.get("trainable_token_indices") or {}
    token_ids = {token for ids in (trained.values() if isinstance(trained, dict) else [trained]) for token in ids}
    method = describe_method(adapter, fields)
    if method.init == "loftq":
        round_to_nf4(model, method.double_quant)
    apply_lora(model, method, 0, token_ids)
    read_adapter(model, adapter)
