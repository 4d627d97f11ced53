"""Dimensions of a decoder, from its config.json and the headers of its weights. Knows no torch, loads no weight.

Where there are weights, shapes and counts are those of their headers. Without weights (``init="random"``) they follow
from config.json and what is known of the family (``manyhands.families``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from manyhands import families
from manyhands.core.errors import UserError
from manyhands.facts.experts import stack_experts
from manyhands.facts.model_config import read_config
from manyhands.facts.safetensors import TensorHeader, equal_bytes, find_weight_files, read_header, read_headers
from manyhands.facts.stored_mxfp4 import StoredMxfp4, find_stored_mxfp4, is_mxfp4
from manyhands.facts.stored_nf4 import StoredNf4, find_stored_nf4
from manyhands.facts.towers import read_tower
from manyhands.facts.types import LinearShape, ModelFacts, NewTokens, Nf4Facts, StoredDtype, TowerFacts

STORED_DTYPES: dict[str, StoredDtype] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
HEAD, EMBEDDINGS = "lm_head.weight", ".embed_tokens.weight"
BLOCK_TENSOR = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.(.+)$")
# Of a multimodal model's files: tensors of its text, and prefixes under which these were published.
TEXT_TENSOR = re.compile(r"(?:^|\.)(?:language_model|text_model|lm_head)\.|^model\.(?:layers|embed_tokens|norm)\.")
TEXT_PREFIX = re.compile(
    r"^(?:model\.)?(language_model|text_model)\.(?:model\.)*(?!lm_head)|^model\.(?=(?:layers|embed_tokens|norm)\.)"
)
BARE_TENSOR = re.compile(r"^(?=(?:layers|embed_tokens|norm)\.)")  # of a text model that was saved without its head
UNREAD = ".rotary_emb.inv_freq"  # older versions of transformers stored these frequencies; nothing loads them
ROPE_KEYS = ("rope_parameters", "rope_scaling")
HEAD_NORMS = ("q_norm", "k_norm")  # of queries and of keys
MLP_OUTPUT_NORMS = ("post_feedforward_layernorm", "post_mlp_layernorm")
DECODER = "model.language_model"  # of a multimodal model
HEAD_PREFIX = re.compile(r"^.*(?=\blm_head\.)")


def read_model_facts(folder: Path, name: str, init: Literal["pretrained", "random"]) -> ModelFacts:
    """Facts of the model in ``folder``, asked for as ``name``. With ``init="random"`` config.json suffices, but for the
    towers of a multimodal model, which are described by the headers of its weights.

    Of a multimodal model they are those of its text decoder, which alone is loaded; its towers are counted apart.
    Raises UserError where a file is missing or broken, or where the model is of a kind that is not supported.
    """
    outer, config = read_config(folder)
    is_multimodal = config is not outer
    num_tower_parameters, tower, stored, stored_nf4 = 0, None, _config_dtype(outer), None
    named_decoder = families.find(outer).decoder
    shapes, decoder = parameter_shapes(config), named_decoder if is_multimodal else "model"
    groups = families.expert_groups(families.find(config), config)
    stored_mxfp4 = tuple(groups) if is_mxfp4(outer) else ()
    if init == "pretrained":
        tensors, in_nf4, in_mxfp4 = _read_tensors(folder, outer)
        stored_mxfp4 = _in_all_blocks(in_mxfp4)
        if is_multimodal:
            num_tower_parameters, tower = _read_towers(outer, tensors)
            config |= {"tie_word_embeddings": shares_head(folder, config)}
            tensors = {
                name_in_model(name, named_decoder): tensor
                for name, tensor in tensors.items()
                if TEXT_TENSOR.search(name)
            }
            decoder = next((name.removesuffix(EMBEDDINGS) for name in tensors if name.endswith(EMBEDDINGS)), decoder)
        else:
            tensors = {BARE_TENSOR.sub("model.", n): t for n, t in tensors.items() if not n.endswith(UNREAD)}
        if is_tied(config):
            tensors.pop(HEAD, None)
        for stored_name, own in families.find(config).renamed.items():
            tensors = {name.replace(f".{stored_name}", f".{own}"): tensor for name, tensor in tensors.items()}
        experts = families.find(config).experts
        tensors, stacks = stack_experts(
            tensors, config["hidden_size"], transposed=experts is not None and experts.transposed
        )
        groups = {
            match[2].removesuffix(".weight"): n for name, n in stacks.items() if (match := BLOCK_TENSOR.search(name))
        }
        stored = _stored_dtype(tensors, folder)
        stored_nf4 = _describe_nf4(in_nf4, folder)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
    elif is_multimodal and any(folder.glob("*.safetensors")):
        num_tower_parameters, tower = _read_towers(outer, _read_tensors(folder, outer)[0])
    num_heads, num_kv_heads = families.num_heads(config)
    blocks = _blocks(shapes)
    block = max(blocks.values(), key=lambda block: sum(map(math.prod, block.values())), default={})
    block = block or families.block_shapes(families.find(config), config, config["num_hidden_layers"] - 1)
    active = families.experts_per_token(config)
    differ = bool(groups or families.find(config).mixers)
    linears = {index: _linear_shapes(found, groups, active) for index, found in blocks.items()} if differ else {}
    largest = _linear_shapes(block, groups, active)
    return ModelFacts(
        name=name,
        folder=str(folder),
        model_type=config["model_type"],
        decoder=decoder,
        hidden_size=config["hidden_size"],
        intermediate_size=_active_width(largest) or config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=widest_head(config),
        vocab_size=config["vocab_size"],
        tied_embeddings=is_tied(config),
        max_positions=config.get("max_position_embeddings") or 0,
        sliding_window=config.get("sliding_window") if config.get("use_sliding_window", True) else None,
        num_windowed_layers=_count_windowed(config),
        attention_softcap=config.get("attn_logit_softcapping", families.find(config).attention_softcap),
        attention_sinks=families.find(config).sinks,
        rotates_by_length=any(kind in str([config.get(key) for key in ROPE_KEYS]) for kind in ("dynamic", "longrope")),
        stored_dtype=stored,
        stored_nf4=stored_nf4,
        stored_mxfp4=stored_mxfp4,
        num_parameters=sum(map(math.prod, shapes.values())),
        is_multimodal=is_multimodal,
        num_tower_parameters=num_tower_parameters,
        tower=tower,
        num_block_parameters=sum(map(math.prod, block.values())),
        num_in_blocks=sum(math.prod(shape) for found in blocks.values() for shape in found.values()) if differ else 0,
        block_linear_shapes=largest,
        other_linear_shapes={index: found for index, found in linears.items() if found != largest},
        shared_gate=_shared_gate(block, groups),
        block_norm_elements=norm_elements(block, config),
        head_norm_elements=norm_elements([name for name in block if _norm_of(name) in HEAD_NORMS], config),
        **_describe_mixers(blocks, config),
        norms_mlp_output=any(_norm_of(name) in MLP_OUTPUT_NORMS for name in block),
        parameter_shapes=shapes,
    )


def has_weights(folder: Path) -> bool:
    """Whether files of weights are there, of whatever kind; those that cannot be read are named when they are read."""
    return any(
        True for kind in ("safetensors", "safetensors.index.json", "bin", "pt", "pth") for _ in folder.glob(f"*.{kind}")
    )


def _read_towers(config: Mapping[str, Any], tensors: Mapping[str, TensorHeader]) -> tuple[int, TowerFacts | None]:
    """Parameters of all that is around the text, and what images pass through."""
    around = {name: tensor.shape for name, tensor in tensors.items() if not TEXT_TENSOR.search(name)}
    return sum(map(math.prod, around.values())), read_tower(config, around)


def _blocks(shapes: Mapping[str, tuple[int, ...]]) -> dict[int, dict[str, tuple[int, ...]]]:
    """Shapes by their names within each block, by its index."""
    blocks: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, shape in shapes.items():
        if match := BLOCK_TENSOR.search(name):
            blocks.setdefault(int(match[1]), {})[match[2]] = shape
    return {index: blocks[index] for index in sorted(blocks)}


LIGHTNING = "self_attn.qkv_proj.weight"  # of lightning attention, which has no convolution
OTHER_MIXERS = ("conv.conv.weight", LIGHTNING)
STATE_SIZES = ("linear_key_head_dim", "linear_head_dim", "mamba_d_state", "ssm_state_size")


def _describe_mixers(blocks: Mapping[int, Mapping[str, tuple[int, ...]]], config: Mapping[str, Any]) -> dict[str, int]:
    """Of a hybrid, whose mixers are told by their convolutions, or by one projection for all; {} for others.

    With W channels of the convolution, P outputs of the layers before it and V inputs of the one behind, kernels keep
    ``P + W + 4 V`` numbers a token: what goes into the convolution, into the kernel behind it, its result, gate and
    norm. The state has V numbers for each of a head's keys.
    """
    if not families.find(config).mixers:
        return {}
    attention = values = layers = width = 0
    for block in blocks.values():
        convolutions = [name for name, shape in block.items() if len(shape) == 3 and name.endswith("conv1d.weight")]
        convolutions = convolutions or [name for name in block if name.endswith(OTHER_MIXERS)]
        parent = convolutions[0].rpartition(".")[0].rpartition(".")[0] if convolutions else "none"
        queries = [name for name in block if name.endswith(("q_proj.weight", "q_b_proj.weight"))]
        attention += any(not name.startswith(f"{parent}.") for name in queries)
        if not convolutions:
            continue
        own = {name: shape for name, shape in block.items() if name.startswith(f"{parent}.") and len(shape) == 2}
        last = next(name for name in own if name.endswith(("out_proj.weight", "o_proj.weight")))
        width = own.pop(last)[1]
        into = sum(shape[0] for name, shape in own.items() if "A_log" not in name)
        values = max(values, into + sum(block[name][0] for name in convolutions) + 4 * width)
        layers += 1
    nested = (config.get("linear_attn_config") or {}).get("head_dim", 0)
    if any(name.endswith(LIGHTNING) for block in blocks.values() for name in block):
        nested = width // families.num_heads(config)[0]
    keys = next((config[key] for key in STATE_SIZES if config.get(key)), nested)
    return {
        "num_attention_layers": attention,
        "num_mixer_layers": layers,
        "mixer_values": values,
        "mixer_state": width * keys,
    }


def _linear_shapes(
    block: Mapping[str, tuple[int, ...]], groups: Mapping[str, int], active: int
) -> dict[str, LinearShape]:
    """Without routers, which give a value for each expert, or one for a shared one, and layers that are not called."""
    experts = {name.rpartition(".")[0]: number for name, number in groups.items()}
    return {
        name: LinearShape(shape[0], shape[1], groups[name], active) if name in groups else LinearShape(*shape)
        for full_name, name, shape in ((name, name.removesuffix(".weight"), shape) for name, shape in block.items())
        if len(shape) == 2
        and full_name.endswith(".weight")
        and not _is_norm(f"{name}.weight")
        and name not in families.bypassed_linears()
        and not families.routes(name, shape[0], experts)
    }


def _shared_gate(block: Mapping[str, tuple[int, ...]], groups: Mapping[str, int]) -> str:
    """The layer whose one output weighs a shared expert; "" without one."""
    experts = {name.rpartition(".")[0]: number for name, number in groups.items()}
    gates = (name for name, shape in block.items() if shape[:1] == (1,) and families.routes(name, 1, experts))
    return next((name.removesuffix(".weight") for name in gates), "")


def _active_width(linears: Mapping[str, LinearShape]) -> int:
    """The inner size of the MLPs that a token passes through, its experts and one beside them; 0 without experts."""
    routed = sum(s.active * s.into for name, s in linears.items() if s.groups > 1 and name.endswith("down_proj"))
    beside = (s.into for name, s in linears.items() if s.groups == 1 and re.search(r"down_proj|output_linear", name))
    return routed and routed + sum(beside)


def _count_windowed(config: Mapping[str, Any]) -> int | None:
    """Layers with a sliding window, where config.json tells them apart: by name, or every so many without one."""
    if config.get("layer_types"):
        return sum(kind == "sliding_attention" for kind in config["layer_types"])
    num_layers, pattern = config["num_hidden_layers"], config.get("sliding_window_pattern")
    return num_layers - num_layers // pattern if pattern else None


def _read_tensors(
    folder: Path, config: Mapping[str, Any]
) -> tuple[dict[str, TensorHeader], dict[str, StoredNf4], dict[str, StoredMxfp4]]:
    """All tensors by name, those that hold a weight in NF4 or MXFP4 as that weight; and those weights."""
    files = find_weight_files(folder)
    tensors = read_headers(files)
    if not config.get("quantization_config"):
        return tensors, {}, {}
    headers = {path: read_header(path) for path in files}
    (in_nf4, pieces), (in_mxfp4, others) = find_stored_nf4(headers), find_stored_mxfp4(headers)
    tensors = {name: header for name, header in tensors.items() if name not in pieces | others}
    tensors |= {name: weight.header for name, weight in in_nf4.items()}
    tensors |= {name: weight.header for name, weight in in_mxfp4.items()}
    return tensors, in_nf4, in_mxfp4


def _describe_nf4(in_nf4: Mapping[str, StoredNf4], folder: Path) -> Nf4Facts | None:
    """UserError where some weights have double quantization and others have not."""
    kinds = {weight.double_quant for weight in in_nf4.values()}
    if len(kinds) > 1:
        raise UserError(
            "some 4-bit weights have double quantization and others have not",
            where=str(folder),
            fix="use the model's version that is not quantized, with method.name: qlora",
        )
    if not in_nf4:
        return None
    return Nf4Facts(double_quant=kinds.pop(), linears=_in_all_blocks(in_nf4))


def _in_all_blocks(names: Iterable[str]) -> tuple[str, ...]:
    """Of weights in blocks, their names within a block, those that every block with any has."""
    blocks: dict[str, set[str]] = {}
    for name in names:
        if match := BLOCK_TENSOR.search(name):
            blocks.setdefault(match[1], set()).add(match[2].removesuffix(".weight"))
    return tuple(sorted(set.intersection(*blocks.values()))) if blocks else ()


def resize_vocabulary(model: ModelFacts, new_tokens: NewTokens | None) -> ModelFacts:
    """The model's dimensions with rows of embeddings and head for the new tokens."""
    if new_tokens is None or new_tokens.vocab_size == model.vocab_size:
        return model
    rows = (new_tokens.vocab_size - model.vocab_size) * (1 if model.tied_embeddings else 2)
    return model.model_copy(
        update={"vocab_size": new_tokens.vocab_size, "num_parameters": model.num_parameters + rows * model.hidden_size}
    )


def name_in_model(name: str, decoder: str = DECODER) -> str:
    """What transformers calls a tensor of a multimodal model's text, under whichever published name it is stored."""
    usual = decoder == DECODER
    named = TEXT_PREFIX.sub(lambda match: f"model.{match[1] or 'language_model'}." if usual else f"{decoder}.", name)
    return HEAD_PREFIX.sub("", named)


def shares_head(folder: Path, config: Mapping[str, Any]) -> bool:
    """Whether a multimodal model's head is its embeddings: by its files, as parts of its config.json often disagree.

    Tied where no head is stored, and not where one is that differs, which is how transformers loads it. ``config`` of
    the text decides where both are the same.
    """
    files = find_weight_files(folder)
    named = {name_in_model(name): name for name in read_headers(files) if TEXT_TENSOR.search(name)}
    head, embeddings = named.get(HEAD), next((name for new, name in named.items() if new.endswith(EMBEDDINGS)), None)
    if head is None or embeddings is None:
        return head is None
    return is_tied(config) and equal_bytes(files, head, embeddings)


def parameter_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of all parameters of a decoder without weights: embeddings, blocks, last norm, and a head if untied."""
    family = families.find(config)
    embeddings = (config["vocab_size"], config["hidden_size"])
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": embeddings}
    for index in range(config["num_hidden_layers"]):
        block = families.block_shapes(family, config, index)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in block.items()}
    shapes |= families.norm_shapes(family, config, "model.norm")
    return shapes if is_tied(config) else shapes | {HEAD: embeddings}


def norm_elements(block: Iterable[str], config: Mapping[str, Any]) -> int:
    """Elements a token that a block's norms read: hidden_size each, and all heads for the norms of queries and keys."""
    dim, (heads, kv_heads) = families.head_dim(families.find(config), config), families.num_heads(config)
    widths = dict(zip(HEAD_NORMS, (heads * dim, kv_heads * dim), strict=True))
    norms = [_norm_of(name) for name in block if _is_norm(name)]
    return sum(widths.get(norm, config["hidden_size"]) for norm in norms)


def widest_head(config: Mapping[str, Any]) -> int:
    """head_dim of the block with the widest heads: what an attention kernel must support."""
    blocks = [families.config_of_block(config, index) for index in range(config["num_hidden_layers"])]
    own = (families.head_dim(families.find(config), block) for block in blocks)
    return max(config.get("global_head_dim") or 0, *own)


def is_tied(config: Mapping[str, Any]) -> bool:
    return families.is_tied(families.find(config), config)


def _norm_of(name: str) -> str:
    return name.removesuffix(".weight").rsplit(".", 1)[-1]


def _is_norm(name: str) -> bool:
    return "norm" in name and name.endswith(".weight")


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
            why=f"supported are {', '.join(STORED_DTYPES)}",
            fix="use the model's version that is not quantized",
        )
    return STORED_DTYPES[most]
