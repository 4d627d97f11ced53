"""The dimensions of a dense decoder, from its config.json and the headers of its weights. Knows no torch, loads no
weight.

Published configurations leave out keys whose value is their family's default; ``FAMILIES`` holds those that change a
count. Families without an entry are read as Llama's: what the headers say replaces the formula wherever there are
weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from manyhands.core.errors import UserError
from manyhands.core.files import parse_json
from manyhands.facts.safetensors import TensorHeader, equal_bytes, find_weight_files, read_headers
from manyhands.facts.types import ModelFacts

StoredDtype = Literal["bfloat16", "float16", "float32", "float64"]
STORED_DTYPES: dict[str, StoredDtype] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
NEEDED_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
MOE_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CROSS_ATTENTION_KEYS = ("cross_attention_layers",)
MULTIMODAL_KEYS = ("vision_config", "audio_config")
TEXT_TENSOR = re.compile(
    r"(?:^|\.)(?:language_model|text_model|lm_head)\.|^model\.(?:layers|embed_tokens|norm)\."
)  # of a multimodal model
BLOCK_TENSOR = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)$")
TEXT_PREFIX = re.compile(
    r"^(?:model\.)?(language_model|text_model)\.(?:model\.)*(?!lm_head)|^model\.(?=(?:layers|embed_tokens|norm)\.)"
)
HEAD_PREFIX = re.compile(r"^.*(?=\blm_head\.)")
MAX_SIZE, MAX_LAYERS = 1 << 31, 10_000
MEND_CONFIG = "mend config.json, or download the model again"


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value <= MAX_SIZE


# Of config.json's fields that are read here: what they must be, in words and as a check, and which ones.
FIELD_KINDS: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    ("text", lambda value: isinstance(value, str), ("model_type",)),
    (
        f"a whole number from 1 to {MAX_LAYERS:,}",
        lambda value: _is_size(value) and value <= MAX_LAYERS,
        ("num_hidden_layers",),
    ),
    (
        "a whole number of at least 1",
        _is_size,
        ("hidden_size", "num_attention_heads", "vocab_size", "num_key_value_heads", "head_dim", "global_head_dim"),
    ),
    (
        "a whole number of at least 1, or a list of them",
        lambda value: all(map(_is_size, value if isinstance(value, list) else [value])),
        ("intermediate_size",),
    ),
    (
        "a whole number",
        lambda value: type(value) is int and abs(value) <= MAX_SIZE,
        ("max_position_embeddings", "sliding_window"),
    ),
    ("a number", lambda value: type(value) in (int, float), ("attn_logit_softcapping",)),
    (
        "a truth value",
        lambda value: isinstance(value, bool),
        ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window", "is_encoder_decoder"),
    ),
    (
        "a list of texts",
        lambda value: isinstance(value, list) and all(isinstance(item, str) for item in value),
        ("layer_types", "architectures"),
    ),
    (
        "a mapping of layers",
        lambda value: (
            isinstance(value, dict) and all(key.isdecimal() and isinstance(own, dict) for key, own in value.items())
        ),
        ("per_layer_config",),
    ),
    (
        "a mapping",
        lambda value: isinstance(value, dict),
        ("text_config", "vision_config", "audio_config", "quantization_config", "auto_map"),
    ),
)
OTHER_PURPOSE = re.compile(
    r"For(MaskedLM|PreTraining|SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice|NextSentencePrediction"
    r"|ImageClassification|AudioClassification)$"
)
HEAD, EMBEDDINGS = "lm_head.weight", ".embed_tokens.weight"


@dataclass(frozen=True)
class Family:
    """What a family has where its config.json says nothing."""

    tied: bool = False
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    qkv_bias: bool | None = None  # None: as the key attention_bias says, and then the output projection has one too
    qk_norm: bool = False
    num_norms: int = 2  # of the block, hidden_size wide
    attention_softcap: float | None = None
    defaults: Mapping[str, int] = field(
        default_factory=dict
    )  # what the text part of a published multimodal model leaves out


WIDTHS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
LLAMA_DEFAULTS = dict(zip(WIDTHS, (32_000, 4096, 11_008, 32, 32, 32), strict=True)) | {"max_position_embeddings": 2048}
MISTRAL_DEFAULTS = dict(zip(WIDTHS, (32_000, 4096, 14_336, 32, 32, 8), strict=True))
MISTRAL_DEFAULTS |= {"max_position_embeddings": 131_072, "sliding_window": 4096}
QWEN2_DEFAULTS = dict(zip(WIDTHS, (151_936, 4096, 22_016, 32, 32, 32), strict=True)) | {
    "max_position_embeddings": 32_768
}
GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
}
FAMILIES = {
    "llama": Family(defaults=LLAMA_DEFAULTS),
    "mistral": Family(defaults=MISTRAL_DEFAULTS),
    "qwen2": Family(qkv_bias=True, defaults=QWEN2_DEFAULTS),
    "qwen2_vl_text": Family(qkv_bias=True),
    "qwen2_5_vl_text": Family(qkv_bias=True),
    "qwen3_vl_text": Family(head_dim=128, qk_norm=True),
    "qwen3": Family(head_dim=128, qk_norm=True),
    "gemma": Family(tied=True, head_dim=256),
    "gemma2": Family(tied=True, head_dim=256, num_norms=4, attention_softcap=50.0),
    "gemma3_text": Family(tied=True, head_dim=256, qk_norm=True, num_norms=4, defaults=GEMMA3_DEFAULTS),
}


def read_model_facts(folder: Path, name: str, init: Literal["pretrained", "random"]) -> ModelFacts:
    """Facts of the model in ``folder``, asked for as ``name``. With ``init="random"`` config.json suffices.

    Of a multimodal model they are those of its text decoder, which alone is loaded; its towers are counted apart.
    Raises UserError where a file is missing or broken, or where the model is of a kind that is not supported.
    """
    path = folder / "config.json"
    whole_config = _read_config(path)
    check_kinds(whole_config, path)
    check_kinds(whole_config.get("text_config") or {}, path)
    check_purpose(whole_config, path)
    config = text_part(whole_config)
    check_supported(config, path)
    block = block_shapes(config)
    parameters, towers, stored = count_parameters(config), 0, _config_dtype(whole_config)
    shapes = parameter_shapes(config)
    decoder = "model" if config is whole_config else "model.language_model"
    if init == "pretrained":
        tensors = read_headers(find_weight_files(folder))
        if config is not whole_config:
            towers = sum(tensor.num_elements for name, tensor in tensors.items() if not TEXT_TENSOR.search(name))
            config |= {"tie_word_embeddings": shares_head(folder, config)}
            tensors = {name_in_model(name): tensor for name, tensor in tensors.items() if TEXT_TENSOR.search(name)}
            decoder = next((name.removesuffix(EMBEDDINGS) for name in tensors if name.endswith(EMBEDDINGS)), decoder)
        if is_tied(config):
            tensors.pop(HEAD, None)
        stored = _stored_dtype(tensors, folder)
        parameters = sum(tensor.num_elements for tensor in tensors.values())
        block = _largest_block(tensors) or block
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
    num_heads = config["num_attention_heads"]
    return ModelFacts(
        name=name,
        folder=str(folder),
        model_type=config["model_type"],
        decoder=decoder,
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=widest_head(config),
        vocab_size=config["vocab_size"],
        tied_embeddings=is_tied(config),
        max_positions=config.get("max_position_embeddings") or 0,
        sliding_window=config.get("sliding_window") if config.get("use_sliding_window", True) else None,
        attention_softcap=config.get("attn_logit_softcapping", family_of(config).attention_softcap),
        stored_dtype=stored,
        num_parameters=parameters,
        num_tower_parameters=towers,
        num_block_parameters=sum(math.prod(shape) for shape in block.values()),
        block_linear_shapes={
            name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in block.items() if len(shape) == 2
        },
        block_norm_elements=norm_elements(block, config),
        parameter_shapes=shapes,
    )


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of a multimodal model's text decoder, in one flat config; of a text model the config itself.

    transformers reads ``tie_word_embeddings`` from the outer config, and what neither holds is the family's default.
    """
    text = config.get("text_config")
    kind = f"{config.get('model_type')}_text"
    if not isinstance(text, dict):
        flat = kind in FAMILIES and any(
            key in config for key in MULTIMODAL_KEYS
        )  # the text's fields beside the vision_config
        return (
            {key: value for key, value in config.items() if key not in MULTIMODAL_KEYS} | {"model_type": kind}
            if flat
            else config
        )
    outer = {key: config[key] for key in ("tie_word_embeddings", "quantization_config") if key in config}
    kind = str(text.get("model_type") or config.get("model_type"))
    fields = {**FAMILIES.get(kind, Family()).defaults, **text, **outer, "model_type": kind}
    if isinstance(fields.get("intermediate_size"), list):  # one for each block
        fields["intermediate_size"] = max(fields["intermediate_size"], default=0)
    return fields


def name_in_model(name: str) -> str:
    """What transformers calls a tensor of a multimodal model's text, whichever of the published ways its file does."""
    return HEAD_PREFIX.sub("", TEXT_PREFIX.sub(lambda match: f"model.{match[1] or 'language_model'}.", name))


def shares_head(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a multimodal model's head is its embeddings: by its files, as its parts' configurations often contradict
    each other.

    Tied where no head is stored, and not where one is that differs, which is how transformers loads it. ``config`` of
    the text decides where both are the same.
    """
    files = find_weight_files(folder)
    named = {name_in_model(name): name for name in read_headers(files) if TEXT_TENSOR.search(name)}
    head, embeddings = named.get(HEAD), next((name for new, name in named.items() if new.endswith(EMBEDDINGS)), None)
    if head is None or embeddings is None:
        return head is None
    return is_tied(config) and equal_bytes(files, head, embeddings)


def check_supported(config: Mapping[str, Any], path: Path) -> None:
    """UserError for models that are no dense text decoder with its weights as they are."""
    multimodal = [key for key in MULTIMODAL_KEYS if key in config]
    experts = [key for key in MOE_KEYS if config.get(key)]
    crossing = [key for key in CROSS_ATTENTION_KEYS if config.get(key)]
    kind = config.get("model_type") or "this model"
    for found, what in (
        (multimodal, f"{kind} is multimodal, and does not say which part of it is the text decoder"),
        (
            crossing,
            f"{kind} has blocks that attend to images only, which text alone passes by: they would stay as they are or decay",
        ),
        (experts, f"{kind} is a mixture of experts, which is not supported yet"),
        (
            ["quantization_config"] if config.get("quantization_config") else [],
            "the model's weights are quantised, which is not supported yet",
        ),
        (
            ["is_encoder_decoder"] if config.get("is_encoder_decoder") else [],
            f"{kind} has an encoder, which is not supported",
        ),
    ):
        if found:
            raise UserError(
                what,
                where=str(path),
                why=f"its config.json has {', '.join(found)}",
                fix="use a dense text model: Llama, Qwen2, Qwen3, Mistral, Gemma 3 text, ...",
            )
    missing = [key for key in ("model_type", *NEEDED_KEYS) if not config.get(key)]
    if missing:
        raise UserError(
            f"{kind} is no decoder of a kind that is known here",
            where=str(path),
            why=f"its config.json lacks {', '.join(missing)}",
            fix="use a model whose config.json has the usual names, such as Llama's",
        )
    heads, groups = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    wrong = [f"{key}: {config[key]!r}" for key in NEEDED_KEYS if not isinstance(config[key], int)]
    wrong += (
        [f"num_attention_heads: {heads} is no multiple of num_key_value_heads: {groups}"]
        if not wrong and heads % groups
        else []
    )
    if wrong:
        raise UserError("config.json has sizes that no model can have", where=str(path), details=wrong, fix=MEND_CONFIG)


def check_purpose(config: Mapping[str, Any], path: Path) -> None:
    """UserError for a model that was saved to classify, or to fill in masked tokens: it has no head that predicts the
    next one.
    """
    named: list[str] = config.get("architectures") or []
    other = [match[1] for name in named if (match := OTHER_PURPOSE.search(name))]
    if other and len(other) == len(named):
        encoder = "MaskedLM" in other or "PreTraining" in other
        raise UserError(
            f"{named[0]} is no language model that could be trained here",
            where=str(path),
            why="it is an encoder: its tokens see those behind them, and there is no next one to learn"
            if encoder
            else f"its head is for {other[0]}, and predicts no tokens",
            fix="use a model that generates text, such as Llama, Qwen3, Mistral or Gemma 3",
        )


def check_kinds(config: Mapping[str, Any], path: Path) -> None:
    """UserError for fields that are read here and hold another kind of value, or a size beyond every model. null is as
    if left out.
    """
    wrong = []
    for what, fits, keys in FIELD_KINDS:
        wrong += [
            f"{key}: {str(config[key])[:60]!r} is not {what}"
            for key in keys
            if config.get(key) is not None and not fits(config[key])
        ]
    if wrong:
        raise UserError(
            "the model's config.json has values of the wrong kind", where=str(path), details=wrong, fix=MEND_CONFIG
        )


def block_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of one block by name, as transformers' implementations of Llama and its kin have
    them.
    """
    family = family_of(config)
    hidden, inner, dim, heads = (
        config["hidden_size"],
        config["intermediate_size"],
        head_dim(config),
        config["num_attention_heads"],
    )
    kv_heads = config.get("num_key_value_heads") or heads
    attention_bias = bool(config.get("attention_bias", False))
    qkv_bias = attention_bias if family.qkv_bias is None else family.qkv_bias
    mlp_bias = bool(config.get("mlp_bias", False))
    linears = {
        "self_attn.q_proj": (heads * dim, hidden, qkv_bias),
        "self_attn.k_proj": (kv_heads * dim, hidden, qkv_bias),
        "self_attn.v_proj": (kv_heads * dim, hidden, qkv_bias),
        "self_attn.o_proj": (hidden, heads * dim, attention_bias and family.qkv_bias is None),
        "mlp.gate_proj": (inner, hidden, mlp_bias),
        "mlp.up_proj": (inner, hidden, mlp_bias),
        "mlp.down_proj": (hidden, inner, mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (out, into, bias) in linears.items():
        shapes[f"{name}.weight"] = (out, into)
        if bias:
            shapes[f"{name}.bias"] = (out,)
    if family.qk_norm:
        shapes |= {f"self_attn.{which}_norm.weight": (dim,) for which in "qk"}
    return shapes | {f"norm_{index}.weight": (hidden,) for index in range(family.num_norms)}


def parameter_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """All of ``block_shapes`` of every block, and embeddings, last norm and head (once if tied), by Llama's names."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for index in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in block_shapes(config).items()}
    return shapes | {"model.norm.weight": (hidden,)} | ({} if is_tied(config) else {HEAD: (vocab, hidden)})


def norm_elements(block: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]) -> int:
    """Elements a token that a block's norms read: hidden_size each, and all heads for the norms of queries and keys."""
    heads = config["num_attention_heads"]
    widths = {
        "q_norm": heads * head_dim(config),
        "k_norm": (config.get("num_key_value_heads") or heads) * head_dim(config),
    }
    norms = [
        name.removesuffix(".weight").rsplit(".", 1)[-1] for name in block if "norm" in name and name.endswith(".weight")
    ]
    return sum(widths.get(norm, config["hidden_size"]) for norm in norms)


def count_parameters(config: Mapping[str, Any]) -> int:
    """blocks * block + vocab * hidden (twice if not tied) + the last norm; exact for the families of this module."""
    block = sum(math.prod(shape) for shape in block_shapes(config).values())
    embeddings = config["vocab_size"] * config["hidden_size"] * (1 if is_tied(config) else 2)
    return config["num_hidden_layers"] * block + embeddings + config["hidden_size"]


def family_of(config: Mapping[str, Any]) -> Family:
    return FAMILIES.get(config["model_type"], Family())


def head_dim(config: Mapping[str, Any]) -> int:
    return (
        config.get("head_dim") or family_of(config).head_dim or config["hidden_size"] // config["num_attention_heads"]
    )


def widest_head(config: Mapping[str, Any]) -> int:
    """Of all blocks, some of which have wider heads than the rest: what an attention kernel must be able to."""
    own = [block.get("head_dim") or 0 for block in (config.get("per_layer_config") or {}).values()]
    return max(head_dim(config), config.get("global_head_dim") or 0, *own)


def is_tied(config: Mapping[str, Any]) -> bool:
    tied = config.get("tie_word_embeddings")
    return family_of(config).tied if tied is None else bool(tied)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        adapter = (path.parent / "adapter_config.json").is_file()
        why = "it holds an adapter, which is no model by itself" if adapter else "there is no config.json in it"
        raise UserError(
            "the folder is not a model's",
            where=str(path.parent),
            why=why,
            fix="give a hub name, or a folder with config.json",
        )
    try:
        config = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            "the model's config.json is broken", where=str(path), why=str(error), fix="download the model again"
        ) from error
    if not isinstance(config, dict):
        raise UserError(
            "the model's config.json is broken",
            where=str(path),
            why="it is not an object",
            fix="download the model again",
        )
    return config


def _config_dtype(config: Mapping[str, Any]) -> StoredDtype:
    named = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return next((dtype for dtype in get_args(StoredDtype) if dtype == named), "float32")


def _stored_dtype(tensors: Mapping[str, TensorHeader], folder: Path) -> StoredDtype:
    """The dtype that most elements have. UserError where that is none a model is trained from."""
    elements: dict[str, int] = {}
    for tensor in tensors.values():
        elements[tensor.dtype] = elements.get(tensor.dtype, 0) + tensor.num_elements
    most = max(elements, key=lambda dtype: elements[dtype], default="nothing")
    if most not in STORED_DTYPES:
        raise UserError(
            f"the model's weights are stored as {most}",
            where=str(folder),
            why=f"weights can be read as {', '.join(STORED_DTYPES)}",
            fix="use the model's version that is not quantised",
        )
    return STORED_DTYPES[most]


def _largest_block(tensors: Mapping[str, TensorHeader]) -> dict[str, tuple[int, ...]]:
    """Shapes within the block that has the most parameters, the first of equal ones; empty where no name shows a
    block.
    """
    blocks: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, tensor in tensors.items():
        if match := BLOCK_TENSOR.search(name):
            blocks.setdefault(int(match[1]), {})[match[2]] = tensor.shape
    return max(
        (blocks[index] for index in sorted(blocks)), key=lambda block: sum(map(math.prod, block.values())), default={}
    )
