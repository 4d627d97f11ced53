"""Opens what a run leaves behind: a model folder, an adapter folder, or the run's folder itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from manyhands.config.schema import MethodSection
from manyhands.errors import UserError
from manyhands.infer.generate import end_token_ids, generate

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
UNSUPPORTED = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "layers_to_transform")


@dataclass(frozen=True)
class Answerer:
    """A model that is ready to answer."""

    model: nn.Module
    tokenizer: Any
    end_ids: frozenset[int]

    def answer(self, messages: Sequence[dict[str, str]], max_new_tokens: int) -> str:
        """Greedy answer to a conversation; a model without a chat template continues the last message's text."""
        if self.tokenizer.chat_template:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
            ids = self.tokenizer.encode(text, add_special_tokens=False)  # the template writes its own
        else:
            ids = self.tokenizer.encode(messages[-1]["content"])
        if not ids:
            raise UserError("the prompt is empty", fix="give --prompt some text")
        return generate(self.model, self.tokenizer, ids, max_new_tokens, self.end_ids)


@dataclass(frozen=True)
class Found:
    """Folders: ``weights`` with config.json, ``adapter`` to put on it, and the run's own chat template."""

    weights: Path
    adapter: Path | None = None
    chat_template: str | None = None


def open_answerer(folder: Path, base: str | None = None) -> Answerer:
    """Loads whatever ``folder`` is. UserError if it is none of the three, or its base cannot be found."""
    from manyhands.data.tokenizer import load_tokenizer

    found = find_parts(folder, base)
    model = load_model(found)
    with_tokenizer = found.adapter if found.adapter and (found.adapter / "tokenizer_config.json").is_file() else found.weights
    tokenizer = load_tokenizer(with_tokenizer, found.chat_template)
    return Answerer(model, tokenizer, end_token_ids(found.weights, tokenizer))


def find_parts(folder: Path, base: str | None = None) -> Found:
    if not folder.is_dir():
        raise UserError("no such folder", where=str(folder), fix="give a run's folder, a model folder or an adapter folder")
    if (folder / "run.json").is_file():
        return _find_run(folder, base)
    if (folder / ADAPTER_CONFIG).is_file():
        return Found(find_base(folder, base), folder)
    if (folder / "config.json").is_file():
        if not any(folder.glob("*.safetensors")):
            raise UserError("the model folder has no weights", where=str(folder), why="there is no safetensors file in it")
        return Found(folder)
    raise UserError(
        "this folder is neither a run, a model nor an adapter",
        where=str(folder),
        why="it has no run.json, config.json or adapter_config.json",
        fix="give a run's folder (runs/NAME), or its model/ or adapter/ folder",
    )


def _find_run(folder: Path, base: str | None) -> Found:
    from manyhands.launch.run_folder import RunFolder

    run = RunFolder(folder)
    template = run.read_config().model.chat_template
    if (folder / "model" / "config.json").is_file():
        return Found(folder / "model", None, template)
    adapter = folder / "adapter"
    if not (adapter / ADAPTER_CONFIG).is_file():
        raise UserError(
            "the run has written no model yet",
            where=str(folder),
            why="there is neither model/ nor adapter/ in it",
            fix=f"let it finish, or write one from its newest checkpoint: manyhands export {folder} --output DIR",
        )
    planned = Path(run.read_plan().model_folder)
    return Found(planned if base is None and planned.is_dir() else find_base(adapter, base), adapter, template)


def find_base(adapter: Path, base: str | None = None) -> Path:
    """The base model's folder: as given, else by the name in adapter_config.json, on this machine or the hub."""
    from manyhands.facts.hub import locate_model

    fields = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    name = base or fields.get("base_model_name_or_path")
    if not name:
        raise UserError("the adapter does not name its base model", where=str(adapter / ADAPTER_CONFIG), fix="give it with --base")
    return Path(locate_model(name, None if base else fields.get("revision"), True))


def load_model(found: Found) -> nn.Module:
    """On the GPU if there is one; on the CPU in float32, where bfloat16 is slow."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    on_gpu = torch.cuda.is_available()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        found.weights, dtype="auto" if on_gpu else torch.float32, attn_implementation="sdpa"
    )
    if found.adapter is not None:
        put_adapter(model, found.adapter)
    return model.to("cuda" if on_gpu else "cpu").eval()


def put_adapter(model: nn.Module, adapter: Path) -> None:
    """Adapts ``model`` in place by a LoRA adapter in PEFT's format. UserError for what our layers do not compute."""
    from manyhands.model.lora import apply_lora, load_adapter_state

    fields = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    beyond = [key for key in UNSUPPORTED if fields.get(key)]
    if fields.get("peft_type") != "LORA" or beyond:
        raise UserError(
            "this adapter cannot be used here",
            where=str(adapter / ADAPTER_CONFIG),
            why=f"it sets {', '.join(beyond)}" if beyond else f"peft_type is {fields.get('peft_type')}, not LORA",
            fix="open it with PEFT",
        )
    targets = fields["target_modules"]
    if targets != "all-linear":
        targets = (targets,) if isinstance(targets, str) else tuple(targets)
    method = MethodSection(name="lora", rank=fields["r"], alpha=fields["lora_alpha"], dropout=0.0, targets=targets)
    apply_lora(model, method, seed=0)
    load_adapter_state(model, load_file(adapter / ADAPTER_WEIGHTS))
