"""Opens what a run leaves behind: a model folder, an adapter folder, or the run's folder itself."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyhands.convert.adapter import read_adapter
from manyhands.convert.experts import stack_experts
from manyhands.convert.lora import apply_lora
from manyhands.convert.nf4 import round_to_nf4
from manyhands.core.errors import UserError
from manyhands.core.files import refuse_outside_links
from manyhands.data.chat.template import chat_template_kwargs_of
from manyhands.facts.adapter import describe_method, needed_tokens, read_adapter_config
from manyhands.facts.stored_mxfp4 import is_mxfp4
from manyhands.infer.decode import Completion, OnText, end_token_ids
from manyhands.infer.images import PromptImages, open_images, sizes_of
from manyhands.infer.prompts import encode_prompt, prompt_of
from manyhands.infer.settings import GenerationSettings
from manyhands.model.attention import plain_attention
from manyhands.model.documents import follow_documents
from manyhands.model.resize_embeddings import resize_embeddings, rows_by_token
from manyhands.model.structure import auto_class_of, find_experts

ADAPTER_CONFIG = "adapter_config.json"
DeviceMap = str | dict[str, Any]
LAYERS_SHARE = 0.85  # of a GPU's free memory, for its layers; the rest is for the cache


@dataclass(frozen=True)
class Answerer:
    """A model that is ready to answer, from Python too: ``open_answerer(folder).answer_all(conversations)``."""

    model: nn.Module
    tokenizer: Any
    end_ids: frozenset[int]
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    images: PromptImages | None = None  # of a model that takes them

    @property
    def num_positions(self) -> int | None:
        """Tokens of the model's context, where its configuration bounds them."""
        model: Any = self.model
        return getattr(model.config.get_text_config(), "max_position_embeddings", None)

    def answer(self, messages: Sequence[dict[str, Any]], max_new_tokens: int) -> str:
        """Greedy answer to a conversation; a model without a chat template continues the last message's text."""
        return self.answer_all([messages], GenerationSettings(max_new_tokens=max_new_tokens))[0].text

    def answer_all(
        self,
        conversations: Sequence[Sequence[dict[str, Any]]],
        settings: GenerationSettings | None = None,
        tools: list[Any] | None = None,
        on_text: OnText | None = None,
        *,
        shorten: bool = False,
    ) -> list[Completion]:
        """Answers in the order of the conversations, in batches that fit into memory, on this model's device.

        Each conversation's position seeds it where answers are sampled, so the batches do not matter.
        ``on_text(position, text)`` is called with each new piece of text. Files, over several GPUs:
        ``infer.batch.answer_file``.

        UserError where the model has too few positions for a prompt and ``max_new_tokens``; ``shorten``: for a prompt
        and one new token, and answers may be shorter.
        """
        from manyhands.infer.worker import Worker

        settings, given = settings or GenerationSettings(), (self.tokenizer, self.chat_template_kwargs)
        prompts = [prompt_of(n, *given, m, tools, images=self.images) for n, m in enumerate(conversations)]
        if prompts:
            settings = self._fit(max(len(prompt.ids) for prompt in prompts), settings, shorten)
        found = Worker(self, settings, on_text=on_text).answer_all(prompts)
        return [found[number] for number in range(len(prompts))]

    def _fit(self, longest: int, settings: GenerationSettings, shorten: bool) -> GenerationSettings:
        positions = self.num_positions
        if positions is None or longest + settings.max_new_tokens <= positions:
            return settings
        if shorten and longest < positions:
            return replace(settings, max_new_tokens=positions - longest)
        raise UserError(
            f"the prompt is too long for the model: {longest:,} tokens",
            why=f"the model has {positions:,} positions, for the prompt and "
            + ("an answer" if shorten else f"{settings.max_new_tokens:,} new tokens"),
            fix="begin a new conversation" if shorten else "shorten the prompt, or lower max_new_tokens",
        )

    def encode(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None) -> list[int]:
        """The tokens before the answer. UserError without a needed chat template or for none; RowRefused."""
        return encode_prompt(self.tokenizer, self.chat_template_kwargs, messages, tools)


@dataclass(frozen=True)
class ModelLocation:
    """Folders of ``weights`` and ``adapter``; the run's own chat template with its arguments, and image sizes."""

    weights: Path
    adapter: Path | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    image_sizes: dict[str, int | None] = field(default_factory=dict)  # keys of ``data``


def open_answerer(folder: Path, base: str | None = None, device_map: DeviceMap | None = None) -> Answerer:
    """Loads whatever ``folder`` is. UserError if it is none of the three, or has no base. See ``load_model``."""
    return load_answerer(find_parts(folder, base), device_map=device_map)


def load_answerer(
    found: ModelLocation, device: str | None = None, device_map: DeviceMap | None = None, gpus: Sequence[int] = ()
) -> Answerer:
    """Model and tokenizer of what ``find_parts`` has found; arguments as of ``load_model``."""
    model = load_model(found, device, device_map, gpus)
    tokenizer = open_found_tokenizer(found)
    images = open_images(found.weights, tokenizer, found.image_sizes)
    return Answerer(model, tokenizer, find_ends(found, tokenizer), found.chat_template_kwargs, images)


def find_ends(found: ModelLocation, tokenizer: Any) -> frozenset[int]:
    """Tokens that end an answer: the model's, the template's, and the end of text of the run's adapter."""
    from manyhands.data.tokenize.tokenizer import load_tokenizer

    ends = end_token_ids(found.weights, tokenizer, found.chat_template_kwargs)
    folders = (found.weights, found.adapter)
    if not all(folder and (folder / "tokenizer_config.json").is_file() for folder in folders):
        return ends
    is_new = tokenizer.eos_token_id is not None and tokenizer.eos_token != load_tokenizer(found.weights).eos_token
    return ends | {tokenizer.eos_token_id} if is_new else ends


def open_found_tokenizer(found: ModelLocation) -> Any:
    """The tokenizer beside the adapter if there is one, else the model's; with the run's chat template."""
    from manyhands.data.tokenize.tokenizer import load_tokenizer

    with_tokenizer = (
        found.adapter if found.adapter and (found.adapter / "tokenizer_config.json").is_file() else found.weights
    )
    return load_tokenizer(with_tokenizer, found.chat_template)


def find_parts(folder: Path, base: str | None = None) -> ModelLocation:
    if not folder.is_dir():
        raise UserError(
            "no such folder", where=str(folder), fix="give a run's folder, a model folder or an adapter folder"
        )
    if (folder / "run.json").is_file():
        return _find_run(folder, base)
    refuse_outside_links(folder)
    if (folder / ADAPTER_CONFIG).is_file():
        return ModelLocation(find_base(folder, base), folder)
    if (folder / "config.json").is_file():
        if not any(folder.glob("*.safetensors")):
            raise UserError(
                "the model folder has no weights", where=str(folder), why="there is no safetensors file in it"
            )
        return ModelLocation(folder)
    raise UserError(
        "this folder is neither a run, a model nor an adapter",
        where=str(folder),
        why="it has no run.json, config.json or adapter_config.json",
        fix="give a run's folder (runs/NAME), or its model/ or adapter/ folder",
    )


def _find_run(folder: Path, base: str | None) -> ModelLocation:
    from manyhands.facts.identity import check_adapter_base, check_files
    from manyhands.launch.run.folder import RunFolder

    run = RunFolder(folder)
    config = run.read_config()
    of_run = (config.model.chat_template, chat_template_kwargs_of(config), sizes_of(config))
    if (folder / "model" / "config.json").is_file():
        refuse_outside_links(folder / "model")
        return ModelLocation(folder / "model", None, *of_run)
    adapter = folder / "adapter"
    if not (adapter / ADAPTER_CONFIG).is_file():
        raise UserError(
            "the run has written no model yet",
            where=str(folder),
            why="there is neither model/ nor adapter/ in it",
            fix=f"let it finish, or write one from its newest checkpoint: manyhands export {folder} --output DIR",
        )
    refuse_outside_links(adapter)
    plan = run.read_plan()
    planned = Path(plan.model_folder)
    weights = planned if base is None and planned.is_dir() else find_base(adapter, base)
    if base is None:
        check_files(weights, config, plan.model_files)
        check_adapter_base(adapter, weights)
    return ModelLocation(weights, adapter, *of_run)


def find_base(adapter: Path, base: str | None = None) -> Path:
    """The base model's folder: as given, else by the name in adapter_config.json, on this machine or the hub."""
    from manyhands.facts.hub import locate_model
    from manyhands.facts.identity import check_adapter_base

    fields = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    name = base or fields.get("base_model_name_or_path")
    if not name:
        raise UserError(
            "the adapter does not name its base model", where=str(adapter / ADAPTER_CONFIG), fix="give it with --base"
        )
    found = Path(locate_model(name, None if base else fields.get("revision"), True))
    if base is None:
        check_adapter_base(adapter, found)
    return found


def load_model(
    found: ModelLocation, device: str | None = None, device_map: DeviceMap | None = None, gpus: Sequence[int] = ()
) -> nn.Module:
    """On ``device``, by default the GPU if there is one; on the CPU in float32, where bfloat16 is slow.

    ``device_map`` divides the layers over ``gpus`` (default: all), by accelerate: ``auto`` and ``balanced`` evenly,
    ``sequential`` one GPU after the other, a dict of modules' names and devices as it says. Adapters lie beside the
    layers that they adapt.
    """
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    placing: dict[str, Any] = {}
    if device_map is not None:
        if find_spec("accelerate") is None:
            raise UserError(
                "layers cannot be divided over GPUs without accelerate",
                where="--device-map",
                why="transformers places layers by that library, which is not installed",
                fix="pip install accelerate",
            )
        placing["device_map"] = device_map
        if gpus and not isinstance(device_map, dict):
            placing["max_memory"] = {gpu: int(LAYERS_SHARE * torch.cuda.mem_get_info(gpu)[0]) for gpu in gpus}
    model: Any = auto_class_of(found.weights).from_pretrained(
        found.weights,
        dtype=torch.float32 if device == "cpu" else "auto",
        attn_implementation=plain_attention(transformers.AutoConfig.from_pretrained(found.weights)),
        **dequantizing(found.weights),
        **placing,
    )
    if dequantizing(found.weights):
        model = model.to(model.dtype)  # experts come in bfloat16
    elif getattr(model, "is_quantized", False):  # in NF4: adapters of ours compute beside plain weights
        model = model.dequantize()
    follow_documents(model)  # else an answer would depend on earlier prompts
    if found.adapter is not None:
        put_adapter(model, found.adapter)
    return (model if device_map is not None else model.to(device)).eval()


def dequantizing(folder: Path) -> dict[str, Any]:
    """What makes transformers open experts that are stored in MXFP4 as plain weights; {} for other models."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if not is_mxfp4(config):
        return {}
    from transformers import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


def put_adapter(model: nn.Module, adapter: Path) -> None:
    """Adapts ``model`` in place (PEFT's format), beside NF4's values for a 4-bit one. UserError for other layers."""
    fields = read_adapter_config(adapter)
    resize_embeddings(model, needed_tokens(adapter, rows_by_token(model)))
    trained = fields.get("trainable_token_indices") or {}
    token_ids = {token for ids in (trained.values() if isinstance(trained, dict) else [trained]) for token in ids}
    method = describe_method(adapter, fields)
    if method.init == "loftq":
        round_to_nf4(model, method.double_quant)
    if find_experts(model):
        stack_experts(model)
    apply_lora(model, method, 0, token_ids)
    read_adapter(model, adapter)
